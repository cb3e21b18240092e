"""Times of two contenders and what is made of them: interleaved pairs, the median of pair ratios.

What `qkv compare` measures by as well (samples, medians, the exponent in L) comes from there.
"""

from __future__ import annotations

import gc
import statistics
from collections.abc import Callable, Sequence
from typing import NamedTuple

from qkv.compare.timing import Clock, Sample, exponent, median, timed

__all__ = [
    "Pair",
    "Sample",
    "count",
    "exponent",
    "interleave",
    "median",
    "ratio",
    "ratios",
    "repeat",
    "spread",
    "timed",
]


class Pair(NamedTuple):
    """One run of each of two contenders, one right after the other."""

    mine: Sample
    theirs: Sample


def repeat(call: Callable[[], object], first: Sample, *, budget: float, least: int = 1, most: int = 7) -> list[Sample]:
    """As many runs as the budget of seconds holds; where it holds none, the first run is the only sample."""
    runs = count(first.cpu, budget=budget, least=least, most=most)
    gc.collect()
    return [timed(call)[0] for _ in range(runs)] or [first]


def interleave(
    mine: Callable[[], object],
    theirs: Callable[[], object],
    first: Pair,
    *,
    budget: float,
    least: int = 1,
    most: int = 7,
    calls: int = 1,
) -> list[Pair]:
    """A B A B ...: what disturbs the machine disturbs both sides of a pair. A sample may be of many calls."""
    pairs = count(calls * (first.mine.cpu + first.theirs.cpu), budget=budget, least=least, most=most)
    gc.collect()
    return [Pair(timed(mine, calls)[0], timed(theirs, calls)[0]) for _ in range(pairs)] or [first]


def count(seconds: float, *, budget: float, least: int, most: int) -> int:
    """How many runs follow a first one of so many seconds; none where that alone takes the budget and one is enough."""
    if least <= 1 and seconds > budget:
        return 0
    return max(least, min(most, int(budget / max(seconds, 1e-9))))


def ratios(pairs: Sequence[Pair], clock: Clock = "cpu") -> list[float]:
    """How many times as long theirs takes, pair by pair."""
    return [getattr(pair.theirs, clock) / getattr(pair.mine, clock) for pair in pairs]


def ratio(pairs: Sequence[Pair], clock: Clock = "cpu") -> float:
    """The median of the pairs' own ratios."""
    return statistics.median(ratios(pairs, clock))


def spread(pairs: Sequence[Pair], clock: Clock = "cpu") -> tuple[float, float]:
    """The least and the greatest ratio of a pair."""
    return min(ratios(pairs, clock)), max(ratios(pairs, clock))
