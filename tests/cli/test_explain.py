"""`qkv explain`: what it prints, in which form, and that bad input is one error before anything is printed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from qkv.cli.main import main
from qkv.explain import stages, worked_example

ARTICLE = {"q": [[1, 0]], "k": [[1, 2], [0, 1], [1, 0], [2, 1], [0, 2], [1, 1]], "v": [[1], [2], [3], [4], [5], [6]]}


def printed(capsys, *words):
    assert main(["explain", *map(str, words)]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    return out


def refused(capsys, *words):
    assert main(["explain", *map(str, words)]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("qkv: error: ")
    assert err.count("\n") == 1
    return err


def test_without_arguments_is_the_article(capsys):
    assert printed(capsys).startswith(worked_example("article").text())
    assert (
        printed(capsys, "--example", "cat", "--mistake", "no-scale")
        == worked_example("cat").text(mistake="no-scale") + "\n"
    )


def test_text_is_embedded_by_its_seed(capsys):
    words = ("the cat sat", "--dim", 4, "--heads", 2, "--causal", "--dropout", 0.25, "--seed", 7)
    text = printed(capsys, *words)
    assert text == printed(capsys, *words)
    assert "3 words, small integers from seed 7" in text
    assert "causal()" in text
    assert "· keep / (1 − 0.25)" in text
    assert text != printed(capsys, *words[:-1], 8)
    found = json.loads(printed(capsys, "a b a", "--json"))
    assert found["query"][0][0][0] == found["query"][0][0][2]
    assert found["query"][0][0][0] != found["query"][0][0][1]
    assert set(torch.tensor(found["key"]).flatten().tolist()) <= {-1.0, 0.0, 1.0, 2.0}
    assert json.loads(printed(capsys, "a", "b", "a", "--json")) == found


@pytest.mark.parametrize("names", [("q", "k", "v"), ("query", "key", "value")])
def test_json_file(names, capsys, tmp_path):
    file = tmp_path / "numbers.json"
    file.write_text(json.dumps(dict(zip(names, ARTICLE.values(), strict=True))))
    found = json.loads(printed(capsys, "--file", file, "--json"))
    assert found["steps"]["scores"]["value"] == [[[[1, 0, 1, 2, 0, 1]]]]
    assert "'numbers.json'" in printed(capsys, "--file", file)


def test_safetensors_file_with_heads(capsys, tmp_path):
    q = torch.randn(2, 4, 5, 8, generator=torch.Generator().manual_seed(0))
    save_file({"q": q, "k": q[:, :2].clone(), "v": q[:, 2:].clone().half().float()}, tmp_path / "t.safetensors")
    text = printed(capsys, "--file", tmp_path / "t.safetensors", "--head", 3, "--batch", 1, "--pattern", "window(1, 1)")
    assert "B=2 batch rows  H=4 heads  G=2 key heads  L=5 queries" in text
    assert "shown: head 3 of batch row 1" in text
    assert "window(1, 1)" in text


def test_options_reach_the_call(capsys):
    assert "S · 2\n" in printed(capsys, "--scale", 2)
    assert "3 softcap" in printed(capsys, "--softcap", 1.5)
    assert 'entropy of row "the"' in printed(capsys, "--example", "cat", "--row", 0)
    text = printed(capsys, "--steps", "scores, softmax")
    assert "1 scores" in text
    assert "4 softmax" in text
    assert "2 scale" not in text
    assert printed(capsys, "--plain", "--width", 60).isascii()


def test_json_is_strict_and_holds_the_chosen_steps(capsys):
    text = printed(capsys, "--example", "cat", "--json", "--steps", "mask,softmax", "--mistake", "inverted-mask")
    found = json.loads(text, parse_constant=pytest.fail)
    assert list(found["steps"]) == ["mask", "softmax"]
    assert found["steps"]["mask"]["value"][0][0][0] == [0.5, "-inf", "-inf"]
    assert found["mistake"]["value"][0][0][2] == ["nan"] * 3


def test_colours_only_on_a_terminal_that_wants_them(capsys, monkeypatch):
    assert "\x1b" not in printed(capsys)
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    assert "\x1b[38;5;33m" in printed(capsys)
    assert "\x1b" not in printed(capsys, "--plain")
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b" not in printed(capsys)


REFUSALS = {
    "example": (["--example", "artikel"], "did you mean 'article'"),
    "step": (["--steps", "scores,dropuot"], "did you mean 'dropout'"),
    "step as JSON": (["--steps", "dropuot", "--json"], "did you mean 'dropout'"),
    "mistake": (["--mistake", "wrongaxis"], "did you mean 'wrong-axis'"),
    "pattern": (["--pattern", "casual()"], "causal"),
    "pattern sizes": (["--pattern", "neighborhood((2, 2), 1)"], ""),
    "row": (["--row", "1"], "`row` must lie in 0..0; got 1"),
    "dropout": (["--dropout", "1.5"], "`dropout_p` must hold 0 ≤ p < 1"),
    "scale": (["--scale", "nan"], "`scale` must be finite"),
    "width": (["--width", "39"], "`width` must be at least 40"),
    "dim": (["a b", "--dim", "0"], "`dim` must lie in 1..1024"),
    "no words": (["  "], "the text must hold a word"),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_refuses(case, capsys):
    words, text = REFUSALS[case]
    assert text in refused(capsys, *words)


FILES = {
    "names.json": (
        '{"q": [[1]], "k": [[1]], "w": [[1]]}',
        "must hold tensors q, k, v or query, key, value; got 'k', 'q', 'w'",
    ),
    "axes.json": ('{"q": [[1, 2]], "k": [[1]], "v": [[1]]}', "D"),
    "flat.json": ('{"q": [1, 2], "k": [1, 2], "v": [1, 2]}', "at least 2 axes"),
    "ragged.json": ('{"q": [[1, 2], [1]], "k": [[1]], "v": [[1]]}', "must give axis 1 of 'q' one length"),
    "text.json": ("hello", "must hold a JSON object in UTF-8"),
    "not.safetensors": ("hello, this is no safetensors file", "must begin with a header"),
    "pickle.pt": ("x", "qkv never reads pickle"),
}


@pytest.mark.parametrize("name", FILES)
def test_refuses_a_file_that_is_not_what_it_says(name, capsys, tmp_path):
    text, seen = FILES[name]
    (tmp_path / name).write_text(text)
    assert seen in refused(capsys, "--file", tmp_path / name)


def test_refuses_a_missing_file(capsys, tmp_path):
    assert "No such file" in refused(capsys, "--file", tmp_path / "none.json")


def test_a_check_that_fails_is_exit_code_1(capsys, monkeypatch):
    monkeypatch.setattr(stages, "grouped", lambda tensor, heads: tensor.flip(-2))
    monkeypatch.setattr(stages, "bound", lambda setting, size=1.0: 1e-12)
    assert main(["explain", "--example", "cat"]) == 1
    assert "✗ differs from" in capsys.readouterr().out


def test_example_script_runs():
    file = Path(__file__).resolve().parents[2] / "examples" / "explain_article.py"
    done = subprocess.run([sys.executable, str(file)], capture_output=True, text=True, check=True)
    assert "S[q0,k3] = 1·2 + 0·1 = 2" in done.stdout
