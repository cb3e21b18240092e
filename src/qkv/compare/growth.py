"""From times at some lengths: how they grow, and from which length on a family is cheaper than another."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

from qkv.compare.record import Crossing, Point
from qkv.compare.timing import exponent

FARTHEST = 10_000_000  # tokens up to which fitted lines are followed


def growth(points: Sequence[Point]) -> float | None:
    """The a of seconds ~ L^a over all points."""
    return exponent([point.tokens for point in points], [point.seconds for point in points])


def crossing(points: Sequence[Point], baseline: Sequence[Point]) -> Crossing:
    """The first length from which on, as far as measured, the points lie below the baseline."""
    theirs = {point.tokens: point.seconds for point in baseline}
    both = [
        (point.tokens, math.log(point.seconds / theirs[point.tokens])) for point in points if point.tokens in theirs
    ]
    if not both:
        return Crossing(where="unknown")
    if both[-1][1] >= 0:
        return _beyond(both)
    for (shorter, above), (longer, below) in reversed([*pairwise(both)]):
        if above >= 0 > below:
            part = above / (above - below)
            return Crossing(where="within", tokens=round(shorter * (longer / shorter) ** part))
    return Crossing(where="below", tokens=both[0][0])


def _beyond(both: Sequence[tuple[int, float]]) -> Crossing:
    """Where the line through the logarithms of the two longest lengths' ratios meets 0."""
    if len(both) < 2:
        return Crossing(where="unknown")
    (shorter, before), (longer, after) = both[-2:]
    slope = (after - before) / math.log(longer / shorter)
    if slope >= -0.05 or after / -slope > math.log(FARTHEST / longer):
        return Crossing(where="never")
    return Crossing(where="beyond", tokens=round(longer * math.exp(after / -slope)))
