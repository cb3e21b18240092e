"""Broken files: each gives one CheckpointError that names file and tensor, and takes no memory for what it claims."""

from __future__ import annotations

import json
import pickle
import random
import re
import shutil
import struct
import tracemalloc
import zipfile
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from ggufs import gguf
from qkv.errors import CheckpointError
from qkv.models import loading
from qkv.models.files.checksums import CHECKSUMS, HEADER, header_digest
from qkv.tensorfile import read_header
from tinymodel import Tiny, TinyConfig, same, tiny

SHARD = 100
LAYOUTS = pytest.mark.parametrize("layout", ["single", "shards"])
ONE = "model-00001-of-00004.safetensors"
INDEX = "model.safetensors.index.json"


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A saved model as one file and as shards, and the same without checksums, as other programs write it."""
    root = tmp_path_factory.mktemp("saved")
    tiny().save_pretrained(root / "single")
    tiny().save_pretrained(root / "shards", max_shard_bytes=SHARD)
    for layout in ("single", "shards"):
        shutil.copytree(root / layout, root / f"foreign {layout}")
        for file in (root / f"foreign {layout}").glob("*.safetensors"):
            save_file(load_file(file), file, {"format": "pt"})
    return root


@pytest.fixture
def folder(saved, tmp_path):
    """A fresh copy of a layout."""

    def fresh(layout):
        shutil.rmtree(tmp_path / "model", ignore_errors=True)
        return Path(shutil.copytree(saved / layout, tmp_path / "model"))

    return fresh


def refused(folder, model=Tiny):
    """The text of the one error that reading gives."""
    with pytest.raises(CheckpointError) as caught:
        model.from_pretrained(folder)
    text = str(caught.value)
    assert text.count("; ") >= 2 and text.isprintable() and str(folder) not in text
    return text


def flipped(data, bit):
    changed = bytearray(data)
    changed[bit // 8] ^= 1 << (bit % 8)
    return bytes(changed)


def tensor_at(file, place):
    """Which tensor a byte of a safetensors file belongs to."""
    start = 8 + int.from_bytes(file.read_bytes()[:8], "little")
    found = [e.name for e in read_header(file).entries if e.begin <= place - start < e.end]
    return found[0] if found else None


@LAYOUTS
def test_every_flipped_bit_of_a_saved_model_is_found(layout, folder):
    """300 bits, over all files alike; one in a tensor's bytes names that tensor, any names a file."""
    model = folder(layout)
    files = sorted(model.iterdir())
    rng = random.Random(6)
    named = 0
    for n in range(300):
        file = files[n % len(files)]
        data = file.read_bytes()
        bit = rng.randrange(8 * len(data))
        name = tensor_at(file, bit // 8) if file.suffix == ".safetensors" else None
        file.write_bytes(flipped(data, bit))
        text = refused(model)
        assert re.search(r"[\w.-]+\.(json|safetensors)'", text), text
        if name is not None:
            assert f"{file.name!r} must hold tensor {name!r} as it was saved; its SHA-256 differs" in text
            named += 1
        file.write_bytes(data)
    assert named > 10
    assert same(Tiny.from_pretrained(model), tiny())


@pytest.mark.long  # 12,000 reads
def test_every_bit_of_a_saved_header_is_found(folder):
    model = folder("single")
    file = model / "model.safetensors"
    data = file.read_bytes()
    for bit in range(8 * (8 + int.from_bytes(data[:8], "little"))):
        file.write_bytes(flipped(data, bit))
        refused(model)


@LAYOUTS
def test_flipped_bits_without_checksums_are_refused_or_read_but_nothing_else(layout, folder):
    model = folder(f"foreign {layout}")
    files = sorted(model.iterdir())
    rng = random.Random(7)
    for n in range(120):
        file = files[n % len(files)]
        data = file.read_bytes()
        file.write_bytes(flipped(data, rng.randrange(8 * len(data))))
        with suppress(CheckpointError):
            Tiny.from_pretrained(model)
        file.write_bytes(data)


@pytest.mark.parametrize("kind", ["single", "shards", "foreign single", "foreign shards"])
def test_files_that_end_too_early_are_refused(kind, folder):
    """At 64 points of each file; of several shards the first stands for all."""
    model = folder(kind)
    for file in sorted(model.iterdir()):
        if file.match("*-of-*") and file.name != ONE:
            continue
        data = file.read_bytes()
        for n in range(64):
            cut = data[: len(data) * n // 64]
            if cut.strip() != data.strip():  # a line's end that is missing takes nothing away
                file.write_bytes(cut)
                assert file.name in refused(model)
        file.write_bytes(data)
    assert same(Tiny.from_pretrained(model), tiny())


@LAYOUTS
def test_files_that_are_gone_are_missed(layout, folder):
    model = folder(layout)
    for file in sorted(model.iterdir()):
        data = file.read_bytes()
        file.unlink()
        assert file.name in refused(model) or file.name == INDEX
        file.mkdir()
        assert file.name in refused(model)
        file.rmdir()
        file.write_bytes(data)


def test_bytes_of_two_tensors_that_changed_places_are_found(folder):
    model = folder("single")
    file = model / "model.safetensors"
    start = 8 + int.from_bytes(file.read_bytes()[:8], "little")
    spans = {e.name: slice(start + e.begin, start + e.end) for e in read_header(file).entries}
    data = bytearray(file.read_bytes())
    one, other = spans["model.h.0.weight"], spans["model.h.1.weight"]
    data[one], data[other] = data[other], data[one]
    file.write_bytes(data)
    assert "tensor 'model.h.0.weight' as it was saved" in refused(model)


def rewritten(file, change):
    """Change the header of a safetensors file as JSON."""
    data = file.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    change(header)
    text = json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + length :])


