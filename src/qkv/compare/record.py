"""What a comparison found: data alone, and its form as JSON."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from qkv.compare.plot import draw
from qkv.compare.setting import Setting
from qkv.compare.text import table
from qkv.compare.timing import Clock

Where = Literal["within", "below", "beyond", "never", "unknown"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Point:
    """One family at one length: the median time of a call or step, with the least and the greatest, and its memory."""

    tokens: int
    seconds: float
    spread: tuple[float, float]
    runs: int
    memory: int | None = None  # bytes: beyond inputs and results at the peak; when decoding those of the cache or state


@dataclass(frozen=True, kw_only=True, slots=True)
class Crossing:
    """From which length on a family is cheaper than dense causal attention, and how that is known.

    "within" the lengths measured, by interpolation; "below" the shortest; "beyond" the longest, where the fitted lines
    meet; "never", where they do not; "unknown" where too little was measured.
    """

    where: Where
    tokens: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One family, its figures, or why there are none."""

    name: str
    group: str
    order: str
    kind: str
    meaning: str
    checked: float  # the worst error beside float64, as a share of what rounding may explain
    refused: str | None = None  # the check failed: nothing was measured
    difference: float | None = None  # of the output from dense softmax attention's; see `Comparison.differs_at`
    points: tuple[Point, ...] = ()
    left_out: str | None = None  # why longer lengths were not measured
    exponent: float | None = None  # a of seconds ~ L^a
    crossing: Crossing | None = None

    def at(self, tokens: int) -> Point | None:
        """The figures of one length."""
        return next((point for point in self.points if point.tokens == tokens), None)


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """The cost of every family at every length, on this machine. `str()` is the table."""

    setting: Setting
    machine: dict[str, str]
    clock: Clock  # "cpu": time of the one thread; "wall" where there are more
    differs_at: int  # the length at which `difference` was measured
    seconds: float  # that all took
    rows: tuple[Row, ...]

    @property
    def passed(self) -> bool:
        """Whether every family was right."""
        return not any(row.refused for row in self.rows)

    def row(self, name: str) -> Row | None:
        """The row of one family."""
        return next((row for row in self.rows if row.name == name), None)

    def to_json(self) -> str:
        """Every figure, in seconds and bytes."""
        return json.dumps(asdict(self), indent=1)

    def __str__(self) -> str:
        return table(self)

    def plot(self, path: str | Path) -> None:
        """Draw time and memory against the length as a PNG file. Needs matplotlib."""
        draw(self, Path(path))
