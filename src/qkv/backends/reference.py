"""The shipped truth: dense attention in plain torch operations, any type and device,
differentiable as often as asked.
"""

from __future__ import annotations

import torch
from torch import Tensor

from qkv.backends.base import Cost, Result, careful_product, pattern_plan, positions
from qkv.backends.dense import dense_scores, repeat_heads, softmax_rows
from qkv.dropout import dropout_keep, keep_scale
from qkv.problem import Problem, Tensors


class Reference:
    """softmax(scores) · V with every score written out: O(L·S) memory."""

    name = "reference"
    unavailable: str | None = None

    def reasons_against(self, problem: Problem) -> list[str]:
        return []

    def cost(self, problem: Problem) -> Cost:
        computed = problem.batch * problem.heads * problem.queries * problem.keys
        width = problem.compute_dtype.itemsize
        out = problem.batch * problem.heads * problem.queries * problem.value_dim * problem.dtype.itemsize
        return Cost(
            pairs=pattern_plan(problem).pairs,
            computed=computed,
            flops=2 * computed * (problem.head_dim + problem.value_dim),
            bytes_moved=6 * computed * width + out,
            peak_bytes=4 * computed * width + out,
        )

    def run(self, problem: Problem, tensors: Tensors, seed: int) -> Result:
        scores, seen = dense_scores(problem, tensors)
        softmax = softmax_rows(scores, tensors.sinks)
        kept = softmax.weights
        if problem.dropout_p:
            kept = kept * _keep(problem, seed) * keep_scale(problem.dropout_p)
        value = repeat_heads(tensors.value.to(problem.compute_dtype).contiguous(), problem.heads)
        return Result(
            careful_product(kept, value, seen).to(problem.dtype),
            softmax.lse,
            softmax.top if problem.aux.max_scores else None,
            _entropy(softmax.weights) if problem.aux.entropy else None,
        )


def _entropy(weights: Tensor) -> Tensor:
    return torch.special.entr(weights).sum(dim=-1).detach()


def _keep(problem: Problem, seed: int) -> Tensor:
    origin, device = problem.origin, problem.device
    return dropout_keep(
        seed,
        problem.dropout_p,
        origin.batch + torch.arange(problem.batch, device=device),
        origin.head + torch.arange(problem.heads, device=device),
        positions(origin.query, problem.queries, device),
        positions(origin.key, problem.keys, device),
    )
