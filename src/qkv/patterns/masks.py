"""Bit masks of the tiles that are neither full nor empty: each leaf once a signature, then words joined by the tree.

A mask is 64 words, one a key, bit t of a word for query t of the tile.
"""

from __future__ import annotations

from functools import cached_property
from typing import NamedTuple

import numpy as np

from qkv.patterns.axis import BEYOND, ROW, TILE, Axis, Natural
from qkv.patterns.expr import evaluate
from qkv.patterns.leaf import Expr, Leaf
from qkv.patterns.numbering import number_columns, number_rows

CHUNK = 2048  # tiles evaluated at a time: 8 million pairs
ALL_BITS = np.uint64(0xFFFFFFFFFFFFFFFF)


class TileGrid:
    """The tiles in question and what a leaf may need to tell which of them look alike."""

    def __init__(self, queries: Axis, keys: Axis, row: np.ndarray, col: np.ndarray) -> None:
        self.queries, self.keys, self.row, self.col = queries, keys, row, col

    @cached_property
    def query_positions(self) -> np.ndarray:
        return self.queries.positions(np.arange(self.queries.blocks))

    @cached_property
    def key_positions(self) -> np.ndarray:
        return self.keys.positions(np.arange(self.keys.blocks))

    @cached_property
    def query_first(self) -> np.ndarray:
        return _first(self.queries)[self.row]

    @cached_property
    def distance(self) -> np.ndarray:
        return self.query_first - self.key_first

    def aligned(self, size: int) -> bool:
        """Whether every tile lies within one block of `size` queries and one of `size` keys."""
        axes = (self.queries, self.keys)
        return size % TILE == 0 and all(isinstance(axis, Natural) and axis.start % TILE == 0 for axis in axes)

    @cached_property
    def key_first(self) -> np.ndarray:
        return _first(self.keys)[self.col]

    @cached_property
    def query_reach(self) -> int:
        return TILE - 1 if isinstance(self.queries, Natural) else _reach(self.query_positions)

    @cached_property
    def reach(self) -> int:
        """No pair of a tile has a distance further from the tile's first pair's than this."""
        keys = TILE - 1 if isinstance(self.keys, Natural) else _reach(self.key_positions)
        return self.query_reach + keys + 1

    @cached_property
    def query_shape(self) -> np.ndarray:
        """A number a tile: equal where the query blocks hold the same positions relative to their first."""
        return self._shape(self.queries, self.row)

    @cached_property
    def key_shape(self) -> np.ndarray:
        return self._shape(self.keys, self.col)

    def _shape(self, axis: Axis, block: np.ndarray) -> np.ndarray:
        if isinstance(axis, Natural):
            return np.zeros_like(block)
        positions = axis.positions(np.arange(axis.blocks))
        return number_rows(positions - positions[:, :1])[block]

    def positions(self, tiles: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Query positions (n, 64, 1) and key positions (n, 1, 64) of some tiles."""
        i, j = self.queries.positions(self.row[tiles]), self.keys.positions(self.col[tiles])
        return i[:, :, None], j[:, None, :]


class Masked(NamedTuple):
    """For each tile the number of its mask among `words`, (n, 64) uint64; whether it is full (no padding,
    and all pairs in) or empty.
    """

    mask: np.ndarray
    words: np.ndarray
    full: np.ndarray
    empty: np.ndarray


def make_masks(expr: Expr, grid: TileGrid) -> Masked:
    """The exact bits of every tile of the grid."""
    leaves = {leaf.key: leaf for leaf in expr.leaves()}
    slots = _slots(grid)
    numbers, tables = [slots.number], {}
    for key, leaf in leaves.items():
        number, tables[key] = _leaf_words(leaf, grid)
        numbers.append(number)
    combination, first = number_columns(numbers)
    chosen = {key: tables[key][number[first]] for key, number in zip(leaves, numbers[1:], strict=True)}
    rows, inside = slots.rows[slots.number[first]], slots.inside[slots.number[first]]
    bits = evaluate(expr, lambda leaf: chosen[leaf.key], np.full_like(rows, ALL_BITS)) & rows
    content = number_rows(bits)
    words = bits[np.unique(content, return_index=True)[1]]
    full, empty = (bits == inside).all(axis=1), ~bits.any(axis=1)
    return Masked(content[combination], words, full[combination], empty[combination])


def _leaf_words(leaf: Leaf, grid: TileGrid) -> tuple[np.ndarray, np.ndarray]:
    """A number a tile and the words of each number, evaluated once a signature."""
    number, first = number_columns([*leaf.signature(grid)] or [np.zeros_like(grid.row)])
    words = np.empty((len(first), TILE), dtype=np.uint64)
    for begin in range(0, len(first), CHUNK):
        i, j = grid.positions(first[begin : begin + CHUNK])
        words[begin : begin + CHUNK] = pack(leaf.contains(i, j))
    return number, words


class _Slots(NamedTuple):
    """A number a tile, and for each number the words of pairs of rows, and of all pairs that are not beyond an axis."""

    number: np.ndarray
    rows: np.ndarray
    inside: np.ndarray


def _slots(grid: TileGrid) -> _Slots:
    query, key = grid.queries.kinds(), grid.keys.kinds()
    number, first = number_columns([number_rows(query)[grid.row], number_rows(key)[grid.col]])
    worse = np.minimum(query[grid.row[first]][:, :, None], key[grid.col[first]][:, None, :])
    return _Slots(number, pack(worse == ROW), pack(worse != BEYOND))


def pack(bits: np.ndarray) -> np.ndarray:
    """Booleans (n, 64 queries, 64 keys) as words (n, 64 keys)."""
    by_key = np.ascontiguousarray(np.swapaxes(bits, 1, 2))
    return np.packbits(by_key, axis=-1, bitorder="little").view("<u8")[..., 0].astype(np.uint64, copy=False)


def unpack(words: np.ndarray) -> np.ndarray:
    """Words (n, 64 keys) as booleans (n, 64 queries, 64 keys)."""
    octets = np.ascontiguousarray(words.astype("<u8", copy=False)).view(np.uint8).reshape(*words.shape, 8)
    return np.swapaxes(np.unpackbits(octets, axis=-1, bitorder="little"), 1, 2).view(bool)


def _first(axis: Axis) -> np.ndarray:
    if isinstance(axis, Natural):
        return axis.start + TILE * np.arange(axis.blocks)
    return axis.positions(np.arange(axis.blocks))[:, 0]


def _reach(positions: np.ndarray) -> int:
    return int(np.abs(positions - positions[:, :1]).max(initial=0))
