"""What changes the distribution of the next token, against the formulas, transformers and counted draws."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from qkv.errors import DTypeError, ValueOutOfRange
from qkv.models.sampling import FEW, Sampling, drawn

BELOW_ONE = math.nextafter(1.0, 0.0)


def some_logits(*, rows=4, vocabulary=50, seed=0, dtype=torch.float64, levels=None):
    """Random logits; with `levels`, rounded to so many steps a unit, so that many are equal."""
    logits = torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * 3
    return (logits if levels is None else (logits * levels).round() / levels).to(dtype)


def some_seen(logits, *, seed=1):
    return torch.rand(logits.shape, generator=torch.Generator().manual_seed(seed)) < 0.3


def oracle(logits, seen, *, temperature, top_k, top_p, repetition_penalty):
    """Probabilities of each row in plain Python, token by token."""
    rows = []
    for values, marks in zip(logits.double().tolist(), seen.tolist(), strict=True):
        scores = [
            (value * repetition_penalty if value < 0 else value / repetition_penalty) if mark else value
            for value, mark in zip(values, marks, strict=True)
        ]
        scores = [score / temperature for score in scores]
        order = sorted(range(len(scores)), key=lambda token: (-scores[token], token))
        kept = order if top_k is None else [token for token in order if scores[token] >= scores[order[:top_k][-1]]]
        weights = {token: math.exp(scores[token] - scores[order[0]]) for token in kept}
        total, mass, stay = math.fsum(weights.values()), 0.0, []
        for token in kept:
            if stay and top_p is not None and mass >= top_p * total:
                break
            stay.append(token)
            mass += weights[token]
        rows.append([weights[token] / mass if token in stay else 0.0 for token in range(len(scores))])
    return torch.tensor(rows, dtype=torch.float64)


OPTIONS = [
    {"temperature": 1.0},
    {"temperature": 0.3},
    {"temperature": 2.5, "repetition_penalty": 1.3},
    {"temperature": 1.0, "repetition_penalty": 0.7},
    {"temperature": 0.8, "top_k": 1},
    {"temperature": 0.8, "top_k": 7},
    {"temperature": 0.8, "top_k": 50},
    {"temperature": 1.2, "top_k": 500},
    {"temperature": 1.0, "top_p": 0.05},
    {"temperature": 1.0, "top_p": 0.9},
    {"temperature": 30.0, "top_p": 0.97},
    {"temperature": 1.0, "top_p": 1.0},
    {"temperature": 1.5, "top_k": 12, "top_p": 0.8, "repetition_penalty": 1.2},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("levels", [None, 2], ids=["unequal", "ties"])
def test_scores_are_those_of_the_formulas(options, levels):
    logits = some_logits(vocabulary=300, levels=levels)
    seen = some_seen(logits)
    given_all = {"top_k": None, "top_p": None, "repetition_penalty": 1.0} | options
    expected = oracle(logits, seen, **given_all)
    found = Sampling(**options).scores(logits, seen).softmax(-1)
    assert torch.equal(found == 0, expected == 0)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=0)


@given(
    seed=st.integers(0, 2**20),
    vocabulary=st.integers(1, 3 * FEW),
    levels=st.sampled_from([None, 1, 4]),
    p=st.floats(0.01, 0.999),
    temperature=st.floats(0.1, 50),
)
def test_top_p_is_the_smallest_set_that_reaches_p(seed, vocabulary, levels, p, temperature):
    logits = some_logits(rows=3, vocabulary=vocabulary, seed=seed, levels=levels)
    probabilities = (logits / temperature).softmax(-1)
    stay = Sampling(temperature=temperature, top_p=p).scores(logits).isfinite()
    for row, kept in zip(probabilities, stay, strict=True):
        mass = row[kept].sum()
        assert mass >= p - 1e-12
        assert mass - row[kept].min() < p + 1e-12
        if not kept.all():
            assert row[~kept].max() <= row[kept].min() * (1 + 1e-12)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("levels", [None, 2], ids=["unequal", "ties"])
def test_scores_are_the_distribution_of_transformers(options, levels):
    processors = pytest.importorskip("transformers.generation.logits_process")
    logits = some_logits(vocabulary=300, levels=levels)
    seen = some_seen(logits)
    expected = logits
    if "repetition_penalty" in options:
        penalty = processors.RepetitionPenaltyLogitsProcessor(options["repetition_penalty"])
        rows = [penalty(marks.nonzero().T, row[None]) for marks, row in zip(seen, logits, strict=True)]
        expected = torch.cat(rows)
    expected = processors.TemperatureLogitsWarper(options["temperature"])(None, expected)
    if "top_k" in options:
        expected = processors.TopKLogitsWarper(options["top_k"])(None, expected)
    if "top_p" in options:
        expected = processors.TopPLogitsWarper(options["top_p"])(None, expected)
    expected = expected.softmax(-1)
    found = Sampling(**options).scores(logits, seen).softmax(-1)
    if levels is not None and "top_p" in options:  # which of the equal ones stay is left to its sort
        found, expected = found.sort(-1).values, expected.sort(-1).values
    assert torch.equal(found == 0, expected == 0)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=0)


@pytest.mark.parametrize("p, kept", [(0.125, [0]), (0.25, [0, 1]), (0.5, [0, 1, 2, 3]), (0.51, [0, 1, 2, 3, 4])])
def test_top_p_of_equal_tokens_keeps_those_of_lower_number(p, kept):
    scores = Sampling(temperature=1.0, top_p=p).scores(torch.zeros(1, 8))
    assert scores.isfinite().nonzero()[:, 1].tolist() == kept


def test_top_k_keeps_all_that_are_as_probable_as_the_kth():
    scores = Sampling(temperature=1.0, top_k=2).scores(torch.tensor([[1.0, 3.0, 1.0, 0.0, 1.0]]))
    assert scores.isfinite().tolist() == [[True, True, True, False, True]]


def test_a_wide_vocabulary_is_looked_at_further():
    logits = torch.zeros(2, 5000, dtype=torch.float64)
    logits[0, 17] = 30.0  # one row is done at once, the other needs nearly all
    stay = Sampling(temperature=1.0, top_p=0.9001).scores(logits).isfinite()
    assert stay.sum(-1).tolist() == [1, 4501]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_scores_are_wide(dtype):
    logits = some_logits(dtype=dtype)
    assert Sampling(temperature=0.5).scores(logits).dtype == torch.float32


@pytest.mark.parametrize("temperature", [1e-6, 1e30])
def test_extreme_temperatures_stay_finite_distributions(temperature):
    logits = torch.tensor([[1e4, 1e4, -1e4, 0.0]])
    probabilities = Sampling(temperature=temperature).scores(logits).softmax(-1)
    expected = [0.5, 0.5, 0, 0] if temperature < 1 else [0.25] * 4
    assert probabilities.tolist() == [expected]


def test_temperature_zero_takes_the_first_of_the_most_probable():
    logits = torch.tensor([[0.0, 2.0, 2.0], [5.0, -1.0, 5.0]])
    assert Sampling().choose(logits).tolist() == [1, 0]


def test_penalty_changes_the_most_probable():
    logits = torch.tensor([[2.0, 1.9], [-1.0, -1.1]])
    seen = torch.tensor([[True, False], [True, False]])
    assert Sampling().choose(logits).tolist() == [0, 0]
    assert Sampling(repetition_penalty=1.2).choose(logits, seen).tolist() == [1, 1]


def test_tokens_are_drawn_as_often_as_probable():
    vocabulary, count = 40, 20_000
    sampling = Sampling(temperature=1.3, top_k=30, top_p=0.95)
    logits = some_logits(rows=1, vocabulary=vocabulary)
    probabilities = sampling.scores(logits).softmax(-1)[0]
    draws = torch.rand(count, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    counts = sampling.choose(logits.expand(count, -1), None, draws).bincount(minlength=vocabulary).double()
    kept = probabilities > 0
    assert not counts[~kept].any()
    expected = probabilities[kept] * count
    chi_square = ((counts[kept] - expected).square() / expected).sum().item()
    freedom = int(kept.sum()) - 1
    assert chi_square < freedom + 4 * math.sqrt(2 * freedom)  # 4 standard deviations; the seed is fixed
    other = (probabilities[kept].roll(1) * count).clamp(min=1e-9)
    assert ((counts[kept] - other).square() / other).sum() > 100 * freedom  # what the bound tells apart


@pytest.mark.parametrize("draw, token", [(0.0, 1), (0.2499, 1), (0.25, 3), (0.9999, 3), (BELOW_ONE, 3)])
def test_a_draw_falls_on_the_token_whose_share_holds_it(draw, token):
    probabilities = torch.tensor([[0.0, 0.25, 0.0, 0.75, 0.0]])
    assert drawn(probabilities.log(), torch.tensor([draw], dtype=torch.float64)).tolist() == [token]


def test_the_greatest_draw_never_falls_beyond_the_last_token():
    scores = some_logits(rows=200, vocabulary=333)
    scores[:, 300:] = -math.inf
    tokens = drawn(scores, torch.full((200,), BELOW_ONE, dtype=torch.float64))
    assert tokens.max() < 300
    assert scores.gather(1, tokens[:, None]).isfinite().all()


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_not_finite_are_refused(value, temperature):
    logits = torch.zeros(3, 4)
    logits[1] = value
    with pytest.raises(ValueOutOfRange, match=r"logits must be finite numbers; the largest of row 1 is -?(nan|inf)"):
        Sampling(temperature=temperature).choose(logits, None, torch.zeros(3, dtype=torch.float64))


@pytest.mark.parametrize(
    "options, error, text",
    [
        ({"temperature": -1.0}, ValueOutOfRange, "`temperature` must be 0 or at least 1e-06; got -1.0; 0 takes the"),
        ({"temperature": 1e-7}, ValueOutOfRange, "got 1e-07"),
        ({"temperature": math.nan}, ValueOutOfRange, "`temperature` must be a finite number; got nan"),
        ({"temperature": "1"}, DTypeError, "`temperature` must be a number; got str"),
        ({"temperature": True}, DTypeError, "`temperature` must be a number; got bool"),
        ({"temperature": 1.0, "top_k": 0}, ValueOutOfRange, "`top_k` must be at least 1; got 0"),
        ({"temperature": 1.0, "top_k": 1.5}, DTypeError, "`top_k` must be an int; got 1.5"),
        ({"temperature": 1.0, "top_p": 0.0}, ValueOutOfRange, r"`top_p` must lie in \(0, 1\]; got 0.0"),
        ({"temperature": 1.0, "top_p": 1.1}, ValueOutOfRange, "got 1.1; None keeps all tokens"),
        ({"repetition_penalty": 0.0}, ValueOutOfRange, r"`repetition_penalty` must lie in 1e-06 .. 1e\+06; got 0.0"),
        ({"repetition_penalty": 1e-39}, ValueOutOfRange, "got 1e-39; 1 changes nothing"),
        ({"repetition_penalty": 1e300}, ValueOutOfRange, r"got 1e\+300; 1 changes nothing"),
        ({"repetition_penalty": math.inf}, ValueOutOfRange, "must be a finite number; got inf"),
        ({"top_k": 5}, ValueOutOfRange, "`top_k` needs a temperature above 0"),
        ({"top_p": 0.5}, ValueOutOfRange, "`top_p` needs a temperature above 0, .*; set temperature=1.0"),
    ],
)
def test_sampling_refuses_what_cannot_be(options, error, text):
    with pytest.raises(error, match=text):
        Sampling(**options)
