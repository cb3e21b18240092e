"""How a comparison reads: plain ASCII text of at most 100 columns as long as five lengths were measured."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from qkv.compare.record import Comparison, Crossing, Row

NAMES, ORDER, TIME = 17, 9, 9  # widths of columns
TIMES = {"forward": "a call", "forward+backward": "a call and its gradients", "decode": "one more token"}


def table(found: Comparison) -> str:
    """Costs, then what each family is, then what was left out."""
    parts = [_about(found), _costs(found), _meanings(found), *_faults(found)]
    return "\n\n".join(part for part in parts if part)


def _about(found: Comparison) -> str:
    setting = found.setting
    threads = "1 thread, its CPU time" if setting.threads == 1 else f"{setting.threads} threads, time by the clock"
    return (
        f"{setting.direction}: B 1, H {setting.heads}, D {setting.head_dim}, V {setting.value_dim}, {setting.dtype}; "
        f"{threads}\n"
        f"{found.machine['processor']}, native core {found.machine['native core']}, torch {found.machine['torch']}\n"
        f"Every family was held against its definition in float64 first; seed {setting.seed}, {found.seconds:.0f} s."
    )


def _costs(found: Comparison) -> str:
    lengths = found.setting.lengths
    at, memory = f"at {lengths[-1]:,}", "state MB" if found.setting.direction == "decode" else "extra MB"
    top = f"{f'ms for {TIMES[found.setting.direction]}, by L':<{NAMES + ORDER}}"
    top += "".join(f"{length:>{TIME},}" for length in lengths) + f"{'time ~':>9}{memory:>10}{'cheaper than causal':>26}"
    under = " " * (NAMES + ORDER + TIME * len(lengths)) + f"{'L^':>9}{at:>10}{'from L =':>26}"
    lines = [top, under.rstrip(), "-" * len(top)]
    for group in dict.fromkeys(row.group for row in found.rows):
        lines += [_cost(row, found) for row in found.rows if row.group == group]
    return "\n".join(lines)


def _cost(row: Row, found: Comparison) -> str:
    start = f"{row.name:<{NAMES}}{row.order:<{ORDER}}"
    if row.refused:
        return f"{start}  REFUSED: {row.refused}"
    points = [row.at(length) for length in found.setting.lengths]
    times = "".join(f"{'-' if point is None else _short(point.seconds * 1e3):>{TIME}}" for point in points)
    last = points[-1]
    memory = "-" if last is None or last.memory is None else _short(last.memory / 1e6)
    grown = "" if row.exponent is None else f"{row.exponent:.2f}"
    return f"{start}{times}{grown:>9}{memory:>10}{_crossed(row.crossing):>26}".rstrip()


def _crossed(crossing: Crossing | None) -> str:
    if crossing is None:
        return ""
    if crossing.where == "within":
        return f"{crossing.tokens:,}"
    told = {"below": "all measured", "never": "never, by the fit", "unknown": "not known"}
    return told.get(crossing.where) or f"beyond, about {_rounded(crossing.tokens or 0):,}"


def _rounded(tokens: int) -> int:
    """Two digits, which is more than a line drawn on deserves."""
    step = 10 ** max(len(str(tokens)) - 2, 0)
    return round(tokens / step) * step


def _meanings(found: Comparison) -> str:
    line = f"{'family':<{NAMES}}{'what it is':<29}{'off dense':>10}  rule"
    lines = [
        f"off dense: distance of the output from dense softmax attention's at L = {found.differs_at:,}, as a share"
    ]
    if any(row.kind == "a rule of its own" and row.difference is not None for row in found.rows):
        lines.append("(~ up to one factor, which a norm behind the layer would take away)")
    lines += ["", line, "-" * len(line)]
    lines += [f"{row.name:<{NAMES}}{row.kind:<29}{_difference(row):>10}  {row.meaning}" for row in found.rows]
    return "\n".join(lines)


def _difference(row: Row) -> str:
    if row.difference is None:
        return "-"
    if row.kind == "softmax attention itself":
        return "0"
    return f"{'~' if row.kind == 'a rule of its own' else ''}{row.difference:.0%}"


def _faults(found: Comparison) -> Iterator[str]:
    left = [f"{row.name} was left out {row.left_out}" for row in found.rows if row.left_out]
    if left:
        yield "\n".join(left)


def _short(amount: float) -> str:
    """Three digits, or all before the point."""
    return f"{amount:,.0f}" if amount >= 100 else f"{amount:.1f}" if amount >= 10 else f"{amount:.3g}"
