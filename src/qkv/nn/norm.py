"""The norm that ends a layer of the linear family: over each head, with a gate."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn

from qkv.linear.norms import gated_rms_norm

GateActivation = Literal["silu", "sigmoid"]


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
