"""The checked question: legal calls give the right sizes, views and canonical options."""

from __future__ import annotations

import math
import warnings
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from calls import INF, NAN, PLACES, K, Q, V, call, tensors_on
from qkv.errors import AddedMaskWarning
from qkv.patterns import causal, full
from qkv.question import ask
from qkv.scores import alibi, alibi_slopes, relative
from qkv.shapes import values_can_be_seen
from qkv.types import AuxRequest


@pytest.fixture(params=PLACES)
def place(request):
    with tensors_on(request.param):
        yield request.param


def test_bias_of_minus_infinity_is_legal_and_broadcast_axes_are_read_once():
    bias = torch.full((5, 1), -INF).expand(5, 6)
    assert call(bias=bias).problem.bias_shape == (1, 1, 5, 6)
    many = 2**20  # 2^40 pairs: to read each would take minutes
    row = torch.zeros(1, 1, 1, 1).expand(1, 1, many, 1)
    assert call(row, row, row, bias=torch.zeros(()).expand(many, many)).problem.queries == many


def test_values_are_not_read_where_there_are_none():
    for mode, place in ((nullcontext(), "meta"), (FakeTensorMode(), "cpu")):
        with mode, torch.device(place):
            assert call(bias=torch.full((5, 6), NAN)).problem.bias == "tensor"
    concrete = torch.zeros(1)
    with FakeTensorMode():
        assert not values_can_be_seen(concrete)
    q, k, v, bias = torch.zeros(Q), torch.zeros(K), torch.zeros(V), torch.full((2, 1, 1, 5, 6), NAN)

    def inside(added):
        asked.append(ask(q, k, v, bias=added).problem.bias_shape)
        return added

    asked = []
    torch.vmap(inside)(bias)
    torch.func.vjp(inside, bias[0])
    assert asked == [(1, 1, 5, 6)] * 2


def test_values_are_not_read_under_compile():
    """Compiled, the answer is a constant of the graph: no read of a number breaks it."""
    seen = torch.compile(lambda x: x + values_can_be_seen(x), backend="eager", fullgraph=True)
    assert seen(torch.zeros(1)).item() == 0 and values_can_be_seen(torch.zeros(1))


@pytest.mark.parametrize("scale", [0, 0.0, -1.5, 3, np.float32(0.25)])
def test_row_55_scale_zero_negative_and_of_other_number_types(scale):
    scale_seen = call(scale=scale).problem.scale
    assert type(scale_seen) is float and scale_seen == scale


@pytest.mark.usefixtures("place")
@pytest.mark.parametrize("b, l, s", [(0, 5, 6), (2, 0, 6), (2, 5, 0), (0, 0, 0)])
def test_row_10_sizes_of_zero(b, l, s):
    asked = call(q=(b, 4, l, 8), k=(b, 2, s, 8), v=(b, 2, s, 3), bias=torch.zeros(l, s), query_offset=[1] * b)
    assert (asked.problem.batch, asked.problem.queries, asked.problem.keys) == (b, l, s)
    assert len(asked.problem.origin.query) == 1


def test_row_19_lazy_negation_is_resolved():
    lazy = torch.randn(2, 4, 5, 8, dtype=torch.complex64).conj().imag
    assert lazy.is_neg()
    asked = call(q=lazy)
    assert not asked.tensors.query.is_neg()
    torch.testing.assert_close(asked.tensors.query, lazy, rtol=0, atol=0)


@pytest.mark.usefixtures("place")
def test_rows_21_22_any_stride_is_a_view():
    q = torch.zeros(2, 4, 8, 5).transpose(-1, -2)
    k = torch.zeros(1, 1, 6, 8).expand(2, 2, 6, 8)
    asked = call(q=q, k=k)
    assert asked.tensors.query is q and asked.tensors.key is k


@pytest.mark.parametrize("align, offset", [(None, 1), ("bottom_right", 1), ("top_left", 0)])
def test_row_52_alignment_gives_the_offset_and_is_shown(align, offset):
    problem = call(pattern=causal(align=align)).problem
    assert problem.origin.query == (offset,)
    assert f"query offset {offset}" in str(problem)
    assert call(pattern=causal(align=align), query_offset=offset).problem.origin.query == (offset,)


@pytest.mark.parametrize(
    "given, seen",
    [
        (7, (7,)),
        (-3, (-3,)),
        (np.int64(7), (7,)),
        ([3, 4], (3, 4)),
        ((3, 3), (3,)),
        (torch.tensor([3, 4], dtype=torch.int32), (3, 4)),
        (torch.tensor(5), (5,)),
    ],
)
def test_offsets_in_every_legal_form(given, seen):
    assert call(query_offset=given).problem.origin.query == seen


