"""The order in which a part walks its tokens: natural, by residue class, by document, or gathered.

Slots are what tiles are cut from; each slot stands for one row of the call, or for padding. A class longer than half a
tile starts on a tile boundary, shorter ones share a tile without straddling, so that few tiles hold pairs of two
classes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from functools import cached_property
from math import lcm
from typing import NamedTuple

import numpy as np

from qkv.patterns.leaf import Extent, Leaf
from qkv.patterns.leaves.documents import Documents
from qkv.patterns.leaves.keys import Keys, OneSided, PeriodicKeys, Rows
from qkv.patterns.leaves.offsets import Congruent

BEYOND, PADDING, ROW = 0, 1, 2  # kinds of slots
TILE = 64  # queries and keys of a tile; a row of its bit mask is one 64-bit word


class Segments(NamedTuple):
    """Pieces of query blocks that lie in one class: block and class numbers, first and last position."""

    block: np.ndarray
    group: np.ndarray
    low: np.ndarray
    high: np.ndarray
    alone: np.ndarray  # whether the piece is all of its block, without padding


@dataclass(frozen=True)
class Order:
    """What a part owns: a residue modulus or documents (classes), a set of keys, a set of rows."""

    modulus: int = 1
    documents: Documents | None = None
    keys: OneSided | None = None
    rows: OneSided | None = None

    def owning(self, leaf: Leaf) -> Order | None:
        """This order with one more leaf true in it, or None where the two do not go together."""
        if isinstance(leaf, Congruent) and self.documents is None:
            return replace(self, modulus=lcm(self.modulus, leaf.modulus))
        if isinstance(leaf, Documents) and self.documents is None and self.modulus == 1:
            return replace(self, documents=leaf)
        if isinstance(leaf, Keys | PeriodicKeys) and self.keys is None:
            return replace(self, keys=leaf)
        if isinstance(leaf, Rows) and self.rows is None:
            return replace(self, rows=leaf)
        return None

    def class_leaf(self) -> Leaf | None:
        """The leaf that says which pairs are of one class."""
        return self.documents or (Congruent(self.modulus) if self.modulus > 1 else None)

    def grants(self, leaf: Leaf) -> bool:
        """Whether a leaf holds for every pair of one class."""
        if isinstance(leaf, Congruent):
            return self.modulus % leaf.modulus == 0
        return any(owned is not None and leaf.key == owned.key for owned in (self.documents, self.keys, self.rows))


class Axis(ABC):
    """The slots of one side of a part."""

    start: int  # position of row 0 of the call
    count: int  # slots, padding included
    nbytes: int  # of the arrays that it holds

    @property
    def blocks(self) -> int:
        return -(-self.count // TILE)

    @abstractmethod
    def segments(self) -> Segments:
        """The blocks cut into pieces of one class."""

    @abstractmethod
    def slots(self, group: np.ndarray, begin: np.ndarray, end: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Ranges of positions, each within a class, as ranges of slots."""

    @abstractmethod
    def positions(self, blocks: np.ndarray) -> np.ndarray:
        """The positions of some blocks' slots, (n, 64); beyond the axis, or in padding, any position."""

    @abstractmethod
    def kinds(self) -> np.ndarray:
        """What each slot of each block is, int8 (blocks, 64): BEYOND the axis, PADDING or a ROW."""

    def bare(self) -> Axis:
        """The same axis without what compiling it left behind."""
        return self

    def row_counts(self) -> np.ndarray:
        """How many rows of the call each block holds."""
        return (self.kinds() == ROW).sum(axis=1)


