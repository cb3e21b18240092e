"""Checks of the arguments that pattern constructors share."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from qkv.errors import DTypeError, MaskError, ShapeError, UnsupportedError, ValueOutOfRange, message
from qkv.patterns.spans import FAR

INTEGER_TYPES = (torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8)
LARGEST_ID = 2**31 - 1


def whole(name: str, value: object, least: int, remedy: str) -> int:
    """An integer of at least `least`; a bool, a float or a tensor is refused."""
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        seen = f"a tensor of {value.dtype}" if isinstance(value, Tensor) else repr(value)
        raise DTypeError(message(f"`{name}` must be an integer", f"got {seen}", "pass a plain int, for example int(x)"))
    if value < least:
        raise ValueOutOfRange(message(f"`{name}` must be at least {least}", f"got {value}", remedy))
    return int(value)


def length(name: str, value: object, least: int) -> int:
    """A number of tokens or blocks; beyond every length, what stands for unbounded."""
    return min(whole(name, value, least, "it counts tokens or blocks"), FAR)


def seed_value(seed: object) -> int:
    """A 64-bit seed."""
    value = whole("seed", seed, 0, "it is a 64-bit number")
    if value >= 1 << 64:
        raise ValueOutOfRange(message("`seed` must fit 64 bits", f"got {value}", "give a number below 2**64"))
    return value


def one_flag(name: str, value: object) -> bool:
    """True or False, nothing that merely counts as one."""
    if not isinstance(value, bool):
        raise DTypeError(message(f"`{name}` must be True or False", f"got {value!r}", "pass a bool"))
    return value


def integers(name: str, values: object, ndim: tuple[int, ...]) -> np.ndarray:
    """Integers of at least 0 from a sequence or a tensor, as an int64 array of a legal number of axes."""
    if isinstance(values, Tensor):
        if values.dtype not in INTEGER_TYPES:
            raise DTypeError(
                message(f"`{name}` must hold integers", f"its type is {values.dtype}", "convert with .long()")
            )
        array = _numbers(name, values)
    elif isinstance(values, Sequence | np.ndarray) and not isinstance(values, str):
        array = _array(name, values)
        if array.dtype.kind not in "iu":
            raise DTypeError(message(f"`{name}` must hold integers", f"got {values!r}", "list token numbers"))
    else:
        raise DTypeError(message(f"`{name}` must be a sequence or tensor of integers", f"got {values!r}", "list them"))
    if array.ndim not in ndim:
        axes = " or ".join(map(str, ndim))
        raise ShapeError(
            message(
                f"`{name}` must have {axes} axes",
                f"its shape is {list(array.shape)}",
                "see the constructor's docstring",
            )
        )
    array = array.astype(np.int64)
    bad = np.argwhere((array < 0) | (array > LARGEST_ID))
    if len(bad):
        place = tuple(int(k) for k in bad[0])
        raise ValueOutOfRange(
            message(
                f"`{name}` must lie in 0..2**31 - 1",
                f"entry {list(place)} is {int(array[place])}",
                "negative and larger numbers name no token, length or document",
            )
        )
    return array


def _array(name: str, values: Sequence[object] | np.ndarray) -> np.ndarray:
    try:
        return np.asarray(values) if len(values) else np.zeros(0, dtype=np.int64)
    except ValueError:
        raise ShapeError(
            message(f"`{name}` must have rows of one length", f"got {values!r}", "pad them, or give one row")
        ) from None


def booleans(name: str, keep: object, ndim: tuple[int, ...], axes: str) -> np.ndarray:
    """A boolean tensor, True where a pair is kept, copied to the CPU (which waits for a GPU)."""
    if not isinstance(keep, Tensor):
        raise DTypeError(
            message(f"`{name}` must be a boolean tensor", f"got {type(keep).__name__}", "torch.as_tensor(...)")
        )
    if keep.dtype != torch.bool:
        raise MaskError(
            message(
                f"`{name}` must be bool, True where a pair is kept", f"its type is {keep.dtype}", "convert with .bool()"
            )
        )
    if keep.ndim not in ndim:
        raise MaskError(
            message(f"`{name}` must have the axes {axes}", f"its shape is {list(keep.shape)}", "add the missing axes")
        )
    return _numbers(name, keep).copy()


def _numbers(name: str, tensor: Tensor) -> np.ndarray:
    """A tensor's content as an array; one without content, or not laid out in rows, is refused."""
    if tensor.is_meta or tensor.layout is not torch.strided:
        seen = "got a meta tensor" if tensor.is_meta else f"got a tensor of layout {tensor.layout}"
        raise UnsupportedError(message(f"`{name}` must be a dense tensor with content", seen, "make it dense and real"))
    return tensor.detach().cpu().numpy()
