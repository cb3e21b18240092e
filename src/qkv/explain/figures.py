"""How numbers and names are written in an explanation: decimals, infinities, widths in columns. Knows no attention."""

from __future__ import annotations

import math
import unicodedata
from collections.abc import Iterable, Sequence

MINUS = "\u2212"
INFINITY = "\u221e"
SIGMA = "\u03c3"
PLAIN = {
    MINUS: "-",
    INFINITY: "inf",
    "√": "sqrt ",
    "ᵀ": "^T",
    "·": ".",
    "■": "#",
    "✓": "ok",
    "✗": "x",
    "Δ": "diff",
    "…": "...",
    "\u00d7": "x",
    "∈": "in",
    "μ": "mean",
    SIGMA: "std",
    "±": "+-",
}


def plain(text: str) -> str:
    """The same text without the signs of mathematics, for terminals and logs that show ASCII alone."""
    return "".join(PLAIN.get(sign, sign) for sign in text)


def columns(text: str) -> int:
    """How many columns of a terminal a text takes: two for a wide sign, none for a combining one."""
    wide = sum(unicodedata.east_asian_width(sign) in "WF" for sign in text)
    return len(text) + wide - sum(unicodedata.combining(sign) > 0 for sign in text)


def pad(text: str, width: int, *, right: bool = False) -> str:
    """Fill a text up to a width in columns, at its right or (right-aligned) at its left."""
    space = " " * max(0, width - columns(text))
    return space + text if right else text + space


def label(token: str, limit: int = 8) -> str:
    """A token as a short label: invisible signs as their code points, too long ones cut."""
    signs = (sign if sign.isprintable() and not unicodedata.combining(sign) else f"<{ord(sign):x}>" for sign in token)
    shown = "".join(signs) or "<>"
    if columns(shown) <= limit:
        return shown
    while columns(shown) > limit - 1:
        shown = shown[:-1]
    return shown + "\u2026"


def decimals(numbers: Iterable[float], limit: int = 3) -> int:
    """How many decimals suit these numbers together: none for integers; -1 where only powers of ten will do."""
    finite = [abs(x) for x in numbers if math.isfinite(x)]
    largest = max(finite, default=0.0)
    if all(x == int(x) for x in finite) and largest < 1e6:
        return 0
    if largest >= 1e5 or largest < 1e-3:
        return -1
    return max(0, limit - max(0, int(math.log10(largest)) - 1)) if largest >= 1 else limit


def number(x: float, places: int = 3) -> str:
    """One number with so many decimals (-1: as a power of ten); infinities, NaN and negative zero as such."""
    if math.isnan(x):
        return "NaN"
    if math.isinf(x):
        return INFINITY if x > 0 else MINUS + INFINITY
    text = f"{x:.1e}" if places < 0 else f"{x:.{places}f}"
    return text.replace("-", MINUS)


def short(x: float, limit: int = 3) -> str:
    """One number on its own, with the decimals that suit it and no zeros at its end."""
    text = number(x, decimals([x], limit))
    return text.rstrip("0").rstrip(".") if "." in text and "e" not in text else text


def vector(numbers: Sequence[float], limit: int = 8) -> str:
    """A row of numbers in brackets; a long one keeps its first and last."""
    places = decimals(numbers)
    cells = [number(x, places) for x in numbers]
    if len(cells) > limit:
        cells = [*cells[: limit // 2], "\u2026", cells[-1]]
    return f"({', '.join(cells)})"


def listed(names: Sequence[str], limit: int = 4) -> str:
    """Names in a sentence: "a", "a and b", "a, b and c", "a, b, c and 5 more"."""
    if len(names) > limit:
        names = [*names[: limit - 1], f"{len(names) - limit + 1} more"]
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


def wrap(text: str, width: int) -> list[str]:
    """Lines of at most so many columns, broken at spaces."""
    lines: list[str] = []
    for word in text.split(" "):
        if lines and columns(lines[-1]) + 1 + columns(word) <= width:
            lines[-1] += f" {word}"
        else:
            lines.append(word)
    return lines
