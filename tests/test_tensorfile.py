"""Files of tensors: what is read, and that each way of lying is refused in one error before anything is loaded."""

from __future__ import annotations

import json
import struct
import sys

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from qkv import tensorfile
from qkv.errors import CheckpointError
from qkv.tensorfile import read_header, read_json, read_safetensors, read_tensors

GOOD = {
    "q": {"dtype": "F32", "shape": [1, 2], "data_offsets": [0, 8]},
    "k": {"dtype": "I64", "shape": [2], "data_offsets": [8, 24]},
}
DATA = np.array([1.0, 0.5], np.float32).tobytes() + np.array([3, -4], np.int64).tobytes()


def write(path, header, data=DATA, length=None):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)
    return path


def changed(**fields):
    return {"q": {**GOOD["q"], **fields}, "k": GOOD["k"]}


def test_safetensors_reads_what_was_written(tmp_path):
    file = write(tmp_path / "a.safetensors", {**GOOD, "__metadata__": {"made by": "hand"}})
    tensors = read_tensors(file)
    assert tensors["q"].tolist() == [[1.0, 0.5]] and tensors["q"].dtype == torch.float32
    assert tensors["k"].tolist() == [3, -4]
    header = read_header(file)
    assert header.metadata == {"made by": "hand"}
    assert [(e.name, e.dtype, e.shape) for e in header.entries] == [("q", "F32", (1, 2)), ("k", "I64", (2,))]


def test_safetensors_reads_what_the_package_saves(tmp_path):
    named = {
        "scalar": torch.tensor(2.5, dtype=torch.float64),
        "empty": torch.zeros(0, 4),
        "half": torch.ones(3, 2, dtype=torch.bfloat16),
        "keep": torch.tensor([True, False]),
        "eighth": torch.ones(5).to(torch.float8_e4m3fn),
    }
    save_file(named, tmp_path / "b.safetensors")
    back = read_safetensors(tmp_path / "b.safetensors")
    assert back.keys() == named.keys()
    for name, tensor in named.items():
        assert back[name].dtype == tensor.dtype and torch.equal(back[name].float(), tensor.float())


