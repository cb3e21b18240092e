"""Derivatives of every order and mode: numerical checks in float64, transforms of torch.func, odd ways to ask for a
gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck

import engines
import oracles
import qkv

OURS = engines.ONE_NATIVE
EACH = engines.EACH


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def tensors(
    batch: int = 1, heads: int = 2, groups: int = 1, queries: int = 3, keys: int = 4, width: int = 2
) -> list[Tensor]:
    return [
        normal(batch, heads, queries, width, seed=1),
        normal(batch, groups, keys, width, seed=2),
        normal(batch, groups, keys, width + 1, seed=3),
    ]


# What is asked, and the extra leaves that want a gradient (after q, k and v).
QUESTIONS: dict[str, tuple[Callable[..., dict[str, Any]], list[Tensor]]] = {
    "plain": (dict, []),
    "causal": (lambda: {"pattern": qkv.causal()}, []),
    "strided": (lambda: {"pattern": qkv.strided(2)}, []),
    "fixed": (lambda: {"pattern": qkv.fixed(2)}, []),
    "dilated": (lambda: {"pattern": qkv.dilated(1, 1, dilation=2)}, []),
    "empty_rows": (lambda: {"pattern": qkv.causal() - qkv.window(1)}, []),
    "per_head": (lambda: {"pattern": qkv.per_head([qkv.causal(), qkv.window(1, 1)])}, []),
    "softcap": (lambda: {"softcap": 1.5, "pattern": qkv.causal()}, []),
    "scale": (lambda: {"scale": -0.7}, []),
    "bias": (lambda bias: {"bias": bias}, [normal(1, 2, 3, 4, seed=4)]),
    "bias_of_keys": (lambda bias: {"bias": bias, "pattern": qkv.causal()}, [normal(1, 1, 1, 4, seed=4)]),
    "slopes": (lambda slopes: {"bias": qkv.alibi(slopes), "pattern": qkv.causal()}, [normal(2, seed=5)]),
    "table": (lambda table: {"bias": qkv.relative(table)}, [normal(2, 5, seed=6)]),
    "sinks": (lambda sinks: {"sinks": sinks, "pattern": qkv.causal() - qkv.window(1)}, [normal(2, seed=7)]),
    "bias_and_sinks": (lambda b, s: {"bias": b, "sinks": s, "softcap": 2.0}, [normal(3, 4, seed=8), normal(2, seed=9)]),
    "dropout": (lambda: {"dropout_p": 0.4, "generator": torch.Generator().manual_seed(5)}, []),
    "dropout_strided": (
        lambda: {"dropout_p": 0.4, "generator": torch.Generator().manual_seed(5), "pattern": qkv.strided(2)},
        [],
    ),
}


def call_of(name: str, backend: str, aux: bool = False) -> tuple[Callable[..., Any], list[Tensor]]:
    options, extra = QUESTIONS[name]

    def call(q: Tensor, k: Tensor, v: Tensor, *rest: Tensor) -> Any:
        if not aux:
            return qkv.attention(q, k, v, backend=backend, **options(*rest))
        out, found = qkv.attention(
            q, k, v, backend=backend, return_aux=qkv.AuxRequest(lse=True, weights=True), **options(*rest)
        )
        return out, torch.where(found.lse.isfinite(), found.lse, 0.0), found.weights

    return call, [x.clone().requires_grad_() for x in [*tensors(), *extra]]


@EACH
@pytest.mark.parametrize("name", QUESTIONS)
def test_first_derivatives(name: str, backend: str) -> None:
    call, leaves = call_of(name, backend)
    assert gradcheck(call, leaves, nondet_tol=0.0)


# The native backend leaves second derivatives to plain operations, which all backends share: a few speak for all.
SHARED = {"causal", "strided", "bias", "sinks", "dropout"}


def mostly_shared(*names: str) -> pytest.MarkDecorator:
    pairs = [(name, backend) for backend in engines.TORCH for name in names]
    pairs += [(name, backend) for backend in engines.NATIVE[:1] for name in names if name in SHARED]
    return pytest.mark.parametrize("name, backend", pairs, indirect=["backend"])


@mostly_shared(*QUESTIONS)
def test_second_derivatives(name: str, backend: str) -> None:
    call, leaves = call_of(name, backend)
    assert gradgradcheck(call, leaves, nondet_tol=0.0)


@mostly_shared("plain", "causal", "strided", "fixed", "empty_rows", "bias", "table", "sinks", "softcap", "dropout")
def test_lse_and_weights_are_differentiable(name: str, backend: str) -> None:
    call, leaves = call_of(name, backend, aux=True)
    assert gradcheck(call, leaves, nondet_tol=0.0)
    assert gradgradcheck(call, leaves, nondet_tol=0.0)


@OURS
@pytest.mark.parametrize("name", ["plain", "causal", "strided", "bias", "slopes", "table", "sinks", "softcap"])
def test_forward_mode(name: str, backend: str) -> None:
    call, leaves = call_of(name, backend)
    leaves = [x.detach() for x in leaves]
    tangents = [normal(*x.shape, seed=20 + n) for n, x in enumerate(leaves)]
    out, tangent = torch.func.jvp(call, tuple(leaves), tuple(tangents))
    step = 2.0**-18  # truncation step² = 1.5e-11, rounding 2⁻⁵³ / step = 3e-11
    plus, minus = (call(*(x + sign * step * t for x, t in zip(leaves, tangents, strict=True))) for sign in (1, -1))
    torch.testing.assert_close(tangent, (plus - minus) / (2 * step), rtol=1e-8, atol=1e-8)
    torch.testing.assert_close(out, call(*leaves))


@OURS
def test_forward_over_reverse(backend: str) -> None:
    """The Hessian by jvp of grad equals the one by two backward passes."""
    q, k, v = tensors()

    def loss(x: Tensor) -> Tensor:
        return qkv.attention(x, k, v, pattern=qkv.causal(), backend=backend).square().sum()

    hessian = torch.func.hessian(loss)(q)
    twice = torch.autograd.functional.hessian(loss, q)
    torch.testing.assert_close(hessian, twice, rtol=1e-12, atol=1e-12)
    assert hessian.abs().max() > 1e-3


@OURS
@pytest.mark.parametrize("name", ["plain", "causal", "strided", "bias", "sinks"])
def test_vmap(name: str, backend: str) -> None:
    call, leaves = call_of(name, backend)
    stacked = [torch.stack([x.detach() * (n + 1) for n in range(3)]) for x in leaves]
    got = torch.func.vmap(call)(*stacked)
    want = torch.stack([call(*(x[n] for x in stacked)) for n in range(3)])
    torch.testing.assert_close(got, want, rtol=1e-13, atol=1e-13)
    only_keys = torch.func.vmap(call, in_dims=(None, 0, *([None] * (len(stacked) - 2))))(
        stacked[0][0], stacked[1], *(x[0] for x in stacked[2:])
    )
    torch.testing.assert_close(only_keys[2], call(stacked[0][0], stacked[1][2], *(x[0] for x in stacked[2:])))


@OURS
@pytest.mark.parametrize("name", ["plain", "causal", "bias", "sinks"])
def test_gradients_by_sample(name: str, backend: str) -> None:
    call, leaves = call_of(name, backend)
    stacked = [torch.stack([x.detach() * (n + 1) for n in range(3)]) for x in leaves]
    every = tuple(range(len(stacked)))
    by_sample = torch.func.grad(lambda *x: call(*x).square().sum(), argnums=every)
    got = torch.func.vmap(by_sample)(*stacked)
    for n in range(3):
        for a, b in zip(got, by_sample(*(x[n] for x in stacked)), strict=True):
            torch.testing.assert_close(a[n], b, rtol=1e-12, atol=1e-12)


@EACH
@pytest.mark.parametrize("wanted", [(0,), (1,), (2,), (3,), (4,), (0, 2), (1, 3), (2, 4)])
def test_any_subset_may_want_a_gradient(wanted: tuple[int, ...], backend: str) -> None:
    leaves = [*tensors(), normal(1, 1, 3, 4, seed=4), normal(2, seed=5)]
    for n in wanted:
        leaves[n].requires_grad_()
    q, k, v, bias, sinks = leaves
    out = qkv.attention(q, k, v, bias=bias, sinks=sinks, pattern=qkv.causal(), backend=backend)
    truth = oracles.attend(q, k, v, oracles.dense(oracles.causal(), (1, 2, 3, 4)), bias=bias, sinks=sinks)
    chosen = [leaves[n] for n in wanted]
    for a, b in zip(
        torch.autograd.grad(out.square().sum(), chosen),
        torch.autograd.grad(truth.out.square().sum(), chosen),
        strict=True,
    ):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


@OURS
def test_no_gradient_no_graph(backend: str) -> None:
    q, k, v = tensors()
    assert not qkv.attention(q, k, v, backend=backend).requires_grad
    q.requires_grad_()
    with torch.no_grad():
        assert not qkv.attention(q, k, v, backend=backend).requires_grad


@EACH
@pytest.mark.parametrize("pattern", ["none", "causal", "strided"])
def test_gradient_of_the_output_in_any_layout(pattern: str, backend: str) -> None:
    leaves = [x.requires_grad_() for x in tensors(batch=2, heads=4, groups=2, queries=70, keys=70, width=4)]
    options = {"none": None, "causal": qkv.causal(), "strided": qkv.strided(8)}
    out = qkv.attention(*leaves, pattern=options[pattern], backend=backend)
    g = normal(*out.shape, seed=9)
    forms = [
        g,
        g.transpose(1, 2).contiguous().transpose(1, 2),
        g.transpose(2, 3).contiguous().transpose(2, 3),
        torch.stack([g, g], -1)[..., 0],
    ]
    grads = [torch.autograd.grad(out, leaves, form, retain_graph=True) for form in forms]
    for other in grads[1:]:
        for a, b in zip(grads[0], other, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
    broadcast = torch.autograd.grad(out, leaves, g[:1, :1, :1, :1].expand_as(out), retain_graph=True)
    dense = torch.autograd.grad(out, leaves, g[:1, :1, :1, :1].expand_as(out).contiguous())
    for a, b in zip(broadcast, dense, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


@EACH
def test_expanded_inputs_sum_their_gradients(backend: str) -> None:
    q, k, v = (
        normal(1, 1, 5, 4).requires_grad_(),
        normal(1, 1, 5, 4, seed=1).requires_grad_(),
        normal(2, 3, 5, 4, seed=2),
    )
    wide = [x.expand(2, 3, 5, 4) for x in (q, k)]
    got = torch.autograd.grad(qkv.attention(*wide, v, pattern=qkv.causal(), backend=backend).square().sum(), (q, k))
    truth = oracles.attend(*wide, v, oracles.dense(oracles.causal(), (2, 3, 5, 5)))
    for a, b in zip(got, torch.autograd.grad(truth.out.square().sum(), (q, k)), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


@OURS
def test_one_tensor_in_three_roles(backend: str) -> None:
    x = normal(1, 2, 5, 4).requires_grad_()
    (got,) = torch.autograd.grad(qkv.attention(x, x, x, pattern=qkv.causal(), backend=backend).square().sum(), x)
    (want,) = torch.autograd.grad(
        oracles.attend(x, x, x, oracles.dense(oracles.causal(), (1, 2, 5, 5))).out.square().sum(), x
    )
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


@OURS
def test_changing_an_input_before_backward_never_gives_a_wrong_gradient(backend: str) -> None:
    """Torch notices what was saved and changed; a backend that saved a copy gives the gradient of what it saw."""
    q, k, v = (x.requires_grad_() for x in tensors())
    (want,) = torch.autograd.grad(qkv.attention(q, k, v, backend=backend).square().sum(), q)
    keys = k * 1
    loss = qkv.attention(q, keys, v, backend=backend).square().sum()
    keys.mul_(2)
    try:
        (got,) = torch.autograd.grad(loss, q)
    except RuntimeError as error:
        assert "modified by an inplace operation" in str(error)  # noqa: PT017 - either outcome is right
    else:
        torch.testing.assert_close(got, want)


@OURS
def test_merge_is_differentiable(backend: str) -> None:
    def call(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        parts = [
            qkv.attention(q, k[:, :, s], v[:, :, s], backend=backend, return_aux=qkv.AuxRequest(lse=True))
            for s in (slice(0, 1), slice(1, 4))
        ]
        return qkv.merge([out for out, _ in parts], [aux.lse for _, aux in parts])

    leaves = [x.requires_grad_() for x in tensors()]
    assert gradcheck(call, leaves)
    out, lse = call(*leaves)
    truth = oracles.attend(*leaves, torch.tensor(True))
    torch.testing.assert_close(out, truth.out, rtol=1e-13, atol=1e-13)
    torch.testing.assert_close(lse, truth.lse, rtol=1e-13, atol=1e-13)
