"""Writes GGUF files for tests, honest ones and lying ones, in a few lines of struct: no code of qkv, none of `gguf`."""

from __future__ import annotations

import struct

TYPES = {int: 5, float: 6, bool: 7, str: 8, list: 9}
FORMATS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<B", 10: "<Q", 11: "<q", 12: "<d"}


class Raw(bytes):
    """A value as it stands in the file, its type number first."""


def text(value):
    data = value if isinstance(value, bytes) else value.encode()
    return struct.pack("<Q", len(data)) + data


def payload(kind, value):
    if kind == 8:
        return text(value)
    if kind == 9:
        inner = TYPES[type(value[0])]
        return struct.pack("<IQ", inner, len(value)) + b"".join(payload(inner, one) for one in value)
    return struct.pack(FORMATS[kind], value)


def value(one, kind=None):
    if isinstance(one, Raw):
        return bytes(one)
    kind = TYPES[type(one)] if kind is None else kind
    return struct.pack("<I", kind) + payload(kind, one)


def line(name, shape, kind, offset):
    """A tensor's line; the shape in torch's order."""
    axes = struct.pack(f"<I{len(shape)}Q", len(shape), *reversed(shape))
    return text(name) + axes + struct.pack("<IQ", kind, offset)


def gguf(metadata, tensors, *, version=3, counts=None, alignment=32, magic=b"GGUF", lines=None):
    """The bytes of a file. metadata: a dict, or pairs. tensors: name -> (shape, kind number, bytes)."""
    pairs = list(metadata.items()) if isinstance(metadata, dict) else metadata
    data, told = b"", b""
    for name, (shape, kind, stored) in tensors.items():
        told += line(name, shape, kind, len(data))
        data += stored + b"\0" * (-len(stored) % alignment)
    count = len(tensors) if lines is None else len(lines)
    head = magic + struct.pack("<IQQ", version, *(counts or (count, len(pairs))))
    head += b"".join(text(name) + value(one) for name, one in pairs)
    head += told if lines is None else b"".join(lines)
    return head + b"\0" * (-len(head) % alignment) + data
