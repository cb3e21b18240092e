"""`qkv compare`: the table, the files, the exit codes and what it refuses."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from qkv.cli.main import main
from qkv.compare import measuring, weighing
from qkv.compare.families import BY_NAME

SMALL = ["compare", "--length", "64", "128", "--heads", "2", "--head-dim", "8", "--budget", "0.5"]


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    monkeypatch.setattr(weighing, "weighed", lambda rows, setting, tell: rows)
    monkeypatch.setattr(measuring, "weighed", lambda rows, setting, tell: rows)
    monkeypatch.setattr(measuring, "SHORT", 0.0)


def test_table_on_stdout_and_progress_on_stderr(capsys):
    assert main([*SMALL, "--families", "dense", "gated-delta"]) == 0
    said = capsys.readouterr()
    lines = said.out.splitlines()
    assert lines[0] == "forward: B 1, H 2, D 8, V 8, float32; 1 thread, its CPU time"
    for name in ("full", "causal", "gated-delta"):
        assert len([line for line in lines if line.startswith(f"{name} ")]) == 2
    assert "128 tokens: full, causal, gated-delta" in said.err
    assert "checking" not in said.out


def test_arguments_reach_the_call(capsys):
    words = [
        "--direction",
        "decode",
        "--dtype",
        "bfloat16",
        "--value-dim",
        "12",
        "--seed",
        "3",
        "--threads",
        "2",
        "--json",
    ]
    assert main([*SMALL, *words, "--families", "causal", "ssd"]) == 0
    setting = json.loads(capsys.readouterr().out)["setting"]
    assert setting == {
        "lengths": [64, 128],
        "heads": 2,
        "head_dim": 8,
        "value_dim": 12,
        "dtype": "bfloat16",
        "direction": "decode",
        "families": ["causal", "ssd"],
        "threads": 2,
        "budget": 0.5,
        "seed": 3,
    }


def test_files_are_saved(tmp_path, capsys):
    folder = tmp_path / "new" / "folder"
    pytest.importorskip("matplotlib")
    assert main([*SMALL, "--families", "causal", "--save", str(folder), "--plot"]) == 0
    said = capsys.readouterr()
    assert sorted(path.name for path in folder.iterdir()) == ["compare.json", "compare.png", "compare.txt"]
    assert (folder / "compare.txt").read_text(encoding="utf-8") == said.out
    assert json.loads((folder / "compare.json").read_text(encoding="utf-8"))["rows"][0]["name"] == "causal"
    assert said.err.count("written: ") == 3


def test_plot_alone_is_drawn_here(tmp_path, monkeypatch, capsys):
    pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    assert main([*SMALL, "--families", "causal", "--plot"]) == 0
    assert [path.name for path in tmp_path.iterdir()] == ["compare.png"]


def test_wrong_family_ends_in_one(monkeypatch, capsys):
    right = BY_NAME["ssd"]

    def wrong(*tensors, backend, **given):
        return right.function(*tensors, backend=backend, **given) * (1 if backend == "reference" else 1.001)

    monkeypatch.setitem(BY_NAME, "ssd", replace(right, function=wrong))
    assert main([*SMALL, "--families", "ssd"]) == 1
    assert "REFUSED: the output is " in capsys.readouterr().out


@pytest.mark.parametrize(
    "words, told",
    [
        (["--length", "8"], "`lengths` must be a whole number in 64 .. 1,048,576; got 8; choose one inside"),
        (["--families", "linaer"], "got 'linaer'; did you mean 'linear'?"),
        (["--dtype", "int4"], "`dtype` must be one of float32, bfloat16, float16, float64; got int4; "),
    ],
)
def test_what_cannot_be_asked_ends_in_two(words, told, capsys):
    assert main(["compare", *words]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("qkv: error: ")
    assert told in said.err
    assert said.err.count("\n") == 1


def test_plot_without_matplotlib_is_refused_before_any_work(monkeypatch, capsys):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert main([*SMALL, "--plot"]) == 2
    assert capsys.readouterr().err.startswith("qkv: error: a plot needs `matplotlib`; it is not installed; ")


def test_folder_that_cannot_be_made_is_refused_before_any_work(tmp_path, capsys):
    (tmp_path / "file").write_text("", encoding="utf-8")
    assert main([*SMALL, "--save", str(tmp_path / "file" / "x")]) == 2
    assert "`--save` must be a folder that can be made" in capsys.readouterr().err
