"""Text with roles, laid out in columns: spans, blocks side by side, and their colours. Knows no attention."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from qkv.explain.figures import columns, pad, plain, wrap

INDENT = 5
COLOURS = {"q": "38;5;33", "k": "38;5;208", "v": "38;5;35", "s": "38;5;135", "strong": "1", "faint": "2"}


class Span(NamedTuple):
    """A piece of a line, and whose it is: q, k, v, s (scores and weights), strong, faint, or nobody's."""

    text: str
    role: str = ""


Line = tuple[Span, ...]


@dataclass(frozen=True, kw_only=True)
class Style:
    """How wide, whether in colours, whether in ASCII."""

    width: int = 80
    colour: bool = False
    plain: bool = False

    def text(self, text: str) -> str:
        """The text in the signs that may be used."""
        return plain(text) if self.plain else text

    def paint(self, line: Line) -> str:
        """One line as it is printed, without spaces at its end."""
        text = "".join(span.text for span in line).rstrip()
        if not self.colour:
            return text
        return "".join(self._coloured(piece) for piece in line).rstrip()

    @staticmethod
    def _coloured(piece: Span) -> str:
        return f"\x1b[{COLOURS[piece.role]}m{piece.text}\x1b[0m" if piece.role and piece.text.strip() else piece.text


def span(text: str, role: str = "") -> Line:
    """A line of one piece."""
    return (Span(text, role),)


def line_width(line: Line) -> int:
    """The columns that a line takes."""
    return sum(columns(piece.text) for piece in line)


def block_width(lines: Sequence[Line]) -> int:
    """The columns that the widest line takes."""
    return max(map(line_width, lines), default=0)


def indent(lines: Sequence[Line], by: int = INDENT) -> list[Line]:
    """The lines moved to the right."""
    return [(Span(" " * by), *line) for line in lines]


def beside(left: Sequence[Line], right: Sequence[Line], at: int) -> list[Line]:
    """Two blocks side by side, the right one beginning at a column; one above the other where the left is too wide."""
    if block_width(left) + 2 > at and left:
        return [*left, *indent(right, at)]
    rows = max(len(left), len(right))
    lines = []
    for i in range(rows):
        start = left[i] if i < len(left) else ()
        end = right[i] if i < len(right) else ()
        lines.append((*start, Span(" " * (at - line_width(start))), *end) if end else tuple(start))
    return lines


def ends(left: Line, right: str, style: Style) -> list[Line]:
    """One line with a text at each end; two lines where one is too short for both."""
    gap = style.width - line_width(left) - columns(right)
    if gap >= 2:
        return [(*left, Span(" " * gap), Span(right, "faint"))]
    under = [span(pad(line, style.width - INDENT, right=True), "faint") for line in wrap(right, style.width - INDENT)]
    return [left, *indent(under)]


def sentences(texts: Sequence[str], style: Style, role: str = "", by: int = INDENT) -> list[Line]:
    """Each text as lines that fit, moved in, the later lines of one a little further."""
    lines: list[Line] = []
    for text in texts:
        first, *rest = wrap(style.text(text), style.width - by - 2)
        lines += indent([span(first, role)], by)
        lines += indent([span(line, role) for line in rest], by + 2)
    return lines
