"""Suite `cpu`: the figures of goals.py, each behind the gate, beside what the machine could do at most."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import contest_report as tables
import peak
from contest_report import Outcome
from gate import Ready, check_spread, expected, gated
from goals import LENGTHS, Figure, Growth, Race, Weight
from memory import Ask, Question
from peers import CONTENDERS, OURS
from registry import BATCH, BY_NAME, HEAD_DIM, HEADS, Case, Contender, Data, Direction, make_data, recording
from timing import Clock, Pair, exponent, interleave, median, ratios, repeat, timed

# Floating-point operations a visible pair and element of D: forward two products, backward five.
OPERATIONS: dict[Direction, int] = {"forward": 4, "recorded": 4, "backward": 10, "forward+backward": 14}
LEAST_RUNS = 3  # of each length whose growth is fitted


class NotMeasured(Exception):
    """Why a figure cannot be had: a peer that is missing or has no answer, a system that does not tell."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Contest:
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

    def measure(self, ask: Ask) -> Iterator[Outcome]:
        for case in dict.fromkeys(BY_NAME[figure.case] for figure in self.figures):
            answering(self.backend, case, make_data(64, case)).run("forward+backward")  # sets up what is set up once
        for figure in self.figures:
            try:
                with recording(figure.direction):
                    outcome = self.one(figure, ask)
            except NotMeasured as reason:
                outcome = Outcome(name=figure.name, goal=figure.goal, note=str(reason))
            yield outcome

    def one(self, figure: Figure, ask: Ask) -> Outcome:
        if isinstance(figure, Race):
            return race(figure, self)
        return grow(figure, self) if isinstance(figure, Growth) else weigh(figure, self, ask)

    def line(self, row: Outcome) -> str:
        return tables.line(row)

    def summary(self, rows: Sequence[Outcome]) -> str:
        return tables.summary(rows, self.clock, peak.fma(self.threads), peak.sgemm(self.threads))

    def record(self, rows: Sequence[Outcome]) -> dict[str, Any]:
        return {"clock": self.clock, "figures": [{**asdict(row), "verdict": row.verdict} for row in rows]}

    def plot(self, rows: Sequence[Outcome], path: Path) -> bool:
        return tables.plot(rows, path, f"qkv, backend {self.backend}, threads: {self.threads}")


def race(figure: Race, contest: Contest) -> Outcome:
    """Both contenders through the gate, then in turn."""
    case, other = BY_NAME[figure.case], BY_NAME[figure.baseline or figure.case]
    mine = entrant(contest.backend, case, figure.tokens, figure.head_dim, figure.direction)
    against = contest.backend if figure.baseline else figure.against
    theirs = entrant(against, other, figure.tokens, figure.head_dim, figure.direction)
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
    work, their_work = (flops(one, figure) for one in (case, other))
    speeds = [each * (work / their_work if figure.by_pairs else 1.0) for each in ratios(pairs, contest.clock)]
    ours, others = (getattr(median([pair[side] for pair in pairs]), contest.clock) for side in (0, 1))
    value, most = statistics.median(speeds), peak.fma(contest.threads)
    of_peak = most and work / ours / most
    return Outcome(
        name=figure.name,
        goal=figure.goal,
        value=value,
        spread=(min(speeds), max(speeds)),
        runs=len(pairs),
        ours=ours,
        theirs=others,
        of_peak=of_peak,
        their_of_peak=most and their_work / others / most,
        limit=value / of_peak if of_peak and figure.is_of_speed else None,
        share=mine.share,
    )


def entrant(name: str, case: Case, tokens: int, head_dim: int, direction: Direction) -> Ready:
    """A contender's call after the gate; raises NotMeasured where it has none.

    Another's dropout has random numbers of its own: its call is compared without dropout, and what it drops by its
    spread about that.
    """
    data, whole = make_data(tokens, case, head_dim), case
    contender = answering(name, case, data)
    is_foreign = case.extras.dropout_p > 0 and name not in OURS
    if is_foreign:
        whole = case._replace(extras=case.extras._replace(dropout_p=0.0))
        check_spread(contender.run("forward")["output"], case, data)
    judged = answering(name, whole, data) if is_foreign else contender
    claims = expected(whole, tokens, head_dim, gradients="backward" in direction)
    who = name if name not in OURS else "ours"
    ready = gated(f"{who}, {case.name} at {tokens:,} tokens, D {head_dim}", judged, direction, claims)
    return ready._replace(run=contender.prepare(direction).run) if is_foreign else ready


def answering(name: str, case: Case, data: Data) -> Contender:
    contender = CONTENDERS[name](case, data)
    if isinstance(contender, str):
        raise NotMeasured(contender)
    return contender


def flops(case: Case, figure: Race) -> float:
    """Useful ones: of visible pairs alone."""
    pairs = BATCH * HEADS * case.pattern(figure.tokens).count(figure.tokens)
    return float(OPERATIONS[figure.direction] * figure.head_dim * pairs)


def grow(figure: Growth, contest: Contest) -> Outcome:
    """Our time at every length, and the exponents in L of it and of the visible pairs."""
    case, points = BY_NAME[figure.case], []
    for tokens in LENGTHS:
        ready = entrant(contest.backend, case, tokens, HEAD_DIM, figure.direction)
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
    ready = entrant(contest.backend, case, figure.tokens, HEAD_DIM, figure.direction)
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
