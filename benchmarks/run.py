"""`python benchmarks/run.py`: time and peak memory of blockwise attention per family and length, beside its peers.

Every figure stands behind the gate: a wrong result prints REFUSED, writes nothing and ends with exit status 1.
"""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import NamedTuple, TypeAlias

import torch
from gate import Claim, Refused, check, claims
from memory import MemoryProbe, Question
from registry import (
    BATCH,
    BY_NAME,
    CASES,
    DIRECTIONS,
    FIT_FROM,
    HEAD_DIM,
    HEADLINE,
    HEADS,
    LENGTHS,
    Case,
    Contender,
    Data,
    Direction,
    flex,
    make_data,
    ours,
    sdpa,
)
from report import Peer, Row, head, line, machine, summary, write
from timing import Pair, Sample, interleave, median, ratio, repeat, spread, timed

QUICK = (512, 1_024)
PROBE = 1_024  # the length at which a peer's time at a longer one is foretold from
HEADLINE_PAIRS = 3  # that the headline takes at least, whatever the cap
SLOWEST_FOR_MEMORY = 20.0  # seconds of our call beyond which it is not run once more for its memory
SLOWEST_PEER_FOR_MEMORY = 3.0
LEAST_RUNS, SLOWEST_TO_REPEAT = 3, 2.0  # of ours, where the exponent is fitted, while a run takes no more seconds
FLEX_LONGEST = 8_192  # its block mask is evaluated densely

Ask: TypeAlias = Callable[[Question], int | None]


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """What is measured, and how long that may take."""

    cases: tuple[Case, ...]
    lengths: tuple[int, ...]
    budget: float  # seconds for the repetitions of one row
    cap: float  # seconds of a peer's call beyond which it is not run
    flex: float | None  # seconds in which flex_attention may compile; None: not a peer
    sdpa: bool
    quick: bool  # memory of ours alone, at the longest length

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

    def memory(self, name: str, seconds: float, options: Options, ask: Ask) -> int | None:
        """Peak bytes of a contender that takes so long; None where they are not asked for or cannot be had."""
        most = SLOWEST_FOR_MEMORY if name == "ours" or self.is_headline else SLOWEST_PEER_FOR_MEMORY
        if seconds > most or not options.weighs(name, self.data.tokens):
            return None
        case = self.case if name == "ours" else _like(self.case.torch_form)
        return ask(Question(name, case.name, self.data.tokens, self.direction))


def _like(torch_form: str) -> Case:
    """The first case of a form: SDPA does the same work for all of them."""
    return next(case for case in CASES if case.torch_form == torch_form)


def measure(options: Options, ask: Ask) -> Iterator[Row]:
    """One row a case, length and direction, as each is done."""
    for case in options.cases:
        ours(case, make_data(64)).run("forward+backward")  # what libraries set up once in a process
        for tokens in options.lengths:
            data = make_data(tokens)
            expected = claims(case, data)
            for direction in DIRECTIONS:
                yield measure_row(Task(case, data, direction, expected), options, ask)


def measure_row(task: Task, options: Options, ask: Ask) -> Row:
    """Run once and check; only then time and weigh."""
    mine = ours(task.case, task.data)
    first, share = gated("ours", mine, task)
    samples, peers = [], {}
    for name, contender in contenders(task, options):
        if isinstance(contender, str):
            peers[name] = Peer(note=contender)
        else:
            theirs, _ = gated(name, contender, task)
            pairs = _pairs(mine, contender, Pair(first, theirs), task, options)
            samples += [pair.mine for pair in pairs]
            peers[name] = _peer(pairs, task.memory(name, theirs.cpu, options, ask))
    samples = _enough(samples, mine, first, task, options)
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
        share=share,
        peers=peers,
    )


def gated(name: str, contender: Contender, task: Task) -> tuple[Sample, float]:
    """The first run, compared with the truth before anything else happens, and the share of the bound that it uses."""
    sample, result = timed(lambda: contender.run(task.direction))
    try:
        return sample, check(result, task.expected)
    except Refused as refused:
        where = f"{task.case.name} at {task.data.tokens:,} tokens, {task.direction}"
        raise Refused(f"{name}, {where}: {refused}") from None


def contenders(task: Task, options: Options) -> Iterator[tuple[str, Contender | str]]:
    """Every peer that is asked for, ready to run, or the reason why it is not run."""
    case, data = task.case, task.data
    if options.sdpa:
        short = data.tokens <= PROBE or task.is_headline
        seconds = 0.0 if short else sdpa_seconds(case.torch_form, task.direction) * (data.tokens / PROBE) ** 2
        yield "sdpa", f"not run, about {seconds:.0f} s" if seconds > options.cap else sdpa(case, data)
    if options.flex is not None and task.direction == "forward":
        yield "flex", compiled_flex(case, data, options.flex)
    elif options.flex is not None:
        yield "flex", "forward only"


