"""Sets of positions in plain integers against Python's own sets."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from qkv.patterns import spans
from qkv.patterns.spans import FAR, Spans

POINTS = st.sets(st.integers(-3, 60), max_size=40)
WORLD = range(-20, 100)


def of(points: set[int]) -> Spans:
    """The boundaries of a set, written the slow way."""
    edges = [x for x in range(min(points), max(points) + 2) if (x in points) != (x - 1 in points)] if points else []
    return tuple(edges)


def within(found: Spans) -> set[int]:
    """The positions of a set in the part of the line that the tests look at."""
    assert len(found) % 2 == 0 and list(found) == sorted(set(found))
    return {x for x in WORLD if any(start <= x < stop for start, stop in zip(found[::2], found[1::2], strict=True))}


@given(POINTS, POINTS)
def test_set_operations(a, b):
    for operation, want in [(spans.both, a & b), (spans.either, a | b), (spans.minus, a - b)]:
        assert operation(of(a), of(b)) == of(want)
        everything = set(WORLD)
        others = spans.opposite(of(a))
        assert (
            within(operation(others, of(b)))
            == {
                spans.both: b - a,
                spans.either: (everything - a) | b,
                spans.minus: everything - a - b,
            }[operation]
        )


@given(POINTS)
def test_the_opposite_of_the_opposite_is_the_set(a):
    assert within(spans.opposite(of(a))) == set(WORLD) - a
    assert spans.opposite(spans.opposite(of(a))) == of(a)
    assert spans.size(of(a)) == len(a)
    assert [x for start, stop in spans.pieces(of(a)) for x in range(start, stop)] == sorted(a)


def test_ends_of_the_line():
    assert spans.opposite(spans.EVERYTHING) == spans.NOTHING
    assert spans.opposite(spans.NOTHING) == spans.EVERYTHING
    assert spans.span(-FAR - 9, FAR + 9) == spans.EVERYTHING
    assert spans.span(4, 4) == spans.span(5, 4) == spans.NOTHING
    assert spans.opposite((-FAR, 3)) == (3, FAR)


@given(POINTS, st.integers(0, 9))
def test_bridged_fills_the_gaps_that_are_short_enough(a, gap):
    want = set(a)
    for left, right in pairwise(sorted(a)):
        if right - left - 1 <= gap:
            want |= set(range(left, right))
    assert spans.bridged(of(a), gap) == of(want)


@given(POINTS, st.integers(-9, 70), st.integers(0, 30))
def test_marks(a, start, count):
    found = spans.marks(of(a), start, start + count)
    assert found.dtype == bool
    assert found.tolist() == [x in a for x in range(start, start + count)]


@given(st.lists(st.tuples(st.integers(-5, 50), st.integers(-5, 60)), max_size=12))
def test_union_of_runs_in_any_order(runs):
    starts, stops = (np.array([run[side] for run in runs], dtype=np.int64) for side in (0, 1))
    assert spans.sorted_union(starts, stops) == of({x for start, stop in runs for x in range(start, stop)})
