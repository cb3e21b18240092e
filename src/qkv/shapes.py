"""The axes of one call's tensors: which are legal, their views in the order (B, H, L, D), and the way back.

Knows no pattern, no score and no option.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor
from torch._C import _are_functorch_transforms_active, _len_torch_dispatch_stack
from torch.nn import Parameter

from qkv.errors import DeviceError, DTypeError, ShapeError, SizeLimit, UnsupportedError, message, unknown_name
from qkv.types import Layout

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
INDEX_LIMIT = 2**63
ORDINARY = (Tensor, Parameter)  # types whose numbers are there, and that only behave like themselves
NAMES = ("query", "key", "value")
_REMEDIES = {
    "nested": "pad it and say pattern=key_lengths(...), or pack it and say pattern=documents(...)",
    "quantised": "call .dequantize() first",
    "sparse": "call .to_dense() first (which keys a query may see is said by `pattern`)",
}


class Axes(NamedTuple):
    """The sizes of one call by axis letter."""

    batch: int  # B, all leading axes flattened
    heads: int  # H
    kv_heads: int  # G
    queries: int  # L
    keys: int  # S
    head_dim: int  # D
    value_dim: int  # V


class Views(NamedTuple):
    """The tensors of one call in the order (B, H, L, D), and what the caller's own form was."""

    query: Tensor  # (B, H, L, D)
    key: Tensor  # (B, G, S, D)
    value: Tensor  # (B, G, S, V)
    rank: int  # how many axes the caller's tensors have
    leading: tuple[int, ...]  # the axes before H (before L where there are no heads)
    layout: Layout


def values_can_be_seen(tensor: Tensor) -> bool:
    """Whether the numbers in a tensor may be read: eager mode, on a concrete tensor, in no transform or trace."""
    if torch.compiler.is_compiling() or tensor.is_meta or type(tensor) not in ORDINARY:
        return False
    if _are_functorch_transforms_active() or _len_torch_dispatch_stack() > 0:
        return False
    return not (tensor.is_cuda and torch.cuda.is_current_stream_capturing())


def describe(value: object) -> str:
    """A value in a few words: a tensor's shape, type and device, else the type's name.

    >>> describe(torch.zeros(2, 3))
    '[2, 3] float32 cpu'
    """
    if not isinstance(value, Tensor):
        return type(value).__name__
    if value.is_nested:
        return "a nested tensor"
    return f"{list(value.shape)} {dtype_name(value.dtype)} {value.device}"


def dtype_name(dtype: torch.dtype) -> str:
    """A type without its package: float32."""
    return str(dtype).removeprefix("torch.")


def check_dense(name: str, tensor: object) -> Tensor:
    """A plain strided tensor, its lazy negation resolved."""
    if not isinstance(tensor, Tensor):
        got = "None" if tensor is None else f"a {type(tensor).__module__}.{type(tensor).__qualname__}"
        raise DTypeError(message(f"`{name}` must be a torch.Tensor", f"got {got}", "convert it with torch.as_tensor"))
    if tensor.layout is not torch.strided or tensor.is_nested or tensor.is_quantized:
        kind = "nested" if tensor.is_nested else "quantised" if tensor.is_quantized else "sparse"
        seen = f"got a {kind} tensor ({str(tensor.layout).removeprefix('torch.')})"
        raise UnsupportedError(message(f"`{name}` must be a dense tensor", seen, _REMEDIES[kind]))
    if torch.compiler.is_dynamo_compiling():  # which cannot ask; the operator is given a resolved one
        return tensor
    return tensor.resolve_neg() if tensor.is_neg() else tensor


def check_float(name: str, tensor: Tensor) -> None:
    """A tensor of a type that scores can be computed in."""
    if tensor.dtype in FLOATS:
        return
    if tensor.dtype.is_complex:
        remedy = "take its real part, or lay real and imaginary parts along D"
    elif tensor.dtype.is_floating_point:
        remedy = "multiply it by its scales in a wider type first: an 8-bit float carries none"
    else:
        remedy = f"convert it with {name}.float()"
    holds = f"`{name}` must be float16, bfloat16, float32 or float64"
    raise DTypeError(message(holds, f"got {dtype_name(tensor.dtype)}", remedy))


