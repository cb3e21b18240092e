"""A case of a sweep and what its answer must be: `exam_of` computes truth and bounds once, `sit` lets a backend answer
and judges output, aux and gradients element by element.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

import budgets
import engines
import oracles
import qkv
from sweep import Example, Sizes, bias_value, case_of, dense_bias, request

CPU = torch.device("cpu")


class Gradients(NamedTuple):
    """What is asked of a backward pass, and its truth, by the names of the leaves."""

    output: Tensor  # the gradients that come in
    lse: Tensor
    truth: dict[str, Tensor]
    bounds: dict[str, Tensor]


class Exam(NamedTuple):
    number: int
    case: Example
    call: budgets.Call  # in float64, of leaves that can want a gradient
    truth: oracles.Truth
    bound: budgets.Budget
    gradients: Gradients | None

    def under(self, *, cast: bool = False, wide: bool = False) -> Exam:
        """The same exam with the bounds of an engine that casts weights to 16 bits, or gives a wide output."""
        dtype = self.case.call.q.dtype
        how = {"output": budgets.compute_type(dtype) if wide else None, "cast": cast and dtype == torch.bfloat16}
        asked = self.gradients
        if asked is not None:
            asked = asked._replace(bounds=gradient_bounds(self.case, self.call, self.truth, asked, how))
        return self._replace(bound=budgets.forward(self.call, self.truth, dtype, **how), gradients=asked)


class Finding(NamedTuple):
    """One result beside its truth."""

    name: str
    got: Tensor
    want: Tensor
    bound: Tensor

    def worst(self) -> float:
        """The largest error in units of its bound; the same infinities are no error."""
        got, want = self.got.detach().cpu().double(), self.want.detach()
        error = torch.where(got == want, 0.0, (got - want).abs() / self.bound.clamp_min(1e-320))
        return float(error.nan_to_num(nan=oracles.INF).max()) if error.numel() else 0.0


def judge(name: str, got: Tensor, want: Tensor, bound: Tensor) -> None:
    """Each element inside its bound; the same infinities."""
    assert got.shape == want.shape, f"{name}: shape {tuple(got.shape)}, expected {tuple(want.shape)}"
    worst = Finding(name, got, want, bound.expand(want.shape)).worst()
    assert worst <= 1, f"{name}: error is {worst:.3g} times its bound"


def leaves_of(case: Example) -> dict[str, Tensor]:
    """The tensors of a call that can want a gradient."""
    found = dict(zip("qkv", case.tensors, strict=True))
    found |= {} if case.bias is None else {"bias": case.bias[1]}
    return found | ({} if case.call.sinks is None else {"sinks": case.call.sinks})


def wanted_of(case: Example, leaves: dict[str, Tensor]) -> list[str]:
    """Which of them do."""
    return [name for name in case.pick.get("wanted", "").split() if name in leaves] or list(leaves)


def exam_of(
    number: int, table: str = "shared", *, gradients: bool = True, dtype: torch.dtype | None = None, bare: bool = False
) -> Exam:
    """The exam of a case, in float64 where first-order bounds do not hold in its own type."""
    for kind in (dtype, torch.float64):
        case = case_of(number, table, kind, bare)
        exact = {name: x.detach().double() for name, x in leaves_of(case).items()}
        for name in wanted_of(case, exact) if gradients else ():
            exact[name].requires_grad_()
        dense = dense_bias(case.bias[0], exact["bias"], case.size, case.offset) if case.bias is not None else None
        call = case.call._replace(q=exact["q"], k=exact["k"], v=exact["v"], bias=dense, sinks=exact.get("sinks"))
        truth = call.truth()
        bound = budgets.forward(call, truth, case.call.q.dtype)
        if bound.small:
            break
    asked = gradients_of(number, case, exact, call, truth) if gradients else None
    return Exam(number, case, call, oracles.Truth(*(x.detach() for x in truth)), bound, asked)


def gradients_of(
    number: int, case: Example, exact: dict[str, Tensor], call: budgets.Call, truth: oracles.Truth
) -> Gradients:
    names = wanted_of(case, leaves_of(case))
    dtype, generator = case.call.q.dtype, torch.Generator().manual_seed(number)
    output = torch.randn(truth.out.shape, generator=generator, dtype=torch.float64).to(dtype)
    lse = torch.randn(truth.lse.shape, generator=generator, dtype=torch.float64).to(budgets.compute_type(dtype))
    lse = torch.where(truth.lse.isfinite(), lse, 0.0)
    outputs = [(x, g.double()) for x, g in ((truth.out, output), (truth.lse, lse)) if x.requires_grad]
    inputs = [exact[name] for name in names]
    found = torch.autograd.grad([x for x, _ in outputs], inputs, [g for _, g in outputs], allow_unused=True)
    want = [torch.zeros_like(x) if g is None else g for x, g in zip(inputs, found, strict=True)]
    asked = Gradients(output, lse, dict(zip(names, want, strict=True)), {})
    return asked._replace(bounds=gradient_bounds(case, call, truth, asked, {}))


def gradient_bounds(
    case: Example, call: budgets.Call, truth: oracles.Truth, asked: Gradients, how: dict[str, Any]
) -> dict[str, Tensor]:
    """The bounds of the gradients that are asked for; how: as `budgets.backward` takes it."""
    leaves, dtype = leaves_of(case), case.call.q.dtype
    bounds, summed = budgets.backward(call, truth, dtype, asked.output, asked.lse, **how)
    if case.bias is not None:
        bounds["bias"] = bias_bound(case, leaves["bias"], summed)
    for name, true in asked.truth.items():
        stored = rounding(leaves[name].dtype, dtype) * true.abs() if name in {"bias", "sinks"} else 0.0
        bounds[name] = bounds[name] + stored + budgets.floor_of(leaves[name].dtype)
    return bounds


def bias_bound(case: Example, leaf: Tensor, summed: Callable[..., Tensor]) -> Tensor:
    """The budget of the gradient of a bias leaf: sums over the axes along which it was broadcast."""
    assert case.bias is not None
    kind, size = case.bias[0], case.size
    if kind.startswith("alibi"):
        far = oracles.distance(size, case.offset).abs().double()
        return summed(lambda x: (x * far).sum((0, 2, 3)), size.batch * size.queries * size.keys)
    if kind.startswith("relative"):
        width = leaf.shape[1]
        entry = (-oracles.distance(size, case.offset)).clamp(-(width // 2), width // 2) + width // 2
        entry = entry.expand(size.batch, size.heads, -1, -1) + width * torch.arange(size.heads)[:, None, None]
        count = torch.bincount(entry.flatten(), minlength=leaf.numel()).reshape(leaf.shape)

        def by_entry(x: Tensor) -> Tensor:
            return x.new_zeros(leaf.numel()).index_add_(0, entry.flatten(), x.flatten()).reshape(leaf.shape)

        return summed(by_entry, count)
    shape = (1,) * (4 - leaf.ndim) + tuple(leaf.shape)
    n, more = max(size.batch * size.heads * size.queries * size.keys, 1) / max(leaf.numel(), 1), 0.0
    if kind == "expanded":  # torch adds up what was rounded to the type of the bias
        more = n * budgets.floor_of(leaf.dtype)
        n += 2 * budgets.ROUNDOFF[leaf.dtype] / budgets.ROUNDOFF[budgets.compute_type(leaf.dtype)]
    return summed(lambda x: x.sum_to_size(shape).reshape(leaf.shape), n) + more


def ask(case: Example, leaves: dict[str, Tensor], number: int, backend: str) -> Any:
    """Output and aux; the output in the order (B, H, L, V)."""
    turned = case.pick["strides"] == "blhd"
    tensors = [leaves[name].transpose(1, 2) if turned else leaves[name] for name in "qkv"]
    options = dict(case.options) | ({"layout": "BLHD"} if turned else {})
    if case.bias is not None:
        options["bias"] = bias_value(case.bias[0], leaves["bias"], case.size)
    if case.pick["dropout"]:
        options |= {"dropout_p": case.pick["dropout"], "generator": torch.Generator().manual_seed(number)}
    out, aux = qkv.attention(
        *tensors,
        **options,
        sinks=leaves.get("sinks"),
        backend=backend,
        return_aux=request(case.pick, case.size),
    )
    return (out.transpose(1, 2) if turned else out), aux


@contextmanager
def threads(count: int) -> Iterator[None]:
    """As many threads inside the block."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def on(x: Tensor, device: torch.device) -> Tensor:
    """A detached tensor on a device; on the CPU with its strides."""
    return x.detach() if device.type == "cpu" else x.detach().to(device)


