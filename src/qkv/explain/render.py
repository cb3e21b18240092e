"""An explanation as text for a terminal: a header, one block a step, the checks. All numbers come from the steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from qkv.explain.figures import listed, short
from qkv.explain.grid import Grid, features, heading, make_grid, matrix, picture, summary
from qkv.explain.layout import INDENT, Line, Span, Style, beside, block_width, ends, indent, sentences, span
from qkv.explain.steps import Check, Mistake, Setting, Step
from qkv.explain.words import quoted


@dataclass(frozen=True, kw_only=True)
class Page:
    """What every block of the text needs to know."""

    setting: Setting
    steps: Mapping[str, Step]
    grid: Grid
    style: Style


def render(
    setting: Setting, steps: Mapping[str, Step], chosen: Sequence[Step], wrong: Mistake | None, style: Style
) -> str:
    """The text of the chosen steps; `steps` are all of them, so that numbers and places do not depend on the choice."""
    page = Page(setting=setting, steps=steps, grid=make_grid(setting, steps, wrong, style), style=style)
    blocks = [_header(page), *(_step(page, step) for step in chosen)]
    if wrong is not None:
        blocks.append(_mistake(page, wrong))
    blocks.append(_checks(page))
    return "\n\n".join("\n".join(style.paint(line) for line in block) for block in blocks)


def _plural(count: int, one: str, many: str) -> str:
    return f"{count} {one if count == 1 else many}"


def _header(page: Page) -> list[Line]:
    setting, sizes, style = page.setting, page.setting.sizes, page.style
    heads = _plural(sizes["H"], "head", "heads")
    parts = [f"B={_plural(sizes['B'], 'batch row', 'batch rows')}", f"H={heads}"]
    if sizes["G"] != sizes["H"]:
        parts.append(f"G={_plural(sizes['G'], 'key head', 'key heads')}")
    parts += [f"L={_plural(sizes['L'], 'query', 'queries')}", f"S={_plural(sizes['S'], 'key', 'keys')}"]
    parts += [f"D={_plural(sizes['D'], 'feature', 'features')}", f"V={_plural(sizes['V'], 'value', 'values')}"]
    pattern = "no pattern" if setting.pattern is None else str(setting.pattern)
    *above, last = sentences([setting.title], style, "strong", 1)
    lines = [*above, *ends(last, style.text(pattern), style)]
    lines += sentences(["  ".join(parts)], style, "faint", 1)
    where = [f"batch row {setting.batch}"] if sizes["B"] > 1 else []
    where += [f"head {setting.head}"] if sizes["H"] > 1 else []
    if where:
        lines += sentences([f"shown: {' of '.join(reversed(where))}"], style, "faint", 1)
    if not page.grid.whole:
        count, name = len(page.grid.keys), quoted(setting.query_tokens[setting.row])
        keys = "all keys" if count == sizes["S"] else f"the {count} of {sizes['S']} keys that weigh most there"
        lines += sentences([f"too large to print in full: row {name}, {keys}"], style, "faint", 1)
    return lines


def _step(page: Page, step: Step) -> list[Line]:
    index = list(page.steps).index(step.key) + 1
    style = page.style
    title: Line = (Span(f" {index} {step.title:<10}", "strong"), Span(f" {style.text(step.formula)}"))
    lines = ends(title, step.einsum, style)
    if step.einsum:
        shapes = [f"{name} ({','.join(map(str, shape))})" for name, shape in step.shapes]
        lines += ends(span(""), style.text(f"{' · '.join(shapes[:-1])} -> {shapes[-1]}"), style)
    lines += _BODIES[step.key](page, step)
    lines += sentences(step.words, style)
    return lines + sentences([f"mind: {text}" for text in step.pitfalls], style, "faint")


def _square(page: Page, step: Step, letter: str) -> list[Line]:
    """An (L, S) matrix with its heading; the summary of a large one is put above by `_placed`."""
    setting, grid = page.setting, page.grid
    dots = ~setting.visible if letter == "P" else None
    return [heading(grid, letter), *matrix(grid, setting.pick(step.value), page.style, dots=dots)]


def _placed(page: Page, step: Step, letter: str, left: Sequence[Line]) -> list[Line]:
    """A block at the left and the step's matrix at its fixed place; of a large matrix one line says the rest."""
    above = [] if page.grid.whole else _summary(page, letter, page.setting.pick(step.value), "s")
    return [*above, *beside(left, _square(page, step, letter), page.grid.at)]


def _summary(page: Page, letter: str, tensor: Tensor, role: str) -> list[Line]:
    return sentences([summary(letter, tensor, page.style)], page.style, role)


def _scores(page: Page, step: Step) -> list[Line]:
    setting, grid, style = page.setting, page.grid, page.style
    q = features("Q", setting.queries, grid.row_names, grid.rows, style, role="q", name_role="q")
    k = features("K", setting.keys, grid.key_names, grid.keys, style, role="k", name_role="k")
    above: list[Line] = []
    if not grid.whole:
        above = [*_summary(page, "Q", setting.queries, "q"), *_summary(page, "K", setting.keys, "k")]
    start = INDENT + block_width(q) + 3
    if start + block_width(k) + 2 > max(grid.at, start + 2) and start + block_width(k) > style.width:
        return [*above, *indent(q), *indent(k), *_placed(page, step, "S", [])]
    return [*above, *_placed(page, step, "S", beside(indent(q), k, start))]


