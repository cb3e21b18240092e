"""The checked question of the linear family: one recurrence over the tokens of each sequence, and what it reads.

    S' = Diag(exp g_t) S_{t-1}
    S_t = S' + beta_t k_t (v_t - S'ᵀ k_t)ᵀ      where it is a delta rule
    S_t = S' + k_t v_tᵀ                          otherwise
    o_t = scale · S_tᵀ q_t

Axes: B batch, N sequences (B of them, or those packed in one row), H value heads, K key heads (value head h reads key
head h // (H / K)), L tokens, D width of q and k, V width of v, W width of a state: V, or V + 1 with the normaliser.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor

Gate: TypeAlias = Literal["none", "scalar", "vector"]
Feature: TypeAlias = Literal["none", "elu", "relu", "squared_relu"]


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """The type of states, and of all that is computed for inputs of a type."""
    return torch.float64 if dtype == torch.float64 else torch.float32


class Streams(NamedTuple):
    """The tensors of one call. Gate and beta may be wider than q, k and v; the state is of the compute type."""

    query: Tensor  # (B, K, L, D)
    key: Tensor  # (B, K, L, D)
    value: Tensor  # (B, H, L, V)
    gate: Tensor | None = None  # log decay: (B, H, L), or (B, H, L, D) one a key channel; at most 0
    beta: Tensor | None = None  # write strength (B, H, L)
    state: Tensor | None = None  # before the first token of each sequence (N, H, D, W); None: zero


class Outcome(NamedTuple):
    """What every engine gives."""

    output: Tensor  # (B, H, L, V), in the type of the query
    state: Tensor  # after the last token of each sequence (N, H, D, W), in the compute type


@dataclass(frozen=True, kw_only=True, slots=True)
class Recurrence:
    """All that is asked besides the numbers themselves."""

    batch: int
    heads: int
    key_heads: int
    length: int
    key_dim: int
    value_dim: int
    gate: Gate = "none"
    delta: bool = False
    normalize: bool = False  # divide by the sum of the weights: one more column of ones beside v
    feature: Feature = "none"  # of q and k, element by element
    scale: float = 1.0
    starts: tuple[int, ...] | None = None  # packed: B = 1, where each sequence begins, and the end: N + 1 of 0 .. L
    dtype: torch.dtype = torch.float32

    @property
    def compute_dtype(self) -> torch.dtype:
        """The type of states, and of all that is computed."""
        return compute_dtype(self.dtype)

    @property
    def group(self) -> int:
        """How many value heads read one key head."""
        return self.heads // self.key_heads

    @property
    def sequences(self) -> int:
        """N, how many states there are."""
        return self.batch if self.starts is None else len(self.starts) - 1

    @property
    def state_shape(self) -> tuple[int, int, int, int]:
        """(N, H, D, W)."""
        return self.sequences, self.heads, self.key_dim, self.value_dim + self.normalize
