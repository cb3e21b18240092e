"""Splitting an expression into disjoint parts, each in the order that suits it: strided attention is a window plus
dense classes.

For a spread leaf x of E, with E1 = E[x true] and E0 = E[x false], E = N + R, disjoint and covering by cases of x:
N = E0 and (E1 or not x) in natural order, R = x and E1 and not E0 in the order that x owns, where x is simply true.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from qkv.patterns import line
from qkv.patterns.axis import Order, lay_out
from qkv.patterns.expr import NONE, conj, disj, neg, polarity, substitute
from qkv.patterns.leaf import Expr, Extent, Leaf
from qkv.patterns.tiles import bound

NOMINAL = 16_384  # the length at which the choice is made, once a pattern, so that a row's bits do not depend on L
ROW_BLOCK_COST = 2  # tiles' worth of one more gather, scatter and merge of a row block
MAX_SPREAD = 3  # spread leaves tried at one level
MAX_DEPTH = 4


class Piece(NamedTuple):
    """One part of an expression: what is left of it, in an order in which its owned leaves are true."""

    expr: Expr
    order: Order


class Choice(NamedTuple):
    """Pieces that cover an expression, and what they cost."""

    cost: int
    pieces: tuple[Piece, ...]


def split(expr: Expr) -> tuple[Piece, ...]:
    """The cheapest disjoint cover of the expression by pieces."""
    if all(leaf.light for leaf in expr.leaves()):
        return _split(_Hashed(expr))
    return _choose(expr, Order(), frozenset(), MAX_DEPTH).pieces


class _Hashed:
    """An expression as a dictionary key."""

    def __init__(self, expr: Expr) -> None:
        self.expr = expr

    def __hash__(self) -> int:
        return hash(self.expr.key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Hashed) and self.expr.key == other.expr.key


@lru_cache(maxsize=1024)
def _split(hashed: _Hashed) -> tuple[Piece, ...]:
    """The choice for an expression of rules alone; one that holds a mask or a function would be kept alive with it."""
    return _choose(hashed.expr, Order(), frozenset(), MAX_DEPTH).pieces


def _choose(expr: Expr, order: Order, masked: frozenset[tuple[object, ...]], depth: int) -> Choice:
    """The cheapest of: this order alone, or a split at one of the spread leaves."""
    if expr is NONE:
        return Choice(0, ())
    best = Choice(_cost(expr, order), (Piece(expr, order),))
    for leaf in _spread_leaves(expr, masked) if depth else ():
        candidate = _split_at(leaf, expr, order, masked, depth)
        if candidate is not None and candidate.cost < best.cost:
            best = candidate
    return best


def _split_at(leaf: Leaf, expr: Expr, order: Order, masked: frozenset[tuple[object, ...]], depth: int) -> Choice | None:
    owned = order.owning(leaf)
    signs = polarity(expr, leaf.key)
    if owned is None or True not in signs:
        return None  # met only negatively, the leaf stays a mask: nothing of the expression lies in its order
    when_true = substitute(expr, owned.grants, True)
    when_false = substitute(expr, lambda other: other.key == leaf.key, False)
    if signs == {True}:
        natural, here = when_false, masked
    else:
        natural, here = conj(when_false, disj(when_true, neg(leaf))), masked | {leaf.key}
    # in the remainder the leaf itself is true; another leaf that the order grants may still stand in when_false
    remainder = conj(when_true, neg(substitute(when_false, owned.grants, True)))
    first = _choose(natural, order, here, depth - 1)
    second = _choose(remainder, owned, masked, depth - 1)
    return Choice(first.cost + second.cost, first.pieces + second.pieces)


def _spread_leaves(expr: Expr, masked: frozenset[tuple[object, ...]]) -> list[Leaf]:
    found = {leaf.key: leaf for leaf in expr.leaves() if leaf.spread and leaf.key not in masked}
    return list(found.values())[:MAX_SPREAD]


def _cost(expr: Expr, order: Order) -> int:
    """Tiles touched and row blocks walked at the nominal length."""
    queries, keys = lay_out(order, Extent(NOMINAL, NOMINAL))
    maybe = bound(expr, queries, keys).maybe
    return line.size(maybe) + ROW_BLOCK_COST * queries.blocks
