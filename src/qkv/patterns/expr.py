"""The tree that a pattern means: leaves joined by and, or, not. Knows no text, no tiles and no tensors of the call."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, reduce

import numpy as np

from qkv.patterns import spans
from qkv.patterns.leaf import Expr, Extent, Leaf
from qkv.patterns.spans import Spans


@dataclass(frozen=True, eq=False)
class Const(Expr):
    """All pairs, or none."""

    value: bool

    @property
    def key(self) -> tuple[object, ...]:
        return ("const", self.value)

    def seen(self, low: int, high: int) -> tuple[Spans, Spans]:
        found = spans.EVERYTHING if self.value else spans.NOTHING
        return found, found


ALL, NONE = Const(True), Const(False)


@dataclass(frozen=True, eq=False)
class Not(Expr):
    """The pairs that are not in the operand."""

    operand: Expr

    @cached_property
    def key(self) -> tuple[object, ...]:
        return ("not", self.operand.key)

    @property
    def children(self) -> tuple[Expr, ...]:
        return (self.operand,)

    def seen(self, low: int, high: int) -> tuple[Spans, Spans]:
        maybe, sure = self.operand.seen(low, high)
        found = spans.opposite(sure)
        return (found, found) if maybe is sure else (found, spans.opposite(maybe))


@dataclass(frozen=True, eq=False)
class And(Expr):
    """The pairs in both."""

    left: Expr
    right: Expr

    @cached_property
    def key(self) -> tuple[object, ...]:
        return ("and", self.left.key, self.right.key)

    @property
    def children(self) -> tuple[Expr, ...]:
        return (self.left, self.right)

    def seen(self, low: int, high: int) -> tuple[Spans, Spans]:
        return _joined(spans.both, self.left.seen(low, high), self.right.seen(low, high))


@dataclass(frozen=True, eq=False)
class Or(Expr):
    """The pairs in either."""

    left: Expr
    right: Expr

    @cached_property
    def key(self) -> tuple[object, ...]:
        return ("or", self.left.key, self.right.key)

    @property
    def children(self) -> tuple[Expr, ...]:
        return (self.left, self.right)

    def seen(self, low: int, high: int) -> tuple[Spans, Spans]:
        return _joined(spans.either, self.left.seen(low, high), self.right.seen(low, high))


@dataclass(frozen=True, eq=False)
class PerHead(Expr):
    """One expression a head."""

    members: tuple[Expr, ...]

    @cached_property
    def key(self) -> tuple[object, ...]:
        return ("per_head", *(member.key for member in self.members))

    @property
    def children(self) -> tuple[Expr, ...]:
        return self.members

    @cached_property
    def axes(self) -> tuple[bool, bool]:
        return any(member.axes[0] for member in self.members), True

    def seen(self, low: int, high: int) -> tuple[Spans, Spans]:
        """The keys that some head may see, and those that every head sees."""
        found = [member.seen(low, high) for member in self.members]
        return reduce(spans.either, (maybe for maybe, _ in found)), reduce(spans.both, (sure for _, sure in found))


def _joined(
    join: Callable[[Spans, Spans], Spans], left: tuple[Spans, Spans], right: tuple[Spans, Spans]
) -> tuple[Spans, Spans]:
    """Both answers joined; exact where both are."""
    maybe = join(left[0], right[0])
    exact = left[0] is left[1] and right[0] is right[1]
    return maybe, maybe if exact else join(left[1], right[1])


def conj(a: Expr, b: Expr) -> Expr:
    """a and b, with constants and repeats folded away."""
    if isinstance(a, Const):
        return b if a.value else NONE
    if isinstance(b, Const):
        return a if b.value else NONE
    return a if a.key == b.key else And(a, b)


def disj(a: Expr, b: Expr) -> Expr:
    """a or b, with constants and repeats folded away."""
    if isinstance(a, Const):
        return ALL if a.value else b
    if isinstance(b, Const):
        return ALL if b.value else a
    return a if a.key == b.key else Or(a, b)


def neg(a: Expr) -> Expr:
    """Not a, with constants and double negation folded away."""
    if isinstance(a, Const):
        return NONE if a.value else ALL
    return a.operand if isinstance(a, Not) else Not(a)


def rebuild(expr: Expr, replace: Callable[[Leaf], Expr], head: int | None = None) -> Expr:
    """The tree with every leaf replaced, simplified; `head` picks a member of each per_head, None keeps all."""
    if isinstance(expr, Leaf):
        return replace(expr)
    if isinstance(expr, Not):
        return neg(rebuild(expr.operand, replace, head))
    if isinstance(expr, And | Or):
        left, right = rebuild(expr.left, replace, head), rebuild(expr.right, replace, head)
        if left is expr.left and right is expr.right:
            return expr  # with all that it remembers
        return conj(left, right) if isinstance(expr, And) else disj(left, right)
    if isinstance(expr, PerHead):
        if head is None:
            return PerHead(tuple(rebuild(member, replace) for member in expr.members))
        return rebuild(expr.members[head], replace, head)
    return expr


def specialise(expr: Expr, b: int, h: int, extent: Extent) -> Expr:
    """The expression for one batch row, head and extent."""
    return rebuild(expr, lambda leaf: leaf.bind(b, h, extent), h)


def substitute(expr: Expr, test: Callable[[Leaf], bool], value: bool) -> Expr:
    """The expression with every leaf that passes the test replaced by a constant."""
    return rebuild(expr, lambda leaf: (ALL if value else NONE) if test(leaf) else leaf)


def polarity(expr: Expr, key: tuple[object, ...], positive: bool = True) -> set[bool]:
    """The signs, True for positive, with which the leaf of this key occurs."""
    if isinstance(expr, Leaf):
        return {positive} if expr.key == key else set()
    if isinstance(expr, Not):
        return polarity(expr.operand, key, not positive)
    return set().union(*(polarity(child, key, positive) for child in expr.children))


def evaluate(expr: Expr, leaf_value: Callable[[Leaf], np.ndarray], everything: np.ndarray) -> np.ndarray:
    """Join the leaves' bool or word arrays by the tree; `everything` stands for a true constant of that kind."""
    if isinstance(expr, Leaf):
        return leaf_value(expr)
    if isinstance(expr, Const):
        return everything if expr.value else everything ^ everything
    if isinstance(expr, Not):
        return everything ^ evaluate(expr.operand, leaf_value, everything)
    left, right = (evaluate(child, leaf_value, everything) for child in expr.children)
    return left & right if isinstance(expr, And) else left | right
