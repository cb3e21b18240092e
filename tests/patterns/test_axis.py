"""Orders of tokens: slots and rows are one to one, classes lie as they should, positions are found."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from qkv.patterns.axis import BEYOND, PADDING, ROW, TILE, Axis, Natural, Order, lay_out
from qkv.patterns.leaf import Extent
from qkv.patterns.leaves.documents import Documents
from qkv.patterns.leaves.keys import Keys, PeriodicKeys, Rows, runs_of
from qkv.patterns.leaves.offsets import Congruent, Offsets
from strategies import LENGTHS

LENGTH, START = st.sampled_from(LENGTHS), st.sampled_from([0, 1, 5, 64, -1, -3, -70, 200])


@st.composite
def orders(draw) -> Order:
    """Every kind of order, and those that go together."""
    gathered = np.unique(draw(st.lists(st.integers(-5, 260), max_size=30)))
    keys = draw(st.sampled_from([None, Keys(runs_of(gathered)), PeriodicKeys(7, 5), PeriodicKeys(64, 63)]))
    rows = draw(st.sampled_from([None, Rows(runs_of(gathered))]))
    if draw(st.booleans()):
        ids = np.random.default_rng(draw(st.integers(0, 9))).integers(0, draw(st.sampled_from([1, 4, 60])), 200)
        return Order(documents=Documents(ids), keys=keys, rows=rows)
    return Order(draw(st.sampled_from([1, 2, 3, 16, 33, 64, 300])), None, keys, rows)


@st.composite
def layouts(draw) -> tuple[Order, Extent]:
    return draw(orders()), Extent(draw(LENGTH), draw(LENGTH), draw(START), draw(st.sampled_from([0, 0, 5, -3])))


def positions_of(axis: Axis) -> np.ndarray:
    """The position of each slot, with a marker where there is none."""
    positions, kinds = axis.positions(np.arange(axis.blocks)), axis.kinds()
    assert positions.shape == kinds.shape == (axis.blocks, TILE)
    return np.where(kinds == ROW, positions, 10**9).ravel()


def class_of(order: Order, position: int) -> object:
    """None where a position belongs to no class."""
    if order.documents is not None:
        ids = order.documents.ids
        return int(ids[position]) if 0 <= position < len(ids) else None
    return position % order.modulus


def chosen(order: Order, extent: Extent) -> tuple[list[int], list[int]]:
    """Which positions each side must hold: those that are gathered, of classes that both sides have."""
    queries = range(extent.query_start, extent.query_start + extent.queries)
    keys = range(extent.key_start, extent.key_start + extent.keys)
    if order.rows is not None:
        queries = [i for i in queries if order.rows.contains(np.array(i), np.array(0))]
    if order.keys is not None:
        keys = [j for j in keys if order.keys.contains(np.array(0), np.array(j))]
    shared = {class_of(order, i) for i in queries} & {class_of(order, j) for j in keys} - {None}
    if order.documents is None and order.modulus == 1:
        return list(queries), list(keys)
    return [i for i in queries if class_of(order, i) in shared], [j for j in keys if class_of(order, j) in shared]


@given(layouts())
def test_each_chosen_row_has_one_slot(layout):
    order, extent = layout
    for axis, want in zip(lay_out(order, extent), chosen(order, extent), strict=True):
        found = positions_of(axis)
        assert sorted(found[found < 10**9].tolist()) == want
        assert int(axis.row_counts().sum()) == len(want)
        kinds = axis.kinds().ravel()
        assert (kinds[: axis.count] != BEYOND).all() and (kinds[axis.count :] == BEYOND).all()
        assert axis.blocks == -(-axis.count // TILE)


@given(layouts())
def test_classes_start_on_tiles_and_none_straddles(layout):
    """Longer than half a tile: whole tiles of its own; shorter: within one tile. One padding slot in two at most."""
    order, extent = layout
    if order.documents is None and order.modulus == 1:
        return
    for axis in lay_out(order, extent):
        found = positions_of(axis)
        slots: dict[object, list[int]] = {}
        for slot in np.flatnonzero(found < 10**9).tolist():
            slots.setdefault(class_of(order, int(found[slot])), []).append(slot)
        for members in slots.values():
            assert members == list(range(members[0], members[0] + len(members)))  # one run of slots ...
            assert (np.diff(found[members]) > 0).all()  # ... in the order of positions
            if len(members) > TILE // 2:
                assert members[0] % TILE == 0
                last = members[-1] // TILE
                assert all(other is members or all(s // TILE != last for s in other) for other in slots.values())
            else:
                assert members[0] // TILE == members[-1] // TILE
        assert axis.count <= 2 * sum(map(len, slots.values()))


@given(layouts())
def test_both_sides_number_classes_alike(layout):
    order, extent = layout
    if order.documents is None and order.modulus == 1:
        return
    queries, keys = lay_out(order, extent)
    numbers: dict[object, set[int]] = {}
    for axis in (queries, keys):
        found = positions_of(axis)
        for slot in np.flatnonzero(found < 10**9):
            numbers.setdefault(class_of(order, int(found[slot])), set()).add(int(axis.group[slot]))
    assert all(len(named) == 1 for named in numbers.values())
    assert len(set.union(set(), *numbers.values())) == len(numbers)


@given(layouts(), st.integers(-80, 300), st.integers(-80, 300))
def test_ranges_of_positions_are_found_as_ranges_of_slots(layout, begin, end):
    order, extent = layout
    for axis in lay_out(order, extent):
        found, segments = positions_of(axis), axis.segments()
        for group in set(segments.group.tolist()):
            a, b = (int(edge[0]) for edge in axis.slots(np.array([group]), np.array([begin]), np.array([end])))
            own = np.zeros(len(found), dtype=bool) if not isinstance(axis, Natural) else found < 10**9
            if not isinstance(axis, Natural):
                own[: axis.count] = axis.group == group
            want = np.flatnonzero(own & (begin <= found) & (found < end))
            assert list(range(a, b)) == want.tolist()


@given(layouts())
def test_segments_are_the_pieces_of_blocks_in_one_class(layout):
    order, extent = layout
    queries, _ = lay_out(order, extent)
    found, kinds, covered = positions_of(queries).reshape(-1, TILE), queries.kinds(), 0
    segments = queries.segments()
    assert (np.diff(segments.block) >= 0).all()
    for block, group, low, high, alone in zip(*map(np.ndarray.tolist, segments), strict=True):
        own = kinds[block] == ROW
        if not isinstance(queries, Natural):
            numbers = np.append(queries.group, np.full(TILE, -1))[block * TILE : (block + 1) * TILE]
            own &= numbers == group
        assert (found[block][own].min(), found[block][own].max()) == (low, high)
        assert alone == ((kinds[block] != BEYOND) == own).all()
        covered += int(own.sum())
    assert covered == int(queries.row_counts().sum())


def test_natural_order_goes_on_past_the_end():
    """An edge tile's bits may stand for an inner tile's: its positions continue."""
    axis = Natural(10, 70)
    assert axis.positions(np.array([1])).ravel().tolist() == list(range(74, 138))
    assert (axis.kinds()[1] == [ROW] * 6 + [BEYOND] * 58).all()
    assert axis.row_counts().tolist() == [64, 6]


def test_one_query_takes_its_own_class_of_keys():
    """With L = 1 the key axis holds S / m slots."""
    queries, keys = lay_out(Order(modulus=64), Extent(1, 6400, 6399, 0))
    assert (queries.count, keys.count) == (1, 128)
    assert positions_of(keys)[:100].tolist() == list(range(63, 6400, 64))


def test_short_classes_share_a_tile():
    """1,000 classes of four or five: sixteen or eight to a tile."""
    axis, _ = lay_out(Order(modulus=1000), Extent(4500, 4500))
    assert axis.blocks == -(-(500 * 8 + 500 * 4) // TILE)
    assert (axis.kinds() == PADDING).sum() == 500 * 3


def test_what_an_order_may_own():
    documents, other = Documents(np.array([0, 1, 0])), Documents(np.array([1, 1, 0]))
    keys, rows = Keys(np.array([[1, 3]])), Rows(np.array([[1, 3]]))
    order = Order().owning(Congruent(4))
    assert order == Order(4)
    assert order.owning(Congruent(6)) == Order(12)
    assert order.owning(documents) is None
    assert Order().owning(documents).owning(Congruent(4)) is None
    assert Order().owning(documents).owning(other) is None
    assert order.owning(keys).owning(rows) == Order(4, None, keys, rows)
    assert Order().owning(keys).owning(PeriodicKeys(4, 3)) is None
    assert Order().owning(rows).owning(rows) is None
    assert Order().owning(Offsets(0, 5)) is None


def test_what_an_order_grants():
    keys = Keys(np.array([[1, 3]]))
    order = Order(12, None, keys)
    assert [order.grants(Congruent(m)) for m in (1, 4, 12, 5, 24)] == [True, True, True, False, False]
    assert order.grants(Keys(np.array([[1, 3]]))) and not order.grants(Keys(np.array([[1, 4]])))
    assert not order.grants(Rows(np.array([[1, 3]])))
    assert order.class_leaf().key == Congruent(12).key
    assert Order().class_leaf() is None
    documents = Documents(np.array([0, 1, 0]))
    assert Order(documents=documents).class_leaf() is documents


@pytest.mark.parametrize("start", [0, 7, -5])
def test_natural_order_is_taken_where_nothing_is_owned(start):
    queries, keys = lay_out(Order(), Extent(100, 90, start, 0))
    assert isinstance(queries, Natural) and isinstance(keys, Natural)
    assert (queries.start, queries.count, keys.start, keys.count) == (start, 100, 0, 90)
