"""Frozen results of compilation: block schedules, parts, and the plan of a whole pattern with its counts;
and their cache.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from qkv.patterns import line
from qkv.patterns.axis import TILE, Axis, lay_out
from qkv.patterns.expr import NONE, conj
from qkv.patterns.leaf import Expr, Extent
from qkv.patterns.masks import TileGrid, make_masks
from qkv.patterns.parts import Piece, split
from qkv.patterns.tiles import Bounds, bound
from qkv.settings import PLAN_CACHE_MB, read


@dataclass(frozen=True, eq=False)
class Schedule:
    """For each block of 64 queries: runs of full key blocks, and partial key blocks with their bit masks.

    runs[row_ptr[r]:row_ptr[r + 1]] are (first, stop) key blocks that block row r sees wholly;
    partial[partial_ptr[r]:partial_ptr[r + 1]] are (key block, mask) with masks[mask][key] bit t set when query t sees
    the key.
    """

    rows: int
    cols: int
    row_ptr: np.ndarray  # int32 (rows + 1,)
    runs: np.ndarray  # int32 (n, 2)
    partial_ptr: np.ndarray  # int32 (rows + 1,)
    partial: np.ndarray  # int32 (m, 2)
    masks: np.ndarray  # uint64 (masks, 64)
    pairs: int  # exact number of visible pairs
    uncertain: int  # tiles whose bits had to be looked at

    @property
    def tiles(self) -> int:
        """Full and partial tiles together."""
        return int((self.runs[:, 1] - self.runs[:, 0]).sum()) + len(self.partial)

    @property
    def nbytes(self) -> int:
        return sum(a.nbytes for a in (self.row_ptr, self.runs, self.partial_ptr, self.partial, self.masks))


@dataclass(frozen=True, eq=False)
class Part:
    """One attention of its own over a subset of the pairs, disjoint from all other parts."""

    queries: Axis
    keys: Axis
    schedule: Schedule

    @property
    def nbytes(self) -> int:
        return self.schedule.nbytes + self.queries.nbytes + self.keys.nbytes


@dataclass(frozen=True, eq=False)
class Compiled:
    """The parts of one expression over one extent."""

    parts: tuple[Part, ...]

    @cached_property
    def pairs(self) -> int:
        return sum(part.schedule.pairs for part in self.parts)

    @cached_property
    def tiles(self) -> int:
        return sum(part.schedule.tiles for part in self.parts)

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts)


@dataclass(frozen=True, eq=False)
class PatternPlan:
    """What every (batch row, head) walks: `members[index[b, h]]`, index (B or 1, H or 1)."""

    members: tuple[Compiled, ...]
    index: np.ndarray
    batch: int
    heads: int
    beside: dict[str, object] = field(default_factory=dict)  # what a backend made of it, by the name of the backend

    @cached_property
    def shares(self) -> np.ndarray:
        """How many (batch row, head) pairs walk each member."""
        repeats = (self.batch // max(self.index.shape[0], 1)) * (self.heads // max(self.index.shape[1], 1))
        return np.bincount(self.index.ravel(), minlength=len(self.members)) * repeats

    @property
    def pairs(self) -> int:
        """Visible (query, key) pairs over all batch rows and heads."""
        return sum(int(n) * member.pairs for n, member in zip(self.shares, self.members, strict=True))

    @property
    def tiles(self) -> int:
        """Tiles of 64 by 64 that are computed, over all batch rows and heads."""
        return sum(int(n) * member.tiles for n, member in zip(self.shares, self.members, strict=True))

    @property
    def parts(self) -> int:
        """The greatest number of parts that one head merges."""
        return max((len(member.parts) for member in self.members), default=0)


def compile_expr(expr: Expr, extent: Extent) -> Compiled:
    """The parts of a specialised expression; parts without a pair are left out."""
    parts = (_compile_piece(piece, extent) for piece in split(expr))
    return Compiled(tuple(part for part in parts if part is not None))


def _compile_piece(piece: Piece, extent: Extent) -> Part | None:
    if piece.expr is NONE or not extent.queries or not extent.keys:
        return None
    queries, keys = lay_out(piece.order, extent)
    bounds = bound(piece.expr, queries, keys)
    schedule = _schedule(piece, queries, keys, bounds)
    return Part(queries.bare(), keys.bare(), schedule) if schedule.pairs else None


def _schedule(piece: Piece, queries: Axis, keys: Axis, bounds: Bounds) -> Schedule:
    stride = keys.blocks + 1
    candidates = line.expand(line.minus(bounds.maybe, bounds.sure))
    grid = TileGrid(queries, keys, candidates // stride, candidates % stride)
    masked = make_masks(_within_class(piece), grid) if len(candidates) else None
    if masked is None:
        full, partial, words = bounds.sure, np.zeros((0, 3), dtype=np.int64), np.zeros((0, TILE), dtype=np.uint64)
    else:
        found = candidates[masked.full & ~masked.empty]
        full = line.either(bounds.sure, line.union(found, found + 1))
        kept = ~masked.full & ~masked.empty
        partial = np.stack([grid.row[kept], grid.col[kept], masked.mask[kept]], axis=1)
        words = masked.words
    used, partial[:, 2] = np.unique(partial[:, 2], return_inverse=True)
    return _assemble(queries, keys, full, partial, words[used], len(candidates))


def _within_class(piece: Piece) -> Expr:
    """The piece's expression where tiles may straddle classes: only pairs of one class count."""
    owned = piece.order.class_leaf()
    return piece.expr if owned is None else conj(owned, piece.expr)


