"""Times and what is made of them: CPU time of the thread, calls in turn, medians, the exponent in L."""

from __future__ import annotations

import gc
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Literal, NamedTuple, TypeAlias, TypeVar

T = TypeVar("T")
Clock: TypeAlias = Literal["cpu", "wall"]


class Sample(NamedTuple):
    """Seconds of one run: of this thread on its core, and on the clock on the wall."""

    cpu: float
    wall: float


def timed(call: Callable[[], T], calls: int = 1) -> tuple[Sample, T]:
    """Seconds a run, the mean of so many in a row, and the last result."""
    wall, cpu = time.perf_counter(), time.thread_time()
    for _ in range(calls - 1):
        call()
    result = call()
    return Sample((time.thread_time() - cpu) / calls, (time.perf_counter() - wall) / calls), result


def rounds(
    runs: Mapping[str, Callable[[], object]],
    *,
    calls: Mapping[str, int],
    least: int,
    most: int,
    until: float,
) -> dict[str, list[Sample]]:
    """A B C A B C ...: each round is a sample of every call by name, so that what disturbs one disturbs all.

    `calls`: how many in one sample. At least `least` rounds, then more up to `most` while `perf_counter` is below
    `until`.
    """
    found: dict[str, list[Sample]] = {name: [] for name in runs}
    gc.collect()
    for done in range(most):
        if done >= least and time.perf_counter() >= until:
            break
        for name, run in runs.items():
            found[name].append(timed(run, calls[name])[0])
    return found


def median(samples: Sequence[Sample]) -> Sample:
    """The medians of both times, each by itself."""
    return Sample(*(statistics.median(side) for side in zip(*samples, strict=True)))


def exponent(lengths: Sequence[int], values: Sequence[float]) -> float | None:
    """The a of value ~ L^a by least squares on the logarithms; None for fewer than two lengths."""
    if len(lengths) < 2:
        return None
    x, y = [math.log(n) for n in lengths], [math.log(value) for value in values]
    return statistics.linear_regression(x, y).slope
