"""Sequences of different length in one call: which pairs lie within them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from qkv.patterns.expr import NONE, And, Or, PerHead, conj
from qkv.patterns.leaf import Expr, Extent, Unbound
from qkv.patterns.leaves.blocks import RandomBlocks
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


def looks_back(expr: Expr, *, but_for_fixed: bool = False) -> bool:
    """Whether the tree shows that no query sees a later key; `but_for_fixed`: none but of a set that is the same for
    all queries, such as a prefix.
    """
    if isinstance(expr, Offsets):
        return expr.low >= 0
    if isinstance(expr, And):
        return any(looks_back(child, but_for_fixed=but_for_fixed) for child in expr.children)
    if isinstance(expr, Or | PerHead):
        return all(looks_back(child, but_for_fixed=but_for_fixed) for child in expr.children)
    return expr is NONE or (but_for_fixed and isinstance(expr, Keys))


def draws_by_length(expr: Expr) -> bool:
    """Whether who sees whom is drawn among all keys of a call, so that more keys change it for all queries."""
    return any(isinstance(leaf, RandomBlocks) and leaf.ahead for leaf in expr.leaves())
