"""The checked question: everything about one attention call but the numbers in its tensors.

Records only: `qkv.question` checks a caller's arguments and makes them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor

from qkv.patterns.pattern import Pattern
from qkv.shapes import dtype_name
from qkv.types import AuxRequest

BiasKind: TypeAlias = Literal["tensor", "alibi", "relative"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Origin:
    """Where the call's rows stand in the whole: absolute positions, one a batch row or one for all, and b and h.

    The public call sets `query` only, one entry where all rows agree; caches, shards and left padding the rest.
    """

    query: tuple[int, ...] = (0,)
    key: tuple[int, ...] = (0,)
    batch: int = 0
    head: int = 0


class Tensors(NamedTuple):
    """The tensors of one call as views in the order (B, H, L, D)."""

    query: Tensor  # (B, H, L, D)
    key: Tensor  # (B, G, S, D)
    value: Tensor  # (B, G, S, V)
    bias: Tensor | None = None  # broadcastable 4-D tensor, slopes (H,) or table (H, 2R + 1): see Problem.bias
    sinks: Tensor | None = None  # (H,)


@dataclass(frozen=True, kw_only=True, slots=True)
class Problem:
    """One attention call, checked: sizes by axis letter, types, pattern, scores, what is wanted."""

    batch: int  # B
    heads: int  # H
    kv_heads: int  # G
    queries: int  # L
    keys: int  # S
    head_dim: int  # D
    value_dim: int  # V
    dtype: torch.dtype
    device: torch.device
    pattern: Pattern
    scale: float
    softcap: float | None = None
    bias: BiasKind | None = None
    bias_shape: tuple[int, ...] | None = None
    sinks: bool = False
    dropout_p: float = 0.0
    origin: Origin = Origin()
    needs_grad: bool = False
    aux: AuxRequest = field(default_factory=AuxRequest)

    @property
    def group_size(self) -> int:
        """How many query heads read one key head: H / G."""
        return self.heads // self.kv_heads

    @property
    def compute_dtype(self) -> torch.dtype:
        """What scores and sums are computed in: float64 for float64 inputs, float32 for all others."""
        return torch.float64 if self.dtype == torch.float64 else torch.float32

    def __str__(self) -> str:
        """One readable line: sizes, type, pattern, and every option that is set."""
        sizes = (
            f"q [B={self.batch} H={self.heads} L={self.queries} D={self.head_dim}] "
            f"k [G={self.kv_heads} S={self.keys}] v [V={self.value_dim}]"
        )
        parts = [
            f"{sizes} {dtype_name(self.dtype)} {self.device}",
            f"pattern {self.pattern}",
            f"scale {self.scale:g}",
            f"query offset {', '.join(map(str, self.origin.query))}",
        ]
        if self.softcap is not None:
            parts.append(f"softcap {self.softcap:g}")
        if self.bias is not None:
            parts.append(f"bias {self.bias} {list(self.bias_shape or ())}")
        if self.sinks:
            parts.append("sinks")
        if self.dropout_p > 0.0:
            parts.append(f"dropout {self.dropout_p:g}")
        parts += [f"wants {wanted}" for wanted in _wanted(self.aux)]
        if self.needs_grad:
            parts.append("needs gradients")
        return ", ".join(parts)


def _wanted(aux: AuxRequest) -> list[str]:
    """The fields of a request that are set, as text."""
    names = [name for name in ("lse", "max_scores", "entropy") if getattr(aux, name)]
    if aux.weights is not False:
        names.append(f"weights={aux.weights!r}")
    if aux.top_k is not None:
        names.append(f"top_k={aux.top_k}")
    return names
