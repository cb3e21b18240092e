"""Sets of positions as sorted boundaries in plain integers: what few queries see. `line` is the same for many.

A set is a tuple s0, e0, s1, e1, ... with s < e < next s: it holds s0..e0-1, s1..e1-1, and so on, within -FAR..FAR.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeAlias

import numpy as np

Spans: TypeAlias = tuple[int, ...]
FAR = 1 << 40  # beyond every position: stands for "unbounded"
NOTHING: Spans = ()
EVERYTHING: Spans = (-FAR, FAR)


def span(start: int, stop: int) -> Spans:
    """The positions start..stop-1."""
    start, stop = max(start, -FAR), min(stop, FAR)
    return (start, stop) if start < stop else NOTHING


def pieces(a: Spans) -> Iterator[tuple[int, int]]:
    """The runs of a set as pairs (start, stop)."""
    return zip(a[::2], a[1::2], strict=True)


def both(a: Spans, b: Spans) -> Spans:
    """The positions in a and in b."""
    if len(a) == 2 == len(b):
        return span(max(a[0], b[0]), min(a[1], b[1]))
    found: list[int] = []
    x = y = 0
    while x < len(a) and y < len(b):
        start, stop = max(a[x], b[y]), min(a[x + 1], b[y + 1])
        if start < stop:
            found += (start, stop)
        if a[x + 1] < b[y + 1]:
            x += 2
        else:
            y += 2
    return tuple(found)


def opposite(a: Spans) -> Spans:
    """The positions not in a."""
    a = a[1:] if a and a[0] == -FAR else (-FAR, *a)
    return a[:-1] if a[-1] == FAR else (*a, FAR)


def either(a: Spans, b: Spans) -> Spans:
    """The positions in a or in b."""
    if not a or not b:
        return a or b
    return opposite(both(opposite(a), opposite(b)))


def minus(a: Spans, b: Spans) -> Spans:
    """The positions in a and not in b."""
    return both(a, opposite(b))


def size(a: Spans) -> int:
    """How many positions a set holds."""
    return sum(a[1::2]) - sum(a[::2])


def bridged(a: Spans, gap: int) -> Spans:
    """The set with every gap of at most `gap` positions filled."""
    kept = [side for edge in zip(a[1:-1:2], a[2:-1:2], strict=True) if edge[1] - edge[0] > gap for side in edge]
    return (a[0], *kept, a[-1]) if a else NOTHING


def sorted_union(starts: np.ndarray, stops: np.ndarray) -> Spans:
    """The set of all positions in any of the runs [start, stop), given in any order."""
    found: list[int] = []
    for start, stop in sorted(zip(starts.tolist(), stops.tolist(), strict=True)):
        if found and start <= found[-1]:
            found[-1] = max(found[-1], stop)
        elif start < stop:
            found += (start, stop)
    return tuple(found)


def marks(a: Spans, start: int, stop: int) -> np.ndarray:
    """Whether each of start..stop-1 is in the set."""
    found = np.zeros(stop - start, dtype=bool)
    for first, last in pieces(a):
        found[max(first - start, 0) : max(last - start, 0)] = True
    return found
