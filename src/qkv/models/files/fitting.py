"""Holds the tensors of a file against the model that they are for, by name, shape and type, and gives them to it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn, Protocol

import torch
from torch import Tensor, nn

from qkv.errors import CheckpointError, message
from qkv.tensorfile import quote

BELONGS = "use the file that belongs to this config"
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


class Stored(Protocol):
    """Tensors by name, and which file each one came from."""

    @property
    def tensors(self) -> Mapping[str, Tensor]: ...
    @property
    def source(self) -> Path: ...
    def file_of(self, name: str) -> Path: ...


@dataclass(frozen=True, slots=True)
class Ties:
    """Names of a model that stand for one parameter: a second name to the first."""

    first: Mapping[str, str]

    def kept(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The tensors without second names."""
        return {name: tensor for name, tensor in tensors.items() if name not in self.first}


def ties(model: nn.Module) -> Ties:
    """Which names of a model share one parameter (an embedding that is also the head, say)."""
    seen: dict[int, str] = {}
    names = model.named_parameters(remove_duplicate=False)
    twins = {name: seen.setdefault(id(tensor), name) for name, tensor in names}
    return Ties({name: first for name, first in twins.items() if name != first})


def check_stored(stored: Stored, expected: Mapping[str, Tensor], dtype: torch.dtype | None) -> None:
    """Hold a file's tensors against what the model would write: `expected` by published names, on any device.

    A name that is not among the expected is left to the model, which knows the older spellings.
    """
    for name, tensor in stored.tensors.items():
        if name in expected:
            _check_one(stored.file_of(name), name, tensor, expected[name])
    _check_one_type({name: stored.tensors[name] for name in expected if name in stored.tensors}, stored.source, dtype)


@dataclass(frozen=True, slots=True)
class Spelling:
    """How the file spells what errors are about: the names that it should hold, and the names of what it holds."""

    expected: frozenset[str] = frozenset()
    of_place: Mapping[int, str] = field(default_factory=dict)  # by where the tensor's numbers begin in memory

    @classmethod
    def of(cls, stored: Mapping[str, Tensor], expected: Iterable[str]) -> Spelling:
        """For tensors as they were read, by their published names."""
        places = {tensor.data_ptr(): name for name, tensor in stored.items() if tensor.numel()}
        return cls(frozenset(expected) - stored.keys(), places)

    def missing(self, own: list[str]) -> list[str]:
        """Names of missing tensors as the file would spell them."""
        return sorted(self.expected) if own and self.expected else own

    def name(self, own: str, tensor: Tensor) -> str:
        """The name in the file of a tensor that came from there as it is, or turned, or as the first part of one."""
        return self.of_place.get(tensor.data_ptr(), own) if tensor.numel() else own


def assign(
    model: nn.Module,
    tensors: Mapping[str, Tensor],
    source: Path,
    dtype: torch.dtype | None = None,
    spelling: Spelling | None = None,
) -> None:
    """Make the tensors, by the model's own names, the model's own; copied only where `dtype` or a turn asks for it.

    Raises CheckpointError when one is missing, unknown, of another shape or no float where the model has one.
    """
    tied = ties(model)
    wanted = model.state_dict()
    said = spelling or Spelling()
    _check_names(tensors, wanted, tied, source, said)
    for name, tensor in tensors.items():
        _check_one(source, said.name(name, tensor), tensor, wanted[name])
    _check_one_type(tensors, source, dtype)
    ready = {name: _cast(tensor, dtype) for name, tensor in tensors.items()}
    for second, first in tied.first.items():
        if first not in ready:
            ready[first] = ready.pop(second)
        ready[second] = ready[first]
    model.load_state_dict(ready, assign=True)
    for second, first in tied.first.items():
        place, _, leaf = second.rpartition(".")
        setattr(model.get_submodule(place), leaf, model.get_parameter(first))


def _check_names(
    tensors: Mapping[str, Tensor], wanted: Mapping[str, Tensor], tied: Ties, source: Path, said: Spelling
) -> None:
    given = {tied.first.get(name, name) for name in tensors}
    missing = said.missing([name for name in tied.kept(wanted) if name not in given])
    unknown = [said.name(name, tensor) for name, tensor in tensors.items() if name not in wanted]
    if missing or unknown:
        lists = (("missing", missing), ("unknown", unknown))
        seen = "; ".join(f"{kind}: {_some(names)}" for kind, names in lists if names)
        _refuse(source, "must hold exactly the model's tensors", seen)


def _check_one(file: Path, name: str, tensor: Tensor, wanted: Tensor) -> None:
    if tensor.shape != wanted.shape:
        seen = f"got {tuple(tensor.shape)}"
        _refuse(file, f"must hold {quote(name)} as {tuple(wanted.shape)}, by the config", seen)
    if wanted.is_floating_point() and tensor.dtype not in FLOATS:
        _refuse(file, f"must hold {quote(name)} as floating-point numbers", f"got {tensor.dtype}", "convert the file")
    if not wanted.is_floating_point() and tensor.dtype != wanted.dtype:
        _refuse(file, f"must hold {quote(name)} as {wanted.dtype}", f"got {tensor.dtype}", "convert the file")


def _check_one_type(tensors: Mapping[str, Tensor], source: Path, dtype: torch.dtype | None) -> None:
    """The floats of a model have one type, or are cast to one."""
    first: dict[torch.dtype, str] = {}
    for name, tensor in tensors.items():
        if tensor.is_floating_point():
            first.setdefault(tensor.dtype, name)
    if len(first) > 1 and dtype is None:
        seen = "got " + ", ".join(f"{kind} ({quote(name)})" for kind, name in first.items())
        _refuse(source, "must hold its weights in one floating-point type", seen, "say dtype= to cast them")


def _cast(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    """In the type and in the order of memory that the model has: what was turned on the way is copied."""
    return (tensor.to(dtype) if dtype is not None and tensor.is_floating_point() else tensor).contiguous()


def _refuse(file: Path, holds: str, seen: str, remedy: str = BELONGS) -> NoReturn:
    raise CheckpointError(message(f"{quote(file.name)} {holds}", seen, remedy))


def _some(names: Iterable[str]) -> str:
    """The first few names, and how many more there are."""
    several = [quote(name) for name in names]
    return ", ".join(several[:3]) + (f" and {len(several) - 3} more" if len(several) > 3 else "")
