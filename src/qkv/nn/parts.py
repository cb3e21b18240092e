"""What layers are made of: widths of heads, the taps of a short convolution, the type of gates, first values."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from qkv.cache.arguments import read_size
from qkv.errors import ShapeError, ValueOutOfRange, message
from qkv.linear.convolution import MOST_TAPS
from qkv.linear.recurrence import compute_dtype


def divided(name: str, value: int, by: str, parts: int) -> int:
    """value / parts, which must be whole."""
    if value % parts:
        raise ShapeError(
            message(
                f"`{name}` must be divisible by `{by}`",
                f"got {name} {value} and {by} {parts}",
                "choose another number, or give the width of a head by itself",
            )
        )
    return value // parts


def head_width(name: str, given: int | None, dim: int, heads: int) -> int:
    """The width of a head: what the argument `name` says, else an even share of `dim`."""
    return divided("dim", dim, "heads", heads) if given is None else read_size(name, given, 1)


def wide(x: Tensor) -> Tensor:
    """The type of gates and of all that is exponentiated: float64 stays, everything else becomes float32."""
    return x.to(compute_dtype(x.dtype))


def short_taps(channels: int, size: int, *, bias: bool = False) -> nn.Conv1d:
    """The parameters of a causal depthwise convolution, `weight` (C, 1, K) as checkpoints have it."""
    if not 1 <= read_size("conv_size", size, 1) <= MOST_TAPS:
        seen = f"got {size}"
        raise ValueOutOfRange(message(f"`conv_size` must be at most {MOST_TAPS}", seen, "the layers in use have 4"))
    return nn.Conv1d(channels, channels, size, groups=channels, bias=bias)


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
