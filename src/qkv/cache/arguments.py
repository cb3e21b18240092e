"""The checks of what a cache is given, before it changes: sizes, what is appended, lengths and rows.

The checks of a whole attention call are those of `qkv.question`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch._C import _are_functorch_transforms_active

from qkv.errors import DeviceError, DTypeError, ShapeError, UnsupportedError, ValueOutOfRange, message, unknown_name
from qkv.inputs import as_index
from qkv.shapes import FLOATS, check_dense, describe, dtype_name

_INTEGERS = "an int, or a sequence or integer tensor of one a sequence"


class Shape(NamedTuple):
    """What all keys and values of a cache have in common."""

    batch: int  # B, how many sequences
    heads: int  # G, of keys and values
    head_dim: int  # D
    value_dim: int  # V
    dtype: torch.dtype
    device: torch.device


def read_shape(
    batch: object,
    heads: object,
    head_dim: object,
    value_dim: object,
    dtype: object,
    device: torch.device | str | None,
) -> Shape:
    """The sizes of a new cache."""
    if dtype not in FLOATS:
        seen = f"got {dtype!r}"
        raise DTypeError(
            message("`dtype` must be float16, bfloat16, float32 or float64", seen, "give the type of the keys")
        )
    assert isinstance(dtype, torch.dtype)
    width = read_size("head_dim", head_dim, 1)
    return Shape(
        read_size("batch", batch, 0),
        read_size("heads", heads, 1),
        width,
        width if value_dim is None else read_size("value_dim", value_dim, 1),
        dtype,
        torch.empty(0, device=device).device,
    )


def read_size(name: str, value: object, least: int) -> int:
    """A size: a whole number that is not too small."""
    size = as_index(value)
    if size is None:
        raise DTypeError(message(f"`{name}` must be an int", f"got {value!r}", "give a number"))
    if size < least:
        raise ValueOutOfRange(message(f"`{name}` must be at least {least}", f"got {size}", "give a larger one"))
    return size


def read_chunk(key: object, value: object, shape: Shape, layout: str) -> tuple[Tensor, Tensor]:
    """What is to be appended, as (B, G, n, D) and (B, G, n, V), without a graph."""
    if layout not in ("BHLD", "BLHD"):
        raise unknown_name("layout", layout, ("BHLD", "BLHD"))
    k, v = check_dense("key", key), check_dense("value", value)
    order = "(B, G, n, D)" if layout == "BHLD" else "(B, n, G, D)"
    for name, tensor in (("key", k), ("value", v)):
        if tensor.ndim != 4:
            seen = f"got {describe(tensor)}"
            raise ShapeError(
                message(f"`{name}` must have 4 axes, {order}", seen, "add the missing axes with unsqueeze")
            )
    if layout == "BLHD":
        k, v = k.transpose(1, 2), v.transpose(1, 2)
    for name, tensor, width in (("key", k, shape.head_dim), ("value", v, shape.value_dim)):
        if tensor.dtype != shape.dtype:
            seen, to = f"got {dtype_name(tensor.dtype)}", dtype_name(shape.dtype)
            remedy = f"make the cache with dtype=torch.{dtype_name(tensor.dtype)}, or cast with .to(torch.{to})"
            raise DTypeError(message(f"`{name}` must have the cache's dtype, {to}", seen, remedy))
        if tensor.device != shape.device:
            holds = f"`{name}` must be on the cache's device, {shape.device}"
            raise DeviceError(message(holds, f"got {tensor.device}", f"move it with {name}.to({str(shape.device)!r})"))
        wanted = (shape.batch, shape.heads, k.shape[2], width)
        if tuple(tensor.shape) != wanted:
            raise ShapeError(_wrong_sizes(name, tensor, wanted, layout))
    return k.detach(), v.detach()


def _wrong_sizes(name: str, tensor: Tensor, wanted: tuple[int, ...], layout: str) -> str:
    """What to say of a chunk whose sizes are not the cache's."""
    letters = "BGnD" if name == "key" else "BGnV"
    differ = [
        f"{axis} = {have}, not {want}"
        for axis, have, want in zip(letters, tensor.shape, wanted, strict=True)
        if have != want
    ]
    other = "BLHD" if layout == "BHLD" else "BHLD"
    turned = tuple(tensor.shape[i] for i in (0, 2, 3)) == tuple(wanted[i] for i in (0, 1, 3))
    remedy = f"say layout={other!r}" if turned else "give keys and values of the sizes that the cache was made for"
    return message(f"`{name}` must have the sizes of the cache", f"got {', '.join(differ)}", remedy)


def check_no_transform() -> None:
    """No torch.func transform is on: what it does to a call would be written into the cache."""
    if _are_functorch_transforms_active():
        seen, remedy = (
            "got a call inside torch.func",
            "use torch.autograd, or qkv.attention over cache.keys and cache.values",
        )
        raise UnsupportedError(message("a cache must be used outside of torch.func", seen, remedy))


def check_queries(query: Tensor, rows: int, layout: str) -> None:
    """As many queries as keys: each stands where its own key does."""
    order = "(B, H, n, D)" if layout == "BHLD" else "(B, n, H, D)"
    if not isinstance(query, Tensor) or query.ndim != 4:
        seen = f"got {describe(query)}"
        raise ShapeError(message(f"`query` must be a tensor of 4 axes, {order}", seen, "add the missing axes"))
    found = query.shape[2 if layout == "BHLD" else 1]
    if found != rows:
        holds = "`query` must have as many rows as `key`: each query stands where its own key does"
        seen = f"got {found} queries for {rows} keys"
        raise ShapeError(message(holds, seen, "append keys without queries by append(key, value)"))


def read_counts(lengths: object, batch: int, rows: int) -> list[int]:
    """How many of the n rows each sequence gets; None: all."""
    if lengths is None:
        return [rows] * batch
    counts = read_integers("lengths", lengths, batch)
    for b, count in enumerate(counts):
        if not 0 <= count <= rows:
            seen = f"sequence {b} has {count}"
            raise ValueOutOfRange(message(f"`lengths` must lie in 0..n = {rows}", seen, "count the real rows of each"))
    return counts


def read_integers(name: str, value: object, count: int | None) -> list[int]:
    """Whole numbers: one for all where a count is known, or a list of them."""
    single = as_index(value)
    if single is not None and count is not None:
        return [single] * count
    found = _listed(name, value)
    if count is not None and len(found) != count:
        seen = f"got {len(found)} for B = {count}"
        raise ShapeError(message(f"`{name}` must hold one number a sequence", seen, "give one for each of the batch"))
    return found


def _listed(name: str, value: object) -> list[int]:
    """The numbers of a sequence or of an integer tensor of one axis."""
    if isinstance(value, Tensor):
        if value.dtype.is_floating_point or value.dtype.is_complex or value.dtype == torch.bool or value.ndim != 1:
            raise DTypeError(message(f"`{name}` must be {_INTEGERS}", f"got {describe(value)}", "use torch.int64"))
        return [int(number) for number in value.tolist()]
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        found = [as_index(item) for item in value]
        if None not in found:
            return [number for number in found if number is not None]
    raise DTypeError(message(f"`{name}` must be {_INTEGERS}", f"got {value!r}", "positions are whole numbers"))
