"""Matrices of an explanation as blocks of text: which rows and keys are shown, where, with how many decimals."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from qkv.explain.figures import INFINITY, MINUS, SIGMA, columns, decimals, label, number, pad, short
from qkv.explain.layout import INDENT, Line, Span, Style
from qkv.explain.steps import Mistake, Setting, Step

BUDGET = 8  # rows and columns that are printed in full
PRINTED = ("scores", "scale", "softcap", "bias", "mask", "softmax", "dropout")


class Form(NamedTuple):
    """Spaces between cells, and decimals at most."""

    gap: int
    places: int


FORMS = (Form(2, 3), Form(1, 3), Form(1, 2))  # tried in this order until a row fits


@dataclass(frozen=True, kw_only=True)
class Grid:
    """The one place and width of every (L, S) matrix, so that a cell keeps its place from step to step."""

    rows: tuple[int, ...]
    keys: tuple[int, ...]
    whole: bool  # whether all rows and keys are shown
    row_names: tuple[str, ...]  # of all rows
    key_names: tuple[str, ...]  # of all keys
    label: int
    cell: int
    form: Form
    at: int  # the column where every matrix begins


def make_grid(setting: Setting, steps: Mapping[str, Step], wrong: Mistake | None, style: Style) -> Grid:
    """Choose what is shown: all of a small case, else the chosen row and the keys with its largest weights."""
    row_names = tuple(style.text(label(token)) for token in setting.query_tokens)
    key_names = tuple(style.text(label(token)) for token in setting.key_tokens)
    L, S = len(row_names), len(key_names)
    small = L <= BUDGET and S <= BUDGET
    rows = tuple(range(L)) if small else (setting.row,)
    left = max([*map(columns, row_names), 1])
    room = style.width - INDENT - left
    order = setting.pick(steps["softmax"].value)[setting.row].argsort(descending=True, stable=True).tolist()
    printed = _printed(setting, steps, wrong, rows)
    for count in range(min(S, BUDGET), -1, -1):
        keys = tuple(sorted(order[:count]))
        for form in FORMS:
            cell = _cell(setting, steps, printed, keys, form, style)
            taken = count * (form.gap + cell)
            if taken <= room or count == 0:
                whole = small and count == S
                return Grid(
                    rows=rows if whole else (setting.row,),
                    keys=keys,
                    whole=whole,
                    row_names=row_names,
                    key_names=key_names,
                    label=left,
                    cell=cell,
                    form=form,
                    at=style.width - left - taken,
                )
    raise AssertionError("the last count always fits")


def _printed(setting: Setting, steps: Mapping[str, Step], wrong: Mistake | None, rows: Sequence[int]) -> list[Tensor]:
    """Every matrix that is printed at the grid's place, (rows, S) each."""
    shown = [setting.pick(steps[key].value)[list(rows)] for key in PRINTED if key in steps]
    return shown if wrong is None else [*shown, setting.pick(wrong.value)[[wrong.row]]]


def _cell(
    setting: Setting,
    steps: Mapping[str, Step],
    printed: Sequence[Tensor],
    keys: Sequence[int],
    form: Form,
    style: Style,
) -> int:
    """The width that the widest number or key name needs; the minus signs of the one row S - max may use the gap."""

    def widest(matrices: Sequence[Tensor]) -> int:
        rows = (row for matrix in matrices for row in figures(matrix[:, list(keys)], form.places, style))
        return max((columns(text) for row in rows for text in row), default=1)

    names = [columns(style.text(label(setting.key_tokens[j]))) for j in keys]
    parts = steps["softmax"].parts
    by_hand = [setting.pick(parts[name])[[setting.row]] for name in ("shifted", "exp")]
    return max([widest(printed), widest(by_hand) + 1 - form.gap, *names])


def figures(matrix: Tensor, places: int, style: Style) -> list[list[str]]:
    """The numbers of a matrix as text, all with the same decimals."""
    rows = matrix.tolist()
    common = decimals((x for row in rows for x in row), places)
    return [[style.text(number(x, common)) for x in row] for row in rows]


