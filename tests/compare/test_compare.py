"""`qkv.compare`: what is measured is right, what is wrong is refused, and what is told follows from the figures."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, replace

import pytest
import torch

import qkv
from qkv import compare
from qkv.compare import families, measuring, weighing
from qkv.compare.calls import next_token, prepare, whole
from qkv.compare.check import TOKENS, check, distance
from qkv.compare.families import BY_NAME, FAMILIES
from qkv.compare.growth import crossing, growth
from qkv.compare.inputs import make_streams
from qkv.compare.memory import STATUS, MemoryProbe
from qkv.compare.record import Point
from qkv.compare.setting import DIRECTIONS, Setting
from qkv.compare.timing import Sample, rounds
from qkv.compare.truth import defined
from qkv.errors import QkvError, UnsupportedError
from qkv.linear.features import FEATURE_MAPS
from qkv.linear.state_rules import RULES

NAMES = [family.name for family in FAMILIES]
SMALL = {"heads": 2, "head_dim": 8, "budget": 0.5}


class NoProbe:
    """A helper that knows no memory."""

    def __init__(self, *given):
        pass

    def ask(self, question):
        return None

    def close(self):
        pass


@pytest.fixture
def quick(monkeypatch):
    """No process is started, and each sample is one call."""
    monkeypatch.setattr(weighing, "MemoryProbe", NoProbe)
    monkeypatch.setattr(measuring, "SHORT", 0.0)


def louder(family, factor=1.001):
    return replace(family, function=lambda *tensors, **given: factor * family.function(*tensors, **given))


def points(*pairs):
    return [Point(tokens=tokens, seconds=seconds, spread=(seconds, seconds), runs=1) for tokens, seconds in pairs]


# What is compared


def test_every_rule_and_every_map_of_the_library_is_a_family():
    rules = {name.replace("-", "_") for name in NAMES if BY_NAME[name].kind == "recurrence"}
    assert rules == {*RULES} - {"linear"}
    features = {family.feature for family in FAMILIES if family.feature}
    assert features == {*FEATURE_MAPS} - {"none", "relu", "squared_relu"}
    assert {family.group for family in FAMILIES} == {*families.GROUPS}
    assert {family.order for family in FAMILIES} == {*families.ORDER_OF_A_STEP}


def test_families_read_the_same_q_k_and_v():
    setting = Setting(head_dim=8)
    first = make_streams(BY_NAME["causal"], setting, 70)
    for family in FAMILIES:
        streams = make_streams(family, setting, 70)
        assert torch.equal(streams["value"], first["value"])
        expected = first["key"] / first["key"].norm(dim=-1, keepdim=True) if family.unit else first["key"]
        torch.testing.assert_close(streams["key"], expected)
    assert not torch.equal(make_streams(FAMILIES[0], replace(setting, seed=1), 70)["query"], first["query"])


def test_definition_of_features_is_linear_attention():
    streams = {name: x.double() for name, x in make_streams(BY_NAME["linear-elu"], Setting(head_dim=8), 40).items()}
    expected = qkv.linear_attention(*streams.values(), backend="reference")
    torch.testing.assert_close(defined(BY_NAME["linear-elu"], streams), expected, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    "direction, dtype", [(one, "float32") for one in DIRECTIONS] + [("forward+backward", "bfloat16")]
)
def test_every_family_passes_its_check(name, direction, dtype):
    if direction == "decode" and not BY_NAME[name].decodes:
        return
    verdict = check(BY_NAME[name], Setting(direction=direction, dtype=dtype, head_dim=12, value_dim=20))
    assert 0 < verdict.share < 0.7
    assert verdict.passed


@pytest.mark.parametrize("direction", ["forward", "forward+backward"])
@pytest.mark.parametrize("dtype, factor", [("float64", 1 + 1e-10), ("float32", 1.0001), ("bfloat16", 1.02)])
@pytest.mark.parametrize("name", ["causal", "window", "linear-elu", "gated-delta"])
def test_check_refuses_a_wrong_scale(name, dtype, factor, direction, monkeypatch):
    setting = Setting(direction=direction, dtype=dtype, head_dim=12)
    right = BY_NAME[name]
    wrong = replace(right, function=_but_for_the_truth(right.function, lambda output: factor * output))
    assert check(right, setting).passed
    verdict = check(wrong, setting)
    assert not verdict.passed
    assert "times what rounding may explain away from float64" in str(verdict)


def test_check_refuses_what_is_not_a_number_and_one_wrong_row():
    setting, right = Setting(head_dim=12), BY_NAME["causal"]

    def one_row(output):
        output = output.clone()
        output[0, 1, 200] *= 1.001
        return output

    for change in (one_row, lambda output: output * math.nan):
        assert not check(replace(right, function=_but_for_the_truth(right.function, change)), setting).passed


def test_check_refuses_a_wrong_gradient():
    right = BY_NAME["delta"]

    def function(query, key, value, *, backend, **given):
        key = key if backend == "reference" else key + 0.001 * (key - key.detach())
        return right.function(query, key, value, backend=backend, **given)

    verdict = check(replace(right, function=function), Setting(direction="forward+backward", head_dim=12))
    assert verdict.what == "the gradient of key"
    assert not verdict.passed


def test_check_sees_further_than_a_window():
    """A window that is one too long differs from its definition at the length of the check."""
    longer = qkv.sliding_window(families.WINDOW + 1)
    right = BY_NAME["window"]

    def function(*tensors, pattern, backend):
        return right.function(*tensors, pattern=pattern if backend == "reference" else longer, backend=backend)

    assert not check(replace(right, function=function), Setting(head_dim=12)).passed


def _but_for_the_truth(function, change):
    """A function whose measured form is wrong, and whose definition is not."""

    def changed(*tensors, backend, **given):
        output = function(*tensors, backend=backend, **given)
        return output if backend == "reference" else change(output)

    return changed


@pytest.mark.parametrize("name", [name for name in NAMES if BY_NAME[name].decodes])
def test_first_step_is_the_last_row(name):
    family, setting = BY_NAME[name], Setting(direction="decode", head_dim=8)
    streams = make_streams(family, setting, 300)
    call = next_token(family, setting, streams, 300, all_read=True)
    step = call.read(call.run())["output"]
    answer = whole(families.call(family, 300), streams, streams["value"], "forward")
    torch.testing.assert_close(step, answer.read(answer.run())["output"][:, :, -1:], rtol=1e-4, atol=1e-5)
    assert call.run().shape == (1, 8, 1, setting.value_dim)


def test_memory_of_a_step_is_that_of_cache_or_state():
    setting = Setting(direction="decode", head_dim=16, value_dim=24)
    held = {name: prepare(BY_NAME[name], setting, 4096).held for name in ("causal", "window", "delta", "linear-elu")}
    assert held["causal"] == 8 * 4096 * (16 + 24) * 4
    assert held["window"] < held["causal"] / 4
    assert held["delta"] == 8 * 16 * 24 * 4
    assert held["linear-elu"] == 8 * 16 * 25 * 4


def test_distance_is_none_for_dense_and_falls_with_the_window():
    setting = Setting(head_dim=8)
    assert distance(BY_NAME["full"], setting, 512) == distance(BY_NAME["causal"], setting, 512) == 0
    assert distance(BY_NAME["window"], setting, 200) < 1e-6  # sees all
    assert 0.05 < distance(BY_NAME["window"], setting, 1024) < 0.9
    assert distance(BY_NAME["linear-taylor"], setting, 128) < distance(BY_NAME["linear-elu"], setting, 128)
    assert 0 < distance(BY_NAME["ssd"], setting, 128) <= 1  # up to a factor
    assert distance(louder(BY_NAME["ssd"], 7.0), setting, 128) == pytest.approx(distance(BY_NAME["ssd"], setting, 128))


# What is made of the figures


def test_growth_is_the_exponent():
    assert growth(points(*((n, 3e-7 * n**1.5) for n in (512, 1024, 4096)))) == pytest.approx(1.5)
    assert growth(points((512, 1.0))) is None


@pytest.mark.parametrize(
    "mine, where, tokens",
    [
        ([(100, 2.0), (200, 4.0), (400, 8.0)], "within", 200),  # exactly where the lines meet
        ([(100, 1.5), (200, 3.0), (400, 6.0)], "within", 150),
        ([(100, 0.5), (200, 1.0), (400, 2.0)], "below", 100),
        ([(100, 8.0), (200, 16.0), (400, 32.0)], "beyond", 800),
        ([(100, 2.0), (200, 8.0), (400, 32.0)], "never", None),
        ([(100, 2.0), (200, 7.9), (400, 31.0)], "never", None),  # so slowly that it is out of sight
        ([(100, 0.9), (200, 5.0), (400, 8.0)], "within", None),  # cheaper, dearer, and cheaper for good
        ([(800, 1.0)], "unknown", None),
        ([(400, 99.0)], "unknown", None),
        ([], "unknown", None),
    ],
)
def test_crossing_with_the_baseline(mine, where, tokens):
    found = crossing(points(*mine), points(*((n, n * n / 10_000) for n in (100, 200, 400))))
    assert found.where == where
    if tokens is not None:
        assert found.tokens == pytest.approx(tokens, rel=0.01)


def test_calls_take_turns():
    order = []
    runs = {name: lambda name=name: order.append(name) for name in "abc"}
    found = rounds(runs, calls={"a": 1, "b": 2, "c": 1}, least=2, most=5, until=0.0)
    assert "".join(order) == "abbcabbc"
    assert {name: len(samples) for name, samples in found.items()} == {"a": 2, "b": 2, "c": 2}
    order.clear()
    rounds(runs, calls=dict.fromkeys("abc", 1), least=1, most=3, until=math.inf)
    assert "".join(order) == "abcabcabc"


@pytest.mark.parametrize("threads, seconds", [(1, 2.0), (2, 5.0)])
def test_one_thread_is_timed_by_its_own_clock(threads, seconds, monkeypatch, quick):
    monkeypatch.setattr(measuring, "timed", lambda run: (Sample(2.0, 5.0), run()))
    monkeypatch.setattr(measuring, "rounds", lambda runs, **given: {name: [Sample(2.0, 5.0)] for name in runs})
    before = torch.get_num_threads()
    found = compare.run(lengths=[64], families=["causal"], threads=threads, **SMALL)
    assert [point.seconds for point in found.rows[0].points] == [seconds]
    assert found.clock == ("cpu" if threads == 1 else "wall")
    assert torch.get_num_threads() == before


def test_what_would_not_fit_the_budget_is_left_out_and_says_so(monkeypatch, quick):
    seconds = {"causal": 1e-9, "ssd": 1e-9}

    def fake(runs, **given):
        return {name: [Sample(seconds[name], 1.0)] for name in runs}

    monkeypatch.setattr(measuring, "rounds", fake)
    seconds["causal"] = 0.1
    found = compare.run(lengths=[64, 128, 256], families=["causal", "ssd"], **{**SMALL, "budget": 2.0})
    causal, ssd = found.rows
    assert [point.tokens for point in causal.points] == [64]
    assert causal.left_out == "from 128 on: a call would take about 0 s, see the budget"
    assert [point.tokens for point in ssd.points] == [64, 128, 256]
    assert "causal was left out from 128 on" in str(found)


# From end to end


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_run_measures_every_family(direction, quick):
    told = []
    found = compare.run(lengths=[128, 64], direction=direction, tell=told.append, **SMALL)
    assert found.passed
    assert found.setting.lengths == (64, 128)
    assert [row.name for row in found.rows] == [n for n in NAMES if BY_NAME[n].decodes or direction != "decode"]
    for row in found.rows:
        assert [point.tokens for point in row.points] == [64, 128]
        assert all(point.spread[0] <= point.seconds <= point.spread[1] for point in row.points)
        assert all(point.runs >= 2 for point in row.points)
        assert row.exponent is not None
        assert (row.crossing is None) == (row.group == "dense")
        assert (row.points[0].memory is not None) == (direction == "decode")
    assert found.row("ssd").order == ("d^2" if direction == "decode" else "L d^2")
    assert told[0].startswith("checking ")
    assert f"64 tokens: {', '.join(row.name for row in found.rows)}" in told


def test_wrong_family_is_refused_and_has_no_figures(monkeypatch, quick):
    right = BY_NAME["ssd"]
    wrong = replace(right, function=_but_for_the_truth(right.function, lambda output: 1.001 * output))
    monkeypatch.setitem(BY_NAME, "ssd", wrong)
    found = compare.run(lengths=[64], families=["causal", "ssd"], **SMALL)
    assert not found.passed
    row = found.row("ssd")
    assert (row.points, row.difference, row.exponent, row.crossing) == ((), None, None, None)
    assert row.checked > 1
    assert f"ssd              L d^2      REFUSED: {row.refused}" in str(found)
    assert found.row("causal").points


def test_record_is_json_and_its_text_fits(quick):
    found = compare.run(lengths=[64, 128], families=["dense", "local", "linear"], **SMALL)
    record = json.loads(found.to_json())
    assert record["setting"]["lengths"] == [64, 128]
    assert [row["name"] for row in record["rows"]] == [row.name for row in found.rows]
    assert record["rows"][1]["points"][0]["seconds"] == found.rows[1].points[0].seconds
    text = str(found)
    assert text.isascii()
    assert max(map(len, text.splitlines())) <= 110
    for row in found.rows:
        assert text.count(row.name) >= 2
    for word in (
        "softmax attention itself",
        "exact for the pairs it sees",
        "approximates softmax",
        "a rule of its own",
    ):
        assert word in text


def test_results_do_not_depend_on_what_else_is_measured(quick):
    one = compare.run(lengths=[64], families=["linear-favor"], **SMALL)
    all_of_them = compare.run(lengths=[64], **SMALL)
    assert one.rows[0].difference == all_of_them.row("linear-favor").difference
    assert one.rows[0].crossing is None


@pytest.mark.skipif(not STATUS.exists(), reason="memory is read from /proc")
def test_memory_is_what_a_call_adds_beyond_its_results():
    setting = Setting(head_dim=64, heads=2)
    probe = MemoryProbe("-m", "qkv.compare.probe")
    try:
        chunked = probe.ask(["linear-taylor", asdict(setting), 512])
        causal = probe.ask(["causal", asdict(setting), 1024])
        trained = probe.ask(["causal", asdict(replace(setting, direction="forward+backward")), 1024])
    finally:
        probe.close()
    assert chunked > 2 * 2 * 512 * 2145 * 4 * 0.9  # the features of q and k
    assert causal < 2 * 1024 * 1024 * 4 / 4  # no matrix of scores
    assert trained < 2 * 1024 * 1024 * 4 / 2


@pytest.mark.skipif(not STATUS.exists(), reason="memory is read from /proc")
def test_run_weighs_every_call():
    found = compare.run(lengths=[64, 128], families=["causal", "delta"], heads=2, head_dim=8, budget=5)
    assert all(point.memory is not None for row in found.rows for point in row.points)


def test_plot_is_a_png(quick, tmp_path):
    pytest.importorskip("matplotlib")
    found = compare.run(lengths=[64, 128], families=["causal", "ssd"], **SMALL)
    found.plot(tmp_path / "a.png")
    found = replace(
        found,
        rows=tuple(
            replace(row, points=tuple(replace(point, memory=1 << 20) for point in row.points)) for row in found.rows
        ),
    )
    found.plot(str(tmp_path / "b.png"))
    for name in ("a.png", "b.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")


def test_plot_without_matplotlib_says_what_to_install(monkeypatch, quick, tmp_path):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    found = compare.run(lengths=[64], families=["causal"], **SMALL)
    with pytest.raises(UnsupportedError, match=r"^a plot needs `matplotlib`; it is not installed; run `pip install"):
        found.plot(tmp_path / "a.png")


@pytest.mark.parametrize(
    "given, told",
    [
        ({"lengths": []}, "`lengths` must name one length at least; got none; leave it out for 512 to 4,096"),
        ({"lengths": [63]}, "`lengths` must be a whole number in 64 .. 1,048,576; got 63; choose one inside"),
        ({"lengths": [64.0]}, "`lengths` must be a whole number in 64 .. 1,048,576; got 64.0; choose one inside"),
        ({"heads": 0}, "`heads` must be a whole number in 1 .. 1,024; got 0; choose one inside"),
        ({"head_dim": 257}, "`head_dim` must be a whole number in 1 .. 256; got 257; choose one inside"),
        ({"value_dim": 0}, "`value_dim` must be a whole number in 1 .. 256; got 0; choose one inside"),
        ({"threads": True}, "`threads` must be a whole number in 1 .. 1,024; got True; choose one inside"),
        ({"seed": -1}, "`seed` must be a whole number in 0 .. 9,223,372,036,854,775,807; got -1; choose one inside"),
        ({"budget": 0}, "`budget` must be a number of seconds above 0; got 0; 20 is the default"),
        ({"budget": math.nan}, "`budget` must be a number of seconds above 0; got nan; 20 is the default"),
        (
            {"dtype": "int8"},
            "`dtype` must be one of float32, bfloat16, float16, float64; got int8; ",
        ),
        (
            {"direction": "back"},
            "`direction` must be one of decode, forward, forward+backward; got 'back'; ",
        ),
        ({"families": []}, "`families` must name families that can answer; got none for forward; "),
        (
            {"families": ["full"], "direction": "decode"},
            "that can answer; got full for decode; ",
        ),
        ({"families": ["gated-dleta"]}, "did you mean 'gated-delta'?"),
    ],
)
def test_arguments_that_cannot_be_are_refused_before_any_work(given, told, monkeypatch):
    monkeypatch.setattr(measuring, "check", lambda *given: pytest.fail("worked"))
    with pytest.raises(QkvError) as refused:
        compare.run(**given)
    assert told in str(refused.value)
    assert str(refused.value).count("; ") >= 2


def test_groups_and_names_choose_families():
    def chosen(*names, direction="forward"):
        return compare.setting.read_setting(
            lengths=[64],
            heads=1,
            head_dim=8,
            value_dim=None,
            dtype=torch.float16,
            direction=direction,
            families=names,
            threads=1,
            budget=1,
            seed=0,
        )

    assert chosen("ssd", "dense").families == ("full", "causal", "ssd")
    assert chosen("dense", direction="decode").families == ("causal",)
    assert chosen("sparse", "local").families == ("strided", "fixed", "bigbird", "window")
    assert chosen("linear").dtype == "float16"
    assert chosen("linear").value_dim == 8


def test_length_of_the_check_is_more_than_a_window():
    assert TOKENS > families.WINDOW + 64
