"""`python benchmarks/run.py`: time and peak memory of blockwise attention per family and length, beside its peers.

Every figure stands behind the gate: a wrong result prints REFUSED, writes nothing and ends with exit status 1.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import NamedTuple

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
from timing import Pair, Sample, exponent, interleave, median, ratio, repeat, spread, timed

from qkv.info import info

QUICK = (512, 1_024)
PROBE = 1_024  # the length at which a peer's time at a longer one is foretold from
HEADLINE = ("window", 8_192)  # runs whatever it takes, in at least HEADLINE_PAIRS pairs
HEADLINE_PAIRS = 3
SLOWEST_FOR_MEMORY = 30.0  # seconds of a call beyond which it is not run a second time for its memory
FLEX_LONGEST = 8_192  # its block mask is evaluated densely


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


@dataclass(frozen=True, kw_only=True, slots=True)
class Peer:
    """A peer's figures for the same call, or the reason why there are none."""

    note: str = ""
    cpu: float = 0.0
    ratio: float = 0.0  # of its time to ours, the median over pairs
    spread: tuple[float, float] = (0.0, 0.0)
    runs: int = 0
    memory: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """Ours at one case, length and direction; seconds and bytes, medians over runs."""

    case: str
    pattern: str
    tokens: int
    direction: Direction
    pairs: int  # of one head
    cpu: float
    wall: float
    runs: int
    memory: int | None
    input_bytes: int
    share: float  # of the error bound that the result uses
    peers: dict[str, Peer] = field(default_factory=dict)


class Task(NamedTuple):
    """One call that all contenders answer, and what its result must be."""

    case: Case
    data: Data
    direction: Direction
    expected: list[Claim]

    @property
    def is_headline(self) -> bool:
        return (self.case.name, self.data.tokens) == HEADLINE

    def memory(self, name: str, options: Options, probe: MemoryProbe) -> int | None:
        """Peak bytes of one contender; None where they are not asked for or cannot be had."""
        if not options.weighs(name, self.data.tokens):
            return None
        return probe.ask(Question(name, self.case.name, self.data.tokens, self.direction))


def measure(options: Options, probe: MemoryProbe) -> Iterator[Row]:
    """One row a case, length and direction, as each is done."""
    for case in options.cases:
        ours(case, make_data(64)).run("forward+backward")  # what libraries set up once in a process
        for tokens in options.lengths:
            data = make_data(tokens)
            expected = claims(case, data)
            for direction in DIRECTIONS:
                yield measure_row(Task(case, data, direction, expected), options, probe)


def measure_row(task: Task, options: Options, probe: MemoryProbe) -> Row:
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
            peers[name] = _peer(pairs, task.memory(name, options, probe))
    samples = samples or repeat(lambda: mine.run(task.direction), first, budget=options.budget)
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
        memory=task.memory("ours", options, probe) if cpu < SLOWEST_FOR_MEMORY else None,
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
        seconds = sdpa_seconds(case.torch_form, task.direction) * (data.tokens / PROBE) ** 2
        late = seconds > options.cap and not task.is_headline
        yield "sdpa", f"not run, about {seconds:.0f} s" if late else sdpa(case, data)
    if options.flex is not None and task.direction == "forward":
        yield "flex", compiled_flex(case, data, options.flex)
    elif options.flex is not None:
        yield "flex", "forward only"


@cache
def sdpa_seconds(torch_form: str, direction: Direction) -> float:
    """Of one call at PROBE tokens; it computes every pair of every pattern but the causal one."""
    case = next(case for case in CASES if case.torch_form == torch_form)
    call = sdpa(case, make_data(PROBE))
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


def _peer(pairs: list[Pair], memory: int | None) -> Peer:
    seconds = median([pair.theirs for pair in pairs]).cpu
    return Peer(cpu=seconds, ratio=ratio(pairs), spread=spread(pairs), runs=len(pairs), memory=memory)


def head(peers: Sequence[str]) -> str:
    """The header of the table of rows."""
    columns = f"{'CPU ms':>9}{'wall ms':>9}{'runs':>5}{'peak MB':>9}{'/ q,k,v':>8}{'bound':>8}"
    mine = f"{'case':<14}{'L':>7} {'direction':<17}{columns}"
    others = "".join(f" |{name + ' ms':>9}{'ratio':>7}{'(of pairs)':>14}{'peak MB':>9}" for name in peers)
    return f"{mine}{others}\n{'-' * len(mine + others)}"


def line(row: Row) -> str:
    """One row; memory in MB (10^6 bytes), `bound` the share of the error bound that the result uses."""
    seconds = f"{row.cpu * 1e3:>9,.1f}{row.wall * 1e3:>9,.1f}{row.runs:>5}"
    peak = f"{'-':>9}{'-':>8}"
    if row.memory is not None:
        peak = f"{row.memory / 1e6:>9,.1f}{row.memory / row.input_bytes:>8.2f}"
    mine = f"{row.case:<14}{row.tokens:>7,} {row.direction:<17}{seconds}{peak}{row.share:>8.4f}"
    return mine + "".join(map(_beside, row.peers.values()))


def _beside(peer: Peer) -> str:
    if peer.note:
        return f" |  {peer.note:<37}"
    pairs, peak = "{:.2f}-{:.2f}".format(*peer.spread), "-" if peer.memory is None else f"{peer.memory / 1e6:,.1f}"
    return f" |{peer.cpu * 1e3:>9,.1f}{peer.ratio:>7.2f}{pairs:>14}{peak:>9}"


