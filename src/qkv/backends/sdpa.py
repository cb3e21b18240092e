"""torch's own scaled_dot_product_attention, for the problems that it answers with the same meaning.

It does not keep the promise about non-finite input: a NaN in a hidden value reaches the output,
a NaN query gives zeros.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from qkv.backends.base import NEG_INF, Cost, Result, pattern_plan, positions, rule_bias, visible
from qkv.patterns.named import causal, full
from qkv.problem import Problem, Tensors

FULL, CAUSAL = full(), causal()


class Sdpa:
    """Every pattern but full and plain causal goes through a dense L by S mask, as torch's function asks."""

    name = "sdpa"
    unavailable: str | None = None

    def reasons_against(self, problem: Problem) -> list[str]:
        aux = problem.aux
        asked = [
            name
            for name in ("lse", "max_scores", "entropy", "weights", "top_k")
            if getattr(aux, name) not in (False, None)
        ]
        found = [
            (problem.softcap is not None, "it has no softcap"),
            (problem.sinks, "it has no sinks"),
            (problem.dropout_p > 0, "its dropout does not follow the counter-based rule"),
            (bool(asked), f"it returns no {', '.join(asked)}"),
        ]
        return [reason for applies, reason in found if applies]

    def cost(self, problem: Problem) -> Cost:
        computed = problem.batch * problem.heads * problem.queries * problem.keys
        batch, heads = (problem.bias_shape or (1, 1))[:2] if problem.bias == "tensor" else (1, problem.heads)
        dense_mask = 0 if _needs_no_mask(problem) else batch * heads * problem.queries * problem.keys
        out = problem.batch * problem.heads * problem.queries * problem.value_dim * problem.dtype.itemsize
        return Cost(
            pairs=pattern_plan(problem).pairs,
            computed=computed,
            flops=2 * computed * (problem.head_dim + problem.value_dim),
            bytes_moved=out + dense_mask * problem.dtype.itemsize,
            peak_bytes=out + dense_mask * (1 + (problem.dtype.itemsize if problem.bias else 0)),
        )

    def run(self, problem: Problem, tensors: Tensors, seed: int) -> Result:
        is_causal = _is_causal(problem)
        output = scaled_dot_product_attention(
            tensors.query,
            tensors.key,
            tensors.value,
            attn_mask=None if _needs_no_mask(problem) else _mask(problem, tensors.bias),
            is_causal=is_causal,
            scale=problem.scale,
            enable_gqa=problem.heads != problem.kv_heads,
        )
        return Result(output, torch.empty(0, device=problem.device))


def _is_causal(problem: Problem) -> bool:
    """Whether torch's flag says the same: it aligns top-left, and with a scale of 0 or less it gives NaN."""
    return (
        problem.bias is None
        and problem.pattern == CAUSAL
        and problem.queries == problem.keys
        and set(problem.origin.query) == set(problem.origin.key) == {0}
        and problem.scale > 0
    )


def _needs_no_mask(problem: Problem) -> bool:
    return problem.bias is None and (problem.pattern == FULL or _is_causal(problem))


def _mask(problem: Problem, bias: Tensor | None) -> Tensor:
    """Pattern and bias as one dense mask: bool (True is seen) without a bias, else added."""
    seen = visible(problem)
    if bias is None:
        return seen
    if problem.bias != "tensor":
        i = positions(problem.origin.query, problem.queries, problem.device)
        bias = rule_bias(problem, bias, i, positions(problem.origin.key, problem.keys, problem.device))
    return torch.where(seen, bias.to(problem.compute_dtype), NEG_INF)
