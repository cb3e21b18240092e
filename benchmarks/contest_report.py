"""What suites `cpu` and `production` give to their reader: one line a figure with its goal, a summary and a plot."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from goals import Goal
from report import canvas, logarithmic
from timing import Clock

WIDE = 58  # of a name
EXPLAINED = {  # by what the names of figures hold
    "growth/": "growth: the exponent of time in L",
    "memory/": "memory: the peak beyond inputs and outputs, in sizes of one input",
    "held/": "held: inputs and what the call adds at its peak, over inputs, results and a state every 64 tokens",
    "/step/": "step, of peak: a loop that reads and writes the state alone, in turn with ours",
    "/decode": "decode, of peak: a loop that reads the visible keys and values alone, in turn with ours",
}
UNITS = {"ms": 1e3, "MB": 1e-6}  # of a second, of a byte
CLOCKS: dict[Clock, str] = {"cpu": "CPU time of the thread", "wall": "the clock on the wall"}
TICKS = (0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100, 200, 500)
NARROW = 3  # times the least ratio: up to there tenths are marked
COLOURS = {"aim": "C2", "met": "C0", "SHORT": "C3", "": "0.5"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """A figure as measured, or the reason why there is none; seconds or bytes, medians over runs."""

    name: str
    goal: Goal | None
    note: str = ""
    value: float | None = None  # what the goal is about
    spread: tuple[float, float] | None = None  # of the pairs' own ratios
    beside: str = ""  # what stands in place of the spread
    runs: int = 0
    unit: Literal["ms", "MB"] = "ms"
    ours: float = 0.0
    theirs: float | None = None
    loop: str = ""  # what the machine does at most: products, or reading
    rate: float | None = None  # its operations or bytes a second
    of_peak: float | None = None  # of what the loop does in the same time
    their_of_peak: float | None = None
    limit: float | None = None  # what the value would be at the loop's rate, where that is the limit
    share: float | None = None  # of the error bound that our result uses
    rival: str = ""  # which of several forms was the fastest
    points: list[tuple[int, float]] = field(default_factory=list)  # lengths and seconds

    @property
    def verdict(self) -> str:
        """How the value stands to the goal; empty without either."""
        return "" if self.goal is None or self.value is None else self.goal.verdict(self.value, self.of_peak)


def head() -> str:
    """The header of the table."""
    times = f"{'ours':>13}{'theirs':>13}{'value':>8}{'(of pairs)':>16}{'n':>4}"
    goals = f"  {'goal':<9}{'':>5}{'aim':>6}  {'is':<6}"
    line = f"{'figure':<{WIDE}}{times}{goals}{'of peak':>8}{'theirs':>8}{'bound':>8}"
    return f"{line}\n{'-' * len(line)}"


def line(row: Outcome) -> str:
    """One figure; `of peak`: useful work against that of the machine's loop; `bound`: share of the error bound."""
    if row.value is None:
        return f"{row.name:<{WIDE}}   not measured: {row.note}"
    ours, theirs = (_amount(amount, row.unit) for amount in (row.ours, row.theirs))
    beside = row.beside if row.spread is None else "{:.2f}-{:.2f}".format(*row.spread)
    times = f"{ours:>13}{theirs:>13}{row.value:>8.2f}{beside:>16}{row.runs or '':>4}"
    goal = f"  {'':<9}{'':>5}{'':>6}  {'':<6}"
    if row.goal is not None:
        aim = f"{row.goal.aim:.0%}" if row.goal.aim_of == "peak" else f"{row.goal.aim:g}"
        goal = f"  {row.goal.side:<9}{row.goal.least:>5g}{aim:>6}  {row.verdict:<6}"
    peaks = "".join(f"{'' if part is None else f'{part:.0%}':>8}" for part in (row.of_peak, row.their_of_peak))
    share = "" if row.share is None else f"{row.share:.4f}"
    rival = f"  {row.rival}" if row.rival else ""
    return f"{row.name:<{WIDE}}{times}{goal}{peaks}{share:>8}{rival}".rstrip()


def _amount(amount: float | None, unit: str) -> str:
    return "" if amount is None else f"{amount * UNITS[unit]:,.{1 if amount * UNITS[unit] >= 10 else 3}f} {unit}"