def exponents(rows: Sequence[Row]) -> dict[str, dict[str, float | None]]:
    """Of time and peak memory in L, fitted from FIT_FROM on, by case."""
    found: dict[str, dict[str, float | None]] = {}
    for name in dict.fromkeys(row.case for row in rows):
        found[name] = {}
        for direction in DIRECTIONS:
            long = [row for row in rows if (row.case, row.direction) == (name, direction) and row.tokens >= FIT_FROM]
            weighed = [(row.tokens, row.memory) for row in long if row.memory]
            found[name][f"time, {direction}"] = exponent([row.tokens for row in long], [row.cpu for row in long])
            found[name][f"memory, {direction}"] = exponent([n for n, _ in weighed], [size for _, size in weighed])
    return found


def summary(rows: Sequence[Row]) -> str:
    """The table of exponents, and the sentence on a window of 256 at 8,192."""
    found = exponents(rows)
    titles = [f"{kind}, {direction}" for kind in ("time", "memory") for direction in DIRECTIONS]
    lines = [f"exponent in L from {FIT_FROM:,} on", f"{'case':<14}" + "".join(f"{title:>25}" for title in titles)]
    for name, values in found.items():
        cells = ("-" if values[title] is None else f"{values[title]:.2f}" for title in titles)
        lines.append(f"{name:<14}" + "".join(f"{cell:>25}" for cell in cells))
    lines.append("")
    for row in rows:
        peer = row.peers.get("sdpa")
        if (row.case, row.tokens) == HEADLINE and peer is not None and not peer.note:
            times = f"{peer.ratio:.1f} times as long (pairs {peer.spread[0]:.1f} to {peer.spread[1]:.1f})"
            call = f"window of 256 keys at {row.tokens:,}, {row.direction}"
            lines.append(f"{call}: SDPA with a dense bool mask takes {times}")
    return "\n".join(lines)


def machine() -> dict[str, str | int]:
    """What the figures were measured on."""
    about = info()
    return {
        "processor": about.machine.processor,
        "capability": about.machine.torch_capability,
        "system": about.machine.system,
        "threads": about.machine.threads,
        **about.versions,
    }


def write(folder: Path, name: str, rows: Sequence[Row], command: str) -> list[Path]:
    """The rows as JSON, the tables as Markdown, and a plot where matplotlib is installed; the files written."""
    folder.mkdir(parents=True, exist_ok=True)
    sizes = {"B": BATCH, "H": HEADS, "D": HEAD_DIM, "dtype": "float32"}
    about = {"command": command, "sizes": sizes, "machine": machine()}
    record = {**about, "rows": [asdict(row) for row in rows], "exponents": exponents(rows)}
    (folder / f"{name}.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    plotted = plot(rows, folder / f"{name}.png")
    table = "\n".join([head(list(rows[0].peers)), *map(line, rows), "", summary(rows)])
    told = "; ".join(f"{key} {value}" for key, value in machine().items())
    text = f"# Benchmark: {name}\n\n`{command}`\n\n{told}\n\n```text\n{table}\n```\n"
    text += f"\n![time and peak memory per family]({name}.png)\n" if plotted else ""
    (folder / f"{name}.md").write_text(text, encoding="utf-8")
    return [folder / f"{name}{kind}" for kind in (".json", ".md", *([".png"] if plotted else []))]


def plot(rows: Sequence[Row], path: Path) -> bool:
    """Time and peak memory against L on logarithmic axes, a line a family; whether matplotlib was there to draw it."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ModuleNotFoundError:
        return False
    figure = Figure(figsize=(11, 8.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(2, 2, sharex=True)
    lengths = sorted({row.tokens for row in rows})
    values = {
        "CPU time, ms": lambda row: row.cpu * 1e3,
        "peak memory beyond the inputs, MB": lambda row: (row.memory or 0) / 1e6,
    }
    for down, (title, value) in enumerate(values.items()):
        for across, direction in enumerate(DIRECTIONS):
            axis = axes[down, across]
            for number, name in enumerate(dict.fromkeys(row.case for row in rows)):
                own = [row for row in rows if (row.case, row.direction) == (name, direction) and value(row)]
                axis.plot([row.tokens for row in own], [value(row) for row in own], f"C{number}o-", ms=4, label=name)
            axis.set(title=f"{direction}: {title}", xscale="log", yscale="log")
            axis.set_xticks(lengths, [f"{n:,}" for n in lengths], minor=False)
            axis.minorticks_off()
            axis.grid(alpha=0.3)
            if down:
                axis.set_xlabel("L, tokens")
    _guides(axes, lengths)
    handles, labels = axes[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right center", frameon=False)
    figure.suptitle(f"qkv blockwise, B={BATCH} H={HEADS} D={HEAD_DIM} float32, one thread")
    figure.savefig(path, dpi=110)
    return True


def _guides(axes: object, lengths: Sequence[int]) -> None:
    """Grey lines of slope 1 and 2 through the lower left of each panel, for the eye."""
    for axis in axes.flat:  # type: ignore[attr-defined]
        low, high = axis.get_ylim()
        for slope in (1, 2):
            values = [1.3 * low * (n / lengths[0]) ** slope for n in lengths]
            axis.plot(lengths, values, ":", color="0.6", zorder=0)
            axis.annotate(f"L{'²' if slope == 2 else ''}", (lengths[-1], values[-1]), color="0.5", clip_on=True)
        axis.set_ylim(low, high)


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
        budget=0.2 if given.quick else 1.0,
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
            for row in measure(options, probe):
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
