"""Times and what is made of them: process CPU time, interleaved pairs, the median of pair ratios, the exponent in L."""

from __future__ import annotations

import gc
import math
import statistics
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

T = TypeVar("T")


class Sample(NamedTuple):
    """Seconds of one run: of this process on its core, and on the clock on the wall."""

    cpu: float
    wall: float


class Pair(NamedTuple):
    """One run of each of two contenders, one right after the other."""

    mine: Sample
    theirs: Sample


def timed(call: Callable[[], T]) -> tuple[Sample, T]:
    """One run and its result."""
    wall, cpu = time.perf_counter(), time.process_time()
    result = call()
    return Sample(time.process_time() - cpu, time.perf_counter() - wall), result


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
) -> list[Pair]:
    """A B A B ...: what disturbs the machine disturbs both sides of a pair."""
    pairs = count(first.mine.cpu + first.theirs.cpu, budget=budget, least=least, most=most)
    gc.collect()
    return [Pair(timed(mine)[0], timed(theirs)[0]) for _ in range(pairs)] or [first]


def count(seconds: float, *, budget: float, least: int, most: int) -> int:
    """How many runs follow a first one of so many seconds; none where that alone takes the budget and one is enough."""
    if least <= 1 and seconds > budget:
        return 0
    return max(least, min(most, int(budget / max(seconds, 1e-9))))


def median(samples: Sequence[Sample]) -> Sample:
    return Sample(*(statistics.median(side) for side in zip(*samples, strict=True)))


def ratio(pairs: Sequence[Pair]) -> float:
    """How many times as long theirs takes: the median of the pairs' own ratios of CPU time."""
    return statistics.median(pair.theirs.cpu / pair.mine.cpu for pair in pairs)


def spread(pairs: Sequence[Pair]) -> tuple[float, float]:
    """The least and the greatest ratio of a pair."""
    ratios = [pair.theirs.cpu / pair.mine.cpu for pair in pairs]
    return min(ratios), max(ratios)


def exponent(lengths: Sequence[int], values: Sequence[float]) -> float | None:
    """The a of value ~ L^a by least squares on the logarithms; None for fewer than two lengths."""
    if len(lengths) < 2:
        return None
    x, y = [math.log(n) for n in lengths], [math.log(value) for value in values]
    return statistics.linear_regression(x, y).slope
