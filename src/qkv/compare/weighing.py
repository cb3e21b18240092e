"""The memory of every call that was timed, each in a fork of a helper process."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import asdict, replace

from qkv.compare.memory import MemoryProbe
from qkv.compare.record import Row
from qkv.compare.setting import SHORTEST, Setting

SHARE = 0.4  # of the budget, beside the time of the runs


def weighed(rows: list[Row], setting: Setting, tell: Callable[[str], object]) -> list[Row]:
    """The peak memory of each call, the longest first; those for which the budget has no room stay without."""
    if setting.direction == "decode":
        return rows
    tell("memory, each call in a process of its own")
    with closing(MemoryProbe("-m", "qkv.compare.probe")) as helper:
        helper.ask([rows[0].name, asdict(setting), SHORTEST])  # once it answers it has loaded, and the time begins
        end = time.perf_counter() + SHARE * setting.budget
        known = {
            (row.name, tokens): _bytes(helper, row, setting, tokens, end)
            for tokens in reversed(setting.lengths)
            for row in rows
            if row.at(tokens)
        }
    return [
        replace(row, points=tuple(replace(point, memory=known[row.name, point.tokens]) for point in row.points))
        for row in rows
    ]


def _bytes(helper: MemoryProbe, row: Row, setting: Setting, tokens: int, end: float) -> int | None:
    point = row.at(tokens)
    if point is None or time.perf_counter() + 2 * point.seconds > end:
        return None
    return helper.ask([row.name, asdict(setting), tokens])
