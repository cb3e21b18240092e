"""Operations beside the recurrence that the native core computes in one pass, and plain torch everywhere else.

An operation has two forms that agree: plain torch, differentiable any number of times on any device, and the core's,
for ordinary tensors in the processor's memory. The core's gradients are those of the first order; where they are
differentiated themselves, they come through the plain form.
"""

from __future__ import annotations

from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor
from torch.autograd import forward_ad

from qkv.backends.autograd import Wanted, forward_mode, gradients_through, in_operations
from qkv.backends.cpu import TYPES, in_memory
from qkv.backends.extension import MISSING, check_isa
from qkv.shapes import ORDINARY, values_can_be_seen
from qkv.values import NARROW

Given: TypeAlias = tuple[Tensor | None, ...]


class Operation(Protocol):
    """What is asked of some tensors, the first of which is always there."""

    def plain(self, *tensors: Any) -> tuple[Tensor, ...]:
        """The results as differentiable torch operations."""

    def fused(self, *tensors: Any) -> tuple[Tensor, ...]:
        """The same by the core, without a graph."""

    def gradients(self, tensors: Any, grads: Given, wanted: Wanted) -> Given:
        """The tensors' gradients by the core; None where not wanted. A result's gradient of None is zero."""


def run(operation: Operation, *tensors: Tensor | None) -> tuple[Tensor, ...]:
    """The results, differentiable in whatever way the call is differentiated."""
    if not core_takes(*tensors):
        return operation.plain(*tensors)
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors):
        return _Fused.apply(operation, *tensors)  # type: ignore[no-untyped-call]
    return operation.fused(*tensors)


def core_takes(*tensors: Tensor | None) -> bool:
    """Whether the core can compute with these tensors: it is there, and they are its kind."""
    first = tensors[0]
    if MISSING is not None or first is None or not values_can_be_seen(first):
        return False
    for tensor in tensors:
        if tensor is not None and not (
            tensor.device.type == "cpu" and type(tensor) in ORDINARY and tensor.dtype in TYPES
        ):
            return False
    check_isa()
    return not has_tangents(*tensors)


def has_tangents(*tensors: Tensor | None) -> bool:
    """Whether forward-mode differentiation goes through a call of these."""
    return forward_mode() and any(t is not None and forward_ad.unpack_dual(t).tangent is not None for t in tensors)


def core_reads(tensor: Tensor, wide: torch.dtype) -> Tensor:
    """A dense tensor of a type that the core reads beside numbers of the compute type."""
    return readable(tensor, wide).contiguous()


def readable(tensor: Tensor, wide: torch.dtype) -> Tensor:
    """A tensor of the compute type, or of 16 bits beside float32; any other is converted."""
    fits = tensor.dtype == wide or (wide == torch.float32 and tensor.dtype in NARROW)
    return tensor if fits else tensor.to(wide)


def side_by_side(tensor: Tensor) -> Tensor:
    """The tensor, or a copy, whose last axis lies without gaps."""
    return tensor if tensor.stride(-1) == 1 or tensor.shape[-1] == 1 else tensor.contiguous()


class _Fused(torch.autograd.Function):
    """The core's form, and its gradients or, where they are differentiated themselves, those of the plain form."""

    @staticmethod
    def forward(ctx: Any, operation: Operation, *tensors: Tensor | None) -> tuple[Tensor, ...]:
        ctx.save_for_backward(*tensors)
        ctx.operation = operation
        ctx.set_materialize_grads(False)
        return operation.fused(*tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        tensors, wanted, operation = ctx.saved_tensors, ctx.needs_input_grad[1:], ctx.operation
        if in_operations(*grads):
            return None, *gradients_through(operation.plain, tensors, wanted, grads)
        given = tuple(None if grad is None else in_memory(grad) for grad in grads)
        return None, *operation.gradients(tensors, given, wanted)
