"""Times and what is made of them: thread CPU time, interleaved pairs, the median of pair ratios, the exponent in L."""

from __future__ import annotations

import gc
import math
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple, TypeAlias, TypeVar

T = TypeVar("T")
Clock: TypeAlias = Literal["cpu", "wall"]


class Sample(NamedTuple):
    """Seconds of one run: of this thread on its core, and on the clock on the wall."""

    cpu: float
    wall: float


class Pair(NamedTuple):
    """One run of each of two contenders, one right after the other."""

    mine: Sample
    theirs: Sample


def timed(call: Callable[[], T], calls: int = 1) -> tuple[Sample, T]:
    """Seconds a run, the mean of so many in a row, and the last result."""
    wall, cpu = time.perf_counter(), time.thread_time()
    for _ in range(calls - 1):
        call()
    result = call()
    return Sample((time.thread_time() - cpu) / calls, (time.perf_counter() - wall) / calls), result


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


def median(samples: Sequence[Sample]) -> Sample:
    return Sample(*(statistics.median(side) for side in zip(*samples, strict=True)))


def ratios(pairs: Sequence[Pair], clock: Clock = "cpu") -> list[float]:
    """How many times as long theirs takes, pair by pair."""
    return [getattr(pair.theirs, clock) / getattr(pair.mine, clock) for pair in pairs]


def ratio(pairs: Sequence[Pair], clock: Clock = "cpu") -> float:
    """The median of the pairs' own ratios."""
    return statistics.median(ratios(pairs, clock))


def spread(pairs: Sequence[Pair], clock: Clock = "cpu") -> tuple[float, float]:
    """The least and the greatest ratio of a pair."""
    return min(ratios(pairs, clock)), max(ratios(pairs, clock))


def exponent(lengths: Sequence[int], values: Sequence[float]) -> float | None:
    """The a of value ~ L^a by least squares on the logarithms; None for fewer than two lengths."""
    if len(lengths) < 2:
        return None
    x, y = [math.log(n) for n in lengths], [math.log(value) for value in values]
    return statistics.linear_regression(x, y).slope
