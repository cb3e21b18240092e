"""The two sides of the demo's comparison as calls ready to run: ours and torch's, with the same pattern."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor
from torch.nn import functional as F

from qkv.attention import attention
from qkv.patterns import causal, full
from qkv.patterns.pattern import Pattern


class Call(NamedTuple):
    """A call without arguments, and the bytes of the mask that it was given."""

    run: Callable[[], Tensor]
    mask_bytes: int


def ours(query: Tensor, key: Tensor, value: Tensor, pattern: Pattern) -> Call:
    """qkv's attention, which needs no mask for any pattern."""
    return Call(lambda: attention(query, key, value, pattern=pattern), 0)


def sdpa(query: Tensor, key: Tensor, value: Tensor, pattern: Pattern) -> Call:
    """torch's own attention in the best form it has for a pattern: no mask, its causal flag, or a dense bool."""
    if pattern == full():
        return Call(lambda: F.scaled_dot_product_attention(query, key, value), 0)
    if pattern == causal():
        return Call(lambda: F.scaled_dot_product_attention(query, key, value, is_causal=True), 0)
    keep = pattern.to_dense(query.shape[-2])
    return Call(lambda: F.scaled_dot_product_attention(query, key, value, attn_mask=keep), keep.nbytes)
