"""The benchmarks' own promises: no number for a wrong result, and right arithmetic on the numbers."""

from __future__ import annotations

import json
import os
import sys
import time
from importlib import import_module
from itertools import product
from pathlib import Path

import pytest
import torch

import budgets
import oracles
from qkv import causal, prefix, window

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmarks"))
build, families, gate, memory = map(import_module, ("build", "families", "gate", "memory"))
registry, report, run, timing = map(import_module, ("registry", "families_report", "run", "timing"))

right = registry.attention


def scale_off_by_one_percent(query, key, value, **given):
    return right(query, key, value, scale=1.01 * query.shape[-1] ** -0.5, **given)


def last_key_dropped(query, key, value, *, pattern, **given):
    keys = key.shape[2]
    return right(query, key, value, pattern=pattern - (prefix(keys) - prefix(keys - 1)), **given)


def off_by_one(query, key, value, **given):
    return right(query, key, value, query_offset=1, **given)


def key_gradient_off_by_one_percent(query, key, value, **given):
    return right(query, key + 0.01 * (key - key.detach()), value, **given)


def value_gradient_lost_by_one_head(query, key, value, **given):
    value = torch.cat([value[:, :5], value[:, 5:6].detach(), value[:, 6:]], 1)
    return right(query, key, value, **given)


def bias_gradient_off_by_one_percent(query, key, value, *, bias, **given):
    return right(query, key, value, bias=bias + 0.01 * (bias - bias.detach()), **given)


def without(name):
    def defect(query, key, value, **given):
        return right(query, key, value, **{one: given[one] for one in given if one != name})

    return defect


def other_numbers(query, key, value, *, generator, **given):
    return right(query, key, value, generator=generator.manual_seed(8), **given)


def gives_nan(query, key, value, **given):
    return right(query, key, value, **given) * torch.nan


@pytest.fixture(params=["whole", "sampled"])
def tokens(request, monkeypatch) -> int:
    """A length that the gate compares wholly, or one of which it takes a sample."""
    if request.param == "sampled":
        monkeypatch.setattr(gate, "WHOLE", 64)
    return 197 if request.param == "whole" else 453  # 453 mod 8 = 5: the head whose columns are sampled


def share(case, tokens, direction="forward+backward") -> float:
    data = registry.make_data(tokens, case)
    expected = gate.claims(case, data, gradients="backward" in direction)
    return gate.check(registry.ours(case, data, "blockwise").run(direction), expected)


@pytest.mark.parametrize("case", registry.CASES, ids=lambda case: case.name)
def test_case_means_the_same_as_a_pattern_and_as_a_rule(case):
    batch, _, _, queries = case.shape(300)
    expected = oracles.dense(case.rule(300), (batch, 1, queries, 300))
    assert torch.equal(case.pattern(300).to_dense(queries, 300, batch=batch).expand_as(expected), expected)


@pytest.mark.parametrize("case", registry.CASES, ids=lambda case: case.name)
def test_gate_passes_the_right_result(case, tokens):
    has_no_formula = case.decodes or (case.extras.softcap is not None and tokens > gate.WHOLE)
    assert 0 < share(case, tokens, "forward" if has_no_formula else "forward+backward") < 0.2


@pytest.mark.parametrize("direction", ["recorded", "backward"])
def test_gate_sees_every_direction(direction, tokens, monkeypatch):
    assert 0 < share(registry.BY_NAME["causal"], tokens, direction) < 0.2
    monkeypatch.setattr(registry, "attention", scale_off_by_one_percent)
    with pytest.raises(gate.Refused, match="the output is"):
        share(registry.BY_NAME["causal"], tokens, direction)


@pytest.mark.parametrize(
    "direction, before, during, results",
    [("forward", 0, 1, 1), ("recorded", 0, 1, 1), ("backward", 1, 0, 4), ("forward+backward", 0, 1, 4)],
)
def test_clock_sees_what_the_direction_says(direction, before, during, results, monkeypatch):
    recorded = []

    def counted(query, key, value, **given):
        output = right(query, key, value, **given)
        recorded.append((torch.is_grad_enabled(), output.requires_grad))
        return output

    monkeypatch.setattr(registry, "attention", counted)
    contender = registry.ours(registry.BY_NAME["causal"], registry.make_data(16), "blockwise")
    with registry.recording(direction):
        call = contender.prepare(direction)
        assert len(recorded) == before
        call.run()
        assert len(call.read(call.run())) == results
    assert len(recorded) == before + 2 * during
    assert set(recorded) == {(direction != "forward",) * 2}


