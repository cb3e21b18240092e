"""Sentences and figures: what is said of a row of weights, and how numbers and names are written."""

from __future__ import annotations

import math

import pytest
import torch

from qkv.explain.figures import columns, decimals, label, listed, number, pad, plain, short, vector, wrap
from qkv.explain.words import dot_product, row_in_words, weighted_sum

KEYS = ("the", "cat", "sat", "on")
SENTENCES = [
    ([1.0, 0.0, 0.0, 0.0], 1, 'the: "sat" sees "the" alone, so all its weight goes there'),
    ([0.5, 0.5, 0.0, 0.0], 2, 'two: "sat" splits evenly between "the" and "cat"'),
    ([0.25, 0.25, 0.25, 0.25], 4, 'all: "sat" splits evenly between "the", "cat", itself and "on"'),
    ([0.95, 0.02, 0.01, 0.02], 4, 'one: "sat" looks almost only at "the" (95%)'),
    (
        [0.45, 0.04, 0.45, 0.06],
        4,
        'tie: "sat" listens equally to "the" and itself (45% each), hardly to "cat" and "on"',
    ),
    (
        [0.5, 0.2, 0.2, 0.1],
        4,
        'two: "sat" listens most to "the" (50%), then "cat" and itself (20% each), then "on" (10%)',
    ),
    ([0.0, 0.0, 0.0, 0.0], 0, '"sat" sees no key: its output is 0'),
    ([math.nan] * 4, 4, '"sat" is not a number: NaN or infinity stands in its query or in a key that it sees'),
]


@pytest.mark.parametrize("weights, seen, sentence", SENTENCES)
def test_row_in_words(weights, seen, sentence):
    visible = torch.arange(4) < seen
    expected = sentence.partition(": ")[2] if sentence[3:5] == ": " else sentence
    assert row_in_words(torch.tensor(weights, dtype=torch.float64), visible, "sat", KEYS) == expected


def test_even_weights_over_many_keys_are_listed_short():
    text = row_in_words(torch.full((9,), 1 / 9), torch.ones(9).bool(), "q0", [f"k{j}" for j in range(9)])
    assert text == "q0 spreads evenly over all 9 keys: k0, k1, k2 and 6 more"


def test_itself_is_the_same_token_not_the_same_label():
    keys = ("antidisestablishment", "antidisestablishments")
    text = row_in_words(torch.tensor([0.5, 0.5]), torch.ones(2).bool(), keys[0], keys)
    assert text == '"antidisestablis…" splits evenly between itself and "antidisestablis…"'


def test_dot_product_and_weighted_sum_are_written_out():
    q, k = torch.tensor([1.0, -2.0]), torch.tensor([0.5, 3.0])
    assert dot_product(q, k, ("a", "b")) == "S[a,b] = 1·0.5 + (−2)·3 = −5.5"
    long = dot_product(torch.arange(20.0), torch.ones(20), ("a", "b"))
    assert long == "S[a,b] = 0·1 + 1·1 + 2·1 + … + 19·1 = 190"
    values = torch.tensor([[1.0, 0.0], [0.0, 1.0], [9.0, 9.0]])
    text = weighted_sum(torch.tensor([0.25, 0.75, 0.0]), values, torch.tensor([0.25, 0.75]), "a")
    assert text == "O[a] = 0.250·(1, 0) + 0.750·(0, 1) = (0.250, 0.750)"
    assert weighted_sum(torch.zeros(3), values, torch.zeros(2), "a") == "O[a] = 0 = (0, 0)"


@pytest.mark.parametrize(
    "x, text",
    [
        (-0.0, "−0"),
        (0.0, "0"),
        (math.inf, "∞"),
        (-math.inf, "−∞"),
        (math.nan, "NaN"),
        (2.0, "2"),
        (0.5, "0.5"),
        (1 / 3, "0.333"),
        (1234.5678, "1234.6"),
        (1e-5, "1.0e−05"),
        (-3.2e7, "−3.2e+07"),
        (2.5e9, "2.5e+09"),
        (1.5e-17, "1.5e−17"),
    ],
)
def test_short(x, text):
    assert short(x) == text


def test_decimals_suit_all_numbers_of_a_table():
    assert decimals([1.0, -2.0, math.inf]) == 0
    assert decimals([0.5, 0.25]) == 3
    assert decimals([123.4, 0.5]) == 2
    assert decimals([1e6, 0.5]) == decimals([1e-4]) == -1
    assert number(-0.0, 3) == "−0.000"
    assert vector([0.5, 2.0]) == "(0.500, 2.000)"
    assert vector([float(i) for i in range(20)], 4) == "(0, 1, …, 19)"


def test_labels_show_what_a_terminal_would_hide():
    assert label("cat") == "cat"
    assert label("\x1b[31m") == "<1b>[31m"
    assert label("\u202e\u200b") == "<202e><…"
    assert label("e\u0301") == "e<301>"
    assert label("") == "<>"
    assert label("antidisestablishment") == "antidis…"
    assert label("注意力机制模型") == "注意力…"
    assert columns(label("注意力机制模型")) <= 8


def test_columns_count_wide_and_combining_signs():
    assert (columns("注意"), columns("e\u0301"), columns("abc")) == (4, 1, 3)
    assert pad("注", 4) == "注  "
    assert pad("注", 4, right=True) == "  注"
    assert wrap("注意 ab cd", 7) == ["注意 ab", "cd"]
    assert plain("−∞ · √D") == "-inf . sqrt D"


def test_listed():
    assert listed(["a"]) == "a"
    assert listed(["a", "b"]) == "a and b"
    assert listed(["a", "b", "c", "d", "e"]) == "a, b, c and 2 more"
