"""From a checkpoint's names of tensors to ours."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from qkv.errors import CheckpointError, message


def below(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """The tensors whose name begins with `prefix`, without it."""
    found = {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
    if not found:
        raise CheckpointError(
            message(
                "`prefix` must begin the names of this layer's tensors",
                f"got {prefix!r}, which begins none of {len(tensors)} names"
                + (f" such as {next(iter(tensors))!r}" if tensors else ""),
                "pass the part of the names before the layer's own, its final dot included",
            )
        )
    return found


def renamed(tensors: Mapping[str, Tensor], names: Mapping[str, str]) -> dict[str, Tensor]:
    """Other names for some tensors; those without one keep theirs."""
    return {names.get(name, name): tensor for name, tensor in tensors.items()}


def stacked(tensors: dict[str, Tensor], parts: tuple[str, ...], whole: str) -> dict[str, Tensor]:
    """Several tensors joined along their first axis into one, where the checkpoint keeps them apart."""
    if any(part not in tensors for part in parts):
        return tensors
    rest = {name: tensor for name, tensor in tensors.items() if name not in parts}
    return {**rest, whole: torch.cat([tensors[part] for part in parts])}
