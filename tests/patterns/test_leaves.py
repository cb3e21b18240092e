"""Each leaf alone: its rule against the oracle's, its intervals sound, its signatures never shared by unlike tiles."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import oracles
from qkv.patterns import spans
from qkv.patterns.axis import TILE, Order, lay_out
from qkv.patterns.leaf import LISTED, Extent, Intervals, Leaf
from qkv.patterns.leaves.blocks import BlockBand, BlockRows
from qkv.patterns.leaves.dense import DenseMask, PlacedWhere
from qkv.patterns.leaves.documents import Documents
from qkv.patterns.leaves.grid import Neighborhood, OnImage
from qkv.patterns.leaves.keys import COMPACT_RUNS, Keys, PeriodicKeys, Rows, runs_of
from qkv.patterns.leaves.offsets import Congruent, Offsets
from qkv.patterns.masks import TileGrid
from qkv.patterns.spans import FAR
from strategies import SMALL, noise, within

COUNT = 200  # positions that leaves with content cover
LOW, HIGH = -140, 420  # positions that the tests look at


class Example(NamedTuple):
    leaf: Leaf
    rule: oracles.Rule


def offsets(draw) -> Example:
    low, high = (draw(st.one_of(st.integers(-150, 150), st.just(far))) for far in (-FAR, FAR))
    return Example(Offsets(low, high), lambda p: (low <= p.i - p.j) & (p.i - p.j <= high))


def congruent(draw) -> Example:
    m = draw(st.sampled_from(SMALL))
    return Example(Congruent(m), lambda p: (p.i - p.j) % m == 0)


def members(draw, most: int) -> list[int]:
    return sorted(set(draw(st.lists(st.integers(0, COUNT), max_size=most))))


def keys(draw) -> Example:
    chosen = members(draw, draw(st.sampled_from([6, 60])))
    return Example(
        Keys(runs_of(np.array(chosen, dtype=np.int64))), lambda p: oracles.one_of(p.j, chosen) & (p.i == p.i)
    )


def rows(draw) -> Example:
    chosen = members(draw, draw(st.sampled_from([6, 60])))
    return Example(
        Rows(runs_of(np.array(chosen, dtype=np.int64))), lambda p: oracles.one_of(p.i, chosen) & (p.j == p.j)
    )


def periodic_keys(draw) -> Example:
    period = draw(st.sampled_from(SMALL))
    first = draw(st.integers(0, period - 1))
    return Example(PeriodicKeys(period, first), lambda p: (p.j % period >= first) & (p.i == p.i))


def documents(draw) -> Example:
    ids = torch.randint(0, draw(st.sampled_from([1, 3, 9, 80])), (COUNT,), generator=seeded(draw))
    ids = ids.sort().values if draw(st.booleans()) else ids
    return Example(Documents(ids.numpy()), within(oracles.documents(ids), (0, COUNT), (0, COUNT)))


def block_band(draw) -> Example:
    size, width = draw(st.sampled_from(SMALL)), draw(st.integers(0, 3))
    return Example(
        BlockBand(size, width),
        lambda p: (p.i // size - p.j // size <= width) & (p.j // size - p.i // size <= width),
    )


def block_rows(draw) -> Example:
    size = draw(st.sampled_from([3, 16, 33, 64, 100, 128]))
    blocks = -(-COUNT // size)
    keep = torch.rand((blocks, blocks), generator=seeded(draw)) < 0.4
    at = [part.numpy() for part in torch.nonzero(keep, as_tuple=True)]
    return Example(BlockRows(size, *at), within(oracles.blocks(keep, size), (0, blocks * size), (0, blocks * size)))


def on_image(draw) -> Example:
    height, width = draw(st.sampled_from(SHAPES))
    span = (0, height * width)
    return Example(OnImage("image", height, width), within(lambda p: (p.i == p.i) & (p.j == p.j), span, span))


def neighborhood(draw) -> Example:
    height, width = draw(st.sampled_from(SHAPES))
    kernel = draw(st.integers(1, min(height, width, 9)))
    span = (0, height * width)
    rule = within(oracles.neighborhood((height, width), kernel), span, span)
    return Example(Neighborhood("neighborhood", height, width, kernel), rule)


def placed_mask(draw) -> Example:
    extent = Extent(COUNT, COUNT, *draw(st.sampled_from([(0, 0), (-30, 0), (7, 5)])))
    keep = noise(draw(st.integers(0, 9)), draw(st.sampled_from([1, COUNT])), draw(st.sampled_from([1, COUNT])))
    spans = (extent.query_start, extent.query_start + COUNT), (extent.key_start, extent.key_start + COUNT)

    def rule(p):
        return keep[(p.i - extent.query_start) % keep.shape[0], (p.j - extent.key_start) % keep.shape[1]]

    return Example(DenseMask(keep[None, None].numpy()).bind(0, 0, extent), within(rule, *spans))


def placed_where(draw) -> Example:
    extent = Extent(3 * COUNT, 3 * COUNT, LOW, LOW)
    return Example(
        PlacedWhere(lambda b, h, i, j: (i * 3 - j + b) % 5 == h, 1, 2, extent), lambda p: (p.i * 3 - p.j + 1) % 5 == 2
    )


SHAPES = [(1, 1), (1, 90), (90, 1), (7, 11), (20, 9), (12, 16), (4, 64), (3, 70), (33, 6)]
KINDS: list[Callable[..., Example]] = [
    offsets, congruent, keys, rows, periodic_keys, documents, block_band, block_rows, on_image, neighborhood,
    placed_mask, placed_where,
]  # fmt: skip
some_examples = settings(max_examples=settings().max_examples // 4)  # of each kind of leaf
each_kind = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)


def seeded(draw) -> torch.Generator:
    return torch.Generator().manual_seed(draw(st.integers(0, 50)))


def positions(low: int, high: int) -> oracles.Pairs:
    i, j = torch.arange(low, high)[:, None], torch.arange(LOW, HIGH)
    return oracles.Pairs(0, 0, i, j, i, HIGH)


def rule_at(example: Example, pairs: oracles.Pairs) -> np.ndarray:
    shape = torch.broadcast_shapes(pairs.i.shape, pairs.j.shape)
    return torch.as_tensor(example.rule(pairs)).expand(shape).numpy()


@each_kind
@some_examples
@given(st.data(), st.integers(LOW, HIGH - 150))
def test_rule_of_a_leaf_is_the_oracles(kind, data, low):
    example, pairs = kind(data.draw), positions(low, low + 150)
    answer = example.leaf.contains(pairs.i.numpy(), pairs.j.numpy())
    assert answer.dtype == bool
    np.testing.assert_array_equal(answer, rule_at(example, pairs))


def covered(intervals: Intervals, owner: int) -> np.ndarray:
    """Which of the positions LOW .. HIGH - 1 the segment's intervals hold."""
    j, own = np.arange(LOW, HIGH), intervals.owner == owner
    assert len(intervals.owner) == len(intervals.start) == len(intervals.stop)
    spans = zip(intervals.start[own], intervals.stop[own], strict=True)
    return np.logical_or.reduce([(start <= j) & (j < stop) for start, stop in spans] or [np.zeros(len(j), dtype=bool)])


