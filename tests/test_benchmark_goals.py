"""Suite `cpu` of the benchmarks: which figures, against whom, how they are judged, and what is refused."""

from __future__ import annotations

import json
import math
import sys
import warnings
from importlib import import_module
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmarks"))
contest, gate, goals, peak = map(import_module, ("contest", "gate", "goals", "peak"))
peers, registry, report, run, timing = map(import_module, ("peers", "registry", "contest_report", "run", "timing"))

right = registry.attention


def suite(*figures, **given):
    return contest.Contest(
        **{"name": "cpu", "figures": figures, "backend": "blockwise", "threads": 1}
        | {"budget": 0.0, "least": 3, "most": 3}
        | given
    )


def only(figure, ask=lambda question: None, **given):
    [outcome] = suite(figure, **given).measure(ask)
    return outcome


@pytest.fixture
def unhurried(monkeypatch):
    """Every run takes a second of ours and three of the others', in place of a clock."""
    taken = {}
    monkeypatch.setattr(contest, "timed", lambda run, calls=1: (timing.Sample(1.0, 1.0), run()))

    def interleave(mine, theirs, first, **given):
        taken.update(given)
        return [timing.Pair(timing.Sample(1.0, 2.0), timing.Sample(each, 8.0)) for each in (3.0, 2.0, 9.0)]

    monkeypatch.setattr(contest, "interleave", interleave)
    monkeypatch.setattr(peak, "most", lambda dtype, threads: peak.Peak("FMA loop", 1e9))
    return taken


@pytest.mark.parametrize(
    "value, side, verdict",
    [
        (1.1, "at least", "SHORT"),
        (1.2, "at least", "met"),
        (1.4, "at least", "met"),
        (1.5, "at least", "aim"),
        (1.7, "at most", "SHORT"),
        (1.6, "at most", "met"),
        (1.0, "at most", "aim"),
    ],
)
def test_verdict(value, side, verdict):
    bounds = (1.2, 1.5) if side == "at least" else (1.6, 1.0)
    assert goals.Goal(*bounds, side).verdict(value) == verdict


@pytest.mark.parametrize(
    "value, of_peak, verdict", [(2.9, 0.95, "SHORT"), (3.0, 0.89, "met"), (3.0, 0.9, "aim"), (9.0, None, "met")]
)
def test_aim_may_be_a_share_of_the_peak(value, of_peak, verdict):
    assert goals.Goal(3, 0.9, aim_of="peak").verdict(value, of_peak) == verdict
    outcome = row("a", value, goals.Goal(3, 0.9, aim_of="peak"), of_peak=of_peak, spread=(1.0, 9.0))
    assert outcome.verdict == verdict
    assert f"3   90%  {verdict}" in report.line(outcome)


@pytest.mark.parametrize("suite", goals.FIGURES)
def test_every_figure_can_be_asked_for(suite):
    names = [figure.name for figure in goals.FIGURES[suite]]
    assert len(set(names)) == len(names)
    assert max(map(len, names)) <= report.WIDE
    for figure in goals.FIGURES[suite]:
        assert goals.chosen([figure.name], quick=False, threads=1, suite=suite)[0] == figure


@pytest.mark.parametrize("suite", ["cpu", "production"])
def test_every_figure_has_its_case_and_its_contenders(suite):
    for figure in goals.FIGURES[suite]:
        assert figure.case in registry.BY_NAME
        if isinstance(figure, goals.Race):
            assert figure.against in {*peers.CONTENDERS, "ours"}
            assert figure.baseline is None or figure.baseline in registry.BY_NAME


def test_words_choose_figures():
    def names(*words, quick=False, threads=1):
        return [figure.name for figure in goals.chosen(list(words), quick=quick, threads=threads)]

    assert names("forward/window*/flex") == ["forward/window/4096/D64/flex"]
    assert names("memory/backward", "/8192/D64/ours") == ["forward/window/8192/D64/ours-dense"]
    assert {name.split("/")[0] for name in names(threads=2)}.isdisjoint({"growth", "memory"})
    assert 0 < len(names(quick=True)) < len(names())
    assert not names("8192", quick=True)


