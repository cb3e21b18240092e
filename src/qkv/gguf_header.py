"""The header of a GGUF file that nobody vouches for, checked in full before anything of it is used.

The format (v2 and v3, little endian; github.com/ggml-org/ggml/blob/master/docs/gguf.md): magic, version, two counts,
named values, one line a tensor, then the tensors' bytes, each aligned. Knows nothing of attention or of models.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from struct import Struct
from struct import error as StructError
from typing import Any, NoReturn, TypeAlias

import numpy as np

from qkv.tensorfile import MAX_AXES, MAX_TENSORS, quote, refuse

MAX_FIELDS = 65_536
MAX_NAME = 65_535  # bytes of a name; the format's own limit for keys
MAX_STRINGS = 2**22  # texts in all lists together: vocabularies have some 10^5
MAX_DEPTH = 4  # of lists in lists
MAX_ALIGNMENT = 2**20

# Tensor types by number: name, elements in a block, bytes of a block.
KINDS: Mapping[int, tuple[str, int, int]] = {
    0: ("F32", 1, 4), 1: ("F16", 1, 2), 2: ("Q4_0", 32, 18), 3: ("Q4_1", 32, 20), 6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24), 8: ("Q8_0", 32, 34), 9: ("Q8_1", 32, 40), 10: ("Q2_K", 256, 84), 11: ("Q3_K", 256, 110),
    12: ("Q4_K", 256, 144), 13: ("Q5_K", 256, 176), 14: ("Q6_K", 256, 210), 15: ("Q8_K", 256, 292),
    16: ("IQ2_XXS", 256, 66), 17: ("IQ2_XS", 256, 74), 18: ("IQ3_XXS", 256, 98), 19: ("IQ1_S", 256, 50),
    20: ("IQ4_NL", 32, 18), 21: ("IQ3_S", 256, 110), 22: ("IQ2_S", 256, 82), 23: ("IQ4_XS", 256, 136),
    24: ("I8", 1, 1), 25: ("I16", 1, 2), 26: ("I32", 1, 4), 27: ("I64", 1, 8), 28: ("F64", 1, 8),
    29: ("IQ1_M", 256, 56), 30: ("BF16", 1, 2), 34: ("TQ1_0", 256, 54), 35: ("TQ2_0", 256, 66),
    39: ("MXFP4", 32, 17), 40: ("NVFP4", 64, 36), 41: ("Q1_0", 128, 18),
}  # fmt: skip
# Value types by number: how one is stored. 8 is a text, 9 a list.
SCALARS: Mapping[int, str] = {
    0: "<u1", 1: "<i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 7: "?", 10: "<u8", 11: "<i8", 12: "<f8",
}  # fmt: skip
TEXT, LIST = 8, 9

Bytes: TypeAlias = np.ndarray[Any, np.dtype[np.uint8]]

U32, U64 = Struct("<I"), Struct("<Q")


@dataclass(frozen=True, kw_only=True, slots=True)
class GgufEntry:
    """What the header says of one tensor; shape in torch's order, begin and size in bytes of the file."""

    name: str
    kind: str
    shape: tuple[int, ...]
    begin: int
    size: int