def renamed(header):
    header["model.h.0.BIAS"] = header.pop("model.h.0.bias")


def retyped(header):
    header["model.h.0.bias"]["dtype"] = "I32"


def swapped(header):
    one, other = "model.h.0.weight", "model.h.1.weight"
    header[one], header[other] = header[other], header[one]


def reshaped(header):
    header["model.h.0.weight"]["shape"] = [2, 8]


def oversized(header):
    header["embedding.weight"]["shape"] = [10**12, 4]


def far(header):
    header["embedding.weight"] |= {"shape": [10**12, 4], "data_offsets": [0, 16 * 10**12]}


MISLABELLED = {
    renamed: "must hold exactly the model's tensors; missing: 'model.h.0.bias'; unknown: 'model.h.0.BIAS'",
    retyped: "must hold 'model.h.0.bias' as floating-point numbers; got torch.int32",
    reshaped: "must hold 'model.h.0.weight' as (4, 4), by the config; got (2, 8)",
    oversized: "must hold 16,000,000,000,000 bytes for tensor 'embedding.weight'",
    far: "must ",
}


def test_names_that_changed_places_are_found_by_the_checksums(folder):
    """Of two tensors of one shape nothing else can tell; without checksums the names are believed."""
    model = folder("single")
    rewritten(model / "model.safetensors", swapped)
    assert "must have the header that was saved; its SHA-256 differs" in refused(model)


@LAYOUTS
@pytest.mark.parametrize("kind", ["", "foreign "])
@pytest.mark.parametrize("change", MISLABELLED, ids=lambda change: change.__name__)
def test_headers_that_tell_of_other_tensors_are_refused(change, kind, layout, folder):
    model = folder(kind + layout)
    for file in model.glob("*.safetensors"):
        with suppress(KeyError):
            rewritten(file, change)
    text = refused(model)
    header = "must have the header that was saved; its SHA-256 differs"
    if (kind and layout == "single") or change in {oversized, far}:
        assert MISLABELLED[change] in text
    elif kind:
        assert "model.h.0" in text
    else:
        assert header in text


@pytest.mark.parametrize("gone", [CHECKSUMS, HEADER])
def test_a_header_that_lost_one_of_its_two_checks_is_refused(gone, folder):
    model = folder("single")
    rewritten(model / "model.safetensors", lambda header: header["__metadata__"].pop(gone))
    assert "must have the header that was saved" in refused(model)


