"""Attention over a block schedule in torch operations: any device, memory O(L·block), cost of the pattern,
forward and backward.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._C import _are_functorch_transforms_active
from torch.autograd import forward_ad

from qkv.backends.base import Cost, Result, largest, pattern_plan
from qkv.backends.blockwise_backward import Gradients, backward
from qkv.backends.blockwise_forward import Outcome, forward
from qkv.backends.walk import WORKSPACE
from qkv.patterns.axis import TILE
from qkv.problem import Problem, Tensors

HEADROOM = 2.0**-24  # of the greatest number: covers sums, the scale of dropout and a bias


class Blockwise:
    """Online softmax over groups of query blocks and runs of key blocks; the backward pass recomputes the scores."""

    name = "blockwise"
    unavailable: str | None = None

    def reasons_against(self, problem: Problem) -> list[str]:
        return []

    def cost(self, problem: Problem) -> Cost:
        plan = pattern_plan(problem)
        rows, width = problem.batch * problem.heads * problem.queries, problem.compute_dtype.itemsize
        computed = plan.tiles * TILE * TILE
        widths = problem.head_dim + problem.value_dim
        state = rows * (2 * problem.value_dim + 4) * width
        moved = rows * widths * problem.dtype.itemsize + plan.tiles * TILE * widths * problem.dtype.itemsize
        reordered = rows * widths * width if plan.parts > 1 else 0
        return Cost(
            pairs=plan.pairs,
            computed=computed,
            flops=2 * computed * widths,
            bytes_moved=moved + plan.parts * rows * problem.value_dim * width,
            peak_bytes=state + reordered + 4 * min(WORKSPACE, max(computed, 1)) * width,
        )

    def run(self, problem: Problem, tensors: Tensors, seed: int) -> Result:
        plan = pattern_plan(problem)
        careful = not _calm(problem, tensors)
        if _transformed(tensors):
            outcome = forward(problem, tensors, plan, seed, careful=careful)
        elif problem.needs_grad:
            outcome = Outcome(*_Attention.apply(problem, plan, seed, careful, *tensors))  # type: ignore[no-untyped-call]
        else:
            with torch.no_grad():
                outcome = forward(problem, tensors, plan, seed, careful=careful)
        return Result(
            outcome.output,
            outcome.lse,
            outcome.max_scores if problem.aux.max_scores else None,
            outcome.entropy if problem.aux.entropy else None,
        )


def _transformed(tensors: Tensors) -> bool:
    """Whether a functorch transform or forward-mode differentiation is on: plain differentiable operations must run."""
    if _are_functorch_transforms_active():
        return True
    given = [tensor for tensor in tensors if tensor is not None]
    return _forward_level() and any(forward_ad.unpack_dual(tensor).tangent is not None for tensor in given)


def _forward_level() -> bool:
    """Whether forward-mode differentiation is on; outside it tensors cannot be asked for tangents."""
    return forward_ad._current_level >= 0  # noqa: SLF001 - torch has no public way to ask


def _calm(problem: Problem, tensors: Tensors, grad_output: Tensor | None = None) -> bool:
    """Whether the numbers are finite and so far from overflow that every product is: then a hidden pair has a finite
    score and gradient, which a weight of 0 removes. Under a transform numbers cannot be looked at, and care is taken.
    """
    if _are_functorch_transforms_active():
        return False
    room = torch.finfo(problem.compute_dtype).max * HEADROOM
    value = largest(tensors.value)
    if grad_output is not None:
        grad = largest(grad_output)
        return problem.value_dim * grad * value <= room and problem.queries * grad <= room
    score = problem.head_dim * abs(problem.scale) * largest(tensors.query) * largest(tensors.key)
    return score <= room and problem.keys * value <= room


class _Attention(torch.autograd.Function):
    """Forward without a graph; backward by recomputation, or through plain operations where it is differentiated
    itself.
    """

    @staticmethod
    def forward(ctx: Any, problem: Problem, plan: Any, seed: int, careful: bool, *tensors: Tensor | None) -> Any:
        outcome = forward(problem, Tensors(*tensors), plan, seed, careful=careful)  # type: ignore[arg-type]
        ctx.save_for_backward(*tensors, *outcome)
        ctx.question = problem, plan, seed, careful
        ctx.mark_non_differentiable(*outcome[2:])
        return tuple(outcome)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor, grad_lse: Tensor, *_: Tensor) -> Any:
        problem, plan, seed, careful = ctx.question
        tensors, outcome = Tensors(*ctx.saved_tensors[:5]), Outcome(*ctx.saved_tensors[5:])
        if torch.is_grad_enabled():
            gradients = _differentiable(problem, tensors, plan, seed, ctx.needs_input_grad[4:], grad_output, grad_lse)
        else:
            careful = careful or not _calm(problem, tensors, grad_output)
            gradients = backward(problem, tensors, plan, seed, outcome, grad_output, grad_lse, careful=careful)
        return None, None, None, None, *gradients


def _differentiable(
    problem: Problem,
    tensors: Tensors,
    plan: Any,
    seed: int,
    wanted: tuple[bool, ...],
    grad_output: Tensor,
    grad_lse: Tensor,
) -> Gradients:
    """Gradients as functions that can be differentiated again: autograd through the plain forward pass."""
    outcome = forward(problem, tensors, plan, seed, careful=not _calm(problem, tensors))
    inputs = [tensor for tensor, needed in zip(tensors, wanted, strict=True) if needed and tensor is not None]
    found = iter(
        torch.autograd.grad(
            (outcome.output, outcome.lse), inputs, (grad_output, grad_lse), create_graph=True, allow_unused=True
        )
    )
    return Gradients(*(next(found) if needed else None for needed in wanted))