def _plain_scores(page: Page, step: Step) -> list[Line]:
    return _placed(page, step, "S", [])


def _mask(page: Page, step: Step) -> list[Line]:
    setting = page.setting
    if bool(setting.visible.all()):
        return []
    marks = [["■" if may else "·" for may in row] for row in setting.visible.tolist()]
    key = page.style.text("■ may look   · may not")
    left = [span(key, "faint"), *picture(page.grid, marks, page.style)]
    return _placed(page, step, "S", indent(left))


def _softmax(page: Page, step: Step) -> list[Line]:
    style, visible = page.style, page.setting.visible[page.setting.row]
    weights = _placed(page, step, "P", indent([span(style.text("P = exp / sum, rows sum to 1"))]))
    if not bool(visible.any()):
        return weights
    entropy = short(page.setting.pick(step.parts["entropy"])[page.setting.row].item())
    most = short(visible.sum().double().log().item())
    name = quoted(page.setting.query_tokens[page.setting.row])
    text = f"entropy of row {name}: {entropy} of at most {most} nats"
    return [*_by_hand(page, step), *weights, *sentences([text], style, "faint")]


def _by_hand(page: Page, step: Step) -> list[Line]:
    """The chosen row on its way to weights: less its maximum, then the exponentials and their sum."""
    setting, grid, style = page.setting, page.grid, page.style
    lines: list[Line] = []
    for name, text, total in (("shifted", "S − max, max", "max"), ("exp", "exp, sum", "sum")):
        number = short(setting.pick(step.parts[total])[setting.row].item())
        cells = matrix(grid, setting.pick(step.parts[name]), style, rows=[setting.row], dots=~setting.visible)
        lines += beside(indent([span(style.text(f"{text} = {number}"))]), cells, grid.at)
    return lines


def _dropout(page: Page, step: Step) -> list[Line]:
    setting = page.setting
    if setting.dropout_p == 0:
        return []
    keep, visible = setting.pick(step.parts["keep"]).tolist(), setting.visible.tolist()
    marks = [
        ["·" if not may else "■" if stays else "×" for stays, may in zip(kept, seen, strict=True)]
        for kept, seen in zip(keep, visible, strict=True)
    ]
    key = page.style.text("■ kept   × dropped")
    return _placed(page, step, "P", indent([span(key, "faint"), *picture(page.grid, marks, page.style)]))


def _output(page: Page, step: Step) -> list[Line]:
    setting, grid, style = page.setting, page.grid, page.style
    v = features("V", setting.values, grid.key_names, grid.keys, style, role="v", name_role="k")
    o = features("O", setting.pick(step.value), grid.row_names, grid.rows, style, role="v", name_role="q")
    above = [] if grid.whole else _summary(page, "V", setting.values, "v")
    start = max(min(grid.at, style.width - block_width(o)), INDENT)
    return [*above, *beside(indent(v), o, start)]


def _mistake(page: Page, wrong: Mistake) -> list[Line]:
    setting, grid, style = page.setting, page.grid, page.style
    title = (Span(style.text(f" ✗ {wrong.name}"), "strong"),)
    lines = ends(title, style.text(wrong.title), style)
    rows = {"right": page.steps["softmax"].value, wrong.name: wrong.value}
    at = beside([], [heading(grid, "P")], grid.at)
    for name, tensor in rows.items():
        cells = matrix(grid, setting.pick(tensor), style, rows=[wrong.row])
        at += beside(indent([span(name)]), cells, grid.at)
    return [*lines, *at, *sentences(wrong.words, style)]


def _checks(page: Page) -> list[Line]:
    """One line for the steps on the way, one for each comparison of the output."""
    on_the_way = {key: check for key, step in page.steps.items() if key != "output" for check in step.checks}
    worst = max((check.error for check in on_the_way.values()), default=0.0)
    joined = Check(
        against=f"torch in {listed(list(on_the_way))}",
        error=worst if all(check.passed for check in on_the_way.values()) else float("inf"),
        bound=worst,
    )
    lines: list[Line] = []
    for check in (joined, *page.steps["output"].checks):
        lines += sentences([_verdict(check)], page.style, by=1)
    return lines


def _verdict(check: Check) -> str:
    if check.reason:
        return f"· not compared with {check.against}: {check.reason}"
    if not check.passed:
        return f"✗ differs from {check.against} (max |Δ| {check.error:.1e})"
    return f"✓ equals {check.against} (max |Δ| {short(check.error)})"


_BODIES: Mapping[str, Callable[[Page, Step], list[Line]]] = {
    "scores": _scores,
    "scale": _plain_scores,
    "softcap": _plain_scores,
    "bias": _plain_scores,
    "mask": _mask,
    "softmax": _softmax,
    "dropout": _dropout,
    "output": _output,
}
