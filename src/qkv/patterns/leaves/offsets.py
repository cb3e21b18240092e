"""Leaves on the distance i - j: a band of offsets (causal, windows) and residue classes (strided, dilated)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from qkv.patterns import spans
from qkv.patterns.leaf import Intervals, Leaf, Tiles
from qkv.patterns.spans import FAR, Spans


@dataclass(frozen=True, eq=False)
class Offsets(Leaf):
    """low <= i - j <= high; -FAR and FAR stand for unbounded."""

    low: int
    high: int

    @property
    def key(self) -> tuple[object, ...]:
        return ("offsets", self.low, self.high)

    def contains(self, i: np.ndarray, j: np.ndarray) -> np.ndarray:
        distance = i - j
        return (self.low <= distance) & (distance <= self.high)

    def intervals(self, low: np.ndarray, high: np.ndarray) -> tuple[Intervals, Intervals]:
        maybe = Intervals.one_each(low - self.high, high - self.low + 1)
        sure = Intervals.one_each(high - self.high, low - self.low + 1)
        return maybe, sure

    def seen(self, low: int, high: int) -> tuple[Spans, Spans]:
        maybe = spans.span(low - self.high, high - self.low + 1)
        return maybe, maybe if low == high else spans.span(high - self.high, low - self.low + 1)

    def signature(self, tiles: Tiles) -> tuple[np.ndarray, ...]:
        bounds = [bound for bound in (self.low, self.high) if abs(bound) < FAR]
        if not bounds:
            return ()
        distance = np.clip(tiles.distance, min(bounds) - tiles.reach, max(bounds) + tiles.reach)
        return tiles.query_shape, tiles.key_shape, distance


@dataclass(frozen=True, eq=False)
class Congruent(Leaf):
    """i = j modulo the modulus."""

    modulus: int
    spread: ClassVar[bool] = True

    @property
    def key(self) -> tuple[object, ...]:
        return ("congruent", self.modulus)

    def contains(self, i: np.ndarray, j: np.ndarray) -> np.ndarray:
        return (i - j) % self.modulus == 0

    def marks(self, i: int, start: int, stop: int) -> np.ndarray:
        found = np.zeros(stop - start, dtype=bool)
        found[(i - start) % self.modulus :: self.modulus] = True
        return found

    def signature(self, tiles: Tiles) -> tuple[np.ndarray, ...]:
        return tiles.query_shape, tiles.key_shape, tiles.distance % self.modulus