@dataclass(frozen=True, eq=False)
class Natural(Axis):
    """Every row of the call, in order."""

    start: int
    count: int

    def segments(self) -> Segments:
        block = np.arange(self.blocks)
        low = self.start + TILE * block
        high = np.minimum(low + TILE, self.start + self.count) - 1
        return Segments(block, np.zeros_like(block), low, high, np.ones(len(block), dtype=bool))

    def slots(self, group: np.ndarray, begin: np.ndarray, end: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return np.clip(begin - self.start, 0, self.count), np.clip(end - self.start, 0, self.count)

    def positions(self, blocks: np.ndarray) -> np.ndarray:
        return self.start + TILE * blocks[:, None] + np.arange(TILE)

    def kinds(self) -> np.ndarray:
        return np.where(np.arange(self.blocks * TILE) < self.count, ROW, BEYOND).astype(np.int8).reshape(-1, TILE)

    @property
    def nbytes(self) -> int:  # type: ignore[override]
        return 0


@dataclass(frozen=True, eq=False)
class Ordered(Axis):
    """Chosen rows of the call in an order by classes; `index` holds each slot's row, -1 for padding."""

    start: int
    index: np.ndarray
    group: np.ndarray  # class of each slot, -1 for padding

    @property
    def count(self) -> int:  # type: ignore[override]
        return len(self.index)

    @property
    def nbytes(self) -> int:  # type: ignore[override]
        return self.index.nbytes + self.group.nbytes

    def bare(self) -> Axis:
        return Ordered(self.start, self.index, self.group)

    def segments(self) -> Segments:
        slot = np.flatnonzero(self.index >= 0)
        block, group, position = (
            slot // TILE,
            self.group[slot].astype(np.int64),
            self.start + self.index[slot].astype(np.int64),
        )
        first = np.concatenate([[True], (np.diff(block) != 0) | (np.diff(group) != 0)])[: len(slot)]
        last = np.concatenate([first[1:], [True]])[: len(slot)]
        slots = np.minimum(TILE, self.count - TILE * np.arange(self.blocks))
        pieces, rows = (np.bincount(found, minlength=self.blocks) for found in (block[first], block))
        alone = ((pieces == 1) & (rows == slots))[block[first]]
        return Segments(block[first], group[first], position[first], position[last], alone)

    @cached_property
    def _search(self) -> tuple[np.ndarray, np.ndarray, int]:
        """Sorted (class, position) of every real slot as one number each, its slot, and the width of a class."""
        slot = np.flatnonzero(self.index >= 0)
        width = int(self.index.max(initial=0)) + 2
        joined = self.group[slot].astype(np.int64) * width + self.index[slot]
        order = np.argsort(joined, kind="stable")
        return joined[order], slot[order], width

    def slots(self, group: np.ndarray, begin: np.ndarray, end: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        joined, slot, width = self._search
        if not len(slot):
            return np.zeros_like(begin), np.zeros_like(begin)
        first, last = (
            np.searchsorted(joined, group * width + np.clip(edge - self.start, 0, width - 1)) for edge in (begin, end)
        )
        empty = last <= first
        a = slot[np.minimum(first, len(slot) - 1)]
        b = slot[np.maximum(last - 1, 0)] + 1
        return np.where(empty, 0, a), np.where(empty, 0, b)

    def positions(self, blocks: np.ndarray) -> np.ndarray:
        return self._block_positions[blocks]

    @cached_property
    def _block_positions(self) -> np.ndarray:
        padded = np.full(self.blocks * TILE, -1, dtype=np.int64)
        padded[: self.count] = self.index
        rows = padded.reshape(-1, TILE)
        return self.start + np.where(rows >= 0, rows, rows[:, :1])

    def kinds(self) -> np.ndarray:
        kinds = np.full(self.blocks * TILE, BEYOND, dtype=np.int8)
        kinds[: self.count] = np.where(self.index >= 0, ROW, PADDING)
        return kinds.reshape(-1, TILE)


def lay_out(order: Order, extent: Extent) -> tuple[Axis, Axis]:
    """The query axis and the key axis of a part in this order."""
    if order == Order():
        return Natural(extent.query_start, extent.queries), Natural(extent.key_start, extent.keys)
    query_rows = _members(order.rows, extent.query_start, extent.queries)
    key_rows = _members(order.keys, extent.key_start, extent.keys)
    if order.modulus == 1 and order.documents is None:
        natural = Natural(extent.query_start, extent.queries), Natural(extent.key_start, extent.keys)
        chosen = gathered(extent.query_start, query_rows), gathered(extent.key_start, key_rows)
        return natural[0] if order.rows is None else chosen[0], natural[1] if order.keys is None else chosen[1]
    query_class = _classes(order, extent.query_start + query_rows, -1)
    key_class = _classes(order, extent.key_start + key_rows, -2)
    shared = np.intersect1d(query_class, key_class)
    return (
        _classed(extent.query_start, query_rows, query_class, shared),
        _classed(extent.key_start, key_rows, key_class, shared),
    )


def _members(leaf: OneSided | None, start: int, count: int) -> np.ndarray:
    return np.arange(count) if leaf is None else leaf.members(start, start + count) - start


def _classes(order: Order, positions: np.ndarray, outside: int) -> np.ndarray:
    if order.documents is not None:
        return order.documents.number(positions, outside)
    return positions % order.modulus


def gathered(start: int, rows: np.ndarray) -> Ordered:
    """Chosen rows of the call, all of one class."""
    return Ordered(start, rows.astype(np.int32), np.zeros(len(rows), dtype=np.int32))


def _classed(start: int, rows: np.ndarray, classes: np.ndarray, shared: np.ndarray) -> Ordered:
    """Classes from the longest to the shortest, each padded to whole tiles or to a power of two that divides one."""
    kept = np.isin(classes, shared)
    rows, number = rows[kept], np.searchsorted(shared, classes[kept])
    order = np.argsort(number, kind="stable")
    rows, number = rows[order], number[order]
    length = np.bincount(number, minlength=len(shared))
    room = np.where(
        length > TILE // 2, -(-length // TILE) * TILE, 1 << np.ceil(np.log2(np.maximum(length, 1))).astype(int)
    )
    by_room = np.argsort(-room, kind="stable")
    slot_of_class = np.zeros(len(shared), dtype=np.int64)
    slot_of_class[by_room] = np.cumsum(room[by_room]) - room[by_room]
    slot = slot_of_class[number] + np.arange(len(rows)) - (np.cumsum(length) - length)[number]
    index, group = np.full((2, int(room.sum())), -1, dtype=np.int32)
    index[slot], group[slot] = rows, number
    return Ordered(start, index, group)
