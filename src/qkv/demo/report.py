"""How the demo's results read: plain text of at most 100 columns, ASCII only, made from the data of its siblings."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from qkv.demo.families import Family, Row
from qkv.demo.sentences import KnownValue, Look
from qkv.demo.words import Words

WIDTH = 100
RULE = "-" * WIDTH


def heading(number: int, title: str) -> str:
    """The line that opens a part."""
    return f"\n{number}. {title}\n{'=' * (len(title) + 3)}\n"


def paragraph(text: str) -> str:
    """Running text, filled to the width."""
    return textwrap.fill(" ".join(text.split()), WIDTH)


def known_values_table(values: Sequence[KnownValue]) -> str:
    """One line a value: what it is, what it must be, and whether it came out."""
    lines = []
    for value in values:
        seen = "ok" if value.agrees else f"WRONG: {_numbers(value.seen)}"
        lines.append(f"  {value.name:<51}{_numbers(value.expected):<45}{seen}".rstrip())
    return "\n".join(lines)


def looks_table(word: str, looks: Sequence[Look]) -> str:
    """One line a head: where the word looks, the most first."""
    lines = [f"  layer  head  where {word!r} looks".ljust(38) + "first".ljust(16) + "second".ljust(16) + "third"]
    for look in looks:
        cells = "".join(f"{token:<9}{weight:4.2f}   " for token, weight in look.tokens)
        lines.append(f"  {look.layer:5}  {look.head:4}  {look.lesson:<23}{cells}".rstrip())
    return "\n".join(lines)


def families_legend(families: Sequence[Family], tokens: int) -> str:
    """One line a family: its pattern in qkv's notation, and in words."""
    return "\n".join(f"  {family.name:<13}{family.pattern(tokens)!s:<31}{family.meaning}" for family in families)


def families_head() -> str:
    """The two header lines of the table of families."""
    groups = f"{'':34}{'time, ms':>14}{'peak memory, MB':>32}{'differs from':>20}"
    names = ("family", "pairs", "share", "qkv", "torch", "speed", "qkv", "torch", "dense", "torch")
    widths = (-13, 11, 9, 10, 9, 8, 10, 9, 11, 10)
    line = "".join(f"{name:{'<' if width < 0 else '>'}{abs(width)}}" for name, width in zip(names, widths, strict=True))
    return f"{groups}\n{line}\n{RULE}"


def families_row(row: Row) -> str:
    """One line of the table; a row that disagrees with torch says so in place of its figures."""
    start = f"{row.family:<13}{row.pairs:>11,}{row.pairs / row.tokens**2:>9.1%}"
    end = f"{row.off_dense:>11.1%}{row.difference:>10.0e}"
    if row.cost is None:
        return f"{start}{'DISAGREES WITH TORCH, not timed':>46}{end}"
    cost = row.cost
    times = f"{_milliseconds(cost.seconds):>10}{_milliseconds(cost.sdpa_seconds):>9}{cost.speedup:>7.1f}x"
    return f"{start}{times}{_megabytes(cost.memory):>10}{_megabytes(cost.sdpa_memory):>9}{end}"


def families_summary(rows: Sequence[Row]) -> str:
    """The fastest row of the greatest length, in a sentence; nothing where no row was timed."""
    longest = max(row.tokens for row in rows)
    timed = [(row.cost.speedup, row, row.cost) for row in rows if row.cost is not None and row.tokens == longest]
    if not timed:
        return ""
    speedup, row, cost = max(timed, key=lambda entry: entry[0])
    share = f"{row.pairs / longest**2:.1%}"
    text = (
        f"At {longest:,} tokens `{row.pattern}` computes {share} of the pairs. That is {speedup:.1f} times as fast as"
    )
    saved = cost.sdpa_memory / cost.memory if cost.memory and cost.sdpa_memory else 0
    less = f", with {saved:.0f} times less memory" if saved >= 2 else ""
    return paragraph(f"{text} torch's own attention with the same mask{less}.")


def words_written(words: Words) -> str:
    """The text as the model wrote it after its prompt, then what it took."""
    seen = "ok" if words.agrees else f"WRONG: {' '.join(map(str, words.tokens))}"
    text = paragraph(f"{words.prompt} ... {words.text}")
    return (
        f"{text}\n\n"
        f"  {len(words.tokens)} tokens, those that transformers gives with the same weights: {seen}\n"
        f"  {words.tokens_per_second:.1f} tokens a second, the {words.prompt_tokens} of the prompt read in"
        f" {words.reading_seconds * 1e3:,.0f} ms, one thread, float32\n"
        f"  attention by the backend {words.backend!r}, tokens kept in {words.memory}"
    )


def _numbers(values: Sequence[float]) -> str:
    return " ".join(str(value) if isinstance(value, int) else f"{value:.4f}" for value in values)


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:,.1f}" if seconds < 0.1 else f"{seconds * 1e3:,.0f}"


def _megabytes(count: int | None) -> str:
    return "-" if count is None else f"{count / 2**20:,.1f}" if count < 100 * 2**20 else f"{count / 2**20:,.0f}"
