"""The native CPU core: every pattern, forward and backward, at the cost of its tiles."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from qkv.backends.autograd import Wanted, run
from qkv.backends.base import Cost, Gradients, Incoming, Outcome, Packing, Pages, Result, Work, pattern_plan
from qkv.backends.extension import MISSING, native
from qkv.dropout import threshold
from qkv.patterns.axis import TILE, Axis, Ordered
from qkv.patterns.schedule import Part, PatternPlan
from qkv.problem import Problem, Tensors
from qkv.shapes import dtype_name

TYPES = {torch.float32: 0, torch.float64: 1, torch.float16: 2, torch.bfloat16: 3}
KINDS = {"tensor": 1, "alibi": 2, "relative": 3}
WIDEST = 256  # the greatest D and V
LARGE = 1 << 22  # bytes, of two large pages
TOGETHER = 4  # query tiles that share a block of keys, and so its way through memory


class Cpu:
    """What csrc/ computes, for tensors in the processor's memory."""

    name = "cpu"
    unavailable = MISSING

    def reasons_against(self, problem: Problem) -> list[str]:
        reasons = []
        if problem.device.type not in {"cpu", "meta"}:
            reasons.append(f"it runs on the CPU, the tensors are on {problem.device}")
        if problem.dtype not in TYPES:
            reasons.append(f"it takes {', '.join(map(dtype_name, TYPES))}, not {dtype_name(problem.dtype)}")
        if max(problem.head_dim, problem.value_dim) > WIDEST:
            widths = f"D = {problem.head_dim}, V = {problem.value_dim}"
            reasons.append(f"it takes widths up to {WIDEST}, not {widths}")
        return reasons

    def cost(self, problem: Problem) -> Cost:
        plan = pattern_plan(problem)
        rows, size = problem.batch * problem.heads * problem.queries, problem.dtype.itemsize
        computed, widths = plan.tiles * TILE * TILE, problem.head_dim + problem.value_dim
        scratch = torch.get_num_threads() * TOGETHER * TILE * (2 * widths + 6 * TILE) * size
        return Cost(
            pairs=plan.pairs,
            computed=computed,
            flops=2 * computed * widths,
            bytes_moved=(rows * widths + plan.tiles * TILE * widths // TOGETHER) * size,
            peak_bytes=rows * (problem.value_dim + 3) * size + scratch,
        )

    def run(self, problem: Problem, tensors: Tensors, seed: int) -> Result:
        return run(self, problem, tensors, seed)

    def answer(self, work: Work) -> tuple[Outcome, bool]:
        return Prepared.of(work).answer(work)

    def gradients(
        self, work: Work, outcome: Outcome, incoming: Incoming, wanted: Wanted, *, careful: bool
    ) -> Gradients:
        return Prepared.of(work).gradients(work, outcome, incoming, wanted, careful=careful)


@dataclass(frozen=True, slots=True, eq=False)
class Prepared:
    """An engine for one problem, made ready: for tensors of the strides that it was made with."""

    call: native.Call

    @classmethod
    def of(cls, work: Work, output: torch.dtype | None = None) -> Prepared:
        """`output`: its type where it is not that of the inputs, the compute type."""
        return cls(native_call(work, as_the_core_reads(work.problem, work.tensors), output or work.problem.dtype))

    def output(self, tensors: Tensors, output: Tensor, seed: int, state: Tensor | None = None) -> Tensor:
        """The output alone, of q, k and v alone, into (B, H, L, V); `state` (2, B, H, L) takes shift and total."""
        query, key, value = tensors[:3]
        shift, total = 0, 0
        if state is not None:
            shift = state.data_ptr()
            total = shift + state.nbytes // 2
        given = query.data_ptr(), key.data_ptr(), value.data_ptr(), 0, 0
        self.call.forward(torch.get_num_threads(), seed, *given, output.data_ptr(), 0, 0, shift, total, 0)
        return output

    def answer(self, work: Work, output: torch.dtype | None = None) -> tuple[Outcome, bool]:
        """The core looks at each tile that it makes, and makes it again with care where it is not finite.

        `output`: the type that it was made with.
        """
        problem, tensors, seed = work.problem, work.tensors, work.seed
        aux, query = problem.aux, tensors.query
        rows, wide = query.shape[:3], problem.compute_dtype
        made = query.new_empty((*rows, problem.value_dim), dtype=output or problem.dtype)
        lse, shift, total = (query.new_empty(rows, dtype=wide) for _ in range(3))
        max_scores = query.new_empty(rows, dtype=wide) if aux.max_scores else None
        entropy = query.new_empty(rows, dtype=wide) if aux.entropy else None
        every = (*as_the_core_reads(problem, tensors), made, lse, max_scores, shift, total, entropy)
        self.call.forward(torch.get_num_threads(), seed, *map(address, every))  # `every` lives until the core returns
        return Outcome(made, lse, shift, total, max_scores, entropy), False

    def gradients(
        self, work: Work, outcome: Outcome, incoming: Incoming, wanted: Wanted, *, careful: bool
    ) -> Gradients:
        return self.backward(work, (outcome.output, outcome.shift, outcome.total), incoming, wanted)

    def backward(
        self, work: Work, saved: tuple[Tensor, Tensor, Tensor], incoming: Incoming, wanted: Wanted
    ) -> Gradients:
        """Gradients from output, shift and total: the core looks at them when they are whole, and makes them again
        with care where they are not finite.
        """
        problem, tensors, seed = work.problem, work.tensors, work.seed
        wide = problem.compute_dtype
        made = [
            tensor.new_empty(tensor.shape, dtype=dtype) if tensor is not None and want else None
            for tensor, want, dtype in zip(tensors, wanted, (*[problem.dtype] * 3, wide, wide), strict=True)
        ]
        if tensors.bias is not None and made[3] is not None:  # can be large, and fresh pages come filled with zeros
            made[3] = fresh(torch.zeros(tensors.bias.shape, dtype=wide, device=problem.device))
        grad_output = in_memory(incoming.output)
        grad_lse = None if incoming.lse is None else in_memory(incoming.lse).contiguous()
        every = (*as_the_core_reads(problem, tensors), *saved, grad_output, grad_lse, *made)
        self.call.backward(torch.get_num_threads(), seed, grad_output.stride(), *map(address, every))  # as above
        return Gradients(*(g if g is None or t is None else g.to(t.dtype) for g, t in zip(made, tensors, strict=True)))


def fresh(tensor: Tensor) -> Tensor:
    """A tensor that was not written yet: where it is large, the system is asked for large pages."""
    if tensor.nbytes >= LARGE:
        native.prefer_large_pages(tensor.data_ptr(), tensor.nbytes)
    return tensor


def address(tensor: Tensor | None) -> int:
    """Where a tensor's numbers begin; 0 for none. A borrowed pointer: whoever takes it keeps the tensor."""
    return 0 if tensor is None else tensor.data_ptr()


def in_memory(gradient: Tensor) -> Tensor:
    """A gradient whose numbers lie in memory as they are meant: autograd also hands over lazy negatives and zeros."""
    if gradient._is_zerotensor():  # noqa: SLF001 - torch has no public way to ask
        return gradient.clone()
    return gradient.resolve_neg()


def as_the_core_reads(problem: Problem, tensors: Tensors) -> Tensors:
    """Slopes, tables and sinks, which are small, dense and in the compute type; all else as it is."""
    bias, sinks = tensors.bias, tensors.sinks
    if bias is not None and problem.bias != "tensor":
        bias = bias.to(problem.compute_dtype).contiguous()
    if sinks is not None:
        sinks = sinks.to(problem.compute_dtype).contiguous()
    return tensors._replace(bias=bias, sinks=sinks)


def native_call(work: Work, tensors: Tensors, output: torch.dtype) -> native.Call:
    """The problem as the core knows it, for tensors of these strides."""
    problem, bias = work.problem, None
    if tensors.bias is not None and problem.bias is not None:
        size = (*tensors.bias.shape, 1, 1, 1)[:4]
        stride = (*tensors.bias.stride(), 0, 0, 0)[:4]
        stride = tuple(0 if n == 1 else step for n, step in zip(size, stride, strict=True))
        bias = (KINDS[problem.bias], TYPES[tensors.bias.dtype], size, stride)
    origin = problem.origin
    return native.Call(
        native_plan(work.plan),
        TYPES[problem.dtype],
        TYPES[output],
        (
            problem.batch,
            problem.heads,
            problem.kv_heads,
            problem.queries,
            problem.keys,
            problem.head_dim,
            problem.value_dim,
        ),
        tensors.query.stride(),
        _kept_stride(work, tensors.key),
        _kept_stride(work, tensors.value),
        problem.scale,
        _softcap(problem),
        bias,
        threshold(problem.dropout_p),
        list(origin.query),
        list(origin.key),
        origin.batch,
        origin.head,
        *_packed(work.packing),
        *_paged(work.pages),
    )


def _kept_stride(work: Work, tensor: Tensor) -> tuple[int, ...]:
    """The strides of keys or values: batch rows share the pool where these lie in pages."""
    return tensor.stride() if work.pages is None else (0, *tensor.stride()[1:])


def _packed(packing: Packing | None) -> tuple[list[int], list[int]]:
    return ([], []) if packing is None else (list(packing.queries), list(packing.keys))


def _paged(pages: Pages | None) -> tuple[int, int, int]:
    """The table, which the call borrows, its stride, and the size of a page."""
    if pages is None:
        return 0, 0, 1
    assert pages.table.dtype == torch.int32
    assert pages.table.is_contiguous()
    return pages.table.data_ptr(), pages.table.shape[1], pages.size


def _softcap(problem: Problem) -> float:
    """The softcap as its type can hold it, 0 for none; beyond these bounds it changes nothing, or leaves nothing."""
    if problem.softcap is None:
        return 0.0
    return problem.softcap if problem.dtype == torch.float64 else min(max(problem.softcap, 1e-37), 1e37)


def native_plan(plan: PatternPlan) -> native.Plan:
    """The addresses of a plan's arrays, which live as long as the plan."""
    made = plan.beside.get("cpu")
    if made is None:
        batch, heads = plan.index.shape
        members = [[_addresses(part) for part in member.parts] for member in plan.members]
        strides = (0 if batch == 1 else heads), (0 if heads == 1 else 1)
        made = plan.beside["cpu"] = native.Plan(members, _first(plan.index), *strides)
    assert isinstance(made, native.Plan)
    return made


def _first(array: np.ndarray) -> int:
    """Where the numbers of a dense array begin."""
    assert array.flags.c_contiguous
    return array.__array_interface__["data"][0]


def _addresses(part: Part) -> tuple[int, ...]:
    schedule = part.schedule
    return (
        *_slots(part.queries),
        *_slots(part.keys),
        schedule.rows,
        schedule.cols,
        _first(schedule.row_ptr),
        _first(schedule.runs),
        _first(schedule.partial_ptr),
        _first(schedule.partial),
        _first(schedule.masks),
    )


def _slots(axis: Axis) -> tuple[int, int]:
    """The row of each slot as an array's address, 0 in natural order, and how many there are."""
    if not isinstance(axis, Ordered):
        return 0, axis.count
    assert axis.index.dtype == np.int32
    return _first(axis.index), axis.count
