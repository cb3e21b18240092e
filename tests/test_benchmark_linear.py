"""Suite `linear` of the benchmarks: its truth, its gate, the contenders, the figures and what is refused."""

from __future__ import annotations

import json
import sys
from importlib import import_module
from importlib.util import find_spec
from itertools import product
from pathlib import Path

import pytest
import torch

import qkv
from qkv.linear.recurrence import Recurrence, Streams

sys.path[:0] = [str(Path(__file__).resolve().parents[1] / "benchmarks"), str(Path(__file__).parent / "linear")]
cases, gate, goals, linear = map(import_module, ("linear_cases", "gate", "goals", "linear_suite"))
peak, peers, truth, timing = map(import_module, ("peak", "linear_peers", "linear_truth", "timing"))
registry, report, run = map(import_module, ("registry", "contest_report", "run"))
recurrences = import_module("recurrences")

CASES = cases.BY_NAME
WHOLE = [case for case in cases.CASES if not case.steps]
NAMES = [case.name for case in WHOLE]


@pytest.fixture(autouse=True)
def _fresh():
    """No claims of another test's stand-ins."""
    linear._claims.cache_clear()


def suite(*figures, **given):
    return linear.Linear(
        **{"figures": figures, "backend": "auto", "threads": 1, "budget": 0.0, "least": 3, "most": 3} | given
    )


def only(figure, ask=lambda question: None, **given):
    [outcome] = suite(figure, **given).measure(ask)
    return outcome


def share(name, case, tokens=150, direction="forward", dtype=torch.float32, head_dim=16):
    figure = goals.Race(direction, case, tokens, head_dim, dtype=dtype)
    with registry.recording(direction):
        return linear.entrant(name, CASES[case], figure).share


def test_truth_of_a_linear_attention_is_its_weighted_mean():
    case, data = CASES["linear"], cases.make_data(70, CASES["linear"], 8)
    [first, last] = truth.claims(case, data, gradients=False)
    for claim, head in ((first, 0), (last, 7)):
        q, k, v = (x[0, head].double() for x in (data.query, data.key, data.value))
        phi = [torch.where(x > 0, x + 1, x.exp()) for x in (q, k)]
        weights = (phi[0] @ phi[1].mT).tril()
        expected = weights @ v / weights.sum(-1, keepdim=True)
        torch.testing.assert_close(claim.truth[0, 0], expected, rtol=1e-12, atol=1e-13)


