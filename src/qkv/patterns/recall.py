"""Patterns that operators of a graph are handed at every call, as a form and tensors: read once, then recognised by
content.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Hashable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from qkv.patterns.pattern import Pattern
from qkv.patterns.text import read_form
from qkv.settings import PLAN_CACHE_MB, read

FORMS = 256  # forms that are remembered
SIGHTS = 4  # patterns of one form and tensors of one shape that are remembered


class Sight(NamedTuple):
    """A pattern, the tensors from which it was read, and what its users know of it, as long as it is remembered."""

    tensors: tuple[Tensor, ...]
    pattern: Pattern
    known: dict[Hashable, Any]


def recall(form: str, tensors: Sequence[Tensor]) -> Sight:
    """The pattern of a form and its tensors, as it was seen before where possible.

    Raises the errors of the constructors.
    """
    return _MEMORY.sight(form, tensors) if tensors else _literal(form)


@lru_cache(maxsize=FORMS)
def _literal(form: str) -> Sight:
    return Sight((), read_form(form, ()), {})


class Memory:
    """The last patterns with tensors, bounded by the bytes of those; safe to use from several threads.

    Tensors are compared by content, never by address: a graph may write other numbers to the same place.
    """

    def __init__(self) -> None:
        self._seen: OrderedDict[tuple[object, ...], list[Sight]] = OrderedDict()
        self._lock = threading.Lock()

    def sight(self, form: str, tensors: Sequence[Tensor]) -> Sight:
        """The pattern of a form and at least one tensor."""
        given = [tensor.detach().cpu() for tensor in tensors]
        key = (form, *((tensor.dtype, tensor.shape) for tensor in given))
        with self._lock:
            known = self._seen.get(key, ())
        for sight in known:
            if all(_same(old, new) for old, new in zip(sight.tensors, given, strict=True)):
                return sight
        made = Sight(tuple(tensor.clone() for tensor in given), read_form(form, given), {})
        self._remember(key, made)
        return made

    def _remember(self, key: tuple[object, ...], sight: Sight) -> None:
        with self._lock:
            self._seen[key] = [sight, *self._seen.get(key, ())][:SIGHTS]
            self._seen.move_to_end(key)
            while self._seen and (len(self._seen) > FORMS or self._nbytes() > read(PLAN_CACHE_MB) << 20):
                self._seen.popitem(last=False)

    def _nbytes(self) -> int:
        return sum(tensor.nbytes for found in self._seen.values() for sight in found for tensor in sight.tensors)


def _same(old: Tensor, new: Tensor) -> bool:
    """Whether tensors of one type and shape hold the same; booleans eight at a time."""
    if old.dtype == torch.bool and old.numel() % 8 == 0:
        old, new = (tensor.contiguous().view(-1).view(torch.int64) for tensor in (old, new))
    return torch.equal(old, new)


_MEMORY = Memory()
