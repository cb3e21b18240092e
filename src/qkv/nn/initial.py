"""First values of parameters that several layers share."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn


def log_uniform_time_step(count: int, low: float = 1e-3, high: float = 1e-1, floor: float = 1e-4) -> Tensor:
    """Biases b with softplus(b) spread evenly in its logarithm over low .. high, and not below `floor`.

    Source: Gu and Dao's Mamba and Mamba-2, whose layers Gated DeltaNet and Kimi Delta Attention follow in this.
    """
    span = math.log(high) - math.log(low)
    step = torch.exp(torch.rand(count) * span + math.log(low)).clamp(min=floor)
    return step + torch.log(-torch.expm1(-step))


def log_of_uniform(count: int, low: float, high: float) -> Tensor:
    """log A with A uniform over low .. high."""
    return torch.empty(count).uniform_(low, high).log()


def xavier_(gain: float, *layers: nn.Linear) -> None:
    """Glorot's uniform weights with a gain, and zero biases."""
    for layer in layers:
        nn.init.xavier_uniform_(layer.weight, gain)
        if layer.bias is not None:
            nn.init.zeros_(layer.bias)
