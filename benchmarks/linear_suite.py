"""Suite `linear`: the figures of the linear family, each behind the gate, beside what the machine could do."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import contest_report as tables
import peak
import torch
from contest import LEAST_RUNS, TYPES, NotMeasured, Races
from contest_report import Outcome
from gate import Claim, Ready, gated
from goals import LINEAR_LENGTHS, Figure, Growth, Held, Race
from limits import Share, of_products
from linear_cases import BY_NAME, HEADS, STEP_HEADS, Case, Data, make_data
from linear_peers import CONTENDERS, TORCH
from linear_truth import claims, first_rows, prefix_claims
from memory import Ask, Question
from registry import Contender, Direction, recording
from timing import Pair, exponent, interleave, median, ratio, ratios, repeat, timed

CHECKPOINT = 64  # tokens from one kept state to the next, in what a backward pass may hold
# Operations of a call in those of a forward one: the way back computes the states again, and twice as much with them.
TIMES: dict[Direction, int] = {"forward": 1, "forward+backward": 3}


@dataclass(frozen=True, kw_only=True, slots=True)
class Linear(Races):
    """Suite `linear`."""

    @property
    def sizes(self) -> dict[str, str | int]:
        return {"B": 1, "H": HEADS, "dtype": "float32, bfloat16 (bf16)", "step": f"{STEP_HEADS} heads, one token"}

    def measure(self, ask: Ask) -> Iterator[Outcome]:
        for case in dict.fromkeys(BY_NAME[figure.case] for figure in self.figures):
            answering(self.backend, case, _data(case, 64, 64)).run("forward")  # sets up what is set up once

        def one(figure: Figure) -> Outcome:
            with recording(figure.direction):
                return self.one(figure, ask)

        yield from self.outcomes(one)

    def one(self, figure: Figure, ask: Ask) -> Outcome:
        if isinstance(figure, Race):
            return race(figure, self)
        if isinstance(figure, Growth):
            return grow(figure, self)
        assert isinstance(figure, Held)
        return hold(figure, self, ask)

    def summary(self, rows: Sequence[Outcome]) -> str:
        rates = {peak.NAMES[unit]: peak.products(unit, self.threads) for unit in ("fma", "tile")}
        return tables.summary(rows, self.clock, rates, peak.sgemm(self.threads))

    def plot(self, rows: Sequence[Outcome], path: Path) -> bool:
        return self.drawn(rows, path, "qkv, the linear family")


def race(figure: Race, suite: Linear) -> Outcome:
    """Against the forms of a peer one by one; the figure is the one that comes nearest to ours."""
    case = BY_NAME[figure.case]
    mine = entrant(suite.backend, case, figure)
    found, reasons = [], []
    for rival in TORCH if figure.against == "torch" else (figure.against,):
        try:
            theirs = entrant(rival, case, figure)
        except NotMeasured as reason:
            reasons.append(str(reason))
            continue
        found.append(_race(figure, suite, case, mine, theirs, rival))
    if not found:
        raise NotMeasured("; ".join(reasons))
    return min(found, key=lambda outcome: outcome.value or 0)


def _race(figure: Race, suite: Linear, case: Case, mine: Ready, theirs: Ready, rival: str) -> Outcome:
    first = Pair(*(timed(ready.run, figure.calls)[0] for ready in (mine, theirs)))
    pairs = interleave(
        mine.run, theirs.run, first, budget=suite.budget, least=suite.least, most=suite.most, calls=figure.calls
    )
    speeds = ratios(pairs, suite.clock)
    value = ratio(pairs, suite.clock)
    seconds = tuple(getattr(median([pair[side] for pair in pairs]), suite.clock) for side in (0, 1))
    share = None
    if not case.steps:
        work = flops(case, figure.tokens, figure.head_dim, figure.direction)
        share = of_products(torch.float32, suite.threads, (work, work), seconds)
    elif suite.threads == 1:
        share = of_updating(figure, mine, seconds[1], suite)
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
        limit=value / share.ours if share else None,
        share=mine.share,
        rival=rival if figure.against == "torch" else "",
    )


def of_updating(figure: Race, mine: Ready, theirs: float, suite: Linear) -> Share | None:
    """A loop that reads a state of this size and writes it back, in turn with the step; `theirs` in seconds."""
    state = _data(BY_NAME[figure.case], figure.tokens, figure.head_dim).state
    assert state is not None
    memory = state.clone()
    update = peak.updater([memory])
    if update is None:
        return None
    first = Pair(timed(mine.run, figure.calls)[0], timed(update, figure.calls)[0])
    options = {"budget": suite.budget / 2, "least": suite.least, "most": suite.most, "calls": figure.calls}
    pairs = interleave(mine.run, update, first, **options)
    seconds = median([pair.theirs for pair in pairs]).cpu
    return Share("update loop", 2 * memory.nbytes / seconds, ratio(pairs), seconds / theirs)


def entrant(name: str, case: Case, figure: Race) -> Ready:
    """A contender's call after the gate; raises NotMeasured where it has none."""
    data = _data(case, figure.tokens, figure.head_dim, figure.dtype)
    who = name if name in CONTENDERS and name not in ("auto", "cpu") else "ours"
    what = f"{who}, {case.name} at {figure.tokens:,} tokens, D {figure.head_dim}{TYPES[figure.dtype]}"
    return gated(what, answering(name, case, data), figure.direction, _expected(case, figure))