class HeaderReader:
    """Walks a header from front to back; every length is held against what is left of the file before it is used."""

    def __init__(self, file: Path, data: Any) -> None:
        self.file = file
        self.data = memoryview(data)
        self.size = len(data)
        self.place = 0
        self.texts = 0  # so far, in lists
        self.where = "the header"

    def preamble(self) -> tuple[int, int]:
        """Magic, version and the two counts: the version and how many tensors there are."""
        magic = bytes(self.take(4))
        if magic != b"GGUF":
            refuse(self.file, "must begin with the letters GGUF", f"got {quote(magic)}", "choose a GGUF file")
        version = self.u32()
        if version not in {2, 3}:
            swapped = version > 0 and version & 0xFFFF == 0
            seen = "it is written for big-endian machines" if swapped else f"got {version}"
            refuse(self.file, "must be GGUF of version 2 or 3", seen, "convert it again with a newer tool")
        tensors, self.field_count = self.u64(), self.u64()
        if tensors > MAX_TENSORS:
            refuse(self.file, f"must hold at most {MAX_TENSORS:,} tensors", f"got {tensors:,}")
        if self.field_count > MAX_FIELDS:
            refuse(self.file, f"must hold at most {MAX_FIELDS:,} named values", f"got {self.field_count:,}")
        return version, tensors

    def fields(self) -> dict[str, Any]:
        """The named values."""
        table: dict[str, Any] = {}
        for n in range(self.field_count):
            self.where = f"the name of value {n}"
            name = self.name()
            if name in table:
                refuse(self.file, "must name each value once", f"{quote(name)} stands there twice")
            self.where = quote(name)
            table[name] = self.value(self.u32(), 0)
        return table

    def value(self, kind: int, depth: int) -> Any:
        """One value of a type: a number, a text, or a list of one type."""
        if kind in SCALARS:
            return self.numbers(kind, 1)[0].item()
        if kind == TEXT:
            return self.text()
        if kind != LIST:
            self.lie("a known type", f"got type {kind}")
        if depth == MAX_DEPTH:
            self.lie(f"lists at most {MAX_DEPTH} deep", "it goes deeper")
        inner, count = self.u32(), self.u64()
        if inner in SCALARS:
            return self.numbers(inner, count)
        if inner not in {TEXT, LIST}:
            self.lie("lists of a known type", f"got type {inner}")
        least = 8 if inner == TEXT else 12  # bytes of the shortest text, of an empty list
        if count * least > self.size - self.place:
            self.lie("a list that ends inside the file", f"it is said to have {count:,} items")
        self.texts += count
        if self.texts > MAX_STRINGS:
            self.lie(f"lists of at most {MAX_STRINGS:,} texts in all", f"got {self.texts:,} up to here")
        if inner == TEXT:
            return self.text_list(count)
        return tuple(self.value(inner, depth + 1) for _ in range(count))

    def numbers(self, kind: int, count: int) -> Any:
        """A read-only array of numbers, a copy; booleans are 0 or 1."""
        dtype = np.dtype("u1" if SCALARS[kind] == "?" else SCALARS[kind])
        stored = np.frombuffer(self.take(count * dtype.itemsize), dtype).copy()
        if SCALARS[kind] == "?":
            if (stored > 1).any():
                self.lie("0 or 1 for false or true", f"got {int(stored.max())}")
            stored = stored.astype(bool)
        stored.setflags(write=False)
        return stored

    def entries(self, count: int, alignment: int) -> dict[str, GgufEntry]:
        """The tensors' lines, in the order of their bytes."""
        lines = [self.line(n) for n in range(count)]
        start = -(-self.place // alignment) * alignment
        table: dict[str, GgufEntry] = {}
        for name, kind, shape, offset, size in lines:
            if name in table:
                refuse(self.file, "must name each tensor once", f"{quote(name)} stands there twice")
            if offset % alignment or start + offset + size > self.size:
                seen = f"it is said to take bytes {start + offset:,} to {start + offset + size:,} of {self.size:,}"
                holds = f"must keep tensor {quote(name)} inside the file, aligned to {alignment} bytes"
                refuse(self.file, holds, seen)
            table[name] = GgufEntry(name=name, kind=kind, shape=shape, begin=start + offset, size=size)
        self.check_apart(table)
        return table

    def line(self, n: int) -> tuple[str, str, tuple[int, ...], int, int]:
        """One tensor's name, type, shape, offset and size in bytes."""
        self.where = f"the line of tensor {n}"
        name = self.name()
        self.where = f"tensor {quote(name)}"
        axes = self.u32()
        if axes > MAX_AXES:
            self.lie(f"at most {MAX_AXES} axes", f"got {axes:,}")
        shape = tuple(self.u64() for _ in range(axes))[::-1]  # the file counts axes from the innermost
        number, offset = self.u32(), self.u64()
        if number not in KINDS:
            self.lie("a known type", f"got type {number}")
        kind, block, block_bytes = KINDS[number]
        if (shape[-1] if shape else 1) % block:
            self.lie(f"rows of whole blocks of {block} ({kind})", f"got shape {shape}")
        size = math.prod(shape) // block * block_bytes
        if size > self.size or offset > self.size:
            self.lie(f"a size and an offset inside the file of {self.size:,} bytes", f"got {size:,} and {offset:,}")
        return name, kind, shape, offset, size

    def check_apart(self, table: Mapping[str, GgufEntry]) -> None:
        """No byte may belong to two tensors."""
        place, before = 0, ""
        for entry in sorted(table.values(), key=lambda e: (e.begin, e.begin + e.size)):
            if entry.begin < place:
                seen = f"tensor {quote(entry.name)} begins at byte {entry.begin:,}, {quote(before)} ends at {place:,}"
                refuse(self.file, "must keep its tensors apart", seen)
            place, before = entry.begin + entry.size, entry.name

    def take(self, count: int) -> Any:
        """The next bytes."""
        if count > self.size - self.place:
            self.lie(f"{count:,} more bytes", f"the file of {self.size:,} bytes ends before")
        self.place += count
        return self.data[self.place - count : self.place]

    def u32(self) -> int:
        return int(U32.unpack(self.take(4))[0])

    def u64(self) -> int:
        return int(U64.unpack(self.take(8))[0])

    def name(self) -> str:
        """A text that can be printed, with no path in it."""
        length = self.u64()
        if length > MAX_NAME:
            self.lie(f"a name of at most {MAX_NAME:,} bytes", f"got {length:,}")
        name = self.decoded(self.take(length))
        if not name or not name.isprintable() or "/" in name or "\\" in name:
            self.lie("a name without path separators or control characters", f"got {quote(name)}")
        return name

    def text(self) -> str:
        return self.decoded(self.take(self.u64()))

    def text_list(self, count: int) -> tuple[str, ...]:
        """Many texts, quickly: vocabularies are most of a header."""
        data, place, size, unpack = self.data, self.place, self.size, U64.unpack_from
        texts: list[str] = []
        try:
            for _ in range(count):
                begin = place + 8
                place = begin + unpack(data, place)[0]
                if place > size:
                    self.lie("texts that end inside the file", f"number {len(texts):,} does not")
                texts.append(str(data[begin:place], "utf-8"))
        except StructError:
            self.lie(f"a list of {count:,} texts", f"the file ends after {len(texts):,}")
        except UnicodeDecodeError as error:
            self.lie("texts in UTF-8", f"number {len(texts):,}: {error.reason}")
        self.place = place
        return tuple(texts)

    def decoded(self, text: Any) -> str:
        try:
            return str(text, "utf-8")
        except UnicodeDecodeError as error:
            self.lie("text in UTF-8", f"got {error.reason}")

    def lie(self, must: str, seen: str) -> NoReturn:
        refuse(self.file, f"must have {must} for {self.where}", seen)


def alignment_of(file: Path, metadata: Mapping[str, Any]) -> int:
    """What every tensor's place in the file is a multiple of, in bytes."""
    alignment = metadata.get("general.alignment", 32)
    if type(alignment) is not int or not 8 <= alignment <= MAX_ALIGNMENT or alignment & (alignment - 1):
        holds = f"must align its tensors to a power of two from 8 to {MAX_ALIGNMENT:,}"
        refuse(file, holds, f"got general.alignment {quote(alignment)}")
    return alignment
