"""What `& | - ~` refuse, and in which words."""

from __future__ import annotations

import operator

import pytest
import torch

import qkv
from qkv.errors import DTypeError, MaskError

KEEP = torch.ones(3, 3, dtype=torch.bool)


@pytest.mark.parametrize("join", [operator.and_, operator.or_, operator.sub])
@pytest.mark.parametrize("left, right", [(KEEP, qkv.causal()), (qkv.causal(), KEEP), (3, qkv.full())])
def test_both_sides_must_be_patterns(join, left, right):
    with pytest.raises(DTypeError, match=r"must be patterns; one is a (Tensor|int); wrap a boolean tensor as mask"):
        join(left, right)


def test_a_pattern_has_no_truth_value():
    with pytest.raises(MaskError, match=r"use & \| - ~"):
        qkv.causal() and qkv.full()


def test_parts_must_agree_on_the_alignment():
    with pytest.raises(MaskError, match="agree on `align`"):
        qkv.causal("top_left") | qkv.causal("bottom_right")
    assert (qkv.causal("top_left") & qkv.causal()).align == "top_left"
