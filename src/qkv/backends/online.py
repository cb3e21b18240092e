"""Attention over a block schedule by the online softmax, part after part into one state a row, so that merging parts
is nothing special: blockwise runs it, and every backend of ours is differentiated through it where its own gradients
do not reach.

Every operation makes a new tensor or fills one just made, so that plain autograd can differentiate it as often as
asked.
Source: Milakov, Gimelshein, "Online normalizer calculation for softmax" (2018); Rabe, Staats (2021).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from qkv.backends.base import NEG_INF, Outcome, careful_product
from qkv.backends.scene import Scene
from qkv.backends.walk import Block, Group, rectangles
from qkv.patterns.axis import ROW
from qkv.patterns.schedule import PatternPlan
from qkv.problem import Problem, Tensors

LOG2_E = 1.4426950408889634
Record = TypeVar("Record", Outcome, "State")


class State(NamedTuple):
    """Of each row: the greatest score so far, and relative to it the sum of weights and the sums of weights · V.

    Where the entropy is asked for, one more column of the output holds the sum of weights · scores.
    """

    top: Tensor  # (b, h, l), a constant for differentiation
    total: Tensor  # (b, h, l)
    output: Tensor  # (b, h, l, V or V + 1)

    def rows(self, rows: slice) -> State:
        return State(*(part[:, :, rows] for part in self))


def forward(problem: Problem, tensors: Tensors, plan: PatternPlan, seed: int, *, careful: bool) -> Outcome:
    """Attention of the whole call, rectangle by rectangle."""
    strips = []
    for strip in rectangles(plan, problem.group_size):
        pieces = [_rectangle(problem, tensors, plan, block, seed, careful=careful) for block in strip]
        strips.append(_join(pieces, 1))
    if strips:
        return _join(strips, 0)
    nothing = Block(slice(0, problem.batch), slice(0, problem.heads), 0)
    return _finish(problem, _unseen(problem, tensors, nothing, problem.queries), None)


def _join(pieces: Sequence[Record], axis: int) -> Record:
    """Records of tensors joined along an axis, field by field."""
    if len(pieces) == 1:
        return pieces[0]
    fields = (None if parts[0] is None else torch.cat(parts, dim=axis) for parts in zip(*pieces, strict=True))
    return type(pieces[0])(*fields)  # type: ignore[arg-type]


def _rectangle(
    problem: Problem, tensors: Tensors, plan: PatternPlan, block: Block, seed: int, *, careful: bool
) -> Outcome:
    state = None
    for part in plan.members[block.member].parts:
        scene = Scene.of(problem, tensors, block, part, seed, careful=careful)
        state = _attend(scene, state, _unseen(problem, tensors, block, 1))
    if state is None:
        state = _unseen(problem, tensors, block, problem.queries)
    return _finish(problem, state, None if tensors.sinks is None else tensors.sinks[block.heads])


def _unseen(problem: Problem, tensors: Tensors, block: Block, rows: int) -> State:
    """The state of rows that have seen nothing yet."""
    shape = (block.batch.stop - block.batch.start, block.heads.stop - block.heads.start, rows)
    zero = tensors.query.new_zeros(shape, dtype=problem.compute_dtype)
    return State(zero + NEG_INF, zero, zero.new_zeros((*shape, problem.value_dim + problem.aux.entropy)))


def _attend(scene: Scene, state: State | None, unseen: State) -> State:
    """The state after one part, walked group by group; rows without a group keep theirs, or have seen nothing."""
    order, count = scene.query_rows, scene.part.queries.count
    before = state if state is None or order is None else _picked(state, order)

    def kept(rows: slice) -> State:
        return _repeated(unseen, rows.stop - rows.start) if before is None else before.rows(rows)

    def pieces() -> Iterator[tuple[slice, State]]:
        reached = 0
        for group in scene.walk.groups():
            if group.rows.start > reached:
                yield slice(reached, group.rows.start), kept(slice(reached, group.rows.start))
            yield group.rows, _group(scene, group, None if before is None else before.rows(group.rows))
            reached = group.rows.stop
        if reached < count:
            yield slice(reached, count), kept(slice(reached, count))

    after = _joined(pieces()) if scene.careful else _written(pieces(), count)
    if order is None:
        return after
    return _put_back(scene, order, _repeated(unseen, scene.problem.queries) if state is None else state, after)


def _joined(pieces: Iterable[tuple[slice, State]]) -> State:
    """States of neighbouring ranges of rows as one, in operations that can be differentiated."""
    return _join([state for _, state in pieces], 2)


def _written(pieces: Iterable[tuple[slice, State]], count: int) -> State:
    """The same, written into place one by one, so that no piece outlives its turn."""
    whole: State | None = None
    for rows, state in pieces:
        if state.top.shape[2] == count:
            return state
        if whole is None:
            whole = State(*(part.new_empty((*part.shape[:2], count, *part.shape[3:])) for part in state))
        for target, part in zip(whole, state, strict=True):
            target[:, :, rows] = part
    assert whole is not None, "a part has rows"
    return whole


def _repeated(unseen: State, rows: int) -> State:
    """One row's state for many."""
    return State(*(part.expand(-1, -1, rows, *part.shape[3:]) for part in unseen))


