"""Hypothesis strategies: pattern expressions with the oracle's rule beside each, and the calls they are asked about.

The awkward is drawn on purpose: lengths around multiples of 64, offsets before the first key and beyond the last,
small parameters that meet each other, content leaves of one row, of a batch and of heads.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from hypothesis import strategies as st
from torch import Tensor

import oracles
import qkv
from qkv.patterns.pattern import Pattern

LENGTHS = (0, 1, 2, 3, 5, 31, 63, 64, 65, 127, 128, 129, 191, 257)
SMALL = (1, 2, 3, 4, 5, 7, 8, 16, 31, 32, 33, 63, 64, 65, 100, 130)
COUNTS = (0, 1, 2, 3, 7, 31, 63, 64, 65, 100, 300)


class Sizes(NamedTuple):
    """The axes of a call, and the absolute position of query 0, one for all batch rows or one for each."""

    batch: int
    heads: int
    queries: int
    keys: int
    offsets: tuple[int, ...]

    @property
    def lowest(self) -> int:
        return min(self.offsets)

    @property
    def end(self) -> int:
        """The position after the last query."""
        return max(self.offsets) + self.queries


class Case(NamedTuple):
    """One pattern, as the package's value and as the oracle's rule."""

    pattern: Pattern
    rule: oracles.Rule


def truth(case: Case, sizes: Sizes, key_start: int = 0) -> Tensor:
    """The rule at every element: bool (B, H, L, S)."""

    def rule(p: Any) -> Any:
        return case.rule(p._replace(j=p.j + key_start))

    return oracles.dense(rule, (sizes.batch, sizes.heads, sizes.queries, sizes.keys), sizes.offsets)


def within(rule: oracles.Rule, queries: tuple[int, int], keys: tuple[int, int] | None = None) -> oracles.Rule:
    """The rule for positions in the half-open ranges, nothing outside: a rule may read a table that ends somewhere."""

    def guarded(p: Any) -> Any:
        answer, inner = None, p
        for name, span in (("i", queries), ("j", keys)):
            if span is not None:
                x = getattr(p, name)
                known = (x >= span[0]) & (x < span[1])
                answer = known if answer is None else answer & known
                inner = inner._replace(**{name: x.clamp(span[0], max(span[0], span[1] - 1))})
        return (
            answer & rule(inner)
            if all(span is None or span[0] < span[1] for span in (queries, keys))
            else answer & False
        )

    return guarded


@st.composite
def sizes(draw: st.DrawFn, lengths: tuple[int, ...] = LENGTHS, batches: int = 2, heads: int = 2) -> Sizes:
    queries, keys = draw(st.sampled_from(lengths)), draw(st.sampled_from(lengths))
    batch = draw(st.integers(1, batches))
    offset = st.sampled_from([keys - queries, 0, 1, -1, -queries, 64, -65, keys, keys + 70, 17])
    count = batch if draw(st.integers(0, 3)) == 0 else 1
    return Sizes(batch, draw(st.integers(1, heads)), queries, keys, tuple(draw(offset) for _ in range(count)))


def choice(*values: Any) -> st.SearchStrategy[Any]:
    return st.sampled_from(values)


def maker(name: str, **arguments: st.SearchStrategy[Any]) -> st.SearchStrategy[Case]:
    """A constructor and the oracle's rule of the same name, both given the same drawn arguments."""
    build: Callable[..., Pattern] = getattr(qkv, name)
    rule: Callable[..., oracles.Rule] = getattr(oracles, name)
    return st.fixed_dictionaries(arguments).map(lambda drawn: Case(build(**drawn), rule(**drawn)))


small, count = st.sampled_from(SMALL), st.sampled_from(COUNTS)
side = st.one_of(count, st.none())
tokens = st.one_of(count, st.lists(st.integers(0, 140), max_size=14))

FIXED: dict[str, st.SearchStrategy[Case]] = {
    "full": maker("full"),
    "causal": maker("causal"),
    "window": maker("window", left=side, right=side),
    "sliding_window": maker("sliding_window", size=small),
    "dilated": maker("dilated", left=count, right=count, dilation=small),
    "strided": maker("strided", stride=small),
    "fixed": st.tuples(small, small).map(lambda t: Case(qkv.fixed(max(t), min(t)), oracles.fixed(max(t), min(t)))),
    "sparse_transformer": maker("sparse_transformer", stride=small),
    "global_tokens": maker("global_tokens", tokens=tokens),
    "prefix": maker("prefix", n=count),
    "block_local": maker("block_local", size=small),
    "longformer": st.tuples(count, tokens).map(lambda t: Case(qkv.longformer(*t), oracles.longformer(*t))),
}
"""Constructors of numbers alone, whose rules hold at every position."""


