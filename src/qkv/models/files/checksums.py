"""The checksums that our saved files carry, made on saving and verified on loading: one bit that differs is found.

A weights file keeps two texts beside its tensors. `qkv_checksums` is a JSON object with the SHA-256 of every tensor
(over its name, type, shape and bytes), of every other file of the folder and of the whole save. `qkv_header` is the
SHA-256 of the file's header with that very text blanked. A file without the two is another writer's: nothing to verify.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from qkv.tensorfile import Header, quote, refuse

CHECKSUMS, HEADER = "qkv_checksums", "qkv_header"
BLANK = "0" * 64
CHANGED = "fetch the folder again, or pass verify=False if you changed it on purpose"


@dataclass(frozen=True, slots=True)
class Promised:
    """What one weights file says of its save: digests of tensors, of the other files, and of all tensors together."""

    tensors: Mapping[str, str]
    files: Mapping[str, str]
    save: str

    def text(self) -> str:
        """As the file keeps it."""
        table = {"tensors": self.tensors, "files": self.files, "save": self.save}
        return json.dumps(table, separators=(",", ":"), ensure_ascii=False)


def tensor_digest(name: str, tensor: Tensor) -> str:
    """SHA-256 over what a tensor is: name, type, shape and bytes."""
    digest = hashlib.sha256(f"{name}\n{tensor.dtype}\n{tuple(tensor.shape)}\n".encode())
    digest.update(raw_bytes(tensor))
    return digest.hexdigest()


def raw_bytes(tensor: Tensor) -> Any:
    """The bytes of a contiguous tensor on the CPU, not copied."""
    flat: Any = tensor.reshape(-1).view(torch.uint8).numpy()
    return memoryview(flat) if tensor.numel() else b""


def bytes_digest(text: bytes) -> str:
    """SHA-256 of a file's content."""
    return hashlib.sha256(text).hexdigest()


def save_digest(tensors: Mapping[str, str], files: Mapping[str, str]) -> str:
    """One digest of everything that is saved together: it tells shards of two saves apart."""
    return bytes_digest(json.dumps([sorted(tensors.items()), sorted(files.items())]).encode())


def header_digest(header: bytes, stated: str) -> str:
    """SHA-256 of a header whose own digest, `stated`, is blanked."""
    return bytes_digest(header.replace(stated.encode(), BLANK.encode(), 1))


def promised(file: Path, header: Header) -> Promised | None:
    """What the file promises, its header verified; None when another program wrote it.

    Raises CheckpointError when the header is not as it was saved.
    """
    stated, text = header.metadata.get(HEADER), header.metadata.get(CHECKSUMS)
    if stated is None and text is None:
        return None
    if stated is None or text is None or header_digest(_header_bytes(file), stated) != stated:
        refuse(file, "must have the header that was saved", "its SHA-256 differs", CHANGED)
    table = _digest_table(text)
    if table is None:
        refuse(file, f"must keep digests by name under {CHECKSUMS}", f"got {quote(text)}")
    if set(table["tensors"]) != {entry.name for entry in header.entries}:
        refuse(file, f"must keep a digest of each of its tensors under {CHECKSUMS}", "the names differ")
    return Promised(**table)


def verify_tensors(file: Path, tensors: Mapping[str, Tensor], said: Promised) -> None:
    """Hold every tensor against its digest."""
    for name, digest in said.tensors.items():
        if tensor_digest(name, tensors[name]) != digest:
            refuse(file, f"must hold tensor {quote(name)} as it was saved", "its SHA-256 differs", CHANGED)


def verify_files(folder: Path, said: Promised) -> None:
    """Hold the small files of the folder against their digests."""
    for name, digest in said.files.items():
        file = folder / plain_name(folder, name)
        if not file.is_file() or bytes_digest(file.read_bytes()) != digest:
            seen = "its SHA-256 differs" if file.is_file() else "it is not there"
            refuse(file, "must be as it was saved with the weights", seen, CHANGED)


def plain_name(folder: Path, name: str) -> str:
    """A file's name that leads nowhere else."""
    if not name or not name.isprintable() or name in {".", ".."} or "/" in name or "\\" in name or ":" in name:
        refuse(folder, "must name its files without paths", f"got {quote(name)}")
    return name


def _digest_table(text: str) -> dict[str, Any] | None:
    """The fields of `Promised`; None where the text is something else."""
    try:
        table = json.loads(text)
    except (ValueError, RecursionError):
        return None
    right = isinstance(table, dict) and set(table) == {"tensors", "files", "save"} and isinstance(table["save"], str)
    return table if right and _digests(table["tensors"]) and _digests(table["files"]) else None


def _digests(table: object) -> bool:
    return isinstance(table, dict) and all(isinstance(digest, str) for digest in table.values())


def _header_bytes(file: Path) -> bytes:
    with file.open("rb") as stream:
        return stream.read(int.from_bytes(stream.read(8), "little"))