def check_device(name: str, tensor: Tensor, device: torch.device, of: str = "query") -> None:
    """A tensor on the device of the query, or of another argument."""
    if tensor.device != device:
        holds = f"`{name}` must be on the device of `{of}`"
        seen = f"got {tensor.device} beside {device}"
        raise DeviceError(message(holds, seen, f"move it with {name}.to({str(device)!r})"))


def view_inputs(query: object, key: object, value: object, layout: str, *, broadcast: bool) -> tuple[Views, Axes]:
    """Check the three tensors of a call and view them as (B, H, L, D).

    With `broadcast`, batch and head axes of size 1 are expanded as torch does; otherwise they must agree.
    """
    order = _read_layout(layout)
    q, k, v = check_dense("query", query), check_dense("key", key), check_dense("value", value)
    _check_types(q, k, v)
    if broadcast:
        q, k, v = _broadcast(q, k, v)
    rank = q.ndim
    if k.ndim != rank or v.ndim != rank or rank < 2:
        raise _rank_error(q, k, v)
    leading = tuple(q.shape[: max(rank - 3, 0)]) if rank != 3 else (q.shape[0],)
    _check_leading(q, k, v, len(leading))
    views = Views(_view(q, order), _view(k, order), _view(v, order), rank, leading, order)
    return views, _check_axes(views)


def restore(output: Tensor, views: Views) -> Tensor:
    """An output (B, H, L, V) in the caller's rank and layout."""
    if views.rank == 4:
        return output if views.layout == "BHLD" else output.transpose(1, 2)
    _, heads, queries, width = output.shape
    if views.rank < 4:
        return output.reshape(*views.leading, queries, width)
    output = output.reshape(*views.leading, heads, queries, width)
    return output if views.layout == "BHLD" else output.transpose(-3, -2)


def _read_layout(layout: str) -> Layout:
    """One of the two orders of axes."""
    if isinstance(layout, str) and layout in ("BHLD", "BLHD"):
        return "BHLD" if layout == "BHLD" else "BLHD"
    raise unknown_name("layout", layout, ("BHLD", "BLHD"))


