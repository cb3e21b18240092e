"""Leaves on one side of the pair alone: sets of keys and sets of query rows, as sorted runs or with a period."""

from __future__ import annotations

import hashlib
from abc import abstractmethod
from bisect import bisect_right
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import numpy as np

from qkv.errors import ShapeError, ValueOutOfRange, message
from qkv.patterns import spans
from qkv.patterns.leaf import LISTED, Expr, Extent, Intervals, Leaf, Sizes, Tiles, Unbound
from qkv.patterns.numbering import number_rows
from qkv.patterns.spans import Spans

COMPACT_RUNS = 8  # more runs than this are scattered: better gathered than masked


def digest(array: np.ndarray) -> str:
    """A name for an array's content."""
    return hashlib.sha256(np.ascontiguousarray(array).tobytes()).hexdigest()


def runs_of(members: np.ndarray) -> np.ndarray:
    """Sorted distinct numbers as (n, 2) runs [start, stop)."""
    if not len(members):
        return np.zeros((0, 2), dtype=np.int64)
    breaks = np.flatnonzero(np.diff(members) != 1)
    starts = members[np.concatenate([[0], breaks + 1])]
    stops = members[np.concatenate([breaks, [len(members) - 1]])] + 1
    return np.stack([starts, stops], axis=1).astype(np.int64)


