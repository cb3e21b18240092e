"""Scores of whole rows, densely and differentiably: the reference is built on them,
and so are the weights that a caller asks for.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from qkv.backends.base import NEG_INF, careful_scores, positions, rule_bias, take, visible
from qkv.problem import Problem, Tensors


def repeat_heads(tensor: Tensor, heads: int) -> Tensor:
    """Key or value heads (B, G, S, D) as query heads (B, H, S, D): a view until somebody writes it out."""
    batch, kv_heads, keys, width = tensor.shape
    if heads == kv_heads:
        return tensor
    return tensor[:, :, None].expand(batch, kv_heads, heads // kv_heads, keys, width).flatten(1, 2)


def dense_scores(problem: Problem, tensors: Tensors, rows: Sequence[int] | None = None) -> tuple[Tensor, Tensor]:
    """The scores of query rows (all when None) after scale, softcap, bias and pattern, and which pairs are seen.

    Scores are (B, H, rows, S) in the compute type, -inf where hidden; seen is bool and broadcasts to them.
    """
    picked = slice(0, problem.queries) if rows is None else torch.tensor(rows, dtype=torch.int64, device=problem.device)
    wide = problem.compute_dtype
    query = tensors.query[:, :, picked].to(wide).contiguous()
    key = repeat_heads(tensors.key.to(wide).contiguous(), problem.heads)
    scores, seen = careful_scores(query * problem.scale, key), visible(problem, rows)
    bias = None if tensors.bias is None else _bias_rows(problem, tensors.bias, picked).to(wide)
    if bias is not None:
        seen = seen & (bias != NEG_INF)
    if problem.softcap is not None:  # hidden scores are no longer needed, and the slope of tanh at NaN would be NaN
        scores = problem.softcap * torch.tanh(torch.where(seen, scores, 0.0) / problem.softcap)
    if bias is not None:
        scores = scores + bias
    return torch.where(seen, scores, NEG_INF), seen


def _bias_rows(problem: Problem, bias: Tensor, rows: slice | Tensor) -> Tensor:
    if problem.bias == "tensor":
        return take(bias, 2, rows)
    i = positions(problem.origin.query, problem.queries, problem.device)[:, rows]
    return rule_bias(problem, bias, i, positions(problem.origin.key, problem.keys, problem.device))


class RowSoftmax(NamedTuple):
    """The softmax of whole rows: weights (B, H, rows, S), log-sum-exp and greatest score (B, H, rows)."""

    weights: Tensor
    lse: Tensor
    top: Tensor


def softmax_rows(scores: Tensor, sinks: Tensor | None) -> RowSoftmax:
    """Softmax along the keys, with a sink a head joining the sum; a row that sees nothing has weights 0.

    Weights are divided by their sum rather than taken from the log-sum-exp, in which large scores drown it.
    """
    top = scores.detach().amax(dim=-1) if scores.shape[-1] else scores.new_full(scores.shape[:-1], NEG_INF)
    sink = scores.new_full((scores.shape[1], 1), NEG_INF) if sinks is None else sinks.to(scores.dtype)[:, None]
    shift = torch.maximum(top, sink.detach())
    shift = torch.where(shift == NEG_INF, 0.0, shift)
    weights = torch.exp(scores - shift[..., None])
    total = weights.sum(dim=-1) + torch.exp(sink - shift)
    empty = total == 0
    filled = torch.where(empty, 1.0, total)
    lse = torch.where(empty, NEG_INF, shift + torch.log(filled))
    # hidden weights are constants: a gradient that comes back to them must not reach the sum of the row
    return RowSoftmax(torch.where(scores == NEG_INF, 0.0, weights / filled[..., None]), lse, top)