def _picked(state: State, rows: Tensor) -> State:
    """The state of the rows that a part's slots stand for."""
    return State(*(part.index_select(2, rows) for part in state))


def _put_back(scene: Scene, order: Tensor, state: State, after: State) -> State:
    """The state of a part's slots back into the order of rows; padding is dropped."""
    slots = torch.from_numpy(np.flatnonzero(scene.part.queries.kinds() == ROW)).to(order.device)
    rows, picked = order[slots], _picked(after, slots)
    return State(*(old.index_copy(2, rows, new) for old, new in zip(state, picked, strict=True)))


def _group(scene: Scene, group: Group, state: State | None) -> State:
    query = scene.scaled_query(group.rows)
    for step in group.steps:
        scores = scene.scores(query, scene.keys(step), group.rows, step)
        peak = scores.values.detach().amax(dim=-1)
        top = peak if state is None else torch.maximum(state.top, peak)
        shift = torch.where(top == NEG_INF, 0.0, top)
        weights = exp_below(scores.values, shift)
        dropped = weights * scene.kept(group.rows, step) if scene.problem.dropout_p else weights
        output = _product(scene, dropped, scene.values(step), scores.seen)
        if scene.problem.aux.entropy:
            energy = (weights * scores.values.masked_fill(weights == 0, 0.0)).sum(dim=-1, keepdim=True)
            output = torch.cat([output, energy.detach()], dim=-1)
        here = State(top, weights.sum(dim=-1), output)
        state = here if state is None else _added(state, here, torch.exp(state.top - shift))
    assert state is not None, "a group has steps"
    return state


def _added(state: State, here: State, decay: Tensor) -> State:
    """Both sums, the earlier ones brought down to the new greatest score."""
    return State(here.top, state.total * decay + here.total, state.output * decay[..., None] + here.output)


def exp_below(scores: Tensor, shift: Tensor) -> Tensor:
    """exp(scores - shift) of rows, as a power of two: torch's exp is several times slower where it underflows."""
    return (scores - shift[..., None]).mul_(LOG2_E).exp2_()


def _product(scene: Scene, weights: Tensor, value: Tensor, seen: Tensor | None) -> Tensor:
    """weights (b, h, l, s) times values (b, g, s, V); with care, a NaN reaches only the rows that see it."""
    shared = scene.share(weights)
    if scene.careful:
        return scene.unshare(careful_product(shared, value, scene.shared_seen(weights, seen)), weights.shape[2])
    return scene.unshare(shared @ value, weights.shape[2])


def _finish(problem: Problem, state: State, sinks: Tensor | None) -> Outcome:
    """Normalise; sinks join here, since they have no value."""
    max_scores, keys = state.top, state.total
    if sinks is not None:
        sink = sinks.to(state.top.dtype)[:, None]
        top = torch.maximum(state.top, sink.detach())
        shift = torch.where(top == NEG_INF, 0.0, top)
        decay = torch.exp(state.top - shift)
        keys = keys * decay
        state = State(top, keys + torch.exp(sink - shift), state.output * decay[..., None])
    shift = torch.where(state.top == NEG_INF, 0.0, state.top)
    empty = state.total == 0
    total = torch.where(empty, 1.0, state.total)
    lse = torch.where(empty, NEG_INF, shift + torch.log(total))
    output = state.output / total[..., None]
    entropy = None
    if problem.aux.entropy:  # sum of p (lse - s) over the keys, whose p sum to less than 1 beside a sink
        output, energy = output[..., :-1], output[..., -1]
        entropy = (keys / total * torch.where(empty, 0.0, lse) - energy).detach()
    return Outcome(output.to(problem.dtype), lse, shift, total, max_scores, entropy)
