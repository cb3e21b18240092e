"""Attention over a block schedule in torch operations: any device, memory O(L·block), cost of the pattern,
forward and backward.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._C import _are_functorch_transforms_active
from torch.autograd import forward_ad

from qkv.backends.base import Cost, Result, all_finite, pattern_plan, without_autocast
from qkv.backends.blockwise_backward import Gradients, backward
from qkv.backends.blockwise_forward import Outcome, forward
from qkv.backends.walk import WORKSPACE
from qkv.patterns.axis import TILE
from qkv.patterns.schedule import PatternPlan
from qkv.problem import Problem, Tensors
from qkv.shapes import values_can_be_seen


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
        if _transformed(tensors) or not values_can_be_seen(tensors.query):
            outcome = forward(problem, tensors, plan, seed, careful=True)
        elif problem.needs_grad:
            outcome = Outcome(*_Attention.apply(problem, plan, seed, *tensors))  # type: ignore[no-untyped-call]
        else:
            with torch.no_grad():
                outcome, _ = _answer(problem, tensors, plan, seed)
        top = outcome.max_scores if problem.aux.max_scores else None
        return Result(outcome.output, outcome.lse, top, outcome.entropy if problem.aux.entropy else None)


def _transformed(tensors: Tensors) -> bool:
    """Whether a functorch transform or forward-mode differentiation is on: plain differentiable operations must run."""
    if _are_functorch_transforms_active():
        return True
    given = [tensor for tensor in tensors if tensor is not None]
    return _forward_level() and any(forward_ad.unpack_dual(tensor).tangent is not None for tensor in given)


def _forward_level() -> bool:
    """Whether forward-mode differentiation is on; outside it tensors cannot be asked for tangents."""
    return forward_ad._current_level >= 0  # noqa: SLF001 - torch has no public way to ask


def _answer(problem: Problem, tensors: Tensors, plan: PatternPlan, seed: int) -> tuple[Outcome, bool]:
    """The outcome, and whether care was needed: what the pattern hides comes in with weight 0, and if it was NaN or
    infinite the output shows it, for 0 · NaN is NaN. Then everything is done again with care.
    """
    outcome = forward(problem, tensors, plan, seed, careful=False)
    if all_finite(outcome.output, outcome.total):
        return outcome, False
    return forward(problem, tensors, plan, seed, careful=True), True


class _Attention(torch.autograd.Function):
    """Forward without a graph; backward by recomputation, or through plain operations where it is differentiated
    itself.
    """

    @staticmethod
    def forward(ctx: Any, problem: Problem, plan: PatternPlan, seed: int, *tensors: Tensor | None) -> Any:
        outcome, careful = _answer(problem, Tensors(*tensors), plan, seed)  # type: ignore[arg-type]
        ctx.save_for_backward(*tensors, *outcome)
        ctx.question = problem, plan, seed, careful
        ctx.mark_non_differentiable(*outcome[2:])
        return tuple(outcome)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor, grad_lse: Tensor, *_: Tensor) -> Any:
        problem, plan, seed, careful = ctx.question
        saved = ctx.saved_tensors  # read once: recomputing checkpoints allow no more
        tensors, outcome = Tensors(*saved[:5]), Outcome(*saved[5:])
        with without_autocast(problem.device):
            if torch.is_grad_enabled():
                wanted = ctx.needs_input_grad[3:]
                gradients = _differentiable(problem, tensors, plan, seed, wanted, (grad_output, grad_lse))
            else:
                gradients = backward(problem, tensors, plan, seed, outcome, grad_output, grad_lse, careful=careful)
                if not careful and not all_finite(*gradients):
                    gradients = backward(problem, tensors, plan, seed, outcome, grad_output, grad_lse, careful=True)
        return None, None, None, *gradients


def _differentiable(
    problem: Problem,
    tensors: Tensors,
    plan: PatternPlan,
    seed: int,
    wanted: tuple[bool, ...],
    grads: tuple[Tensor, Tensor],
) -> Gradients:
    """Gradients as functions that can be differentiated again: autograd through the plain forward pass."""
    outcome = forward(problem, tensors, plan, seed, careful=True)
    inputs = [tensor for tensor, needed in zip(tensors, wanted, strict=True) if needed and tensor is not None]
    linked = [pair for pair in zip(outcome[:2], grads, strict=True) if pair[0].requires_grad]
    if not linked:  # nothing is seen
        return Gradients(*(None if t is None else torch.zeros_like(t) for t in tensors))
    outputs, grad_outputs = zip(*linked, strict=True)
    found = iter(torch.autograd.grad(outputs, inputs, grad_outputs, create_graph=True, allow_unused=True))
    return Gradients(*(next(found) if needed else None for needed in wanted))