@pytest.mark.parametrize(
    "rows, seen",
    [
        (False, False),
        (True, True),
        ("mean", "mean"),
        (-1, 4),
        (-5, 0),
        (0, 0),
        ([0, -1], (0, 4)),
        (range(1, 3), (1, 2)),
        (slice(1, -1), range(1, 4)),
        (slice(None, None, -2), range(4, -1, -2)),
    ],
)
def test_rows_of_weights_count_from_the_end_where_negative(rows, seen):
    problem = call(return_aux=AuxRequest(weights=rows, top_k=6)).problem
    assert problem.aux.weights == seen and type(problem.aux.weights) is type(seen)
    assert problem.aux.top_k == 6 and isinstance(hash(problem), int)


@pytest.mark.parametrize(
    "bias, warns",
    [
        (torch.eye(6)[:5], True),
        (torch.eye(6)[:5].half(), True),
        (torch.eye(6)[:5].requires_grad_(), False),
        (torch.zeros(5, 6), False),
        (torch.ones(5, 6), False),
        (torch.eye(6)[:5] * 0.5, False),
        (torch.linspace(0, 1, 30).reshape(5, 6), False),
    ],
)
def test_a_bias_of_zeros_and_ones_warns_that_it_is_added(bias, warns):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call(bias=bias)
    assert [w.category for w in caught] == [AddedMaskWarning] * warns
    assert all("added to the scores" in str(w.message) and "mask(keep=" in str(w.message) for w in caught)


@pytest.mark.usefixtures("place")
@pytest.mark.parametrize(
    "shape, seen",
    [
        ((), (1, 1, 1, 1)),
        ((6,), (1, 1, 1, 6)),
        ((5, 6), (1, 1, 5, 6)),
        ((1, 5, 6), (1, 1, 5, 6)),
        ((2, 4, 5, 6), (2, 4, 5, 6)),
        ((2, 1, 1, 6), (2, 1, 1, 6)),
    ],
)
def test_bias_broadcasts_from_the_right(shape, seen):
    asked = call(bias=torch.zeros(shape, dtype=torch.float64))
    assert asked.problem.bias == "tensor" and asked.problem.bias_shape == tuple(asked.tensors.bias.shape) == seen


def test_bias_of_calls_without_heads_and_with_more_axes():
    assert call((2, 5, 8), (2, 6, 8), (2, 6, 3), bias=torch.zeros(2, 5, 6)).problem.bias_shape == (2, 1, 5, 6)
    five = {"q": (3, 2, 4, 5, 8), "k": (3, 2, 2, 6, 8), "v": (3, 2, 2, 6, 3)}
    assert call(**five, bias=torch.zeros(3, 2, 1, 5, 6)).problem.bias_shape == (6, 1, 5, 6)
    assert call(**five, bias=torch.zeros(1, 1, 4, 5, 6)).problem.bias_shape == (1, 4, 5, 6)
    assert call(**five, bias=torch.zeros(1, 4, 1, 6)).problem.bias_shape == (1, 4, 1, 6)
    inner = torch.arange(2.0).reshape(1, 2, 1, 1, 1)
    assert call(**five, bias=inner - 3).tensors.bias.flatten().tolist() == [-3, -2] * 3


def test_bias_values_by_rule():
    slopes, table = torch.rand(4, dtype=torch.float64), torch.zeros(4, 7)
    asked = call(bias=alibi(slopes))
    assert asked.problem.bias == "alibi" and asked.tensors.bias is slopes
    asked = call(bias=relative(table))
    assert asked.problem.bias == "relative" and asked.tensors.bias is table and asked.problem.bias_shape == (4, 7)
    for dtype, wide in ((torch.bfloat16, torch.float32), (torch.float64, torch.float64)):
        asked = call(dtype=dtype, bias=alibi(alibi_slopes(4)))
        assert asked.tensors.bias.dtype == wide and asked.tensors.bias.tolist() == [2**-2, 2**-4, 2**-6, 2**-8]


def test_wanting_gradients_is_seen_in_each_tensor():
    assert not call(bias=torch.zeros(5, 6), sinks=torch.zeros(4)).problem.needs_grad
    for name, shape in (("q", Q), ("k", K), ("v", V), ("bias", (5, 6)), ("sinks", (4,))):
        tensor = torch.zeros(shape, requires_grad=True)
        assert call(**{name: tensor}).problem.needs_grad, name
        with torch.no_grad():
            assert not call(**{name: tensor}).problem.needs_grad, name
    assert call(bias=alibi(torch.ones(4, requires_grad=True))).problem.needs_grad


