"""Pictures in text: every pair up to 64 a side, shades beyond."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch

import qkv

SHADES = " ·░▒▓█"

SMALL = {
    ("causal()", 4, None): """
■ · · ·
■ ■ · ·
■ ■ ■ ·
■ ■ ■ ■""",
    ("causal()", 2, 5): """
■ ■ ■ ■ ·
■ ■ ■ ■ ■""",
    ("causal(align='top_left')", 2, 5): """
■ · · · ·
■ ■ · · ·""",
    ("causal()", 4, 2): """
· ·
· ·
■ ·
■ ■""",
    ("causal() & window(1)", 5, None): """
■ · · · ·
■ ■ · · ·
· ■ ■ · ·
· · ■ ■ ·
· · · ■ ■""",
    ("strided(3)", 8, None): """
■ · · · · · · ·
■ ■ · · · · · ·
■ ■ ■ · · · · ·
■ ■ ■ ■ · · · ·
· ■ ■ ■ ■ · · ·
· · ■ ■ ■ ■ · ·
■ · · ■ ■ ■ ■ ·
· ■ · · ■ ■ ■ ■""",
    ("fixed(3)", 8, None): """
■ · · · · · · ·
■ ■ · · · · · ·
■ ■ ■ · · · · ·
· · ■ ■ · · · ·
· · ■ ■ ■ · · ·
· · ■ ■ ■ ■ · ·
· · ■ · · ■ ■ ·
· · ■ · · ■ ■ ■""",
    ("global_tokens([1]) | window(0)", 4, None): """
■ ■ · ·
■ ■ ■ ■
· ■ ■ ·
· ■ · ■""",
    ("windows2d((2, 4), 2, shift=1)", 8, None): """
■ · · · · · · ·
· ■ ■ · · · · ·
· ■ ■ · · · · ·
· · · ■ · · · ·
· · · · ■ · · ·
· · · · · ■ ■ ·
· · · · · ■ ■ ·
· · · · · · · ■""",
    ("full()", 1, 1): "\n■",
}


@pytest.mark.parametrize("text, L, S", SMALL, ids=str)
def test_small_pictures(text, L, S):
    assert qkv.parse(text).show(L, S) == SMALL[text, L, S].removeprefix("\n")


@pytest.mark.parametrize("L, S", [(0, 0), (0, 3), (3, 0)])
def test_nothing_to_draw(L, S):
    assert qkv.causal().show(L, S) == "(no pairs: a length is 0)"


def test_heads_and_batch_rows_show_the_first():
    assert qkv.per_head([qkv.causal(), qkv.full()]).show(3) == qkv.causal().show(3)
    assert qkv.key_lengths([2, 3]).show(3) == qkv.prefix(2).show(3)
    keep = torch.tensor([[[True, False], [True, True]], [[True, True], [True, True]]])
    assert qkv.mask(keep=keep, axes="HLS").show(2) == qkv.causal().show(2)
    assert qkv.where(lambda b, h, i, j: j <= i).show(3) == qkv.causal().show(3)


def test_sixty_four_a_side_is_drawn_pair_by_pair_and_one_more_is_not():
    lines = qkv.causal().show(64).splitlines()
    assert lines == [" ".join("■" if j <= i else "·" for j in range(64)) for i in range(64)]
    assert qkv.causal().show(65).splitlines()[-1] == "one cell = 2 x 2 pairs; shades from ' ' none to '█' all"


def test_a_large_picture():
    """Six queries over 200 keys: cells of four by four, the last row of cells two high."""
    assert qkv.parse("strided(4) | global_tokens([0])").show(6, 200) == (
        "▒▒" + 47 * "░░" + "██··\n▒▒" + 48 * "░░" + "██\none cell = 4 x 4 pairs; shades from ' ' none to '█' all"
    )


@pytest.mark.parametrize("text", ["causal()", "window(9, 3)", "strided(7)", "block_local(30)", "~full()", "full()"])
@pytest.mark.parametrize("L, S", [(65, 65), (130, 130), (1, 65), (100, 3), (7, 321)])
def test_shades_are_the_share_of_each_cell(text, L, S):
    pattern = qkv.parse(text)
    dense, step = pattern.to_dense(L, S), math.ceil(max(L, S) / 64)
    lines = pattern.show(L, S).splitlines()
    assert len(lines) == math.ceil(L / step) + 1
    for r, drawn in enumerate(lines[:-1]):
        assert len(drawn) == 2 * math.ceil(S / step)
        for c in range(len(drawn) // 2):
            cell = dense[r * step : (r + 1) * step, c * step : (c + 1) * step]
            shade = SHADES[math.ceil(Fraction(int(cell.sum()), cell.numel()) * 5)]
            assert drawn[2 * c : 2 * c + 2] == 2 * shade
