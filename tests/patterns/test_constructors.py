"""Every constructor: its rule element by element at any lengths and offsets, its checks, and what it refuses."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

import oracles
import qkv
from qkv.errors import DTypeError, MaskError, QkvError, ShapeError, UnknownName, ValueOutOfRange
from qkv.patterns.leaf import Extent
from strategies import noise, within

TABLE = [
    (qkv.full(), oracles.full()),
    (qkv.causal(), oracles.causal()),
    (qkv.window(0), oracles.window(0)),
    (qkv.window(3), oracles.window(3)),
    (qkv.window(3, 2), oracles.window(3, 2)),
    (qkv.window(0, 4), oracles.window(0, 4)),
    (qkv.window(None), oracles.window(None)),
    (qkv.window(None, 2), oracles.window(None, 2)),
    (qkv.window(2, None), oracles.window(2, None)),
    (qkv.window(None, None), oracles.full()),
    (qkv.window(2**31 + 5), oracles.causal()),
    (qkv.window(2**70, 2**70), oracles.full()),
    (qkv.sliding_window(1), oracles.window(0)),
    (qkv.sliding_window(4), oracles.sliding_window(4)),
    (qkv.sliding_window(2**70), oracles.causal()),
    (qkv.dilated(2, dilation=3), oracles.dilated(2, dilation=3)),
    (qkv.dilated(2, 1, dilation=3), oracles.dilated(2, 1, dilation=3)),
    (qkv.dilated(0, 2, dilation=4), oracles.dilated(0, 2, dilation=4)),
    (qkv.dilated(4, 4, dilation=1), oracles.window(4, 4)),
    (qkv.dilated(2**70, dilation=5), oracles.dilated(10**6, dilation=5)),
    (qkv.strided(1), oracles.causal()),
    (qkv.strided(4), oracles.strided(4)),
    (qkv.strided(64), oracles.strided(64)),
    (qkv.sparse_transformer(5), oracles.strided(5)),
    (qkv.fixed(1), oracles.causal()),
    (qkv.fixed(4), oracles.fixed(4)),
    (qkv.fixed(5, 2), oracles.fixed(5, 2)),
    (qkv.fixed(3, 3), oracles.causal()),
    (qkv.global_tokens(0), oracles.opposite(oracles.full())),
    (qkv.global_tokens(2), oracles.global_tokens(2)),
    (qkv.global_tokens([4, 1]), oracles.global_tokens([4, 1])),
    (qkv.global_tokens(torch.tensor([8])), oracles.global_tokens([8])),
    (qkv.prefix(0), oracles.opposite(oracles.full())),
    (qkv.prefix(3), oracles.prefix(3)),
    (qkv.causal() | qkv.prefix(3), lambda p: (p.j <= p.i) | (p.j < 3)),
    (qkv.block_local(1), oracles.window(0)),
    (qkv.block_local(4), oracles.block_local(4)),
    (qkv.longformer(0, 0), oracles.window(0)),
    (qkv.longformer(4, 1), oracles.longformer(4, 1)),
    (qkv.longformer(5, [2, 6]), oracles.longformer(5, [2, 6])),
    (qkv.bigbird(1, 2, 0, 0, block_size=3), oracles.either(oracles.block_local(3), oracles.global_tokens(2))),
    (~qkv.strided(3), oracles.opposite(oracles.strided(3))),
]
SHAPES = [(9, 9, None), (1, 9, None), (4, 11, None), (11, 4, None), (9, 9, 3), (9, 9, -4), (9, 9, 40), (67, 130, None)]
each_shape = pytest.mark.parametrize("L, S, offset", SHAPES)


@each_shape
@pytest.mark.parametrize("pattern, rule", TABLE, ids=[str(row[0]) for row in TABLE])
def test_constructors_are_their_rules(pattern, rule, L, S, offset):
    want = oracles.dense(rule, (1, 1, L, S), offset)[0, 0]
    assert torch.equal(pattern.to_dense(L, S, query_offset=offset), want)
    assert pattern.plan(L, S, query_offset=offset).pairs == want.sum()


def test_counts_of_keys_a_query():
    """`window` counts its sides without the query, `sliding_window` with it; a dilated window counts its steps."""
    last = {
        "window(5)": 6, "window(5, 2)": 8, "sliding_window(5)": 5, "dilated(5, 2, dilation=3)": 8, "strided(10)": 15,
        "fixed(10, 2)": 15, "longformer(8, 0)": 9, "longformer(9, 0)": 9,
    }  # fmt: skip
    for text, keys in last.items():
        assert int(qkv.parse(text).to_dense(100)[54].sum()) == keys, text


def test_queries_stand_at_the_end_of_the_keys_unless_told_otherwise():
    def seen(pattern, **where):
        return [row.nonzero().flatten().tolist() for row in pattern.to_dense(2, 5, **where)]

    assert seen(qkv.causal()) == seen(qkv.causal(align="bottom_right")) == [[0, 1, 2, 3], [0, 1, 2, 3, 4]]
    assert seen(qkv.causal(align="top_left")) == seen(qkv.causal(), query_offset=0) == [[0], [0, 1]]
    assert seen(qkv.sliding_window(2)) == [[2, 3], [3, 4]]
    assert seen(qkv.causal(align="top_left") & qkv.window(0)) == [[0], [1]]
    assert seen(qkv.causal(), query_offset=-1) == [[], [0]]
    assert qkv.causal().align is None
    assert (qkv.window(3) - qkv.causal(align="top_left")).align == "top_left"
    assert (~qkv.causal(align="top_left")).align == "top_left"
    assert (qkv.causal() & qkv.causal(align="bottom_right")).align == "bottom_right"


@pytest.mark.parametrize("operation", ["__and__", "__or__", "__sub__"])
def test_two_alignments_do_not_go_together(operation):
    one, other = qkv.causal(align="top_left"), qkv.window(3) & qkv.causal(align="bottom_right")
    with pytest.raises(MaskError, match=r"agree on `align`.*'top_left'.*'bottom_right'.*query_offset"):
        getattr(one, operation)(other)
    with pytest.raises(MaskError, match="agree on `align`"):
        qkv.per_head([one, other])


# --- blocks drawn at random ---


@each_shape
@pytest.mark.parametrize(
    "arguments", [(1, 4, 0), (2, 3, 7), (3, 16, 2**64 - 1), (9, 4, 5), (2, 3, 7, True), (9, 64, 1, True)]
)
def test_random_blocks_are_drawn_by_the_rule(arguments, L, S, offset):
    first = S - L if offset is None else offset
    rule = within(oracles.random_blocks(*arguments), (0, max(first + L, 0)))
    want = oracles.dense(rule, (1, 1, L, S), offset)[0, 0]
    assert torch.equal(qkv.random_blocks(*arguments).to_dense(L, S, query_offset=offset), want)


def test_random_blocks_keep_their_draws_in_longer_calls_and_in_decoding():
    pattern = qkv.random_blocks(2, 4, 3)
    whole = pattern.to_dense(50)
    assert torch.equal(pattern.to_dense(23), whole[:23, :23])
    assert torch.equal(pattern.to_dense(7, 50), whole[43:])
    for i in range(50):
        assert torch.equal(pattern.to_dense(1, i + 1)[0], whole[i, : i + 1])
        assert torch.equal(pattern.to_dense(1, 50, query_offset=i)[0], whole[i])
    assert not torch.equal(qkv.random_blocks(2, 4, 4).to_dense(50), whole)


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("count", [1, 3, 20])
def test_random_blocks_are_distinct_and_as_many_as_asked(count, ahead):
    dense = qkv.random_blocks(count, 4, 1, ahead=ahead).to_dense(64)
    by_block = dense.reshape(16, 4, 16, 4).float().mean((1, 3))
    candidates = torch.full((16,), 16) if ahead else torch.arange(1, 17)
    assert torch.equal(by_block.sum(1), candidates.clamp(max=count).float())
    assert set(by_block.flatten().tolist()) <= {0.0, 1.0}
    assert ahead or not torch.triu(by_block, 1).any()


def test_more_random_blocks_than_there_are_cost_nothing_more():
    assert qkv.random_blocks(2_000, 16, 0).count(100) == qkv.random_blocks(7, 16, 0).count(100)


def test_random_blocks_spread_over_their_candidates():
    """Each of 256 candidates is drawn about equally often: 4 of 256, over 4,096 rows, within five deviations."""
    hits = sum(qkv.random_blocks(4, 1, seed, ahead=True).to_dense(256).sum(0) for seed in range(16))
    assert ((hits - 64).abs() < 5 * 64**0.5).all()
    assert hits.sum() == 4096 * 4


@each_shape
def test_bigbird_is_band_globals_and_random_blocks(L, S, offset):
    first = S - L if offset is None else offset
    drawn = within(oracles.random_blocks(2, 4, 5, True), (0, max(first + L, 0)))
    near = oracles.either(
        oracles.block_local(4),
        lambda p: (p.i // 4 - p.j // 4 == 1) | (p.j // 4 - p.i // 4 == 1),
        oracles.global_tokens(3),
    )
    want = oracles.dense(oracles.either(near, drawn), (1, 1, L, S), offset)[0, 0]
    assert torch.equal(qkv.bigbird(3, 3, 2, 5, block_size=4).to_dense(L, S, query_offset=offset), want)


# --- images ---

GRIDS = [(1, 1), (1, 7), (7, 1), (4, 6), (6, 4), (8, 8), (5, 9), (12, 12)]


@pytest.mark.parametrize("grid, kernel", [(g, k) for g in GRIDS for k in range(1, min(*g, 6) + 1)])
def test_neighborhoods_always_hold_kernel_squared_keys(grid, kernel):
    pixels = grid[0] * grid[1]
    dense = qkv.neighborhood(grid, kernel).to_dense(pixels)
    assert (dense.sum(1) == kernel * kernel).all()
    assert torch.equal(dense, oracles.dense(oracles.neighborhood(grid, kernel), (1, 1, pixels, pixels))[0, 0])
    assert dense.diagonal().all()
    y, x = grid[0] // 2, grid[1] // 2
    if kernel <= min(y, x):  # far from the borders the window is centred, one further back where the kernel is even
        rows, columns = (torch.arange(kernel) - kernel // 2 + centre for centre in (y, x))
        seen = (rows[:, None] * grid[1] + columns).flatten()
        assert dense[y * grid[1] + x].nonzero().flatten().tolist() == seen.tolist()


def swin(height: int, width: int, window: int, shift: int) -> torch.Tensor:
    """Swin's own construction: roll the image, cut it into windows, keep the wrapped regions apart, roll back."""
    number = torch.arange(height * width).reshape(height, width)
    rolled = torch.roll(number, (-shift, -shift), (0, 1))
    region, cuts = torch.zeros(height, width), [slice(0, -window), slice(-window, -shift), slice(-shift, None)]
    for count, (rows, columns) in enumerate(itertools.product(cuts, cuts) if shift else []):
        region[rows, columns] = count
    dense = torch.zeros(height * width, height * width, dtype=torch.bool)
    for y in range(0, height, window):
        for x in range(0, width, window):
            tile = rolled[y : y + window, x : x + window].flatten()
            part = region[y : y + window, x : x + window].flatten()
            dense[tile[:, None], tile[None, :]] = part[:, None] == part[None, :]
    return dense


