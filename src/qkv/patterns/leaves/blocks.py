"""Leaves on blocks of positions: bands of blocks, layouts given as a tensor, and blocks drawn at random."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import numpy as np

from qkv.errors import MaskError, message
from qkv.patterns import spans
from qkv.patterns.leaf import Expr, Extent, Intervals, Leaf, Sizes, Tabled, Tiles, Unbound
from qkv.patterns.leaves.keys import digest
from qkv.patterns.spans import Spans
from qkv.philox import philox

INTERVAL_LIMIT = 1 << 22  # segments times kept blocks; beyond it, unknown


@dataclass(frozen=True, eq=False)
class BlockBand(Leaf):
    """The blocks of i and j, of `size` positions each, are at most `width` blocks apart."""

    size: int
    width: int

    @property
    def key(self) -> tuple[object, ...]:
        return ("block_band", self.size, self.width)

    def contains(self, i: np.ndarray, j: np.ndarray) -> np.ndarray:
        return np.abs(i // self.size - j // self.size) <= self.width

    def intervals(self, low: np.ndarray, high: np.ndarray) -> tuple[Intervals, Intervals]:
        first, last, n, w = low // self.size, high // self.size, self.size, self.width
        maybe = Intervals.one_each((first - w) * n, (last + w + 1) * n)
        sure = Intervals.one_each((last - w) * n, (first + w + 1) * n)
        return maybe, sure

    def seen(self, low: int, high: int) -> tuple[Spans, Spans]:
        first, last, n, w = low // self.size, high // self.size, self.size, self.width
        maybe = spans.span((first - w) * n, (last + w + 1) * n)
        return maybe, maybe if first == last else spans.span((last - w) * n, (first + w + 1) * n)

    def signature(self, tiles: Tiles) -> tuple[np.ndarray, ...]:
        bound = (self.width + 1) * self.size + tiles.reach
        return tiles.query_shape, tiles.key_shape, tiles.query_first % self.size, np.clip(tiles.distance, -bound, bound)


@dataclass(frozen=True, eq=False)
class BlockRows(Leaf):
    """Lists of kept key blocks, one a block row: pairs (row, column) sorted by row, then column, each once."""

    size: int
    rows: np.ndarray
    columns: np.ndarray
    light: ClassVar[bool] = False

    @cached_property
    def key(self) -> tuple[object, ...]:
        return ("block_rows", self.size, len(self.rows), digest(self.rows), digest(self.columns))

    @cached_property
    def joined(self) -> np.ndarray:
        return self.rows * self.stride + self.columns

    @cached_property
    def stride(self) -> int:
        return int(self.columns.max(initial=0)) + 2

    def contains(self, i: np.ndarray, j: np.ndarray) -> np.ndarray:
        row, column = np.broadcast_arrays(i // self.size, j // self.size)
        wanted = row * self.stride + np.where((column < 0) | (column >= self.stride), self.stride - 1, column)
        place = np.searchsorted(self.joined, wanted)
        return np.append(self.joined, -1)[place] == wanted if len(self.joined) else np.zeros(wanted.shape, dtype=bool)

    def intervals(self, low: np.ndarray, high: np.ndarray) -> tuple[Intervals, Intervals]:
        first, last = low // self.size, high // self.size
        begin, end = np.searchsorted(self.rows, first), np.searchsorted(self.rows, last, "right")
        counts = end - begin
        if counts.sum() > INTERVAL_LIMIT:
            return super().intervals(low, high)
        owner = np.repeat(np.arange(len(low)), counts)
        entry = np.arange(len(owner)) + np.repeat(begin - (np.cumsum(counts) - counts), counts)
        start = self.columns[entry] * self.size
        maybe = Intervals(owner, start, start + self.size)
        single = (first == last)[owner]
        return maybe, Intervals(owner[single], start[single], start[single] + self.size)

    def marks(self, i: int, start: int, stop: int) -> np.ndarray:
        row, first, last = i // self.size, start // self.size, -(-stop // self.size)
        begin, end = np.searchsorted(self.rows, [row, row + 1])
        columns = self.columns[begin:end]
        kept = np.zeros(last - first, dtype=bool)
        kept[columns[(columns >= first) & (columns < last)] - first] = True
        edges: np.ndarray = np.clip(np.arange(first, last + 1) * self.size, start, stop)
        return np.repeat(kept, edges[1:] - edges[:-1])

    def signature(self, tiles: Tiles) -> tuple[np.ndarray, ...]:
        if tiles.aligned(self.size):  # one answer a tile
            return (self.contains(tiles.query_first, tiles.key_first).astype(np.int64),)
        return super().signature(tiles)


@dataclass(frozen=True, eq=False)
class BlockLayout(Tabled):
    """keep[b, h, block of i, block of j]; bool (B or 1, H or 1, rows, columns)."""

    keep: np.ndarray
    size: int

    @cached_property
    def key(self) -> tuple[object, ...]:
        return ("blocks", self.size, self.keep.shape, digest(self.keep))

    @cached_property
    def bound(self) -> list[list[BlockRows]]:
        """The lists of each batch row and head."""
        return [[BlockRows(self.size, *map(np.asarray, np.nonzero(layout))) for layout in row] for row in self.keep]

    def check(self, sizes: Sizes) -> None:
        for axis, size, have in (("B", sizes.batch, self.batch), ("H", sizes.heads, self.heads)):
            if have is not None and have != size:
                raise MaskError(
                    message(
                        f"`blocks(keep=)` must have {axis}={size} or 1 entries on its axis {axis}",
                        f"it has {have}",
                        "give one layout for all, or one for each",
                    )
                )
        needed = (
            -(-max((offset + sizes.queries for offset in sizes.offsets), default=0) // self.size),
            -(-sizes.keys // self.size),
        )
        if self.keep.shape[2] < needed[0] or self.keep.shape[3] < needed[1]:
            raise MaskError(
                message(
                    f"`blocks(keep=)` must cover the call: {needed[0]} by {needed[1]} blocks of {self.size}",
                    f"it holds {self.keep.shape[2]} by {self.keep.shape[3]}",
                    "build the layout for at least ceil(L / block_size) by ceil(S / block_size) blocks",
                )
            )

    def bind(self, b: int, h: int, extent: Extent) -> Expr:
        return self.bound[b if self.batch else 0][h if self.heads else 0]


@dataclass(frozen=True, eq=False)
class RandomBlocks(Unbound):
    """`count` distinct key blocks for each block row, drawn by Floyd's method: see docs/patterns.md."""

    count: int
    size: int
    seed: int
    ahead: bool

    @property
    def key(self) -> tuple[object, ...]:
        return ("random_blocks", self.count, self.size, self.seed, self.ahead)

    def draw(self, rows: np.ndarray, key_blocks: int) -> np.ndarray:
        """The drawn blocks of each row, (rows, at most count), -1 where there are fewer candidates."""
        candidates = np.full(len(rows), key_blocks) if self.ahead else rows + 1
        wanted = np.minimum(candidates, self.count)
        turns = int(wanted.max(initial=0))
        drawn = np.full((len(rows), turns), -1, dtype=np.int64)
        zero = np.zeros(1, dtype=np.int64)
        words = philox(self.seed, rows[:, None], np.arange(turns), zero, zero)[0]
        for turn in range(turns):
            top = candidates - wanted + turn
            pick = (words[:, turn] * (top + 1)) >> 32
            pick = np.where((drawn == pick[:, None]).any(axis=1), top, pick)
            drawn[:, turn] = np.where(turn < wanted, pick, -1)
        return drawn

    def bind(self, b: int, h: int, extent: Extent) -> Expr:
        first = max(extent.query_start, 0) // self.size
        last = max(extent.query_start + extent.queries - 1, -1) // self.size
        rows = np.arange(first, last + 1)
        key_blocks = -(-(extent.key_start + extent.keys) // self.size)
        drawn = self.draw(rows, key_blocks)
        row, place = np.nonzero(drawn >= 0)
        columns = drawn[row, place]
        order = np.lexsort((columns, row))
        return BlockRows(self.size, rows[row[order]], columns[order])
