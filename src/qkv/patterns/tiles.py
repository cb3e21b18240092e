"""Three-valued compilation: which tiles of a part may hold pairs (maybe) and which are full for sure."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from qkv.patterns import line
from qkv.patterns.axis import TILE, Axis, Segments
from qkv.patterns.expr import And, Const, Not
from qkv.patterns.leaf import Expr, Intervals, Leaf


class Bounds(NamedTuple):
    """Two sets of tiles on the line, sure a subset of maybe."""

    maybe: np.ndarray
    sure: np.ndarray


def bound(expr: Expr, queries: Axis, keys: Axis) -> Bounds:
    """Which tiles may hold a pair of the expression, and which hold all of theirs."""
    segments = queries.segments()
    universe = _leaf_bounds(Intervals.everything(len(segments.block)), None, segments, keys)

    known: dict[tuple[object, ...], Bounds] = {}  # splitting repeats subtrees

    def walk(node: Expr) -> Bounds:
        if node.key not in known:
            known[node.key] = work_out(node)
        return known[node.key]

    def work_out(node: Expr) -> Bounds:
        if isinstance(node, Leaf):
            return _leaf_bounds(*node.intervals(segments.low, segments.high), segments, keys)
        if isinstance(node, Const):
            return universe if node.value else Bounds(line.EMPTY, line.EMPTY)
        if isinstance(node, Not):
            inner = walk(node.operand)
            return Bounds(line.minus(universe.maybe, inner.sure), line.minus(universe.sure, inner.maybe))
        join = line.both if isinstance(node, And) else line.either
        left, right = (walk(child) for child in node.children)
        return Bounds(join(left.maybe, right.maybe), join(left.sure, right.sure))

    return walk(expr)


def _leaf_bounds(maybe: Intervals, sure: Intervals | None, segments: Segments, keys: Axis) -> Bounds:
    sure = maybe if sure is None else sure
    some = _tiles(maybe, segments, keys, outward=True)
    alone = segments.alone[sure.owner]
    certain = _tiles(Intervals(*(part[alone] for part in sure)), segments, keys, outward=False)
    return Bounds(some, line.both(some, certain))


def _tiles(intervals: Intervals, segments: Segments, keys: Axis, *, outward: bool) -> np.ndarray:
    """Position ranges as a set of tiles: all that they touch, or those that they cover."""
    a, b = keys.slots(segments.group[intervals.owner], intervals.start, intervals.stop)
    filled = a < b
    a, b, block = a[filled], b[filled], segments.block[intervals.owner[filled]]
    if outward:
        first, last = a // TILE, -(-b // TILE)
    else:
        first, last = -(-a // TILE), np.where(b == keys.count, keys.blocks, b // TILE)
    row = block * (keys.blocks + 1)
    return line.union(row + first, row + last)
