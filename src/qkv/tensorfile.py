"""Reads named tensors from files that nobody vouches for: safetensors and JSON. Knows nothing of attention.

A safetensors header is checked here, in full, before the `safetensors` package maps the file; no pickle is ever read.
"""

from __future__ import annotations

import json
import math
import os
import stat
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, TypeAlias

import torch
from torch import Tensor

from qkv.errors import CheckpointError, message

Shape: TypeAlias = tuple[int, ...]

MAX_HEADER = 16 * 2**20
MAX_METADATA = 2**20
MAX_TENSORS = 100_000
MAX_AXES = 8
MAX_JSON = 64 * 2**20
MAX_ELEMENTS = 2**63 - 1

ITEMSIZE: Mapping[str, int] = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "U16": 2, "I16": 2, "F16": 2, "BF16": 2,
    "U32": 4, "I32": 4, "F32": 4, "U64": 8, "I64": 8, "F64": 8, "C64": 8,
}  # fmt: skip

COPY_AGAIN = "fetch or write the file again"


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """What a safetensors header says of one tensor; begin and end count bytes from the end of the header."""

    name: str
    dtype: str
    shape: Shape
    begin: int
    end: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Header:
    """A checked safetensors header: the tensors in the order of their bytes, and the free text beside them."""

    entries: tuple[Entry, ...]
    metadata: Mapping[str, str]


def read_tensors(path: str | os.PathLike[str]) -> dict[str, Tensor]:
    """All tensors of a `.safetensors` or `.json` file, by name, on the CPU.

    Raises CheckpointError when the file is not what its name says, before anything of it is loaded.
    """
    file = Path(path)
    if file.suffix == ".safetensors":
        return read_safetensors(file)
    if file.suffix == ".json":
        return read_json(file)
    raise CheckpointError(
        message(
            "a file of tensors must end in .safetensors or .json",
            f"got {quote(file.name)}",
            "convert it where you trust it: qkv never reads pickle (.pt, .pth, .bin, .pkl)",
        )
    )


def read_safetensors(path: str | os.PathLike[str]) -> dict[str, Tensor]:
    """All tensors of a safetensors file, by name, once `read_header` found nothing wrong.

    Needs the package `safetensors`, which `pip install "qkv[models]"` brings.
    """
    file = Path(path)
    read_header(file)
    try:
        from safetensors import SafetensorError
        from safetensors.torch import load_file
    except ImportError as error:
        holds = "reading .safetensors needs the package safetensors"
        raise CheckpointError(message(holds, f"got {error}", 'pip install "qkv[models]"')) from error
    try:
        return load_file(file)
    except (SafetensorError, OSError) as error:
        holds = f"{quote(file.name)} must load as safetensors"
        raise CheckpointError(message(holds, f"got {error}", COPY_AGAIN)) from error


def read_header(path: str | os.PathLike[str]) -> Header:
    """The header of a safetensors file, checked against the format and against the file's size; loads no tensor.

    Raises CheckpointError naming the first thing that does not hold.
    """
    file = Path(path)
    size = regular_size(file)
    with file.open("rb") as stream:
        start = stream.read(8)
        length = int.from_bytes(start, "little")
        if len(start) < 8 or length > MAX_HEADER or 8 + length > size:
            said = f"its first 8 bytes say {length:,}" if len(start) == 8 else f"it has {size} bytes"
            limit = f"must begin with a header of at most {MAX_HEADER:,} bytes that lies inside the file"
            refuse(file, limit, f"{said}, the file has {size:,} bytes" if len(start) == 8 else said)
        text = stream.read(length)
    table = _tensor_table(file, text)
    metadata = _metadata(file, table.pop("__metadata__", {}))
    if len(table) > MAX_TENSORS:
        refuse(file, f"must hold at most {MAX_TENSORS:,} tensors", f"got {len(table):,}")
    entries = sorted((_entry(file, name, table[name]) for name in table), key=lambda e: (e.begin, e.end))
    _check_offsets(file, entries, size - 8 - length)
    return Header(entries=tuple(entries), metadata=metadata)


