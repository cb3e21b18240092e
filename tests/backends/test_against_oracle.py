"""A covering sweep: every backend against the oracle; output, aux, gradients, each element in its rounding bound."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

import budgets
import oracles
import qkv
from sweep import COUNT, Example, Sizes, bias_value, case_of, covering, dense_bias, request


def ask(
    case: Example, leaves: list[Tensor], bias: Tensor | None, sinks: Tensor | None, number: int, backend: str
) -> Any:
    tensors = [x.transpose(1, 2) for x in leaves] if case.pick["strides"] == "blhd" else leaves
    options = dict(case.options)
    if case.bias is not None and bias is not None:
        options["bias"] = bias_value(case.bias[0], bias)
    if case.pick["dropout"]:
        options |= {"dropout_p": case.pick["dropout"], "generator": torch.Generator().manual_seed(number)}
    if case.pick["strides"] == "blhd":
        options["layout"] = "BLHD"
    out, aux = qkv.attention(
        *tensors, **options, sinks=sinks, backend=backend, return_aux=request(case.pick, case.size)
    )
    return (out.transpose(1, 2) if case.pick["strides"] == "blhd" else out), aux


def judge(name: str, got: Tensor, want: Tensor, bound: Tensor) -> None:
    """Each element inside its bound; the same infinities."""
    got, want = got.detach().cpu().double(), want.detach()
    assert got.shape == want.shape, f"{name}: shape {tuple(got.shape)}, expected {tuple(want.shape)}"
    same_infinity = got == want
    error = torch.where(same_infinity, 0.0, (got - want).abs())
    worst = float((error / bound.clamp_min(1e-320)).max()) if error.numel() else 0.0
    assert bool((error <= bound).all()), f"{name}: error is {worst:.3g} times its bound"


def judge_aux(case: Example, aux: Any, truth: oracles.Truth, bound: budgets.Budget) -> None:
    judge("lse", aux.lse, truth.lse, bound.lse)
    judge("max_scores", aux.max_scores, truth.max_scores, bound.max_scores)
    judge("entropy", aux.entropy, truth.entropy, bound.entropy)
    if case.pick["weights"] == "top_k":
        judge_top(aux.top_k, truth.weights.detach(), bound.weights, case.size) if case.size.keys else None
        return
    if aux.weights is None:
        assert request(case.pick, case.size).weights is False
        return
    dtype, want = aux.weights.dtype, truth.weights.detach()
    limit = bound.weights + rounding(dtype) * want + budgets.floor_of(dtype)
    if case.pick["weights"] == "mean":
        limit = limit.mean(1) + (case.size.heads + 1) * budgets.constants(case.call.q.dtype)[0] * want.mean(1)
        want = want.mean(1)
    elif case.pick["weights"] in ("rows", "row"):
        rows = request(case.pick, case.size).weights
        want, limit = want[:, :, rows], limit[:, :, rows]
    judge("weights", aux.weights, want, limit)


def rounding(dtype: torch.dtype) -> float:
    """What storing a number in this type costs beyond its computation."""
    return budgets.ROUNDOFF[dtype] if dtype in (torch.float16, torch.bfloat16) else 0.0


def judge_top(top: Any, weights: Tensor, bound: Tensor, size: Sizes) -> None:
    """Sorted values differ by no more than the largest difference of any; the indices lead to such values."""
    count = min(3, size.keys)
    want = weights.topk(count, -1).values
    limit = bound.amax(-1, keepdim=True) + rounding(top.values.dtype) * want + budgets.floor_of(top.values.dtype)
    judge("top_k", top.values, want, limit)
    judge("top_k at its indices", weights.gather(-1, top.indices.cpu()), want, 2 * limit)
    ordered = top.indices.sort(-1).values
    assert bool((ordered[..., 1:] > ordered[..., :-1]).all()), "top_k: an index comes twice"
    assert bool((top.values[..., 1:] <= top.values[..., :-1]).all()), "top_k: not sorted"


def judge_gradients(
    case: Example, number: int, backend: str, leaves: list[Tensor], bias: Tensor | None, sinks: Tensor | None
) -> None:
    wanted = [x.requires_grad_() for x in [*leaves, bias, sinks] if x is not None]
    out, aux = ask(case, leaves, bias, sinks, number, backend)
    generator = torch.Generator().manual_seed(number)
    grad_out = torch.randn(out.shape, generator=generator, dtype=torch.float64).to(out.dtype)
    live = aux.lse.detach().cpu().isfinite()
    grad_lse = torch.where(
        live, torch.randn(live.shape, generator=generator, dtype=torch.float64).to(aux.lse.dtype), 0.0
    )
    got = torch.autograd.grad([out, aux.lse], wanted, [grad_out.to(out.device), grad_lse.to(out.device)])

    exact = [x.detach().cpu().double().requires_grad_() for x in wanted]
    rest = exact[3:]
    dense = dense_bias(case.bias[0], rest[0], case.size, case.offset) if case.bias is not None else None
    call = case.call._replace(
        q=exact[0], k=exact[1], v=exact[2], bias=dense, sinks=exact[-1] if sinks is not None else None
    )
    truth = call.truth()
    want = torch.autograd.grad([truth.out, truth.lse], exact, [grad_out.double(), grad_lse.double()])
    found, summed = budgets.backward(call, truth, out.dtype, grad_out, grad_lse)
    if case.bias is not None:
        found["bias"] = bias_bound(case, rest[0], summed)
    names = ["q", "k", "v", *(["bias"] if bias is not None else []), *(["sinks"] if sinks is not None else [])]
    for name, leaf, mine, true in zip(names, wanted, got, want, strict=True):
        stored = rounding(leaf.dtype) * true.abs() if name in ("bias", "sinks") else 0.0
        judge(f"gradient of {name}", mine, true, found[name] + stored + budgets.floor_of(leaf.dtype))


def bias_bound(case: Example, leaf: Tensor, summed: Callable[..., Tensor]) -> Tensor:
    """The budget of the gradient of a bias leaf: sums over the axes along which it was broadcast."""
    assert case.bias is not None
    kind, size = case.bias[0], case.size
    if kind == "alibi":
        far = oracles.distance(size, case.offset).abs().double()
        return summed(lambda x: (x * far).sum((0, 2, 3)), size.batch * size.queries * size.keys)
    if kind == "relative":
        entry = ((-oracles.distance(size, case.offset)).clamp(-3, 3) + 3).expand(size.batch, 1, -1, -1)
        hot = torch.nn.functional.one_hot(entry, 7).double()
        return summed(lambda x: torch.einsum("bhls,bxlsr->hr", x, hot), hot.sum((0, 1, 2, 3)))
    shape = (1,) * (4 - leaf.ndim) + tuple(leaf.shape)
    n = max(size.batch * size.heads * size.queries * size.keys, 1) / max(leaf.numel(), 1)
    return summed(lambda x: x.sum_to_size(shape).reshape(leaf.shape), n)


def check(number: int, backend: str, device: torch.device, gradients: bool) -> None:
    case = case_of(number)
    truth = case.call.truth()
    bound = budgets.forward(case.call, truth, case.call.q.dtype)
    if not bound.small:  # first order is not enough in this type: the same question in float64
        case = case_of(number, double=True)
        truth = case.call.truth()
        bound = budgets.forward(case.call, truth, torch.float64)
    leaves = [on(x, device) for x in case.tensors]
    bias = None if case.bias is None else on(case.bias[1], device)
    sinks = None if case.call.sinks is None else on(case.call.sinks, device)
    out, aux = ask(case, leaves, bias, sinks, number, backend)
    assert out.dtype == case.call.q.dtype
    judge("output", out, truth.out, bound.out)
    judge_aux(case, aux, truth, bound)
    if gradients:
        judge_gradients(case, number, backend, leaves, bias, sinks)


def on(x: Tensor, device: torch.device) -> Tensor:
    """A detached tensor on a device; on the CPU with its strides."""
    return x.detach() if device.type == "cpu" else x.detach().to(device)


FAILURES = (AssertionError, ArithmeticError, LookupError, RuntimeError, TypeError, ValueError, qkv.errors.QkvError)


@contextmanager
def naming(backend: str, number: int) -> Iterator[None]:
    """Failures tell the integer that rebuilds the case, and what was drawn."""
    try:
        yield
    except FAILURES as error:
        drawn = ", ".join(f"{key}={value}" for key, value in case_of(number).pick.items())
        text = f"{backend}, case_of({number}): {drawn}: {type(error).__name__}: {error}"
        raise AssertionError(text) from error


@pytest.mark.filterwarnings("ignore:.*inverted")
@pytest.mark.parametrize("backend", ["reference", "blockwise"])
@pytest.mark.parametrize("index", range(COUNT))
def test_case(index: int, backend: str, device: torch.device) -> None:
    number = covering(COUNT)[0][index]
    with naming(backend, number):
        check(number, backend, device, gradients=index % 2 == 0)


def test_cases_cover_nearly_all_pairs_of_axis_values() -> None:
    """All of them would take a case for each pair of a pattern and a length alone."""
    assert covering(COUNT)[1] > 0.94


def check_sdpa(number: int) -> bool:
    """Output and gradients of torch's own kernels within the bounds; False where the backend refuses."""
    case = case_of(number, bare=True)
    truth = case.call.truth()
    if not budgets.forward(case.call, truth, case.call.q.dtype).small:
        case = case_of(number, double=True, bare=True)
        truth = case.call.truth()
    dtype = case.call.q.dtype
    options = dict(case.options) | ({} if case.bias is None else {"bias": bias_value(*case.bias)})
    leaves = [x.detach().requires_grad_() for x in case.tensors]
    try:
        out = qkv.attention(*leaves, **options, backend="sdpa")
    except qkv.errors.UnsupportedError:
        return False
    judge("output", out, truth.out, budgets.forward(case.call, truth, dtype, narrow=True).out)
    if dtype in (torch.float64, torch.float32):
        g = torch.randn(out.shape, generator=torch.Generator().manual_seed(number), dtype=torch.float64).to(dtype)
        exact = [x.detach().double().requires_grad_() for x in leaves]
        call = case.call._replace(q=exact[0], k=exact[1], v=exact[2])
        truth = call.truth()
        found, _ = budgets.backward(call, truth, dtype, g)
        wanted = torch.autograd.grad(truth.out, exact, g.double())
        for name, got, want in zip("qkv", torch.autograd.grad(out, leaves, g), wanted, strict=True):
            judge(f"gradient of {name}", got, want, found[name])
    return True


@pytest.mark.filterwarnings("ignore:.*inverted")
def test_sdpa_agrees_wherever_it_does_not_refuse() -> None:
    answered = 0
    for number in covering(COUNT)[0][::2]:
        with naming("sdpa, bare", number):
            answered += check_sdpa(number)
    assert answered > COUNT // 8


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:.*inverted")
@pytest.mark.parametrize("backend", ["reference", "blockwise"])
@pytest.mark.parametrize("chunk", range(48))
def test_many_cases(chunk: int, backend: str, device: torch.device) -> None:
    for number in range(10**6 + 100 * chunk, 10**6 + 100 * (chunk + 1)):
        with naming(backend, number):
            check(number, backend, device, gradients=number % 2 == 0)
