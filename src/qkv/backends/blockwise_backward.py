"""Blockwise backward: every part recomputes its weights from the merged sums, P = exp(s - shift) / total,
dS = P (dP - delta).

delta is the row sum of dO · O less the gradient of lse, so that parts need nothing of one another. The division is done
on the rows of dO and delta, once, instead of on every weight.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from qkv.backends.base import NEG_INF, Gradients, Outcome, Rows, careful_product, finite_part, take
from qkv.backends.online import exp_below
from qkv.backends.scene import Scene, Scores
from qkv.backends.walk import Group, Step, rectangles
from qkv.patterns.schedule import PatternPlan
from qkv.problem import Problem, Tensors


class RowValues(NamedTuple):
    """What a row of the backward pass needs, in a part's slot order."""

    grad_output: Tensor  # (b, h, l, V), divided by the row's total
    shift: Tensor  # (b, h, l)
    delta: Tensor  # (b, h, l), divided by the row's total

    def rows(self, rows: slice) -> RowValues:
        return RowValues(*(part[:, :, rows] for part in self))


def backward(
    problem: Problem,
    tensors: Tensors,
    plan: PatternPlan,
    seed: int,
    outcome: Outcome,
    grad_output: Tensor,
    grad_lse: Tensor | None,
    wanted: tuple[bool, ...],
    *,
    careful: bool,
) -> Gradients:
    """The gradients of one call that are wanted, in the inputs' types."""
    wide = problem.compute_dtype
    grown = [t if needed or place < 3 else None for place, (t, needed) in enumerate(zip(tensors, wanted, strict=True))]
    sums = Gradients(*(None if t is None else torch.zeros(t.shape, dtype=wide, device=t.device) for t in grown))
    grad_output = grad_output.to(wide)
    delta = (grad_output * outcome.output.to(wide)).sum(dim=-1)
    delta = delta if grad_lse is None else delta - grad_lse
    delta = torch.where(outcome.lse == NEG_INF, 0.0, delta)
    row_values = RowValues(grad_output / outcome.total[..., None], outcome.shift, delta / outcome.total)
    for block in (block for strip in rectangles(plan, problem.group_size) for block in strip):
        for part in plan.members[block.member].parts:
            scene = Scene.of(problem, tensors, block, part, seed, careful=careful)
            _part(scene, row_values, sums)
    if sums.sinks is not None and tensors.sinks is not None:
        weight = torch.exp(tensors.sinks.to(wide)[:, None] - outcome.shift)
        sums.sinks.copy_(-(weight * row_values.delta).sum(dim=(0, 2)))
    asked = zip(sums, tensors, wanted, strict=True)
    return Gradients(*(s.to(t.dtype) if needed and s is not None and t is not None else None for s, t, needed in asked))


def _part(scene: Scene, row_values: RowValues, sums: Gradients) -> None:
    """Add one part's share to the sums."""
    block = scene.block
    ours = RowValues(*(part[block.batch, block.heads] for part in row_values))
    if scene.query_rows is not None:
        ours = RowValues(*(part.index_select(2, scene.query_rows) for part in ours))
    kv_heads = block.kv_heads(scene.problem.group_size)
    query, key, value = (
        _Sum(total[block.batch, heads], rows)  # type: ignore[index]
        for total, heads, rows in (
            (sums.query, block.heads, scene.query_rows),
            (sums.key, kv_heads, scene.key_rows),
            (sums.value, kv_heads, scene.key_rows),
        )
    )
    for group in scene.walk.groups():
        _group(scene, group, ours.rows(group.rows), query, key, value, sums.bias)
    for total in (query, key, value):
        total.flush()


class _Sum:
    """A gradient of one rectangle that grows step by step in a part's slot order, and ends in the call's order."""

    def __init__(self, target: Tensor, rows: Tensor | None) -> None:
        self._target, self._rows = target, rows
        self._slots = target if rows is None else target.new_zeros((*target.shape[:2], len(rows), target.shape[3]))

    def add(self, slots: Rows, gradient: Tensor) -> None:
        if isinstance(slots, slice):
            self._slots[:, :, slots] += gradient
        else:
            self._slots.index_add_(2, slots, gradient)

    def flush(self) -> None:
        if self._rows is not None:
            self._target.index_add_(2, self._rows, self._slots)