def heading(grid: Grid, letter: str) -> Line:
    """The letter of a matrix above its row names, the keys above its columns."""
    names = (pad(grid.key_names[j], grid.form.gap + grid.cell, right=True) for j in grid.keys)
    return (Span(pad(letter, grid.label), "s"), Span("".join(names), "k"))


def matrix(
    grid: Grid, tensor: Tensor, style: Style, *, rows: Sequence[int] | None = None, dots: Tensor | None = None
) -> list[Line]:
    """The shown cells of an (L, S) tensor, row names at the left; a dot where `dots` is True."""
    rows = grid.rows if rows is None else rows
    keys = list(grid.keys)
    lines: list[Line] = []
    for i, texts in zip(rows, figures(tensor[list(rows)][:, keys], grid.form.places, style), strict=True):
        hide = [False] * len(keys) if dots is None else dots[i][keys].tolist()
        shown = [style.text("·") if dot else text for dot, text in zip(hide, texts, strict=True)]
        cells = "".join(pad(text, grid.form.gap + grid.cell, right=True) for text in shown)
        lines.append((Span(pad(grid.row_names[i], grid.label), "q"), Span(cells, "s")))
    return lines


def picture(grid: Grid, marks: Sequence[Sequence[str]], style: Style) -> list[Line]:
    """One sign a cell, for masks: the shown rows with their names."""
    lines: list[Line] = []
    for i in grid.rows:
        signs = "".join(f" {style.text(marks[i][j])}" for j in grid.keys)
        lines.append((Span(pad(grid.row_names[i], grid.label), "q"), Span(signs, "s")))
    return lines


def features(
    letter: str, tensor: Tensor, names: Sequence[str], shown: Sequence[int], style: Style, *, role: str, name_role: str
) -> list[Line]:
    """The shown rows of Q, K, V or O with all their features, or the first and last of many."""
    texts = figures(tensor[list(shown)], 3, style)
    cell = max((columns(text) for row in texts for text in row), default=1)
    room = style.width - INDENT - len(letter) - 3 - max((columns(names[i]) for i in shown), default=0)
    most = max(3, min(BUDGET, room // (cell + 1)))
    if tensor.shape[1] > most:
        texts = [[*row[: most - 2], style.text("…"), row[-1]] for row in texts]
        cell = max(cell, len(style.text("…")))
    left = max((columns(names[i]) for i in shown), default=0)
    lines: list[Line] = []
    for position, (i, row) in enumerate(zip(shown, texts, strict=True)):
        cells = "".join(f" {pad(text, cell, right=True)}" for text in row)
        head = letter if position == 0 else " " * len(letter)
        lines.append((Span(f"{head}  ", role), Span(pad(names[i], left), name_role), Span(f" {cells}", role)))
    return lines


def summary(letter: str, tensor: Tensor, style: Style) -> str:
    """A tensor too large to print, in one line: shape, range, mean, deviation, and whatever is not finite."""
    finite = tensor[tensor.isfinite()]
    parts = [f"{letter} ({', '.join(map(str, tensor.shape))})"]
    if finite.numel():
        moments = (finite.min(), finite.max(), finite.mean(), finite.std(correction=0))
        low, high, mean, deviation = (short(moment.item()) for moment in moments)
        parts.append(f"x ∈ [{low}, {high}]  μ {mean}  {SIGMA} {deviation}  {_histogram(finite, style)}")
    odd = {MINUS + INFINITY: tensor == -torch.inf, INFINITY: tensor == torch.inf, "NaN!": tensor.isnan()}
    parts += [f"{name} {int(where.sum()):,}" for name, where in odd.items() if bool(where.any())]
    if finite.numel() and not bool(finite.any()):
        parts.append("all zeros")
    return "  ".join(parts)


def _histogram(finite: Tensor, style: Style) -> str:
    """Eight bars from the smallest to the largest number."""
    bars = "_.:-=+*#" if style.plain else "▁▂▃▄▅▆▇█"
    counts = torch.histc(finite, bins=8).tolist()
    return "".join(bars[round(7 * count / max(*counts, 1))] for count in counts)
