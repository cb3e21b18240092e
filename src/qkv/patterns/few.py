"""Plans of few queries, as decoding asks for them at every step: what each query sees, straight from the leaves.

The keys of a query are listed in plain integers where the leaves know them, and looked at one by one where they do not.
From those come one block of queries in natural order and, where many key blocks hold few keys, a second part in which
these keys are gathered.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from functools import reduce
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from qkv.patterns import spans
from qkv.patterns.axis import TILE, Natural, gathered
from qkv.patterns.expr import evaluate
from qkv.patterns.leaf import Expr, Extent
from qkv.patterns.numbering import number_rows
from qkv.patterns.parts import ROW_BLOCK_COST
from qkv.patterns.schedule import Compiled, Part, Schedule
from qkv.patterns.spans import Spans

FEW = 16  # queries
SPARSE = TILE // 2  # a block with at most this many seen keys is better gathered
BRIDGE = 4096  # keys in doubt that lie closer are looked at together


class Sight(NamedTuple):
    """What one query sees, the keys counted from 0."""

    position: int
    sure: Spans
    doubt: Spans  # the keys that have to be looked at, among others


class Seen(NamedTuple):
    """What a block of queries sees; the bits of a key are those of a mask's word, bit t for query t."""

    full: Spans  # key blocks that it sees wholly
    cols: np.ndarray  # (m,) sorted key blocks that it sees in part
    kind: np.ndarray  # (m,) their bits; each kind occurs
    bits: np.ndarray  # (kinds, 64) uint8 or uint16
    loose: np.ndarray  # (n,) keys outside these blocks, to be gathered
    loose_bits: np.ndarray  # (n,) uint8 or uint16


def look(expr: Expr, extent: Extent) -> list[Sight]:
    """What the leaves know of each query of a specialised expression."""
    start, stop = extent.key_start, extent.key_start + extent.keys
    found = []
    for i in range(extent.query_start, extent.query_start + extent.queries):
        maybe, sure = expr.seen(i, i)
        doubt = spans.NOTHING
        if maybe is not sure:
            doubt = spans.bridged(_counted(spans.minus(maybe, sure), start, stop), BRIDGE)
        found.append(Sight(i, _counted(sure, start, stop), doubt))
    return found


def _counted(keys: Spans, start: int, stop: int) -> Spans:
    kept = spans.both(keys, (start, stop))
    return tuple(edge - start for edge in kept) if start else kept


def compile_few(expr: Expr, extent: Extent, sights: Sequence[Sight]) -> Compiled:
    """The parts of a specialised expression for at most 16 queries, at least one, of at least one key."""
    regions = _regions(sight.doubt for sight in sights)
    if not regions:
        return _compiled(extent, _blocks([sight.sure for sight in sights], extent.keys), 0)
    outside = spans.opposite(tuple(TILE * edge for edge in regions))
    found = [_blocks([spans.both(sight.sure, outside) for sight in sights], extent.keys)]
    for first, last in spans.pieces(regions):
        keys = min(last * TILE, extent.keys) - first * TILE
        found.append(_sorted_out(_looked_at(expr, extent, sights, first * TILE, keys), keys, extent.queries, first))
    return _compiled(extent, _together(found), spans.size(regions))