def answers(exam: Exam, backend: str, device: torch.device = CPU) -> tuple[Tensor, Any, list[Finding]]:
    """Output, aux, and the gradients beside their truth."""
    case, asked = exam.case, exam.gradients
    leaves = {name: on(x, device) for name, x in leaves_of(case).items()}
    with threads(case.pick.get("threads", 1)):
        if asked is None:
            return *ask(case, leaves, exam.number, backend), []
        for name in asked.truth:
            leaves[name].requires_grad_()
        out, aux = ask(case, leaves, exam.number, backend)
        linked = [(x, g) for x, g in ((out, asked.output), (aux.lse, asked.lse)) if x.requires_grad]
        wanted = [leaves[name] for name in asked.truth]
        grads = [g.to(device, x.dtype) for x, g in linked]
        got = torch.autograd.grad([x for x, _ in linked], wanted, grads, allow_unused=True)
    got = [torch.zeros_like(x) if g is None else g for x, g in zip(wanted, got, strict=True)]
    pairs = zip(asked.truth.items(), got, strict=True)
    found = [Finding(f"gradient of {name}", g, true, asked.bounds[name]) for (name, true), g in pairs]
    return out, aux, found


def outputs_alone(case: Example, leaves: dict[str, Tensor], backend: str) -> list[Tensor]:
    """The output of a call that asks for nothing else, and of the same call once it is known; none where options or
    dropout say more than that.
    """
    if case.bias is not None or case.call.sinks is not None or case.pick["dropout"]:
        return []
    turned = case.pick["strides"] == "blhd"
    tensors = [leaves[name].transpose(1, 2) if turned else leaves[name] for name in "qkv"]
    options = dict(case.options) | ({"layout": "BLHD"} if turned else {})
    found = [qkv.attention(*tensors, **options, backend=backend) for _ in "12"]
    return [out.transpose(1, 2) if turned else out for out in found]


