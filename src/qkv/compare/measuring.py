"""The comparison from end to end: check, then time in turns, then memory, all within a budget of seconds."""

from __future__ import annotations

import math
import platform
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch

from qkv.backends import extension
from qkv.compare.calls import Call, prepare
from qkv.compare.check import check, distance
from qkv.compare.families import BASELINE, KINDS, ORDER_OF_A_STEP, Family
from qkv.compare.growth import crossing, growth
from qkv.compare.record import Comparison, Point, Row
from qkv.compare.setting import BUDGET, LENGTHS, Setting, read_setting
from qkv.compare.timing import Clock, Sample, rounds, timed
from qkv.compare.weighing import weighed

LEAST, MOST = 2, 9  # rounds of one length
SHARE = 0.12  # of the budget that one call may take
SHORT = 2e-3  # seconds of a sample, of as many calls as fit
MANY = 50  # calls in one sample at most


def run(
    *,
    lengths: Iterable[int] = LENGTHS,
    heads: int = 8,
    head_dim: int = 64,
    value_dim: int | None = None,
    dtype: str | torch.dtype = "float32",
    direction: str = "forward",
    families: Sequence[str] | None = None,
    threads: int = 1,
    budget: float = BUDGET,
    seed: int = 0,
    tell: Callable[[str], object] = lambda _: None,
) -> Comparison:
    """Measure what the families of attention cost on this machine: time and memory, at each length.

    lengths: L, tokens of queries and keys; B is 1. direction: "forward", "forward+backward" or "decode", one token that
    follows L - 1 others. families: names and groups ("dense", "sparse", "local", "linear"), None for all. threads: with
    one, time is CPU time of the thread, else that of the clock. budget: seconds that the runs may take, about; what
    would not fit is left out and says so. tell: hears what is going on.

    A family that differs from its definition in float64 beyond rounding is refused: its row has no figures. Raises
    ValueOutOfRange, DTypeError or UnknownName for an argument that cannot be, before any work.

    >>> found = run(lengths=[64, 128], heads=1, head_dim=8, families=["causal", "linear-elu"], budget=1)
    >>> found.passed, [row.name for row in found.rows]
    (True, ['causal', 'linear-elu'])
    """
    setting = read_setting(
        lengths=lengths,
        heads=heads,
        head_dim=head_dim,
        value_dim=value_dim,
        dtype=dtype,
        direction=direction,
        families=families,
        threads=threads,
        budget=budget,
        seed=seed,
    )
    began = time.perf_counter()
    with _on_threads(setting.threads):
        rows = [_checked(family, setting, tell) for family in setting.chosen]
        rows = _timed(rows, setting, tell)
        rows = weighed(rows, setting, tell)
    return Comparison(
        setting=setting,
        machine=_machine(),
        clock=_clock(setting),
        differs_at=setting.lengths[0],
        seconds=time.perf_counter() - began,
        rows=tuple(_judged(rows)),
    )


def _checked(family: Family, setting: Setting, tell: Callable[[str], object]) -> Row:
    """The row of a family without its figures."""
    tell(f"checking {family.name}")
    verdict = check(family, setting)
    row = Row(
        name=family.name,
        group=family.group,
        order=ORDER_OF_A_STEP[family.order] if setting.direction == "decode" else family.order,
        kind=KINDS[family.kind],
        meaning=family.meaning,
        checked=verdict.share,
        refused=None if verdict.passed else str(verdict),
    )
    return row if row.refused else replace(row, difference=distance(family, setting, setting.lengths[0]))


def _timed(rows: list[Row], setting: Setting, tell: Callable[[str], object]) -> list[Row]:
    """Lengths from short to long, each with a share of the time that is left, as long as the length is of all."""
    families = {family.name: family for family in setting.chosen}
    end = time.perf_counter() + setting.budget
    for at, tokens in enumerate(setting.lengths):
        now = time.perf_counter()
        until = now + max(end - now, 0) * tokens / sum(setting.lengths[at:])
        rows = [_foretold(row, families[row.name], setting, tokens) for row in rows]
        names = [row.name for row in rows if not row.refused and not row.left_out]
        tell(f"{tokens:,} tokens: {', '.join(names) or 'nothing'}")
        points = _points({name: families[name] for name in names}, setting, tokens, until)
        rows = [replace(row, points=(*row.points, points[row.name])) if row.name in points else row for row in rows]
    return rows


def _foretold(row: Row, family: Family, setting: Setting, tokens: int) -> Row:
    """The row, left out from this length on where its call would take too much of the budget."""
    if not row.points or row.left_out:
        return row
    last, slope = row.points[-1], family.growth - (setting.direction == "decode")
    if len(row.points) > 1:
        before = row.points[-2]
        slope = max(slope, math.log(last.seconds / before.seconds) / math.log(last.tokens / before.tokens))
    seconds = last.seconds * (tokens / last.tokens) ** slope
    if seconds <= SHARE * setting.budget:
        return row
    return replace(row, left_out=f"from {tokens:,} on: a call would take about {seconds:.0f} s, see the budget")


def _points(families: dict[str, Family], setting: Setting, tokens: int, until: float) -> dict[str, Point]:
    """Every family at one length, in turns. The first run sets up what is set up once, and tells how many fit."""
    calls = {name: prepare(family, setting, tokens) for name, family in families.items()}
    firsts = {name: _first(call) for name, call in calls.items()}
    found = rounds(
        {name: call.run for name, call in calls.items()},
        calls={name: max(1, min(MANY, int(SHORT / max(first.wall, 1e-6)))) for name, first in firsts.items()},
        least=LEAST,
        most=MOST,
        until=until,
    )
    return {name: _point(tokens, found[name], call, _clock(setting)) for name, call in calls.items()}


def _first(call: Call) -> Sample:
    call.run()
    return timed(call.run)[0]


def _point(tokens: int, samples: Sequence[Sample], call: Call, clock: Clock) -> Point:
    seconds = [getattr(sample, clock) for sample in samples]
    return Point(
        tokens=tokens,
        seconds=statistics.median(seconds),
        spread=(min(seconds), max(seconds)),
        runs=len(seconds),
        memory=call.held,
    )


def _judged(rows: Iterable[Row]) -> Iterator[Row]:
    """The rows with their exponent and their crossing with dense causal attention."""
    rows = [*rows]
    baseline = next((row for row in rows if row.name == BASELINE.name), None)
    for row in rows:
        compares = baseline is not None and baseline.points and row.points and row.group != "dense"
        yield replace(
            row,
            exponent=growth(row.points),
            crossing=crossing(row.points, baseline.points) if baseline is not None and compares else None,
        )


def _machine() -> dict[str, str]:
    """What the figures depend on besides the sizes."""
    return {
        "processor": f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}",
        "torch": torch.__version__,
        "native core": extension.native.isa() if extension.MISSING is None else f"absent: {extension.MISSING}",
    }


def _clock(setting: Setting) -> Clock:
    return "cpu" if setting.threads == 1 else "wall"


@contextmanager
def _on_threads(threads: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)
