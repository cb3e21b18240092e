"""Rows: real rows to the front and back, positions, packing, for any mask."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from qkv.errors import DTypeError, MaskError, ShapeError, UnsupportedError, ValueOutOfRange
from qkv.nn.rows import Rows
from qkv.types import AuxOutput, TopK

MASK = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 0, 0], [1, 0, 1, 0, 1], [1, 1, 1, 1, 1], [0, 0, 0, 0, 0]])
B, L = MASK.shape


@st.composite
def keeps(draw):
    batch, length = draw(st.integers(0, 4)), draw(st.integers(0, 6))
    bits = draw(st.lists(st.booleans(), min_size=batch * length, max_size=batch * length))
    return torch.tensor(bits, dtype=torch.bool).view(batch, length)


@given(keeps(), st.sampled_from([(), (3,), (2, 2)]))
def test_front_and_back_for_any_mask(keep, tail):
    batch, length = keep.shape
    rows = Rows.of(keep, batch, length)
    x = torch.randn(batch, length, *tail)
    front, counts = rows.front(x), keep.sum(1).tolist()
    assert rows.lengths == (None if all(n == length for n in counts) else tuple(counts))
    for b, n in enumerate(counts):
        assert torch.equal(front[b, :n], x[b, keep[b]])
    back = rows.back(front)
    assert torch.equal(back[keep], x[keep])
    assert not back[~keep].any()
    assert rows.back(front.long()).dtype == torch.int64
    packed = rows.packed(front)
    assert torch.equal(packed[0], x[keep])
    assert rows.cu_seqlens == (0, *torch.tensor(counts, dtype=torch.int64).cumsum(0).tolist())
    assert torch.equal(rows.back(rows.unpacked(packed)), back)


def test_nothing_moves_where_padding_is_on_the_right():
    x = torch.randn(B, L, 3)
    right = Rows.of(MASK.sort(1, descending=True).values, B, L)
    assert right.lengths == (3, 3, 3, 5, 0)
    assert right.front(x) is x
    for mask in (None, torch.ones(B, L)):
        rows = Rows.of(mask, B, L)
        assert rows.lengths is None
        assert rows.front(x) is x
        assert rows.back(x) is x
        assert torch.equal(rows.unpacked(rows.packed(x)), x)
        assert torch.equal(rows.last(x), x[:, -1:])
    assert Rows.padded(None, B, L).lengths is None
    assert Rows.padded((L,) * B, B, L).lengths is None
    assert torch.equal(Rows.padded([3, 3, 3, 5, 0], B, L).back(x), right.back(x))


def test_rows_of_padding_come_back_as_zero_whatever_they_hold():
    rows = Rows.of(MASK, B, L)
    x = torch.where(MASK[..., None] == 1, torch.randn(B, L, 2), torch.nan).requires_grad_()
    back = rows.back(rows.front(x))
    assert torch.equal(back, x.detach().nan_to_num(0.0))
    (grad,) = torch.autograd.grad(back.sum(), [x])
    assert torch.equal(grad, MASK[..., None].expand_as(x).float())


def test_gradients_pass_packing():
    rows = Rows.of(MASK, B, L)
    x = torch.randn(B, L, 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: rows.unpacked(rows.packed(rows.front(x)).sin()), [x])


def test_last_takes_the_last_real_row():
    rows = Rows.of(MASK, B, L)
    x = torch.arange(B * L).view(B, L)
    assert rows.last(rows.front(x)).flatten().tolist()[:4] == [4, 7, 14, 19]
    assert rows.last(rows.front(x)).shape == (B, 1)


def test_positions_count_real_rows_and_go_no_further_than_they():
    rows = Rows.of(MASK, B, L)
    assert rows.positions().tolist() == [0, 1, 2, 3, 4]
    short = Rows.padded((2, 3), 2, 5)
    assert short.positions((7, 7)).tolist() == [7, 8, 9, 9, 9]
    assert short.positions((7, 0)).tolist() == [[7, 8, 8, 8, 8], [0, 1, 2, 2, 2]]
    assert Rows(2, 2).positions((7, 0)).tolist() == [[7, 8], [0, 1]]
    assert Rows(2, 2).positions((7, 7)).tolist() == [7, 8]
    assert Rows.padded((0, 0), 2, 2).positions().tolist() == [0, 0]
    assert Rows.padded((0, 1), 2, 2).positions((0, 1)).tolist() == [[0, 0], [1, 1]]
    assert Rows(2, 2).positions().dtype == torch.int64
    assert Rows(1, 2).positions(device="meta").device.type == "meta"


def test_aux_comes_back_to_the_places_of_its_rows():
    keep = torch.tensor([[0, 1, 0, 1], [1, 1, 0, 0]])
    rows = Rows.of(keep, 2, 4)
    numbers = torch.arange(32.0).view(2, 1, 4, 4) + 1
    lse = numbers[..., 0]
    aux = AuxOutput(lse, lse, lse, numbers, TopK(numbers[..., :1], torch.zeros(2, 1, 4, 1, dtype=torch.int64)))
    back = rows.back_aux(aux)
    inf = float("inf")
    assert back.lse[:, 0].tolist() == [[-inf, 1, -inf, 5], [17, 21, -inf, -inf]]
    assert torch.equal(back.max_scores, back.lse)
    assert back.entropy[:, 0].tolist() == [[0, 1, 0, 5], [17, 21, 0, 0]]
    assert back.weights[0, 0].tolist() == [[0] * 4, [0, 1, 0, 2], [0] * 4, [0, 5, 0, 6]]
    assert torch.equal(rows.back_aux(AuxOutput(weights=numbers[:, 0])).weights, back.weights[:, 0])
    assert back.top_k.indices[0, 0, :, 0].tolist() == [0, 1, 0, 1]
    assert back.top_k.indices.dtype == torch.int64
    assert back.top_k.values[0, 0, :, 0].tolist() == [0, 1, 0, 5]
    memory = Rows.of(torch.tensor([[0, 0, 1], [1, 1, 1]]), 2, 3)
    other = rows.back_aux(AuxOutput(weights=numbers[..., :3]), memory).weights
    assert other[0, 0].tolist() == [[0] * 3, [0, 0, 1], [0] * 3, [0, 0, 5]]
    assert other[1, 0, 1].tolist() == [21, 22, 23]
    assert Rows(2, 4).back_aux(aux, Rows(2, 4)).weights is not None
    assert rows.back_aux(AuxOutput()) == AuxOutput()


@pytest.mark.parametrize(
    "mask, error, text",
    [
        ([[1]], DTypeError, "`attention_mask` must be a tensor"),
        (torch.ones(2, 3), ShapeError, r"`attention_mask` must be \(B, L\) = \(2, 2\); got \[2, 3\]"),
        (torch.tensor([[1, 2], [0, 1]]), MaskError, "1 for tokens to keep and 0 for padding"),
        (torch.tensor([[0.0, -torch.inf], [0.0, 0.0]]), MaskError, "pass `mask == 0`"),
        (torch.tensor([[torch.nan, 1.0], [0.0, 0.0]]), MaskError, "got other numbers"),
    ],
)
def test_masks_that_are_none(mask, error, text):
    with pytest.raises(error, match=text):
        Rows.of(mask, 2, 2)


def test_batches_of_other_sizes_are_refused():
    rows = Rows.of(MASK, B, L)
    for call in (rows.front, rows.back, rows.packed, rows.last):
        with pytest.raises(ShapeError, match=r"\(B, L, \.\.\.\) with B = 5 and L = 5"):
            call(torch.zeros(B, L + 1))
    with pytest.raises(ShapeError, match=r"\(1, T, \.\.\.\) with T = 14"):
        rows.unpacked(torch.zeros(1, 13))
    with pytest.raises(ValueOutOfRange, match="`lengths` must lie in"):
        Rows.padded([6], 1, 5)
    with pytest.raises(ShapeError, match="`lengths` must hold one number a sequence"):
        Rows.padded([1, 2], 1, 5)


def test_aux_is_blank_in_padding_on_either_side():
    left = torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1]])
    before, after = Rows.of(left, 2, 4), Rows.of(left.flip(1), 2, 4)
    weights, lse = torch.rand(2, 3, 4, 4) + 1, torch.rand(2, 3, 4)
    aux = AuxOutput(lse=lse, entropy=lse, weights=weights)
    found, other = before.back_aux(aux), after.back_aux(aux)
    assert torch.equal(other.weights[0, :, :2, :2], weights[0, :, :2, :2])
    assert torch.equal(found.weights[0, :, 2:, 2:], weights[0, :, :2, :2])
    for one in (found, other):
        assert one.weights[0].count_nonzero() == 3 * 2 * 2
        assert one.lse[0].isinf().sum() == 3 * 2
        assert one.entropy[0].count_nonzero() == 3 * 2
        assert torch.equal(one.weights[1], weights[1])


def test_weights_of_chosen_rows_are_blank_where_these_are_padding():
    rows, weights = Rows.padded((2, 4), 2, 4), torch.rand(2, 3, 4, 4) + 1
    whole = rows.back_aux(AuxOutput(weights=weights)).weights
    for chosen in (slice(1, 3), slice(None, None, 2), [3, 0], (-1,), 2, -3):
        numbers = list(range(4)[chosen]) if isinstance(chosen, slice) else chosen
        found = rows.back_aux(AuxOutput(weights=weights[:, :, numbers]), chosen=chosen)
        assert torch.equal(found.weights, whole[:, :, numbers])
        plain = AuxOutput(weights=weights[:, :, numbers])
        assert torch.equal(Rows(2, 4).back_aux(plain, chosen=chosen).weights, plain.weights)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_an_error_names_the_mask_that_it_was_given():
    for mask, error in (
        ([[1]], DTypeError),
        (torch.ones(1, 3), ShapeError),
        (torch.full((1, 2), 2.0), MaskError),
        (torch.ones(1, 2, device="meta"), UnsupportedError),
        (torch.ones(1, 2).to_sparse(), UnsupportedError),
        (torch.nested.nested_tensor([torch.ones(2)]), UnsupportedError),
    ):
        with pytest.raises(error, match="`memory_mask` must") as caught:
            Rows.of(mask, 1, 2, name="memory_mask")
        assert str(caught.value).count("; ") >= 2