@cache
def sdpa_seconds(torch_form: str, direction: Direction) -> float:
    """Of one call at PROBE tokens; it computes every pair of every pattern but the causal one."""
    call = sdpa(_like(torch_form), make_data(PROBE))
    return min(timed(lambda: call.run(direction))[0].cpu for _ in range(3))


def compiled_flex(case: Case, data: Data, seconds: float) -> Contender | str:
    """flex_attention after its first run, or why there is none."""
    if not case.flex:
        return "its tracer cannot read the rule"
    if data.tokens > FLEX_LONGEST:
        return f"not run beyond {FLEX_LONGEST:,}"
    try:
        with _alarm(seconds):
            contender = flex(case, data)
            contender.run("forward")
    except (RuntimeError, TimeoutError) as error:
        print(f"flex: {type(error).__name__}: {str(error).strip().splitlines()[0]:.100}")
        return "did not compile" if isinstance(error, RuntimeError) else f"not compiled in {seconds:.0f} s"
    return contender


@contextmanager
def _alarm(seconds: float) -> Iterator[None]:
    def ring(*_: object) -> None:
        raise TimeoutError(f"more than {seconds:.0f} s")

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _pairs(mine: Contender, theirs: Contender, first: Pair, task: Task, options: Options) -> list[Pair]:
    least = HEADLINE_PAIRS if task.is_headline else 1
    calls = (lambda: mine.run(task.direction)), (lambda: theirs.run(task.direction))
    return interleave(*calls, first, budget=options.budget, least=least)


def _enough(samples: list[Sample], mine: Contender, first: Sample, task: Task, options: Options) -> list[Sample]:
    """Our runs beside the peers', and more of them where there were none or the exponent is fitted."""
    fitted = task.data.tokens >= FIT_FROM and first.cpu <= SLOWEST_TO_REPEAT
    least = LEAST_RUNS if fitted else 1
    if samples:
        return samples + [timed(lambda: mine.run(task.direction))[0] for _ in range(len(samples), least)]
    return repeat(lambda: mine.run(task.direction), first, budget=options.budget, least=least)


def _peer(pairs: list[Pair], memory: int | None) -> Peer:
    seconds = median([pair.theirs for pair in pairs]).cpu
    return Peer(cpu=seconds, ratio=ratio(pairs), spread=spread(pairs), runs=len(pairs), memory=memory)


def parse(arguments: Sequence[str] | None) -> tuple[Options, Path, str]:
    """The options, the folder of the results and their name."""
    parser = argparse.ArgumentParser(
        description="Time and peak memory of blockwise attention, each figure checked first."
    )
    parser.add_argument("--quick", action="store_true", help="short lengths, few repetitions: under 40 seconds")
    parser.add_argument("--lengths", type=int, nargs="+", metavar="L", help=f"default: {' '.join(map(str, LENGTHS))}")
    parser.add_argument("--cases", nargs="+", choices=list(BY_NAME), metavar="CASE", help=f"of {', '.join(BY_NAME)}")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"), help="folder of the results")
    parser.add_argument("--name", help="name of the result files: default blockwise, or quick")
    parser.add_argument("--cap", type=float, default=3.0, metavar="S", help="no peer's call that takes longer is run")
    parser.add_argument("--no-peers", action="store_true", help="ours alone")
    parser.add_argument("--flex", type=float, metavar="S", help="flex_attention too, if it compiles in S seconds")
    given = parser.parse_args(arguments)
    options = Options(
        cases=tuple(BY_NAME[name] for name in given.cases or BY_NAME),
        lengths=tuple(given.lengths or (QUICK if given.quick else LENGTHS)),
        budget=0.1 if given.quick else 0.4,
        cap=given.cap,
        flex=given.flex,
        sdpa=not given.no_peers,
        quick=given.quick,
    )
    return options, given.out, given.name or ("quick" if given.quick else "blockwise")


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the tables and write the results; 1 where the gate refused."""
    torch.set_num_threads(1)
    options, folder, name = parse(arguments)
    rows: list[Row] = []
    print("; ".join(f"{key} {value}" for key, value in machine().items()))
    names = [*(["sdpa"] if options.sdpa else []), *(["flex"] if options.flex is not None else [])]
    print(f"B={BATCH} H={HEADS} D={HEAD_DIM} float32; ratio: the peer's CPU time over ours\n\n{head(names)}")
    try:
        with closing(MemoryProbe()) as probe:
            for row in measure(options, cache(probe.ask)):
                rows.append(row)
                print(line(row), flush=True)
    except Refused as refused:
        print(f"REFUSED {refused}")
        return 1
    print(f"\n{summary(rows)}\n")
    command = " ".join(["python benchmarks/run.py", *(sys.argv[1:] if arguments is None else arguments)])
    print("written:", *write(folder, name, rows, command))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
