"""Blockwise forward: the online softmax, part after part into one state a row, so that merging parts is nothing
special.

Every operation makes a new tensor or fills one just made, so that plain autograd can differentiate it as often as
asked.
Source: Milakov, Gimelshein, "Online normalizer calculation for softmax" (2018); Rabe, Staats (2021).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from qkv.backends.base import NEG_INF, careful_product
from qkv.backends.scene import Scene
from qkv.backends.walk import Block, Group, rectangles
from qkv.patterns.schedule import PatternPlan
from qkv.problem import Problem, Tensors

LOG2_E = 1.4426950408889634


class Outcome(NamedTuple):
    """Output (B, H, L, V) in the inputs' type; all others (B, H, L) in the compute type.

    A weight is exp(score - shift) / total: lse = shift + ln(total) would lose the sum beside large scores.
    """

    output: Tensor
    lse: Tensor
    max_scores: Tensor
    entropy: Tensor
    shift: Tensor
    total: Tensor


class State(NamedTuple):
    """Of each row: the greatest score so far, and relative to it the sums of weights, of weights · scores,
    of weights · V.
    """

    top: Tensor  # (b, h, l), a constant for differentiation
    total: Tensor  # (b, h, l)
    energy: Tensor  # (b, h, l), zeros unless the entropy is asked for
    output: Tensor  # (b, h, l, V)

    def rows(self, rows: slice) -> State:
        return State(*(part[:, :, rows] for part in self))


def forward(problem: Problem, tensors: Tensors, plan: PatternPlan, seed: int, *, careful: bool) -> Outcome:
    """Attention of the whole call, rectangle by rectangle."""
    share = problem.heads // max(problem.kv_heads, 1)
    strips = []
    for strip in rectangles(plan, share):
        pieces = [_rectangle(problem, tensors, plan, block, seed, careful=careful) for block in strip]
        strips.append(_join(pieces, 1) if pieces else _nothing(problem, tensors))
    return _join(strips, 0) if strips else _nothing(problem, tensors)


def _join(pieces: list[Outcome], axis: int) -> Outcome:
    if len(pieces) == 1:
        return pieces[0]
    return Outcome(*(torch.cat(parts, dim=axis) for parts in zip(*pieces, strict=True)))


def _nothing(problem: Problem, tensors: Tensors) -> Outcome:
    """The outcome of a call without batch rows or heads."""
    shape = (problem.batch, problem.heads, problem.queries)
    rows = (tensors.query.new_zeros(shape, dtype=problem.compute_dtype) for _ in Outcome._fields[1:])
    return Outcome(tensors.query.new_zeros((*shape, problem.value_dim)), *rows)


def _rectangle(
    problem: Problem, tensors: Tensors, plan: PatternPlan, block: Block, seed: int, *, careful: bool
) -> Outcome:
    state = _empty_state(problem, tensors, block)
    for part in plan.members[block.member].parts:
        scene = Scene.of(problem, tensors, block, part, seed, careful=careful)
        state = _attend(scene, state)
    return _finish(problem, state, None if tensors.sinks is None else tensors.sinks[block.heads])


def _empty_state(problem: Problem, tensors: Tensors, block: Block) -> State:
    batch, heads = block.batch.stop - block.batch.start, block.heads.stop - block.heads.start
    row = tensors.query.new_zeros((batch, heads, problem.queries), dtype=problem.compute_dtype)
    return State(row + NEG_INF, row, row, row.new_zeros((1, 1, 1, 1)).expand(*row.shape, problem.value_dim))


def _attend(scene: Scene, state: State) -> State:
    """The state after one part: its rows are walked group by group, rows without a group keep theirs."""
    rows = scene.query_rows
    before = state if rows is None else State(*(part.index_select(2, rows) for part in state))
    pieces, reached = [], 0
    for group in scene.walk.groups():
        if group.rows.start > reached:
            pieces.append(before.rows(slice(reached, group.rows.start)))
        pieces.append(_group(scene, group, before.rows(group.rows)))
        reached = group.rows.stop
    if reached < before.top.shape[2]:
        pieces.append(before.rows(slice(reached, before.top.shape[2])))
    after = State(*(torch.cat(parts, dim=2) for parts in zip(*pieces, strict=True))) if pieces else before
    return after if rows is None else _put_back(scene, state, after)


def _put_back(scene: Scene, state: State, after: State) -> State:
    """The state of a part's slots back into the order of rows; padding is dropped."""
    index = torch.from_numpy(scene.part.queries.index).to(scene.problem.device)  # type: ignore[attr-defined]
    slots = (index >= 0).nonzero().squeeze(1)
    rows = index[slots].long()
    return State(*(old.index_copy(2, rows, new.index_select(2, slots)) for old, new in zip(state, after, strict=True)))


def _group(scene: Scene, group: Group, state: State) -> State:
    query = scene.scaled_query(group.rows)
    for step in group.steps:
        scores = scene.scores(query, scene.keys(step), group.rows, step)
        peak = scores.values.detach().amax(dim=-1)
        top = torch.maximum(state.top, peak)
        shift = torch.where(top == NEG_INF, 0.0, top)
        weights = exp_below(scores.values, shift)
        decay = torch.exp(state.top - shift)
        total = state.total * decay + weights.sum(dim=-1)
        energy = state.energy
        if scene.problem.aux.entropy:
            finite = scores.values.masked_fill(scores.values == NEG_INF, 0.0)
            energy = energy * decay + (weights * finite).sum(dim=-1).detach()
        if scene.problem.dropout_p:
            weights = weights * scene.kept(group.rows, step)
        output = state.output * decay[..., None] + _product(scene, weights, scene.values(step), scores.seen)
        state = State(top, total, energy, output)
    return state


def exp_below(scores: Tensor, shift: Tensor) -> Tensor:
    """exp(scores - shift) of rows, as a power of two: torch's exp is several times slower where it underflows."""
    return (scores - shift[..., None]).mul_(LOG2_E).exp2_()


def _product(scene: Scene, weights: Tensor, value: Tensor, seen: Tensor | None) -> Tensor:
    """weights (b, h, l, s) times values (b, g, s, V); with care, a NaN reaches only the rows that see it."""
    shared = scene.share(weights)
    if scene.careful:
        mask = torch.ones_like(weights, dtype=torch.bool) if seen is None else seen.expand(weights.shape)
        return scene.unshare(careful_product(shared, value, scene.share(mask)), weights.shape[2])
    return scene.unshare(shared @ value, weights.shape[2])


def _finish(problem: Problem, state: State, sinks: Tensor | None) -> Outcome:
    """Normalise; sinks join here, since they have no value."""
    sink = state.top.new_full((), NEG_INF) if sinks is None else sinks.to(state.top.dtype)[:, None]
    top = torch.maximum(state.top, sink.detach())
    shift = torch.where(top == NEG_INF, 0.0, top)
    decay = torch.exp(state.top - shift)
    total = state.total * decay + torch.exp(sink - shift)
    empty = total == 0
    filled = torch.where(empty, 1.0, total)
    lse = torch.where(empty, NEG_INF, shift + torch.log(filled))
    output = state.output * (decay / filled)[..., None]
    # shares of the keys' weights: with a sink they sum to less than 1
    share, energy = (part.detach() * decay / filled for part in (state.total, state.energy))
    entropy = share * torch.where(empty, 0.0, lse.detach()) - energy
    return Outcome(output.to(problem.dtype), lse, state.top, entropy, shift, filled)