def test_truth_of_a_delta_rule_holds_its_last_key():
    """With beta 1, no fading and a query equal to the key, what is read is what was just written."""
    case = CASES["gated-delta"]
    data = cases.make_data(70, case, 8)
    data = data._replace(query=data.key, gate=torch.zeros_like(data.gate), beta=torch.ones_like(data.beta))
    [first, _] = truth.claims(case, data, gradients=False)
    torch.testing.assert_close(first.truth[0, 0], data.value[0, 0].double() / 8**0.5, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("case", CASES)
def test_truth_is_that_of_the_test_suite(case):
    """Two oracles that share nothing: torch by segments here, numpy number by number there."""
    case = CASES[case]
    tokens = 1 if case.steps else truth.SEGMENT + 5
    data = cases.make_data(tokens, case, 6)
    question = Recurrence(
        batch=1,
        heads=case.heads,
        key_heads=case.heads,
        length=tokens,
        key_dim=6,
        value_dim=6,
        gate=case.gate,
        delta=case.delta,
        normalize=case.normalize,
        feature=case.feature,
        scale=6**-0.5 if case.scale is None else case.scale,
    )
    expected, _ = recurrences.oracle(question, Streams(*data[:3], data.gate, data.beta, data.state))
    for claim in truth.claims(case, data, gradients=False):
        torch.testing.assert_close(claim.truth, torch.from_numpy(expected)[claim.place], rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("case", NAMES)
def test_gradients_of_the_truth_are_those_of_one_graph(case):
    case = CASES[case]
    data = cases.make_data(truth.SEGMENT + 9, case, 6)
    streams = {name: tensor[:, :1].double().requires_grad_() for name, tensor in data.trained.items()}
    state = torch.zeros(1, 1, 6, 6 + case.normalize, dtype=torch.float64)
    output, _ = truth.recurrence(case, streams, state)
    expected = torch.autograd.grad(output, [*streams.values()], data.grad_output[:, :1].double())
    claims = {claim.name: claim for claim in truth.claims(case, data, gradients=True) if claim.place[1] == slice(0, 1)}
    for name, gradient in zip(streams, expected, strict=True):
        torch.testing.assert_close(claims[name].truth, gradient, rtol=1e-10, atol=1e-12)


def test_claims_of_a_shorter_call_are_the_first_rows():
    case = CASES["decay"]
    data = cases.make_data(100, case, 8)
    whole = truth.prefix_claims(case, data)
    short = truth.first_rows(whole, 40)
    again = truth.prefix_claims(case, data.first(40))
    torch.testing.assert_close(short.truth, again.truth, rtol=0, atol=0)
    assert short.bound.shape == short.truth.shape


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("direction", ["forward", "forward+backward"])
@pytest.mark.parametrize("name, case", [*product(["auto", "chunked", *peers.TORCH], NAMES)][:-1])
def test_contenders_answer_the_very_case(name, case, direction, dtype):
    assert 0 < share(name, case, direction=direction, dtype=dtype) < 0.9


@pytest.mark.parametrize("name", ["auto", "torch-batched"])
def test_contenders_answer_the_step(name):
    assert 0 < share(name, "step", 1, head_dim=24) < 0.9


@pytest.mark.skipif(find_spec("transformers") is None, reason="needs transformers")
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize(
    "case, tokens, direction",
    [("gated-delta", 150, "forward"), ("gated-delta", 150, "forward+backward"), ("kimi-delta", 70, "forward")],
)
def test_transformers_answers_the_very_case(case, tokens, direction):
    assert 0 < share("transformers", case, tokens, direction) < 0.9


@pytest.mark.skipif(find_spec("transformers") is None, reason="needs transformers")
@pytest.mark.filterwarnings("default")
def test_transformers_carries_its_state_from_run_to_run():
    case = CASES["step"]
    data = cases.make_data(1, case, 16)
    calls = {name: peers.CONTENDERS[name](case, data).prepare("forward") for name in ("auto", "transformers")}
    for _ in range(3):
        ours, theirs = (call.read(call.run())["output"] for call in calls.values())
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "name, case, reason",
    [
        ("transformers", "linear", "has no function"),
        ("torch-chunked", "step", "answers whole"),
        ("torch-looped", "step", "answers whole"),
        ("torch-looped", "kimi-delta", "answers whole"),
    ],
)
def test_contenders_refuse_other_cases(name, case, reason):
    with pytest.raises(linear.NotMeasured, match=f"^{reason}"):
        share(name, case, 64)


def test_missing_peer_is_told(monkeypatch):
    monkeypatch.setitem(peers.CHUNKS, "gated-delta", ("no_such_module", "x"))
    figure = goals.Race("forward", "gated-delta", 64, 16, None, "transformers")
    outcome = only(figure)
    assert (outcome.value, outcome.note) == (None, "not installed, or of another version")


WRONG = {
    "louder": lambda right: lambda *streams, **given: 1.001 * right(*streams, **given),
    "late": lambda right: lambda q, k, v, *beside, **given: right(q, k.roll(1, 2), v, *beside, **given),
    "last row": lambda right: (
        lambda *streams, **given: torch.cat(
            [right(*streams, **given)[:, :, :-1], right(*streams, **given)[:, :, -1:] * 1.01], 2
        )
    ),
    "not a number": lambda right: lambda *streams, **given: right(*streams, **given) * torch.nan,
    "gate": lambda right: lambda q, k, v, g, *beta, **given: right(q, k, v, 1.01 * g, *beta, **given),
}


@pytest.mark.parametrize("what, case", [pair for pair in product(WRONG, NAMES) if pair != ("gate", "linear")])
def test_gate_refuses_a_wrong_output(case, what, monkeypatch):
    name = CASES[case].function
    monkeypatch.setattr(qkv, name, WRONG[what](getattr(qkv, name)))
    with pytest.raises(gate.Refused, match=rf"^ours, {case} at 150 tokens, D 16, forward: the output is"):
        share("auto", case)


@pytest.mark.parametrize("place, what", [*enumerate(["query", "key", "value", "gate", "beta"])])
def test_gate_refuses_a_wrong_gradient(place, what, monkeypatch):
    right = qkv.kimi_delta_attention

    def wrong(*streams, **given):
        streams = [x + 1e-3 * (x - x.detach()) if n == place else x for n, x in enumerate(streams)]
        return right(*streams, **given)

    monkeypatch.setattr(qkv, "kimi_delta_attention", wrong)
    with pytest.raises(gate.Refused, match=rf"^ours, kimi-delta at 150 .*backward: the gradient of {what} is"):
        share("auto", "kimi-delta", direction="forward+backward")


def test_gate_refuses_a_wrong_step(monkeypatch):
    step = qkv.RecurrentState.step
    monkeypatch.setattr(qkv.RecurrentState, "step", lambda *given: 1.001 * step(*given))
    with pytest.raises(gate.Refused, match=r"^ours, step at 1 tokens, D 24, forward: the output is"):
        share("auto", "step", 1, head_dim=24)


@pytest.fixture
def unhurried(monkeypatch):
    """Every run takes a second of ours; torch's batched form three of them, its others five."""
    rivals = {"torch-batched": 3.0, "torch-looped": 5.0}
    entrant = linear.entrant

    def named(name, case, figure):
        ready = entrant(name, case, figure)
        return ready._replace(run=(name, ready.run))

    def interleave(mine, theirs, first, **given):
        seconds = rivals.get(theirs[0], 5.0) if isinstance(theirs, tuple) else 0.5
        return [timing.Pair(timing.Sample(1.0, 2.0), timing.Sample(seconds * each, 8.0)) for each in (1, 0.5, 2)]

    monkeypatch.setattr(linear, "entrant", named)
    monkeypatch.setattr(linear, "timed", lambda run, calls=1: (timing.Sample(1.0, 1.0), None))
    monkeypatch.setattr(linear, "interleave", interleave)
    monkeypatch.setattr(peak, "most", lambda dtype, threads: peak.Peak("FMA loop", 1e9))


def test_race_is_against_the_fastest_form_of_torch(unhurried):
    outcome = only(goals.Race("forward", "decay", 128, 16, goals.Goal(2.5, 4), "torch"))
    assert (outcome.value, outcome.spread, outcome.runs, outcome.rival) == (3.0, (1.5, 6.0), 3, "torch-batched")
    assert outcome.verdict == "met"
    work = 5 * 8 * 128 * 16 * 16 / 1e9
    assert outcome.of_peak == pytest.approx(work)
    assert outcome.their_of_peak == pytest.approx(work / 3)
    assert outcome.limit == pytest.approx(3 / work)
    assert report.line(outcome).endswith("  torch-batched")


def test_step_is_measured_beside_a_loop_over_its_state(unhurried, monkeypatch):
    touched = []
    monkeypatch.setattr(peak, "updater", lambda pieces: touched.extend(pieces) or (lambda: None))
    outcome = only(goals.Race("forward", "step", 1, 16, goals.Goal(2, 0.4, aim_of="peak"), "torch", calls=4))
    assert [tuple(piece.shape) for piece in touched] == [(1, 32, 16, 16)]
    assert (outcome.of_peak, outcome.loop, outcome.verdict) == (0.5, "update loop", "aim")
    assert outcome.rate == 2 * 32 * 16 * 16 * 4 / 0.5
    assert outcome.limit == pytest.approx(outcome.value / 0.5)


@pytest.mark.parametrize(
    "case, direction, each", [("linear", "forward", 4 * 17), ("gated-delta", "forward+backward", 3 * 7 * 16)]
)
def test_operations_are_those_of_the_recurrence(case, direction, each):
    assert linear.flops(CASES[case], 10, 16, direction) == 8 * 10 * 16 * each


def test_growth_is_fitted_to_first_tokens_of_one_text(monkeypatch):
    lengths = (64, 128, 256)
    monkeypatch.setattr(linear, "LINEAR_LENGTHS", lengths)
    monkeypatch.setattr(linear, "repeat", lambda run, first, **given: [timing.Sample(run(), 1.0)])
    monkeypatch.setattr(
        linear,
        "gated",
        lambda who, contender, direction, expected: gate.Ready(lambda: tokens_of(expected) ** 1.5, 0, 0.2),
    )

    def tokens_of(expected):
        return expected[0].truth.shape[2]

    outcome = only(goals.Growth("forward", "decay", goals.Goal(1.6, 1.5, "at most")))
    assert outcome.value == pytest.approx(1.5)
    assert [tokens for tokens, _ in outcome.points] == list(lengths)
    assert outcome.share == 0.2


def test_wrong_growth_is_refused(monkeypatch):
    monkeypatch.setattr(linear, "LINEAR_LENGTHS", (64, 128))
    right = qkv.ssd

    def wrong(q, *streams, **given):
        output = right(q, *streams, **given)
        return output if q.shape[2] < 100 else 1.001 * output

    monkeypatch.setattr(qkv, "ssd", wrong)
    with pytest.raises(gate.Refused, match=r"^ours, decay at 128 tokens, forward: the output is"):
        only(goals.Growth("forward", "decay", goals.Goal(1.1, 1.1, "at most")))


def test_what_must_be_held():
    figure = goals.Held("forward+backward", "gated-delta", 1280, goals.Goal(1.05, 1, "at most"))
    one = 8 * 1280 * 64 * 4
    inputs = 3 * one + 2 * (8 * 1280 * 4)
    must = 2 * inputs + 2 * one + (1280 // 64 + 1) * 8 * 64 * 64 * 4
    asked = []
    outcome = only(figure, lambda question: asked.append(question) or 123_456)
    assert asked == [("auto", "gated-delta", 1280, "forward+backward")]
    assert outcome.theirs == must
    assert outcome.ours == inputs + one + 123_456
    assert outcome.value == pytest.approx(outcome.ours / must)
    assert only(figure).note == "needs Linux's /proc"


def test_memory_helper_answers_linear_cases():
    memory = import_module("memory")
    if not import_module("qkv.compare.memory").STATUS.exists():
        pytest.skip("memory is read from /proc")
    probe = memory.MemoryProbe()
    try:
        added = probe.ask(memory.Question("auto", "decay", 4096, "forward"))
    finally:
        probe.close()
    one = 8 * 4096 * 64 * 4
    assert one < added < 3 * one


def test_every_figure_of_the_issue_has_its_goal():
    given = {figure.name: figure.goal for figure in goals.LINEAR if figure.goal is not None}
    assert given["forward/linear/4096/D64/torch"] == goals.Goal(2.5, 5)
    assert given["forward/gated-delta/4096/D128/transformers"] == goals.Goal(4.4, 8)
    assert given["forward+backward/gated-delta/4096/D64/transformers"] == goals.Goal(10, 20)
    assert given["forward/step/1/D128/transformers"] == goals.Goal(8, 0.7, aim_of="peak")
    assert {name.split("/")[0] for name in given} == {"forward", "forward+backward", "growth", "held"}
    assert all(goal.least == 1.05 for name, goal in given.items() if name.startswith(("growth", "held")))
    for figure in goals.LINEAR:
        assert figure.case in CASES
        if isinstance(figure, goals.Race):
            assert figure.against in {"torch", *peers.CONTENDERS}


@pytest.mark.skipif(peak.loop() is None, reason="needs a C compiler")
def test_update_loop_touches_every_byte_and_twice_leaves_all():
    pieces = [torch.randint(256, (size,), dtype=torch.uint8) for size in (1, 511, 512, 100_003)]
    before = [piece.clone() for piece in pieces]
    update = peak.updater(pieces, 0x0101010101010101)
    update()
    for piece, old in zip(pieces, before, strict=True):
        assert torch.equal(piece, old ^ 1)
    update()
    for piece, old in zip(pieces, before, strict=True):
        assert torch.equal(piece, old)


@pytest.mark.parametrize("name, case", [*product(peers.TORCH[1:], NAMES)][:-1])
def test_forms_of_torch_take_any_length(name, case):
    assert max(share(name, case, tokens) for tokens in (1, 63, 65)) < 0.9


class NoProbe:
    def ask(self, question):
        return None

    def close(self):
        pass


def test_run_prints_and_writes(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(run, "MemoryProbe", NoProbe)
    monkeypatch.setattr(report, "plot", lambda rows, path, title: False)
    asked = ["--suite", "linear", "--backend", "chunked", "--out", str(tmp_path), "--name", "small", "--quick"]
    assert run.main([*asked, "--only", "forward/decay/1024,forward/step/1/D128/torch"]) == 0
    printed = capsys.readouterr().out
    record = json.loads((tmp_path / "small.json").read_text(encoding="utf-8"))
    names = ["forward/step/1/D128/torch", "forward/decay/1024/D64/torch"]
    assert [figure["name"] for figure in record["figures"]] == names
    assert all(name in printed for name in names)
    assert "step, of peak: a loop that reads and writes the state alone" in printed
    assert record["figures"][1]["rival"] in peers.TORCH


def test_refused_figure_ends_the_run(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(run, "MemoryProbe", NoProbe)
    monkeypatch.setattr(qkv, "ssd", WRONG["louder"](qkv.ssd))
    asked = ["--suite", "linear", "--backend", "auto", "--out", str(tmp_path), "--name", "small", "--quick"]
    assert run.main([*asked, "--only", "forward/decay/1024"]) == 1
    assert "REFUSED ours, decay at 1,024 tokens, D 64, forward: the output is" in capsys.readouterr().out
    assert not [*tmp_path.iterdir()]


def test_blockwise_has_no_linear_family(capsys):
    with pytest.raises(SystemExit):
        run.main(["--suite", "linear", "--backend", "blockwise"])
    assert "--backend blockwise has no linear family" in capsys.readouterr().err
