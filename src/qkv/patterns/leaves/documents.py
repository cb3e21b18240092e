"""The leaf of packed documents: a query sees the keys with its own id."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import ClassVar

import numpy as np

from qkv.errors import ShapeError, message
from qkv.patterns import spans
from qkv.patterns.leaf import Expr, Extent, Intervals, Leaf, Sizes, Tiles
from qkv.patterns.leaves.keys import digest
from qkv.patterns.numbering import number_rows
from qkv.patterns.spans import Spans


@dataclass(frozen=True, eq=False)
class Documents(Leaf):
    """ids[i] == ids[j]; int64 ids of shape (S,) or (B, S). Positions outside the ids match nothing."""

    ids: np.ndarray
    name: str = field(default="documents")
    light: ClassVar[bool] = False

    @cached_property
    def key(self) -> tuple[object, ...]:
        return ("documents", self.ids.shape, digest(self.ids))

    @property
    def batch(self) -> int | None:
        return len(self.ids) if self.ids.ndim == 2 else None

    @property
    def spread(self) -> bool:  # type: ignore[override]
        return self.batch is None and not self.contiguous

    @cached_property
    def contiguous(self) -> bool:
        """Whether each id is one unbroken run."""
        first = self.ids[self.edges[:-1]]
        return len(np.unique(first)) == len(first)

    @cached_property
    def edges(self) -> np.ndarray:
        """Where the runs of one id start, and the end of the last; ids of one row."""
        inner = 1 + np.flatnonzero(self.ids[1:] != self.ids[:-1])
        return np.concatenate([[0], inner, [len(self.ids)]])[: len(self.ids) + 1]

    @cached_property
    def runs_by_id(self) -> tuple[np.ndarray, np.ndarray]:
        """The distinct ids, sorted, and each position's number among them."""
        distinct, number = np.unique(self.ids, return_inverse=True)
        return distinct, number.reshape(self.ids.shape)

    def check(self, sizes: Sizes) -> None:
        if self.batch is not None and self.batch != sizes.batch:
            raise ShapeError(
                message(
                    f"`{self.name}` must have one row of ids for each of the B={sizes.batch} batch rows",
                    f"it has {self.batch}",
                    "give ids of shape (S,) or (B, S)",
                )
            )
        if self.ids.shape[-1] != sizes.keys:
            raise ShapeError(
                message(
                    f"`{self.name}` must cover exactly the S={sizes.keys} keys of this call",
                    f"it covers {self.ids.shape[-1]} tokens",
                    "pass the ids or lengths of these tokens",
                )
            )

    @cached_property
    def rows(self) -> tuple[Documents, ...]:
        """The documents of each batch row."""
        return tuple(Documents(row, self.name) for row in self.ids)

    def bind(self, b: int, h: int, extent: Extent) -> Expr:
        return self if self.batch is None else self.rows[b]

    def number(self, positions: np.ndarray, outside: int) -> np.ndarray:
        """The number of each position's document; `outside` where there is none."""
        known = (positions >= 0) & (positions < len(self.ids))
        numbers = self.runs_by_id[1]
        if not len(numbers):
            return np.full(positions.shape, outside)
        return np.where(known, numbers[np.clip(positions, 0, len(numbers) - 1)], outside)

    def contains(self, i: np.ndarray, j: np.ndarray) -> np.ndarray:
        return self.number(i, -1) == self.number(j, -2)

    def intervals(self, low: np.ndarray, high: np.ndarray) -> tuple[Intervals, Intervals]:
        count = len(self.ids)
        if not self.contiguous or not count:
            return super().intervals(low, high)
        edges = self.edges
        first = np.searchsorted(edges, np.clip(low, 0, count - 1), "right") - 1
        last = np.searchsorted(edges, np.clip(high, 0, count - 1), "right") - 1
        touching = np.flatnonzero((low < count) & (high >= 0))
        maybe = Intervals(touching, edges[first][touching], edges[last + 1][touching])
        one = np.flatnonzero((first == last) & (low >= 0) & (high < count))
        return maybe, Intervals(one, edges[first][one], edges[first + 1][one])

    def seen(self, low: int, high: int) -> tuple[Spans, Spans]:
        if self.batch is not None:
            return spans.EVERYTHING, spans.NOTHING
        count = len(self.ids)
        if high < 0 or low >= count:
            return spans.NOTHING, spans.NOTHING
        if not self.contiguous:
            return (0, count), spans.NOTHING
        first, last = np.searchsorted(self.edges, (max(low, 0), min(high, count - 1)), "right").tolist()
        maybe = int(self.edges[first - 1]), int(self.edges[last])
        return maybe, maybe if first == last and low >= 0 and high < count else spans.NOTHING

    def marks(self, i: int, start: int, stop: int) -> np.ndarray:
        count = len(self.ids)
        if not 0 <= i < count:
            return np.zeros(stop - start, dtype=bool)
        inside = self.ids[max(start, 0) : max(stop, 0)] == self.ids[i]
        before = min(max(-start, 0), stop - start)
        return np.pad(inside, (before, stop - start - before - len(inside)))

    def signature(self, tiles: Tiles) -> tuple[np.ndarray, ...]:
        """The pattern of ids within the query block and within the key block, and how far apart their ids are."""
        query, key = self.number(tiles.query_positions, -1), self.number(tiles.key_positions, -1)
        query_shape, query_base = _relative(query)
        key_shape, key_base = _relative(key)
        return query_shape[tiles.row], key_shape[tiles.col], query_base[tiles.row] - key_base[tiles.col]


def _relative(numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Number the rows of (blocks, 64) by their entries relative to the first known one; -1 stays apart from all."""
    unknown = numbers.max(initial=0) + 1
    base = np.where(numbers >= 0, numbers, unknown).min(axis=1)
    return number_rows(np.where(numbers >= 0, numbers - base[:, None], -1)), base