def forged(folder, change):
    """Give a file other promises, under a header that vouches for them: what only a liar does."""
    file = folder / "model.safetensors"

    def put(header):
        table = json.loads(header["__metadata__"][CHECKSUMS])
        header["__metadata__"][CHECKSUMS] = change(table)
        header["__metadata__"][HEADER] = "0" * 64

    rewritten(file, put)
    data = file.read_bytes()
    text = data[8 : 8 + int.from_bytes(data[:8], "little")]
    file.write_bytes(data.replace(b"0" * 64, header_digest(text, "0" * 64).encode(), 1))


FORGED = {
    "no JSON": (lambda table: "{", "must keep digests by name under qkv_checksums; got '{'"),
    "no object": (lambda table: "[]", "must keep digests by name under qkv_checksums; got '[]'"),
    "a field too many": (lambda table: json.dumps(table | {"x": 1}), "must keep digests by name under qkv_checksums"),
    "a digest that is a number": (
        lambda table: json.dumps(table | {"files": {"config.json": 1}}),
        "must keep digests by name under qkv_checksums",
    ),
    "tensors left out": (lambda table: json.dumps(table | {"tensors": {}}), "a digest of each of its tensors"),
    "a path": (
        lambda table: json.dumps(table | {"files": {"../../etc/passwd": "0"}}),
        "must name its files without paths; got '../../etc/passwd'",
    ),
    "a file that is not there": (
        lambda table: json.dumps(table | {"files": {"more.json": "0"}}),
        "'more.json' must be as it was saved with the weights; it is not there",
    ),
}


@pytest.mark.parametrize("lie", FORGED)
def test_forged_promises_are_refused(lie, folder):
    change, said = FORGED[lie]
    model = folder("single")
    forged(model, change)
    assert said in refused(model)


def test_a_pickle_under_the_name_of_safetensors_is_refused_and_not_run(folder):
    class Loud:
        def __reduce__(self):
            return (pytest.fail, ("a pickle was run",))

    model = folder("foreign single")
    file = model / "model.safetensors"
    file.write_bytes(pickle.dumps(Loud()))
    assert "'model.safetensors' must begin with a header" in refused(model)
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("archive/data.pkl", pickle.dumps(Loud()))
    assert "'model.safetensors' must " in refused(model)
    file.unlink()
    for name in ("pytorch_model.bin", "model.pt"):
        (model / name).write_bytes(pickle.dumps(Loud()))
        text = refused(model)
        assert "'model' must hold model.safetensors or model.safetensors.index.json; got '" in text
        assert "qkv never reads pickle" in text
        (model / name).unlink()
    assert "must hold model.safetensors or model.safetensors.index.json; it is not there" in refused(model)


def index_of(folder, change):
    table = json.loads((folder / INDEX).read_text())
    change(table)
    (folder / INDEX).write_text(json.dumps(table))


def place(name, shard):
    return lambda table: table["weight_map"].__setitem__(name, shard)


INDEX_LIES = {
    "no map": (
        lambda t: t.pop("weight_map"),
        f"'{INDEX}' must give the file of each tensor under weight_map; got None",
    ),
    "an empty map": (lambda t: t["weight_map"].clear(), "must give the file of each tensor under weight_map; got {}"),
    "a list": (lambda t: t.__setitem__("weight_map", ["a"]), "must give the file of each tensor under weight_map"),
    "a number": (place("steps", 3), "must give the file of each tensor under weight_map"),
    "a way up": (place("steps", "../a.safetensors"), "must name its files without paths; got '../a.safetensors'"),
    "a way down": (place("steps", "a/b.safetensors"), "must name its files without paths; got 'a/b.safetensors'"),
    "a way back": (place("steps", "..\\b.safetensors"), "must name its files without paths"),
    "a root": (place("steps", "/etc/passwd"), "must name its files without paths; got '/etc/passwd'"),
    "a drive": (place("steps", "C:a.safetensors"), "must name its files without paths; got 'C:a.safetensors'"),
    "nothing": (place("steps", ""), "must name its files without paths; got ''"),
    "an escape": (place("steps", "\x1b[2J.safetensors"), "must name its files without paths"),
    "a pickle": (place("steps", "pytorch_model.bin"), "must name .safetensors files; got 'pytorch_model.bin'"),
    "a shard that is not there": (place("steps", "x.safetensors"), "'x.safetensors' must be a file that can be read"),
    "another shard": (place("steps", ONE), f"'{ONE}' must hold tensor 'steps', by {INDEX}; it is not there"),
    "a tensor that no shard has": (place("more", ONE), f"'{ONE}' must hold tensor 'more', by {INDEX}; it is not there"),
    "a tensor left out": (lambda t: t["weight_map"].pop("steps"), "must not hold tensor 'steps'"),
}