@pytest.mark.parametrize(
    "height, width, window, shift",
    [(4, 4, 2, 0), (4, 4, 2, 1), (8, 8, 4, 2), (8, 12, 4, 1), (9, 6, 3, 2), (7, 7, 7, 0), (7, 14, 7, 3), (6, 6, 3, 1)],
)
def test_windows2d_are_swins(height, width, window, shift):
    pattern = qkv.windows2d((height, width), window, shift=shift)
    assert torch.equal(pattern.to_dense(height * width), swin(height, width, window, shift))


@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize("window, shift", [(1, 0), (3, 0), (3, 1), (4, 3), (20, 5)])
def test_windows2d_take_images_that_windows_do_not_divide(grid, window, shift):
    pixels = grid[0] * grid[1]
    want = oracles.dense(oracles.windows2d(grid, window, shift), (1, 1, pixels, pixels))[0, 0]
    assert torch.equal(qkv.windows2d(grid, window, shift).to_dense(pixels), want)
    assert want.diagonal().all() and torch.equal(want, want.T)


@pytest.mark.parametrize("grid", GRIDS)
def test_axial_is_the_row_or_the_column(grid):
    pixels, number = grid[0] * grid[1], torch.arange(grid[0] * grid[1])
    row, column = number // grid[1], number % grid[1]
    assert torch.equal(qkv.axial(grid, "width").to_dense(pixels), row[:, None] == row)
    assert torch.equal(qkv.axial(grid, along="height").to_dense(pixels), column[:, None] == column)


