"""What the caches in pages share: a table that says which page of a pool holds which keys of a sequence."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from qkv.backends.base import Pages
from qkv.cache.arguments import Shape
from qkv.cache.base import Cache
from qkv.cache.memory import scattered
from qkv.cache.pool import Pool, rows_of
from qkv.cache.steps import Stage
from qkv.problem import Tensors

NONE = -1  # in a table: no page

Grown = list[Sequence[int]]  # for each sequence the pages, counted from its start, that an append takes for it


class Lent(NamedTuple):
    """A pool for B batch rows, (B, G, pages · size, D or V), with its table, and what they are views of."""

    keys: Tensor
    values: Tensor
    pages: Pages
    pool: Pool
    table: np.ndarray


class PagedCache(Cache):
    """Keys in pages of one pool for all sequences; equal beginnings may be shared until one of them is written to."""

    def __init__(self, shape: Shape, pages: int, size: int) -> None:
        super().__init__(shape)
        self._pool = Pool(shape, pages, size)
        self._table = np.full((shape.batch, 1), NONE, dtype=np.int32)  # (B, n), at least a page wide
        self._form = torch.empty((), dtype=shape.dtype, device=shape.device)
        self._lent: Lent | None = None

    def __getstate__(self) -> dict[str, Any]:
        """As that of all caches, and without views: in a copy they would be views of nothing."""
        return {**super().__getstate__(), "_lent": None}

    def _put_back(self, held: dict[str, Any]) -> None:
        super()._put_back(held)
        self._pool.recount(self._table)

    @property
    def page_size(self) -> int:
        """How many keys a page holds."""
        return self._pool.size

    @property
    def table(self) -> Tensor:
        """The page of each run of page_size keys of a sequence, int32 (B, n); -1 where there is none."""
        return torch.from_numpy(self._table[:, : self._blocks(self.length)].copy())

    @property
    def nbytes(self) -> int:
        return self._pool.nbytes + self._table.nbytes

    def _blocks(self, length: int) -> int:
        """How many pages so many keys touch."""
        return -(-length // self._pool.size)

    def _logical(self, key: Tensor, value: Tensor, stage: Stage) -> tuple[Tensor, Tensor]:
        if not any(stage.before):  # nothing is held yet: what is given is all there is
            return key.narrow(2, 0, stage.keys), value.narrow(2, 0, stage.keys)
        rows = self._shape.batch, self._shape.heads, stage.keys
        return self._form.expand(*rows, self._shape.head_dim), self._form.expand(*rows, self._shape.value_dim)

    def _grow(
        self, key: Tensor, value: Tensor, stage: Stage, tensors: Tensors, in_place: bool
    ) -> tuple[Tensors, Pages | None]:
        if not any(stage.before):
            self._store(key, value, stage)
            keys, values = self._logical(key, value, stage)
            return tensors._replace(key=keys, value=values), None
        self._write(key, value, stage)
        if in_place:
            keys, values, pages = self._lend()[:3]
            return tensors._replace(key=keys, value=values), pages
        keys, values = self._gathered(stage.keys)
        return tensors._replace(key=keys, value=values), None

    def _lend(self) -> Lent:
        """The pool and the table as an engine takes them, made anew only where either is another one than before."""
        lent, pool = self._lent, self._pool
        if lent is None or lent.pool is not pool or lent.table is not self._table:
            keys, values = (memory.expand(self.batch, -1, -1, -1) for memory in (pool.keys, pool.values))
            lent = Lent(keys, values, Pages(torch.from_numpy(self._table), pool.size), pool, self._table)
            self._lent = lent
        return lent

    def _store(self, key: Tensor, value: Tensor, stage: Stage) -> None:
        self._write(key, value, stage)

    def _settled(self, stage: Stage) -> bool:
        """Whether one row a sequence goes to pages that are there and that nobody shares."""
        if stage.rows != 1:
            return False
        size, table, holders = self._pool.size, self._table, self._pool.holders
        for b, start in enumerate(stage.before):
            page = table[b, start // size] if start % size else NONE
            if page == NONE or holders[page] != 1:
                return False
        return True

    def _write(self, key: Tensor, value: Tensor, stage: Stage, grown: Grown | None = None) -> None:
        """Store the rows of these pages and of those that are there; None: all rows."""
        if not self._settled(stage):
            self._take_pages(stage, self._grown(stage) if grown is None else grown)
        size, table = self._pool.size, self._table
        if stage.rows == 1 and len(stage.after) == 1 and stage.grows:
            at = stage.before[0]
            place = int(table[0, at // size]) * size + at % size
            self._pool.keys.narrow(1, place, 1).copy_(key[0])
            self._pool.values.narrow(1, place, 1).copy_(value[0])
        elif stage.grows:
            b, row, position = scattered(stage)
            rows = rows_of(table, size, b.numpy(), position.numpy())
            if grown is not None:
                kept = np.flatnonzero(rows >= 0)
                b, row, rows = b[kept], row[kept], rows[kept]
            self._pool.write(rows, *(flat(tensor, b, row) for tensor in (key, value)))

    def _grown(self, stage: Stage) -> Grown:
        """All pages that the sequences grow into."""
        both = zip(stage.before, stage.after, strict=True)
        return [range(self._blocks(start), self._blocks(stop)) for start, stop in both]

    def _take_pages(self, stage: Stage, grown: Grown) -> None:
        """Pages to grow into; one that others share is copied before it is written to."""
        table, pool, size = self._wider(self._blocks(stage.keys)), self._pool, self._pool.size
        for b, (start, stop) in enumerate(zip(stage.before, stage.after, strict=True)):
            if start % size and start != stop:
                table[b, start // size] = pool.own(int(table[b, start // size]))
            for block in grown[b]:
                table[b, block] = pool.take()
        self._table = table

    def _needed(self, stage: Stage, grown: Grown) -> int:
        """How many free pages an append takes, copies of shared ones included."""
        size, needed = self._pool.size, sum(map(len, grown))
        leaving: dict[int, int] = {}
        for b, (start, stop) in enumerate(zip(stage.before, stage.after, strict=True)):
            if start % size and start != stop:
                page = int(self._table[b, start // size])
                if self._pool.holders[page] - leaving.get(page, 0) > 1:
                    leaving[page] = leaving.get(page, 0) + 1
                    needed += 1
        return needed

    def _wider(self, blocks: int) -> np.ndarray:
        """A copy of the table, of at least so many columns; where it grows, twice as many as before."""
        rows, columns = self._table.shape
        if blocks <= columns:
            return self._table.copy()
        wider = np.full((rows, max(blocks, 2 * columns)), NONE, dtype=np.int32)
        wider[:, :columns] = self._table
        return wider

    def _gathered(self, keys: int) -> tuple[Tensor, Tensor]:
        """Keys (B, G, S, D) and values of all sequences, copied out of their pages; 0 where a page was dropped."""
        size = self._pool.size
        table = self._table[:, : self._blocks(keys)]
        rows = (np.maximum(table, 0)[:, :, None].astype(np.int64) * size + np.arange(size)).reshape(self.batch, -1)
        index = torch.from_numpy(rows[:, :keys]).to(self.device)
        found = [memory[:, index].transpose(0, 1) for memory in (self._pool.keys, self._pool.values)]
        if (table == NONE).any():
            held = np.repeat(table != NONE, size, axis=1)[:, :keys]
            empty = torch.from_numpy(~held).to(self.device)[:, None, :, None]
            found = [tensor.masked_fill(empty, 0.0) for tensor in found]
        return found[0], found[1]

    def _cut(self, lengths: Sequence[int]) -> None:
        self._table = self._table.copy()
        for b, length in enumerate(lengths):
            for block in range(self._blocks(length), self._blocks(self._lengths[b])):
                self._forget(b, block)

    def _forget(self, b: int, block: int) -> None:
        """Let go of one page of one sequence, in a table that is new."""
        page = int(self._table[b, block])
        if page != NONE:
            self._pool.drop(page)
            self._table[b, block] = NONE

    def _pick(self, index: Sequence[int]) -> None:
        self._table = self._table[np.array(index, dtype=np.int64)]
        self._pool.recount(self._table)


def flat(tensor: Tensor, b: Tensor, row: Tensor) -> Tensor:
    """Rows of a chunk (B, G, n, D), each of its sequence, as (G, rows, D)."""
    if len(tensor) == 1 and len(row) == tensor.shape[2]:
        return tensor[0]
    device = tensor.device
    return tensor[b.to(device), :, row.to(device)].transpose(0, 1)