def _assemble(
    queries: Axis, keys: Axis, full: np.ndarray, partial: np.ndarray, words: np.ndarray, uncertain: int
) -> Schedule:
    rows, stride = queries.blocks, keys.blocks + 1
    run_row, run = (
        full[::2] // stride,
        np.stack([full[::2] % stride, full[1::2] - full[::2] // stride * stride], axis=1),
    )
    boundaries = np.arange(rows + 1)
    query_count, key_sum = queries.row_counts(), np.concatenate([[0], np.cumsum(keys.row_counts())])
    pairs = int((query_count[run_row] * (key_sum[run[:, 1]] - key_sum[run[:, 0]])).sum())
    bits = np.bitwise_count(words).sum(axis=1, dtype=np.int64) if len(words) else np.zeros(0, dtype=np.int64)
    return Schedule(
        rows=rows,
        cols=keys.blocks,
        row_ptr=np.searchsorted(run_row, boundaries).astype(np.int32),
        runs=run.astype(np.int32),
        partial_ptr=np.searchsorted(partial[:, 0], boundaries).astype(np.int32),
        partial=partial[:, 1:].astype(np.int32),
        masks=words,
        pairs=pairs + int(bits[partial[:, 2]].sum()),
        uncertain=uncertain,
    )


class PlanCache:
    """Least recently used compilations, bounded by their bytes; safe to use from several threads.

    share: it takes 1 / share of what all of them together may.
    """

    def __init__(self, share: int = 1) -> None:
        self._share = share
        self._entries: OrderedDict[tuple[object, ...], Compiled] = OrderedDict()
        self._nbytes = 0
        self._lock = threading.Lock()

    def compiled(self, expr: Expr, extent: Extent, make: Callable[[Expr, Extent], Compiled] = compile_expr) -> Compiled:
        """The compilation of an expression, made now or remembered."""
        key = (expr.key, extent)
        with self._lock:
            if key in self._entries:
                self._entries.move_to_end(key)
                return self._entries[key]
        made = make(expr, extent)
        with self._lock:
            if key not in self._entries:
                self._entries[key] = made
                self._nbytes += made.nbytes
            while self._nbytes > (read(PLAN_CACHE_MB) << 20) // self._share and self._entries:
                self._nbytes -= self._entries.popitem(last=False)[1].nbytes
        return made
