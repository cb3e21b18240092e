"""Sets of tiles on the line against Python's own sets."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from qkv.patterns import line

POINTS = st.sets(st.integers(-3, 60), max_size=40)
INTERVALS = st.lists(st.tuples(st.integers(-5, 50), st.integers(-5, 60)), max_size=12)


def as_line(points: set[int]) -> np.ndarray:
    """The boundaries of a set, written the slow way."""
    edges = [x for x in range(min(points), max(points) + 2) if (x in points) != (x - 1 in points)] if points else []
    return np.array(edges, dtype=np.int64)


def columns(intervals: list[tuple[int, int]]) -> tuple[np.ndarray, np.ndarray]:
    table = np.array(intervals, dtype=np.int64).reshape(-1, 2)
    return table[:, 0], table[:, 1]


def is_canonical(boundaries: np.ndarray) -> bool:
    return boundaries.dtype == np.int64 and len(boundaries) % 2 == 0 and bool((np.diff(boundaries) > 0).all())


@given(INTERVALS)
def test_union_is_the_points_of_all_intervals(intervals):
    made = line.union(*columns(intervals))
    assert is_canonical(made)
    assert made.tolist() == as_line({x for a, b in intervals for x in range(a, b)}).tolist()


@given(POINTS, POINTS)
def test_set_operations(a, b):
    for operation, want in [(line.both, a & b), (line.either, a | b), (line.minus, a - b)]:
        made = operation(as_line(a), as_line(b))
        assert is_canonical(made)
        assert made.tolist() == as_line(want).tolist()


@given(POINTS, POINTS, POINTS)
def test_any_operation_on_three_sets_point_by_point(a, b, c):
    def majority(x, y, z):
        return (x & y) | (y & z) | (x & z)

    made = line.combine(majority, *map(as_line, (a, b, c)))
    assert made.tolist() == as_line((a & b) | (b & c) | (a & c)).tolist()
    made = line.combine(lambda x, y, z: x ^ y ^ z, *map(as_line, (a, b, c)))
    assert made.tolist() == as_line(a ^ b ^ c).tolist()


@given(POINTS)
def test_size_and_expansion(points):
    assert line.size(as_line(points)) == len(points)
    assert line.expand(as_line(points)).tolist() == sorted(points)


@pytest.mark.parametrize(
    "intervals, boundaries",
    [
        ([], []),
        ([(3, 3)], []),
        ([(5, 2)], []),
        ([(1, 3), (3, 5)], [1, 5]),  # touching runs become one
        ([(1, 3), (4, 5)], [1, 3, 4, 5]),  # the gap between two rows of tiles holds them apart
        ([(0, 9), (2, 3), (4, 8)], [0, 9]),
        ([(4, 6), (0, 1), (5, 9), (1, 1)], [0, 1, 4, 9]),
    ],
)
def test_union_by_hand(intervals, boundaries):
    assert line.union(*columns(intervals)).tolist() == boundaries


def test_the_empty_set():
    assert line.both(line.EMPTY, line.EMPTY).tolist() == []
    assert line.either(line.EMPTY, np.array([2, 5])).tolist() == [2, 5]
    assert line.minus(line.EMPTY, np.array([2, 5])).tolist() == []
    assert line.expand(line.EMPTY).tolist() == []
    assert line.size(line.EMPTY) == 0
