"""`python benchmarks/build.py`: what building a block schedule costs at a million tokens, in CPU time and in memory.

Each build runs in a fresh fork of this idle process, so that no cache helps it, of schedules or of splits.
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Sequence
from multiprocessing import get_context
from typing import NamedTuple

from timing import timed

from qkv import bigbird, causal, dilated, documents, fixed, full, longformer, parse, random_blocks, strided, window
from qkv.patterns.pattern import Pattern

RUNS = 3


class Build(NamedTuple):
    """One build: CPU seconds, tiles of 64 by 64 kept, bytes of the schedule, visible pairs, parts."""

    seconds: float
    tiles: int
    nbytes: int
    pairs: int
    parts: int


def patterns(tokens: int) -> list[Pattern]:
    """The families at one length."""
    root = math.isqrt(tokens)
    return [
        full(),
        causal(),
        causal() & window(255),
        causal() & window(4095),
        window(256, 256),
        strided(root),
        fixed(root),
        dilated(255, dilation=4),
        longformer(256, 4),
        bigbird(3, 64, 2, 0),
        random_blocks(4, 64, 0),
        causal() & documents(cu_seqlens=[n * tokens // 100 for n in range(101)]),
    ]


def build(pattern: Pattern, tokens: int) -> Build:
    """Build it in this process."""
    sample, plan = timed(lambda: pattern.plan(tokens))
    return Build(sample.cpu, plan.tiles, sum(member.nbytes for member in plan.members), plan.pairs, plan.parts)


def measure(pattern: Pattern, tokens: int) -> Build:
    """The build of median time among RUNS, each in a fresh fork."""
    with get_context("fork").Pool(1, maxtasksperchild=1) as pool:
        builds = [pool.apply(build, (pattern, tokens)) for _ in range(RUNS)]
    return builds[0]._replace(seconds=statistics.median(one.seconds for one in builds))


def main(arguments: Sequence[str] | None = None) -> None:
    """Print one line a pattern."""
    parser = argparse.ArgumentParser(description="Cost of building block schedules.")
    parser.add_argument("--tokens", type=int, default=1 << 20, metavar="L", help="default 1,048,576")
    parser.add_argument("--patterns", nargs="+", metavar="TEXT", help="patterns in qkv's notation instead")
    given = parser.parse_args(arguments)
    (causal() & window(3)).plan(64)  # what numpy sets up once belongs to no pattern
    chosen = [parse(text) for text in given.patterns] if given.patterns else patterns(given.tokens)
    print(f"schedules for L = S = {given.tokens:,}, CPU time, median of {RUNS} in fresh processes")
    print(f"{'ms':>9}{'tiles':>13}{'MB':>8}{'parts':>6}{'pairs':>19}  pattern")
    for pattern in chosen:
        one = measure(pattern, given.tokens)
        text = str(pattern) if len(str(pattern)) < 60 else f"{str(pattern)[:56]} ..."
        counts = f"{one.tiles:>13,}{one.nbytes / 1e6:>8.1f}{one.parts:>6}{one.pairs:>19,}"
        print(f"{one.seconds * 1e3:>9,.1f}{counts}  {text}", flush=True)


if __name__ == "__main__":
    main()