def test_gradients_under_a_softcap_are_not_passed_unseen(monkeypatch):
    monkeypatch.setattr(gate, "WHOLE", 64)
    with pytest.raises(AssertionError, match="no formula"):
        share(registry.BY_NAME["dense-softcap"], 197)


@pytest.mark.parametrize("name", ["dense", "window", "strided"])
@pytest.mark.parametrize("direction", registry.DIRECTIONS)
@pytest.mark.parametrize("defect", [scale_off_by_one_percent, last_key_dropped, gives_nan])
def test_gate_refuses_a_wrong_output(defect, direction, name, tokens, monkeypatch):
    monkeypatch.setattr(registry, "attention", defect)
    with pytest.raises(gate.Refused, match="the output is"):
        share(registry.BY_NAME[name], tokens, direction)


@pytest.mark.parametrize("name", ["causal", "window", "fixed"])
def test_gate_refuses_a_diagonal_off_by_one(name, tokens, monkeypatch):
    monkeypatch.setattr(registry, "attention", off_by_one)
    with pytest.raises(gate.Refused, match="the output is"):
        share(registry.BY_NAME[name], tokens, "forward")


@pytest.mark.parametrize(
    "name, defect",
    [
        ("dense-softcap", without("softcap")),
        ("causal-sinks", without("sinks")),
        ("causal-alibi", without("bias")),
        ("dense-bias", without("bias")),
        ("causal-dropout", without("dropout_p")),
        ("causal-dropout", other_numbers),
    ],
)
def test_gate_refuses_what_lacks_an_extra(name, defect, tokens, monkeypatch):
    monkeypatch.setattr(registry, "attention", defect)
    with pytest.raises(gate.Refused, match="the output is"):
        share(registry.BY_NAME[name], tokens, "forward")


def test_gate_refuses_a_wrong_gradient_of_the_bias(tokens, monkeypatch):
    monkeypatch.setattr(registry, "attention", bias_gradient_off_by_one_percent)
    with pytest.raises(gate.Refused, match="gradient of bias"):
        share(registry.BY_NAME["dense-bias"], tokens)


@pytest.mark.parametrize(
    "defect, what",
    [(key_gradient_off_by_one_percent, "gradient of key"), (value_gradient_lost_by_one_head, "gradient of value")],
)
def test_gate_refuses_a_wrong_gradient(defect, what, tokens, monkeypatch):
    monkeypatch.setattr(registry, "attention", defect)
    monkeypatch.setattr(registry, "HEADS", 6)
    assert share(registry.BY_NAME["window"], tokens, "forward") < 0.2
    if defect is value_gradient_lost_by_one_head and tokens == 453:
        tokens = 455  # 455 mod 6 = 5
    with pytest.raises(gate.Refused, match=what):
        share(registry.BY_NAME["window"], tokens)


@pytest.mark.parametrize("name", ["dense", "window", "random-blocks", "dense-bias", "causal-dropout", "causal-sinks"])
def test_sampled_columns_are_the_oracle_s_and_their_bounds_no_looser(name):
    case, sizes = registry.BY_NAME[name], (1, 8, 300, 300)
    data = registry.make_data(300, case)
    q, k, v = (tensor.double().requires_grad_() for tensor in data[:3])
    extras = {"bias": data.bias, "sinks": data.sinks}
    if case.extras.dropout_p:
        seed = oracles.drawn_seed(registry.DROPOUT_STATE)
        extras |= {"keep": oracles.dropout_keep(seed, 0.1, sizes), "drop_scale": 65536 / (65536 - 6554)}
    call = budgets.Call(q, k, v, oracles.dense(case.rule(300), sizes), 0.125, **extras)
    truth = call.truth()
    found = dict(zip(("key", "value"), torch.autograd.grad(truth.out, (k, v), data.grad_output.double()), strict=True))
    bounds, _ = budgets.backward(call, truth, torch.float32, data.grad_output)
    for claim in gate._columns(case, data):
        torch.testing.assert_close(claim.truth, found[claim.name][claim.place], rtol=1e-9, atol=1e-12)
        assert (claim.bound <= 1.000001 * bounds[claim.name[0]][claim.place]).all()
        assert (claim.bound > 0).all()


