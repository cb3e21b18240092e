"""How a packed call runs: all documents in one call of an engine that can, differentiable as other calls are; else one
document after another.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from qkv.backends.autograd import Engine, gradients_through, in_operations, result_of, transformed
from qkv.backends.base import Backend, Gradients, Incoming, Outcome, Result, Work, pattern_plan, without_autocast
from qkv.backends.online import forward
from qkv.dispatch import choose
from qkv.packing import Packed
from qkv.patterns.schedule import PatternPlan
from qkv.problem import Tensors
from qkv.shapes import values_can_be_seen


def run_packed(engine: Engine, packed: Packed, seed: int) -> Result:
    """Answer all documents at once, differentiable in whatever way the call is differentiated."""
    problem, tensors = packed.problem, packed.tensors
    if transformed(tensors) or not values_can_be_seen(tensors.query):
        return _joined(result_of(problem, outcome) for outcome in _plainly(packed, seed))
    plan = packed.plan()
    if problem.needs_grad:
        return Result(*_PackedAttention.apply(engine, packed, plan, seed, *tensors))  # type: ignore[no-untyped-call]
    with torch.no_grad():
        outcome, _ = engine.answer(Work(problem, tensors, plan, seed, packed.packing))
    return result_of(problem, outcome)


def run_one_by_one(backend: Backend, packed: Packed, seed: int) -> Result:
    """Answer one document after another; a document that the backend does not take is refused before any runs."""
    documents = list(packed.documents())
    for problem, _ in documents:
        choose(problem, backend.name)
    return _joined(backend.run(problem, tensors, seed) for problem, tensors in documents)


def _plainly(packed: Packed, seed: int) -> Iterable[Outcome]:
    """Each document by plain differentiable operations."""
    for problem, tensors in packed.documents():
        yield forward(problem, tensors, pattern_plan(problem), seed, careful=True)


def _joined(results: Iterable[Result]) -> Result:
    """Results (1, H, L, ...) one after another along L; a field that a backend does not have stays as it is."""
    fields = zip(*results, strict=True)
    return Result(*(torch.cat(parts, dim=2) if _has_rows(parts[0]) else parts[0] for parts in fields))


def _has_rows(field: Tensor | None) -> bool:
    return field is not None and field.ndim > 1


class _PackedAttention(torch.autograd.Function):
    """Forward without a graph; backward by the engine, or through plain operations where it is differentiated itself.

    Gives the fields of a `Result`; only output and lse carry gradients.
    """

    @staticmethod
    def forward(
        ctx: Any, engine: Engine, packed: Packed, plan: PatternPlan, seed: int, *tensors: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        work = Work(packed.problem, Tensors(*tensors), plan, seed, packed.packing)  # type: ignore[arg-type]
        outcome, careful = engine.answer(work)
        ctx.save_for_backward(*tensors, *outcome)
        ctx.question = engine, packed.problem, packed.packing, plan, seed, careful
        ctx.set_materialize_grads(False)
        result = result_of(packed.problem, outcome)
        ctx.mark_non_differentiable(*(extra for extra in result[2:] if extra is not None))
        return tuple(result)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor | None, grad_lse: Tensor | None, *_: Tensor | None) -> Any:
        engine, problem, packing, plan, seed, careful = ctx.question
        saved = ctx.saved_tensors  # read once: recomputing checkpoints allow no more
        tensors, outcome, wanted = Tensors(*saved[:5]), Outcome(*saved[5:]), ctx.needs_input_grad[4:]
        with without_autocast(problem.device):
            if in_operations(grad_output, grad_lse):
                gradients = _differentiable(Packed(problem, tensors, packing), seed, wanted, (grad_output, grad_lse))
            else:
                if grad_output is None:
                    grad_output = torch.zeros_like(outcome.output)
                work, incoming = Work(problem, tensors, plan, seed, packing), Incoming(grad_output, grad_lse)
                gradients = engine.gradients(work, outcome, incoming, wanted, careful=careful)
        return None, None, None, None, *gradients


def _differentiable(
    packed: Packed, seed: int, wanted: tuple[bool, ...], grads: tuple[Tensor | None, Tensor | None]
) -> Gradients:
    """Gradients as functions that can be differentiated again: autograd through plain operations, document by
    document.
    """

    def compute(*given: Tensor | None) -> tuple[Tensor, Tensor]:
        question = replace(packed, tensors=Tensors(*given))  # type: ignore[arg-type]
        made = _joined(result_of(packed.problem, outcome) for outcome in _plainly(question, seed))
        return made.output, made.lse

    return Gradients(*gradients_through(compute, packed.tensors, wanted, grads))