def _check_types(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Types and devices, alike in all three."""
    dtype, device = q.dtype, q.device
    if dtype not in FLOATS or k.dtype != dtype or v.dtype != dtype:
        for name, tensor in zip(NAMES, (q, k, v), strict=True):
            check_float(name, tensor)
        types = ", ".join(dtype_name(t.dtype) for t in (q, k, v))
        remedy = "cast them to one, such as key.to(query.dtype), or call under torch.autocast"
        raise DTypeError(message("`query`, `key` and `value` must have one dtype", f"got {types}", remedy))
    check_device("key", k, device)
    check_device("value", v, device)


def _rank_error(q: Tensor, k: Tensor, v: Tensor) -> ShapeError:
    """What to say of a number of axes that is not legal."""
    shapes = ", ".join(str(list(t.shape)) for t in (q, k, v))
    if min(q.ndim, k.ndim, v.ndim) < 2:
        holds = "`query`, `key` and `value` must have at least 2 axes, (L, D)"
        return ShapeError(message(holds, f"got shapes {shapes}", "a single row is x[None, :]"))
    holds = "`query`, `key` and `value` must have the same number of axes"
    return ShapeError(message(holds, f"got shapes {shapes}", "add the missing axis, as key.unsqueeze(1) for heads"))


def _check_leading(q: Tensor, k: Tensor, v: Tensor, count: int) -> None:
    """Batch axes, equal in all three."""
    if not (q.shape[:count] == k.shape[:count] == v.shape[:count]):
        sizes = ", ".join(str(t.shape[0]) if count == 1 else str(list(t.shape[:count])) for t in (q, k, v))
        holds = "`query`, `key` and `value` must have the same batch size B"
        remedy = "repeat a batch of 1 without a copy by x.expand(B, -1, -1, -1)"
        raise ShapeError(message(holds, f"got B = {sizes}", remedy))


def _view(tensor: Tensor, layout: str) -> Tensor:
    """One tensor as (B, H, L, D): a view, unless leading axes cannot be flattened without a copy."""
    rank = tensor.ndim
    if rank == 2:
        return tensor[None, None]
    if rank == 3:
        return tensor.unsqueeze(1)
    if layout == "BLHD":
        tensor = tensor.transpose(-3, -2)
    return tensor if rank == 4 else tensor.reshape(math.prod(tensor.shape[:-3]), *tensor.shape[-3:])


def _check_axes(views: Views) -> Axes:
    """Sizes of 4-D views, checked by axis."""
    batch, heads, queries, head_dim = views.query.shape
    _, kv_heads, keys, key_dim = views.key.shape
    _, value_heads, value_keys, value_dim = views.value.shape
    if key_dim != head_dim:
        seen = f"got D = {head_dim} in query and D = {key_dim} in key"
        raise ShapeError(message("`query` and `key` must have the same width D", seen, "only V may differ from D"))
    if head_dim == 0:
        raise ShapeError(message("the width D must be at least 1", "got D = 0", "a score needs at least one product"))
    if value_keys != keys:
        seen = f"key has S = {keys} rows, value has S = {value_keys}"
        raise ShapeError(message("`key` and `value` must have the same length S", seen, _axes_hint(views)))
    if value_heads != kv_heads:
        seen = f"key has G = {kv_heads} heads, value has G = {value_heads}"
        raise ShapeError(message("`key` and `value` must have the same heads G", seen, _axes_hint(views)))
    if heads < 1 or kv_heads < 1 or heads % kv_heads != 0:
        holds = "the query heads H must be a multiple of the key and value heads G"
        seen = f"query has H = {heads}, key and value have G = {kv_heads}"
        raise ShapeError(message(holds, seen, _axes_hint(views)))
    if batch * heads * queries * max(head_dim, value_dim) >= INDEX_LIMIT:
        seen = f"got B = {batch}, H = {heads}, L = {queries}, D = {head_dim}, V = {value_dim}"
        raise SizeLimit(message("B·H·L·D and B·H·L·V must be below 2^63", seen, "split the batch or the queries"))
    return Axes(batch, heads, kv_heads, queries, keys, head_dim, value_dim)


def _axes_hint(views: Views) -> str:
    """What to do about sizes that may come from the wrong order of axes."""
    if views.rank < 4:
        return "check the order of the axes, (B, L, D)"
    other = "BLHD" if views.layout == "BHLD" else "BHLD"
    return f"if the axes stand as ({', '.join(other)}), say layout={other!r}"


def _broadcast(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Batch and head axes expanded as torch does: equal ranks, sizes of 1 repeated, grouped heads kept."""
    rank = max(q.ndim, k.ndim, v.ndim)
    if min(q.ndim, k.ndim, v.ndim) < 2:
        raise _rank_error(q, k, v)
    q, k, v = (t.reshape((1,) * (rank - t.ndim) + tuple(t.shape)) for t in (q, k, v))
    everyone, pair = (q, k, v), (k, v)
    head_axis = rank - 3 if rank > 3 else rank

    def expand(tensor: Tensor, head_peers: tuple[Tensor, ...]) -> Tensor:
        sizes = [_whole(tensor, axis, head_peers if axis == head_axis else everyone) for axis in range(rank - 2)]
        return tensor.expand(*sizes, -1, -1)

    return expand(q, everyone), expand(k, pair), expand(v, pair)


def _whole(tensor: Tensor, axis: int, peers: tuple[Tensor, ...]) -> int:
    """The size of an axis once a size of 1 follows its peers; sizes that still differ are refused later."""
    size = tensor.shape[axis]
    return size if size != 1 else next((peer.shape[axis] for peer in peers if peer.shape[axis] != 1), 1)
