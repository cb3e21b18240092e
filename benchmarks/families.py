"""Suite `families`: time and peak memory of every family of patterns by length, beside its peers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import families_report as tables
from families_report import FIT_FROM, HEADLINE, Peer, Row
from gate import Claim, Ready, claims, gated
from memory import Ask, Question
from peers import CONTENDERS, flex
from registry import BATCH, DIRECTIONS, FAMILIES, HEADS, Case, Contender, Data, Direction, make_data, recording, sdpa
from timing import Pair, Sample, interleave, median, ratio, repeat, spread, timed

LENGTHS = (1_024, 2_048, 4_096, 8_192, 16_384)
QUICK = (512, 1_024)
PROBE = 1_024  # the length at which a peer's time at a longer one is foretold from
HEADLINE_PAIRS = 3  # that the headline takes at least, whatever the cap
SLOWEST_FOR_MEMORY = 20.0  # seconds of our call beyond which it is not run once more for its memory
SLOWEST_PEER_FOR_MEMORY = 3.0
LEAST_RUNS, SLOWEST_TO_REPEAT = 3, 2.0  # of ours, where the exponent is fitted, while a run takes no more seconds


@dataclass(frozen=True, kw_only=True, slots=True)
class Families:
    """What is measured, how long that may take, and what is made of it."""

    cases: tuple[Case, ...]
    lengths: tuple[int, ...]
    backend: str
    budget: float  # seconds for the repetitions of one row
    cap: float  # seconds of a peer's call beyond which it is not run
    flex: float | None  # seconds in which flex_attention may compile; None: not a peer
    sdpa: bool
    quick: bool  # memory of ours alone, at the longest length

    @property
    def sizes(self) -> dict[str, str | int]:
        return {"B": BATCH, "H": HEADS, "dtype": "float32"}

    def head(self) -> str:
        peers = [*(["sdpa"] if self.sdpa else []), *(["flex"] if self.flex is not None else [])]
        return tables.head(peers)

    def measure(self, ask: Ask) -> Iterator[Row]:
        return measure(self, ask)

    def line(self, row: Row) -> str:
        return tables.line(row)

    def summary(self, rows: Sequence[Row]) -> str:
        return tables.summary(rows)

    def record(self, rows: Sequence[Row]) -> dict[str, Any]:
        return {"rows": [asdict(row) for row in rows], "exponents": tables.exponents(rows)}

    def plot(self, rows: Sequence[Row], path: Path) -> bool:
        return tables.plot(rows, path, self.backend)

    def weighs(self, name: str, tokens: int) -> bool:
        """Whether the peak memory of a contender is asked for; flex_attention would have to compile again."""
        return name != "flex" and (not self.quick or (name == "ours" and tokens == max(self.lengths)))


class Task(NamedTuple):
    """One call that all contenders answer, and what its result must be."""

    case: Case
    data: Data
    direction: Direction
    expected: list[Claim]

    @property
    def is_headline(self) -> bool:
        return (self.case.name, self.data.tokens) == HEADLINE

    def gated(self, name: str, contender: Contender) -> Ready:
        who = f"{name}, {self.case.name} at {self.data.tokens:,} tokens"
        return gated(who, contender, self.direction, self.expected)

    def memory(self, name: str, seconds: float, options: Families, ask: Ask) -> int | None:
        """Peak bytes of a contender that takes so long; None where they are not asked for or cannot be had."""
        most = SLOWEST_FOR_MEMORY if name == "ours" or self.is_headline else SLOWEST_PEER_FOR_MEMORY
        if seconds > most or not options.weighs(name, self.data.tokens):
            return None
        is_ours = name == "ours"
        case = self.case if is_ours else _like(self.case.torch_form)
        return ask(Question(options.backend if is_ours else name, case.name, self.data.tokens, self.direction))


def _like(torch_form: str) -> Case:
    """The first case of a form: SDPA does the same work for all of them."""
    return next(case for case in FAMILIES if case.torch_form == torch_form)


def measure(options: Families, ask: Ask) -> Iterator[Row]:
    """One row a case, length and direction, as each is done."""
    for case in options.cases:
        CONTENDERS[options.backend](case, make_data(64)).run("forward+backward")  # what libraries set up in a process
        for tokens in options.lengths:
            data = make_data(tokens)
            expected = claims(case, data)
            for direction in DIRECTIONS:
                with recording(direction):
                    row = measure_row(Task(case, data, direction, expected), options, ask)
                yield row


def measure_row(task: Task, options: Families, ask: Ask) -> Row:
    """Run once and check; only then time and weigh."""
    mine = task.gated("ours", CONTENDERS[options.backend](task.case, task.data))
    samples, peers = [], {}
    for name, contender in contenders(task, options):
        if isinstance(contender, str):
            peers[name] = Peer(note=contender)
        else:
            theirs = task.gated(name, contender)
            pairs = _pairs(mine, theirs, task, options)
            samples += [pair.mine for pair in pairs]
            peers[name] = _peer(pairs, task.memory(name, theirs.first.cpu, options, ask))
    samples = _enough(samples, mine, task, options)
    cpu, wall = median(samples)
    pattern = task.case.pattern(task.data.tokens)
    return Row(
        case=task.case.name,
        pattern=str(pattern),
        tokens=task.data.tokens,
        direction=task.direction,
        pairs=pattern.count(task.data.tokens),
        cpu=cpu,
        wall=wall,
        runs=len(samples),
        memory=task.memory("ours", cpu, options, ask),
        input_bytes=task.data.input_bytes,
        share=mine.share,
        peers=peers,
    )


def contenders(task: Task, options: Families) -> Iterator[tuple[str, Contender | str]]:
    """Every peer that is asked for, ready to run, or the reason why it is not run."""
    case, data = task.case, task.data
    if options.sdpa:
        short = data.tokens <= PROBE or task.is_headline
        seconds = 0.0 if short else sdpa_seconds(case.torch_form, task.direction) * (data.tokens / PROBE) ** 2
        yield "sdpa", f"not run, about {seconds:.0f} s" if seconds > options.cap else sdpa(case, data)
    if options.flex is not None:
        yield "flex", flex(case, data, options.flex) if task.direction == "forward" else "forward only"


@cache
def sdpa_seconds(torch_form: str, direction: Direction) -> float:
    """Of one call at PROBE tokens; it computes every pair of every pattern but the causal one."""
    call = sdpa(_like(torch_form), make_data(PROBE)).prepare(direction)
    return min(timed(call.run)[0].cpu for _ in range(3))


def _pairs(mine: Ready, theirs: Ready, task: Task, options: Families) -> list[Pair]:
    least = HEADLINE_PAIRS if task.is_headline else 1
    return interleave(mine.run, theirs.run, Pair(mine.first, theirs.first), budget=options.budget, least=least)


def _enough(samples: list[Sample], mine: Ready, task: Task, options: Families) -> list[Sample]:
    """Our runs beside the peers', and more of them where there were none or the exponent is fitted."""
    fitted = task.data.tokens >= FIT_FROM and mine.first.cpu <= SLOWEST_TO_REPEAT
    least = LEAST_RUNS if fitted else 1
    if samples:
        return samples + [timed(mine.run)[0] for _ in range(len(samples), least)]
    return repeat(mine.run, mine.first, budget=options.budget, least=least)


def _peer(pairs: list[Pair], memory: int | None) -> Peer:
    seconds = median([pair.theirs for pair in pairs]).cpu
    return Peer(cpu=seconds, ratio=ratio(pairs), spread=spread(pairs), runs=len(pairs), memory=memory)