def _group(
    scene: Scene,
    group: Group,
    rows: RowValues,
    query_sum: _Sum,
    key_sum: _Sum,
    value_sum: _Sum,
    bias_sum: Tensor | None,
) -> None:
    query = scene.scaled_query(group.rows)
    shared_query, shared_grad = scene.share(query), scene.share(rows.grad_output)
    clean_query = finite_part(shared_query) if scene.careful else shared_query
    grad_query = torch.zeros_like(query)
    for step in group.steps:
        key, value = scene.keys(step), scene.values(step)
        scores = scene.scores(query, key, group.rows, step)
        weights = exp_below(scores.values, rows.shift)
        if scores.seen is not None:
            weights = weights.masked_fill(~scores.seen, 0.0)  # in a row of NaN hidden weights are NaN too
        grad_weights = scene.unshare(shared_grad @ value.transpose(-1, -2), query.shape[2])
        dropped = weights
        if scene.problem.dropout_p:
            kept = scene.kept(group.rows, step)
            dropped, grad_weights = weights * kept, grad_weights * kept
        value_sum.add(step.keys, _transposed_product(scene, dropped, shared_grad, scores.seen))
        grad_scores = _grad_scores(scores, weights, grad_weights, rows.delta)
        if bias_sum is not None:
            _add_bias(scene, group.rows, step, grad_scores, bias_sum)
        grad_raw = scene.share(_through_softcap(scene.problem, scores, grad_scores))
        clean_key = finite_part(key) if scene.careful else key
        grad_query = grad_query + scene.unshare(grad_raw @ clean_key, query.shape[2])
        key_sum.add(step.keys, grad_raw.transpose(-1, -2) @ clean_query)
    query_sum.add(group.rows, grad_query * scene.problem.scale)


def _grad_scores(scores: Scores, weights: Tensor, grad_weights: Tensor, delta: Tensor) -> Tensor:
    grad = weights * (grad_weights - delta[..., None])
    return grad if scores.seen is None else grad.masked_fill(~scores.seen, 0.0)


def _through_softcap(problem: Problem, scores: Scores, grad: Tensor) -> Tensor:
    """The gradient before the softcap c · tanh(x / c), whose slope is 1 - (s / c)²; 0 where hidden."""
    if problem.softcap is None or scores.capped is None:
        return grad
    through = grad * (1 - (scores.capped / problem.softcap) ** 2)
    return through if scores.seen is None else through.masked_fill(~scores.seen, 0.0)


def _transposed_product(scene: Scene, weights: Tensor, shared_grad: Tensor, seen: Tensor | None) -> Tensor:
    """weightsᵀ · dO summed over the query heads of a key head: (b, g, s, V)."""
    transposed = scene.share(weights).transpose(-1, -2)
    if not scene.careful:
        return transposed @ shared_grad
    return careful_product(transposed, shared_grad, scene.shared_seen(weights, seen).transpose(-1, -2))


def _add_bias(scene: Scene, rows: slice, step: Step, grad: Tensor, total: Tensor) -> None:
    """Add a step's gradient to the bias's: summed over the axes that broadcast, or by the rule's own derivative."""
    block = scene.block
    if scene.problem.bias == "tensor":
        target = take(take(total, 0, block.batch), 1, block.heads)
        _add_tile(target, scene.call_rows(rows), scene.call_keys(step), grad)
        return
    distance = scene.key_positions[step.keys] - scene.query_positions[rows, None]
    ours = total[block.heads]
    if scene.problem.bias == "alibi":
        ours -= (grad.sum(dim=0) * distance.abs()).sum(dim=(1, 2))
        return
    radius = ours.shape[1] // 2
    entry = (distance.clamp(-radius, radius) + radius).flatten()
    ours.index_add_(1, entry, grad.sum(dim=0).flatten(1))


def _add_tile(target: Tensor, rows: Rows, keys: Rows, grad: Tensor) -> None:
    """target[:, :, rows, keys] += grad, summed along every axis where the target has size 1."""
    broadcast = [axis for axis in range(4) if target.shape[axis] == 1 and grad.shape[axis] != 1]
    grad = grad.sum(dim=broadcast, keepdim=True) if broadcast else grad
    rows = slice(0, 1) if target.shape[2] == 1 else rows
    keys = slice(0, 1) if target.shape[3] == 1 else keys
    target = target[:, :, rows] if isinstance(rows, slice) else target
    target = target[..., keys] if isinstance(keys, slice) else target
    if isinstance(rows, slice) and isinstance(keys, slice):
        target += grad
    elif isinstance(keys, slice):
        target.index_add_(2, rows, grad)  # type: ignore[arg-type]
    elif isinstance(rows, slice):
        target.index_add_(3, keys, grad)
    else:
        batch, heads = (torch.arange(size, device=target.device) for size in target.shape[:2])
        places = (batch[:, None, None, None], heads[:, None, None], rows[:, None], keys)
        target.index_put_(places, grad, accumulate=True)  # padding repeats row 0