LIES = {
    "offsets backwards": (
        changed(data_offsets=[8, 0]),
        DATA,
        "tensor 'q' (1, 2) F32; its offsets span -8",
    ),
    "offset missing": (changed(data_offsets=[0]), DATA, "two offsets in bytes"),
    "offset negative": (changed(data_offsets=[-8, 0]), DATA, "two offsets in bytes"),
    "offset a float": (changed(data_offsets=[0.0, 8.0]), DATA, "two offsets in bytes"),
    "offset a bool": (changed(data_offsets=[False, 8]), DATA, "two offsets in bytes"),
    "size is not the product": (
        changed(shape=[1, 3]),
        DATA,
        "12 bytes for tensor 'q' (1, 3) F32; its offsets span 8",
    ),
    "product overflows": (changed(shape=[2**62, 8]), DATA, "its offsets span 8"),
    "wraps to the right size": (changed(shape=[2**62 + 2, 4, 1]), DATA, "its offsets span 8"),
    "axis beyond 63 bits": (changed(shape=[2**64, 0]), DATA, "a shape of at most 8 counts"),
    "axis negative": (changed(shape=[-1, -2]), DATA, "a shape of at most 8 counts"),
    "nine axes": (changed(shape=[1] * 8 + [2]), DATA, "a shape of at most 8 counts"),
    "shape is text": (changed(shape="12"), DATA, "a shape of at most 8 counts"),
    "unknown type": (changed(dtype="F31"), DATA, "one of the types BOOL, U8"),
    "type is a list": (changed(dtype=["F32"]), DATA, "one of the types BOOL, U8"),
    "field too many": (changed(code="x"), DATA, "must give dtype, shape and data_offsets of tensor 'q'"),
    "tensor is a number": ({"q": 1}, DATA, "must give dtype, shape and data_offsets of tensor 'q'; got 1"),
    "gap": (
        {"k": {**GOOD["k"], "data_offsets": [8, 24]}},
        DATA,
        "'k' begins at byte 8, the one before ends at 0",
    ),
    "overlap": (
        {**GOOD, "z": {"dtype": "U8", "shape": [4], "data_offsets": [4, 8]}},
        DATA,
        "tensor 'z' begins at byte 4, the one before ends at 8",
    ),
    "bytes left over": (
        GOOD,
        DATA + b"x",
        "tensors take 24 bytes, the file has 25",
    ),
    "bytes missing": (GOOD, DATA[:-1], "tensors take 24 bytes, the file has 23"),
    "name with a path": (
        {"../q": GOOD["q"], "k": GOOD["k"]},
        DATA,
        "or control characters; got '../q'",
    ),
    "name with an escape": ({"q\x1b[2J": GOOD["q"]}, DATA, r"got 'q\x1b[2J'"),
    "name empty": ({"": GOOD["q"]}, DATA, "without path separators"),
    "not an object": (b"[1, 2]", DATA, "must hold a JSON object of named tensors; got a list"),
    "not JSON": (b"{'q': 1}", DATA, "must hold a JSON object in UTF-8"),
    "not UTF-8": (b'{"\xff": 1}', DATA, "must hold a JSON object in UTF-8"),
    "NaN is not JSON": (b'{"q": NaN}', DATA, "must hold a JSON object in UTF-8; got NaN is not JSON"),
    "nested without end": (b'{"q":' + b"[" * 200_000, DATA, "must hold a JSON object in UTF-8"),
    "number without end": (b'{"q": ' + b"9" * 10_000 + b"}", DATA, "must hold a JSON object in UTF-8"),
    "the same name twice": (b'{"q": 1, "k": 2, "q": 3}', DATA, "must name each tensor once; 'q' stands there twice"),
    "metadata not text": ({**GOOD, "__metadata__": {"n": 1}}, DATA, "must keep text alone under __metadata__"),
    "metadata a list": ({**GOOD, "__metadata__": ["n"]}, DATA, "must keep text alone under __metadata__"),
    "metadata too long": ({**GOOD, "__metadata__": {"n": "x" * (2**20)}}, DATA, "must keep at most 1,048,576 bytes"),
}


@pytest.mark.parametrize("lie", LIES)
def test_safetensors_refuses(lie, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "safetensors", None)  # importing it would raise: the header is checked before
    header, data, text = LIES[lie]
    with pytest.raises(CheckpointError) as caught:
        read_safetensors(write(tmp_path / "lie.safetensors", header, data))
    assert text in str(caught.value)
    assert str(caught.value).count("; ") >= 2 and str(caught.value).isprintable()


@pytest.mark.parametrize("size", [0, 5, 7])
def test_safetensors_refuses_a_file_below_8_bytes(size, tmp_path):
    (tmp_path / "short.safetensors").write_bytes(b"\0" * size)
    with pytest.raises(CheckpointError, match=f"it has {size} bytes"):
        read_header(tmp_path / "short.safetensors")


@pytest.mark.parametrize("length", [16 * 2**20 + 1, 2**63, 2**64 - 1, 10_000])
def test_safetensors_refuses_a_header_longer_than_the_file_or_the_limit(length, tmp_path):
    with pytest.raises(CheckpointError, match="must begin with a header of at most 16,777,216 bytes"):
        read_header(write(tmp_path / "long.safetensors", GOOD, length=length))


def test_safetensors_refuses_a_header_beyond_the_limit_though_it_is_all_there(tmp_path, monkeypatch):
    monkeypatch.setattr(tensorfile, "MAX_HEADER", 100)
    with pytest.raises(CheckpointError, match="must begin with a header of at most 100 bytes"):
        read_header(write(tmp_path / "a.safetensors", GOOD))


def test_safetensors_refuses_too_many_tensors(tmp_path, monkeypatch):
    monkeypatch.setattr(tensorfile, "MAX_TENSORS", 1)
    with pytest.raises(CheckpointError, match="at most 1 tensors; got 2"):
        read_header(write(tmp_path / "many.safetensors", GOOD))


