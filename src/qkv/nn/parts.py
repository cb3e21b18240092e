"""What layers are made of: widths of heads, the taps of a short convolution, the type of gates."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from qkv.cache.arguments import read_size
from qkv.errors import ShapeError, ValueOutOfRange, message

MOST_TAPS = 8


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
    return x if x.dtype == torch.float64 else x.to(torch.float32)


def short_taps(channels: int, size: int, *, bias: bool = False) -> nn.Conv1d:
    """The parameters of a causal depthwise convolution, `weight` (C, 1, K) as checkpoints have it."""
    if not 1 <= read_size("conv_size", size, 1) <= MOST_TAPS:
        seen = f"got {size}"
        raise ValueOutOfRange(message(f"`conv_size` must be at most {MOST_TAPS}", seen, "the layers in use have 4"))
    return nn.Conv1d(channels, channels, size, groups=channels, bias=bias)
