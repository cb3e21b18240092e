"""Norms over the last axis as the linear family's layers use them: with a gate after the recurrence, and of q and k."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor
from torch.nn import functional as F

from qkv.backends.autograd import Wanted
from qkv.backends.cpu import TYPES, address
from qkv.backends.extension import native
from qkv.errors import ShapeError, ValueOutOfRange, message, unknown_name
from qkv.inputs import read_number
from qkv.linear.beside import check_beside
from qkv.linear.fused import Given, core_reads, run, side_by_side
from qkv.linear.recurrence import compute_dtype
from qkv.patterns.arguments import one_flag
from qkv.shapes import check_dense, check_float

GateActivation: TypeAlias = Literal["silu", "sigmoid"]
ACTIVATIONS = {"silu": 1, "sigmoid": 2}  # by their numbers in the core


def gated_rms_norm(
    x: Tensor,
    gate: Tensor | None = None,
    weight: Tensor | None = None,
    *,
    eps: float = 1e-6,
    activation: GateActivation = "silu",
    gate_first: bool = False,
) -> Tensor:
    """The root-mean-square norm over the last axis, with a weight and a gate.

        y = n(x) · weight · act(gate),             n(a) = a / √(mean of a² + eps)
        y = n(x · act(gate)) · weight              with gate_first

    x: (..., W). gate: as x, in its type or float32; None: no gate. weight: (W,), or as many last axes of x as it has,
    (G, W) for G groups with weights of their own; None: ones. activation: "silu", z · sigmoid(z), or "sigmoid".

    Result: as x, rounded once. Computed in float32 (float64 for float64). On the CPU it is one pass of the native core
    over each row, forward and backward, and does not depend on the number of threads.

    Raises the errors of `qkv.errors`.

    Source: Zhang, Sennrich, "Root Mean Square Layer Normalization" (2019), equation 4; the gate after it as in Gated
    DeltaNet and, with a sigmoid, Kimi Delta Attention; before it as in Mamba-2.

    >>> import torch
    >>> gated_rms_norm(torch.tensor([3.0, 4.0]), torch.zeros(2), activation="sigmoid", eps=0.0)
    tensor([0.4243, 0.5657])
    """
    if activation not in ACTIVATIONS:
        raise unknown_name("activation", activation, ACTIVATIONS)
    x = _read_x(x)
    operation = _Norm(_read_eps(eps), ACTIVATIONS[activation], one_flag("gate_first", gate_first))
    return run(operation, x, _read_gate(gate, x), _read_weight(weight, x))[0]


def l2_norm(x: Tensor, *, eps: float = 1e-6) -> Tensor:
    """Rows of length 1: y = x / √(sum of x² + eps) over the last axis.

    x: (..., W). Result: as x. The epsilon stands under the root, as in flash-linear-attention and transformers, unlike
    `torch.nn.functional.normalize`: a row of zeros gives zeros, and a finite gradient. Computed as `gated_rms_norm`.
    Raises the errors of `qkv.errors`.

    >>> import torch
    >>> l2_norm(torch.tensor([3.0, 4.0]))
    tensor([0.6000, 0.8000])
    """
    return run(_Norm(_read_eps(eps), mean=False), _read_x(x), None, None)[0]


@dataclass(frozen=True, slots=True)
class _Norm:
    """One norm besides its tensors x, gate and weight."""

    eps: float
    activation: int = 0  # of the gate, where there is one
    gate_first: bool = False
    mean: bool = True  # of the squares, else their sum

    def plain(self, x: Tensor, gate: Tensor | None, weight: Tensor | None) -> tuple[Tensor, ...]:
        wide = compute_dtype(x.dtype)
        a = x.to(wide)
        if gate is not None:
            gate = gate.to(wide)
            gate = F.silu(gate) if self.activation == ACTIVATIONS["silu"] else gate.sigmoid()
        if gate is not None and self.gate_first:
            a = a * gate
        squares = a.square()
        size = squares.mean(-1, keepdim=True) if self.mean else squares.sum(-1, keepdim=True)
        y = a * (size + self.eps).rsqrt()
        if weight is not None:
            y = y * weight.to(wide)
        if gate is not None and not self.gate_first:
            y = y * gate
        return (y.to(x.dtype),)

    def fused(self, x: Tensor, gate: Tensor | None, weight: Tensor | None) -> tuple[Tensor, ...]:
        output = torch.empty_like(x, memory_format=torch.contiguous_format)
        asked, _, kept = self._asked(x, gate, weight)
        native.norm(*asked, output.data_ptr())  # `kept` lives until it returns
        del kept
        return (output,)

    def gradients(self, tensors: Any, grads: Given, wanted: Wanted) -> Given:
        x, gate, weight = tensors
        given = x.new_zeros(x.shape) if grads[0] is None else grads[0]
        asked, (given, given_stride), kept = self._asked(x, gate, weight, given)
        made = [
            torch.empty(t.shape, dtype=dtype or t.dtype, device=x.device) if needed and t is not None else None
            for t, needed, dtype in zip(tensors, wanted, (None, None, compute_dtype(x.dtype)), strict=True)
        ]
        native.norm_backward(*asked, given_stride, given.data_ptr(), *map(address, made))
        del kept
        return tuple(g if g is None else g.to(t.dtype) for g, t in zip(made, tensors, strict=True))

    def _asked(
        self, x: Tensor, gate: Tensor | None, weight: Tensor | None, given: Tensor | None = None
    ) -> tuple[tuple[Any, ...], tuple[Any, Any], Given]:
        """What the core is told first, the gradient of the output with its strides, and the tensors that it reads."""
        rows, ((x, stride), (gate, gate_stride), (given, given_stride)) = _as_rows(x, gate, given)
        if weight is not None:
            weight = core_reads(weight, compute_dtype(x.dtype))
        width = x.shape[-1]
        asked = (
            torch.get_num_threads(),
            (TYPES[x.dtype], 0 if gate is None else TYPES[gate.dtype], 0 if weight is None else TYPES[weight.dtype]),
            0 if gate is None else self.activation,
            self.gate_first,
            self.mean,
            (*rows, width, 1 if weight is None else weight.numel() // width),
            stride,
            gate_stride,
            self.eps,
            *map(address, (x, gate, weight)),
        )
        return asked, (given, given_stride), (x, gate, weight)


def _as_rows(x: Tensor, *others: Tensor | None) -> tuple[tuple[int, int], list[tuple[Any, tuple[int, int]]]]:
    """All leading axes as (outer, inner), and each tensor with its strides for these; a copy where it has none."""
    count = math.prod(x.shape[:-1])
    every = [x, *others]
    if all(t is None or t.is_contiguous() for t in every):
        return (count, 1), [(t, (x.shape[-1], 0)) for t in every]
    every = [None if t is None else side_by_side(t) for t in every]
    for split in range(x.ndim - 1, -1, -1):
        found = [(0, 0) if t is None else _two_strides(t, split) for t in every]
        strides = [pair for pair in found if pair is not None]
        if len(strides) == len(every):
            return (math.prod(x.shape[:split]), math.prod(x.shape[split:-1])), list(zip(every, strides, strict=True))
    return (count, 1), [(None if t is None else t.contiguous(), (x.shape[-1], 0)) for t in every]


def _two_strides(tensor: Tensor, split: int) -> tuple[int, int] | None:
    """One stride for the leading axes up to `split` and one for those behind; None where there are no such two."""
    pairs = list(zip(tensor.shape[:-1], tensor.stride()[:-1], strict=True))
    outer, inner = _one_stride(pairs[:split]), _one_stride(pairs[split:])
    return None if outer is None or inner is None else (outer, inner)


def _one_stride(axes: Sequence[tuple[int, int]]) -> int | None:
    """The stride of some axes walked as one; None where they cannot be."""
    axes = [(size, stride) for size, stride in axes if size != 1]
    for (_, stride), (size, inner) in itertools.pairwise(axes):
        if stride != size * inner:
            return None
    return axes[-1][1] if axes else 0


def _read_x(x: object) -> Tensor:
    x = check_dense("x", x)
    check_float("x", x)
    if x.ndim == 0 or x.shape[-1] == 0:
        remedy = "its last axis is the row that is normed"
        raise ShapeError(message("`x` must be (..., W) with W of at least 1", f"got {list(x.shape)}", remedy))
    return x


def _read_gate(gate: object, x: Tensor) -> Tensor | None:
    if gate is None:
        return None
    gate = check_beside("gate", gate, x, {x.dtype, compute_dtype(x.dtype)}, of="x")
    if gate.shape != x.shape:
        holds, seen = f"`gate` must have the shape of `x`, {list(x.shape)}", f"got {list(gate.shape)}"
        raise ShapeError(message(holds, seen, "repeat it without a copy by gate.expand_as(x)"))
    return gate


def _read_weight(weight: object, x: Tensor) -> Tensor | None:
    if weight is None:
        return None
    weight = check_beside("weight", weight, x, of="x")
    if weight.ndim == 0 or weight.ndim > x.ndim or weight.shape != x.shape[x.ndim - weight.ndim :]:
        holds = f"`weight` must be (W,) = [{x.shape[-1]}], or have the last axes of `x`, {list(x.shape)}"
        raise ShapeError(message(holds, f"got {list(weight.shape)}", "leave it out for ones"))
    return weight


def _read_eps(eps: object) -> float:
    number = eps if type(eps) is float else read_number("eps", eps, "1e-6 is common")
    if not 0.0 <= number < math.inf:
        raise ValueOutOfRange(message("`eps` must be finite and at least 0", f"got {eps}", "1e-6 is common"))
    return number