@each_kind
@some_examples
@given(
    st.data(),
    st.lists(st.tuples(st.integers(LOW, HIGH - 70), st.sampled_from([0, 1, 5, 30, 63, 69])), min_size=1, max_size=5),
)
def test_intervals_hold_what_some_see_and_only_what_all_see(kind, data, spans):
    example = kind(data.draw)
    low, length = (np.array(side) for side in zip(*spans, strict=True))
    maybe, sure = example.leaf.intervals(low, low + length)
    for owner, (start, extra) in enumerate(spans):
        seen = rule_at(example, positions(start, start + extra + 1))
        some, all_see = covered(maybe, owner), covered(sure, owner)
        assert (some >= seen.any(axis=0)).all(), "a visible key is not in maybe"
        assert (all_see <= seen.all(axis=0)).all(), "a hidden key is in sure"
        assert (all_see <= some).all()


EXACT = [offsets, keys, rows, block_band, documents, block_rows, on_image]


@pytest.mark.parametrize("kind", EXACT, ids=lambda kind: kind.__name__)
@some_examples
@given(st.data(), st.integers(LOW, HIGH - 70))
def test_intervals_of_one_query_are_exact(kind, data, query):
    """Leaves with a closed form answer a single query without doubt: decoding looks at no tile in vain."""
    example = kind(data.draw)
    leaf = example.leaf
    if isinstance(leaf, Keys) and len(leaf.runs) > COMPACT_RUNS:
        return
    if isinstance(leaf, Documents) and not leaf.contiguous:
        return
    seen = rule_at(example, positions(query, query + 1))[0]
    for intervals in leaf.intervals(np.array([query]), np.array([query])):
        np.testing.assert_array_equal(covered(intervals, 0), seen)