def _regions(doubts: Iterable[Spans]) -> Spans:
    """The blocks in which some query has keys in doubt."""
    found: Spans = spans.NOTHING
    for doubt in doubts:
        for first, stop in spans.pieces(doubt):
            found = spans.either(found, (first // TILE, -(-stop // TILE)))
    return found


def _looked_at(expr: Expr, extent: Extent, sights: Sequence[Sight], first: int, keys: int) -> np.ndarray:
    """The bits of some keys, uint8 or uint16, filled up to whole blocks."""
    bits = _no_bits(-(-keys // TILE) * TILE, extent.queries)
    for t, sight in enumerate(sights):
        seen = spans.marks(sight.sure, first, first + keys)
        for a, b in spans.pieces(spans.both(sight.doubt, (first, first + keys))):
            seen[a - first : b - first] = _evaluated(expr, sight.position, a + extent.key_start, b + extent.key_start)
        ones = seen.view(np.uint8).astype(bits.dtype, copy=False)
        bits[:keys] |= ones << t if t else ones
    return bits


def _evaluated(expr: Expr, i: int, start: int, stop: int) -> np.ndarray:
    """Whether query i sees each of the keys at start..stop-1."""
    return evaluate(expr, lambda leaf: leaf.marks(i, start, stop), np.ones(stop - start, dtype=bool))


def _no_bits(keys: int, queries: int) -> np.ndarray:
    return np.zeros(keys, dtype=np.uint8 if queries <= 8 else np.uint16)


def _sorted_out(bits: np.ndarray, keys: int, queries: int, first: int = 0) -> Seen:
    """The blocks of keys of which these are the bits, the first of them number `first`."""
    room = np.full(len(bits) // TILE, TILE)
    room[-1] += keys - len(bits)
    seen = bits != 0
    touched = _count(seen)
    full = touched == room
    if queries > 1 and full.any():
        full &= _count(bits == (1 << queries) - 1) == room
    kept = ~full & (touched > 0)
    sparse = kept & (touched <= SPARSE)
    loose = np.zeros(0, dtype=np.int64)
    if _pays(touched[sparse]):
        kept &= ~sparse
        loose = np.flatnonzero(seen)
        loose = loose[sparse[loose // TILE]]
    bounded = np.zeros(len(full) + 2, dtype=bool)
    bounded[1:-1] = full
    full_blocks = tuple((first + np.flatnonzero(bounded[1:] != bounded[:-1])).tolist())
    cols, table = np.flatnonzero(kept), bits.reshape(-1, TILE)[kept]
    return Seen(full_blocks, first + cols, np.arange(len(cols)), table, first * TILE + loose, bits[loose])


def _count(marks: np.ndarray) -> np.ndarray:
    """How many of each block's 64 are true."""
    return np.bitwise_count(np.packbits(marks).view(np.uint64)).astype(np.int64)


def _pays(touched: np.ndarray) -> bool:
    """Whether blocks with so many seen keys are better gathered, at the cost of a part of their own."""
    return len(touched) > ROW_BLOCK_COST and len(touched) - (-int(touched.sum()) // -TILE) > ROW_BLOCK_COST


def _blocks(listed: Sequence[Spans], keys: int) -> Seen:
    """The blocks of keys that each query is known to see."""
    whole: list[Spans] = []
    edges: dict[int, list[tuple[int, int, int]]] = {}
    for t, seen in enumerate(listed):
        covered: list[int] = []
        for start, stop in spans.pieces(seen):
            first, last = -(-start // TILE), -(-keys // TILE) if stop == keys else stop // TILE
            if first < last:
                covered += (first, last)
            if start < first * TILE:
                edges.setdefault(first - 1, []).append((start % TILE, min(stop - (first - 1) * TILE, TILE), 1 << t))
            if first <= last and last * TILE < stop:
                edges.setdefault(last, []).append((0, stop - last * TILE, 1 << t))
        whole.append(tuple(covered))
    return _cells(whole, edges, keys)


def _cells(whole: list[Spans], edges: dict[int, list[tuple[int, int, int]]], keys: int) -> Seen:
    """Blocks that some queries see wholly and others at an edge, in runs of blocks that are seen alike."""
    cuts = {edge for covered in whole for edge in covered}.union(*((block, block + 1) for block in edges))
    if len(whole) > 1:
        cuts.add(keys // TILE)  # the last block may be short
    everyone, full = (1 << len(whole)) - 1, [0, 0]
    cols: list[int] = []
    kind: list[int] = []
    kinds: dict[tuple[tuple[int, int, int], ...], int] = {}
    for begin, end in pairwise(sorted(cuts)):
        covering = sum(1 << t for t, covered in enumerate(whole) if bisect_right(covered, begin) & 1)
        if covering == everyone:
            full[-1:] = [end] if full[-1] == begin else [full[-1], begin, end]
        elif covering or begin in edges:
            filled = (0, min(TILE, keys - begin * TILE), covering)
            number = kinds.setdefault((filled, *edges.get(begin, ())), len(kinds))
            cols += range(begin, end)
            kind += [number] * (end - begin)
    bits = _no_bits(len(kinds) * TILE, len(whole))
    for number, pieces in enumerate(kinds):
        for first, last, one in pieces:
            bits[number * TILE + first : number * TILE + last] |= one
    return Seen(
        tuple(full if full[1] else full[2:]),
        np.array(cols, dtype=np.int64),
        np.array(kind, dtype=np.int64),
        bits.reshape(-1, TILE),
        np.zeros(0, dtype=np.int64),
        bits[:0],
    )


def _together(found: Sequence[Seen]) -> Seen:
    """All that was found, in order."""
    cols = np.concatenate([one.cols for one in found])
    before = np.cumsum([0, *(len(one.bits) for one in found[:-1])])
    kind = np.concatenate([one.kind + start for one, start in zip(found, before, strict=True)])
    order = np.argsort(cols, kind="stable")
    bits, loose, loose_bits = (np.concatenate(arrays) for arrays in list(zip(*found, strict=True))[3:])
    return Seen(reduce(spans.either, (one.full for one in found)), cols[order], kind[order], bits, loose, loose_bits)


def _drawn_out(seen: Seen) -> Seen:
    """The same with the keys of sparse blocks among the loose ones, where it pays."""
    if len(seen.cols) <= ROW_BLOCK_COST:
        return seen
    touched = _count(seen.bits != 0)[seen.kind]
    sparse = touched <= SPARSE
    if not _pays(touched[sparse]):
        return seen
    bits = seen.bits[seen.kind[sparse]].ravel()
    slot = np.flatnonzero(bits != 0)
    loose = np.concatenate([seen.loose, seen.cols[sparse][slot // TILE] * TILE + slot % TILE])
    order = np.argsort(loose)
    used, kind = np.unique(seen.kind[~sparse], return_inverse=True)
    return seen._replace(
        cols=seen.cols[~sparse],
        kind=kind,
        bits=seen.bits[used],
        loose=loose[order],
        loose_bits=np.concatenate([seen.loose_bits, bits[slot]])[order],
    )


def _compiled(extent: Extent, seen: Seen, uncertain: int) -> Compiled:
    """A part in natural order, and one of the loose keys."""
    seen = _drawn_out(seen)
    queries, parts = Natural(extent.query_start, extent.queries), []
    if seen.full or len(seen.cols):
        schedule = _schedule(seen, extent.queries, extent.keys, uncertain)
        parts.append(Part(queries, Natural(extent.key_start, extent.keys), schedule))
    if len(seen.loose):
        count = len(seen.loose)
        bits = _no_bits(-(-count // TILE) * TILE, extent.queries)
        bits[:count] = seen.loose_bits
        schedule = _schedule(_sorted_out(bits, count, extent.queries), extent.queries, count, 0)
        parts.append(Part(queries, gathered(extent.key_start, seen.loose), schedule))
    return Compiled(tuple(parts))


def _schedule(seen: Seen, queries: int, keys: int, uncertain: int) -> Schedule:
    kind, masks = _masks(seen)
    runs, partial = np.array(seen.full, dtype=np.int32).reshape(-1, 2), np.empty((len(kind), 2), dtype=np.int32)
    partial[:, 0], partial[:, 1] = seen.cols, kind
    blocks = -(-keys // TILE)
    beyond = blocks * TILE - keys if seen.full and seen.full[-1] == blocks else 0
    within = np.bitwise_count(masks).sum(axis=1, dtype=np.int64)[kind].sum() if len(kind) else 0
    return Schedule(
        rows=1,
        cols=blocks,
        row_ptr=np.array((0, len(runs)), dtype=np.int32),
        runs=runs,
        partial_ptr=np.array((0, len(kind)), dtype=np.int32),
        partial=partial,
        masks=masks,
        pairs=queries * (TILE * spans.size(seen.full) - beyond) + int(within),
        uncertain=uncertain,
    )


def _masks(seen: Seen) -> tuple[np.ndarray, np.ndarray]:
    """The number of each block's mask, and the masks, each once."""
    if len(seen.bits) <= 1:
        return seen.kind, seen.bits.astype(np.uint64)
    number = number_rows(seen.bits)
    if number[-1] == len(number) - 1:  # numbered as they occur: all differ
        return seen.kind, seen.bits.astype(np.uint64)
    _, first = np.unique(number, return_index=True)
    return number[seen.kind], seen.bits[first].astype(np.uint64)
