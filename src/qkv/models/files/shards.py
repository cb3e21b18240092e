"""Finds and reads the weights in a folder: one safetensors file, or several that an index names."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from qkv.errors import CheckpointError, message
from qkv.models.files.checksums import Promised, plain_name, promised, verify_files, verify_tensors
from qkv.tensorfile import quote, read_header, read_object, read_safetensors, refuse, regular_size

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
MAX_SHARDS = 10_000
MAX_INDEX = 64 * 2**20  # bytes


@dataclass(frozen=True, slots=True)
class Weights:
    """The tensors of a folder by name. `source` is what errors name: the file, or the index of several."""

    source: Path
    tensors: Mapping[str, Tensor]
    files: Mapping[str, Path]

    def file_of(self, name: str) -> Path:
        """The file that holds one tensor."""
        return self.files[name]


def find_gguf(path: Path) -> Path | None:
    """The GGUF file that a path means: itself, or the only one in a folder without config.json."""
    if path.suffix == ".gguf":
        return path
    if not path.is_dir():
        refuse(path, "must be a folder with a model, or a .gguf file", "it is none", "check the path")
    if (path / "config.json").exists():
        return None
    found = sorted(path.glob("*.gguf"))
    if len(found) > 1:
        refuse(path, "must hold one .gguf file", f"got {len(found)}, {quote(found[0].name)} first", "name the file")
    return found[0] if found else None


def read_weights(folder: Path, *, verify: bool = True) -> Weights:
    """All tensors of a folder, mapped from their files once every header was checked.

    Raises CheckpointError naming file and tensor when the files are not what they or their index say.
    """
    if (folder / SINGLE).exists():
        return _read_single(folder, verify)
    if (folder / INDEX).exists():
        return _read_shards(folder, verify)
    pickles = sorted(file.name for kind in ("*.bin", "*.pt", "*.pth") for file in folder.glob(kind))
    seen = f"got {quote(pickles[0])}" if pickles else "it is not there"
    remedy = "convert it where you trust it: qkv never reads pickle" if pickles else "check the folder"
    raise CheckpointError(message(f"{quote(folder.name)} must hold {SINGLE} or {INDEX}", seen, remedy))


def _read_single(folder: Path, verify: bool) -> Weights:
    file = folder / SINGLE
    tensors, said = _read_one(file, verify)
    if said is not None:
        verify_files(folder, said)
    return Weights(file, tensors, dict.fromkeys(tensors, file))


def _read_shards(folder: Path, verify: bool) -> Weights:
    """The tensors of all shards; the index and the shards must agree on where each one is."""
    index = folder / INDEX
    places = _places(index)
    sought: dict[str, list[str]] = {}  # the tensors by the file that they are sought in
    for name, place in places.items():
        sought.setdefault(place, []).append(name)
    found: dict[str, Tensor] = {}
    files: dict[str, Path] = {}
    all_said: list[Promised | None] = []
    for file in [_shard(folder, name) for name in sought]:
        tensors, said = _read_one(file, verify)
        _check_twice(index, file, tensors, files)
        _check_shard(index, file, tensors, sought[file.name], places)
        found |= tensors
        files |= dict.fromkeys(tensors, file)
        all_said.append(said)
    if verify:
        _check_one_save(index, folder, all_said)
    return Weights(index, found, files)


def _read_one(file: Path, verify: bool) -> tuple[dict[str, Tensor], Promised | None]:
    """A file's tensors, verified by the checksums that it carries, if any."""
    header = read_header(file)
    said = promised(file, header) if verify else None
    tensors = read_safetensors(file)
    if said is not None:
        verify_tensors(file, tensors, said)
    return tensors, said


def _places(index: Path) -> dict[str, str]:
    """Which file holds each tensor, as the index says."""
    table = read_object(index, MAX_INDEX).get("weight_map")
    if not isinstance(table, dict) or not table or not all(isinstance(name, str) for name in table.values()):
        refuse(index, "must give the file of each tensor under weight_map", f"got {quote(table)}")
    if len(set(table.values())) > MAX_SHARDS:
        refuse(index, f"must name at most {MAX_SHARDS:,} files", f"got {len(set(table.values())):,}")
    return table


def _shard(folder: Path, name: str) -> Path:
    """A shard's path; it must lie in the folder, or where the cache of Hugging Face keeps what the folder links to."""
    file = folder / plain_name(folder / INDEX, name)
    if file.suffix != ".safetensors":
        refuse(folder / INDEX, "must name .safetensors files", f"got {quote(name)}", "qkv never reads pickle")
    regular_size(file)
    home = folder.resolve()
    if file.is_symlink() and file.resolve().parent not in {home, home.parent.parent / "blobs"}:
        refuse(
            file, "must lie in the folder of its index", f"it leads to {quote(str(file.resolve()))}", "copy it there"
        )
    return file


def _check_twice(index: Path, file: Path, held: Mapping[str, Tensor], before: Mapping[str, Path]) -> None:
    """No tensor of a shard was in one before it."""
    for name in held:
        if name in before:
            holds = f"must hold tensor {quote(name)} in one file"
            refuse(index, holds, f"got it in {quote(before[name].name)} and {quote(file.name)}")


def _check_shard(
    index: Path, file: Path, held: Mapping[str, Tensor], sought: Iterable[str], places: Mapping[str, str]
) -> None:
    """A shard holds the tensors that the index seeks in it, and no others."""
    for name in sought:
        if name not in held:
            refuse(file, f"must hold tensor {quote(name)}, by {index.name}", "it is not there")
    for name in held:
        if places.get(name) != file.name:
            seen = f"the index seeks it in {quote(places[name])}" if name in places else "the index does not name it"
            refuse(file, f"must not hold tensor {quote(name)}, by {index.name}", seen)


def _check_one_save(index: Path, folder: Path, all_said: list[Promised | None]) -> None:
    """Shards that carry checksums were saved together, with the other files of the folder."""
    saves = {said.save if said is not None else "" for said in all_said}
    if len(saves) > 1:
        refuse(index, "must name shards that were saved together", f"got shards of {len(saves)} saves")
    for said in all_said[:1]:
        if said is not None:
            verify_files(folder, said)
