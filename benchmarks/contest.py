"""Suites `cpu` and `production`: the figures of goals.py, each behind the gate, beside what the machine could do."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import contest_report as tables
import peak
import torch
from contest_report import Outcome
from gate import OURS_ROUND, Claim, Ready, check_spread, claims, gated, torch_rounds
from goals import LENGTHS, Figure, Growth, Race, Suite, Through, Weight
from limits import of_products, of_reading
from memory import Ask, Question
from peers import CONTENDERS, OURS, THROUGH
from registry import (
    BATCH,
    BY_NAME,
    HEAD_DIM,
    HEADS,
    LONGEST,
    PACKED,
    PACKED_TOKENS,
    SHORTEST,
    Case,
    Contender,
    Data,
    Direction,
    make_data,
    recording,
)
from timing import Clock, Pair, exponent, interleave, median, ratios, repeat, timed

# Floating-point operations a visible pair and element of D: forward two products, backward five.
OPERATIONS: dict[Direction, int] = {"forward": 4, "recorded": 4, "backward": 10, "forward+backward": 14}
TYPES = {torch.float32: "", torch.bfloat16: ", bfloat16", torch.float16: ", float16"}
SIZES: dict[Suite, dict[str, str | int]] = {
    "cpu": {"B": BATCH, "H": HEADS, "dtype": "float32"},
    "production": {
        "B": BATCH,
        "H": HEADS,
        "dtype": "float32, bfloat16 (bf16), float16 (fp16)",
        "decode": "32 query heads on 8, a batch of 8 where the name says batch",
        "packed": f"{PACKED} documents of {SHORTEST} to {LONGEST:,} tokens at {PACKED_TOKENS:,}",
    },
}
LEAST_RUNS = 3  # of each length whose growth is fitted


class NotMeasured(Exception):
    """Why a figure cannot be had: a peer that is missing or has no answer, a system that does not tell."""


class Setting(NamedTuple):
    """Beside its case, what a call is of."""

    direction: Direction
    tokens: int
    head_dim: int = HEAD_DIM
    dtype: torch.dtype = torch.float32

    def data(self, case: Case) -> Data:
        return make_data(self.tokens, case, self.head_dim, dtype=self.dtype)


@dataclass(frozen=True, kw_only=True, slots=True)
class Races:
    """What is measured, and how long the repetitions of one figure may take."""

    figures: tuple[Figure, ...]
    backend: str
    threads: int
    budget: float  # seconds
    least: int  # pairs
    most: int

    @property
    def clock(self) -> Clock:
        return "cpu" if self.threads == 1 else "wall"

    def head(self) -> str:
        return tables.head()

    def outcomes(self, one: Callable[[Any], Outcome]) -> Iterator[Outcome]:
        """What `one` makes of each figure, or why it could not."""
        for figure in self.figures:
            try:
                outcome = one(figure)
            except NotMeasured as reason:
                outcome = Outcome(name=figure.name, goal=figure.goal, note=str(reason))
            yield outcome

    def line(self, row: Outcome) -> str:
        return tables.line(row)

    def record(self, rows: Sequence[Outcome]) -> dict[str, Any]:
        return {"clock": self.clock, "figures": [{**asdict(row), "verdict": row.verdict} for row in rows]}

    def drawn(self, rows: Sequence[Outcome], path: Path, title: str) -> bool:
        """Whether there was something to plot."""
        return tables.plot(rows, path, f"{title}, backend {self.backend}, threads: {self.threads}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Contest(Races):
    """Suites `cpu` and `production`."""

    name: Suite

    @property
    def sizes(self) -> dict[str, str | int]:
        return SIZES[self.name]

    def measure(self, ask: Ask) -> Iterator[Outcome]:
        for case in dict.fromkeys(BY_NAME[figure.case] for figure in self.figures):
            answering(self.backend, case, make_data(64, case)).run("forward+backward")  # sets up what is set up once

        def one(figure: Figure) -> Outcome:
            with recording(figure.direction):
                return self.one(figure, ask)

        yield from self.outcomes(one)

    def one(self, figure: Figure, ask: Ask) -> Outcome:
        if isinstance(figure, Race):
            return race(figure, self)
        return grow(figure, self) if isinstance(figure, Growth) else weigh(figure, self, ask)

    def summary(self, rows: Sequence[Outcome]) -> str:
        units: tuple[peak.Unit, ...] = ("fma", "dot", "tile") if self.name == "production" else ("fma",)
        rates = {peak.NAMES[unit]: peak.products(unit, self.threads) for unit in units}
        return tables.summary(rows, self.clock, rates, peak.sgemm(self.threads))

    def plot(self, rows: Sequence[Outcome], path: Path) -> bool:
        return self.drawn(rows, path, "qkv")


def race(figure: Race, contest: Contest) -> Outcome:
    """Both contenders through the gate, then in turn."""
    case, other = BY_NAME[figure.case], BY_NAME[figure.baseline or figure.case]
    setting = Setting(figure.direction, figure.tokens, figure.head_dim, figure.dtype)
    mine = entrant(contest.backend, case, setting, figure.through)
    theirs = entrant(contest.backend if figure.baseline else figure.against, other, setting)
    first = Pair(mine.first, theirs.first)
    if figure.calls > 1:
        first = Pair(*(timed(ready.run, figure.calls)[0] for ready in (mine, theirs)))
    pairs = interleave(
        mine.run,
        theirs.run,
        first,
        budget=contest.budget,
        least=contest.least,
        most=contest.most,
        calls=figure.calls,
    )
    work = flops(case, setting), flops(other, setting)
    speeds = [each * (work[0] / work[1] if figure.by_pairs else 1.0) for each in ratios(pairs, contest.clock)]
    seconds = tuple(getattr(median([pair[side] for pair in pairs]), contest.clock) for side in (0, 1))
    value, share = statistics.median(speeds), None
    if not case.decodes:
        share = of_products(figure.dtype, contest.threads, work, seconds)
    elif contest.threads == 1:
        share = of_reading(case, setting.data(case), mine, seconds[1], budget=contest.budget / 2, least=contest.least)
    return Outcome(
        name=figure.name,
        goal=figure.goal,
        value=value,
        spread=(min(speeds), max(speeds)),
        runs=len(pairs),
        ours=seconds[0],
        theirs=seconds[1],
        of_peak=share and share.ours,
        their_of_peak=share and share.theirs,
        loop=share.loop if share else "",
        rate=share and share.rate,
        limit=value / share.ours if share and figure.is_of_speed else None,
        share=mine.share,
    )


def entrant(name: str, case: Case, setting: Setting, through: Through = "attention") -> Ready:
    """A contender's call after the gate; raises NotMeasured where it has none.

    Another's dropout has random numbers of its own: its call is compared without dropout, and what it drops by its
    spread about that.
    """
    data, whole, direction = setting.data(case), case, setting.direction
    contender = answering(name, case, data, through)
    is_foreign = case.extras.dropout_p > 0 and name not in OURS
    if is_foreign:
        whole = case._replace(extras=case.extras._replace(dropout_p=0.0))
        check_spread(contender.run("forward")["output"], case, data)
    judged = answering(name, whole, data) if is_foreign else contender
    who = name if name not in OURS else "ours" if through == "attention" else f"ours by {through}"
    what = f"{who}, {case.name} at {setting.tokens:,} tokens, D {setting.head_dim}{TYPES[setting.dtype]}"
    rounds = OURS_ROUND if name in OURS else torch_rounds(whole, setting.tokens)
    ready = gated(what, judged, direction, expected(whole, setting), rounds)
    return ready._replace(run=contender.prepare(direction).run) if is_foreign else ready


@cache
def expected(case: Case, setting: Setting) -> list[Claim]:
    """The claims on the registry's own data, computed once."""
    return claims(case, setting.data(case), gradients="backward" in setting.direction)


