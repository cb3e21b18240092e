"""Writes a model's files so that a folder holds a whole save or none: all in full under other names, then renamed."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor

from qkv.errors import DTypeError, SizeLimit, ValueOutOfRange, message
from qkv.models.files.checksums import (
    BLANK,
    CHECKSUMS,
    HEADER,
    Promised,
    bytes_digest,
    header_digest,
    raw_bytes,
    save_digest,
    tensor_digest,
)
from qkv.models.files.generation_file import GENERATION
from qkv.models.files.shards import INDEX, SINGLE
from qkv.models.files.tokenizer_file import BESIDE, TOKENIZER, json_bytes
from qkv.tensorfile import MAX_METADATA

ALIGNMENT = 64  # bytes, of tensors whose sizes are a multiple of it: what vector loads like best
TEMPORARY = ".saving"

STEP = 2**26  # bytes written at once
TYPES: Mapping[torch.dtype, str] = {
    torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.float64: "F64", torch.bool: "BOOL",
    torch.uint8: "U8", torch.int8: "I8", torch.int16: "I16", torch.int32: "I32", torch.int64: "I64",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
}  # fmt: skip

Tensors: TypeAlias = dict[str, Tensor]


def save_model(
    folder: Path,
    fields: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    others: Mapping[str, bytes],
    max_shard_bytes: int | None = None,
) -> None:
    """Write config.json, the weights and the other files of a model. One program at a time may save into a folder.

    Until the last rename, which is that of config.json, the folder holds the old model or none that can be loaded.
    """
    stored = {name: _plain(name, tensor) for name, tensor in tensors.items()}
    shards = split(stored, max_shard_bytes)
    small = {"config.json": json_bytes(_with_dtype(fields, stored)), **others}
    if len(shards) > 1:
        small[INDEX] = json_bytes(_index(shards))
    folder.mkdir(parents=True, exist_ok=True)
    _clean(folder.glob(f".*{TEMPORARY}"))  # what a save left that was killed
    names = [*small, *shards]
    try:
        for name, text in small.items():
            _write(_hidden(folder, name), [text])
        for name, blocks in _weight_files(shards, small):
            _write(_hidden(folder, name), blocks)
        _commit(folder, names)
    finally:
        _clean([_hidden(folder, name) for name in names])


def split(tensors: Tensors, max_shard_bytes: int | None) -> dict[str, Tensors]:
    """The tensors by the file that they go to; a tensor above the limit gets a file of its own."""
    if max_shard_bytes is not None and max_shard_bytes < 1:
        holds = "`max_shard_bytes` must be at least 1"
        raise ValueOutOfRange(message(holds, f"got {max_shard_bytes}", "None writes one file"))
    parts: list[Tensors] = [{}]
    tensors = dict(sorted(tensors.items(), key=lambda one: one[1].nbytes % ALIGNMENT > 0))  # odd sizes come last
    room = max_shard_bytes or sum(tensor.nbytes for tensor in tensors.values())
    left = room
    for name, tensor in tensors.items():
        if parts[-1] and tensor.nbytes > left:
            parts.append({})
            left = room
        parts[-1][name] = tensor
        left -= tensor.nbytes
    count = len(parts)
    if count == 1:
        return {SINGLE: parts[0]}
    return {f"model-{n:05}-of-{count:05}.safetensors": part for n, part in enumerate(parts, 1)}


def _plain(name: str, tensor: Tensor) -> Tensor:
    if tensor.dtype not in TYPES:
        holds = f"`{name}` must have a type that safetensors knows"
        raise DTypeError(message(holds, f"got {tensor.dtype}", "cast the model, for example by .float()"))
    return tensor.detach().cpu().contiguous()


def _with_dtype(fields: Mapping[str, Any], stored: Tensors) -> dict[str, Any]:
    """The fields with the type of the weights, which transformers loads by."""
    types = {str(tensor.dtype).removeprefix("torch.") for tensor in stored.values() if tensor.is_floating_point()}
    return dict(fields) | ({"dtype": types.pop()} if len(types) == 1 else {})


def _index(shards: Mapping[str, Tensors]) -> dict[str, Any]:
    total = sum(tensor.nbytes for part in shards.values() for tensor in part.values())
    places = {name: file for file, part in shards.items() for name in part}
    return {"metadata": {"total_size": total}, "weight_map": places}


def _weight_files(shards: Mapping[str, Tensors], small: Mapping[str, bytes]) -> Iterator[tuple[str, Iterator[Any]]]:
    """Each weights file as its name and its bytes in pieces, every digest in its header."""
    digests = {file: {name: tensor_digest(name, one) for name, one in part.items()} for file, part in shards.items()}
    files = {name: bytes_digest(text) for name, text in small.items()}
    save = save_digest({name: digest for part in digests.values() for name, digest in part.items()}, files)
    for file, part in shards.items():
        yield file, _file_bytes(part, Promised(digests[file], files, save))


def _file_bytes(tensors: Tensors, said: Promised) -> Iterator[Any]:
    """A safetensors file: the length of the header, the header, the tensors end to end."""
    text = said.text()
    if len(text.encode()) > MAX_METADATA - 1024:
        seen = f"its checksums take {len(text.encode()):,} bytes"
        holds = (
            f"a file of weights must keep at most {MAX_METADATA:,} bytes of text beside its {len(tensors):,} tensors"
        )
        raise SizeLimit(message(holds, seen, "pass max_shard_bytes= to write several files"))
    header = _header({"format": "pt", CHECKSUMS: text, HEADER: BLANK}, tensors)
    header = header.replace(BLANK.encode(), header_digest(header, BLANK).encode(), 1)
    yield len(header).to_bytes(8, "little") + header
    for tensor in tensors.values():
        data = raw_bytes(tensor)
        for begin in range(0, len(data), STEP):
            yield data[begin : begin + STEP]


def _header(metadata: Mapping[str, str], tensors: Tensors) -> bytes:
    table: dict[str, Any] = {"__metadata__": metadata}
    place = 0
    for name, tensor in tensors.items():
        offsets = [place, place + tensor.nbytes]
        table[name] = {"dtype": TYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": offsets}
        place = offsets[1]
    text = json.dumps(table, separators=(",", ":"), ensure_ascii=False).encode()
    return text + b" " * (-(len(text) + 8) % ALIGNMENT)


def _write(file: Path, blocks: Iterable[Any]) -> None:
    with file.open("wb") as stream:
        for block in blocks:
            stream.write(block)
        stream.flush()
        os.fsync(stream.fileno())


def _hidden(folder: Path, name: str) -> Path:
    """Where a file is written: a name that no reader looks at."""
    return folder / f".{name}{TEMPORARY}"


def _clean(hidden: Iterable[Path]) -> None:
    for file in hidden:
        file.unlink(missing_ok=True)


def _commit(folder: Path, names: Iterable[str]) -> None:
    """Give the files their names. config.json goes away first and comes back last: without it nothing is loaded."""
    others = [name for name in names if name != "config.json"]
    (folder / "config.json").unlink(missing_ok=True)
    _sync(folder)
    for stale in _left_of_before(folder, others):
        stale.unlink()
    for name in others:
        _hidden(folder, name).replace(folder / name)
    _sync(folder)
    _hidden(folder, "config.json").replace(folder / "config.json")
    _sync(folder)


def _left_of_before(folder: Path, kept: Iterable[str]) -> list[Path]:
    """Files of an earlier save that the new one does not write over: its weights, tokenizer, end tokens."""
    small = [folder / name for name in (INDEX, TOKENIZER, BESIDE, GENERATION)]
    found = [folder / SINGLE, *small, *folder.glob("model-?????-of-?????.safetensors")]
    return [file for file in found if file.name not in kept and file.exists()]


def _sync(folder: Path) -> None:
    """Make renames last through a power cut, where the system can."""
    if os.name == "posix":
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
