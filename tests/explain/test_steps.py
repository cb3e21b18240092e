"""`explain` as data: numbers known by hand, the independent oracle, and what it refuses."""

from __future__ import annotations

import json
import math

import pytest
import torch

import oracles
from qkv.attention import attention
from qkv.errors import (
    AddedMaskWarning,
    DTypeError,
    InvertedMaskWarning,
    ShapeError,
    SizeLimit,
    UnknownName,
    ValueOutOfRange,
)
from qkv.explain import STEP_KEYS, Explanation, explain, worked_example
from qkv.explain import stages as stages_module
from qkv.patterns import causal, key_padding, mask, window
from qkv.scores import alibi, relative


def draw(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def draw_call(B=2, H=4, G=2, L=5, S=7, D=3, V=2):
    return draw(B, H, L, D, seed=1), draw(B, G, S, D, seed=2), draw(B, G, S, V, seed=3)


def test_article_gives_the_row_of_the_text():
    e = worked_example("article")
    assert e.steps["scores"].value.tolist() == [[[[1, 0, 1, 2, 0, 1]]]]
    x = math.exp(1 / math.sqrt(2))
    total = 3 * x + 2 + x * x
    expected = torch.tensor([x, 1, x, x * x, 1, x], dtype=torch.float64) / total
    torch.testing.assert_close(e.steps["softmax"].value.flatten(), expected, rtol=0, atol=1e-15)
    even, odd = (2 * x + 1) / total, (x * x + x + 1) / total
    expected = torch.tensor([even, odd], dtype=torch.float64)
    torch.testing.assert_close(e.steps["output"].value.flatten(), expected, rtol=0, atol=1e-15)


def test_cat_gives_the_numbers_computed_by_hand():
    e = worked_example("cat")
    assert e.steps["scores"].value[0, 0].tolist() == [[1, 1, 2], [3, 2, 1], [4, 1, 4]]
    assert e.steps["mask"].value[0, 0].tolist() == [[0.5, -math.inf, -math.inf], [1.5, 1.0, -math.inf], [2.0, 0.5, 2.0]]
    weights = [[round(w, 3) for w in row] for row in e.steps["softmax"].value[0, 0].tolist()]
    assert weights == [[1.0, 0.0, 0.0], [0.622, 0.378, 0.0], [0.45, 0.1, 0.45]]
    assert round(e.steps["softmax"].parts["sum"][0, 0, 2].item(), 3) == 2.223
    assert round(e.steps["softmax"].parts["entropy"][0, 0, 2].item(), 2) == 0.95
    assert [round(x, 3) for x in e.steps["output"].value[0, 0, 2].tolist()] == [1.349, 1.0]


BIASES = {
    "none": lambda: None,
    "tensor": lambda: draw(2, 1, 5, 7, seed=4),
    "hiding": lambda: torch.zeros(5, 7).masked_fill(torch.eye(5, 7).bool(), -math.inf),
    "alibi": lambda: alibi([0.5, 0.25, 0.125, 2.0]),
    "relative": lambda: relative(draw(4, 5, seed=5)),
}


def dense(name, offset):
    i, j = torch.arange(5)[:, None] + offset, torch.arange(7)[None]
    if name == "alibi":
        return -torch.tensor([0.5, 0.25, 0.125, 2.0]).double()[:, None, None] * (i - j).abs()
    if name == "relative":
        return draw(4, 5, seed=5)[:, (j - i).clamp(-2, 2) + 2]
    return BIASES[name]()


@pytest.mark.parametrize("bias", BIASES)
@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize("scale", [None, 0.3, -2.0])
def test_steps_equal_the_oracle(bias, softcap, scale):
    q, k, v = draw_call()
    e = explain(q, k, v, pattern=causal(), bias=BIASES[bias](), softcap=softcap, scale=scale)
    allowed = torch.ones(5, 7).tril(2).bool().expand(2, 4, 5, 7)
    added = dense(bias, offset=2)
    truth = oracles.attend(
        q, k, v, allowed, scale=scale, softcap=softcap, bias=None if added is None else added.double()
    )
    torch.testing.assert_close(e.steps["softmax"].value, truth.weights, rtol=0, atol=1e-14)
    torch.testing.assert_close(e.steps["output"].value, truth.out, rtol=0, atol=1e-14)
    assert e.agrees
    assert ("softcap" in e.steps, "bias" in e.steps) == (softcap is not None, bias != "none")
    assert list(e.steps) == [key for key in STEP_KEYS if key in e.steps]


def test_every_rank_and_integers_are_welcome():
    q, k, v = (x[0, 0] for x in draw_call())
    flat = explain(q, k, v).steps["output"].value
    assert flat.shape == (1, 1, 5, 2)
    assert torch.equal(explain(q[None], k[None], v[None]).steps["output"].value, flat)
    whole = torch.tensor([[1, 0], [2, 1]])
    assert explain(whole, whole, whole).steps["scores"].value.tolist() == [[[[1, 2], [2, 5]]]]


@pytest.mark.parametrize("offset", [None, 0, 3, [1, 4]])
def test_dropout_mask_is_that_of_the_library_for_the_same_seed(offset):
    q, k, v = draw_call(G=4)
    e = explain(q, k, v, pattern=causal(), dropout_p=0.4, seed=11, query_offset=offset)
    keep = e.steps["dropout"].parts["keep"]
    assert 0.2 < keep.double().mean() < 0.9
    torch.manual_seed(11)
    ours = attention(q, k, v, pattern=causal(), dropout_p=0.4, query_offset=offset, backend="reference")
    torch.testing.assert_close(e.steps["output"].value, ours, rtol=0, atol=1e-14)
    kept = e.steps["softmax"].value * keep / (1 - 26214 / 65536)
    torch.testing.assert_close(e.steps["dropout"].value, kept, rtol=0, atol=1e-15)
    other = explain(q, k, v, pattern=causal(), dropout_p=0.4, seed=12, query_offset=offset)
    assert not torch.equal(other.steps["dropout"].parts["keep"], keep)


def test_patterns_that_differ_by_batch_row_are_shown_for_the_chosen_one():
    q, k, v = draw_call()
    keep = torch.ones(2, 7, dtype=torch.bool)
    keep[1, 4:] = False
    e = explain(q, k, v, pattern=key_padding(keep=keep), batch=1, head=-1, row=0)
    assert e.setting.visible.tolist() == [[True] * 4 + [False] * 3] * 5
    assert (e.setting.batch, e.setting.head, e.setting.key_head, e.setting.row) == (1, 3, 1, 0)
    assert torch.equal(e.setting.keys, k[1, 1])


def test_row_that_sees_nothing_is_zero_everywhere():
    q, k, v = draw_call(G=4)
    keep = torch.ones(5, 7, dtype=torch.bool)
    keep[2] = False
    e = explain(q, k, v, pattern=mask(keep=keep), row=2)
    assert e.steps["softmax"].value[:, :, 2].abs().sum() == 0
    assert e.steps["output"].value[:, :, 2].abs().sum() == 0
    assert e.agrees
    assert "no key is left for q2: weights and output are 0 there" in e.steps["mask"].words
    assert "q2 sees no key: its output is 0" in str(e)


def test_hidden_nan_does_not_matter_and_visible_nan_shows():
    q, k, v = draw_call(B=1, H=1, G=1, L=7)
    k[..., 5, :] = math.nan
    v[..., 5, :] = math.inf
    e = explain(q, k, v, pattern=causal())
    out = e.steps["output"].value
    assert out[0, 0, :5].isfinite().all()
    assert not out[0, 0, 5:].isfinite().any()
    assert e.agrees
    assert e.steps["output"].checks[0].reason.startswith("it spreads NaN")
    assert "q6 is not a number" in str(e)


def test_bias_of_minus_infinity_hides_like_a_pattern():
    q, k, v = draw_call()
    e = explain(q, k, v, bias=BIASES["hiding"]())
    assert torch.equal(e.setting.visible, ~torch.eye(5, 7).bool())
    assert "5 of 35 pairs are hidden" in e.steps["mask"].words


def test_no_keys_at_all_give_zeros():
    e = explain(torch.ones(2, 3), torch.ones(0, 3), torch.ones(0, 2))
    assert e.steps["output"].value.tolist() == [[[[0, 0], [0, 0]]]]
    assert "q1 sees no key" in str(e)


def test_checks_name_what_cannot_be_compared():
    q, k, v = draw_call()
    reasons = [
        explain(q, k, v, softcap=2.0).steps["output"].checks[0].reason,
        explain(q, k, v, scale=-1.0).steps["output"].checks[0].reason,
        explain(q, k, v, scale=0.0).steps["output"].checks[0].reason,
    ]
    assert reasons == ["it has no softcap", "it needs a scale above 0", "it needs a scale above 0"]
    assert explain(q, k, v).steps["output"].checks[0].reason == ""


DEFECTS = {
    "grouped heads interleaved": ("grouped", lambda t, heads: t.repeat(1, heads // t.shape[1], 1, 1)),
    "value read shifted": (
        "weighted",
        lambda setting, weights: weights.roll(1, -1) @ setting.value.repeat_interleave(2, 1),
    ),
}


@pytest.mark.parametrize("defect", DEFECTS)
def test_a_planted_defect_fails_the_check(defect, monkeypatch):
    name, wrong = DEFECTS[defect]
    q, k, v = draw_call()
    assert explain(q, k, v).agrees
    monkeypatch.setattr(stages_module, name, wrong)
    assert not explain(q, k, v).agrees


def test_scale_off_by_one_percent_fails_the_check(monkeypatch):
    q, k, v = draw_call()
    right = stages_module.scale

    def wrong(setting, before):
        return right(setting, before * 1.01)

    monkeypatch.setattr(stages_module, "scale", wrong)
    e = explain(q, k, v)
    assert not e.agrees
    assert "✗ differs from torch's scaled_dot_product_attention" in str(e)


REFUSED = {
    "row": ({"row": 5}, ValueOutOfRange, "`row` must lie in 0..4; got 5"),
    "head": ({"head": -5}, ValueOutOfRange, "`head` must lie in 0..3; got -5"),
    "batch": ({"batch": 2}, ValueOutOfRange, "`batch` must lie in 0..1; got 2"),
    "tokens": ({"tokens": ["a"]}, ShapeError, "`tokens` must have L = 5 names; got 1"),
    "key tokens": ({"key_tokens": ["a"]}, ShapeError, "`key_tokens` must have S = 7 names; got 1"),
    "dropout": ({"dropout_p": 1.0}, ValueOutOfRange, "`dropout_p` must hold 0 ≤ p < 1"),
    "scale": ({"scale": math.nan}, ValueOutOfRange, "`scale` must be finite"),
    "pattern": ({"pattern": "causal()"}, DTypeError, "`pattern` must be a Pattern"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refuses(case):
    options, error, text = REFUSED[case]
    with pytest.raises(error) as caught:
        explain(*draw_call(), **options)
    assert text in str(caught.value)


def test_refuses_tensors_that_are_none_or_do_not_fit():
    q, k, v = draw_call()
    with pytest.raises(DTypeError):
        explain(q.tolist(), k, v)
    with pytest.raises(DTypeError):
        explain(q > 0, k > 0, v > 0)
    with pytest.raises(ShapeError):
        explain(q, k[..., :2], v)
    with pytest.raises(ShapeError, match="explain needs at least one query; got L = 0"):
        explain(q[:, :, :0], k, v)
    with pytest.raises(
        SizeLimit, match="at most B·H·L·S = 4,194,304 scores; got B = 1 · H = 1 · L = 4,096 · S = 4,096"
    ):
        explain(torch.ones(4096, 1), torch.ones(4096, 1), torch.ones(4096, 1))


def test_dict_is_json_and_says_infinity_as_text():
    e = explain(*draw_call(), pattern=window(1) & causal(), dropout_p=0.25, seed=3)
    back = json.loads(json.dumps(e.to_dict(), allow_nan=False))
    assert back["steps"]["mask"]["value"][0][0][0][-1] == "-inf"
    assert torch.equal(torch.tensor(back["steps"]["softmax"]["value"], dtype=torch.float64), e.steps["softmax"].value)
    assert back["steps"]["scores"]["shapes"] == {"Q": [2, 4, 5, 3], "K": [2, 2, 7, 3], "S": [2, 4, 5, 7]}
    assert back["pattern"] == "window(1) & causal()"
    assert back["steps"]["output"]["checks"][1]["passed"] is True


def test_unknown_names_get_the_nearest_one():
    e = worked_example()
    with pytest.raises(UnknownName, match="got 'sofmax'; did you mean 'softmax'"):
        e.text(steps=["sofmax"])
    with pytest.raises(UnknownName, match="did you mean 'no-scale'"):
        e.mistake("noscale")
    with pytest.raises(UnknownName, match="did you mean 'article'"):
        worked_example("artikel")


def test_warnings_come_once():
    q, k, v = draw_call()
    with pytest.warns(AddedMaskWarning) as caught:
        explain(q, k, v, bias=torch.eye(5, 7))
    assert len(caught) == 1
    with pytest.warns(InvertedMaskWarning) as caught:
        e = explain(q, k, v, pattern=mask(keep=torch.zeros(5, 7).bool()))
    assert len(caught) == 1
    assert e.steps["output"].value.abs().sum() == 0


def test_repeated_tokens_are_told_apart():
    x = torch.eye(3)
    e = explain(x, x, x, tokens=["the", "cat", "the"])
    assert e.setting.query_tokens == e.setting.key_tokens == ("the", "cat", "the#2")
    assert e.steps["softmax"].words[2].startswith('"the#2" listens most to itself (47%), then "the" and "cat"')


def test_repr_is_one_line():
    assert isinstance(worked_example(), Explanation)
    assert (
        repr(worked_example())
        == "<Explanation B=1, H=1, G=1, L=1, S=6, D=2, V=2, steps scores scale mask softmax dropout output>"
    )
