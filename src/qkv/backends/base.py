"""What all backends share: their interface, biases by a rule, and products that keep hidden content hidden."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple, Protocol, TypeAlias

import numpy as np
import torch
from torch import Tensor

from qkv.patterns.leaf import Extent
from qkv.patterns.schedule import PatternPlan
from qkv.problem import Problem, Tensors

NEG_INF = float("-inf")
Rows: TypeAlias = slice | Tensor  # rows of the call along one axis: a range, or their numbers


class Result(NamedTuple):
    """What a backend computes; the last two only where asked for."""

    output: Tensor  # (B, H, L, V), the type of the inputs
    lse: Tensor  # (B, H, L), the compute type
    max_scores: Tensor | None = None  # (B, H, L)
    entropy: Tensor | None = None  # (B, H, L)


class Outcome(NamedTuple):
    """What a forward pass leaves for the backward pass: output (B, H, L, V) in the inputs' type; all others (B, H, L)
    in the compute type.

    A weight is exp(score - shift) / total: lse = shift + ln(total) would lose the sum beside large scores.
    """

    output: Tensor
    lse: Tensor
    shift: Tensor
    total: Tensor
    max_scores: Tensor | None  # the last two are sure to be there only where asked for
    entropy: Tensor | None


class Gradients(NamedTuple):
    """Gradients in the order of `Tensors`; None for what is not there or not wanted."""

    query: Tensor | None
    key: Tensor | None
    value: Tensor | None
    bias: Tensor | None
    sinks: Tensor | None


class Packing(NamedTuple):
    """Batch rows of different length, one after another along L and S: the first row of each, and the end, (B + 1)."""

    queries: tuple[int, ...]
    keys: tuple[int, ...]


class Pages(NamedTuple):
    """Keys and values that lie in pages of one pool, whose rows are (1, G, pages · size)."""

    table: Tensor  # int32 (B, n), contiguous: the page of keys c · size to (c + 1) · size of a batch row
    size: int


class Work(NamedTuple):
    """One call as an engine gets it."""

    problem: Problem
    tensors: Tensors
    plan: PatternPlan
    seed: int
    packing: Packing | None = None  # packed: q (1, H, total L, D) and so on; the problem's L and S are the longest
    pages: Pages | None = None


class Incoming(NamedTuple):
    """The gradients that a backward pass starts from."""

    output: Tensor  # (B, H, L, V)
    lse: Tensor | None  # (B, H, L); None: zero


class Cost(NamedTuple):
    """What a backend would do for a problem, forward; bytes count the tensors it reads, writes and holds."""

    pairs: int  # visible (query, key) pairs over all batch rows and heads
    computed: int  # pairs whose score is computed
    flops: int
    bytes_moved: int
    peak_bytes: int  # beyond inputs


class Backend(Protocol):
    """One way to answer a problem."""

    @property
    def name(self) -> str: ...

    @property
    def unavailable(self) -> str | None:
        """Why it cannot run on this machine at all, or None."""

    def reasons_against(self, problem: Problem) -> list[str]:
        """Everything that keeps it from answering this problem; empty when it can."""

    def cost(self, problem: Problem) -> Cost:
        """An estimate from the plan alone; runs nothing."""

    def run(self, problem: Problem, tensors: Tensors, seed: int) -> Result:
        """Answer the problem."""


def pattern_plan(problem: Problem) -> PatternPlan:
    """The block schedules of a problem, compiled or remembered."""
    return problem.pattern.plan(
        problem.queries,
        problem.keys,
        batch=problem.batch,
        heads=problem.heads,
        query_offset=problem.origin.query,
        key_offset=problem.origin.key,
    )


def visible(problem: Problem, rows: Sequence[int] | None = None) -> Tensor:
    """Which pairs exist, densely: bool (B or 1, H or 1, L or len(rows), S) on the problem's device."""
    origin = problem.origin
    row = np.arange(problem.queries) if rows is None else np.asarray(rows, dtype=np.int64).reshape(-1)
    count = max(len(origin.query), len(origin.key))
    starts = [(origin.query[b % len(origin.query)], origin.key[b % len(origin.key)]) for b in range(count)]
    dense = problem.pattern.allowed(
        np.array([query + row for query, _ in starts]),
        np.array([key + np.arange(problem.keys) for _, key in starts]),
        batch=problem.batch,
        heads=problem.heads,
        extents=[Extent(problem.queries, problem.keys, query, key) for query, key in starts],
    )
    return torch.from_numpy(dense).to(problem.device)


def positions(origin: Sequence[int], count: int, device: torch.device) -> Tensor:
    """Absolute positions, int64 (B or 1, count)."""
    return torch.tensor(origin, dtype=torch.int64, device=device)[:, None] + torch.arange(count, device=device)


