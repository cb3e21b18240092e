"""Norms over the last axis: those of a model's stream, and those that end a layer of the linear family, with a gate."""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import LayerNorm as LayerNorm  # noqa: PLC0414 - a name of this package too

from qkv.backends.autograd import forward_mode
from qkv.backends.cpu import TYPES
from qkv.backends.extension import MISSING, check_isa, native
from qkv.cache.arguments import read_size
from qkv.errors import ValueOutOfRange, message, unknown_name
from qkv.inputs import read_number
from qkv.linear.norms import gated_rms_norm
from qkv.shapes import ORDINARY, values_can_be_seen

GateActivation = Literal["silu", "sigmoid"]
NormKind = Literal["layer", "rms"]


class RMSNorm(nn.Module):
    """The root-mean-square norm over the last axis: y = x / √(mean of x² + eps) · weight.

    x: (..., width), of any float type, computed in float32 (float64 for float64) and rounded once, the weight included.
    weight: (width,), ones at first. Raises the errors of `qkv.errors`.

    Source: Zhang, Sennrich, "Root Mean Square Layer Normalization" (2019), equation 4.

    >>> RMSNorm(2, eps=0.0)(torch.tensor([3.0, 4.0])).detach()
    tensor([0.8485, 1.1314])
    """

    def __init__(self, width: int, *, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(read_size("width", width, 1)))
        self.eps = _read_eps(eps)

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight
        if _is_ready(x, weight):
            return _made_at_once(x, weight, self.eps)
        return gated_rms_norm(x, None, weight, eps=self.eps)

    def extra_repr(self) -> str:
        """Sizes, for printing."""
        return f"{self.weight.shape[0]}, eps={self.eps}"


def make_norm(kind: NormKind, width: int, eps: float | None = None, *, bias: bool = True) -> nn.Module:
    """The norm of a stream by its name: "layer", torch's LayerNorm (eps 1e-5 by default), or "rms" (1e-6).

    bias: whether a layer norm has one; an RMS norm never has.
    """
    if kind == "rms":
        return RMSNorm(width, eps=1e-6 if eps is None else eps)
    if kind == "layer":
        return LayerNorm(read_size("width", width, 1), eps=1e-5 if eps is None else _read_eps(eps), bias=bias)
    raise unknown_name("norm", kind, ("layer", "rms"))


def _read_eps(eps: object) -> float:
    number = read_number("eps", eps, "1e-6 is common")
    if not 0.0 <= number < math.inf:
        raise ValueOutOfRange(message("`eps` must be finite and at least 0", f"got {eps}", "1e-6 is common"))
    return number


def _is_ready(x: Tensor, weight: Tensor) -> bool:
    """Whether the core can read both as they lie and no gradient is wanted: the one call of each step of decoding, for
    which the general way asks more than it computes.
    """
    return (
        MISSING is None
        and type(x) in ORDINARY
        and type(weight) in ORDINARY
        and not (torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad))
        and values_can_be_seen(x)
        and x.is_cpu
        and weight.is_cpu
        and x.dtype in TYPES
        and x.dtype == weight.dtype
        and x.layout is torch.strided
        and not x.is_nested
        and x.is_contiguous()
        and weight.is_contiguous()
        and x.shape[-1:] == weight.shape
        and not x.is_neg()
        and not forward_mode()
    )


def _made_at_once(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`gated_rms_norm` without a gate for rows that lie one after another."""
    check_isa()
    made = torch.empty_like(x)
    width = x.shape[-1]
    kinds, rows = (TYPES[x.dtype], 0, TYPES[weight.dtype]), (x.numel() // width, 1, width, 1)
    pointers = (x.data_ptr(), 0, weight.data_ptr(), made.data_ptr())
    native.norm(torch.get_num_threads(), kinds, 0, False, True, rows, (width, 0), (0, 0), eps, *pointers)
    return made


class GatedRMSNorm(nn.Module):
    """RMS norm over the last axis, times a weight of that width, times an activation of the gate."""

    def __init__(self, width: int, *, eps: float, activation: GateActivation = "silu") -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps
        self.activation: GateActivation = activation

    def forward(self, x: Tensor, gate: Tensor | None) -> Tensor:
        return gated_rms_norm(x, gate, self.weight, eps=self.eps, activation=self.activation)

    def extra_repr(self) -> str:
        """Sizes, for printing."""
        return f"{self.weight.shape[0]}, eps={self.eps}, activation={self.activation!r}"


class GroupedGatedRMSNorm(nn.Module):
    """Mamba-2's: the gate first, x · silu(gate), then the RMS norm over each of `groups` parts, then the weight."""

    def __init__(self, width: int, groups: int, *, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.groups = groups
        self.eps = eps

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        x, gate = (part.unflatten(-1, (self.groups, -1)) for part in (x, gate))
        return gated_rms_norm(x, gate, eps=self.eps, gate_first=True).flatten(-2) * self.weight

    def extra_repr(self) -> str:
        """Sizes, for printing."""
        return f"{self.weight.shape[0]}, groups={self.groups}, eps={self.eps}"
