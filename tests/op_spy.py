"""A look at the operators that run: over which axis each softmax goes, and how far its scores spread."""

from __future__ import annotations

from typing import NamedTuple

from torch.utils._python_dispatch import TorchDispatchMode


class Seen(NamedTuple):
    """One softmax, or one operator of attention: what it normalises over, and the spread of its scores."""

    operator: str
    last_axis: bool
    std: float


class Spy(TorchDispatchMode):
    """Notes each softmax, and each operator that takes a query and a key, while a module runs."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Seen] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name
        given = dict(zip((a.name for a in func._schema.arguments), args, strict=False)) | (kwargs or {})
        if "softmax" in name and "backward" not in name:
            scores, axis = args[0], args[1]
            visible = scores[scores > -1e4]
            self.seen.append(Seen(name, axis in (-1, scores.ndim - 1), visible.double().std().item()))
        elif {"query", "key"} <= given.keys() and "backward" not in name:
            self.seen.append(Seen(name, True, _std_of_scores(given)))
        return func(*args, **(kwargs or {}))


def _std_of_scores(given: dict) -> float:
    query, key = given["query"].double(), given["key"].double()
    if given.get("layout") == "BLHD":
        query, key = query.transpose(1, 2), key.transpose(1, 2)
    scale = given.get("scale")
    key = key.repeat_interleave(query.shape[1] // key.shape[1], 1)
    scores = query @ key.transpose(-1, -2) * (query.shape[-1] ** -0.5 if scale is None else scale)
    return scores.std().item()
