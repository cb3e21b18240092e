"""The two general forms, evaluated tile by tile: a mask given as a tensor and a function of index tensors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from qkv.errors import MaskError, message
from qkv.patterns.leaf import Expr, Extent, Leaf, Sizes, Tabled, Unbound
from qkv.patterns.leaves.keys import digest

Predicate = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True, eq=False)
class DenseMask(Tabled):
    """keep[b, h, row of the call, key of the call]; bool (B or 1, H or 1, L or 1, S or 1)."""

    keep: np.ndarray

    @cached_property
    def key(self) -> tuple[object, ...]:
        return ("mask", self.keep.shape, digest(self.keep))

    def check(self, sizes: Sizes) -> None:
        wanted = {"B": sizes.batch, "H": sizes.heads, "L": sizes.queries, "S": sizes.keys}
        for (axis, size), have in zip(wanted.items(), self.keep.shape, strict=True):
            if have not in (size, 1):
                raise MaskError(
                    message(
                        f"`mask(keep=)` must broadcast to [B={sizes.batch}, H={sizes.heads}, L={sizes.queries},"
                        f" S={sizes.keys}]",
                        f"its axis {axis} has {have} entries (shape {list(self.keep.shape)})",
                        f"give {size} or 1 there (True keeps a pair)",
                    )
                )

    def bind(self, b: int, h: int, extent: Extent) -> Expr:
        place = b if self.batch else 0, h if self.heads else 0
        return PlacedMask(self.keep[place], self.digests[place], extent)

    @cached_property
    def digests(self) -> dict[tuple[int, int], str]:
        """A name for the content of each batch row and head, so that equal ones share a schedule."""
        return {(b, h): digest(part) for b, row in enumerate(self.keep) for h, part in enumerate(row)}


@dataclass(frozen=True, eq=False)
class PlacedMask(Leaf):
    """keep[i - query_start, j - key_start] within the extent, nothing outside; bool (L or 1, S or 1)."""

    keep: np.ndarray
    content: str
    extent: Extent
    light: ClassVar[bool] = False

    @property
    def key(self) -> tuple[object, ...]:
        return ("placed_mask", self.keep.shape, self.content, *self.extent)

    def contains(self, i: np.ndarray, j: np.ndarray) -> np.ndarray:
        row, column = i - self.extent.query_start, j - self.extent.key_start
        inside = (row >= 0) & (row < self.extent.queries) & (column >= 0) & (column < self.extent.keys)
        last = np.array(self.keep.shape) - 1
        if last.min() < 0:
            return inside & False
        return inside & self.keep[np.clip(row, 0, last[0]), np.clip(column, 0, last[1])]

    def marks(self, i: int, start: int, stop: int) -> np.ndarray:
        row, first, last = i - self.extent.query_start, start - self.extent.key_start, stop - self.extent.key_start
        outside = not (0 <= row < self.extent.queries and first >= 0 and last <= self.extent.keys)
        if outside or not self.keep.size:
            return super().marks(i, start, stop)
        kept = self.keep[min(row, len(self.keep) - 1)]
        return kept[first:last] if len(kept) > 1 else np.broadcast_to(kept, stop - start)


@dataclass(frozen=True, eq=False)
class Where(Unbound):
    """fn(b, h, i, j) on int64 index tensors that broadcast to (B, H, L, S); known by the function object."""

    fn: Predicate
    batch_size: int | None = None  # sizes of the axes that the answer was seen to depend on
    head_count: int | None = None

    @property
    def key(self) -> tuple[object, ...]:
        return ("where", self.fn, self.batch_size, self.head_count)

    @property
    def batch(self) -> int | None:
        return self.batch_size

    @property
    def heads(self) -> int | None:
        return self.head_count

    def check(self, sizes: Sizes) -> None:
        self.probe(sizes)

    def probe(self, sizes: Sizes) -> Where:
        """The same function, told by one small call which of b and h its answer depends on."""
        start = min(sizes.offsets, default=0)
        b, h = torch.arange(sizes.batch).view(-1, 1, 1, 1), torch.arange(sizes.heads).view(1, -1, 1, 1)
        i = start + torch.arange(min(sizes.queries, 2)).view(1, 1, -1, 1)
        j = torch.arange(sizes.keys).view(1, 1, 1, -1)
        shape = (1, 1, 1, 1, *ask(self.fn, b, h, i, j).shape)[-4:]
        return Where(self.fn, sizes.batch if shape[0] > 1 else None, sizes.heads if shape[1] > 1 else None)

    def bind(self, b: int, h: int, extent: Extent) -> Expr:
        return PlacedWhere(self.fn, b if self.batch else 0, h if self.heads else 0, extent)


@dataclass(frozen=True, eq=False)
class PlacedWhere(Leaf):
    """A function for one batch row and head; asked only about positions of the extent, which it may index with."""

    fn: Predicate
    b: int
    h: int
    extent: Extent
    light: ClassVar[bool] = False  # the function may hold anything

    @property
    def key(self) -> tuple[object, ...]:
        return ("placed_where", self.fn, self.b, self.h, *self.extent)

    def contains(self, i: np.ndarray, j: np.ndarray) -> np.ndarray:
        queries, keys, query_start, key_start = self.extent
        if not queries or not keys:
            return np.zeros(np.broadcast_shapes(i.shape, j.shape), dtype=bool)
        i = np.clip(i, query_start, query_start + queries - 1)
        j = np.clip(j, key_start, key_start + keys - 1)
        answer = ask(self.fn, *(torch.as_tensor(x) for x in (self.b, self.h, i, j)))
        return np.broadcast_to(answer.numpy(), np.broadcast_shapes(i.shape, j.shape))


def ask(fn: Predicate, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    """Call a user's function and insist on booleans for these indices."""
    answer = fn(b, h, i, j)
    if not isinstance(answer, Tensor) or answer.dtype != torch.bool:
        kind = answer.dtype if isinstance(answer, Tensor) else type(answer).__name__
        raise MaskError(
            message(
                "`where(fn)` must return a boolean tensor, True where i may see j",
                f"it returned {kind}",
                "compare index tensors, for example `lambda b, h, i, j: j <= i`",
            )
        )
    asked = torch.broadcast_shapes(b.shape, h.shape, i.shape, j.shape)
    try:
        fits = torch.broadcast_shapes(answer.shape, asked) == asked
    except RuntimeError:
        fits = False
    if not fits:
        raise MaskError(
            message(
                "`where(fn)` must return one boolean for each index that it is given",
                f"for indices of shape {list(asked)} it returned {list(answer.shape)}",
                "use operations that broadcast over b, h, i and j",
            )
        )
    return answer
