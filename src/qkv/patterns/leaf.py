"""What a pattern's tree is made of: the interface of its nodes and leaves, and the records in which leaves answer."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, NamedTuple, Protocol

import numpy as np

from qkv.patterns import spans
from qkv.patterns.spans import FAR, Spans

LISTED = 128  # runs of keys that are listed in plain integers; more are known by their hull alone


class Extent(NamedTuple):
    """The rectangle of positions that a call looks at: queries start .. start + count - 1, keys likewise."""

    queries: int
    keys: int
    query_start: int = 0
    key_start: int = 0


class Sizes(NamedTuple):
    """What a leaf may need to check itself against: axis sizes of the call, and its query offsets."""

    batch: int
    heads: int
    queries: int
    keys: int
    offsets: tuple[int, ...]


class Intervals(NamedTuple):
    """Ranges of key positions [start, stop), each belonging to a query segment `owner`; int64 arrays of one length."""

    owner: np.ndarray
    start: np.ndarray
    stop: np.ndarray

    @classmethod
    def one_each(cls, start: np.ndarray, stop: np.ndarray) -> Intervals:
        """One range a segment, in order."""
        return cls(np.arange(len(start)), start, stop)

    @classmethod
    def everything(cls, segments: int) -> Intervals:
        return cls.one_each(np.full(segments, -FAR), np.full(segments, FAR))

    @classmethod
    def nothing(cls) -> Intervals:
        none = np.zeros(0, dtype=np.int64)
        return cls(none, none, none)

    @classmethod
    def for_segments(cls, chosen: np.ndarray) -> Intervals:
        """Everything for the chosen segments (a bool array), nothing for the others."""
        owner = np.flatnonzero(chosen)
        return cls(owner, np.full(len(owner), -FAR), np.full(len(owner), FAR))


class Tiles(Protocol):
    """Tiles of 64 queries by 64 keys, and what tells a leaf which of them look alike; arrays hold a number a tile."""

    row: np.ndarray  # the query block
    col: np.ndarray  # the key block

    @property
    def query_first(self) -> np.ndarray:
        """The position of the first query."""

    @property
    def key_first(self) -> np.ndarray:
        """The position of the first key."""

    @property
    def distance(self) -> np.ndarray:
        """The first query's position less the first key's."""

    @property
    def query_shape(self) -> np.ndarray:
        """Equal where the query blocks hold the same positions relative to their first."""

    @property
    def key_shape(self) -> np.ndarray:
        """Equal where the key blocks hold the same positions relative to their first."""

    @property
    def query_reach(self) -> int:
        """No query is further from its block's first."""

    @property
    def reach(self) -> int:
        """No pair's distance is further from its tile's."""

    @property
    def query_positions(self) -> np.ndarray:
        """The positions of all query blocks, (blocks, 64)."""

    @property
    def key_positions(self) -> np.ndarray:
        """The positions of all key blocks, (blocks, 64)."""

    def aligned(self, size: int) -> bool:
        """Whether every tile lies within one block of `size` queries and one of `size` keys."""


@dataclass(frozen=True, eq=False)
class Expr(ABC):
    """A node of the tree. `key` says what it means: equal keys, equal sets of pairs."""

    @property
    @abstractmethod
    def key(self) -> tuple[object, ...]: ...

    @property
    def children(self) -> tuple[Expr, ...]:
        return ()

    @abstractmethod
    def seen(self, low: int, high: int) -> tuple[Spans, Spans]:
        """The keys that some query of low..high may see, and those that each of them sees.

        The first may hold too many, the second too few; one and the same object where the answer is exact.
        """

    def leaves(self) -> Iterator[Leaf]:
        """Every leaf, left to right, repeats included."""
        for child in self.children:
            yield from child.leaves()

    @cached_property
    def axes(self) -> tuple[bool, bool]:
        """Whether the answer depends on the batch row, and on the head."""
        below = [child.axes for child in self.children]
        return any(b for b, _ in below), any(h for _, h in below)


class Leaf(Expr):
    """One question about a pair of absolute positions (i, j).

    `spread`: touches nearly all tiles in natural order, and owns an order in which it does not.
    `light`: holds no data to speak of, so that results about it may be remembered freely.
    `batch`, `heads`: the sizes of the axes that the answer depends on, or None.
    """

    spread: ClassVar[bool] = False
    light: ClassVar[bool] = True

    def leaves(self) -> Iterator[Leaf]:
        yield self

    @cached_property
    def axes(self) -> tuple[bool, bool]:
        return self.batch is not None, self.heads is not None

    @property
    def batch(self) -> int | None:
        return None

    @property
    def heads(self) -> int | None:
        return None

    def check(self, sizes: Sizes) -> None:
        """Raise where the leaf does not fit the sizes of a call."""

    def bind(self, b: int, h: int, extent: Extent) -> Expr:
        """The same question for one batch row, one head and one extent."""
        return self

    @abstractmethod
    def contains(self, i: np.ndarray, j: np.ndarray) -> np.ndarray:
        """Whether each pair is in the set; i and j are int64 arrays that broadcast."""

    def intervals(self, low: np.ndarray, high: np.ndarray) -> tuple[Intervals, Intervals]:
        """For queries low..high (inclusive) of each segment: keys that some may see, keys that all see.

        The first may hold too many, the second too few: this default knows nothing, and every tile is evaluated.
        """
        return Intervals.everything(len(low)), Intervals.nothing()

    def seen(self, low: int, high: int) -> tuple[Spans, Spans]:
        """What `intervals` says of one segment, in plain integers."""
        ends = (np.array([end], dtype=np.int64) for end in (low, high))
        maybe, sure = map(_listed, self.intervals(*ends))
        if maybe is None or sure is None:
            return spans.EVERYTHING, spans.NOTHING
        return (maybe, maybe) if maybe == sure else (maybe, sure)

    def marks(self, i: int, start: int, stop: int) -> np.ndarray:
        """Whether query i sees each of the keys start..stop-1."""
        maybe, sure = self.seen(i, i)
        if maybe is sure:
            return spans.marks(maybe, start, stop)
        return self.contains(np.array([i], dtype=np.int64), np.arange(start, stop))

    def signature(self, tiles: Tiles) -> tuple[np.ndarray, ...]:
        """Numbers of each tile such that tiles with equal numbers have equal bits. Default: the tile itself."""
        return tiles.row, tiles.col


def _listed(found: Intervals) -> Spans | None:
    """The ranges of one segment, None where there are too many."""
    return None if len(found.owner) > LISTED else spans.sorted_union(found.start, found.stop)


class Unbound(Leaf):
    """A leaf that depends on the batch row, the head or the extent: `bind` gives the one that can be asked."""

    def contains(self, i: np.ndarray, j: np.ndarray) -> np.ndarray:
        raise AssertionError("bind to a batch row, a head and an extent first")


class Tabled(Unbound):
    """A leaf that holds a table whose first two axes are batch rows and heads, 1 where all share."""

    keep: np.ndarray

    @property
    def batch(self) -> int | None:
        return self.keep.shape[0] if self.keep.shape[0] > 1 else None

    @property
    def heads(self) -> int | None:
        return self.keep.shape[1] if self.keep.shape[1] > 1 else None