@pytest.mark.parametrize("lie", INDEX_LIES)
def test_an_index_that_lies_is_refused(lie, folder):
    change, said = INDEX_LIES[lie]
    model = folder("foreign shards")
    index_of(model, change)
    assert said in refused(model)


def test_a_tensor_in_two_shards_is_refused_with_both_names(folder):
    model = folder("foreign shards")
    first, second = (model / f"model-0000{n}-of-00004.safetensors" for n in (1, 2))
    save_file(load_file(first) | load_file(second), second, {"format": "pt"})
    name = next(iter(load_file(first)))
    text = refused(model)
    assert f"must hold tensor {name!r} in one file; got it in '{first.name}' and '{second.name}'" in text


def test_too_many_shards_are_refused(folder, monkeypatch):
    monkeypatch.setattr("qkv.models.files.shards.MAX_SHARDS", 2)
    assert f"'{INDEX}' must name at most 2 files; got 4" in refused(folder("foreign shards"))


def test_shards_of_two_saves_are_refused(folder, tmp_path):
    model = folder("shards")
    other = tiny()
    with torch.no_grad():
        other.embedding.weight += 1
    other.save_pretrained(tmp_path / "other", max_shard_bytes=SHARD)
    shutil.copy(tmp_path / "other" / ONE, model / ONE)
    assert f"'{INDEX}' must name shards that were saved together; got shards of 2 saves" in refused(model)
    save_file(load_file(model / ONE), model / ONE)  # one without checksums among those that have them
    assert "must name shards that were saved together" in refused(model)


CONFIGS = {
    "empty": ("", "'config.json' must hold a JSON object in UTF-8"),
    "a list": ("[]", "'config.json' must hold a JSON object of named fields; got a list"),
    "a pickle": ("\x80\x04N.", "'config.json' must hold a JSON object in UTF-8"),
    "nested without end": ('{"a":' + "[" * 100_000, "'config.json' must hold a JSON object in UTF-8"),
    "a number without end": ('{"a":' + "9" * 10_000 + "}", "'config.json' must hold a JSON object in UTF-8"),
    "a field twice": ('{"a": 1, "a": 2}', "'config.json' must name each field once; 'a' stands there twice"),
    "NaN": ('{"hidden_size": NaN}', "'config.json' must hold a JSON object in UTF-8; got NaN is not JSON"),
    "too long": ('{"a":"' + "x" * 2**22 + '"}', "'config.json' must have at most 4,194,304 bytes"),
    "another model": ({"model_type": "other"}, "`model_type` in 'config.json' must be 'tiny'; got 'other'"),
    "a text for a number": ({"hidden_size": "4"}, "`hidden_size` in 'config.json' must be an integer; got '4'"),
    "a field left out": ({"hidden_size": None}, "`hidden_size` in 'config.json' must be given; got None"),
    "no width": ({"hidden_size": 0}, "'config.json' must describe a model; got: `width` must be at least 1"),
    "another width": ({"hidden_size": 8}, "'model.safetensors' must hold 'embedding.weight' as (10, 8), by the config"),
    "a width that overflows": ({"hidden_size": 2**62}, "`hidden_size` in 'config.json' must be at most 1,048,576; got"),
    "a width beyond memory": (
        {"vocab_size": 2**24, "hidden_size": 2**20},
        "as (16777216, 1048576), by the config; got (10, 4)",
    ),
    "layers beyond memory": (
        {"num_hidden_layers": 10**4},
        "'config.json' must describe at most one layer for each of its 6 tensors; got layers 10,000",
    ),
    "layers beyond reason": (
        {"num_hidden_layers": 10**8},
        "`num_hidden_layers` in 'config.json' must be at most 10,000",
    ),
    "layers too few": ({"num_hidden_layers": 1}, "unknown: 'model.h.1.bias', 'model.h.1.weight'"),
    "layers below none": ({"num_hidden_layers": -1}, "unknown: 'model.h.0.bias', 'model.h.0.weight'"),
}