def answering(name: str, case: Case, data: Data) -> Contender:
    contender = CONTENDERS[name](case, data)
    if isinstance(contender, str):
        raise NotMeasured(contender)
    return contender


def _expected(case: Case, figure: Race) -> list[Claim]:
    return _claims(case, figure.tokens, figure.head_dim, figure.dtype, "backward" in figure.direction)


@cache
def _claims(case: Case, tokens: int, head_dim: int, dtype: torch.dtype, gradients: bool) -> list[Claim]:
    with torch.no_grad():
        return claims(case, _data(case, tokens, head_dim, dtype), gradients=gradients)


def _data(case: Case, tokens: int, head_dim: int, dtype: torch.dtype = torch.float32) -> Data:
    return make_data(1 if case.steps else tokens, case, head_dim, dtype)


def flops(case: Case, tokens: int, head_dim: int, direction: Direction) -> float:
    """Operations that the recurrence needs, token by token."""
    return float(TIMES[direction] * case.work * case.heads * tokens * head_dim * (head_dim + case.normalize))


def grow(figure: Growth, suite: Linear) -> Outcome:
    """Our time at every length, each the first tokens of the longest, and its exponent in L."""
    case, points, worst = BY_NAME[figure.case], [], 0.0
    longest = make_data(max(LINEAR_LENGTHS), case)
    with torch.no_grad():
        truth = prefix_claims(case, longest)
    for tokens in LINEAR_LENGTHS:
        contender = answering(suite.backend, case, longest.first(tokens))
        ready = gated(
            f"ours, {case.name} at {tokens:,} tokens", contender, figure.direction, [first_rows(truth, tokens)]
        )
        samples = repeat(ready.run, ready.first, budget=suite.budget / len(LINEAR_LENGTHS), least=LEAST_RUNS)
        points.append((tokens, median(samples).cpu))
        worst = max(worst, ready.share)
    make_data.cache_clear()  # gigabytes
    return Outcome(
        name=figure.name,
        goal=figure.goal,
        value=exponent(LINEAR_LENGTHS, [seconds for _, seconds in points]),
        beside="linear 1.00",
        ours=points[-1][1],
        points=points,
        share=worst,
    )


def hold(figure: Held, suite: Linear, ask: Ask) -> Outcome:
    """Our call once through the gate at a short length, then in a process of its own."""
    case = BY_NAME[figure.case]
    short = Race(figure.direction, figure.case, 4 * CHECKPOINT)
    ready = entrant(suite.backend, case, short)
    added = ask(Question(suite.backend, case.name, figure.tokens, figure.direction))
    if added is None:
        raise NotMeasured("needs Linux's /proc")
    must, inputs = _held(case, make_data(figure.tokens, case), figure.direction)
    return Outcome(
        name=figure.name,
        goal=figure.goal,
        value=(inputs + added) / must,
        unit="MB",
        ours=float(inputs + added),
        theirs=float(must),
        share=ready.share,
    )


def _held(case: Case, data: Data, direction: Direction) -> tuple[int, int]:
    """Bytes of inputs, results and kept states, and of the inputs alone; a forward call keeps its last state."""
    inputs = sum(tensor.nbytes for tensor in data.trained.values())
    states = 1 if direction == "forward" else 1 + data.tokens // CHECKPOINT
    state = case.heads * data.query.shape[3] * (data.value.shape[3] + case.normalize) * 4
    results = data.value.nbytes
    if direction != "forward":
        inputs += data.grad_output.nbytes
        results += sum(tensor.nbytes for tensor in data.trained.values())
    return inputs + results + states * state, inputs