def summary(rows: Sequence[Outcome], clock: Clock, rates: Mapping[str, float | None], sgemm: float) -> str:
    """How many goals are reached, which are not, and the machine's own speed."""
    judged = [row for row in rows if row.verdict]
    short = [row for row in judged if row.verdict == "SHORT"]
    reached, aimed = len(judged) - len(short), sum(row.verdict == "aim" for row in judged)
    unseen = [row.name for row in rows if row.goal is not None and row.value is None]
    absent = "this processor has none" if any(rates.values()) else "not measured (no C compiler)"
    loops = [f"{name}: {absent if rate is None else _giga(rate, 'FLOP/s')}" for name, rate in rates.items()]
    reading = sorted(row.rate for row in rows if row.rate and row.loop == "read loop")
    loops += [f"read loop: {_giga(reading[0], 'B/s')} to {_giga(reading[-1], 'B/s')}"] if reading else []
    return "\n".join(
        [
            f"value: our speed over theirs by {CLOCKS[clock]}, median of the pairs' ratios;",
            *(text for front, text in EXPLAINED.items() if any(front in row.name for row in rows)),
            "; ".join([*loops, f"torch's sgemm of 1,024 cubed: {_giga(sgemm, 'FLOP/s')}"]),
            f"goals: {reached} of {len(judged)} reached, {aimed} of them as aimed at",
            *map(_shortfall, short),
            *(f"not measured: {name}" for name in unseen),
        ]
    )


def _giga(rate: float, unit: str) -> str:
    return f"{rate / 1e9:.1f} G{unit}"


def _shortfall(row: Outcome) -> str:
    """What is missed, and for a race what no implementation on this machine could pass."""
    assert row.goal is not None
    limit = "" if row.limit is None else f"; at the rate of the {row.loop} it would be {row.limit:.2f}"
    return f"SHORT: {row.name}: {row.value:.2f}, {row.goal.side} {row.goal.least:g}{limit}"


def plot(rows: Sequence[Outcome], path: Path, title: str) -> bool:
    """Every ratio with its goals, and every growth; whether matplotlib was there to draw it."""
    races = [row for row in rows if row.spread is not None]
    grown = [row for row in rows if row.points]
    figure = canvas(13, max(5.0, 2.0 + 0.24 * len(races)))
    if figure is None:
        return False
    left, *more = figure.subplots(1, 1 + bool(grown), squeeze=False, width_ratios=(3, 2)[: 1 + bool(grown)])[0]
    _ratios(left, races)
    for right in more:
        _growth(right, grown)
    figure.suptitle(title)
    figure.savefig(path, dpi=110)
    return True


def _growth(axis: Any, grown: Sequence[Outcome]) -> None:
    """Seconds against L, dashed with the backward pass."""
    for row in grown:
        style = "--" if "+backward" in row.name else "-"
        name = row.name.removeprefix("growth/")
        axis.plot(*zip(*row.points, strict=True), style, marker="o", ms=4, label=f"{name}: {row.value:.2f}")
    lengths = sorted({tokens for row in grown for tokens, _ in row.points})
    logarithmic(axis, lengths, "seconds against L, with the exponent")
    axis.tick_params(axis="x", labelsize=8)
    axis.legend(fontsize=8, frameon=False)


def _ratios(axis: Any, races: Sequence[Outcome]) -> None:
    """A dot a ratio with the range of its pairs; | at least, ¦ aim."""
    for place, row in enumerate(races):
        colour = COLOURS[row.verdict]
        axis.plot(row.spread, (place, place), color=colour, lw=1.5)
        axis.plot(row.value, place, "o", color=colour, ms=5)
        if row.goal is not None:
            axis.plot(row.goal.least, place, "|", color="k", ms=11, mew=1.5)
            aim = row.goal.aim if row.goal.aim_of == "value" else row.goal.aim * (row.limit or 0)
            if aim:
                axis.plot(aim, place, "|", color="0.6", ms=11, mew=1.5)
    axis.axvline(1, color="0.8", zorder=0)
    axis.set_xscale("log")
    low, high = axis.get_xlim()
    tenths = [tenth / 10 for tenth in range(math.ceil(10 * low), math.floor(10 * high) + 1)]
    ticks = TICKS if high > NARROW * low else tenths
    axis.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axis.minorticks_off()
    axis.set_xlim(low, high)
    axis.set_yticks(range(len(races)), [row.name for row in races], fontsize=7)
    axis.set_title("speed over theirs; ticks: at least (black), aim (grey)", fontsize=11)
    axis.grid(axis="x", alpha=0.3)
    axis.invert_yaxis()