@pytest.mark.parametrize(
    "pattern", [qkv.neighborhood((4, 6), 3), qkv.windows2d((4, 6), 2), qkv.axial((4, 6), "width")], ids=str
)
def test_images_are_called_with_their_own_pixels(pattern):
    with pytest.raises(ShapeError) as caught:
        pattern.to_dense(25)
    assert "24" in str(caught.value) and "25" in str(caught.value)
    assert pattern.to_dense(1, 24).sum() == pattern.to_dense(24)[23].sum()  # one query of the image, the last
    assert not pattern.to_dense(3, 24, query_offset=24).any()  # queries beyond the image see nothing
    assert not pattern.to_dense(3, 24, query_offset=-3).any()


# --- documents, lengths, padding ---


def test_documents_by_ids_or_boundaries():
    ids = torch.tensor([0, 0, 3, 3, 3, 1])
    want = ids[:, None] == ids
    for pattern in (qkv.documents(ids), qkv.documents([0, 0, 3, 3, 3, 1]), qkv.documents(cu_seqlens=[0, 2, 5, 6])):
        assert torch.equal(pattern.to_dense(6), want)
    assert torch.equal(qkv.documents(cu_seqlens=torch.tensor([0, 2, 2, 2, 5, 6], dtype=torch.int32)).to_dense(6), want)
    scattered = torch.tensor([4, 0, 4, 4, 0])
    assert torch.equal(qkv.documents(scattered).to_dense(5), scattered[:, None] == scattered)
    assert qkv.documents([2**31 - 1, 0]).count(2) == 2
    assert qkv.documents(torch.tensor([1, 2], dtype=torch.uint8)).count(2) == 2


def test_documents_of_a_batch():
    ids = torch.tensor([[0, 0, 1], [5, 6, 5]])
    dense = qkv.documents(ids).to_dense(3, batch=2, heads=4)
    assert dense.shape == (2, 4, 3, 3)
    assert torch.equal(dense, (ids[:, None, :, None] == ids[:, None, None, :]).expand(2, 4, 3, 3))


def test_documents_are_absolute_positions():
    """Decoding row i of a packed sequence asks for the same document; a place outside belongs to none."""
    ids = [0, 0, 0, 7, 7]
    whole = qkv.documents(ids).to_dense(5)
    assert torch.equal(qkv.documents(ids).to_dense(2, 5), whole[3:])
    assert torch.equal(qkv.documents(ids).to_dense(2, 5, query_offset=4), torch.stack([whole[4], whole[4] & False]))
    assert torch.equal(qkv.documents(ids).to_dense(2, 5, query_offset=-1), torch.stack([whole[0] & False, whole[0]]))


def test_key_lengths_and_key_padding():
    lengths, keep = torch.tensor([0, 2, 4]), noise(3, 3, 4)
    for given in (lengths, [0, 2, 4], lengths.int()):
        dense = qkv.key_lengths(given).to_dense(5, 4, batch=3, heads=2)
        assert torch.equal(dense, (torch.arange(4) < lengths[:, None, None, None]).expand(3, 2, 5, 4))
    dense = qkv.key_padding(keep=keep).to_dense(5, 4, batch=3, heads=2)
    assert torch.equal(dense, keep[:, None, None, :].expand(3, 2, 5, 4))
    both = qkv.key_lengths([3]) & qkv.causal()
    assert both.to_dense(5).int().tolist() == [[[[1, 0, 0, 0, 0], [1, 1, 0, 0, 0], *[[1, 1, 1, 0, 0]] * 3]]]