@pytest.mark.parametrize("case", registry.FAMILIES, ids=lambda case: case.name)
def test_gate_passes_torch(case):
    data = registry.make_data(197)
    assert 0 < gate.check(registry.sdpa(case, data).run("forward+backward"), gate.claims(case, data)) < 0.2


class NoProbe:
    def ask(self, question):
        return 1_000_000

    def close(self):
        pass


def arguments(out, *more):
    return ["--only", "window,strided", "--lengths", "128", "--out", str(out), *more]


def test_refusal_prints_no_number_and_writes_nothing(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(run, "MemoryProbe", NoProbe)
    monkeypatch.setattr(registry, "attention", scale_off_by_one_percent)
    assert run.main(arguments(tmp_path / "results")) == 1
    *before, last = capsys.readouterr().out.splitlines()
    assert last.startswith("REFUSED ours, window at 128 tokens, forward: the output is ")
    assert not any(text.startswith("window") for text in before)
    assert not (tmp_path / "results").exists()


def test_peer_that_is_wrong_is_refused_too(monkeypatch, capsys, tmp_path):
    def unmasked(query, key, value, **_):
        return right(query, key, value)

    monkeypatch.setattr(run, "MemoryProbe", NoProbe)
    monkeypatch.setattr(registry.F, "scaled_dot_product_attention", unmasked)
    assert run.main(arguments(tmp_path / "results")) == 1
    assert "\nREFUSED sdpa, window at 128 tokens, forward: the output is " in capsys.readouterr().out
    assert not (tmp_path / "results").exists()


def test_run_prints_and_writes_each_case(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(run, "MemoryProbe", NoProbe)
    monkeypatch.setattr(report, "plot", lambda rows, path, backend: False)
    assert run.main(arguments(tmp_path, "--name", "small", "--quick")) == 0
    printed = capsys.readouterr().out
    record = json.loads((tmp_path / "small.json").read_text(encoding="utf-8"))
    assert [(row["case"], row["tokens"], row["direction"]) for row in record["rows"]] == list(
        product(["window", "strided"], [128], registry.DIRECTIONS)
    )
    assert all(row["cpu"] > 0 and row["peers"]["sdpa"]["ratio"] > 0 for row in record["rows"])
    assert "--name small --quick" in record["command"]
    written = (tmp_path / "small.md").read_text(encoding="utf-8")
    assert all(text in written for text in printed.splitlines() if text.startswith(("window", "strided")))


def test_plot_is_drawn_or_left_out(tmp_path):
    pytest.importorskip("matplotlib")
    rows = [row(tokens, direction, cpu=tokens * 1e-6) for tokens in (128, 256) for direction in registry.DIRECTIONS]
    assert report.plot(rows, tmp_path / "plot.png", "blockwise")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


def row(tokens, direction, *, cpu, memory=1000, peers=None):
    return report.Row(
        case="window",
        pattern="window(1)",
        tokens=tokens,
        direction=direction,
        pairs=1,
        cpu=cpu,
        wall=cpu,
        runs=1,
        memory=memory,
        input_bytes=1000,
        share=0.01,
        peers=peers or {},
    )


def suite(**given):
    return families.Families(backend="blockwise", cap=3.0, flex=None, sdpa=True, quick=False, **given)


def test_peer_beyond_the_cap_is_not_run_but_the_headline_is(monkeypatch):
    monkeypatch.setattr(families, "sdpa_seconds", lambda form, direction: 0.1)
    options = suite(cases=registry.FAMILIES, lengths=(1024,), budget=0.1)

    def note(name, tokens):
        data = registry.Data(*torch.empty(4, 1, 1, tokens, 1).unbind(0))
        [(_, peer)] = families.contenders(families.Task(registry.BY_NAME[name], data, "forward", []), options)
        return peer

    assert isinstance(note("strided", 4096), registry.Contender)  # 0.1 s · 4²
    assert note("strided", 8192) == "not run, about 6 s"
    assert isinstance(note("window", 8192), registry.Contender)
    assert note("window", 16384) == "not run, about 26 s"


def test_exponents_are_fitted_from_4096_on_and_skip_what_was_not_weighed():
    rows = [
        row(tokens, "forward", cpu=1e-9 * tokens**1.5 * (1 if tokens >= 4096 else 50), memory=size)
        for tokens, size in ((1024, 9), (4096, 40), (8192, 80), (16384, None))
    ]
    found = report.exponents(rows)["window"]
    assert found["time, forward"] == pytest.approx(1.5)
    assert found["memory, forward"] == pytest.approx(1.0)
    assert found["time, forward+backward"] is None


def test_exponent_is_the_least_squares_slope():
    lengths = [4096, 8192, 16384]
    assert timing.exponent(lengths, [3e-7 * n**2 for n in lengths]) == pytest.approx(2)
    assert timing.exponent(lengths, [5.0, 5.0, 5.0]) == pytest.approx(0)
    assert timing.exponent(lengths, [1.0, 4.0, 4.0]) == pytest.approx(1)  # log2: 0, 2, 2 over 0, 1, 2
    assert timing.exponent(lengths[:1], [1.0]) is None


def test_ratio_is_the_median_of_the_pairs_own_ratios():
    pairs = [
        timing.Pair(timing.Sample(mine, 9.0), timing.Sample(theirs, 1.0))
        for mine, theirs in ((1.0, 2.0), (10.0, 30.0), (2.0, 20.0))
    ]
    assert timing.ratio(pairs) == 3.0  # the ratio of the medians would be 10
    assert timing.spread(pairs) == (2.0, 10.0)
    assert timing.ratio(pairs, "wall") == 1.0 / 9.0


def test_pairs_alternate_and_fill_the_budget():
    order = []
    first = timing.Pair(timing.Sample(0.1, 0.1), timing.Sample(0.1, 0.1))
    pairs = timing.interleave(lambda: order.append("a"), lambda: order.append("b"), first, budget=0.7)
    assert order == ["a", "b"] * 3
    assert len(pairs) == 3
    assert first not in pairs


def test_sample_of_many_calls_is_their_mean(monkeypatch):
    order, seconds = [], iter(range(100))
    monkeypatch.setattr(time, "thread_time", lambda: float(next(seconds)))
    first = timing.Pair(timing.Sample(0.01, 0.01), timing.Sample(0.01, 0.01))
    calls = (lambda: order.append("a")), (lambda: order.append("b"))
    pairs = timing.interleave(*calls, first, budget=0.2, calls=5)
    assert order == (["a"] * 5 + ["b"] * 5) * 2
    assert pairs[0].mine.cpu == 1 / 5


def test_slow_first_run_is_the_only_one_unless_more_are_asked_for():
    slow, order = timing.Sample(5.0, 5.0), []
    assert timing.repeat(lambda: order.append("a"), slow, budget=1.0) == [slow]
    assert order == []
    pair = timing.Pair(slow, slow)
    timing.interleave(lambda: order.append("a"), lambda: order.append("b"), pair, budget=1.0, least=3)
    assert order == ["a", "b"] * 3


def test_ours_runs_three_times_where_the_exponent_is_fitted(monkeypatch):
    monkeypatch.setattr(registry, "HEADS", 1)
    options = suite(cases=(), lengths=(), budget=0.0)

    def runs(tokens, samples, seconds=0.1):
        data = registry.make_data(tokens)
        mine = gate.Ready(lambda: None, timing.Sample(seconds, seconds), 0.0)
        task = families.Task(registry.BY_NAME["window"], data, "forward", [])
        return len(families._enough(samples, mine, task, options))

    two = [timing.Sample(1.0, 1.0)] * 2
    assert (runs(4096, two), runs(4096, []), runs(4096, [], seconds=60.0)) == (3, 3, 1)
    assert (runs(128, two), runs(128, [])) == (2, 1)


def test_cpu_time_is_not_wall_time():
    sample, result = timing.timed(lambda: time.sleep(0.05) or "done")
    assert result == "done"
    assert sample.wall >= 0.05 > 2 * sample.cpu


@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="needs Linux's /proc")
def test_memory_is_that_of_the_call_alone():
    probe = memory.MemoryProbe()
    try:
        asked = [memory.Question("sdpa", "window", tokens, "forward") for tokens in (512, 2048, 512)]
        small, large, again = (probe.ask(question) for question in asked)
    finally:
        probe.close()
    # the bool mask, the float one that torch makes of it, and the output
    known = 5 * 2048**2 + 4 * 2048 * 8 * 64
    assert known < large < known + 3_000_000
    assert abs(small - again) < 0.1 * small
    assert probe.ask(asked[0]) is None


def test_build_counts_what_it_built():
    one = build.build(causal() & window(255), 4096)
    assert one.pairs == 4096 * 256 - 255 * 256 // 2
    assert one.tiles == 64 + 63 + 62 + 61 + 60
    assert one.seconds > 0
    assert one.nbytes > 0
