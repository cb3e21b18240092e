"""Worked examples small enough to verify with pencil and paper, by name; and tokens turned into small integers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from qkv.errors import ValueOutOfRange, message, unknown_name
from qkv.patterns.named import causal
from qkv.patterns.pattern import Pattern

Rows = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, kw_only=True)
class Example:
    """Numbers of one example: rows of Q, K and V, names for them, and what the queries may see."""

    about: str
    query: Rows
    key: Rows
    value: Rows
    query_tokens: tuple[str, ...]
    key_tokens: tuple[str, ...]
    pattern: Pattern | None = None

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        """Q (L, D), K (S, D) and V (S, V) in float64."""
        q, k, v = (torch.tensor(rows, dtype=torch.float64) for rows in (self.query, self.key, self.value))
        return q, k, v

    def title(self, name: str) -> str:
        """The heading of the example under its name."""
        return f"example {name}: {self.about}"


THE_CAT_SAT = ("the", "cat", "sat")
EXAMPLES: Mapping[str, Example] = {
    "article": Example(
        about="one query against six keys",
        query=((1, 0),),
        key=((1, 2), (0, 1), (1, 0), (2, 1), (0, 2), (1, 1)),
        value=((1, 0), (0, 1), (1, 0), (0, 1), (1, 0), (0, 1)),
        query_tokens=("q0",),
        key_tokens=("k0", "k1", "k2", "k3", "k4", "k5"),
    ),
    "cat": Example(
        about="three tokens that look back only",
        query=((1, 0, 1, 0), (0, 2, 0, 1), (1, 1, 0, 2)),
        key=((1, 1, 0, 1), (0, 1, 1, 0), (2, 0, 0, 1)),
        value=((1, 0), (0, 1), (2, 2)),
        query_tokens=THE_CAT_SAT,
        key_tokens=THE_CAT_SAT,
        pattern=causal(),
    ),
    "cross": Example(
        about="two target tokens look at four source tokens",
        query=((2, 0), (0, 2)),
        key=((1, 0), (0, 1), (1, 1), (0, 0)),
        value=((10, 0), (0, 10), (5, 5), (0, 0)),
        query_tokens=("le", "chat"),
        key_tokens=("the", "cat", "sat", "."),
    ),
}


def example(name: str) -> Example:
    """A built-in example by name; UnknownName with the nearest one where there is none."""
    if name not in EXAMPLES:
        raise unknown_name("example", name, EXAMPLES)
    return EXAMPLES[name]


def embed(tokens: tuple[str, ...], *, dim: int, heads: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Q, K and V of shape (1, heads, tokens, dim) with small integers from a seed; equal tokens get equal rows."""
    for name, size in (("dim", dim), ("heads", heads)):
        if not 1 <= size <= 1024:
            raise ValueOutOfRange(message(f"`{name}` must lie in 1..1024", f"got {size}", "4 reads well"))
    if not tokens:
        raise ValueOutOfRange(message("the text must hold a word", "got none", 'say "the cat sat"'))
    words = list(dict.fromkeys(tokens))
    generator = torch.Generator().manual_seed(seed)
    table = torch.randint(-1, 3, (3, heads, len(words), dim), generator=generator).double()
    rows = table[:, :, [words.index(token) for token in tokens]]
    return rows[0][None], rows[1][None], rows[2][None]