def read_json(path: str | os.PathLike[str]) -> dict[str, Tensor]:
    """Tensors in float64 from a JSON object of named nested lists of numbers, such as {"q": [[1, 0]], "k": ...}.

    Raises CheckpointError for anything else in it: ragged lists (naming the axis), booleans, text, null, NaN.
    """
    file = Path(path)
    size = regular_size(file)
    if size > MAX_JSON:
        refuse(file, f"must have at most {MAX_JSON:,} bytes", f"got {size:,}", "use safetensors for large tensors")
    table = _tensor_table(file, file.read_bytes())
    shapes = {name: _list_shape(file, name, table[name]) for name in table}
    return {name: torch.tensor(table[name], dtype=torch.float64).reshape(shapes[name]) for name in table}


def regular_size(file: Path) -> int:
    """Size in bytes of a regular file; anything else is refused."""
    size, seen = 0, ""
    try:
        status = file.stat()
        if stat.S_ISREG(status.st_mode):
            size = status.st_size
            file.open("rb").close()  # says now whether it may be read
        else:
            seen = "it is a directory" if stat.S_ISDIR(status.st_mode) else "it is not a regular file"
    except (OSError, ValueError) as error:
        seen = f"got {error.strerror if isinstance(error, OSError) and error.strerror else error}"
    if seen:
        refuse(file, "must be a file that can be read", seen, "check the path")
    return size


def refuse(file: Path, holds: str, seen: str, remedy: str = COPY_AGAIN) -> NoReturn:
    """Raise CheckpointError about a file: what it must do or hold, what was seen, what to do."""
    raise CheckpointError(message(f"{quote(file.name)} {holds}", seen, remedy))


def quote(name: object, limit: int = 60) -> str:
    """A name or a value from a file or path, safe to print and short."""
    text = ascii(name) if not str(name).isprintable() else repr(name)
    return text if len(text) <= limit else f"{text[: limit - 4]}...{text[-1]}"


class _DuplicateKey(ValueError):
    pass


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table: dict[str, Any] = {}
    for name, value in pairs:
        if name in table:
            raise _DuplicateKey(f"{quote(name)} stands there twice")
        table[name] = value
    return table


def _no_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is not JSON")


def read_object(path: str | os.PathLike[str], limit: int = MAX_JSON, what: str = "field") -> dict[str, Any]:
    """The object in a JSON file of at most `limit` bytes, its keys unique. Raises CheckpointError for anything else."""
    file = Path(path)
    size = regular_size(file)
    if size > limit:
        refuse(file, f"must have at most {limit:,} bytes", f"got {size:,}", "use safetensors for large tensors")
    return _object(file, file.read_bytes(), what)


def _object(file: Path, text: bytes, what: str) -> dict[str, Any]:
    """A JSON object with unique keys, from bytes in UTF-8; `what` says what the keys name."""
    try:
        table = json.loads(text.decode("utf-8"), object_pairs_hook=_unique, parse_constant=_no_constant)
    except _DuplicateKey as error:
        refuse(file, f"must name each {what} once", f"{error}", "remove one of the two")
    except (ValueError, RecursionError) as error:  # UnicodeDecodeError and JSONDecodeError are ValueErrors
        refuse(file, "must hold a JSON object in UTF-8", f"got {str(error)[:100]}")
    if not isinstance(table, dict):
        refuse(file, f"must hold a JSON object of named {what}s", f"got a {type(table).__name__}")
    return table


def _tensor_table(file: Path, text: bytes) -> dict[str, Any]:
    """A JSON object of tensors; their names are safe to print and to use as file names."""
    table = _object(file, text, "tensor")
    for name in table:
        if not name or not name.isprintable() or "/" in name or "\\" in name:
            rule = "must name its tensors without path separators or control characters"
            refuse(file, rule, f"got {quote(name)}", "rename the tensor")
    return table


def _metadata(file: Path, metadata: object) -> dict[str, str]:
    """The free text of a header: names to strings, at most 1 MiB in all."""
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        refuse(file, "must keep text alone under __metadata__", f"got {quote(metadata)}")
    length = sum(len(text.encode("utf-8", "replace")) for item in metadata.items() for text in item)
    if length > MAX_METADATA:
        refuse(file, f"must keep at most {MAX_METADATA:,} bytes under __metadata__", f"got {length:,}")
    return metadata