def test_race_is_the_median_ratio_with_its_share_of_the_peak(unhurried):
    outcome = only(goals.Race("forward", "causal", 128, 64, goals.Goal(2.5, 4)))
    assert (outcome.value, outcome.spread, outcome.runs) == (3.0, (2.0, 9.0), 3)
    assert (outcome.ours, outcome.theirs, outcome.verdict) == (1.0, 3.0, "met")
    work = 4 * 64 * 8 * (128 * 129 // 2) / 1e9
    assert outcome.of_peak == pytest.approx(work)
    assert outcome.their_of_peak == pytest.approx(work / 3)
    assert outcome.limit == pytest.approx(3 / work)
    assert 0 < outcome.share < 0.2


@pytest.mark.parametrize("direction, products", [("recorded", 2), ("backward", 5), ("forward+backward", 7)])
def test_work_of_a_direction_is_counted_in_products(direction, products):
    setting = contest.Setting(direction, 32, 16)
    assert contest.flops(registry.BY_NAME["dense"], setting) == products * 2 * 8 * 32 * 32 * 16


def test_threads_are_raced_by_the_clock_on_the_wall(unhurried):
    outcome = only(goals.Race("forward", "causal", 32), threads=2)
    assert (outcome.value, outcome.ours, outcome.theirs) == (4.0, 2.0, 8.0)


def test_useful_rate_is_of_pairs(unhurried):
    outcome = only(goals.Race("forward", "window", 512, 64, goals.RATE, "ours", "dense", by_pairs=True))
    assert outcome.value == pytest.approx(3.0 * (512 * 256 - 255 * 256 // 2) / 512**2)
    assert outcome.limit is None


def test_short_calls_are_timed_many_at_once(unhurried):
    only(goals.Race("recorded", "causal", 16, calls=7))
    assert unhurried["calls"] == 7


@pytest.mark.parametrize("baseline", [None, "causal"])
def test_either_side_that_is_wrong_is_refused(baseline, monkeypatch):
    def half_scale(query, key, value, **given):
        return right(query, key, value, scale=0.0625, **given)

    figure = goals.Race("backward", "causal", 64, 64, None, "ours" if baseline else "sdpa", baseline)
    only(figure)
    monkeypatch.setattr(registry, "attention", half_scale)
    with pytest.raises(gate.Refused, match=r"^ours, causal at 64 tokens, D 64, backward: the output is"):
        only(figure)
    monkeypatch.undo()
    monkeypatch.setattr(registry.F, "scaled_dot_product_attention", lambda q, k, v, **_: right(q, k, v))
    if baseline is None:
        with pytest.raises(gate.Refused, match=r"^sdpa, causal"):
            only(figure)


@pytest.mark.parametrize("wrong", [0.0, 0.2])
def test_dropout_of_another_is_judged_by_its_spread(wrong, monkeypatch):
    torch.manual_seed(0)
    figure = goals.Race("forward+backward", "causal-dropout", 256, 64)
    assert only(figure).value > 0
    whole = registry.F.scaled_dot_product_attention

    def otherwise(*tensors, dropout_p, **given):
        return whole(*tensors, dropout_p=wrong if dropout_p else 0.0, **given)

    torch.manual_seed(0)
    monkeypatch.setattr(registry.F, "scaled_dot_product_attention", otherwise)
    with pytest.raises(gate.Refused, match=r"times as wide about the whole one as a dropout of 0\.1"):
        only(figure)


def test_what_has_no_answer_is_not_measured(monkeypatch):
    assert only(goals.Race("forward", "window", 64, against="x-transformers")).note.startswith("computes dense and")
    assert only(goals.Race("forward", "causal-sinks", 64)).note == "has no softcap, sinks or ALiBi"
    assert only(goals.Race("forward", "window", 256, against="local-attention")).note.startswith("computes causal wi")
    monkeypatch.setitem(sys.modules, "local_attention", None)
    outcome = only(goals.Race("forward", "window-257", 256, against="local-attention"))
    assert outcome.note == "not installed"
    assert report.line(outcome).endswith("not measured: not installed")


@pytest.mark.parametrize(
    "name, module, case, tokens",
    [
        ("local-attention", "local_attention", "window-257", 768),
        ("x-transformers", "x_transformers", "dense", 128),
        ("x-transformers", "x_transformers", "causal", 128),
        ("x-transformers", "x_transformers", "causal-softcap", 128),
        ("x-transformers-flash", "x_transformers", "causal", 128),
    ],
)
def test_peer_computes_the_very_pattern(name, module, case, tokens):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the peer's own imports
        pytest.importorskip(module)
        assert only(goals.Race("forward+backward", case, tokens, against=name)).value > 0


def test_growth_is_the_exponent_of_our_time(monkeypatch):
    monkeypatch.setattr(contest, "LENGTHS", (64, 128, 256))
    monkeypatch.setattr(contest, "repeat", lambda run, first, **_: [timing.Sample(next(seconds), 0.0)])
    seconds = iter((1.0, 2.0**1.5, 2.0**3))
    outcome = only(goals.Growth("forward", "dense", goals.Goal(1.6, 1.6, "at most")))
    assert outcome.value == pytest.approx(1.5)
    assert (outcome.beside, outcome.verdict, outcome.ours) == ("pairs 2.00", "aim", 8.0)
    assert [tokens for tokens, _ in outcome.points] == [64, 128, 256]


@pytest.mark.parametrize("direction, results", [("forward", 1), ("forward+backward", 4)])
def test_memory_leaves_the_results_out(direction, results):
    one, asked = 8 * 256 * 64 * 4, []

    def ask(question):
        asked.append(tuple(question))
        return results * one + 2 * one

    outcome = only(goals.Weight(direction, "window", 256, goals.MEMORY), ask)
    assert asked == [("blockwise", "window", 256, direction)]
    assert (outcome.value, outcome.ours, outcome.verdict) == (2.0, 2 * one, "met")
    assert only(goals.Weight(direction, "window", 256, goals.MEMORY)).note == "needs Linux's /proc"


def test_memory_of_a_wrong_call_is_refused(monkeypatch):
    monkeypatch.setattr(registry, "attention", lambda *tensors, **given: right(*tensors, **given) * 1.01)
    with pytest.raises(gate.Refused, match=r"^ours, window at 256 tokens"):
        only(goals.Weight("forward", "window", 256, goals.MEMORY))


def row(name, value, goal=None, **given):
    return report.Outcome(name=name, value=value, goal=goal, **given)


def test_summary_counts_and_names_what_is_short():
    rows = [
        row("a", 2.0, goals.Goal(1, 3)),
        row("b", 0.5, goals.Goal(1, 3), limit=0.9, loop="FMA loop"),
        row("c", 4.0, goals.Goal(1, 3)),
        row("d", 9.0),
        row("e", None, goals.Goal(1, 3), note="not installed"),
    ]
    told = report.summary(rows, "cpu", {"FMA loop": None}, 1e9)
    assert "goals: 2 of 3 reached, 1 of them as aimed at" in told
    assert "SHORT: b: 0.50, at least 1; at the rate of the FMA loop it would be 0.90" in told
    assert "not measured: e" in told
    assert "FMA loop: not measured (no C compiler)" in told
    assert "growth: " not in told


def test_summary_names_the_loops_of_the_machine():
    rows = [row("forward/decode/8", 2.0, loop="read loop", rate=rate) for rate in (3e9, 2e9, 5e9)]
    told = report.summary([*rows, row("growth/x", 1.0)], "cpu", {"FMA loop": 1e11, "tile loop": None}, 1e9)
    assert "FMA loop: 100.0 GFLOP/s; tile loop: this processor has none; read loop: 2.0 GB/s to 5.0 GB/s" in told
    assert "\ngrowth: the exponent" in told
    assert "\ndecode, of peak: " in told


def test_plot_is_drawn(tmp_path):
    pytest.importorskip("matplotlib")
    points = [(tokens, tokens * 1e-6) for tokens in goals.LENGTHS]
    rows = [row("a", 2.0, goals.Goal(1, 3), spread=(1.5, 2.5)), row("growth/b", 1.0, points=points), row("c", None)]
    rows += [row("d", 2.0, goals.READING, spread=(1.5, 2.5), limit=limit) for limit in (None, 4.0)]
    for some in (rows, rows[:1]):
        assert report.plot(some, tmp_path / "plot.png", "title")
        assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")
        (tmp_path / "plot.png").unlink()


def test_peak_is_measured_where_there_is_a_compiler(monkeypatch):
    if peak.loop() is not None:
        assert 1e8 < peak.products("fma") < 1e12
        assert math.isfinite(peak.products("fma", 2))
        assert peak.most(torch.float32).name == "FMA loop"
    assert 1e8 < peak.sgemm() < 1e12
    monkeypatch.setenv("CC", "no-such-compiler")
    peak.loop.cache_clear()
    assert peak.products("fma") is None
    assert peak.most(torch.bfloat16) is None
    assert peak.reader([torch.zeros(3)]) is None
    peak.loop.cache_clear()


class NoProbe:
    def ask(self, question):
        return 10_000_000

    def close(self):
        pass


def test_run_prints_and_writes(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(run, "MemoryProbe", NoProbe)
    monkeypatch.setattr(report, "plot", lambda rows, path, title: False)
    asked = ["--suite", "cpu", "--backend", "blockwise", "--out", str(tmp_path), "--only", "d/causal/512,no-word"]
    assert run.main([*asked, "--quick"]) == 0
    assert not list(tmp_path.iterdir())
    printed = capsys.readouterr().out
    assert run.main([*asked, "--quick", "--name", "small"]) == 0
    record = json.loads((tmp_path / "small.json").read_text(encoding="utf-8"))
    names = [figure["name"] for figure in record["figures"]]
    assert names == ["forward/causal/512/D64/sdpa"]
    assert all(name in printed for name in names)
    assert all(name in (tmp_path / "small.md").read_text(encoding="utf-8") for name in names)
    assert set(record["machine"]) >= {"processor", "threads", "commit"}
    assert {figure["verdict"] for figure in record["figures"]} <= {"aim", "met", "SHORT"}


def test_run_refuses_and_writes_nothing(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(run, "MemoryProbe", NoProbe)
    monkeypatch.setattr(registry, "attention", lambda *tensors, **given: right(*tensors, **given) * 1.01)
    asked = ["--suite", "cpu", "--backend", "blockwise", "--out", str(tmp_path / "results"), "--only", "/16/D64"]
    assert run.main(asked) == 1
    assert capsys.readouterr().out.splitlines()[-1].startswith("REFUSED ours, dense at 16 tokens, D 64, forward: ")
    assert not (tmp_path / "results").exists()


@pytest.mark.parametrize("name", ["cpu", "families"])
def test_words_that_name_nothing_are_an_error(name, capsys):
    with pytest.raises(SystemExit):
        run.main(["--suite", name, "--only", "no-such-word"])
    assert "names nothing that is measured" in capsys.readouterr().err
