"""Absolute positions as vectors that are added to those of tokens."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from qkv.cache.arguments import read_size
from qkv.errors import ValueOutOfRange, message
from qkv.nn.ids import check_positions
from qkv.nn.rotary_scaling import check_positive


def sinusoidal(
    positions: int | Tensor,
    dim: int,
    *,
    base: float = 10000.0,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
) -> Tensor:
    """The position vectors of the Transformer, sines and cosines of ever slower angles in turn:

        p[2i] = sin(position / base^(2i/dim)),   p[2i + 1] = cos(position / base^(2i/dim))

    positions: how many, counted from 0, or integers (L,) or (B, L). Result: (..., dim), by default in torch's default
    type, on the device of `positions` or `device`. Angles are computed in float64 and the result is rounded once, so it
    holds at any position. `dim` must be even.

    Source: Vaswani et al., arXiv:1706.03762, section 3.5.

    >>> sinusoidal(2, 4)
    tensor([[0.0000, 1.0000, 0.0000, 1.0000],
            [0.8415, 0.5403, 0.0100, 0.9999]])
    """
    if not isinstance(positions, Tensor):
        positions = torch.arange(read_size("positions", positions, 0), device=device)
    check_positions(positions)
    check_positive(base=base)
    exponents = torch.arange(0, _even(dim), 2, dtype=torch.float64, device=positions.device) / dim
    angles = positions.unsqueeze(-1) * torch.pow(base, -exponents)  # (..., dim/2)
    table = torch.stack((angles.sin(), angles.cos()), -1).flatten(-2)
    return table.to(torch.get_default_dtype() if dtype is None else dtype)


class SinusoidalPositions(nn.Module):
    """`sinusoidal` as a module: nothing is learned, and there is no longest input."""

    def __init__(self, dim: int, *, base: float = 10000.0) -> None:
        super().__init__()
        self.dim = _even(dim)
        check_positive(base=base)
        self.base = float(base)

    def forward(self, positions: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """The vectors (..., dim) of positions (L,) or (B, L)."""
        return sinusoidal(positions, self.dim, base=self.base, dtype=dtype)

    def extra_repr(self) -> str:
        """Sizes, for printing."""
        return f"{self.dim}, base={self.base}"


class LearnedPositions(nn.Module):
    """A learned vector for each position below `max_length`, as in BERT and GPT.

    weight: (max_length, dim), drawn from N(0, 0.02²) as in GPT (Radford et al. 2018, section 4.1) and BERT.
    """

    def __init__(self, max_length: int, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(read_size("max_length", max_length, 1), read_size("dim", dim, 1)))
        nn.init.normal_(self.weight, std=0.02)

    def forward(self, positions: Tensor) -> Tensor:
        """The vectors (..., dim) of positions (L,) or (B, L). Raises DTypeError or ValueOutOfRange."""
        check_positions(positions, count=self.weight.shape[0])
        return F.embedding(positions, self.weight)

    def extra_repr(self) -> str:
        """Sizes, for printing."""
        return f"{self.weight.shape[0]}, {self.weight.shape[1]}"


def _even(dim: object) -> int:
    size = read_size("dim", dim, 2)
    if size % 2:
        raise ValueOutOfRange(message("`dim` must be even", f"got {size}", "sines and cosines come in pairs"))
    return size