@each_kind
@some_examples
@given(st.data(), st.integers(LOW, HIGH - 70), st.sampled_from([0, 0, 1, 5, 69, FAR]))
def test_keys_listed_in_integers_are_what_some_see_and_only_what_all_see(kind, data, low, extra):
    """Up to the end of time too: queries yet to come, as a rolling cache asks about them."""
    example = kind(data.draw)
    maybe, sure = example.leaf.seen(low, low + extra)
    seen = rule_at(example, positions(low, low + min(extra, 600) + 1))
    some, all_see = (spans.marks(found, LOW, HIGH) for found in (maybe, sure))
    assert (some >= seen.any(axis=0)).all(), "a visible key is not in maybe"
    assert (all_see <= seen.all(axis=0)).all(), "a hidden key is in sure"
    assert (all_see <= some).all()
    for found in (maybe, sure):
        assert all(type(edge) is int and -FAR <= edge <= FAR for edge in found)
        assert len(found) % 2 == 0 and list(found) == sorted(set(found))
    if maybe is sure:
        np.testing.assert_array_equal(some, seen.any(axis=0))
        np.testing.assert_array_equal(some, seen.all(axis=0))


@pytest.mark.parametrize("kind", [*EXACT, neighborhood], ids=lambda kind: kind.__name__)
@some_examples
@given(st.data(), st.integers(LOW, HIGH - 70))
def test_keys_of_one_query_are_listed_without_doubt(kind, data, query):
    leaf = kind(data.draw).leaf
    inside = not isinstance(leaf, Neighborhood) or 0 <= query < leaf.height * leaf.width
    if inside and not (isinstance(leaf, Documents) and not leaf.contiguous):
        maybe, sure = leaf.seen(query, query)
        assert maybe is sure


@each_kind
@some_examples
@given(st.data(), st.integers(LOW, HIGH - 1), st.integers(LOW, HIGH - 1), st.sampled_from([1, 7, 64, 150]))
def test_marks_of_a_query_are_the_rule(kind, data, query, start, count):
    example = kind(data.draw)
    stop = min(start + count, HIGH)
    marks = example.leaf.marks(query, start, stop)
    assert marks.dtype == bool
    want = rule_at(example, positions(query, query + 1))[0, start - LOW : stop - LOW]
    np.testing.assert_array_equal(marks, want)


