"""Reads GGUF files that nobody vouches for: the header is checked in full, tensors are dequantized when asked for.

Tensors stay in the mapped file until then; quantized ones need the package `gguf`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from qkv.errors import CheckpointError, message
from qkv.gguf_header import Bytes, GgufEntry, HeaderReader, alignment_of
from qkv.tensorfile import quote, refuse, regular_size

PLAIN: Mapping[str, torch.dtype] = {
    "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "F64": torch.float64,
    "I8": torch.int8, "I16": torch.int16, "I32": torch.int32, "I64": torch.int64,
}  # fmt: skip


class GgufTensors(Mapping[str, Tensor]):
    """The tensors of a file by name, each made when it is asked for: float32 from quantized types, else as stored.

    dtype: cast floating-point tensors to it, one at a time.
    """

    def __init__(
        self, path: Path, data: Bytes, entries: Mapping[str, GgufEntry], dtype: torch.dtype | None = None
    ) -> None:
        self._path = path
        self._data = data
        self._entries = entries
        self._dtype = dtype

    def cast(self, dtype: torch.dtype) -> GgufTensors:
        """The same tensors, those of floating-point numbers and quantized ones in this type."""
        return GgufTensors(self._path, self._data, self._entries, dtype)

    def __getitem__(self, name: str) -> Tensor:
        entry = self._entries[name]
        stored = self._data[entry.begin : entry.begin + entry.size]
        if entry.kind in PLAIN:
            tensor = torch.from_numpy(np.array(stored)).view(PLAIN[entry.kind])  # a copy: the map is read-only
        elif entry.size:
            tensor = torch.from_numpy(_dequantized(self._path, entry, stored))
        else:
            tensor = torch.zeros(0)
        tensor = tensor.reshape(entry.shape)
        return tensor.to(self._dtype) if self._dtype is not None and tensor.is_floating_point() else tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)


@dataclass(frozen=True, kw_only=True, slots=True)
class GgufFile:
    """A checked file. `metadata`: numbers, texts, tuples of texts, numpy arrays of numbers. `tensors`: made lazily."""

    path: Path
    version: int
    metadata: Mapping[str, Any]
    entries: Mapping[str, GgufEntry]
    tensors: GgufTensors


def read_gguf(path: str | os.PathLike[str]) -> GgufFile:
    """The header of a GGUF file, checked against the format and the file's size; no tensor is made yet.

    Raises CheckpointError naming the first thing that does not hold. Quantized tensors need the package `gguf`.
    """
    file = Path(path)
    data: Bytes = np.zeros(0, np.uint8)
    if regular_size(file):
        data = np.memmap(file, mode="r").view(np.ndarray)  # parts of a plain array are made faster
    reader = HeaderReader(file, data)
    version, tensor_count = reader.preamble()
    metadata = reader.fields()
    entries = reader.entries(tensor_count, alignment_of(file, metadata))
    tensors = GgufTensors(file, data, entries)
    return GgufFile(path=file, version=version, metadata=metadata, entries=entries, tensors=tensors)


def _dequantized(file: Path, entry: GgufEntry, stored: Any) -> Any:
    """Float32 numbers of a quantized tensor, by the package `gguf`."""
    try:
        from gguf import GGMLQuantizationType
        from gguf.quants import dequantize
    except ImportError as error:
        holds = f"reading {entry.kind} from a GGUF file needs the package gguf"
        raise CheckpointError(message(holds, f"got {error}", "pip install gguf")) from error
    rows = stored.reshape(*entry.shape[:-1], -1)
    try:
        with np.errstate(all="ignore"):  # scales of a broken file may be infinite
            return dequantize(rows, GGMLQuantizationType[entry.kind])
    except (NotImplementedError, KeyError):
        holds = f"must hold tensor {quote(entry.name)} in a type that the package gguf can read"
        refuse(file, holds, f"got {entry.kind}", "quantize it to another type")
