"""Hidden content never matters, NaN is never hidden, and nothing outside the tensors is read."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import engines
import oracles
import qkv

OURS = engines.EACH
POISON = pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf, 3e38])
DTYPES = engines.each_with(torch.float64, torch.float32, torch.bfloat16, torch.float16)
WIDE_AND_NARROW = engines.each_with(torch.float64, torch.bfloat16)
LENGTH = 150

# pattern, the keys that it hides from every query of the call
PATTERNS: dict[str, tuple[Any, oracles.Rule]] = {
    "key_lengths": (lambda: qkv.key_lengths([100]), oracles.key_lengths(torch.tensor([100]))),
    "causal_padding": (
        lambda: qkv.causal() & qkv.key_lengths([100]),
        oracles.both(oracles.causal(), oracles.key_lengths(torch.tensor([100]))),
    ),
    "strided_padding": (
        lambda: qkv.strided(12) & qkv.key_lengths([100]),
        oracles.both(oracles.strided(12), oracles.key_lengths(torch.tensor([100]))),
    ),
    "fixed_padding": (
        lambda: qkv.fixed(16) & qkv.key_lengths([100]),
        oracles.both(oracles.fixed(16), oracles.key_lengths(torch.tensor([100]))),
    ),
    "prefix": (lambda: qkv.prefix(7), oracles.prefix(7)),
    "columns": (
        lambda: qkv.where(lambda b, h, i, j: j % 3 != 0),
        lambda p: p.j % 3 != 0,
    ),
}  # fmt: skip


def inputs(dtype: torch.dtype = torch.float64, length: int = LENGTH) -> list[Tensor]:
    g = torch.Generator().manual_seed(0)
    return [torch.randn(1, heads, length, 8, generator=g, dtype=torch.float64).to(dtype) for heads in (2, 1, 1)]


def held(poison: float, dtype: torch.dtype) -> float:
    """A poison as a type can hold it."""
    return min(poison, torch.finfo(dtype).max) if math.isfinite(poison) else poison


def run(tensors: list[Tensor], backend: str, live: Tensor | None = None, **options: Any) -> list[Tensor]:
    """Output, lse and the gradients of q, k, v of a loss over the rows `live`."""
    leaves = [x.detach().clone().requires_grad_() for x in tensors]
    out, aux = qkv.attention(*leaves, backend=backend, return_aux=qkv.AuxRequest(lse=True), **options)
    rows = slice(None) if live is None else live
    return [out.detach(), aux.lse.detach(), *torch.autograd.grad(out[:, :, rows].square().sum(), leaves)]


@POISON
@DTYPES
@pytest.mark.parametrize("name", PATTERNS)
def test_content_of_hidden_keys_changes_no_bit(name: str, dtype: torch.dtype, poison: float, backend: str) -> None:
    pattern, rule = PATTERNS[name]
    seen = oracles.dense(rule, (1, 1, LENGTH, LENGTH))[0, 0].any(0)
    assert not seen.all()
    q, k, v = inputs(dtype)
    clean = run([q, k, v], backend, pattern=pattern())
    for where in ("k", "v", "both"):
        dirty = [x.clone() for x in (q, k, v)]
        for index in {"k": (1,), "v": (2,), "both": (1, 2)}[where]:
            dirty[index][:, :, ~seen] = held(poison, dtype)
        got = run(dirty, backend, pattern=pattern())
        for part, a, b in zip(("output", "lse", "dq", "dk", "dv"), clean, got, strict=True):
            assert torch.equal(a, b), f"{part} changes with hidden {where} = {poison}"


@WIDE_AND_NARROW
@POISON
@pytest.mark.parametrize("at", [149, 64, 63, 1])
def test_a_poisoned_key_reaches_only_queries_that_see_it(
    at: int, poison: float, dtype: torch.dtype, backend: str
) -> None:
    clean = run(inputs(dtype), backend, pattern=qkv.causal())
    for index in (1, 2):
        dirty = inputs(dtype)
        dirty[index][:, :, at, 0] = poison
        live = torch.arange(LENGTH) < at
        got = run(dirty, backend, live=None, pattern=qkv.causal())
        assert torch.equal(got[0][:, :, live], clean[0][:, :, live])
        assert torch.equal(got[1][:, :, live], clean[1][:, :, live])
        assert torch.equal(got[2][:, :, live], clean[2][:, :, live]), "dq of rows that do not see it"
        if index == 2 and not math.isfinite(poison):
            assert not got[0][:, :, at:, 0].isfinite().any()


@WIDE_AND_NARROW
@pytest.mark.parametrize("at", [0, 64, 149])
def test_nan_in_a_query_comes_out_in_its_row_only(at: int, dtype: torch.dtype, backend: str) -> None:
    """Row 59 of the bad inputs."""
    for pattern in (None, qkv.causal(), qkv.strided(12)):
        clean = run(inputs(dtype), backend, pattern=pattern)
        dirty = inputs(dtype)
        dirty[0][:, :, at, 3] = math.nan
        got = run(dirty, backend, pattern=pattern)
        others = torch.arange(LENGTH) != at
        assert got[0][:, :, at].isnan().all() and got[1][:, :, at].isnan().all()
        assert torch.equal(got[0][:, :, others], clean[0][:, :, others])
        assert torch.equal(got[1][:, :, others], clean[1][:, :, others])
        assert torch.equal(got[2][:, :, others], clean[2][:, :, others]), "dq of the other rows"


@WIDE_AND_NARROW
def test_all_keys_nan_make_all_rows_nan(dtype: torch.dtype, backend: str) -> None:
    """Row 60 of the bad inputs."""
    q, k, v = inputs(dtype)
    out = qkv.attention(q, torch.full_like(k, math.nan), v, backend=backend)
    assert out.isnan().all()


@DTYPES
def test_nan_in_a_query_that_sees_nothing_stays_zero(dtype: torch.dtype, backend: str) -> None:
    """Row 63: the rows 0 and 1 see no key, whatever they hold; dk and dv do not feel them either."""
    pattern = qkv.causal() - qkv.window(1)
    clean = run(inputs(dtype), backend, pattern=pattern)
    dirty = inputs(dtype)
    dirty[0][:, :, :2] = math.nan
    got = run(dirty, backend, pattern=pattern)
    assert not got[0][:, :, :2].any() and (got[1][:, :, :2] == -math.inf).all() and not got[2][:, :, :2].any()
    for a, b in zip(clean, got, strict=True):
        assert torch.equal(a, b)


UNSEEN = pytest.mark.parametrize(
    "pattern, unseen",
    [("causal()", slice(141, None)), ("block_local(50)", slice(0, 100)), ("strided(12)", slice(141, None))],
)


@WIDE_AND_NARROW
@UNSEEN
@pytest.mark.parametrize("in_loss", [True, False])
def test_a_poisoned_query_reaches_no_gradient_of_keys_that_it_does_not_see(
    pattern: str, unseen: slice, in_loss: bool, dtype: torch.dtype, backend: str
) -> None:
    live = None if in_loss else torch.arange(LENGTH) != 140
    clean = run(inputs(dtype), backend, live, pattern=qkv.parse(pattern))
    dirty = inputs(dtype)
    dirty[0][:, :, 140] = math.nan
    got = run(dirty, backend, live, pattern=qkv.parse(pattern))
    assert torch.equal(got[3][:, :, unseen], clean[3][:, :, unseen]), "dk"
    assert torch.equal(got[4][:, :, unseen], clean[4][:, :, unseen]), "dv"
    others = torch.arange(LENGTH) != 140
    assert torch.equal(got[2][:, :, others], clean[2][:, :, others]), "dq"
    if in_loss:
        assert not got[3][:, :, 140].isfinite().any() and not got[4][:, :, 140].isfinite().any()


@WIDE_AND_NARROW
@POISON
@UNSEEN
def test_a_poisoned_gradient_reaches_only_what_its_row_sees(
    pattern: str, unseen: slice, poison: float, dtype: torch.dtype, backend: str
) -> None:
    """The gradient of the output of query 140 is not finite: only dq of that row and the keys that it sees feel it."""
    grads = []
    for fill in (1.0, poison):
        leaves = [x.requires_grad_() for x in inputs(dtype)]
        out = qkv.attention(*leaves, pattern=qkv.parse(pattern), backend=backend)
        g = torch.ones_like(out)
        g[:, :, 140] = fill
        grads.append(torch.autograd.grad(out, leaves, g))
    others = torch.arange(LENGTH) != 140
    assert torch.equal(grads[0][0][:, :, others], grads[1][0][:, :, others]), "dq"
    assert torch.equal(grads[0][1][:, :, unseen], grads[1][1][:, :, unseen]), "dk"
    assert torch.equal(grads[0][2][:, :, unseen], grads[1][2][:, :, unseen]), "dv"
    assert not torch.equal(grads[0][2], grads[1][2])


@OURS
def test_fully_hidden_call_is_zero_and_asks_about_the_mask(backend: str) -> None:
    with pytest.warns(qkv.errors.InvertedMaskWarning, match="inverted"):
        got = run(inputs(), backend, pattern=qkv.mask(keep=torch.zeros(LENGTH, LENGTH, dtype=torch.bool)))
    assert not any(x.any() for x in (got[0], *got[2:])) and (got[1] == -math.inf).all()


@WIDE_AND_NARROW
@POISON
def test_hidden_by_a_bias_of_minus_infinity(poison: float, dtype: torch.dtype, backend: str) -> None:
    bias = torch.zeros(LENGTH, LENGTH, dtype=dtype)
    bias[:, 90:] = -math.inf
    clean = run(inputs(dtype), backend, bias=bias)
    dirty = inputs(dtype)
    dirty[1][:, :, 90:], dirty[2][:, :, 90:] = poison, poison
    for a, b in zip(clean, run(dirty, backend, bias=bias), strict=True):
        assert torch.equal(a, b)


@OURS
def test_hidden_entries_of_a_bias_do_not_matter(backend: str) -> None:
    """A finite bias at hidden pairs, however large, changes nothing and gets no gradient."""
    bias = torch.randn(LENGTH, LENGTH, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    hidden = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)
    outs, grads = [], []
    for fill in (0.0, 1e300):
        leaf = torch.where(hidden, fill, bias).requires_grad_()
        out = qkv.attention(*inputs(), bias=leaf, pattern=qkv.causal(), backend=backend)
        outs.append(out.detach())
        grads.append(torch.autograd.grad(out.square().sum(), leaf)[0])
    assert torch.equal(*outs) and torch.equal(*grads)
    assert not grads[0][hidden].any() and grads[0][~hidden].any()


@DTYPES
@pytest.mark.parametrize(
    "pattern", ["full()", "causal()", "sliding_window(20)", "strided(12)", "fixed(16)", "dilated(3, 3, dilation=5)"]
)
def test_nothing_outside_the_tensors_is_read(pattern: str, dtype: torch.dtype, backend: str) -> None:
    """NaN on all sides of each tensor, and in the gaps of its strides, gives the bits of zeros there."""
    for length in (1, 63, 67):
        results = []
        for fill in (0.0, math.nan):
            leaves = [haloed(x, fill).requires_grad_() for x in inputs(dtype, length)]
            out = qkv.attention(*leaves, pattern=qkv.parse(pattern), backend=backend)
            results.append([out.detach(), *torch.autograd.grad(out.square().sum(), leaves)])
        for clean, other in zip(*results, strict=True):
            assert torch.equal(clean, other)


def haloed(x: Tensor, fill: float) -> Tensor:
    """The same numbers as a view into a larger buffer, every second row, with `fill` everywhere else."""
    room = x.new_full((x.shape[0] + 2, x.shape[1] + 2, 2 * x.shape[2] + 5, x.shape[3] + 6), fill)
    view = room[1:-1, 1:-1, 3 : 3 + 2 * x.shape[2] : 2, 3:-3]
    view.copy_(x)
    return view.detach()


# What else a call may hold: the options, from leaves of these shapes that want a gradient (after q, k and v).
MORE: dict[str, tuple[Callable[..., dict[str, Any]], list[tuple[int, ...]]]] = {
    "softcap": (lambda: {"softcap": 2.0}, []),
    "dropout": (lambda: {"dropout_p": 0.3, "generator": torch.Generator().manual_seed(1)}, []),
    "sinks": (lambda x: {"sinks": x}, [(2,)]),
    "alibi": (lambda x: {"bias": qkv.alibi(x)}, [(2,)]),
    "relative": (lambda x: {"bias": qkv.relative(x)}, [(2, 41)]),
    "bias": (lambda x: {"bias": x}, [(1, 2, LENGTH, LENGTH)]),
    "bias of keys": (lambda x: {"bias": x}, [(1, 1, 1, LENGTH)]),
    "bias and sinks": (lambda x, y: {"bias": x, "sinks": y, "softcap": 3.0}, [(LENGTH, LENGTH), (2,)]),
}


def run_with(tensors: list[Tensor], more: str, backend: str, fill: float = 1.0, **options: Any) -> list[Tensor]:
    """Output, lse and all gradients; the gradient that comes into row 140 holds `fill`."""
    options_of, shapes = MORE[more]
    g = torch.Generator().manual_seed(5)
    rest = [torch.randn(*shape, generator=g, dtype=torch.float64).to(tensors[0].dtype) for shape in shapes]
    rest = [x.requires_grad_() for x in rest]
    leaves = [*(x.detach().clone().requires_grad_() for x in tensors), *rest]
    options |= options_of(*rest)
    out, aux = qkv.attention(*leaves[:3], backend=backend, return_aux=qkv.AuxRequest(lse=True), **options)
    g = torch.ones_like(out)
    g[:, :, 140] = fill
    return [out.detach(), aux.lse.detach(), *torch.autograd.grad(out, leaves, g)]


def wide_inputs(dtype: torch.dtype) -> list[Tensor]:
    """More than a vector of lanes, and no whole number of them."""
    g = torch.Generator().manual_seed(0)
    shapes = ((1, 2, LENGTH, 37), (1, 1, LENGTH, 37), (1, 1, LENGTH, 70))
    return [torch.randn(*shape, generator=g, dtype=torch.float64).to(dtype) for shape in shapes]


@DTYPES
@pytest.mark.parametrize("more", MORE)
def test_content_of_hidden_keys_changes_no_gradient_of_anything(more: str, dtype: torch.dtype, backend: str) -> None:
    for name in ("causal_padding", "strided_padding", "columns"):
        pattern, rule = PATTERNS[name]
        hidden = ~oracles.dense(rule, (1, 1, LENGTH, LENGTH))[0, 0].any(0)
        for tensors in (inputs(dtype), wide_inputs(dtype)):
            clean = run_with(tensors, more, backend, pattern=pattern())
            for poison in (math.nan, -math.inf):
                for index in (1, 2):
                    tensors[index][:, :, hidden] = poison
                got = run_with(tensors, more, backend, pattern=pattern())
                for n, (a, b) in enumerate(zip(clean, got, strict=True)):
                    assert torch.equal(a, b), f"result {n} changes with hidden {poison} under {name}"


@engines.each_with(torch.float32, torch.bfloat16)
@pytest.mark.parametrize("more", MORE)
def test_a_poisoned_row_stays_alone_whatever_else_the_call_holds(more: str, dtype: torch.dtype, backend: str) -> None:
    """The query of row 140, then the gradient of its output: no other row, and no key that it does not see."""
    others, unseen = torch.arange(LENGTH) != 140, slice(141, None)
    clean = run_with(wide_inputs(dtype), more, backend, pattern=qkv.causal())
    dirty = wide_inputs(dtype)
    dirty[0][:, :, 140] = math.nan
    for got in (
        run_with(dirty, more, backend, pattern=qkv.causal()),
        run_with(wide_inputs(dtype), more, backend, fill=math.inf, pattern=qkv.causal()),
    ):
        for n in (0, 1, 2):
            assert torch.equal(got[n][:, :, others], clean[n][:, :, others]), f"result {n} of the other rows"
        for n in (3, 4):
            assert torch.equal(got[n][:, :, unseen], clean[n][:, :, unseen]), f"result {n} of keys that it does not see"
        if more.startswith("bias"):
            rows = got[5].shape[-2] > 1
            kept = (slice(None), others) if rows else (slice(None), slice(141, None))
            a, b = ((x[5].reshape(-1, LENGTH, LENGTH) if rows else x[5].reshape(1, LENGTH)) for x in (got, clean))
            assert torch.equal(a[kept], b[kept]), "the gradient of the bias"