def test_more_runs_than_are_listed_are_known_by_their_hull():
    leaf = Keys(runs_of(np.arange(0, 3 * LISTED, 2)))
    assert leaf.seen(5, 5) == ((0, 3 * LISTED - 1), ())
    np.testing.assert_array_equal(leaf.marks(5, 1, 9), np.arange(1, 9) % 2 == 0)
    rows = BlockRows(2, np.zeros(LISTED + 1, dtype=np.int64), np.arange(0, 2 * LISTED + 2, 2))
    assert rows.seen(1, 1) == ((-FAR, FAR), ())
    np.testing.assert_array_equal(rows.marks(1, 1, 12), np.arange(1, 12) // 2 % 2 == 0)


@st.composite
def orders(draw) -> Order:
    """Natural order half the time, else by residues, documents, gathered keys or gathered rows."""
    kind = draw(st.sampled_from(["natural", "natural", "residues", "documents", "keys", "rows", "all"]))
    ids = torch.randint(0, draw(st.sampled_from([2, 7, 70])), (COUNT,), generator=seeded(draw)).numpy()
    gathered = runs_of(np.flatnonzero(noise(draw(st.integers(0, 9)), COUNT, share=0.6).numpy()))
    modulus = draw(st.sampled_from([2, 3, 7, 16, 33, 64, 100]))
    return {
        "natural": Order(),
        "residues": Order(modulus),
        "documents": Order(documents=Documents(ids)),
        "keys": Order(keys=draw(st.sampled_from([Keys(gathered), PeriodicKeys(5, 2)]))),
        "rows": Order(rows=Rows(gathered)),
        "all": Order(modulus, None, Keys(gathered), Rows(gathered)),
    }[kind]


@each_kind
@some_examples
@given(st.data(), orders(), st.sampled_from([0, 1, -37, 64, 20]), st.sampled_from([65, 129, 200, 300]))
def test_tiles_of_one_signature_have_the_same_bits(kind, data, order, start, length):
    """The tiles of all blocks, evaluated one by one; in natural order they go on past the end, as masks do."""
    example = kind(data.draw)
    queries, key_axis = lay_out(order, Extent(length, data.draw(st.sampled_from([130, 200, 257])), start, 0))
    tiles = queries.blocks * key_axis.blocks
    if not tiles:
        return
    number = np.arange(tiles)
    grid = TileGrid(queries, key_axis, number // key_axis.blocks, number % key_axis.blocks)
    i, j = grid.positions(number)
    bits = np.broadcast_to(example.leaf.contains(i, j), (tiles, TILE, TILE))
    signature = [np.broadcast_to(part, (tiles,)) for part in example.leaf.signature(grid)]
    kinds = queries.kinds()[grid.row][:, :, None], key_axis.kinds()[grid.col][:, None, :]
    matters = (kinds[0] != 1) & (kinds[1] != 1)  # bits in padding are cut from every mask
    seen: dict[tuple[int, ...], int] = {}
    for tile in range(tiles):
        first = seen.setdefault(tuple(int(part[tile]) for part in signature), tile)
        either = matters[tile] | matters[first]  # either may be evaluated and stand for the other
        np.testing.assert_array_equal(bits[tile][either], bits[first][either])


@pytest.mark.parametrize(
    "leaf, most",
    [
        (Offsets(0, FAR), 5),
        (Offsets(-64, 255), 11),
        (Congruent(64), 1),
        (Congruent(48), 3),
        (Keys(np.array([[0, 4]])), 2),
        (Rows(np.array([[0, 4]])), 2),
        (BlockBand(128, 0), 2 * 9),
        (BlockRows(64, np.arange(30), np.arange(30)), 2),
        (Documents(np.arange(1920) // 384), 20),
    ],
    ids=lambda x: type(x).__name__,
)
def test_few_signatures_in_natural_order(leaf, most):
    """The number of different tiles does not grow with the length."""
    for blocks in (30, 60):
        queries, key_axis = lay_out(Order(), Extent(TILE * blocks, TILE * blocks))
        number = np.arange(blocks * blocks)
        grid = TileGrid(queries, key_axis, number // blocks, number % blocks)
        assert len(set(zip(*(part.tolist() for part in leaf.signature(grid)), strict=True))) <= most


def test_runs_of_sorted_numbers():
    assert runs_of(np.array([1, 2, 3, 7, 9, 10])).tolist() == [[1, 4], [7, 8], [9, 11]]
    assert runs_of(np.array([], dtype=np.int64)).shape == (0, 2)


def test_members_of_one_sided_leaves():
    assert Keys(np.array([[1, 4], [7, 8]])).members(2, 8).tolist() == [2, 3, 7]
    assert Keys(np.array([[1, 4]])).members(5, 8).tolist() == []
    assert PeriodicKeys(4, 3).members(2, 12).tolist() == [3, 7, 11]
    assert PeriodicKeys(4, 2).members(-3, 4).tolist() == [-2, -1, 2, 3]


def test_which_leaves_are_spread():
    """Spread leaves are those that own an order: residues, periodic or scattered sets, ids that are not runs."""
    few, many = np.array([[0, 4]]), np.arange(2 * (COMPACT_RUNS + 1)).reshape(-1, 2) * 3
    compact = [Offsets(0, 5), Keys(few), Rows(few), BlockBand(4, 0), Documents(np.array([0, 0, 5, 5, 2]))]
    spread = [Congruent(4), PeriodicKeys(4, 3), Keys(many), Rows(many), Documents(np.array([0, 1, 0]))]
    assert not any(leaf.spread for leaf in compact)
    assert all(leaf.spread for leaf in spread)
