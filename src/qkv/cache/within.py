"""Sequences of different length in one call: which pairs lie within them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from qkv.patterns.expr import NONE, And, Or, PerHead, conj
from qkv.patterns.leaf import Expr, Extent, Unbound
from qkv.patterns.leaves.keys import Keys, Rows
from qkv.patterns.leaves.offsets import Offsets
from qkv.patterns.pattern import Pattern


@dataclass(frozen=True, eq=False)
class Within(Unbound):
    """i < lengths[b] and j < lengths[b]: a key or query beyond the end of its sequence is none."""

    lengths: tuple[int, ...]

    @property
    def key(self) -> tuple[object, ...]:
        return ("within", *self.lengths)

    @property
    def batch(self) -> int:
        return len(self.lengths)

    def bind(self, b: int, h: int, extent: Extent) -> Expr:
        length = self.lengths[b]
        if not length:
            return NONE
        run = np.array([[0, length]], dtype=np.int64)
        return conj(Keys(run), Rows(run))


def within(lengths: Sequence[int]) -> Pattern:
    """The pairs within sequences of these lengths."""
    return Pattern(Within(tuple(lengths)), f"within({', '.join(map(str, lengths))})")


def looks_back(expr: Expr) -> bool:
    """Whether the tree shows that no query sees a later key."""
    if isinstance(expr, Offsets):
        return expr.low >= 0
    if isinstance(expr, And):
        return any(map(looks_back, expr.children))
    if isinstance(expr, Or | PerHead):
        return all(map(looks_back, expr.children))
    return expr is NONE