def in_runs(runs: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Whether each position lies in one of the sorted, disjoint runs."""
    return (np.searchsorted(runs.ravel(), positions, "right") & 1).astype(bool)


class OneSided(Leaf):
    """A set of positions that concerns keys alone or queries alone, and can be gathered."""

    @abstractmethod
    def members(self, start: int, stop: int) -> np.ndarray:
        """The positions of the set in [start, stop), sorted."""


@dataclass(frozen=True, eq=False)
class RunSet(OneSided):
    """A set of positions as (n, 2) sorted, disjoint runs [start, stop)."""

    runs: np.ndarray

    @property
    def spread(self) -> bool:  # type: ignore[override]
        return len(self.runs) > COMPACT_RUNS

    @property
    def light(self) -> bool:  # type: ignore[override]
        return not self.spread

    @cached_property
    def content(self) -> tuple[object, ...]:
        if len(self.runs) <= COMPACT_RUNS:
            return tuple(map(int, self.runs.ravel()))
        return ("runs", len(self.runs), digest(self.runs))

    def members(self, start: int, stop: int) -> np.ndarray:
        clipped = np.clip(self.runs, start, stop)
        return np.concatenate([np.arange(a, b) for a, b in clipped] or [np.zeros(0, dtype=np.int64)])


class Keys(RunSet):
    """j is in the set."""

    @cached_property
    def key(self) -> tuple[object, ...]:
        return ("keys", *self.content)

    def contains(self, i: np.ndarray, j: np.ndarray) -> np.ndarray:
        return in_runs(self.runs, j) & np.ones_like(i, dtype=bool)

    def intervals(self, low: np.ndarray, high: np.ndarray) -> tuple[Intervals, Intervals]:
        segments, count = len(low), len(self.runs)
        if count > COMPACT_RUNS:
            hull = self.runs[0, 0], self.runs[-1, 1]
            return Intervals.one_each(*(np.full(segments, edge) for edge in hull)), Intervals.nothing()
        owner = np.repeat(np.arange(segments), count)
        exact = Intervals(owner, np.tile(self.runs[:, 0], segments), np.tile(self.runs[:, 1], segments))
        return exact, exact

    @cached_property
    def _seen(self) -> tuple[Spans, Spans]:
        if len(self.runs) > LISTED:
            return (int(self.runs[0, 0]), int(self.runs[-1, 1])), spans.NOTHING
        exact = tuple(self.runs.ravel().tolist())
        return exact, exact

    def seen(self, low: int, high: int) -> tuple[Spans, Spans]:
        return self._seen

    def marks(self, i: int, start: int, stop: int) -> np.ndarray:
        """Pieces inside and outside in turn, as long as they are."""
        edges = np.concatenate([[start], np.clip(self.runs.ravel(), start, stop), [stop]])
        return np.repeat(np.arange(len(edges) - 1) % 2 == 1, np.diff(edges))

    def signature(self, tiles: Tiles) -> tuple[np.ndarray, ...]:
        return (number_rows(in_runs(self.runs, tiles.key_positions))[tiles.col],)


class Rows(RunSet):
    """i is in the set."""

    @cached_property
    def key(self) -> tuple[object, ...]:
        return ("rows", *self.content)

    def contains(self, i: np.ndarray, j: np.ndarray) -> np.ndarray:
        return in_runs(self.runs, i) & np.ones_like(j, dtype=bool)

    def intervals(self, low: np.ndarray, high: np.ndarray) -> tuple[Intervals, Intervals]:
        edges = self.runs.ravel()
        first, last = np.searchsorted(edges, low, "right"), np.searchsorted(edges, high, "right")
        inside = (first & 1).astype(bool)
        return Intervals.for_segments(inside | (first != last)), Intervals.for_segments(inside & (first == last))

    @cached_property
    def _edges(self) -> list[int]:
        edges: list[int] = self.runs.ravel().tolist()
        return edges

    def seen(self, low: int, high: int) -> tuple[Spans, Spans]:
        first, last = bisect_right(self._edges, low), bisect_right(self._edges, high)
        if first != last:
            return spans.EVERYTHING, spans.NOTHING
        found = spans.EVERYTHING if first & 1 else spans.NOTHING
        return found, found

    def signature(self, tiles: Tiles) -> tuple[np.ndarray, ...]:
        return (number_rows(in_runs(self.runs, tiles.query_positions))[tiles.row],)


@dataclass(frozen=True, eq=False)
class PeriodicKeys(OneSided):
    """j mod period >= first: the summary keys of fixed attention."""

    period: int
    first: int
    spread: ClassVar[bool] = True

    @property
    def key(self) -> tuple[object, ...]:
        return ("periodic_keys", self.period, self.first)

    def contains(self, i: np.ndarray, j: np.ndarray) -> np.ndarray:
        return (j % self.period >= self.first) & np.ones_like(i, dtype=bool)

    def members(self, start: int, stop: int) -> np.ndarray:
        positions = np.arange(start, stop)
        return positions[positions % self.period >= self.first]

    def marks(self, i: int, start: int, stop: int) -> np.ndarray:
        one = np.arange(start, min(start + self.period, stop)) % self.period >= self.first
        return np.resize(one, stop - start)

    def signature(self, tiles: Tiles) -> tuple[np.ndarray, ...]:
        return (tiles.col,)


@dataclass(frozen=True, eq=False)
class BatchedKeys(Unbound):
    """keep[b, j]: one set of keys a batch row, from key lengths or a padding mask; bool (B, S)."""

    keep: np.ndarray
    name: str

    @cached_property
    def key(self) -> tuple[object, ...]:
        return ("batched_keys", self.keep.shape, digest(self.keep))

    @property
    def batch(self) -> int:
        return len(self.keep)

    def check(self, sizes: Sizes) -> None:
        if self.keep.shape != (sizes.batch, sizes.keys):
            raise ShapeError(
                message(
                    f"`{self.name}` must have the sizes [B={sizes.batch}, S={sizes.keys}] of this call",
                    f"its tensor is {list(self.keep.shape)}",
                    "give one row a batch entry and one column a key",
                )
            )

    @cached_property
    def rows(self) -> tuple[Keys, ...]:
        """One set of keys a batch row."""
        return tuple(Keys(runs_of(np.flatnonzero(row))) for row in self.keep)

    def bind(self, b: int, h: int, extent: Extent) -> Expr:
        return self.rows[b]


@dataclass(frozen=True, eq=False)
class KeyLengths(Unbound):
    """j < lengths[b]; int64 (B,)."""

    lengths: np.ndarray

    @cached_property
    def key(self) -> tuple[object, ...]:
        return ("key_lengths", *map(int, self.lengths))

    @property
    def batch(self) -> int:
        return len(self.lengths)

    def check(self, sizes: Sizes) -> None:
        if len(self.lengths) != sizes.batch:
            raise ShapeError(
                message(
                    f"`key_lengths` must hold one length for each of the B={sizes.batch} batch rows",
                    f"it holds {len(self.lengths)}",
                    "give a tensor of shape (B,)",
                )
            )
        beyond = np.flatnonzero(self.lengths > sizes.keys)
        if len(beyond):
            b = int(beyond[0])
            raise ValueOutOfRange(
                message(
                    f"`key_lengths` must lie in 0..S={sizes.keys}",
                    f"entry {b} is {int(self.lengths[b])}",
                    "give the number of real keys of each batch row",
                )
            )

    def bind(self, b: int, h: int, extent: Extent) -> Expr:
        return Keys(np.array([[0, self.lengths[b]]], dtype=np.int64)[: int(self.lengths[b] > 0)])
