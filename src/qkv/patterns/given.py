"""The constructors of patterns that are given as tensors or as a function: content, not a rule."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from qkv.errors import DTypeError, MaskError, ShapeError, ValueOutOfRange, message, unknown_name
from qkv.patterns.arguments import booleans, integers, length
from qkv.patterns.leaf import Expr
from qkv.patterns.leaves.blocks import BlockLayout
from qkv.patterns.leaves.dense import DenseMask, Predicate, Where
from qkv.patterns.leaves.documents import Documents
from qkv.patterns.leaves.keys import BatchedKeys, KeyLengths
from qkv.patterns.pattern import Pattern
from qkv.patterns.writing import constructor, registered


@constructor
def documents(
    ids: Sequence[int] | Tensor | None = None, *, cu_seqlens: Sequence[int] | Tensor | None = None
) -> Pattern:
    """The same document: ids[i] = ids[j]. Give ids, (S,) or (B, S), or the boundaries 0, n1, n1 + n2, ...
    as `cu_seqlens`.
    """
    if (ids is None) == (cu_seqlens is None):
        raise MaskError(
            message(
                "`documents` takes either `ids` or `cu_seqlens`",
                "got both" if ids is not None else "got neither",
                "documents(ids) or documents(cu_seqlens=boundaries)",
            )
        )
    array = integers("ids", ids, ndim=(1, 2)) if ids is not None else _ids_from_boundaries(cu_seqlens)
    return _holding(Documents(array), "documents({ids})", array)


@constructor
def key_lengths(lengths: Sequence[int] | Tensor) -> Pattern:
    """j < lengths[b]: batch row b has lengths[b] real keys; lengths (B,)."""
    array = integers("lengths", lengths, ndim=(1,))
    return _holding(KeyLengths(array), "key_lengths({lengths})", array)


@constructor
def key_padding(keep: Tensor) -> Pattern:
    """keep[b, j]: which keys of each batch row are real; bool (B, S), True keeps."""
    array = booleans("keep", keep, (2,), "(B, S)")
    return _holding(BatchedKeys(array, "key_padding(keep=)"), "key_padding({keep})", array)


@constructor
def mask(keep: Tensor, *, axes: Literal["BLS", "HLS"] | None = None) -> Pattern:
    """keep[b, h, i, j]: any boolean mask, True keeps; rows are the call's rows.

    keep: (L, S), or 4-D that broadcasts to (B, H, L, S), or 3-D with `axes` saying whether it is (B, L, S) or (H, L,
    S).
    """
    if axes not in (None, "BLS", "HLS"):
        raise unknown_name("axes", axes, ["BLS", "HLS"])
    array = booleans(
        "keep", keep, (2, 3, 4) if axes is None else (3,), "(L, S), (B, H, L, S), or three named by `axes`"
    )
    if array.ndim == 3 and axes is None:
        raise MaskError(
            message(
                "`keep` with three axes must say what they are",
                f"its shape is {list(array.shape)}, either (B, L, S) or (H, L, S)",
                'pass axes="BLS" or axes="HLS"',
            )
        )
    spread = (
        array[None, None] if array.ndim == 2 else array if array.ndim == 4 else np.expand_dims(array, axes == "BLS")
    )
    named = f", axes={axes!r}" if axes else ""
    return _holding(DenseMask(spread), f"mask({{keep}}{named})", array)


@constructor
def blocks(keep: Tensor, block_size: int) -> Pattern:
    """keep[block of i, block of j]: any layout of blocks, for all or per batch row and head;
    blocks count absolute positions.

    keep: bool (rows, columns) or 4-D (B or 1, H or 1, rows, columns).
    """
    array = booleans("keep", keep, (2, 4), "(rows, columns) or (B, H, rows, columns) of blocks")
    size = length("block_size", block_size, 1)
    layout = BlockLayout(array if array.ndim == 4 else array[None, None], size)
    return _holding(layout, f"blocks({{keep}}, {size})", array)


@registered
def where(fn: Predicate) -> Pattern:
    """fn(b, h, i, j) -> bool on int64 index tensors that broadcast to (B, H, L, S); asked tile by tile, every tile.

    i and j are absolute positions. The function must be pure, for its answers are remembered, and depend on b and h
    through broadcasting alone. Two patterns are equal when their functions are the same object.
    """
    if not callable(fn):
        raise DTypeError(message("`where` must be given a function", f"got {fn!r}", "where(lambda b, h, i, j: j <= i)"))
    return Pattern(Where(fn), f"where(<{getattr(fn, '__name__', type(fn).__name__)}>)")


def _holding(expr: Expr, form: str, array: np.ndarray) -> Pattern:
    """A pattern whose form has one place, for the tensor that the array is."""
    return Pattern(expr, form, tensors=(torch.from_numpy(array),))


def _ids_from_boundaries(boundaries: Sequence[int] | Tensor | None) -> np.ndarray:
    edges = integers("cu_seqlens", boundaries, ndim=(1,))
    if not len(edges):
        raise ShapeError(message("`cu_seqlens` must hold at least the boundary 0", "it is empty", "start it with 0"))
    if edges[0] != 0:
        raise ValueOutOfRange(
            message("`cu_seqlens` must start at 0", f"entry 0 is {edges[0]}", "prepend 0 to the ends")
        )
    falling = np.flatnonzero(np.diff(edges) < 0)
    if len(falling):
        at = int(falling[0]) + 1
        raise ValueOutOfRange(
            message(
                "`cu_seqlens` must not decrease",
                f"entry {at} is {edges[at]} after {edges[at - 1]}",
                "give running sums of document lengths",
            )
        )
    return np.repeat(np.arange(len(edges) - 1), np.diff(edges))
