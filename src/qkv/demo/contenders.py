"""The two sides of the demo's comparison as calls ready to run: ours and torch's, with the same pattern."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from qkv.attention import attention
from qkv.patterns import causal, full
from qkv.patterns.pattern import Pattern

BAND = 256


class Call(NamedTuple):
    """A call without arguments, and the bytes of the mask that it was given."""

    run: Callable[[], Tensor]
    mask_bytes: int


def ours(query: Tensor, key: Tensor, value: Tensor, pattern: Pattern) -> Call:
    """qkv's attention, which needs no mask for any pattern."""

    def run() -> Tensor:
        output = attention(query, key, value, pattern=pattern)
        assert isinstance(output, Tensor)  # no pair, because no aux is asked for
        return output

    return Call(run, 0)


def sdpa(query: Tensor, key: Tensor, value: Tensor, pattern: Pattern) -> Call:
    """torch's own attention in the best form it has for a pattern: no mask, its causal flag, or a dense bool."""
    if pattern == full():
        return Call(lambda: F.scaled_dot_product_attention(query, key, value), 0)
    if pattern == causal():
        return Call(lambda: F.scaled_dot_product_attention(query, key, value, is_causal=True), 0)
    keep = dense_mask(pattern, query.shape[-2])
    return Call(lambda: F.scaled_dot_product_attention(query, key, value, attn_mask=keep), keep.nbytes)


def dense_mask(pattern: Pattern, tokens: int) -> Tensor:
    """A pattern as bool (L, L), made in bands of rows: index tensors of all pairs would take 16 times its memory."""
    starts = range(0, tokens, BAND)
    return torch.cat([pattern.to_dense(min(BAND, tokens - i), tokens, query_offset=i) for i in starts])
