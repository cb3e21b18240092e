"""Which keys a rolling cache may drop: none that a later query sees, and as many as the rules tell apart."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import qkv
from qkv.errors import DTypeError, ValueOutOfRange
from strategies import FIXED, Case, Sizes, cases, choice

LENGTH = 420  # tokens in all: what is asked reaches no further


def kept(pattern: qkv.Pattern, position: int) -> np.ndarray:
    """The answer as one boolean a key before the position."""
    ranges = pattern.retained(position)
    edges = [edge for one in ranges for edge in one]
    assert all(type(edge) is int for edge in edges)
    assert edges == sorted(set(edges)), "ranges are not sorted, disjoint and apart"
    assert not edges or (edges[0] >= 0 and edges[-1] <= position)
    found = np.zeros(position, dtype=bool)
    for start, stop in ranges:
        found[start:stop] = True
    return found


def needed(pattern: qkv.Pattern, position: int, length: int = LENGTH, **sizes: int) -> np.ndarray:
    """By brute force: the keys before the position that a query from there on sees, in a sequence of that length."""
    dense = pattern.to_dense(length, **sizes).numpy()
    return dense.reshape(-1, length, length)[:, position:, :position].any(axis=(0, 1))


ASKED = Sizes(2, 2, 193, 193, (0,))
POSITIONS = choice(0, 1, 17, 63, 64, 65, 100, 128, 192)


@given(cases(ASKED), POSITIONS)
def test_no_key_is_dropped_that_a_later_query_sees(case: Case, position: int):
    want = needed(case.pattern, position, ASKED.keys, batch=2, heads=2)
    assert (kept(case.pattern, position) >= want).all()


@given(cases(ASKED, 3, st.one_of(*FIXED.values())), POSITIONS)
def test_no_key_is_dropped_that_a_query_sees_far_ahead(case: Case, position: int):
    want = needed(case.pattern, position, batch=1, heads=2)
    assert (kept(case.pattern, position) >= want).all()


TIGHT = {
    "full()": [(0, 300)],
    "causal()": [(0, 300)],
    "~full()": [],
    "~causal()": [],
    "window(20)": [(280, 300)],
    "window(20, 5)": [(280, 300)],
    "window(0)": [],
    "window(400)": [(0, 300)],
    "sliding_window(64)": [(237, 300)],
    "causal() & window(20)": [(280, 300)],
    "causal() & (window(20) | prefix(4))": [(0, 4), (280, 300)],
    "window(20) | global_tokens(4)": [(0, 4), (280, 300)],
    "window(20) | global_tokens([3, 4, 90, 285])": [(3, 5), (90, 91), (280, 300)],
    "window(20) | global_tokens([3, 400])": [(0, 300)],  # a global query is yet to come
    f"window(20) | global_tokens({list(range(0, 100, 5))})": [*((n, n + 1) for n in range(0, 100, 5)), (280, 300)],
    "window(20) | prefix(7)": [(0, 7), (280, 300)],
    "prefix(400)": [(0, 300)],
    "longformer(40, 2)": [(0, 2), (280, 300)],
    "block_local(128)": [(256, 300)],
    "block_local(100)": [],
    "block_local(50) | window(3)": [(297, 300)],
    "dilated(5, dilation=8)": [(260, 300)],
    "causal() & window(30) & block_local(128)": [(270, 300)],
    "window(30) - window(10)": [(270, 300)],
    "causal() - prefix(8)": [(8, 300)],
    "(window(30) | prefix(9)) - global_tokens([2, 3])": [(0, 2), (4, 9), (270, 300)],
    "~window(None, 0) | window(9)": [(291, 300)],
}


@pytest.mark.parametrize("text", TIGHT)
def test_what_can_be_dropped_is_dropped(text):
    pattern = qkv.parse(text)
    assert pattern.retained(300) == tuple(TIGHT[text])
    np.testing.assert_array_equal(kept(pattern, 300), needed(pattern, 300, 760))


def test_documents_are_dropped_when_they_are_over():
    packed = qkv.documents(cu_seqlens=[0, 100, 250, 420])
    for pattern in (packed, packed & qkv.causal(), packed & qkv.window(30)):
        for position in (0, 99, 100, 101, 249, 300, 419, 420):
            np.testing.assert_array_equal(kept(pattern, position), needed(pattern, position))
    assert packed.retained(500) == ()
    assert (packed | qkv.prefix(3)).retained(250) == ((0, 3),)


def test_heads_keep_what_one_of_them_needs():
    pattern = qkv.per_head([qkv.window(20), qkv.window(5) | qkv.prefix(3)])
    assert pattern.retained(100) == ((0, 3), (80, 100))
    assert (~pattern).retained(100) == ((0, 100),)
    assert (pattern & (qkv.window(9) | qkv.prefix(2))).retained(100) == ((0, 2), (91, 100))
    np.testing.assert_array_equal(kept(pattern, 100), needed(pattern, 100, heads=2))


def test_what_the_rules_do_not_tell_apart_is_kept():
    ids = torch.arange(200) % 3
    for pattern in (qkv.where(lambda b, h, i, j: j > i), qkv.mask(keep=torch.zeros(200, 200, dtype=torch.bool)),
                    qkv.key_lengths([3]), qkv.random_blocks(2, 64, 0), qkv.strided(8), qkv.fixed(16),
                    qkv.documents(ids), qkv.documents(ids.repeat(2, 1))):  # fmt: skip
        assert pattern.retained(100) == ((0, 100),)
        assert (pattern & qkv.window(10)).retained(100) == ((90, 100),)


def test_the_farther_the_sooner_forgotten():
    """What is dropped at one position is never asked for again at a later one."""
    for text in [*TIGHT, "strided(16)", "bigbird(3, 4, 1, 0)"]:
        pattern = qkv.parse(text)
        before = kept(pattern, 0)
        for position in range(1, 150):
            now = kept(pattern, position)
            assert not (now[:-1] & ~before).any()
            before = now


def test_a_position_is_a_number_of_tokens():
    with pytest.raises(ValueOutOfRange, match="`position` must be at least 0"):
        qkv.causal().retained(-1)
    with pytest.raises(DTypeError, match="`position` must be an integer"):
        qkv.causal().retained(1.5)
    assert qkv.causal().retained(0) == ()
    assert qkv.window(4).retained(10**9) == ((10**9 - 4, 10**9),)