@pytest.mark.parametrize("lie", CONFIGS)
def test_a_config_that_lies_is_refused(lie, folder):
    said, expected = CONFIGS[lie]
    model = folder("foreign single")
    file = model / "config.json"
    if isinstance(said, dict):
        said = json.dumps(json.loads(file.read_text()) | said)
    file.write_text(said, encoding="latin-1" if lie == "a pickle" else "utf-8")
    tracemalloc.start()
    text = refused(model)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert expected in text and peak < 2**23


TOKENIZERS = ["", "[]", "{}", '{"version": "9"}', "\x80\x04N.", "null", '{"version": "1.0", "model": {"type": "BPE"}}']


@pytest.mark.parametrize("text", TOKENIZERS, ids=ascii)
def test_a_tokenizer_that_lies_is_refused(text, folder):
    model = folder("foreign single")
    (model / "tokenizer.json").write_text(text, encoding="latin-1")
    assert "'tokenizer.json' must hold a tokenizer; got" in refused(model)


def test_a_tokenizer_of_any_damage_is_refused_or_read_but_nothing_else(folder, capfd):
    """Numbers, names and types exchanged for others, anywhere in the file; the package's own panics are caught."""
    model = folder("foreign single")
    file = model / "tokenizer.json"
    whole = json.loads(file.read_text())
    whole["added_tokens"] = [
        {
            "id": n,
            "content": c,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": True,
        }
        for n, c in ((10, "<s>"), (11, "</s>"))
    ]
    marks = {"<s>": {"id": "<s>", "ids": [10], "tokens": ["<s>"]}}
    parts = [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
    whole["post_processor"] = {"type": "TemplateProcessing", "single": parts, "pair": parts, "special_tokens": marks}
    rng = random.Random(3)
    odd = [None, -1, 2**40, 1e300, "", "x", [], {}, [[]], True, "\ufffd"]

    def damaged(node):
        if rng.random() < 0.03:
            return rng.choice(odd)
        if isinstance(node, dict):
            return {(key if rng.random() > 0.02 else "other"): damaged(value) for key, value in node.items()}
        return [damaged(one) for one in node] if isinstance(node, list) else node

    read = 0
    for _ in range(300):
        file.write_text(json.dumps(damaged(whole)))
        with suppress(CheckpointError):
            ours = Tiny.from_pretrained(model).tokenizer
            read += 1
            ours.decode(ours.encode("abcabc <s> j", special=True))
            ours.decode(ours.encode("abcabc <s> j"))
    assert 0 < read < 300


@pytest.mark.parametrize("said", ["[]", '{"eos_token": 3}', '{"eos_token": {"content": 3}}', '{"a": 1, "a": 2}'])
def test_a_side_table_of_the_tokenizer_that_lies_is_refused(said, folder):
    model = folder("foreign single")
    (model / "tokenizer_config.json").write_text(said)
    assert "'tokenizer_config.json'" in refused(model)


def test_unknown_kinds_of_model_are_refused_with_the_list(folder, monkeypatch):
    model = folder("single")
    with pytest.raises(CheckpointError, match=r"`model_type` in 'config.json' must be one of bert, .*; got 'tiny'"):
        loading.from_pretrained(model)
    monkeypatch.setitem(loading.KINDS, "tiny", Tiny)
    assert same(loading.from_pretrained(model), tiny())
    with pytest.raises(CheckpointError, match=r"'nowhere' must be a folder with a model, or a .gguf file; it is none"):
        loading.from_pretrained(model / "nowhere")
    with pytest.raises(CheckpointError, match=r"'config.json' must be a folder with a model"):
        loading.from_pretrained(model / "config.json")


class TinyGguf(Tiny):
    """Reads itself from GGUF files too, whose names are its own."""

    @classmethod
    def gguf_config(cls, metadata, shapes):
        width = metadata["tiny.width"]
        return TinyConfig(vocabulary=shapes["embedding.weight"][0], width=width, layers=metadata["tiny.layers"])


LETTERS = {
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "gpt-2",
    "tokenizer.ggml.tokens": list("abcdefghij"),
    "tokenizer.ggml.merges": ["a b"],
}


def gguf_bytes(**changed):
    model = tiny()
    metadata = {"general.architecture": "tiny", "tiny.width": 4, "tiny.layers": 2, **LETTERS, **changed}
    own = {name: one for name, one in model.state_dict().items() if name != "head.weight"}
    tensors = {name: (tuple(one.shape), 0, one.numpy().tobytes()) for name, one in own.items()}
    tensors["steps"] = ((1,), 27, np.zeros(1, np.int64).tobytes())
    tensors["layers.0.bias"] = ((4,), 1, model.layers[0].bias.detach().half().numpy().tobytes())
    metadata["tokenizer.ggml.tokens"] = [*metadata["tokenizer.ggml.tokens"], "ab"]
    return gguf(metadata, tensors)


def test_a_gguf_file_is_read_as_float32_or_as_asked(tmp_path):
    (tmp_path / "tiny.gguf").write_bytes(gguf_bytes())
    model = tiny()
    with torch.no_grad():
        model.layers[0].bias.copy_(model.layers[0].bias.half())
    for path in (tmp_path, tmp_path / "tiny.gguf"):
        back = TinyGguf.from_pretrained(path)
        assert same(back, model) and back.tokenizer.encode("abc") == [10, 2] and not back.training
    (tmp_path / "plain.gguf").write_bytes(gguf_bytes().replace(b"ggml.model", b"ggml.other"))
    assert TinyGguf.from_pretrained(tmp_path / "plain.gguf").tokenizer is None
    half = TinyGguf.from_gguf(tmp_path / "tiny.gguf", dtype=torch.float16)
    assert {weight.dtype for weight in half.parameters()} == {torch.float16}


GGUF_LIES = {
    "a width of another": (
        {"tiny.width": 5},
        "'embedding.weight' as (10, 5), by the config; got (10, 4)",
    ),
    "a width that is a text": ({"tiny.width": "4"}, "'tiny.gguf' must describe a model"),
    "layers beyond memory": (
        {"tiny.layers": 2**31 - 1},
        "must describe at most one layer for each of its 6",
    ),
    "tokens that are numbers": ({"tokenizer.ggml.merges": [1]}, "'tiny.gguf' must hold `tokenizer.ggml.merges`"),
    "another tokenizer": ({"tokenizer.ggml.model": "llama"}, "'tiny.gguf' must hold `tokenizer.ggml.model`"),
}


@pytest.mark.parametrize("lie", GGUF_LIES)
def test_a_gguf_file_whose_values_lie_is_refused(lie, tmp_path):
    changed, said = GGUF_LIES[lie]
    (tmp_path / "tiny.gguf").write_bytes(gguf_bytes(**changed))
    assert said in refused(tmp_path, TinyGguf)


def test_a_gguf_file_that_ends_too_early_or_is_damaged_gives_our_error_alone(tmp_path):
    data = gguf_bytes()
    file = tmp_path / "tiny.gguf"
    used = len(data) - 24  # padding at the end
    for n in range(64):
        file.write_bytes(data[: used * n // 64])
        assert "'tiny.gguf'" in refused(tmp_path, TinyGguf)
    rng = random.Random(5)
    for _ in range(300):
        file.write_bytes(flipped(data, rng.randrange(8 * len(data))))
        with suppress(CheckpointError):
            TinyGguf.from_pretrained(tmp_path)
