"""The mask arguments of torch.nn.MultiheadAttention, which hide where True, as a pattern and a bias of ours."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import reduce
from operator import add, and_
from typing import NamedTuple

import torch
from torch import Tensor

from qkv.errors import AddedMaskWarning, MaskError, ShapeError, message
from qkv.patterns.given import key_padding, mask
from qkv.patterns.named import causal
from qkv.patterns.pattern import Pattern
from qkv.shapes import check_dense, describe, dtype_name, values_can_be_seen
from qkv.values import all_equal, bounds


class CallSizes(NamedTuple):
    """Those of one call."""

    batch: int
    heads: int
    queries: int
    keys: int


class Masks(NamedTuple):
    """What hides, and what is added to the scores: a tensor that broadcasts to (B, H, L, S)."""

    pattern: Pattern | None
    bias: Tensor | None
    warned: bool = False  # that what is added looks like what hides

    def quiet(self) -> AbstractContextManager[None]:
        """For the call with these masks: what was warned of is not warned of again, in words of another function."""
        return _quiet() if self.warned else nullcontext()


def read_masks(
    key_padding_mask: Tensor | None, attn_mask: Tensor | None, *, is_causal: bool, sizes: CallSizes
) -> Masks:
    """All masks of one call: what is bool or causal hides, all of it together, and what is float is added up.

    key_padding_mask: (B, S). attn_mask: (L, S) or (B·H, L, S). is_causal: query 0 stands at key 0.
    Raises DTypeError, ShapeError or MaskError.
    """
    hiding: list[Pattern] = [causal(align="top_left")] if is_causal else []
    added: list[Tensor] = []
    if key_padding_mask is not None:
        padding = _check("key_padding_mask", key_padding_mask)
        _check_shape("key_padding_mask", padding, {"(B, S)": (sizes.batch, sizes.keys)})
        if padding.dtype == torch.bool:
            hiding.append(key_padding(keep=~padding))
        else:
            added.append(padding[:, None, None, :])
    if attn_mask is not None:
        pairs = _by_head(_check("attn_mask", attn_mask), sizes)
        if pairs.dtype == torch.bool:
            hiding.append(mask(keep=~pairs))
        else:
            added.append(pairs)
    named = {"key_padding_mask": key_padding_mask, "attn_mask": attn_mask}
    doubtful = [name for name, tensor in named.items() if tensor is not None and _looks_hiding(tensor)]
    for name in doubtful:
        holds = f"a floating-point `{name}` is added to the scores, it hides nothing"
        remedy = f"say {name}.bool() where 1 hides, ({name} == 0) where 1 keeps"
        seen = "this one holds only 0 and 1, as a mask that hides would"
        warnings.warn(message(holds, seen, remedy), AddedMaskWarning, stacklevel=5)  # of who calls the layer
    return Masks(reduce(and_, hiding) if hiding else None, reduce(add, added) if added else None, warned=bool(doubtful))


@contextmanager
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", AddedMaskWarning)
        yield


def _looks_hiding(mask: Tensor) -> bool:
    """Whether a mask that is added holds zeros and ones, and nothing else."""
    if mask.dtype == torch.bool or mask.requires_grad or not mask.numel() or not values_can_be_seen(mask):
        return False
    return bounds(mask) == (0.0, 1.0) and all_equal(mask, 0.0, 1.0)


def _by_head(attn_mask: Tensor, sizes: CallSizes) -> Tensor:
    """A mask of pairs as (1, 1, L, S) or (B, H, L, S)."""
    pair = sizes.queries, sizes.keys
    each = sizes.batch * sizes.heads, *pair
    _check_shape("attn_mask", attn_mask, {"(L, S)": pair, "(B·H, L, S)": each})
    return attn_mask[None, None] if attn_mask.ndim == 2 else attn_mask.reshape(sizes.batch, sizes.heads, *pair)


def _check(name: str, tensor: Tensor) -> Tensor:
    """A mask that hides, bool, or is added, of a floating-point type."""
    tensor = check_dense(name, tensor)
    if tensor.dtype != torch.bool and not tensor.is_floating_point():
        holds = f"`{name}` must be bool, hiding where True, or floating point, to be added to the scores"
        remedy = f"say {name}.bool() where it hides by 1, ({name} == 0) where it keeps by 1"
        raise MaskError(message(holds, f"got {dtype_name(tensor.dtype)}", remedy))
    return tensor


def _check_shape(name: str, tensor: Tensor, valid: dict[str, tuple[int, ...]]) -> None:
    if tuple(tensor.shape) not in valid.values():
        holds = " or ".join(f"{axes} = {shape}" for axes, shape in valid.items())
        raise ShapeError(message(f"`{name}` must be {holds}", f"got {describe(tensor)}", "S counts keys, L queries"))
