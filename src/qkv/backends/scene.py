"""One part of one rectangle of batch rows and heads: its tensors in slot order, and the scores of a step among them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from qkv.backends.base import NEG_INF, Rows, careful_scores, positions, rule_bias, take
from qkv.backends.walk import Block, Step, Walk
from qkv.dropout import dropout_keep, keep_scale
from qkv.patterns.axis import Axis, Ordered
from qkv.patterns.schedule import Part
from qkv.problem import Problem, Tensors


class Scores(NamedTuple):
    """Scores of one step, (b, h, l, s), -inf where hidden."""

    values: Tensor
    seen: Tensor | None  # with care, which are seen (None: all); without, hidden weights are 0 and meet finite numbers
    capped: Tensor | None  # after softcap, before the bias; only with a softcap


def slot_rows(axis: Axis, device: torch.device) -> Tensor | None:
    """The call's row of each slot, padding as row 0; None in natural order."""
    if not isinstance(axis, Ordered):
        return None
    return torch.from_numpy(np.maximum(axis.index, 0).astype(np.int64)).to(device)


@dataclass(frozen=True, eq=False)
class Scene:
    """What one part of one rectangle works on; H/G query heads share a key head without a copy."""

    problem: Problem
    block: Block
    part: Part
    query: Tensor  # (b, h, query slots, D), in the inputs' type
    key: Tensor  # (b, g, key slots, D)
    value: Tensor  # (b, g, key slots, V)
    bias: Tensor | None  # (b or 1, h or 1, L or 1, S or 1) or one row a head
    query_rows: Tensor | None  # the call's row of each slot; None: the slots are the rows
    key_rows: Tensor | None
    seed: int
    careful: bool

    @classmethod
    def of(cls, problem: Problem, tensors: Tensors, block: Block, part: Part, seed: int, *, careful: bool) -> Scene:
        """Cut the rectangle out, as views, and bring it into the part's order."""
        kv_heads = block.kv_heads(problem.group_size)
        query_rows, key_rows = (slot_rows(axis, problem.device) for axis in (part.queries, part.keys))
        query = take_slots(tensors.query[block.batch, block.heads], query_rows)
        key, value = (take_slots(t[block.batch, kv_heads], key_rows) for t in (tensors.key, tensors.value))
        bias = tensors.bias
        if bias is not None and problem.bias == "tensor":
            bias = take(take(bias, 0, block.batch), 1, block.heads)
        elif bias is not None:
            bias = bias[block.heads]
        return cls(problem, block, part, query, key, value, bias, query_rows, key_rows, seed, careful)

    @property
    def walk(self) -> Walk:
        width = self.query.shape[0] * self.query.shape[1]
        return Walk(self.part, width, self.problem.device, self.problem.compute_dtype)

    @cached_property
    def query_positions(self) -> Tensor:
        """Absolute positions of the query slots, (slots,)."""
        return self._positions(self.problem.origin.query, self.problem.queries, self.query_rows)

    @cached_property
    def key_positions(self) -> Tensor:
        return self._positions(self.problem.origin.key, self.problem.keys, self.key_rows)

    def _positions(self, origin: tuple[int, ...], count: int, rows: Tensor | None) -> Tensor:
        # rows of one rectangle stand at the same positions: plans differ where the origins do
        natural = positions([origin[self.block.batch.start % len(origin)]], count, self.problem.device)[0]
        return natural if rows is None else natural[rows]

    def share(self, tensor: Tensor) -> Tensor:
        """Rows of all query heads of a key head together: (b, h, l, w) -> (b, g, h/g · l, w)."""
        batch, heads, rows, width = tensor.shape
        kv_heads = self.key.shape[1]
        if heads == kv_heads:
            return tensor
        return tensor.reshape(batch, kv_heads, heads // kv_heads * rows, width)

    def shared_seen(self, weights: Tensor, seen: Tensor | None) -> Tensor:
        """Which of a step's weights (b, h, l, s) are seen (None: all), in the shape of `share`."""
        return self.share(torch.ones_like(weights, dtype=torch.bool) if seen is None else seen.expand(weights.shape))

    def unshare(self, tensor: Tensor, rows: int) -> Tensor:
        """The inverse: (b, g, h/g · l, w) -> (b, h, l, w)."""
        return tensor.reshape(tensor.shape[0], self.query.shape[1], rows, tensor.shape[-1])

    def scaled_query(self, rows: slice) -> Tensor:
        """scale · q of some slots in the compute type."""
        return packed(self.query[:, :, rows].to(self.problem.compute_dtype)) * self.problem.scale

    def keys(self, step: Step) -> Tensor:
        return packed(take_slots(self.key, step.keys).to(self.problem.compute_dtype))

    def values(self, step: Step) -> Tensor:
        return packed(take_slots(self.value, step.keys).to(self.problem.compute_dtype))

    def scores(self, query: Tensor, key: Tensor, rows: slice, step: Step) -> Scores:
        """softcap and bias over query · keyᵀ, hidden where the step or the bias says so."""
        shared = self.share(query)
        raw = careful_scores(shared, key) if self.careful else shared @ key.transpose(-1, -2)
        values, capped = self.unshare(raw, query.shape[2]), None
        bias = None if self.bias is None else self.bias_of(rows, step).to(values.dtype)
        seen = self._seen(step, bias) if self.careful else None
        if self.problem.softcap is not None:
            values = values if seen is None else torch.where(seen, values, 0.0)  # tanh' of a hidden NaN is NaN
            values = capped = self.problem.softcap * torch.tanh(values / self.problem.softcap)
        if bias is not None:
            values = values + bias
        if seen is not None:
            values = torch.where(seen, values, NEG_INF)
        elif step.mask is not None:
            values = torch.minimum(values, step.mask.limit)
        return Scores(values, seen, capped)

    def _seen(self, step: Step, bias: Tensor | None) -> Tensor | None:
        """Which pairs of a step are seen, by the pattern and by the bias; None: all."""
        seen = None if step.mask is None else step.mask.seen
        if bias is None:
            return seen
        return bias != NEG_INF if seen is None else seen & (bias != NEG_INF)

    def bias_of(self, rows: slice, step: Step) -> Tensor:
        """The bias of a step, broadcasting to (b, h, l, s)."""
        assert self.bias is not None
        if self.problem.bias == "tensor":
            across = take(self.bias, 2, self.call_rows(rows))
            return take(across, 3, self.call_keys(step))
        return rule_bias(self.problem, self.bias, self.query_positions[None, rows], self.key_positions[None, step.keys])

    def call_rows(self, rows: slice) -> Rows:
        return rows if self.query_rows is None else self.query_rows[rows]

    def call_keys(self, step: Step) -> Rows:
        return step.keys if self.key_rows is None else self.key_rows[step.keys]

    def kept(self, rows: slice, step: Step) -> Tensor:
        """What dropout multiplies the weights of a step with, (b, h, l, s)."""
        origin, block, device = self.problem.origin, self.block, self.problem.device
        keep = dropout_keep(
            self.seed,
            self.problem.dropout_p,
            origin.batch + torch.arange(block.batch.start, block.batch.stop, device=device),
            origin.head + torch.arange(block.heads.start, block.heads.stop, device=device),
            self.query_positions[rows],
            self.key_positions[step.keys],
        )
        return keep.to(self.problem.compute_dtype) * keep_scale(self.problem.dropout_p)


def packed(tensor: Tensor) -> Tensor:
    """The same numbers with rows one after the other, so that bits do not depend on the caller's strides."""
    in_rows = tensor.stride(-1) == 1 and tensor.stride(-2) == tensor.shape[-1]
    return tensor if in_rows else tensor.contiguous()


def take_slots(tensor: Tensor, slots: Rows | None) -> Tensor:
    """Some slots of (b, heads, slots, width), None for all: a view of a range, a copy of scattered ones."""
    if slots is None:
        return tensor
    return tensor[:, :, slots] if isinstance(slots, slice) else tensor.index_select(2, slots)
