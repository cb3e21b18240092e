"""A pool of pages: memory for `size` keys and values each, and how many sequences hold each. Knows no sequence."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from qkv.cache.arguments import Shape
from qkv.cache.memory import blank


class Pool:
    """Pages of keys (G, pages · size, D) and values (G, pages · size, V); a free page is held by nobody."""

    def __init__(self, shape: Shape, pages: int, size: int) -> None:
        self.size = size
        self.holders = [0] * pages
        self.free = list(range(pages))[::-1]  # taken from the end
        self.keys = blank((shape.heads, pages * size, shape.head_dim), shape.dtype, shape.device)
        self.values = blank((shape.heads, pages * size, shape.value_dim), shape.dtype, shape.device)

    @property
    def pages(self) -> int:
        return len(self.holders)

    @property
    def nbytes(self) -> int:
        return self.keys.nbytes + self.values.nbytes

    def take(self) -> int:
        """A free page, now held once."""
        page = self.free.pop()
        self.holders[page] = 1
        return page

    def drop(self, page: int) -> None:
        """One holder less."""
        self.holders[page] -= 1
        if not self.holders[page]:
            self.free.append(page)

    def own(self, page: int) -> int:
        """The page itself where it is held once, else a copy that is."""
        if self.holders[page] == 1:
            return page
        copy, size = self.take(), self.size
        for memory in (self.keys, self.values):
            memory.narrow(1, copy * size, size).copy_(memory.narrow(1, page * size, size))
        self.drop(page)
        return copy

    def recount(self, table: np.ndarray) -> None:
        """Holders as a whole table has them, -1 for no page."""
        self.holders = np.bincount(table[table >= 0], minlength=self.pages).tolist()
        self.free = [page for page in range(self.pages - 1, -1, -1) if not self.holders[page]]

    def moved(self, shape: Shape, pages: int, kept: np.ndarray) -> Pool:
        """A pool of another size that holds the pages `kept`, in this order, and nothing else."""
        other, size = Pool(shape, pages, self.size), self.size
        rows = torch.from_numpy((kept[:, None] * size + np.arange(size)).ravel()).to(self.keys.device)
        for new, old in ((other.keys, self.keys), (other.values, self.values)):
            new.narrow(1, 0, len(rows)).copy_(old.index_select(1, rows))
        return other

    def write(self, rows: np.ndarray, key: Tensor, value: Tensor) -> None:
        """Store keys and values (G, n, D or V) in these rows of the pool."""
        if not len(rows):
            return
        first, count = int(rows[0]), len(rows)
        if int(rows[-1]) - first == count - 1 and bool((np.diff(rows) == 1).all()):
            self.keys.narrow(1, first, count).copy_(key)
            self.values.narrow(1, first, count).copy_(value)
            return
        index = torch.from_numpy(rows).to(self.keys.device)
        self.keys.index_copy_(1, index, key)
        self.values.index_copy_(1, index, value)


def rows_of(table: np.ndarray, size: int, b: Sequence[int] | np.ndarray, position: np.ndarray) -> np.ndarray:
    """The rows of the pool of these positions, each of its sequence."""
    return table[b, position // size].astype(np.int64) * size + position % size
