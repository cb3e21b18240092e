"""Two pictures as PNG files: attention maps with their tokens, and patterns side by side. Needs matplotlib."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor

from qkv.errors import UnsupportedError, message
from qkv.patterns.pattern import Pattern

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = "Blues"  # one scale for both pictures: white is nothing, dark is much
INK, FAINT, DARK = "#1f2933", "#c3ccd5", "#08519c"


def attention_maps(
    path: Path, weights: Sequence[Tensor], tokens: Sequence[str], titles: Sequence[str], *, title: str, marked: str
) -> None:
    """Draw heads side by side on one scale from 0 to 1: rows are queries, columns are keys, weights (L, L) each.

    The rows of the token `marked` stand out, for a text beside the picture to speak of.
    """
    figure = _figure(width=4.9 * len(weights) + 1.1, height=6.6)
    axes = figure.subplots(1, len(weights), sharey=True, squeeze=False)[0]
    for axis, head, name in zip(axes, weights, titles, strict=True):
        axis.imshow(head.numpy(), cmap=COLOURS, vmin=0, vmax=1)
        axis.set_title(name, fontsize=12, color=INK, pad=10)
        axis.set_xticks(range(len(tokens)), tokens, rotation=90)
        axis.set_yticks(range(len(tokens)), tokens)
        axis.set_xlabel("key: looked at", color=INK, labelpad=8)
        _write_large(axis, head)
        _quiet(axis, len(tokens))
    for label in axes[0].get_yticklabels():
        if label.get_text() == marked:
            label.set(color=DARK, fontweight="bold", fontsize=11)
    axes[0].set_ylabel("query: looks", color=INK, labelpad=8)
    bar = figure.colorbar(axes[0].images[0], ax=axes, shrink=0.72, pad=0.015, aspect=28)
    bar.set_label("attention weight (each row sums to 1)", color=INK)
    bar.outline.set_visible(False)
    _save(figure, path, title)


def pattern_grid(path: Path, patterns: Sequence[tuple[str, Pattern]], *, tokens: int, columns: int, title: str) -> None:
    """Draw each pattern for `tokens` queries and keys, with its text and the share of pairs that it keeps."""
    rows = -(-len(patterns) // columns)
    figure = _figure(width=3.3 * columns, height=3.75 * rows + 0.9)
    axes = figure.subplots(rows, columns, squeeze=False).ravel()
    for axis, (name, pattern) in zip(axes, patterns, strict=False):
        axis.imshow(pattern.to_dense(tokens, tokens).numpy(), cmap=COLOURS, vmin=0, vmax=1.35, interpolation="nearest")
        share = pattern.count(tokens, tokens) / tokens**2
        axis.set_title(f"{name}\n", fontsize=12, color=INK, fontweight="bold")
        axis.text(
            0.5,
            1.03,
            f"{pattern}: {share:.0%} of pairs",
            transform=axis.transAxes,
            ha="center",
            fontsize=8.5,
            color=INK,
        )
        axis.set_xticks([0, tokens - 1], ["0", str(tokens - 1)])
        axis.set_yticks([0, tokens - 1], ["0", str(tokens - 1)])
        axis.set_xlabel("key", color=INK, labelpad=-8)
        axis.set_ylabel("query", color=INK, labelpad=-12)
        _quiet(axis, 0)
    for axis in axes[len(patterns) :]:
        axis.set_visible(False)
    _save(figure, path, title)


def require_matplotlib() -> None:
    """Raise UnsupportedError with the command to run where matplotlib is not installed."""
    if importlib.util.find_spec("matplotlib") is None:
        raise UnsupportedError(
            message("drawing needs `matplotlib`", "it is not installed", "run `pip install matplotlib`")
        )


def _figure(*, width: float, height: float) -> Figure:
    """A blank page that belongs to no window system."""
    require_matplotlib()
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    layout = ConstrainedLayoutEngine(compress=True, h_pad=0.12)  # compress: for axes that keep their own shape
    figure = Figure(figsize=(width, height), layout=layout, facecolor="white")
    FigureCanvasAgg(figure)
    return figure


def _write_large(axis: Axes, head: Tensor) -> None:
    """The number itself in every cell that holds a quarter or more."""
    for row, column in (head >= 0.25).nonzero().tolist():
        weight = float(head[row, column])
        colour = "white" if weight > 0.55 else INK
        axis.text(
            column,
            row,
            f"{weight:.2f}"[1:] if weight < 0.995 else "1",
            ha="center",
            va="center",
            fontsize=7,
            color=colour,
        )


def _quiet(axis: Axes, cells: int) -> None:
    """Thin pale frame and cell lines, no tick marks."""
    axis.tick_params(length=0, colors=INK, labelsize=9)
    for side in axis.spines.values():
        side.set_color(FAINT)
    if cells:
        edges = [cell + 0.5 for cell in range(cells - 1)]
        axis.set_xticks(edges, minor=True)
        axis.set_yticks(edges, minor=True)
        axis.grid(which="minor", color="#eef1f4", linewidth=0.6)
        axis.tick_params(which="minor", length=0)


def _save(figure: Figure, path: Path, title: str) -> None:
    figure.suptitle(f"{title}\n", fontsize=15, color=INK, x=0.012, ha="left", fontweight="bold")
    page = BytesIO()
    figure.savefig(page, format="png", dpi=130, bbox_inches="tight", pad_inches=0.2)
    path.write_bytes(page.getvalue())