def take(tensor: Tensor, axis: int, rows: Rows) -> Tensor:
    """Some rows along an axis; an axis of size 1 that broadcasts stays."""
    if tensor.shape[axis] == 1:
        return tensor
    if isinstance(rows, slice):
        return tensor.narrow(axis, rows.start, rows.stop - rows.start)
    return tensor.index_select(axis, rows)


def rule_bias(problem: Problem, bias: Tensor, i: Tensor, j: Tensor) -> Tensor:
    """The bias that a rule gives: bias (H, ...) of some heads, positions i (B or 1, l) and j (B or 1, s) -> (B or 1,
    H, l, s).
    """
    distance = j[:, None, None, :] - i[:, None, :, None]
    bias = bias.to(problem.compute_dtype)
    if problem.bias == "alibi":
        return -bias[:, None, None] * distance.abs().to(bias.dtype)
    radius = bias.shape[1] // 2
    entry = (distance.clamp(-radius, radius) + radius).squeeze(1)  # (B or 1, l, s)
    return bias[:, entry].transpose(0, 1)


def without_autocast(device: torch.device) -> AbstractContextManager[object]:
    """A block in which operations keep the types they are given, whatever surrounds the call."""
    kind = device.type
    if not torch.amp.is_autocast_available(kind) or not torch.is_autocast_enabled(kind):
        return nullcontext()
    return torch.autocast(kind, enabled=False)


def all_finite(*tensors: Tensor | None) -> bool:
    """Whether no number is NaN or infinite; waits for a GPU."""
    for tensor in tensors:
        if tensor is not None and tensor.numel():
            low, high = tensor.detach().aminmax()
            if not bool(torch.isfinite(low) & torch.isfinite(high)):
                return False
    return True


def finite_part(tensor: Tensor) -> Tensor:
    """The tensor with 0 for every NaN and infinity; no gradient flows to those."""
    return torch.where(torch.isfinite(tensor), tensor, 0.0)


def careful_scores(query: Tensor, key: Tensor) -> Tensor:
    """query · keyᵀ whose gradient carries a NaN or infinity only through pairs whose own gradient is not finite."""
    scores: Tensor = _CarefulScores.apply(query, key)  # type: ignore[no-untyped-call]
    return scores


class _CarefulScores(torch.autograd.Function):
    """The product as it is; in its derivatives a hidden pair, whose gradient is 0, meets finite numbers only."""

    generate_vmap_rule = True

    @staticmethod
    def forward(query: Tensor, key: Tensor) -> Tensor:
        return query @ key.transpose(-1, -2)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        query, key = ctx.saved_tensors
        return grad @ finite_part(key), grad.transpose(-1, -2) @ finite_part(query)

    @staticmethod
    def jvp(ctx: Any, query_tangent: Tensor | None, key_tangent: Tensor | None) -> Tensor:
        query, key = (finite_part(tensor) for tensor in ctx.saved_tensors)
        query_tangent = torch.zeros_like(query) if query_tangent is None else query_tangent
        key_tangent = torch.zeros_like(key) if key_tangent is None else key_tangent
        return query_tangent @ key.transpose(-1, -2) + query @ key_tangent.transpose(-1, -2)


def careful_product(weights: Tensor, values: Tensor, seen: Tensor) -> Tensor:
    """weights · values where a NaN or infinity reaches only the rows that see it: seen (..., l, s) bool.

    A row that sees one comes out as NaN in that column. Gradients keep the promise too, to any order.
    """
    product: Tensor = _CarefulProduct.apply(weights, values, seen)  # type: ignore[no-untyped-call]
    return product


class _CarefulProduct(torch.autograd.Function):
    """The product, and its derivatives as products of the same kind: a NaN in a row's gradient reaches what it sees."""

    generate_vmap_rule = True

    @staticmethod
    def forward(weights: Tensor, values: Tensor, seen: Tensor) -> Tensor:
        bad = (~torch.isfinite(values)).to(weights.dtype)
        hit = (seen.to(weights.dtype) @ bad) > 0
        return (weights @ finite_part(values)).masked_fill(hit, float("nan"))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        weights, values, seen = ctx.saved_tensors
        to_weights = grad @ finite_part(values).transpose(-1, -2)
        to_values = careful_product(weights.transpose(-1, -2), grad, seen.transpose(-1, -2))
        return to_weights, to_values, None

    @staticmethod
    def jvp(ctx: Any, weights_tangent: Tensor | None, values_tangent: Tensor | None, _: None) -> Tensor:
        weights, values, seen = ctx.saved_tensors
        weights_tangent = torch.zeros_like(weights) if weights_tangent is None else weights_tangent
        values_tangent = torch.zeros_like(values) if values_tangent is None else values_tangent
        return careful_product(weights_tangent, values, seen) + careful_product(weights, values_tangent, seen)
