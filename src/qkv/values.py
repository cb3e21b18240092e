"""What a check asks of the numbers in a tensor. Those in the processor's memory are read by numpy alone: torch's own
operations take its threads for more than 32,768 numbers, and those are gone in a forked child, which waits for them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

CHUNK = 1 << 18  # numbers at a time: a second look finds them in the cache
NARROW = (torch.float16, torch.bfloat16)
SIGN = 0x8000  # of a 16-bit float


def bounds(tensor: Tensor) -> tuple[float, float]:
    """The least and the greatest of at least one number; a NaN among them is in both.

    >>> bounds(torch.tensor([2.0, -1.0, 0.5]))
    (-1.0, 2.0)
    """
    numbers = _once(tensor)
    if not numbers.is_cpu:
        least, most = numbers.aminmax()
        return float(least.item()), float(most.item())
    if tensor.dtype in NARROW:
        return _narrow_bounds(numbers)
    found = [(piece.min(), piece.max()) for piece in _pieces(numbers.numpy())]
    return float(np.min([least for least, _ in found])), float(np.max([most for _, most in found]))


def greatest(tensor: Tensor) -> float:
    """The greatest of at least one number, NaN where there is one.

    >>> greatest(torch.tensor([2.0, -1.0, 0.5]))
    2.0
    """
    numbers = _once(tensor)
    if not numbers.is_cpu or tensor.dtype in NARROW:
        return bounds(tensor)[1]
    return float(np.max([piece.max() for piece in _pieces(numbers.numpy())]))


def all_equal(tensor: Tensor, *wanted: float) -> bool:
    """Whether every number is one of `wanted`; the first that is not ends the search.

    >>> all_equal(torch.tensor([0.0, 1.0, 1.0]), 0.0, 1.0)
    True
    """
    numbers = _once(tensor)
    if not numbers.is_cpu:
        return bool(torch.isin(numbers, torch.tensor(wanted, dtype=numbers.dtype, device=numbers.device)).all())
    if tensor.dtype in NARROW:  # by their bits, and both zeros
        signed = (*wanted, *(-number for number in wanted if number == 0.0))
        values = np.array([_bits(number, tensor.dtype) for number in signed], dtype=np.int16)
        return all(_each_in(piece, values) for piece in _pieces(numbers.view(torch.int16).numpy()))
    return all(_each_in(piece, np.array(wanted)) for piece in _pieces(numbers.numpy()))


def beyond(tensor: Tensor, limit: float) -> bool:
    """Whether a finite number lies beyond ±limit.

    >>> beyond(torch.tensor([1.0, -5.0, -torch.inf]), 4.0)
    True
    """
    numbers = _once(tensor)
    if not numbers.is_cpu:
        return bool(((numbers.abs() > limit) & numbers.isfinite()).any())
    return any(bool(((np.abs(piece) > limit) & np.isfinite(piece)).any()) for piece in _pieces(numbers.numpy()))


def _once(tensor: Tensor) -> Tensor:
    """The numbers without a graph, those of broadcast axes once."""
    numbers = tensor.detach()
    for axis, stride in enumerate(numbers.stride()):
        if stride == 0:
            numbers = numbers.narrow(axis, 0, min(1, numbers.shape[axis]))
    return numbers


def _pieces(array: np.ndarray) -> Iterator[np.ndarray]:
    """The numbers some at a time, halved where they lie furthest apart."""
    if array.size <= CHUNK:
        yield array
        return
    axis = max(range(array.ndim), key=lambda n: abs(array.strides[n]) if array.shape[n] > 1 else -1)
    for half in np.array_split(array, 2, axis):
        yield from _pieces(half)


def _each_in(piece: np.ndarray, values: np.ndarray) -> bool:
    found = piece == values[0]
    for value in values[1:]:
        found |= piece == value
    return bool(found.all())


def _narrow_bounds(numbers: Tensor) -> tuple[float, float]:
    """By their bits, which numpy has integers for: as signed ones they rise from 0 up, as unsigned ones fall from -0
    down; a NaN comes beyond either infinity.
    """
    signed = numbers.view(torch.int16).numpy()
    top = max(int(piece.max()) for piece in _pieces(signed))
    bottom = max(int(piece.max()) for piece in _pieces(signed.view(np.uint16)))
    if top < 0:  # all are negative
        top = min(int(piece.min()) for piece in _pieces(signed.view(np.uint16)))
    if bottom < SIGN:  # none is
        bottom = min(int(piece.min()) for piece in _pieces(signed))
    least, most = (_number(bits, numbers.dtype) for bits in (bottom, top))
    if math.isnan(least) or math.isnan(most):
        return math.nan, math.nan
    return least, most


def _number(bits: int, dtype: torch.dtype) -> float:
    """The 16-bit float of these bits."""
    return float(torch.tensor(bits - 2 * SIGN if bits >= SIGN else bits, dtype=torch.int16).view(dtype).item())


def _bits(number: float, dtype: torch.dtype) -> int:
    """The bits of a 16-bit float."""
    return int(torch.tensor(number, dtype=dtype).view(torch.int16).item())
