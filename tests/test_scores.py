"""Bias values: what they hold, what they refuse, and the slopes of the ALiBi paper."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from qkv.errors import DTypeError, QkvError, ShapeError, UnsupportedError, ValueOutOfRange
from qkv.scores import alibi, alibi_slopes, relative

NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    "heads, slopes",
    [
        (1, [2**-8]),
        (2, [2**-4, 2**-8]),
        (8, [2**-h for h in range(1, 9)]),
        (3, [2**-4, 2**-8, 2**-2]),
        (6, [2**-2, 2**-4, 2**-6, 2**-8, 2**-1, 2**-3]),
        (12, [2**-h for h in range(1, 9)] + [2**-0.5, 2**-1.5, 2**-2.5, 2**-3.5]),
    ],
)
def test_alibi_slopes_are_those_of_the_paper(heads, slopes):
    assert alibi_slopes(heads) == pytest.approx(slopes, rel=1e-15)


@pytest.mark.parametrize(
    "heads, error", [(0, ValueOutOfRange), (-1, ValueOutOfRange), (True, DTypeError), (8.0, DTypeError)]
)
def test_alibi_slopes_refuses_what_is_no_count(heads, error):
    with pytest.raises(error, match=r"`heads` must be .*; got .*; say how many query heads"):
        alibi_slopes(heads)


def test_alibi_keeps_a_tensor_and_reads_a_sequence():
    slopes = torch.rand(3, requires_grad=True)
    assert alibi(slopes).slopes is slopes and alibi(slopes).heads == 3
    for given in ([1, 0.5], (1, 0.5), [np.float32(1), np.float64(0.5)]):
        assert alibi(given).slopes == (1.0, 0.5) and str(alibi(given)) == "alibi(2 heads)"
    assert alibi([-1.0, 0.0]).slopes == (-1.0, 0.0)


def test_relative_knows_its_radius():
    table = torch.zeros(4, 9).requires_grad_()
    made = relative(table)
    assert made.table is table and (made.heads, made.radius) == (4, 4)
    assert str(made) == "relative(4 heads, radius 4)"
    assert relative(torch.full((1, 1), -INF)).radius == 0


def test_bias_values_are_frozen_and_equal_only_to_themselves():
    one = alibi([0.5])
    with pytest.raises(dataclasses.FrozenInstanceError):
        one.slopes = (1.0,)
    assert one == one and one != alibi([0.5]) and len({one, alibi([0.5])}) == 2
    table = torch.zeros(1, 3)
    assert relative(table) != relative(table)


BAD = {
    "slopes-2d": (lambda: alibi(torch.zeros(2, 3)), ShapeError, "`slopes` must be (H,)", "got [2, 3]"),
    "slopes-int": (lambda: alibi(torch.arange(3)), DTypeError, "`slopes` must be float16", "got int64"),
    "slopes-nan": (lambda: alibi(torch.tensor([0.5, NAN])), ValueOutOfRange, "`slopes` must be finite", "NaN"),
    "slopes-inf": (lambda: alibi(torch.tensor([INF])), ValueOutOfRange, "`slopes` must be finite", "infinity"),
    "slopes-sparse": (lambda: alibi(torch.ones(3).to_sparse()), UnsupportedError, "`slopes` must be a dense", "sparse"),
    "numbers-nan": (lambda: alibi([0.5, NAN]), ValueOutOfRange, "`slopes` must be finite", "nan for head 1"),
    "numbers-text": (lambda: alibi(["a"]), DTypeError, "`slopes` must hold numbers", "'a' for head 0"),
    "numbers-bool": (lambda: alibi([True]), DTypeError, "`slopes` must hold numbers", "True for head 0"),
    "text": (lambda: alibi("12"), DTypeError, "`slopes` must be a tensor (H,) or a sequence", "'12'"),
    "number": (lambda: alibi(0.5), DTypeError, "`slopes` must be a tensor (H,) or a sequence", "0.5"),
    "table-list": (lambda: relative([[0.0]]), DTypeError, "`table` must be a torch.Tensor", "list"),
    "table-1d": (lambda: relative(torch.zeros(3)), ShapeError, "`table` must be (H, 2R + 1)", "got [3]"),
    "table-even": (lambda: relative(torch.zeros(2, 4)), ShapeError, "of odd width", "got [2, 4]"),
    "table-empty": (lambda: relative(torch.zeros(2, 0)), ShapeError, "of odd width", "got [2, 0]"),
    "table-bool": (lambda: relative(torch.ones(1, 3).bool()), DTypeError, "`table` must be float16", "got bool"),
    "table-nan": (lambda: relative(torch.tensor([[0, NAN, 0]])), ValueOutOfRange, "no NaN and no +inf", "-inf hides"),
    "table-inf": (lambda: relative(torch.tensor([[0, INF, 0]])), ValueOutOfRange, "no NaN and no +inf", "-inf hides"),
}


@pytest.mark.parametrize("make, error, holds, seen", BAD.values(), ids=BAD)
@pytest.mark.filterwarnings("ignore:.*[Ss]parse.*:UserWarning")
def test_bad_bias_values_are_one_error(make, error, holds, seen):
    with pytest.raises(QkvError) as caught:
        make()
    assert type(caught.value) is error
    assert holds in str(caught.value) and seen in str(caught.value) and str(caught.value).count("; ") == 2


def test_bias_values_without_numbers_to_read():
    with torch.device("meta"):
        assert alibi(torch.full((2,), NAN)).heads == 2
        assert relative(torch.full((2, 3), NAN)).heads == 2
