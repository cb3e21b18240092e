"""What is checked of token numbers and positions before any work."""

from __future__ import annotations

import torch
from torch import Tensor

from qkv.errors import DTypeError, ShapeError, ValueOutOfRange, message
from qkv.shapes import describe, values_can_be_seen

INTEGERS = (torch.int64, torch.int32)


def check_ids(name: str, ids: Tensor, *, count: int, longest: int | None = None) -> None:
    """Refuse what are not token numbers (B, L), L at least 1, in 0 .. count - 1, and at most `longest` in a row.

    The error calls them `name`. The look at the numbers is left out where there are none to look at: under a compiler,
    in a transform, and on the meta device.
    """
    if not isinstance(ids, Tensor) or ids.dtype not in INTEGERS:
        seen = f"got {ids.dtype}" if isinstance(ids, Tensor) else f"got {type(ids).__name__}"
        raise DTypeError(message(f"`{name}` must be an int64 or int32 tensor", seen, "tokenize the text first"))
    if ids.ndim != 2 or ids.shape[1] == 0:
        holds = f"`{name}` must be (B, L) with at least one token"
        raise ShapeError(message(holds, f"got {tuple(ids.shape)}", "add the batch axis"))
    if longest is not None and ids.shape[1] > longest:
        holds = f"`{name}` must be at most {longest} tokens long"
        raise ShapeError(message(holds, f"got L = {ids.shape[1]}", "cut the text into windows"))
    check_range(name, ids, count, "use the tokenizer of this model")


def check_positions(positions: Tensor, *, count: int | None = None) -> None:
    """Refuse what are not positions, integers (L,) or (B, L); those beyond 0 .. count - 1 too, where count is given."""
    if not isinstance(positions, Tensor) or positions.dtype not in INTEGERS or positions.ndim not in {1, 2}:
        holds = "`positions` must be int64 or int32, (L,) or (B, L)"
        raise DTypeError(message(holds, f"got {describe(positions)}", "torch.arange(L) counts from 0"))
    if count is not None:
        check_range("positions", positions, count, "cut the text into windows, or make the table longer")


def check_range(name: str, numbers: Tensor, count: int, remedy: str) -> None:
    """Refuse numbers beyond 0 .. count - 1, where they can be seen."""
    if not numbers.numel() or not values_can_be_seen(numbers):
        return
    low, high = (int(bound) for bound in numbers.aminmax())
    if not 0 <= low <= high < count:
        raise ValueOutOfRange(message(f"`{name}` must lie in 0 .. {count - 1}", f"got {low} .. {high}", remedy))
