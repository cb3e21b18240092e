"""What suite `families` gives to its reader: rows of figures, the tables, the fitted exponents and the plot."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from registry import BATCH, DIRECTIONS, HEAD_DIM, HEADS, Direction
from report import canvas, logarithmic
from timing import exponent

HEADLINE = ("window", 8_192)  # the case and length of the figure that the summary ends with
FIT_FROM = 4_096  # the exponent in L is fitted from here on
COLOURS = [f"C{number}" for number in (0, 1, 2, 3, 4, 5, 6, 8, 9)]  # C7 is the grey of the guides


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
    return (mine + "".join(map(_beside, row.peers.values()))).rstrip()


def _beside(peer: Peer) -> str:
    if peer.note:
        return f" |  {peer.note:<37}"
    peak = "-" if peer.memory is None else f"{peer.memory / 1e6:,.1f}"
    pairs = "one pair" if peer.runs == 1 else "{:.2f}-{:.2f}".format(*peer.spread)
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


def plot(rows: Sequence[Row], path: Path, backend: str) -> bool:
    """Time and peak memory against L on logarithmic axes, a line a family; whether matplotlib was there to draw it."""
    figure = canvas(11, 8)
    if figure is None:
        return False
    axes = figure.subplots(2, 2, sharex=True)
    for across, direction in enumerate(DIRECTIONS):
        own = [row for row in rows if row.direction == direction]
        masked = [row for row in own if row.case == HEADLINE[0]]
        peers = [(row.tokens, row.peers["sdpa"]) for row in masked if "sdpa" in row.peers]
        time, memory = axes[:, across]
        _panel(time, f"{direction}: CPU time, ms", own, lambda row: row.cpu * 1e3)
        _panel(memory, f"{direction}: peak memory, MB", own, lambda row: (row.memory or 0) / 1e6)
        for axis, points in (
            (time, [(tokens, peer.cpu * 1e3) for tokens, peer in peers if peer.cpu]),
            (memory, [(tokens, peer.memory / 1e6) for tokens, peer in peers if peer.memory]),
        ):
            axis.plot(*zip(*points, strict=True) if points else ((), ()), "kx--", ms=5, label="SDPA, bool mask")
            _guides(axis, sorted({row.tokens for row in rows}))
        memory.set_xlabel("L, tokens")
    figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside right upper", frameon=False)
    figure.suptitle(f"qkv, backend {backend}: B={BATCH} H={HEADS} D={HEAD_DIM}, float32, one thread")
    figure.savefig(path, dpi=110)
    return True


def _panel(axis: Any, title: str, rows: Sequence[Row], value: Callable[[Row], float]) -> None:
    """A line a case, where it has a value."""
    lengths = sorted({row.tokens for row in rows})
    for number, name in enumerate(dict.fromkeys(row.case for row in rows)):
        points = [(row.tokens, value(row)) for row in rows if row.case == name and value(row)]
        axis.plot(
            *zip(*points, strict=True) if points else ((), ()), color=COLOURS[number], marker="o", ms=4, label=name
        )
    logarithmic(axis, lengths, title)


def _guides(axis: Any, lengths: Sequence[int]) -> None:
    """Grey lines that grow as L and as L², for the eye."""
    low, high = axis.get_ylim()
    for slope, style, label in ((1, ":", "slope 1"), (2, "-.", "slope 2")):
        values = [1.2 * low * (n / lengths[0]) ** slope for n in lengths]
        axis.plot(lengths, values, style, color="0.6", zorder=0, label=label)
    axis.set_ylim(low, high)