# --- masks, layouts, functions, heads ---


@pytest.mark.parametrize("offset", [None, 0, 30, -3])
@pytest.mark.parametrize("lead", [*itertools.product([1, 2], [1, 3], [1, 5], [1, 7])])
def test_masks_broadcast_and_their_rows_are_the_calls(lead, offset):
    keep = noise(sum(lead), *lead)
    dense = qkv.mask(keep=keep).to_dense(5, 7, batch=2, heads=3, query_offset=offset)
    assert torch.equal(dense.expand(2, 3, 5, 7), keep.expand(2, 3, 5, 7))


def test_masks_of_three_axes_say_which():
    keep = noise(1, 2, 5, 7)
    by_batch = qkv.mask(keep=keep, axes="BLS").to_dense(5, 7, batch=2, heads=2)
    by_head = qkv.mask(keep=keep, axes="HLS").to_dense(5, 7, batch=2, heads=2)
    assert torch.equal(by_batch, keep[:, None].expand(2, 2, 5, 7))
    assert torch.equal(by_head, keep[None].expand(2, 2, 5, 7))
    assert torch.equal(qkv.mask(keep=keep[0]).to_dense(5, 7), keep[0])


@each_shape
@pytest.mark.parametrize("size", [1, 3, 16, 64])
def test_blocks_are_absolute(size, L, S, offset):
    first = S - L if offset is None else offset
    rows, columns = -(-max(first + L, 1) // size), -(-S // size)
    keep = noise(size, rows, columns)
    want = oracles.dense(within(oracles.blocks(keep, size), (0, rows * size)), (1, 1, L, S), offset)[0, 0]
    assert torch.equal(qkv.blocks(keep=keep, block_size=size).to_dense(L, S, query_offset=offset), want)


def test_blocks_of_batch_rows_and_heads():
    keep = noise(4, 2, 3, 4, 5)
    dense = qkv.blocks(keep, 2).to_dense(8, 10, batch=2, heads=3, query_offset=0)
    assert torch.equal(dense, keep.repeat_interleave(2, 2).repeat_interleave(2, 3))
    shared = qkv.blocks(keep[:1, :1], 2).to_dense(8, 10, batch=2, heads=3, query_offset=0)
    assert torch.equal(shared, dense[0, 0])


def test_functions_are_asked_on_absolute_int64_positions():
    asked = []

    def rule(b, h, i, j):
        asked.append((b, h, i, j))
        return (j <= i) & (j % 2 == 0)

    want = oracles.dense(lambda p: (p.j <= p.i) & (p.j % 2 == 0), (1, 1, 3, 9))[0, 0]
    assert torch.equal(qkv.where(rule).to_dense(3, 9), want)
    assert qkv.where(rule).count(3, 9) == want.sum()
    for b, h, i, j in asked:
        assert all(x.dtype == torch.int64 for x in (b, h, i, j))
        assert (i.min() >= 6) & (i.max() <= 8) & (j.min() >= 0) & (j.max() <= 8)
        torch.broadcast_shapes(b.shape, h.shape, i.shape, j.shape)


def test_functions_may_look_into_tables_of_the_calls_size():
    ids = torch.tensor([0, 0, 1, 1, 1])
    pattern = qkv.where(lambda b, h, i, j: ids[i] == ids[j])
    assert torch.equal(pattern.to_dense(5), ids[:, None] == ids)
    assert pattern.count(5) == (ids[:, None] == ids).sum()


@pytest.mark.parametrize(
    "fn, shape",
    [
        (lambda b, h, i, j: j <= i, (1, 1)),
        (lambda b, h, i, j: j <= i + h, (1, 3)),
        (lambda b, h, i, j: j < i + 2 * b, (2, 1)),
        (lambda b, h, i, j: (j + h) % (b + 2) == 0 * i, (2, 3)),
        (lambda b, h, i, j: b + h > 1, (2, 3)),
        (lambda b, h, i, j: j > 3, (1, 1)),
    ],
    ids=["none", "heads", "batch", "both", "only them", "keys"],
)
def test_functions_are_asked_for_each_batch_row_and_head_only_where_they_depend_on_it(fn, shape):
    plan = qkv.where(fn).plan(6, batch=2, heads=3)
    assert plan.index.shape == shape
    want = oracles.dense(lambda p: fn(p.b, p.h, p.i, p.j), (2, 3, 6, 6))
    assert plan.pairs == want.sum()
    dense = qkv.where(fn).to_dense(6, batch=2, heads=3)
    assert dense.ndim == (2 if shape == (1, 1) else 4)
    assert torch.equal(dense.expand(2, 3, 6, 6), want)


def test_functions_below_other_operations_and_heads():
    """A function may stand anywhere in an expression, lists of heads included."""
    fn, rule = (lambda b, h, i, j: (i + j + b) % 2 == 0), (lambda p: (p.i + p.j + p.b) % 2 == 0)
    heads = qkv.per_head([qkv.causal(), qkv.window(3)])
    by_head = oracles.per_head([oracles.causal(), oracles.window(3)])
    for pattern, want in [
        (qkv.per_head([qkv.where(fn), qkv.causal()]), oracles.per_head([rule, oracles.causal()])),
        (heads & qkv.where(fn), oracles.both(by_head, rule)),
        ((heads & qkv.window(5)) & qkv.where(fn), oracles.both(by_head, oracles.window(5), rule)),
        (~((heads | qkv.prefix(2)) - qkv.where(fn)), oracles.opposite(
            oracles.both(oracles.either(by_head, oracles.prefix(2)), oracles.opposite(rule)))),
    ]:  # fmt: skip
        dense = oracles.dense(want, (2, 2, 9, 9))
        assert torch.equal(pattern.to_dense(9, batch=2, heads=2), dense)
        assert pattern.count(9, batch=2, heads=2) == dense.sum()


@pytest.mark.parametrize(
    "fn, seen",
    [
        (lambda b, h, i, j: i - j, "torch.int64"),
        (lambda b, h, i, j: (j <= i).float(), "torch.float32"),
        (lambda b, h, i, j: True, "bool"),
        (lambda b, h, i, j: None, "NoneType"),
        (lambda b, h, i, j: np.ones((1, 1, 1, 1), dtype=bool), "ndarray"),
    ],
    ids=["int", "float", "python bool", "None", "numpy"],
)
def test_functions_must_answer_with_booleans(fn, seen):
    for ask in (lambda: qkv.where(fn).to_dense(4), lambda: qkv.where(fn).plan(4)):
        with pytest.raises(MaskError, match="must return a boolean tensor") as caught:
            ask()
        assert seen in str(caught.value)


def test_an_error_inside_a_function_comes_through():
    with pytest.raises(ZeroDivisionError):
        qkv.where(lambda b, h, i, j: 1 // 0).to_dense(4)


def test_per_head_gives_each_head_its_own():
    pattern = qkv.per_head([qkv.causal(), qkv.window(1, 1), qkv.full()])
    dense = pattern.to_dense(5, batch=2, heads=3)
    assert dense.shape == (2, 3, 5, 5)
    for h, member in enumerate([qkv.causal(), qkv.window(1, 1), qkv.full()]):
        assert torch.equal(dense[0, h], member.to_dense(5))
    both = (pattern & qkv.prefix(3)) - qkv.per_head([qkv.window(0)] * 3)
    rule = oracles.both(
        oracles.per_head([oracles.causal(), oracles.window(1, 1), oracles.full()]),
        oracles.prefix(3),
        oracles.opposite(oracles.window(0)),
    )
    assert torch.equal(both.to_dense(5, batch=2, heads=3), oracles.dense(rule, (2, 3, 5, 5)))


def test_per_head_takes_content_of_batch_rows():
    pattern = qkv.per_head([qkv.key_lengths([2, 3]), qkv.documents([0, 0, 1, 1])])
    rule = oracles.per_head([oracles.key_lengths(torch.tensor([2, 3])), oracles.documents(torch.tensor([0, 0, 1, 1]))])
    assert torch.equal(pattern.to_dense(4, batch=2, heads=2), oracles.dense(rule, (2, 2, 4, 4)))


def test_offsets_of_batch_rows():
    dense = qkv.strided(3).to_dense(4, 9, batch=3, query_offset=[0, 5, -2])
    assert dense.shape == (3, 1, 4, 9)
    assert torch.equal(dense, oracles.dense(oracles.strided(3), (3, 1, 4, 9), [0, 5, -2]))


def test_pairs_of_any_positions_can_be_asked():
    """`allowed` takes whatever positions a shard or a cache holds, one row of them or one a batch row."""
    i, j = np.array([[40, 3, 7]]), np.array([[0, 7, 39, 5], [3, 2, 1, 0]])
    seen = qkv.strided(4).allowed(i, j, batch=2, heads=3, extents=[Extent(50, 50)])
    pairs = oracles.Pairs(0, 0, torch.from_numpy(i)[:, None, :, None], torch.from_numpy(j)[:, None, None, :], 0, 50)
    assert seen.shape == (2, 1, 3, 4)
    np.testing.assert_array_equal(seen, oracles.strided(4)(pairs).numpy())


# --- what is refused ---

B = torch.ones(2, 3, dtype=torch.bool)
REFUSED = [
    # numbers (40 to 43 of the bad inputs)
    (lambda: qkv.window(-1), ValueOutOfRange, ["`left`", "at least 0", "-1"]),
    (lambda: qkv.window(1, -2), ValueOutOfRange, ["`right`", "at least 0", "-2"]),
    (lambda: qkv.window(4.5), DTypeError, ["`left`", "integer", "4.5"]),
    (lambda: qkv.window(True), DTypeError, ["`left`", "integer", "True"]),
    (lambda: qkv.window("3"), DTypeError, ["`left`", "integer", "'3'"]),
    (lambda: qkv.window(torch.tensor(3)), DTypeError, ["`left`", "integer", "tensor of torch.int64"]),
    (lambda: qkv.window(3, torch.tensor(3.0)), DTypeError, ["`right`", "integer", "tensor of torch.float32"]),
    (lambda: qkv.sliding_window(0), ValueOutOfRange, ["`size`", "at least 1", "got 0"]),
    (lambda: qkv.sliding_window(None), DTypeError, ["`size`", "None"]),
    (lambda: qkv.dilated(-1, dilation=2), ValueOutOfRange, ["`left`", "-1"]),
    (lambda: qkv.dilated(1, -1, dilation=2), ValueOutOfRange, ["`right`", "-1"]),
    (lambda: qkv.dilated(1, dilation=0), ValueOutOfRange, ["`dilation`", "at least 1"]),
    (lambda: qkv.dilated(1, dilation=-3), ValueOutOfRange, ["`dilation`", "-3"]),
    (lambda: qkv.dilated(None, dilation=3), DTypeError, ["`left`", "None"]),
    (lambda: qkv.strided(0), ValueOutOfRange, ["`stride`", "at least 1"]),
    (lambda: qkv.strided(-4), ValueOutOfRange, ["`stride`", "-4"]),
    (lambda: qkv.strided(2.0), DTypeError, ["`stride`", "2.0"]),
    (lambda: qkv.sparse_transformer(0), ValueOutOfRange, ["`stride`"]),
    (lambda: qkv.fixed(0), ValueOutOfRange, ["`block`", "at least 1"]),
    (lambda: qkv.fixed(4, 0), ValueOutOfRange, ["`summary`", "at least 1"]),
    (lambda: qkv.fixed(4, 5), ValueOutOfRange, ["`summary`", "at most `block`", "summary=5", "block=4"]),
    (lambda: qkv.prefix(-1), ValueOutOfRange, ["`n`", "-1"]),
    (lambda: qkv.block_local(0), ValueOutOfRange, ["`size`", "at least 1"]),
    (lambda: qkv.longformer(-2, 1), ValueOutOfRange, ["`window`", "-2"]),
    (lambda: qkv.longformer(2, -1), ValueOutOfRange, ["`tokens`", "-1"]),
    (lambda: qkv.bigbird(-1, 0, 1, 0), ValueOutOfRange, ["`window`"]),
    (lambda: qkv.bigbird(1, 0, -1, 0), ValueOutOfRange, ["`random_blocks`", "-1"]),
    (lambda: qkv.bigbird(1, 0, 1, 0, block_size=0), ValueOutOfRange, ["`block_size`", "at least 1"]),
    (lambda: qkv.random_blocks(0, 4, 0), ValueOutOfRange, ["`count`", "at least 1"]),
    (lambda: qkv.random_blocks(1, 0, 0), ValueOutOfRange, ["`block_size`", "at least 1"]),
    (lambda: qkv.random_blocks(1, 4, -1), ValueOutOfRange, ["`seed`", "-1"]),
    (lambda: qkv.random_blocks(1, 4, 2**64), ValueOutOfRange, ["`seed`", "64 bits"]),
    (lambda: qkv.random_blocks(1, 4, 1.5), DTypeError, ["`seed`", "1.5"]),
    (lambda: qkv.random_blocks(1, 4, 0, ahead=1), DTypeError, ["`ahead`", "True or False", "1"]),
    # names
    (lambda: qkv.causal(align="topleft"), UnknownName, ["`align`", "'topleft'", "did you mean 'top_left'"]),
    (lambda: qkv.causal(align=0), UnknownName, ["`align`", "bottom_right, top_left"]),
    (lambda: qkv.axial((4, 6), along="widht"), UnknownName, ["`along`", "did you mean 'width'"]),
    (lambda: qkv.mask(keep=B[None], axes="BSL"), UnknownName, ["`axes`", "'BSL'", "BLS, HLS"]),
    # tokens, ids, lengths (44 to 49)
    (lambda: qkv.global_tokens(-1), ValueOutOfRange, ["`tokens`", "-1"]),
    (lambda: qkv.global_tokens(True), DTypeError, ["`tokens`", "True"]),
    (lambda: qkv.global_tokens([0, -2]), ValueOutOfRange, ["`tokens`", "[1]", "-2"]),
    (lambda: qkv.global_tokens([0.5]), DTypeError, ["`tokens`", "integers", "0.5"]),
    (lambda: qkv.global_tokens([True, False]), DTypeError, ["`tokens`", "integers"]),
    (lambda: qkv.global_tokens("12"), DTypeError, ["`tokens`", "'12'"]),
    (lambda: qkv.global_tokens(None), DTypeError, ["`tokens`", "None"]),
    (lambda: qkv.global_tokens(torch.tensor(3)), ShapeError, ["`tokens`", "1 axes", "[]"]),
    (lambda: qkv.global_tokens([[1], [2]]), ShapeError, ["`tokens`", "[2, 1]"]),
    (lambda: qkv.global_tokens(torch.tensor([1.0])), DTypeError, ["`tokens`", "torch.float32"]),
    (lambda: qkv.documents([0, -1]), ValueOutOfRange, ["`ids`", "[1]", "-1"]),
    (lambda: qkv.documents([0, 2**31]), ValueOutOfRange, ["`ids`", "[1]", str(2**31)]),
    (lambda: qkv.documents(torch.tensor([[0, 1], [0, -5]])), ValueOutOfRange, ["`ids`", "[1, 1]", "-5"]),
    (lambda: qkv.documents(torch.tensor([0.0])), DTypeError, ["`ids`", "torch.float32"]),
    (lambda: qkv.documents(torch.zeros(2, 2, 2).long()), ShapeError, ["`ids`", "[2, 2, 2]"]),
    (lambda: qkv.documents([[1, 2], [3]]), QkvError, ["`ids`"]),
    (qkv.documents, MaskError, ["`ids` or `cu_seqlens`", "neither"]),
    (lambda: qkv.documents([0], cu_seqlens=[0, 1]), MaskError, ["`ids` or `cu_seqlens`", "both"]),
    (
        lambda: qkv.documents(cu_seqlens=[0, 5, 3]),
        ValueOutOfRange,
        ["`cu_seqlens`", "decrease", "entry 2 is 3 after 5"],
    ),
    (lambda: qkv.documents(cu_seqlens=[1, 5]), ValueOutOfRange, ["`cu_seqlens`", "start at 0", "entry 0 is 1"]),
    (lambda: qkv.documents(cu_seqlens=[0, -5]), ValueOutOfRange, ["`cu_seqlens`", "[1]", "-5"]),
    (lambda: qkv.documents(cu_seqlens=[]), ShapeError, ["`cu_seqlens`", "empty"]),
    (lambda: qkv.documents(cu_seqlens=[[0, 1]]), ShapeError, ["`cu_seqlens`", "[1, 2]"]),
    (lambda: qkv.documents(cu_seqlens=torch.tensor([0.0, 1.0])), DTypeError, ["`cu_seqlens`", "torch.float32"]),
    (lambda: qkv.key_lengths([3, -1]), ValueOutOfRange, ["`lengths`", "[1]", "-1"]),
    (lambda: qkv.key_lengths(torch.tensor([1.0])), DTypeError, ["`lengths`", "torch.float32"]),
    (lambda: qkv.key_lengths(torch.tensor([True])), DTypeError, ["`lengths`", "torch.bool"]),
    (lambda: qkv.key_lengths(torch.tensor([[1]])), ShapeError, ["`lengths`", "[1, 1]"]),
    (lambda: qkv.key_lengths(3), DTypeError, ["`lengths`", "3"]),
    # masks (25 to 32), layouts (33)
    (lambda: qkv.mask(keep=B.long()), MaskError, ["`keep`", "bool", "True", "torch.int64"]),
    (lambda: qkv.mask(keep=B.to(torch.uint8)), MaskError, ["`keep`", "bool", "torch.uint8"]),
    (lambda: qkv.mask(keep=B * float("nan")), MaskError, ["`keep`", "bool", "torch.float32"]),
    (lambda: qkv.mask(keep=[[True]]), DTypeError, ["`keep`", "tensor", "list"]),
    (lambda: qkv.mask(keep=B[0]), MaskError, ["`keep`", "[3]"]),
    (lambda: qkv.mask(keep=B[None]), MaskError, ["three axes", "[1, 2, 3]", "BLS", "HLS"]),
    (lambda: qkv.mask(keep=B, axes="BLS"), MaskError, ["`keep`", "[2, 3]"]),
    (lambda: qkv.mask(keep=B[None, None, None]), MaskError, ["`keep`", "[1, 1, 1, 2, 3]"]),
    (lambda: qkv.key_padding(keep=B[0]), MaskError, ["`keep`", "(B, S)", "[3]"]),
    (lambda: qkv.key_padding(keep=B.float()), MaskError, ["`keep`", "bool", "torch.float32"]),
    (lambda: qkv.key_padding(keep=None), DTypeError, ["`keep`", "NoneType"]),
    (lambda: qkv.blocks(B, 0), ValueOutOfRange, ["`block_size`", "at least 1"]),
    (lambda: qkv.blocks(B, -64), ValueOutOfRange, ["`block_size`", "-64"]),
    (lambda: qkv.blocks(B, 6.4), DTypeError, ["`block_size`", "6.4"]),
    (lambda: qkv.blocks(B.int(), 4), MaskError, ["`keep`", "bool", "torch.int32"]),
    (lambda: qkv.blocks(B[None], 4), MaskError, ["`keep`", "[1, 2, 3]"]),
    # images
    (lambda: qkv.neighborhood((4, 6), 5), ValueOutOfRange, ["`kernel`", "5", "4 by 6"]),
    (lambda: qkv.neighborhood((4, 6), 0), ValueOutOfRange, ["`kernel`", "at least 1"]),
    (lambda: qkv.neighborhood((0, 6), 1), ValueOutOfRange, ["`height`", "at least 1"]),
    (lambda: qkv.neighborhood((4, -6), 1), ValueOutOfRange, ["`width`", "-6"]),
    (lambda: qkv.neighborhood(24, 3), ShapeError, ["`neighborhood`", "(height, width)", "24"]),
    (lambda: qkv.neighborhood((4, 6, 3), 3), ShapeError, ["(height, width)", "(4, 6, 3)"]),
    (lambda: qkv.neighborhood((4.0, 6), 3), DTypeError, ["`height`", "4.0"]),
    (lambda: qkv.windows2d((4, 6), 0), ValueOutOfRange, ["`window`", "at least 1"]),
    (lambda: qkv.windows2d((4, 6), 2, shift=2), ValueOutOfRange, ["`shift`", "less than `window`", "shift=2"]),
    (lambda: qkv.windows2d((4, 6), 2, shift=-1), ValueOutOfRange, ["`shift`", "-1"]),
    (lambda: qkv.windows2d("46", 2), ShapeError, ["`windows2d`", "'46'"]),
    (lambda: qkv.axial(None, "width"), ShapeError, ["`axial`", "None"]),
    # functions and heads
    (lambda: qkv.where(3), DTypeError, ["`where`", "function", "3"]),
    (lambda: qkv.per_head([]), ShapeError, ["`per_head`", "at least one", "[]"]),
    (lambda: qkv.per_head([qkv.causal(), None]), ShapeError, ["`per_head`", "None"]),
    (lambda: qkv.per_head([qkv.full()]) & qkv.per_head([qkv.full()] * 2), ShapeError, ["`per_head`", "1 and 2"]),
    (lambda: qkv.per_head(3), QkvError, ["`per_head`", "3"]),
    (lambda: qkv.per_head(qkv.causal()), QkvError, ["`per_head`", "causal()"]),
    # sizes of a call
    (lambda: qkv.causal().to_dense(-1), ValueOutOfRange, ["`L`", "-1"]),
    (lambda: qkv.causal().count(3, 2.5), DTypeError, ["`S`", "2.5"]),
    (lambda: qkv.causal().plan(True), DTypeError, ["`L`", "True"]),
    (lambda: qkv.mask(keep=B).to_dense(2, 4), MaskError, ["L=2", "S=4", "axis S has 3"]),
    (lambda: qkv.mask(keep=B).to_dense(3, 3), MaskError, ["axis L has 2"]),
    (lambda: qkv.mask(keep=noise(0, 1, 2, 3, 3)).plan(3, heads=4), MaskError, ["H=4", "axis H has 2"]),
    (lambda: qkv.mask(keep=noise(0, 2, 1, 3, 3)).plan(3, batch=3), MaskError, ["B=3", "axis B has 2"]),
    (lambda: qkv.blocks(noise(0, 1, 2, 3, 3), 1).plan(3, heads=4), MaskError, ["`blocks(keep=)`", "H=4", "has 2"]),
    (lambda: qkv.blocks(noise(0, 2, 1, 3, 3), 1).plan(3, batch=3), MaskError, ["`blocks(keep=)`", "B=3", "has 2"]),
    (lambda: qkv.blocks(noise(0, 3, 3), 4).plan(13), MaskError, ["4 by 4 blocks", "3 by 3"]),
    (lambda: qkv.blocks(noise(0, 3, 3), 4).plan(2, 12, query_offset=11), MaskError, ["4 by 3 blocks", "3 by 3"]),
    (lambda: qkv.documents([0, 0, 1]).plan(4), ShapeError, ["`documents`", "S=4", "3"]),
    (lambda: qkv.documents(cu_seqlens=[0, 2, 3]).plan(4), ShapeError, ["`documents`", "S=4", "3"]),
    (lambda: qkv.documents(torch.zeros(2, 4).long()).plan(4, batch=3), ShapeError, ["`documents`", "B=3", "2"]),
    (lambda: qkv.key_lengths([1, 2]).plan(4, batch=3), ShapeError, ["`key_lengths`", "B=3", "2"]),
    (lambda: qkv.key_lengths([1, 5]).plan(4, batch=2), ValueOutOfRange, ["`key_lengths`", "S=4", "entry 1 is 5"]),
    (lambda: qkv.key_padding(keep=B).plan(3, batch=1), ShapeError, ["key_padding", "B=1", "[2, 3]"]),
    (lambda: qkv.key_padding(keep=B).plan(4, batch=2), ShapeError, ["key_padding", "S=4", "[2, 3]"]),
    (lambda: qkv.per_head([qkv.causal()] * 2).plan(4, heads=3), ShapeError, ["`per_head`", "H=3", "2"]),
    (lambda: (qkv.per_head([qkv.full()] * 2) & qkv.causal()).to_dense(4), ShapeError, ["`per_head`", "H=1", "2"]),
    (lambda: qkv.per_head([qkv.full(), qkv.documents([0])]).plan(4, heads=2), ShapeError, ["`documents`", "S=4"]),
]


@pytest.mark.parametrize("number", range(len(REFUSED)))
def test_bad_arguments_are_refused_by_name(number):
    ask, error, said = REFUSED[number]
    with pytest.raises(error) as caught:
        ask()
    text = str(caught.value)
    assert all(part in text for part in said), text
    assert text.count("; ") >= 2 and not text.endswith(".")


HUGE = [
    "strided(2**70)", "sparse_transformer(2**63)", "block_local(2**70)", "fixed(2**70)", "prefix(2**70)",
    "global_tokens(2**63)", "longformer(2**70, 0)", "bigbird(2**70, 0, 1, 0)", "dilated(2**70, dilation=2**70)",
    "bigbird(2**34, 0, 0, 0, block_size=2**30)", "random_blocks(1, 2**70, 0)", "strided(2**62)", "fixed(2**62)",
    "longformer(2**63, 2**62)", "block_local(2**62)",
]  # fmt: skip


@pytest.mark.parametrize("text", HUGE)
def test_numbers_beyond_every_length_are_lengths(text):
    """A stride, block or count larger than any call works, as window(2**70) does: nothing overflows."""
    pattern = eval(text, vars(qkv.patterns))
    dense = pattern.to_dense(5)
    assert pattern.count(5) == dense.sum()
    everything = ("causal" if any(name in text for name in ("strided", "transformer", "fixed")) else "full") + "()"
    want = qkv.window(0) if "dilated" in text else qkv.parse(everything)
    assert torch.equal(dense, want.to_dense(5))


@pytest.mark.parametrize(
    "text", ["global_tokens(n)", "window(n)", "prefix(n)", "longformer(n, n)", "bigbird(n, n, 1, 0)"]
)
def test_numpy_integers_count_as_integers(text):
    assert eval(text, {**vars(qkv.patterns), "n": np.int64(3)}) == eval(text, {**vars(qkv.patterns), "n": 3})
