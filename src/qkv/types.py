"""Plain records that two or more floors share: what a caller may ask for besides the output, and how it comes back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias

from torch import Tensor

Layout: TypeAlias = Literal["BHLD", "BLHD"]
Rows: TypeAlias = bool | Literal["mean"] | int | slice | Sequence[int]


@dataclass(frozen=True, kw_only=True)
class AuxRequest:
    """What to return beside the output of one attention call.

    lse: the log of the sum of exponentials of each row's scores, (B, H, L), natural logarithm; differentiable.
    max_scores: the greatest visible score of each row, (B, H, L); -inf for a row that sees nothing.
    entropy: of each row's weights over the keys, (B, H, L), in nats.
    weights: softmax weights before dropout, differentiable. True: all, (B, H, L, S); "mean": their mean over the
        heads, (B, L, S); a slice or sequence of query rows: (B, H, rows, S); one integer row: (B, H, S).
    top_k: for each row the k largest weights and the keys they belong to, both (B, H, L, k), largest first,
        the smaller key index first among equals.
    """

    lse: bool = False
    max_scores: bool = False
    entropy: bool = False
    weights: Rows = False
    top_k: int | None = None


class TopK(NamedTuple):
    """The largest weights of each row: values and key indices, both (B, H, L, k)."""

    values: Tensor
    indices: Tensor


class AuxOutput(NamedTuple):
    """What an `AuxRequest` asked for; a field that was not asked for is None."""

    lse: Tensor | None = None
    max_scores: Tensor | None = None
    entropy: Tensor | None = None
    weights: Tensor | None = None
    top_k: TopK | None = None
