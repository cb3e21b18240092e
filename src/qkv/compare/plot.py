"""A comparison as a picture: time and memory against the length, both axes logarithmic. Needs matplotlib."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qkv.errors import UnsupportedError, message

if TYPE_CHECKING:
    from qkv.compare.record import Comparison, Point

INK, FAINT = "#1f2933", "#dfe5ea"
# One map of colours a group, so that the four orders of cost stand out.
COLOURS = {"dense": "Greys", "sparse": "Oranges", "local": "Purples", "linear": "viridis"}
MARKS = "os^Dv<>PX*h"


def require_matplotlib() -> None:
    """Raise UnsupportedError with the command to run where matplotlib is not installed."""
    if importlib.util.find_spec("matplotlib") is None:
        holds, remedy = "a plot needs `matplotlib`", "run `pip install 'qkv[plot]'`, or leave the plot out"
        raise UnsupportedError(message(holds, "it is not installed", remedy))


def draw(found: Comparison, path: Path) -> None:
    """Write a PNG file: time on the left, memory on the right where it was measured."""
    require_matplotlib()
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    setting = found.setting
    has_memory = any(point.memory is not None for row in found.rows for point in row.points)
    figure = Figure(figsize=(13 if has_memory else 8, 6.2), layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    left, *more = figure.subplots(1, 1 + has_memory, squeeze=False)[0]
    _curves(left, found, lambda point: point.seconds * 1e3)
    _quiet(left, found, "ms")
    for right in more:
        _curves(right, found, lambda point: None if point.memory is None else max(point.memory, 1) / 1e6)
        _quiet(
            right, found, "MB of cache or state" if setting.direction == "decode" else "MB beyond inputs and results"
        )
    handles, names = left.get_legend_handles_labels()
    figure.legend(handles, names, loc="outside right upper", fontsize=9, frameon=False)
    sizes = f"B 1, H {setting.heads}, D {setting.head_dim}, V {setting.value_dim}, {setting.dtype}"
    threads = f"{setting.threads} thread{'' if setting.threads == 1 else 's'}"
    figure.suptitle(f"{setting.direction}: {sizes}, {threads}, {found.machine['processor']}", fontsize=12, color=INK)
    figure.savefig(path, dpi=110)


def _curves(axis: Any, found: Comparison, value: Callable[[Point], float | None]) -> None:
    from matplotlib import colormaps

    for group, name in COLOURS.items():
        rows = [row for row in found.rows if row.group == group and row.points]
        for place, row in enumerate(rows):
            colour = colormaps[name](0.95 - 0.7 * place / max(len(rows), 1))
            points = [(point.tokens, value(point)) for point in row.points]
            known = [(tokens, amount) for tokens, amount in points if amount is not None]
            grown = "" if row.exponent is None else f"  L^{row.exponent:.2f}"
            label, mark = f"{row.name}{grown}", MARKS[place % len(MARKS)]
            axis.plot(
                *zip(*known, strict=True), color=colour, marker=mark, ms=5, lw=1.6, label=label
            ) if known else None


def _quiet(axis: Any, found: Comparison, unit: str) -> None:
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    axis.set_xticks(found.setting.lengths, [f"{length:,}" for length in found.setting.lengths])
    axis.set_xlabel("L, tokens", color=INK)
    axis.set_title(unit, fontsize=11, color=INK, loc="left")
    axis.minorticks_off()
    axis.grid(color=FAINT)
    for side in ("top", "right"):
        axis.spines[side].set_visible(False)