def drawn_blocks(sizes: Sizes) -> st.SearchStrategy[Case]:
    """random_blocks and bigbird: only positions from 0 on have a row of blocks."""

    def random_case(t: tuple[int, int, int, bool]) -> Case:
        return Case(qkv.random_blocks(*t), within(oracles.random_blocks(*t), (0, max(sizes.end, 0))))

    def bigbird_case(t: tuple[int, Any, int, int, int]) -> Case:
        window, chosen, blocks, seed, size = t
        parts = [
            lambda p: (p.i // size - p.j // size <= window // 2) & (p.j // size - p.i // size <= window // 2),
            oracles.global_tokens(chosen),
        ]
        if blocks:
            parts.append(within(oracles.random_blocks(blocks, size, seed, True), (0, max(sizes.end, 0))))
        return Case(qkv.bigbird(window, chosen, blocks, seed, block_size=size), oracles.either(*parts))

    block, seed = choice(3, 16, 33, 64, 128), choice(0, 1, 7, 2**64 - 1)
    return st.one_of(
        st.tuples(choice(1, 2, 3, 9), block, seed, st.booleans()).map(random_case),
        st.tuples(choice(0, 1, 3), tokens, choice(0, 1, 2), seed, block).map(bigbird_case),
    )


def images(sizes: Sizes) -> list[st.SearchStrategy[Case]]:
    """The constructors on an image of exactly S pixels; none where S = 0."""
    S = sizes.keys
    shapes = [(h, S // h) for h in range(1, S + 1) if S % h == 0]
    if not shapes:
        return []
    shape, span = st.sampled_from(shapes), (0, S)

    def near(t: tuple[tuple[int, int], int]) -> Case:
        grid, kernel = t[0], 1 + t[1] % min(t[0])
        return Case(qkv.neighborhood(grid, kernel), within(oracles.neighborhood(grid, kernel), span))

    def tiled(t: tuple[tuple[int, int], int, int]) -> Case:
        grid, window, shift = t[0], t[1], t[2] % t[1]
        return Case(qkv.windows2d(grid, window, shift), within(oracles.windows2d(grid, window, shift), span))

    def line(t: tuple[tuple[int, int], str]) -> Case:
        return Case(qkv.axial(*t), within(oracles.axial(*t), span))

    return [
        st.tuples(shape, st.integers(0, 12)).map(near),
        st.tuples(shape, choice(1, 2, 3, 4, 7, 8), st.integers(0, 7)).map(tiled),
        st.tuples(shape, choice("width", "height")).map(line),
    ]


def noise(seed: int, *shape: int, share: float = 0.5) -> Tensor:
    """A random boolean tensor, a pure function of the seed."""
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed)) < share


def axis(size: int) -> st.SearchStrategy[int]:
    return st.sampled_from([1, size])


@st.composite
def content(draw: st.DrawFn, sizes: Sizes) -> Case:
    """One of the constructors that take a tensor or a function, made to fit the call."""
    B, H, L, S = sizes[:4]
    seed, span = draw(st.integers(0, 99)), (0, S)
    kind = draw(choice("documents", "cu_seqlens", "key_lengths", "key_padding", "mask", "mask3", "blocks", "where"))
    if kind == "documents":
        ids = torch.randint(
            0, draw(choice(1, 3, 40)), (B, S) if draw(st.booleans()) else (S,), generator=generator(seed)
        )
        ids = ids.sort(-1).values if draw(st.booleans()) else ids
        return Case(qkv.documents(ids), within(oracles.documents(ids), span))
    if kind == "cu_seqlens":
        cuts = sorted(draw(st.lists(st.integers(0, S), max_size=6)))
        return Case(qkv.documents(cu_seqlens=[0, *cuts, S]), within(oracles.document_lengths([0, *cuts, S]), span))
    if kind == "key_lengths":
        lengths = torch.tensor([draw(st.integers(0, S)) for _ in range(B)])
        return Case(qkv.key_lengths(lengths), oracles.key_lengths(lengths))
    if kind == "key_padding":
        keep = noise(seed, B, S, share=draw(choice(0.02, 0.5, 0.98)))
        return Case(qkv.key_padding(keep=keep), oracles.key_padding(keep))
    if kind == "mask":
        keep = noise(seed, *(draw(axis(size)) for size in (B, H, L, S)))
        return Case(qkv.mask(keep=keep), oracles.mask(keep))
    if kind == "mask3":
        axes = draw(choice("BLS", "HLS"))
        keep = noise(seed, B if axes == "BLS" else H, L, S)
        return Case(qkv.mask(keep=keep, axes=axes), oracles.mask(keep, axes))
    if kind == "blocks":
        return draw(layouts(sizes, seed))
    fn, rule = draw(st.sampled_from(FUNCTIONS))
    return Case(qkv.where(fn), rule)


@st.composite
def layouts(draw: st.DrawFn, sizes: Sizes, seed: int) -> Case:
    size = draw(choice(3, 16, 33, 64, 128))
    rows, columns = (max(-(-span // size), 1) + draw(st.integers(0, 1)) for span in (sizes.end, sizes.keys))
    lead = draw(st.one_of(st.just(()), st.tuples(axis(sizes.batch), axis(sizes.heads))))
    keep = noise(seed, *lead, rows, columns)
    return Case(qkv.blocks(keep, size), within(oracles.blocks(keep, size), (0, rows * size)))


FUNCTIONS: tuple[tuple[Callable[..., Tensor], oracles.Rule], ...] = (
    (lambda b, h, i, j: (i - 2 * j) % 3 == 0, lambda p: (p.i - 2 * p.j) % 3 == 0),
    (lambda b, h, i, j: i * i % 7 >= j % 5, lambda p: p.i * p.i % 7 >= p.j % 5),
    (lambda b, h, i, j: (i + j + h) % 2 == 0, lambda p: (p.i + p.j + p.h) % 2 == 0),
    (lambda b, h, i, j: j <= i - 3 * b, lambda p: p.j <= p.i - 3 * p.b),
    (lambda b, h, i, j: (b + h) % 2 == 0 * i * j, lambda p: (p.b + p.h) % 2 == 0 * p.i * p.j),
)


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def leaf_cases(sizes: Sizes) -> st.SearchStrategy[Case]:
    """Any constructor but per_head, made to fit the call."""
    return st.one_of(*FIXED.values(), drawn_blocks(sizes), *images(sizes), content(sizes))


@st.composite
def cases(draw: st.DrawFn, sizes: Sizes, depth: int = 3, leaves: st.SearchStrategy[Case] | None = None) -> Case:
    """An expression of at most `depth` operations on a path, of leaves that fit the call."""
    kind = draw(choice("leaf", "&", "|", "-", "~", "&", "|", "per_head")) if depth else "leaf"
    if kind == "leaf":
        return draw(leaf_cases(sizes) if leaves is None else leaves)
    below = cases(sizes, depth - 1, leaves)
    if kind == "per_head":
        members = [draw(below) for _ in range(sizes.heads)]
        return Case(qkv.per_head([m.pattern for m in members]), oracles.per_head([m.rule for m in members]))
    a = draw(below)
    if kind == "~":
        return Case(~a.pattern, oracles.opposite(a.rule))
    b = draw(below)
    if kind == "&":
        return Case(a.pattern & b.pattern, oracles.both(a.rule, b.rule))
    if kind == "|":
        return Case(a.pattern | b.pattern, oracles.either(a.rule, b.rule))
    return Case(a.pattern - b.pattern, oracles.both(a.rule, oracles.opposite(b.rule)))


@st.composite
def questions(
    draw: st.DrawFn, depth: int = 3, lengths: tuple[int, ...] = LENGTHS, leaves: st.SearchStrategy[Case] | None = None
) -> tuple[Case, Sizes]:
    """A call and an expression that fits it."""
    asked = draw(sizes(lengths))
    return draw(cases(asked, depth, leaves)), asked


def literals(depth: int = 3, leaves: st.SearchStrategy[Pattern] | None = None) -> st.SearchStrategy[Pattern]:
    """Patterns without tensors and functions: what a text can hold."""
    if leaves is None:
        anywhere = Sizes(1, 1, 12, 12, (0,))
        leaves = st.one_of(*FIXED.values(), drawn_blocks(anywhere), *images(anywhere)).map(lambda case: case.pattern)
    patterns = leaves
    for _ in range(depth):
        below = patterns
        pair = st.tuples(below, below)
        patterns = st.one_of(
            leaves,
            below.map(lambda p: ~p),
            pair.map(lambda t: t[0] & t[1]),
            pair.map(lambda t: t[0] | t[1]),
            pair.map(lambda t: t[0] - t[1]),
        )
    return patterns