def sit(exam: Exam, backend: str, device: torch.device = CPU) -> tuple[Tensor, Any]:
    """Let a backend answer and judge what it says; its output and aux."""
    if backend == "cpu" and engines.casts(exam.case.call.q.dtype):
        exam = exam.under(cast=True)
    out, aux, gradients = answers(exam, backend, device)
    assert out.dtype == exam.case.call.q.dtype
    if backend == "cpu":
        alone = outputs_alone(exam.case, leaves_of(exam.case), backend)
        assert all(torch.equal(out, other) for other in alone), "other bits where nothing but the output is asked for"
    judge_all(exam, out, aux, gradients)
    return out, aux


def sit_twice(exam: Exam, backend: str) -> None:
    """Judge what the native core answers, also before the output is rounded to 16 bits, and how it is rounded."""
    cast = engines.casts(exam.case.call.q.dtype)
    out, aux = sit(exam, backend)
    with engines.widened():
        wide = exam.under(cast=cast, wide=True)
        unrounded, others, gradients = answers(wide, backend)
    assert unrounded.dtype == budgets.compute_type(out.dtype)
    judge_all(wide, unrounded, others, gradients)
    assert same_bits(out, unrounded.to(out.dtype)), "the output is not the unrounded one, rounded to nearest"
    for name in ("lse", "max_scores", "entropy"):
        assert same_bits(getattr(aux, name), getattr(others, name)), f"{name} depends on the type of the output"


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Whether all numbers are the same, NaN equal to NaN, and the sign of zeros."""
    whole = {2: torch.int16, 4: torch.int32, 8: torch.int64}[a.itemsize]
    a, b = (torch.where(x.isnan(), 0.0, x.detach()).contiguous().view(whole) for x in (a, b))
    return torch.equal(a, b)


def judge_all(exam: Exam, out: Tensor, aux: Any, gradients: list[Finding]) -> None:
    judge("output", out, exam.truth.out, exam.bound.out)
    judge_aux(exam, aux)
    for found in gradients:
        judge(*found)


def judge_aux(exam: Exam, aux: Any) -> None:
    case, truth, bound = exam.case, exam.truth, exam.bound
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
    elif case.pick["weights"] in {"rows", "row"}:
        rows = request(case.pick, case.size).weights
        want, limit = want[:, :, rows], limit[:, :, rows]
    judge("weights", aux.weights, want, limit)


def rounding(dtype: torch.dtype, inputs: torch.dtype = torch.float32) -> float:
    """What storing a number in this type costs beyond its computation."""
    wide = budgets.ROUNDOFF[budgets.compute_type(inputs)]
    return budgets.ROUNDOFF[dtype] if budgets.ROUNDOFF[dtype] > wide else 0.0


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


FAILURES = (AssertionError, ArithmeticError, LookupError, RuntimeError, TypeError, ValueError, qkv.errors.QkvError)


def drawn(case: Example) -> str:
    return ", ".join(f"{key}={value}" for key, value in case.pick.items())


@contextmanager
def naming(backend: str, number: int, table: str = "shared") -> Iterator[None]:
    """Failures tell the command that runs the case alone, and what was drawn."""
    try:
        yield
    except FAILURES as error:
        what = f"python tests/replay.py {number} --table {table} --backend {backend}"
        text = f"{what}: {type(error).__name__}: {error}; {drawn(case_of(number, table))}"
        raise AssertionError(text) from error
