"""Tokens as vectors, with their positions and the dropout at the door of a model."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from qkv.cache.arguments import read_size
from qkv.errors import DTypeError, ShapeError, ValueOutOfRange, message
from qkv.inputs import read_number
from qkv.nn.dropping import read_share
from qkv.nn.ids import check_ids, check_positions
from qkv.nn.positions import SinusoidalPositions


class Embedding(nn.Module):
    """dropout(weight[ids] · scale + positions): token numbers (B, L) to vectors (B, L, dim).

    positions: a module that gives the vectors of positions, SinusoidalPositions, LearnedPositions or one of yours;
    None adds nothing, as for rotary or relative positions. scale: what the vectors of tokens are multiplied by,
    math.sqrt(dim) in the Transformer; None is 1. embedding_dropout: the share of numbers set to 0 in training, the
    others divided by 1 - p.

    weight: (vocabulary, dim), drawn from N(0, 1/dim): with scale √dim the vectors enter the model with variance 1, and
    used again as the output layer they give logits of variance 1, as in the Transformer (Vaswani et al.,
    arXiv:1706.03762, section 3.4, and the code published with it).

    >>> embedding = Embedding(1000, 64, positions=SinusoidalPositions(64), scale=8.0, embedding_dropout=0.1)
    >>> embedding(torch.tensor([[17, 4, 256]])).shape
    torch.Size([1, 3, 64])
    """

    def __init__(
        self,
        vocabulary: int,
        dim: int,
        *,
        positions: nn.Module | None = None,
        scale: float | None = None,
        embedding_dropout: float = 0.0,
    ) -> None:
        super().__init__()
        dim = read_size("dim", dim, 1)
        if positions is not None and not isinstance(positions, nn.Module):
            remedy = "make one, as by LearnedPositions(512, dim)"
            raise DTypeError(message("`positions` must be a module or None", f"got {positions!r}", remedy))
        self.scale = None if scale is None else read_number("scale", scale, "math.sqrt(dim) is the Transformer's")
        if self.scale is not None and not math.isfinite(self.scale):
            raise ValueOutOfRange(message("`scale` must be finite", f"got {scale}", "leave it out for 1"))
        self.embedding_dropout = read_share("embedding_dropout", embedding_dropout)
        self.positions = positions
        self.weight = nn.Parameter(torch.empty(read_size("vocabulary", vocabulary, 1), dim))
        nn.init.normal_(self.weight, std=dim**-0.5)

    def forward(self, ids: Tensor, positions: Tensor | None = None) -> Tensor:
        """The vectors (B, L, dim) of tokens.

        ids: integers (B, L) in 0 .. vocabulary - 1. positions: where they stand, integers (L,) or (B, L); None counts
        from 0. Raises DTypeError, ShapeError or ValueOutOfRange before any work.
        """
        check_ids("ids", ids, count=self.weight.shape[0])
        if positions is not None:
            check_positions(positions)
            if positions.shape != ids.shape[2 - positions.ndim :]:
                holds = f"`positions` must be (L,) or (B, L) for ids of {tuple(ids.shape)}"
                raise ShapeError(message(holds, f"got {tuple(positions.shape)}", "give one number a token"))
        x = F.embedding(ids, self.weight)
        if self.scale is not None:
            x = x * self.scale
        if self.positions is not None:
            where = torch.arange(ids.shape[1], device=ids.device) if positions is None else positions
            x = x + self._at(where)
        return F.dropout(x, self.embedding_dropout) if self.training and self.embedding_dropout > 0.0 else x

    def _at(self, where: Tensor) -> Tensor:
        """The vectors of positions, in the type of the weight: sines without the detour over float32."""
        if isinstance(self.positions, SinusoidalPositions):
            return self.positions(where, self.weight.dtype)
        assert self.positions is not None
        vectors: Tensor = self.positions(where)
        return vectors

    def extra_repr(self) -> str:
        """Sizes, for printing."""
        said = [f"{self.weight.shape[0]}, {self.weight.shape[1]}"]
        said += [f"scale={self.scale}"] if self.scale is not None else []
        said += [f"embedding_dropout={self.embedding_dropout}"] if self.embedding_dropout else []
        return ", ".join(said)
