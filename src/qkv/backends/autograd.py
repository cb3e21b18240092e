"""How a backend of ours meets torch's differentiation: one autograd function over what an engine computes, and plain
differentiable operations wherever a derivative of another kind is asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeAlias, runtime_checkable

import torch
from torch import Tensor
from torch._C import _are_functorch_transforms_active
from torch._C._functorch import is_batchedtensor, is_legacy_batchedtensor
from torch.autograd import forward_ad

from qkv.backends.base import Gradients, Incoming, Outcome, Result, Work, pattern_plan, without_autocast
from qkv.backends.online import forward
from qkv.patterns.schedule import PatternPlan
from qkv.problem import Problem, Tensors
from qkv.shapes import values_can_be_seen

Wanted: TypeAlias = tuple[bool, ...]  # which of the tensors need a gradient, in the order of `Tensors`


@runtime_checkable
class Engine(Protocol):
    """What computes numbers, without a graph."""

    def answer(self, work: Work) -> tuple[Outcome, bool]:
        """The outcome, and whether care was needed to keep hidden content hidden."""

    def gradients(
        self, work: Work, outcome: Outcome, incoming: Incoming, wanted: Wanted, *, careful: bool
    ) -> Gradients:
        """Gradients in the inputs' types, None where not wanted; `careful` says that the outcome needed care."""


def run(engine: Engine, problem: Problem, tensors: Tensors, seed: int) -> Result:
    """Answer a problem by an engine, differentiable in whatever way the call is differentiated."""
    plan = pattern_plan(problem)
    if transformed(tensors) or not values_can_be_seen(tensors.query):
        outcome = forward(problem, tensors, plan, seed, careful=True)
    elif problem.needs_grad:
        return Result(*_Attention.apply(engine, problem, plan, seed, *tensors))  # type: ignore[no-untyped-call]
    else:
        with torch.no_grad():
            outcome, _ = engine.answer(Work(problem, tensors, plan, seed))
    return result_of(problem, outcome)


def differentiable_gradients(
    problem: Problem,
    tensors: Tensors,
    plan: PatternPlan,
    seed: int,
    wanted: Wanted,
    grads: tuple[Tensor | None, Tensor | None],
) -> Gradients:
    """Gradients as functions that can be differentiated again: autograd through the plain forward pass."""

    def compute(*given: Tensor | None) -> tuple[Tensor, Tensor]:
        outcome = forward(problem, Tensors(*given), plan, seed, careful=True)  # type: ignore[arg-type]
        return outcome.output, outcome.lse

    return Gradients(*gradients_through(compute, tensors, wanted, grads))


def gradients_through(
    compute: Callable[..., Sequence[Tensor]],
    tensors: Sequence[Tensor | None],
    wanted: Wanted,
    grads: Sequence[Tensor | None],
) -> tuple[Tensor | None, ...]:
    """Gradients that can be differentiated again, where gradients are on: autograd through what `compute` makes."""
    again = torch.is_grad_enabled()
    with torch.enable_grad():
        # Apart from one another, also where one was made of another, or two are the same.
        given = [None if tensor is None else tensor.view_as(tensor) for tensor in tensors]
        pairs = zip(compute(*given), grads, strict=True)
    linked = [(part, grad) for part, grad in pairs if part.requires_grad and grad is not None]
    if not linked:  # nothing is seen
        return tuple(None if tensor is None else torch.zeros_like(tensor) for tensor in tensors)
    inputs = [tensor for tensor, needed in zip(given, wanted, strict=True) if needed and tensor is not None]
    made, grad_made = zip(*linked, strict=True)
    found = iter(torch.autograd.grad(made, inputs, grad_made, create_graph=again, allow_unused=True))
    return tuple(next(found) if needed else None for needed in wanted)


def result_of(problem: Problem, outcome: Outcome) -> Result:
    """What the caller asked for."""
    top = outcome.max_scores if problem.aux.max_scores else None
    return Result(outcome.output, outcome.lse, top, outcome.entropy if problem.aux.entropy else None)


def transformed(tensors: Tensors) -> bool:
    """Whether a functorch transform or forward-mode differentiation is on: plain differentiable operations must run."""
    if _are_functorch_transforms_active():
        return True
    given = [tensor for tensor in tensors if tensor is not None]
    return forward_mode() and any(forward_ad.unpack_dual(tensor).tangent is not None for tensor in given)


def forward_mode() -> bool:
    """Whether forward-mode differentiation is on; outside it tensors cannot be asked for tangents."""
    return forward_ad._current_level >= 0  # noqa: SLF001 - torch has no public way to ask


def in_operations(*grads: Tensor | None) -> bool:
    """Whether a backward pass must be made of torch's operations: it is differentiated itself, or its incoming
    gradients stand for many, as of `torch.autograd.grad(is_grads_batched=True)`, which no engine can read.
    """
    if torch.is_grad_enabled():
        return True
    return any(grad is not None and (is_batchedtensor(grad) or is_legacy_batchedtensor(grad)) for grad in grads)


class _Attention(torch.autograd.Function):
    """Forward without a graph; backward by the engine, or through plain operations where it is differentiated itself.

    Gives the fields of a `Result`; only output and lse carry gradients.
    """

    @staticmethod
    def forward(
        ctx: Any, engine: Engine, problem: Problem, plan: PatternPlan, seed: int, *tensors: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        work = Work(problem, Tensors(*tensors), plan, seed)  # type: ignore[arg-type]
        outcome, careful = engine.answer(work)
        ctx.save_for_backward(*tensors, *outcome)
        ctx.question = engine, problem, plan, seed, careful
        ctx.set_materialize_grads(False)
        result = result_of(problem, outcome)
        ctx.mark_non_differentiable(*(extra for extra in result[2:] if extra is not None))
        return tuple(result)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor | None, grad_lse: Tensor | None, *_: Tensor | None) -> Any:
        engine, problem, plan, seed, careful = ctx.question
        saved = ctx.saved_tensors  # read once: recomputing checkpoints allow no more
        tensors, outcome, wanted = Tensors(*saved[:5]), Outcome(*saved[5:]), ctx.needs_input_grad[4:]
        with without_autocast(problem.device):
            grads = grad_output, grad_lse
            if in_operations(*grads):
                gradients = differentiable_gradients(problem, tensors, plan, seed, wanted, grads)
            else:
                if grad_output is None:
                    grad_output = torch.zeros_like(outcome.output)
                work, incoming = Work(problem, tensors, plan, seed), Incoming(grad_output, grad_lse)
                gradients = engine.gradients(work, outcome, incoming, wanted, careful=careful)
        return None, None, None, None, *gradients