def answering(name: str, case: Case, data: Data, through: Through = "attention") -> Contender:
    contender = THROUGH[through](case, data, name) if name in OURS else CONTENDERS[name](case, data)
    if isinstance(contender, str):
        raise NotMeasured(contender)
    return contender


def flops(case: Case, setting: Setting) -> float:
    """Useful ones: of visible pairs alone."""
    axes = case.shape(setting.tokens)
    pairs = case.pattern(setting.tokens).count(axes.queries, setting.tokens, batch=axes.batch, heads=axes.heads)
    return float(OPERATIONS[setting.direction] * setting.head_dim * pairs)


def grow(figure: Growth, contest: Contest) -> Outcome:
    """Our time at every length, and the exponents in L of it and of the visible pairs."""
    case, points = BY_NAME[figure.case], []
    for tokens in LENGTHS:
        ready = entrant(contest.backend, case, Setting(figure.direction, tokens))
        samples = repeat(ready.run, ready.first, budget=contest.budget / len(LENGTHS), least=LEAST_RUNS)
        points.append((tokens, median(samples).cpu))
    pairs = [float(case.pattern(tokens).count(tokens)) for tokens in LENGTHS]
    return Outcome(
        name=figure.name,
        goal=figure.goal,
        value=exponent(LENGTHS, [seconds for _, seconds in points]),
        beside=f"pairs {exponent(LENGTHS, pairs):.2f}",
        ours=points[-1][1],
        points=points,
    )


def weigh(figure: Weight, contest: Contest, ask: Ask) -> Outcome:
    """Our call once through the gate here, then in a process of its own; its results are no part of the figure."""
    case = BY_NAME[figure.case]
    ready = entrant(contest.backend, case, Setting(figure.direction, figure.tokens))
    added = ask(Question(contest.backend, case.name, figure.tokens, figure.direction))
    if added is None:
        raise NotMeasured("needs Linux's /proc")
    one = BATCH * HEADS * figure.tokens * HEAD_DIM * 4
    extra = max(added - one * (4 if figure.direction == "forward+backward" else 1), 0)
    return Outcome(
        name=figure.name,
        goal=figure.goal,
        value=extra / one,
        unit="MB",
        ours=float(extra),
        theirs=float(one),
        share=ready.share,
    )
