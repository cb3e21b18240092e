"""The cache that keeps only what its pattern may still see: a window, global tokens, a prefix."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import suppress

import numpy as np
import torch
from torch import Tensor

from qkv.backends.base import pattern_plan
from qkv.cache.arguments import Shape, read_shape, read_size
from qkv.cache.pages import NONE, Grown, PagedCache
from qkv.cache.pool import rows_of
from qkv.cache.steps import Stage
from qkv.errors import ValueOutOfRange, message
from qkv.inputs import read_pattern
from qkv.patterns.axis import TILE, Ordered
from qkv.patterns.pattern import Pattern
from qkv.patterns.schedule import Part, PatternPlan
from qkv.problem import Problem

PAGE = 64
NOMINAL = 1 << 16  # where a cache without a greatest length asks whether its pattern lets go of anything
LONG = 16 * PAGE  # rows of a chunk that is looked at for what of it is kept, before it is stored
LOOSE = 4  # pages that may lie idle beside as many as are used
SPARE = 8  # one page in so many is spare when the pool grows


class RollingKVCache(PagedCache):
    """Keys and values that queries of one pattern may still see, in pages of 64 whose memory is used again.

    Made by `RollingKVCache.for_pattern(pattern, ...)`. Positions are those in the whole sequence; memory follows the
    reach of the pattern, not the tokens seen (but for four bytes a page in the table). The backend "cpu" reads pages
    where they lie; every other one gets a copy of length S in which dropped keys are 0.

    >>> from qkv.patterns import sliding_window
    >>> cache = RollingKVCache.for_pattern(sliding_window(100), 1, 2, 8)
    >>> tokens = torch.ones(1, 2, 1000, 8)
    >>> cache.attend(tokens, tokens, tokens).shape, cache.keys.shape
    (torch.Size([1, 2, 1000, 8]), torch.Size([1, 2, 104, 8]))
    """

    def __init__(self, pattern: Pattern, shape: Shape, max_length: int | None) -> None:
        super().__init__(shape, 1, PAGE)
        self.pattern = pattern
        self.max_length = max_length
        self._looked_at = [0] * shape.batch  # the length of each sequence when its pages were last looked at

    @classmethod
    def for_pattern(
        cls,
        pattern: Pattern,
        batch: int,
        heads: int,
        head_dim: int,
        value_dim: int | None = None,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
        max_length: int | None = None,
    ) -> RollingKVCache:
        """A cache for calls of this pattern; max_length bounds a sequence, None does not.

        Warns where the pattern may see every key for ever, since nothing can then be let go.
        """
        shape = read_shape(batch, heads, head_dim, value_dim, dtype, device)
        legal = read_pattern(pattern)
        longest = None if max_length is None else read_size("max_length", max_length, 1)
        length = NOMINAL if longest is None else longest
        if length >= PAGE and _kept(legal, length).all():
            seen = f"after {length:,} tokens {legal} may see keys of every page of {PAGE}"
            remedy = "use KVCache or PagedKVCache, or `&` the pattern with a window"
            warnings.warn(message("a rolling cache should have keys to let go", seen, remedy), stacklevel=2)
        return cls(legal, shape, longest)

    @property
    def keys(self) -> Tensor:
        """A copy of the keys that are kept, (B, G, n, D), from the first position to the last."""
        return self._kept_rows(self._pool.keys)

    @property
    def values(self) -> Tensor:
        """A copy of the values that are kept, (B, G, n, V)."""
        return self._kept_rows(self._pool.values)

    @property
    def key_positions(self) -> Tensor:
        return torch.from_numpy(self._kept_positions()).to(self.device)

    def _chosen(self, pattern: Pattern | None) -> Pattern | None:
        return self.pattern if pattern is None else pattern

    def _check_room(self, stage: Stage) -> None:
        if self.max_length is not None and stage.keys > self.max_length:
            seen = f"sequence {stage.after.index(stage.keys)} would have {stage.keys}"
            holds = f"a sequence must not grow beyond max_length = {self.max_length}"
            raise ValueOutOfRange(message(holds, seen, "truncate it, or make the cache without max_length"))

    def _check_reach(self, pattern: Pattern, problem: Problem, plan: PatternPlan | None = None) -> None:
        if pattern is self.pattern or pattern == self.pattern or NONE not in self._table:
            return
        plan = pattern_plan(problem) if plan is None else plan
        for b in range(self.batch):
            held = self._table[b, : self._blocks(self._lengths[b])] != NONE
            for block in _walked(plan, b):
                if block < len(held) and not held[block]:
                    seen = f"sequence {b} was asked for keys {block * PAGE}..{block * PAGE + PAGE - 1} by {pattern}"
                    holds = f"a query must not see keys that were dropped, as {self.pattern} allows"
                    raise ValueOutOfRange(
                        message(holds, seen, "make the cache for_pattern of all patterns, joined by |")
                    )

    def _take_pages(self, stage: Stage, grown: Grown) -> None:
        needed = self._needed(stage, grown)
        if needed > len(self._pool.free):
            used = self._pool.pages - len(self._pool.free)
            self._resize(used + needed + (used + needed) // SPARE)
        super()._take_pages(stage, grown)

    def _store(self, key: Tensor, value: Tensor, stage: Stage) -> None:
        """Of a long chunk only what is kept of it, so that it takes no more memory."""
        grown = self._grown(stage)
        if stage.rows > LONG:
            kept = [np.flatnonzero(_kept(self.pattern, length)) for length in stage.after]
            first = map(self._blocks, stage.before)
            grown = [blocks[blocks >= least].tolist() for blocks, least in zip(kept, first, strict=True)]
        self._write(key, value, stage, grown)

    def _let_go(self, lengths: Sequence[int]) -> None:
        self._drop_unseen(lengths)
        used = self._pool.pages - len(self._pool.free)
        if self._pool.pages > 2 * used + LOOSE:
            with suppress(MemoryError, RuntimeError):  # torch says the latter where there is no memory
                self._resize(used + used // SPARE + 1)

    def _drop_unseen(self, lengths: Sequence[int]) -> None:
        """Give pages back that no later query can see; they are looked at whenever a sequence has filled another."""
        both = enumerate(zip(lengths, self._looked_at, strict=True))
        filled = [b for b, (now, then) in both if now // PAGE != then // PAGE]
        if not filled:
            return
        self._table, looked_at = self._table.copy(), self._looked_at.copy()
        for b in filled:
            looked_at[b] = lengths[b]
            held = self._table[b, : self._blocks(lengths[b])] != NONE
            for block in np.flatnonzero(held & ~_kept(self.pattern, lengths[b])):
                self._forget(b, int(block))
        self._looked_at = looked_at

    def _cut(self, lengths: Sequence[int]) -> None:
        for b, length in enumerate(lengths):
            missing = _kept(self.pattern, length) & (self._table[b, : self._blocks(length)] == NONE)
            if missing.any():
                seen = f"at {length} the keys from {int(missing.argmax()) * PAGE} on are seen again in sequence {b}"
                holds = "a sequence must not be truncated to where its queries see keys that were dropped"
                raise ValueOutOfRange(message(holds, seen, "truncate by less, or append the sequence again"))
        super()._cut(lengths)

    def _pick(self, index: Sequence[int]) -> None:
        super()._pick(index)
        self._looked_at = [self._looked_at[b] for b in index]

    def _resize(self, pages: int) -> None:
        """Move to a pool of so many pages, which are enough for those in use."""
        kept = np.unique(self._table[self._table != NONE])
        number = np.full(self._pool.pages, NONE, dtype=np.int32)
        number[kept] = np.arange(len(kept), dtype=np.int32)
        self._pool = self._pool.moved(self._shape, pages, kept)
        self._table = np.where(self._table == NONE, NONE, number[self._table]).astype(np.int32)
        self._pool.recount(self._table)

    def _kept_positions(self) -> np.ndarray:
        """int64 (B, n), -1 where a sequence keeps fewer than others."""
        found = []
        for b, length in enumerate(self._lengths):
            blocks = np.flatnonzero(self._table[b, : self._blocks(length)] != NONE)
            position = (blocks[:, None] * PAGE + np.arange(PAGE)).ravel()
            found.append(position[position < length])
        out = np.full((len(found), max(map(len, found), default=0)), -1, dtype=np.int64)
        for row, position in zip(out, found, strict=True):
            row[: len(position)] = position
        return out

    def _kept_rows(self, memory: Tensor) -> Tensor:
        position = np.maximum(self._kept_positions(), 0)
        rows = np.maximum(rows_of(self._table, PAGE, np.arange(len(position))[:, None], position), 0)
        return memory[:, torch.from_numpy(rows).to(self.device)].transpose(0, 1)


def _kept(pattern: Pattern, length: int) -> np.ndarray:
    """Which pages of a sequence of this length hold keys that a query from here on may see; the unfinished one does."""
    pages = -(-length // PAGE)
    kept = np.zeros(pages, dtype=bool)
    for start, stop in pattern.retained(length):
        kept[max(start, 0) // PAGE : -(-min(max(stop, 0), length) // PAGE)] = True
    if length % PAGE:
        kept[-1] = True
    return kept


def _walked(plan: PatternPlan, b: int) -> Iterator[int]:
    """The blocks of 64 keys that a plan reads for one batch row, some more than once."""
    for member in np.unique(plan.index[b % len(plan.index)]):
        for part in plan.members[int(member)].parts:
            yield from _walked_by(part)


def _walked_by(part: Part) -> Iterator[int]:
    schedule = part.schedule
    columns = [np.arange(first, stop) for first, stop in schedule.runs] + [schedule.partial[:, 0]]
    blocks = np.unique(np.concatenate(columns))
    if isinstance(part.keys, Ordered):
        slots = (blocks[:, None] * TILE + np.arange(TILE)).ravel()
        rows = part.keys.index[slots[slots < part.keys.count]]
        blocks = np.unique(rows[rows >= 0] // PAGE)
    yield from map(int, blocks)