def test_every_truncation_is_refused(tmp_path):
    whole = write(tmp_path / "whole.safetensors", GOOD).read_bytes()
    cut = tmp_path / "cut.safetensors"
    for size in range(len(whole)):
        cut.write_bytes(whole[:size])
        with pytest.raises(CheckpointError):
            read_safetensors(cut)


def test_missing_package_names_the_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "safetensors", None)
    with pytest.raises(CheckpointError, match=r'pip install "qkv\[models\]"'):
        read_safetensors(write(tmp_path / "a.safetensors", GOOD))


@pytest.mark.parametrize("name", ["model.pt", "weights.bin", "noext"])
def test_other_kinds_of_file_are_refused(name, tmp_path):
    with pytest.raises(CheckpointError, match=r"must end in .safetensors or .json; got .*never reads pickle"):
        read_tensors(tmp_path / name)


def test_missing_file_and_directory_are_refused(tmp_path):
    with pytest.raises(CheckpointError, match="must be a file that can be read; got No such"):
        read_tensors(tmp_path / "none.json")
    (tmp_path / "folder.safetensors").mkdir()
    with pytest.raises(CheckpointError, match="it is a directory"):
        read_tensors(tmp_path / "folder.safetensors")


def test_json_reads_nested_lists(tmp_path):
    (tmp_path / "a.json").write_text('{"q": [[1, 0]], "v": [[[1.5], [2e3]], [[-0.0], [4]]], "none": [], "one": 7}')
    tensors = read_tensors(tmp_path / "a.json")
    assert tensors["q"].tolist() == [[1.0, 0.0]] and tensors["q"].dtype == torch.float64
    assert tensors["v"].shape == (2, 2, 1) and tensors["v"][0, 1, 0] == 2000
    assert tensors["none"].shape == (0,) and tensors["one"].shape == ()


JSON_LIES = {
    '{"q": [[1, 0], [1]]}': "must give axis 1 of 'q' one length; q[0] has 2, q[1] has 1",
    '{"q": [[1, 0], 1]}': "must give axis 1 of 'q' one length; q[0] has 2, q[1] has a number",
    '{"q": [[[1], [2]], [[1], [2, 3]]]}': "must give axis 2 of 'q' one length; q[1][0] has 1, q[1][1] has 2",
    '{"q": [[[1, 2]], [[1]]]}': "must give axis 2 of 'q' one length; q[0] has 2, q[1] has 1",
    '{"q": [1, true]}': "must hold finite numbers in nested lists under 'q'; 'q[1]' is True",
    '{"q": ["1"]}': "'q[0]' is '1'",
    '{"q": [null]}': "'q[0]' is None",
    '{"q": {"a": 1}}': "'q' is {'a': 1}",
    '{"q": [NaN]}': "got NaN is not JSON",
    '{"q": [1e999]}': "'q[0]' is inf",
    '{"q": [[[[[[[[[1]]]]]]]]]}': "must nest its lists at most 8 deep",
    '{"q": 1, "q": 2}': "'q' stands there twice",
    "[1]": "must hold a JSON object of named tensors; got a list",
    "": "must hold a JSON object in UTF-8",
    '{"q": ' + "[" * 100_000: "must hold a JSON object in UTF-8",
    '{"q": [1' + "0" * 400 + "]}": "must hold finite numbers",
}


@pytest.mark.parametrize("text", JSON_LIES, ids=lambda text: text[:40])
def test_json_refuses(text, tmp_path):
    (tmp_path / "lie.json").write_text(text)
    with pytest.raises(CheckpointError) as caught:
        read_json(tmp_path / "lie.json")
    assert JSON_LIES[text] in str(caught.value)


def test_json_refuses_a_file_beyond_its_limit(tmp_path, monkeypatch):
    monkeypatch.setattr(tensorfile, "MAX_JSON", 10)
    (tmp_path / "big.json").write_text('{"q": [1, 2]}')
    with pytest.raises(CheckpointError, match="must have at most 10 bytes; got 13; use safetensors"):
        read_json(tmp_path / "big.json")
