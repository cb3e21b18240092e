"""Calls like an earlier one: what was asked of tensors of the same form is not checked and planned again.

Only for calls of q, k and v that the native core answers; all others take the usual way.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._C import _are_functorch_transforms_active, _len_torch_dispatch_stack

from qkv.backends.autograd import differentiable_gradients, forward_mode, in_operations
from qkv.backends.base import Incoming, Work, pattern_plan, without_autocast
from qkv.backends.cpu import Cpu, Prepared
from qkv.dispatch import Choice
from qkv.dropout import draw_seed
from qkv.patterns.pattern import Pattern
from qkv.patterns.schedule import PatternPlan
from qkv.problem import Problem, Tensors
from qkv.question import Question
from qkv.settings import BACKEND, read
from qkv.shapes import ORDINARY

MOST = 256  # calls remembered
LARGEST = 1 << 16  # bytes of a schedule, and of the tensors of its pattern, that are kept for the sake of one
SIMPLE = (type(None), int, float, str)  # options that equal one another only where they mean the same


@dataclass(frozen=True, slots=True, eq=False)
class Known:
    """A call that was asked before: its problem, plan and native form."""

    pattern: object  # kept, since the key may hold its identity
    problem: Problem
    plan: PatternPlan
    prepared: Prepared
    strides: tuple[tuple[int, ...], ...]  # of q, k and v as (B, H, L, D), which it is prepared for
    swapped: bool  # layout BLHD
    output: Tensor  # as the output will be, (B, H, L, V), and its shift and total, (2, B, H, L): without memory
    state: Tensor

    def answer(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        if self.swapped:
            query, key, value = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
        seed = draw_seed(None) if self.problem.dropout_p else 0
        if self.problem.needs_grad:
            output: Tensor = _Known.apply(self, seed, query, key, value)  # type: ignore[no-untyped-call]
        else:
            output = self.prepared.output(Tensors(query, key, value), torch.empty_like(self.output), seed)
        return output.transpose(1, 2) if self.swapped else output


class _Known(torch.autograd.Function):
    """The output alone, from q, k and v alone: what a remembered call needs, and nothing else."""

    @staticmethod
    def forward(ctx: Any, known: Known, seed: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        state = torch.empty_like(known.state)
        output = known.prepared.output(Tensors(query, key, value), torch.empty_like(known.output), seed, state)
        ctx.save_for_backward(query, key, value, output, state)
        ctx.question = known, seed
        return output

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> Any:
        known, seed = ctx.question
        query, key, value, output, state = ctx.saved_tensors
        work = Work(known.problem, Tensors(query, key, value), known.plan, seed)
        wanted = (*ctx.needs_input_grad[2:], False, False)
        with without_autocast(query.device):
            if in_operations(grad_output):
                grads = grad_output, None
                gradients = differentiable_gradients(*work[:4], wanted, grads)
            else:
                saved, prepared = (output, state[0], state[1]), known.prepared
                if (query.stride(), key.stride(), value.stride()) != known.strides:  # a hook gave other memory back
                    prepared = Prepared.of(work)
                gradients = prepared.backward(work, saved, Incoming(grad_output, None), wanted)
        return None, None, *gradients[:3]


_known: OrderedDict[Hashable, Known] = OrderedDict()


def key_of(
    query: Tensor, key: Tensor, value: Tensor, pattern: object, offset: object, options: tuple[object, ...]
) -> Hashable | None:
    """What tells one call from another, values in the tensors apart; None where a call is not to be remembered."""
    if torch.compiler.is_compiling() or _are_functorch_transforms_active() or _len_torch_dispatch_stack():
        return None  # somebody listens to every operation
    if not (_is_plain(query) and _is_plain(key) and _is_plain(value)):
        return None
    if not (offset is None or type(offset) is int) or any(type(option) not in SIMPLE for option in options):
        return None
    if torch.is_autocast_enabled("cpu") or forward_mode():
        return None
    graded = torch.is_grad_enabled() and (query.requires_grad, key.requires_grad, value.requires_grad)
    shapes = query.shape, key.shape, value.shape
    strides = query.stride(), key.stride(), value.stride()
    dtypes = query.dtype, key.dtype, value.dtype
    return shapes, strides, dtypes, graded, _name(pattern), offset, options, read(BACKEND)


def _is_plain(tensor: object) -> bool:
    """Whether it is a dense 4-D tensor in the processor's memory, and nothing that only behaves like one."""
    if type(tensor) not in ORDINARY:
        return False
    assert isinstance(tensor, Tensor)
    dense = tensor.layout is torch.strided and not (tensor.is_nested or tensor.is_neg())
    return dense and tensor.is_cpu and tensor.ndim == 4


def _name(pattern: object) -> Hashable:
    """A pattern of literals by its text, all else by identity."""
    if isinstance(pattern, Pattern) and not pattern.tensors and "<" not in pattern.form:
        return pattern.form, pattern.align
    return id(pattern)


def recall(key: Hashable | None) -> Known | None:
    """The call of this key, if it was asked before."""
    return None if key is None else _known.get(key)


def remember(key: Hashable | None, question: Question, choice: Choice, pattern: object) -> None:
    """Keep a call that was checked and answered."""
    if key is None or not isinstance(choice.backend, Cpu):
        return
    problem = question.problem
    plan = pattern_plan(problem)
    held = sum(member.nbytes for member in plan.members) + sum(tensor.nbytes for tensor in problem.pattern.tensors)
    if not plan.pairs or held > LARGEST:
        return  # it warns each time; or it is no small call, and the cache of schedules is enough
    blank, rows = question.tensors.query.new_empty(1), (problem.batch, problem.heads, problem.queries)
    _known[key] = Known(
        pattern,
        problem,
        plan,
        Prepared.of(Work(problem, question.tensors, plan, 0)),
        tuple(tensor.stride() for tensor in question.tensors[:3]),
        question.views.layout == "BLHD",
        blank.expand(*rows, problem.value_dim),
        blank.to(problem.compute_dtype).expand(2, *rows),
    )
    if len(_known) > MOST:
        _known.popitem(last=False)
