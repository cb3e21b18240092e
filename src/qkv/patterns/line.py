"""Sets of tiles as sorted boundaries on one integer line; knows nothing of patterns.

Tile (row, col) of a grid with `cols` columns is the point row * (cols + 1) + col:
the gap of one keeps runs from crossing rows.
A set is an int64 array s0, e0, s1, e1, ... with s < e < next s: it holds s0..e0-1, s1..e1-1, and so on.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

EMPTY = np.zeros(0, dtype=np.int64)


def union(starts: np.ndarray, stops: np.ndarray) -> np.ndarray:
    """The set of all points in any of the intervals [start, stop); empty intervals are ignored."""
    filled = starts < stops
    starts, stops = np.sort(starts[filled]), np.sort(stops[filled])
    if not len(starts):
        return EMPTY
    # sorted separately, start k + 1 opens a new run exactly where it lies beyond the k-th smallest stop
    opens = np.concatenate([[True], starts[1:] > stops[:-1]])
    return np.stack([starts[opens], stops[np.concatenate([opens[1:], [True]])]], axis=1).ravel()


def combine(operation: Callable[..., np.ndarray], *sets: np.ndarray) -> np.ndarray:
    """A Boolean operation on sets, point by point; it must be False where all operands are."""
    edges = np.sort(np.concatenate(sets))
    if not len(edges):
        return EMPTY
    edges = edges[np.concatenate([[True], edges[1:] != edges[:-1]])]
    inside = operation(*((np.searchsorted(s, edges, "right") & 1).astype(bool) for s in sets))
    before = np.concatenate([[False], inside[:-1]])
    return edges[inside != before]


def both(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """The points in a and in b."""
    return combine(np.logical_and, a, b)


def either(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """The points in a or in b."""
    return combine(np.logical_or, a, b)


def minus(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """The points in a and not in b."""
    return combine(lambda x, y: x & ~y, a, b)


def size(points: np.ndarray) -> int:
    """How many points a set holds."""
    return int((points[1::2] - points[::2]).sum())


def expand(points: np.ndarray) -> np.ndarray:
    """Every point of a set, in order."""
    starts, lengths = points[::2], points[1::2] - points[::2]
    ends = np.cumsum(lengths)
    return np.repeat(starts - (ends - lengths), lengths) + np.arange(ends[-1] if len(ends) else 0)
