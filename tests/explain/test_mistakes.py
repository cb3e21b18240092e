"""The classic mistakes: each one's weights by an independent line of torch, and what is said of them."""

from __future__ import annotations

import math

import torch

from qkv.explain import MISTAKES, explain, worked_example

Q, K = (
    torch.tensor([[1, 0, 1, 0], [0, 2, 0, 1], [1, 1, 0, 2]]),
    torch.tensor([[1, 1, 0, 1], [0, 1, 1, 0], [2, 0, 0, 1]]),
)
SCORES = (Q @ K.T).double()
SEEN = torch.ones(3, 3).tril().bool()


def weights(name):
    return worked_example("cat").mistake(name).value[0, 0]


def test_no_scale():
    torch.testing.assert_close(weights("no-scale"), torch.softmax(SCORES.masked_fill(~SEEN, -math.inf), -1))
    mistake = worked_example("cat").mistake("no-scale")
    assert [round(w, 3) for w in mistake.value[0, 0, 2].tolist()] == [0.488, 0.024, 0.488]
    assert mistake.words == ('the largest weight of row "sat" goes from 0.45 to 0.488: sharper',)


def test_wrong_axis():
    torch.testing.assert_close(weights("wrong-axis"), torch.softmax((SCORES / 2).masked_fill(~SEEN, -math.inf), 0))
    assert worked_example().mistake("wrong-axis").words == ("row q0 sums to 6, not to 1",)


def test_mask_after_softmax_shows_in_a_row_that_hides_something():
    torch.testing.assert_close(weights("mask-after-softmax"), torch.softmax(SCORES / 2, -1) * SEEN)
    mistake = worked_example("cat").mistake("mask-after-softmax")
    assert mistake.row == 0
    assert mistake.words == ('row "the" sums to 0.274, not to 1',)
    assert (
        worked_example().mistake("mask-after-softmax").words[0].startswith("no difference: the pattern hides nothing")
    )


def test_inverted_mask():
    expected = torch.softmax((SCORES / 2).masked_fill(SEEN, -math.inf), -1)
    torch.testing.assert_close(weights("inverted-mask"), expected, equal_nan=True)
    assert expected[2].isnan().all()
    assert "torch.softmax gives NaN" in worked_example("cat").mistake("inverted-mask").words[0]


def test_each_mistake_can_be_shown_with_every_option():
    q = torch.randn(2, 2, 3, 4, generator=torch.Generator().manual_seed(0))
    e = explain(q, q, q, softcap=1.0, bias=torch.ones(3, 3) / 2, dropout_p=0.5)
    for name in MISTAKES:
        assert f"✗ {name}" in e.text(mistake=name)
