"""What softmax attention remembers between calls: which cache a pattern needs, and the keys of a memory."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from qkv.cache import KVCache, RollingKVCache
from qkv.cache.arguments import read_size
from qkv.cache.base import Cache
from qkv.cache.rolling import PAGE
from qkv.patterns.pattern import Pattern
from qkv.shapes import FLOATS


class Keys(NamedTuple):
    """Keys and values of another sequence, projected once for all calls that attend over them."""

    key: Tensor  # (B, S, G, D)
    value: Tensor  # (B, S, G, D)
    lengths: tuple[int, ...] | None = None  # how many of the S rows of each sequence are real; None: all


def cache_for(
    pattern: Pattern | None,
    batch: int,
    heads: int,
    max_length: int,
    head_dim: int,
    *,
    dtype: torch.dtype,
    device: torch.device | str | None,
) -> Cache:
    """A RollingKVCache where queries of the pattern let a page of keys go within max_length, else a KVCache."""
    if pattern is None or not _lets_go(pattern, read_size("max_length", max_length, 1)):
        return KVCache(batch, heads, max_length, head_dim, dtype=dtype, device=device)
    return RollingKVCache.for_pattern(
        pattern, batch, heads, head_dim, dtype=dtype, device=device, max_length=max_length
    )


def type_and_device(*modules: nn.Module) -> tuple[torch.dtype, torch.device]:
    """Those of the first parameter with numbers to compute in; torch's own where there is none, as once quantised."""
    for parameter in (one for module in modules for one in module.parameters()):
        if parameter.dtype in FLOATS:
            return parameter.dtype, parameter.device
    return torch.get_default_dtype(), torch.get_default_device()


def _lets_go(pattern: Pattern, length: int) -> bool:
    """Whether there is a finished page without a key that a query from `length` on may see."""
    finished, kept = length // PAGE, set[int]()
    for start, stop in pattern.retained(length):
        kept.update(range(max(start, 0) // PAGE, min(-(-stop // PAGE), finished)))
    return len(kept) < finished
