"""Attention over an image: patches that see their neighbours, and a class token that sees all and is seen by all."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.nn import functional as F

from qkv.attention import attention
from qkv.errors import ShapeError, message
from qkv.merging import merge
from qkv.nn.context import Context
from qkv.nn.multihead_attention import MultiheadAttention
from qkv.patterns.given import mask
from qkv.patterns.named import neighborhood, windows2d
from qkv.patterns.pattern import Pattern
from qkv.types import AuxOutput, AuxRequest

Grid: TypeAlias = tuple[int, int]  # patches down and across
LSE = AuxRequest(lse=True)


class PatchAttention(MultiheadAttention):
    """Attention over a class token and the patches of a grid: x (B, 1 + h·w, E), the class token first."""

    def over(self, x: Tensor, reach: Pattern | None, context: Context) -> tuple[Tensor, AuxOutput | None]:
        """The layer over x: y (B, 1 + h·w, E), and what `context.aux` asked for.

        reach: which patches a patch sees, beside the class token, which sees all; None: all. The patches and the class
        token are two sets of keys, attended over apart and merged by their log-sum-exp, so that cost follows the reach.
        """
        if reach is None:
            return self.attend(x, context)
        if context.aux is not None:  # of all pairs in one piece, as whoever looks at weights does
            keep = F.pad(reach.to_dense(x.shape[1] - 1), (1, 0, 1, 0), value=True)
            return self.attend(x, Context(pattern=mask(keep=keep), aux=context.aux, backend=context.backend))
        q, k, v = (part.transpose(1, 2) for part in self.projected(x, x, x))  # (B, H, L, D)
        how: dict[str, Any] = {
            "dropout_p": self.attention_dropout if self.training else 0.0,
            "backend": context.backend or self.backend,
        }
        token = attention(q[:, :, :1], k, v, **how)
        near, of_near = attention(q[:, :, 1:], k[:, :, 1:], v[:, :, 1:], pattern=reach, return_aux=LSE, **how)
        beside, of_beside = attention(q[:, :, 1:], k[:, :, :1], v[:, :, :1], return_aux=LSE, **how)
        assert of_near.lse is not None
        assert of_beside.lse is not None
        patches = merge([near, beside], [of_near.lse, of_beside.lse]).output
        return self.merged(torch.cat([token, patches], dim=2).transpose(1, 2)), None


@lru_cache
def neighbours(grid: Grid, kernel: int) -> Pattern:
    """The kernel by kernel patches around each, moved inward at the borders."""
    return neighborhood(grid, kernel)


@lru_cache
def windows(grid: Grid, window: int, shift: int) -> Pattern:
    """Windows that cut the grid without a remainder, moved down and right by `shift`; what borders cut off is apart."""
    if grid[0] % window or grid[1] % window:
        holds = f"the grid of patches must be whole windows of {window} by {window}"
        raise ShapeError(message(holds, f"got {grid[0]} by {grid[1]}", "choose a window that divides both"))
    return windows2d(grid, window, shift)