def _is_count(number: object) -> bool:
    return type(number) is int and 0 <= number <= MAX_ELEMENTS


def _entry(file: Path, name: str, said: object) -> Entry:
    """One tensor's line in the header, its fields and its size checked."""
    tensor = f"tensor {quote(name)}"
    if not isinstance(said, dict) or set(said) != {"dtype", "shape", "data_offsets"}:
        fields = sorted(said) if isinstance(said, dict) else said
        refuse(file, f"must give dtype, shape and data_offsets of {tensor}", f"got {quote(fields)}")
    dtype, shape, offsets = said["dtype"], said["shape"], said["data_offsets"]
    if not isinstance(dtype, str) or dtype not in ITEMSIZE:
        refuse(file, f"must give {tensor} one of the types {', '.join(ITEMSIZE)}", f"got {quote(dtype)}")
    if not isinstance(shape, list) or len(shape) > MAX_AXES or not all(map(_is_count, shape)):
        refuse(file, f"must give {tensor} a shape of at most {MAX_AXES} counts", f"got {quote(shape)}")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(map(_is_count, offsets)):
        refuse(file, f"must give {tensor} two offsets in bytes", f"got {quote(offsets)}")
    needs, has = math.prod(shape) * ITEMSIZE[dtype], offsets[1] - offsets[0]
    if needs > MAX_ELEMENTS or needs != has:
        refuse(file, f"must hold {needs:,} bytes for {tensor} {tuple(shape)} {dtype}", f"its offsets span {has:,}")
    return Entry(name=name, dtype=dtype, shape=tuple(shape), begin=offsets[0], end=offsets[1])


def _check_offsets(file: Path, entries: list[Entry], data: int) -> None:
    """The tensors' bytes must follow one another without gap or overlap and fill the file to its end."""
    place = 0
    for entry in entries:
        if entry.begin != place:
            seen = f"tensor {quote(entry.name)} begins at byte {entry.begin:,}, the one before ends at {place:,}"
            refuse(file, "must lay its tensors end to end", seen)
        place = entry.end
    if place != data:
        refuse(file, "must end where its last tensor ends", f"tensors take {place:,} bytes, the file has {data:,}")


def _list_shape(file: Path, name: str, node: object, place: tuple[int, ...] = ()) -> Shape:
    """The shape of nested lists of numbers; the first place that breaks the rules is named."""
    where = name + "".join(f"[{index}]" for index in place)
    if not isinstance(node, list):
        if isinstance(node, bool) or not isinstance(node, (int, float)) or not abs(node) <= sys.float_info.max:
            holds = f"must hold finite numbers in nested lists under {quote(name)}"
            refuse(file, holds, f"{quote(where)} is {quote(node)}")
        return ()
    if len(place) == MAX_AXES:
        refuse(file, f"must nest its lists at most {MAX_AXES} deep", f"{quote(where)} goes deeper")
    shapes = [_list_shape(file, name, child, (*place, index)) for index, child in enumerate(node)]
    for index, shape in enumerate(shapes):
        if shape != shapes[0]:
            _refuse_ragged(file, where, len(place) + 1, (shapes[0], shape), index)
    return (len(node), *(shapes[0] if shapes else ()))


def _refuse_ragged(file: Path, where: str, depth: int, shapes: tuple[Shape, Shape], index: int) -> NoReturn:
    """Name the axis along which two neighbours differ, and where they stand."""
    first, other = shapes
    differs = (axis for axis, (m, n) in enumerate(zip(first, other, strict=False)) if m != n)
    axis = next(differs, min(len(first), len(other)))
    lengths = [str(shape[axis]) if axis < len(shape) else "a number" for shape in shapes]
    seen = f"{where}[0] has {lengths[0]}, {where}[{index}] has {lengths[1]}"
    name = where.partition("[")[0]
    refuse(file, f"must give axis {depth + axis} of {name!r} one length", seen, "make the lists equally long")
