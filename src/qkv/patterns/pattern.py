"""The public pattern: a frozen value that says which (query, key) pairs exist, without a length,
on absolute positions.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, TypeAlias

import numpy as np
import torch
from torch import Tensor

from qkv.errors import DTypeError, MaskError, ShapeError, ValueOutOfRange, message
from qkv.patterns import spans
from qkv.patterns.arguments import whole
from qkv.patterns.canonical import canonical, head_counts
from qkv.patterns.expr import conj, disj, evaluate, neg, rebuild, specialise
from qkv.patterns.leaf import Expr, Extent, Leaf, Sizes
from qkv.patterns.leaves.dense import Where
from qkv.patterns.picture import picture
from qkv.patterns.plans import plan_pattern
from qkv.patterns.schedule import PatternPlan
from qkv.patterns.spans import FAR
from qkv.patterns.text import filled, read_form

Align: TypeAlias = Literal["top_left", "bottom_right"]


PAIRS_AT_A_TIME = 1 << 19


@dataclass(frozen=True, eq=False, repr=False)
class Pattern:
    """Which keys a query may see. Compose with `&`, `|`, `-`, `~`; equal patterns hold the same pairs at every length.

    Lengths are given where a question needs them: L queries, S keys (S = L where left out),
    and the absolute position of
    query 0: `query_offset`, else what `align` says, else S - L, so that the last query stands at the last key.
    """

    known: Expr | None  # None: only written down so far, inside a graph that was being captured
    form: str  # the text, with {name} in the place of each tensor
    align: Align | None = None
    operator: str = ""  # the last operation of the text, "" for a call
    tensors: tuple[Tensor, ...] = ()

    @cached_property
    def expr(self) -> Expr:
        """The tree that it means."""
        return read_form(self.form, self.tensors).expr if self.known is None else self.known

    @cached_property
    def text(self) -> str:
        """What `str` prints."""
        return filled(self.form, self.tensors) if self.tensors else self.form

    def __and__(self, other: Pattern) -> Pattern:
        return _join(self, other, "&", conj)

    def __or__(self, other: Pattern) -> Pattern:
        return _join(self, other, "|", disj)

    def __sub__(self, other: Pattern) -> Pattern:
        return _join(self, other, "-", lambda a, b: conj(a, neg(b)))

    def __rand__(self, other: object) -> Pattern:
        return _join(self, other, "&", conj)  # raises: what stands on the left is no pattern

    def __ror__(self, other: object) -> Pattern:
        return _join(self, other, "|", disj)

    def __rsub__(self, other: object) -> Pattern:
        return _join(self, other, "-", conj)

    def __invert__(self) -> Pattern:
        return combine((self,), f"~{self.operand_form()}", neg, "~")

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Pattern):
            return NotImplemented
        return self._form == other._form

    def __hash__(self) -> int:
        return hash(self._form)

    def __str__(self) -> str:
        return self.form if torch.compiler.is_dynamo_compiling() else self.text

    def __repr__(self) -> str:
        return f"Pattern({self.text})"

    def __bool__(self) -> bool:
        raise MaskError(
            message("a pattern has no truth value", f"got {self.text} in `and`, `or`, `not` or `if`", "use & | - ~")
        )

    @cached_property
    def _form(self) -> Hashable:
        return canonical(self.expr), self.align

    def operand_form(self, operator: str = "") -> str:
        """The form as an operand, in parentheses wherever a reader could doubt; a left operand may chain & and |."""
        plain = self.operator in ("", "~") or (self.operator == operator and operator in ("&", "|"))
        return self.form if plain else f"({self.form})"

    def check(self, *, batch: int, heads: int, queries: int, keys: int, offsets: Sequence[int]) -> None:
        """Raise ShapeError, MaskError or ValueOutOfRange where the pattern does not fit the sizes of a call.

        While a graph is captured, sizes and content are not known: then it is checked when it is planned.
        """
        known = all(type(n) is int for n in (batch, heads, queries, keys, *offsets))
        if known and not torch.compiler.is_compiling():
            self._check(Sizes(batch, heads, queries, keys, tuple(offsets)))

    def _check(self, sizes: Sizes) -> None:
        for listed in self._head_counts:
            _check_heads(listed, sizes.heads)
        for leaf in self._leaves:
            leaf.check(sizes)

    @cached_property
    def _leaves(self) -> tuple[Leaf, ...]:
        return tuple(self.expr.leaves())

    @cached_property
    def _head_counts(self) -> set[int]:
        return head_counts(self.expr)

    def offset(self, queries: int, keys: int) -> int:
        """The absolute position of query 0 that the alignment says."""
        return 0 if self.align == "top_left" else keys - queries

    def plan(
        self,
        L: int,
        S: int | None = None,
        *,
        batch: int = 1,
        heads: int = 1,
        query_offset: int | Sequence[int] | None = None,
        key_offset: int | Sequence[int] = 0,
    ) -> PatternPlan:
        """Compile to block schedules, in time and memory proportional to the blocks kept."""
        sizes = self._sizes(L, S, batch, heads, query_offset)
        return plan_pattern(self._probed(sizes), sizes, _each(key_offset, batch))

    def _sizes(self, L: int, S: int | None, batch: int, heads: int, query_offset: int | Sequence[int] | None) -> Sizes:
        """The sizes of a question, checked against the pattern."""
        S = L if S is None else S
        _check_lengths(L, S)
        starts = _each(self.offset(L, S) if query_offset is None else query_offset, batch)
        sizes = Sizes(batch, heads, L, S, starts)
        self._check(sizes)
        return sizes

    def _probed(self, sizes: Sizes) -> Expr:
        """The expression with every user function asked which of b and h its answer depends on."""
        if not any(isinstance(leaf, Where) for leaf in self._leaves):
            return self.expr
        return rebuild(self.expr, lambda leaf: leaf.probe(sizes) if isinstance(leaf, Where) else leaf)

    def retained(self, position: int) -> tuple[tuple[int, int], ...]:
        """The keys before `position` that may still be seen from there on, as sorted, disjoint ranges [start, stop).

        A key j < position is in them when (i, j) is in the pattern for a query i >= position, of any head and batch
        row, and then surely; what the rules of the pattern do not tell apart is in them too. So a cache may drop all
        other keys for good. `((0, position),)`: everything may be needed, and `()`: nothing.
        """
        whole("position", position, 0, "it is the number of tokens seen so far")
        kept = spans.both(self.expr.seen(position, FAR)[0], spans.span(0, position))
        return tuple(spans.pieces(kept))

    def allowed(self, i: np.ndarray, j: np.ndarray, *, batch: int, heads: int, extents: Sequence[Extent]) -> np.ndarray:
        """Element by element, whether pairs of positions exist: bool (B or 1, H or 1, l, s).

        i: int64 (B or 1, l) and j: int64 (B or 1, s), absolute positions. extents: the whole call's,
        one a batch row or one.
        """
        sizes = Sizes(batch, heads, extents[0].queries, extents[0].keys, tuple(e.query_start for e in extents))
        expr = self._probed(sizes)
        by_batch, by_head = expr.axes
        rows = batch if by_batch or max(len(i), len(j), len(extents)) > 1 else min(batch, 1)
        out = np.empty((rows, heads if by_head else min(heads, 1), i.shape[1], j.shape[1]), dtype=bool)
        for b in range(out.shape[0]):
            for h in range(out.shape[1]):
                member = specialise(expr, b, h, extents[b % len(extents)])
                _fill(out[b, h], member, i[b % len(i)], j[b % len(j)])
        return out

    def to_dense(
        self,
        L: int,
        S: int | None = None,
        *,
        batch: int = 1,
        heads: int = 1,
        query_offset: int | Sequence[int] | None = None,
    ) -> Tensor:
        """The whole L by S picture as a bool tensor: (L, S), or (B, H, L, S) where it depends on the batch row or
        head.
        """
        sizes = self._sizes(L, S, batch, heads, query_offset)
        S = sizes.keys
        i = np.array(sizes.offsets, dtype=np.int64)[:, None] + np.arange(L)
        extents = [Extent(L, S, start) for start in sizes.offsets]
        dense = torch.from_numpy(self.allowed(i, np.arange(S)[None], batch=batch, heads=heads, extents=extents))
        varies = dense.shape[0] > 1 or dense.shape[1] > 1 or any(self.expr.axes)
        return dense.expand(batch, heads, L, S) if varies else dense[0, 0]

    def count(self, L: int, S: int | None = None, *, batch: int = 1, heads: int = 1) -> int:
        """The exact number of pairs, over all batch rows and heads, from the compiled schedule."""
        return self.plan(L, S, batch=batch, heads=heads).pairs

    def density(self, L: int, S: int | None = None, *, batch: int = 1, heads: int = 1) -> float:
        """The share of all pairs that exist; 0 where there are none to have."""
        total = batch * heads * L * (L if S is None else S)
        return self.count(L, S, batch=batch, heads=heads) / total if total else 0.0

    def equivalent(self, other: Pattern, L: int, S: int | None = None) -> bool:
        """Whether two patterns hold the same pairs at these lengths, each at its own offset of query 0."""
        S = L if S is None else S
        at = [pattern.offset(L, S) for pattern in (self, other)]
        difference = Pattern(disj(conj(self.expr, neg(other.expr)), conj(other.expr, neg(self.expr))), "")
        sizes = {"batch": _batch_count(difference.expr), "heads": _most_heads(difference.expr)}
        if at[0] == at[1]:
            return difference.plan(L, S, query_offset=at[0], **sizes).pairs == 0
        ours, theirs = (pattern.to_dense(L, S, **sizes) for pattern in (self, other))
        return bool((ours == theirs).all())

    def show(self, L: int, S: int | None = None) -> str:
        """A picture in text: one character a pair up to 64 wide, a share of a tile beyond; head and batch row 0."""
        dense = self.to_dense(L, S, heads=_most_heads(self.expr), batch=_batch_count(self.expr))
        return picture(dense[(0,) * (dense.ndim - 2)].numpy())


def combine(parts: Sequence[Pattern], form: str, build: Callable[..., Expr], operator: str = "") -> Pattern:
    """One pattern of several. While a graph is captured, or where a part is only written down, so is the whole."""
    written = torch.compiler.is_dynamo_compiling() or any(part.known is None for part in parts)
    known = None if written else build(*(part.expr for part in parts))
    tensors = tuple(tensor for part in parts for tensor in part.tensors)
    return Pattern(known, form, common_align(*parts), operator, tensors)


def _join(a: Pattern, b: object, operator: str, build: Callable[[Expr, Expr], Expr]) -> Pattern:
    if not isinstance(b, Pattern):
        raise DTypeError(
            message(
                f"both sides of `{operator}` must be patterns",
                f"one is a {type(b).__name__}",
                "wrap a boolean tensor as mask(keep=...)",
            )
        )

    def build_checked(left: Expr, right: Expr) -> Expr:
        _check_same_heads(left, right)
        return build(left, right)

    return combine((a, b), f"{a.operand_form(operator)} {operator} {b.operand_form()}", build_checked, operator)


def _check_same_heads(a: Expr, b: Expr) -> None:
    if len(counts := head_counts(a) | head_counts(b)) > 1:
        seen = f"they list {' and '.join(map(str, sorted(counts)))}"
        holds = "all `per_head` in a pattern must list the same heads"
        raise ShapeError(message(holds, seen, "list one pattern a head"))


def common_align(*patterns: Pattern) -> Align | None:
    """What the parts of one pattern say of the position of query 0; two that disagree are an error."""
    said = {pattern.align: pattern for pattern in patterns if pattern.align}
    if len(said) > 1:
        raise MaskError(
            message(
                "the parts of a pattern must agree on `align`",
                " and ".join(f"{pattern} says {align!r}" for align, pattern in said.items()),
                "give `align` once, or pass `query_offset=` to the call",
            )
        )
    return next(iter(said), None)


def _fill(out: np.ndarray, expr: Expr, i: np.ndarray, j: np.ndarray) -> None:
    """Evaluate pair by pair, some rows at a time: index arrays of all pairs would take many times the result."""
    rows = max(PAIRS_AT_A_TIME // max(len(j), 1), 1)
    for start in range(0, len(i), rows):
        query, key = i[start : start + rows, None], j[None, :]
        everything = np.ones((len(query), len(j)), dtype=bool)

        def value(leaf: Leaf, query: np.ndarray = query, key: np.ndarray = key) -> np.ndarray:
            return leaf.contains(query, key)

        out[start : start + rows] = evaluate(expr, value, everything)


def _each(value: int | Sequence[int], batch: int) -> tuple[int, ...]:
    """One offset for all batch rows, or one for each."""
    offsets = (int(value),) if isinstance(value, int | np.integer) else tuple(map(int, value))
    if len(offsets) not in (1, batch):
        holds = f"an offset must be one int, or one for each of the B={batch} batch rows"
        raise ShapeError(message(holds, f"got {len(offsets)}", "list one a batch row"))
    return offsets


def _check_lengths(L: int, S: int) -> None:
    for name, length in (("L", L), ("S", S)):
        if isinstance(length, bool) or not isinstance(length, int):
            raise DTypeError(message(f"`{name}` must be an integer", f"got {length!r}", "give a number of tokens"))
        if length < 0:
            raise ValueOutOfRange(message(f"`{name}` must be at least 0", f"got {length}", "give a number of tokens"))


def _check_heads(listed: int, heads: int) -> None:
    if listed != heads:
        raise ShapeError(
            message(
                f"`per_head` must list one pattern for each of the H={heads} query heads",
                f"it lists {listed}",
                "repeat patterns where several heads share one",
            )
        )


def _most_heads(expr: Expr) -> int:
    return max([1, *head_counts(expr), *(leaf.heads or 1 for leaf in expr.leaves())])


def _batch_count(expr: Expr) -> int:
    return max([1, *(leaf.batch or 1 for leaf in expr.leaves())])