def test_defaults():
    problem = call().problem
    assert problem.scale == 1 / math.sqrt(8) and problem.pattern == full()
    assert (problem.softcap, problem.bias, problem.sinks, problem.dropout_p) == (None, None, False, 0.0)
    assert problem.aux == AuxRequest() and problem.origin.key == (0,)


def test_a_problem_reads_as_one_line():
    problem = call(pattern=causal()).problem
    sizes = "q [B=2 H=4 L=5 D=8] k [G=2 S=6] v [V=3]"
    assert str(problem) == f"{sizes} float32 cpu, pattern causal(), scale 0.353553, query offset 1"
    options = {"scale": -2, "softcap": 30, "dropout_p": 0.1, "sinks": torch.zeros(4, requires_grad=True)}
    aux = AuxRequest(lse=True, weights=slice(2), top_k=3)
    said = str(call(dtype=torch.bfloat16, **options, bias=relative(torch.zeros(4, 7)), return_aux=aux).problem)
    assert said.startswith(f"{sizes} bfloat16 cpu, pattern full(), scale -2, query offset 1, softcap 30, ")
    wanted = "wants lse, wants weights=range(0, 2), wants top_k=3"
    assert said.endswith(f", bias relative [4, 7], sinks, dropout 0.1, {wanted}, needs gradients")


sizes = st.integers(0, 4)
positive = st.integers(1, 4)


@st.composite
def legal_calls(draw):
    """Sizes by axis letter, leading axes and a layout of one legal call."""
    rank = draw(st.sampled_from([2, 3, 4, 5, 6]))
    leading = tuple(draw(sizes) for _ in range(1 if rank == 3 else max(rank - 3, 0)))
    kv_heads, group = (draw(positive), draw(positive)) if rank > 3 else (1, 1)
    letters = {"L": draw(sizes), "S": draw(sizes), "D": draw(positive), "V": draw(sizes)}
    return rank, leading, kv_heads * group, kv_heads, letters, draw(st.sampled_from(["BHLD", "BLHD"]))


@given(legal_calls())
def test_legal_calls_give_their_sizes_back(made):
    rank, leading, heads, kv_heads, size, layout = made

    def tensor(count, length, width):
        axes = (length, width) if rank < 4 else (count, length, width) if layout == "BHLD" else (length, count, width)
        shape = (*leading, *axes)
        return torch.arange(math.prod(shape), dtype=torch.float32).reshape(shape)

    q = tensor(heads, size["L"], size["D"])
    k, v = tensor(kv_heads, size["S"], size["D"]), tensor(kv_heads, size["S"], size["V"])
    asked = ask(q, k, v, layout=layout)
    p = asked.problem
    assert (p.batch, p.heads, p.kv_heads) == (math.prod(leading), heads, kv_heads)
    assert (p.queries, p.keys, p.head_dim, p.value_dim) == (size["L"], size["S"], size["D"], size["V"])
    assert tuple(asked.tensors.query.shape) == (p.batch, p.heads, p.queries, p.head_dim)
    assert tuple(asked.tensors.key.shape) == (p.batch, p.kv_heads, p.keys, p.head_dim)
    assert tuple(asked.tensors.value.shape) == (p.batch, p.kv_heads, p.keys, p.value_dim)
    back = asked.restore(asked.tensors.query)
    assert back.shape == q.shape and torch.equal(back, q)
    output = asked.restore(torch.zeros(p.batch, p.heads, p.queries, p.value_dim))
    assert tuple(output.shape) == (*q.shape[:-1], size["V"])


@given(st.data())
def test_broadcasting_follows_torch_where_it_is_asked_for(data):
    rank = data.draw(st.integers(2, 5))
    ranks = [rank, *(data.draw(st.integers(2, rank)) for _ in range(2))]
    whole = [data.draw(positive) for _ in range(rank - 2)]
    shapes = []
    for own, tail in zip(data.draw(st.permutations(ranks)), ((5, 8), (6, 8), (6, 3)), strict=True):
        batch = [data.draw(st.sampled_from([n, 1])) for n in whole[len(whole) - (own - 2) :]] if own > 2 else []
        shapes.append((*batch, *tail))
    q, k, v = (torch.randn(shape) for shape in shapes)
    asked = ask(q, k, v, broadcast=True)
    expected = torch.matmul(torch.matmul(q, k.mT), v)
    group = asked.problem.heads // asked.problem.kv_heads
    keys, values = (t.repeat_interleave(group, 1) for t in asked.tensors[1:3])
    output = asked.restore(asked.tensors.query @ keys.mT @ values)
    assert output.shape == expected.shape
    torch.testing.assert_close(output, expected)
