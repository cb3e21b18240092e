"""One layer's q, k, v under six families of patterns: time, memory, pairs, distance from dense, beside torch's SDPA.

A row whose result disagrees with torch's beyond what rounding explains carries no figure of speed.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from qkv.compare.memory import MemoryProbe
from qkv.demo.contenders import ours, sdpa
from qkv.demo.probe import Question
from qkv.demo.text import TEXT, shifted_windows
from qkv.models.minilm import MiniLM
from qkv.patterns import bigbird, causal, full, longformer, strided, window
from qkv.patterns.pattern import Pattern

WINDOW = 512  # the longest input that MiniLM reads
SLOW = 0.5  # seconds of a pair of runs from which two pairs must do


class Family(NamedTuple):
    """A name, what its pattern says in words, and the pattern for a length."""

    name: str
    meaning: str
    pattern: Callable[[int], Pattern]


FAMILIES = (
    Family("dense", "every token sees every token", lambda _: full()),
    Family("causal", "itself and all before it", lambda _: causal()),
    Family("window", "itself and the 255 before it", lambda _: window(255)),
    Family("strided", "the last sqrt(L), and every sqrt(L)-th before", lambda tokens: strided(math.isqrt(tokens))),
    Family("block-sparse", "blocks of 64: near, first and random ones", lambda _: bigbird(3, 64, 2, 0)),
    Family("longformer", "128 to either side; 4 tokens see and are seen by all", lambda _: longformer(256, 4)),
)


class Cost(NamedTuple):
    """What a call costs on both sides: seconds, and bytes added at the peak (None where the system does not tell)."""

    seconds: float
    sdpa_seconds: float
    speedup: float  # the median over pairs of runs of torch's time over ours
    memory: int | None
    sdpa_memory: int | None  # with its dense mask, where it needs one


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One family at one length; a row that disagrees with torch has no cost."""

    family: str
    pattern: str
    tokens: int
    pairs: int  # of one head
    off_dense: float  # relative Frobenius distance of the output from dense attention's
    difference: float  # the largest from torch's result
    allowed: float  # what rounding may explain
    cost: Cost | None = None

    @property
    def agrees(self) -> bool:
        """Whether ours and torch's result are the same but for rounding; NaN never is."""
        return self.difference <= self.allowed


class Inputs(NamedTuple):
    """The query, key and value of one layer, (1, H, L, D) each."""

    query: Tensor
    key: Tensor
    value: Tensor

    def first(self, tokens: int) -> Inputs:
        """The same for the first tokens only."""
        return Inputs(*(tensor[:, :, :tokens].contiguous() for tensor in self))


@torch.no_grad()
def joined_inputs(model: MiniLM, *, tokens: int, layer: int, heads: int) -> Inputs:
    """The q, k, v of a layer over the text: windows of 512 tokens, each read alone, joined to one long sequence."""
    ids = model.tokenize([TEXT], special=False).ids[0]
    windows = shifted_windows(ids, size=WINDOW, count=-(-tokens // WINDOW))
    parts = [model.bert.qkv(one[None], layer=layer) for one in windows]
    joined = Inputs(*(torch.cat(kind, 2)[:, :heads] for kind in zip(*parts, strict=True)))
    return joined.first(tokens)


@torch.no_grad()
def measure(inputs: Inputs, *, lengths: tuple[int, ...]) -> Iterator[Row]:
    """One row a family and length, as each is done."""
    with closing(MemoryProbe("-m", "qkv.demo.probe")) as probe:
        for tokens in lengths:
            part = inputs.first(tokens)
            dense = ours(*part, full()).run()
            for family in FAMILIES:
                yield measure_row(part, family.name, family.pattern(tokens), dense=dense, probe=probe)


def measure_row(inputs: Inputs, family: str, pattern: Pattern, *, dense: Tensor, probe: MemoryProbe) -> Row:
    """Compare first, and time and weigh only what agrees."""
    tokens = inputs.query.shape[-2]
    mine, theirs = ours(*inputs, pattern).run, sdpa(*inputs, pattern).run
    seconds, output = _timed(mine)
    sdpa_seconds, expected = _timed(theirs)
    row = Row(
        family=family,
        pattern=str(pattern),
        tokens=tokens,
        pairs=pattern.count(tokens, tokens),
        off_dense=float((output - dense).norm() / dense.norm()),
        difference=float((output - expected).abs().max()),
        allowed=rounding_bound(inputs),
    )
    if not row.agrees:
        return row
    runs = 2 if seconds + sdpa_seconds > SLOW else 5
    pairs = [(_timed(mine)[0], _timed(theirs)[0]) for _ in range(runs)]
    memory, sdpa_memory = (probe.ask(_question(inputs, str(pattern), contender)) for contender in ("qkv", "sdpa"))
    return replace(row, cost=_cost(pairs, memory, sdpa_memory))


def rounding_bound(inputs: Inputs) -> float:
    """How far two right results in float32 may lie apart: twice the first-order bound of one.

    |error| ≤ max|v| · u · (2 (D + 4) · max scale Σ|q||k| + L + 8), the sum bounded by the norms of q and k; u = 2⁻²⁴.
    """
    tokens, head_dim = inputs.query.shape[-2:]
    longest = float(inputs.query.norm(dim=-1).max() * inputs.key.norm(dim=-1).max())
    scores = longest / math.sqrt(head_dim)
    return 2 * float(inputs.value.abs().max()) * 2**-24 * (2 * (head_dim + 4) * scores + tokens + 8)


def _cost(pairs: list[tuple[float, float]], memory: int | None, sdpa_memory: int | None) -> Cost:
    seconds, sdpa_seconds = (statistics.median(side) for side in zip(*pairs, strict=True))
    speedup = statistics.median(theirs / mine for mine, theirs in pairs)
    return Cost(seconds, sdpa_seconds, speedup, memory, sdpa_memory)


def _question(inputs: Inputs, pattern: str, contender: str) -> Question:
    _, heads, tokens, head_dim = inputs.query.shape
    return Question(contender, pattern, tokens, heads, head_dim)


def _timed(call: Callable[[], Tensor]) -> tuple[float, Tensor]:
    start = time.perf_counter()
    output = call()
    return time.perf_counter() - start, output
