"""`qkv show`: the picture, the counts, and what it refuses."""

from __future__ import annotations

import pytest

from qkv.cli.main import main
from qkv.patterns.text import parse


@pytest.mark.parametrize(
    "words, keys, last",
    [
        (["causal()", "--length", "6"], 6, "21 of 36 pairs, density 0.5833"),
        (["causal() & window(1)", "--length", "6"], 6, "11 of 36 pairs, density 0.3056"),
        (["causal()", "--length", "6", "--keys", "8"], 8, "33 of 48 pairs, density 0.6875"),
    ],
)
def test_picture_then_pairs(words, keys, last, capsys):
    assert main(["show", *words]) == 0
    lines = capsys.readouterr().out.splitlines()
    pattern = parse(words[0])
    assert lines[0] == str(pattern)
    assert lines[1:-1] == pattern.show(6, keys).splitlines()
    assert lines[-1] == last


def test_a_misspelt_pattern_suggests_the_nearest(capsys):
    assert main(["show", "casual()"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("qkv: error: ")
    assert "'causal'" in captured.err


def test_text_that_is_no_pattern_is_one_line(capsys):
    assert main(["show", "causal( &"]) == 2
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize("words", [["--length", "0"], ["--keys", "-1"], ["--length", "4097"]])
def test_a_size_that_cannot_be_drawn_is_refused(words, capsys):
    assert main(["show", "causal()", *words]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert f"`{words[0]}` must lie in 1 .. 4096; got {words[1]}; " in captured.err


def test_the_longest_picture_is_drawn_in_shades(capsys):
    assert main(["show", "causal()", "--length", "4096"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "8,390,656 of 16,777,216 pairs, density 0.5001"
