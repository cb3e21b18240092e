"""How blockwise walks a schedule: groups of query blocks, and for each the runs of keys that it multiplies with.

Turns tiles into few large torch operations; holds no numbers of the call.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from qkv.backends.base import Rows
from qkv.patterns import line
from qkv.patterns.axis import TILE
from qkv.patterns.masks import unpack
from qkv.patterns.schedule import Part, PatternPlan, Schedule

WORKSPACE = 1 << 19  # scores held at a time, over all batch rows and heads of one step
LARGEST_GROUP = 8  # query blocks walked together
SHORTEST_RUN = 4  # neighbouring key blocks worth a step of their own; shorter runs are gathered into one
MOST_WASTE = 1.2  # tiles that a group computes beyond those that its rows need, as a factor
REMEMBERED = 64  # masks of steps kept for the next group, which often looks the same
NO_TILE, FULL_TILE = -2, -1


class Mask(NamedTuple):
    """Which pairs of a step are seen, in two forms of shape (queries, keys)."""

    seen: Tensor  # bool
    limit: Tensor  # inf where seen, else -inf: its minimum with finite scores hides faster than a boolean does


class Step(NamedTuple):
    """Keys that one group multiplies with: slots of the key axis, and which of them each query slot sees (None:
    all).
    """

    keys: Rows
    mask: Mask | None


class Group(NamedTuple):
    """Neighbouring query slots and their steps."""

    rows: slice
    steps: list[Step]


class Block(NamedTuple):
    """A rectangle of batch rows and heads that walk the same compiled plan."""

    batch: slice
    heads: slice
    member: int

    def kv_heads(self, group_size: int) -> slice:
        """The key heads that its query heads read."""
        return slice(self.heads.start // group_size, -(-self.heads.stop // group_size))


def rectangles(plan: PatternPlan, kv_share: int) -> list[list[Block]]:
    """Batch rows and heads cut so that each rectangle has one plan and whole groups of query heads,
    or parts of one group.

    One list a run of batch rows; in it the rectangles from the first head to the last. `kv_share` is H / G.
    """
    result = []
    for b0, b1 in _runs(plan.index, plan.batch):
        row = plan.index[min(b0, len(plan.index) - 1)]
        pieces = [piece for cut in _runs(row[:, None], plan.heads) for piece in _whole_groups(*cut, kv_share)]
        result.append([Block(slice(b0, b1), slice(a, b), int(row[min(a, len(row) - 1)])) for a, b in pieces])
    return result


def _runs(rows: np.ndarray, count: int) -> list[tuple[int, int]]:
    """Maximal ranges of equal neighbours among `count` rows; one range where a single row stands for all."""
    if not count:
        return []
    changes = 1 + np.flatnonzero((rows[1:] != rows[:-1]).any(axis=1))
    return list(pairwise([0, *changes.tolist(), count]))


def _whole_groups(start: int, stop: int, share: int) -> list[tuple[int, int]]:
    """A range of query heads cut into whole key heads' groups and the pieces of groups before and after."""
    first, last = -(-start // share) * share, stop // share * share
    if first >= last:
        middle = start // share * share + share
        return [(start, stop)] if middle >= stop else [(start, middle), (middle, stop)]
    return [(a, b) for a, b in ((start, first), (first, last), (last, stop)) if a < b]


@dataclass(frozen=True, eq=False)
class Walk:
    """One part as groups and steps, for `width` batch rows times heads at a time."""

    part: Part
    width: int
    device: torch.device
    dtype: torch.dtype  # of the scores

    @cached_property
    def _blocks_together(self) -> int:
        """How many query blocks share a step: more while memory and waste allow."""
        schedule, together = self.part.schedule, 1
        while (
            2 * together <= LARGEST_GROUP
            and self.width * 2 * together * TILE * TILE * SHORTEST_RUN <= WORKSPACE
            and _grouped_tiles(schedule, 2 * together) <= MOST_WASTE * schedule.tiles
        ):
            together *= 2
        return together

    def groups(self) -> Iterator[Group]:
        """Every group that sees anything, from the first query to the last."""
        schedule, together = self.part.schedule, self._blocks_together
        most = max(WORKSPACE // (self.width * together * TILE * TILE), 1)
        masks = _MaskTable(schedule, self.device, self.dtype)
        count = self.part.queries.count
        for first in range(0, schedule.rows, together):
            last = min(first + together, schedule.rows)
            rows = slice(first * TILE, min(last * TILE, count))
            columns, kinds = _group_tiles(schedule, first, last)
            if len(columns):
                steps = [self._step(columns[chosen], kinds[:, chosen], masks, rows) for chosen in _cut(columns, most)]
                yield Group(rows, steps)

    def _step(self, columns: np.ndarray, kinds: np.ndarray, masks: _MaskTable, rows: slice) -> Step:
        count = self.part.keys.count
        stop = min((int(columns[-1]) + 1) * TILE, count)
        length = stop - int(columns[-1]) * TILE + (len(columns) - 1) * TILE
        mask = None
        if (kinds != FULL_TILE).any():
            mask = Mask(*(form[: rows.stop - rows.start, :length] for form in masks.mask(kinds)))
        if int(columns[-1]) - int(columns[0]) == len(columns) - 1:
            return Step(slice(int(columns[0]) * TILE, stop), mask)
        slots = (columns[:, None] * TILE + np.arange(TILE)).ravel()[:length]
        return Step(torch.from_numpy(slots).to(self.device), mask)


class _MaskTable:
    """Bit masks of a schedule as tensors, made when a step needs them."""

    def __init__(self, schedule: Schedule, device: torch.device, dtype: torch.dtype) -> None:
        self._schedule, self._device, self._dtype = schedule, device, dtype
        self._made: OrderedDict[bytes, Mask] = OrderedDict()

    def mask(self, kinds: np.ndarray) -> Mask:
        """The mask of a group's tiles: kinds (rows, columns) of mask numbers -> (64 rows, 64 columns)."""
        key = kinds.tobytes() + bytes([kinds.shape[0]])
        if key not in self._made:
            if len(self._made) >= REMEMBERED:
                self._made.popitem(last=False)
            self._made[key] = self._make(kinds)
        return self._made[key]

    def _make(self, kinds: np.ndarray) -> Mask:
        used, place = np.unique(kinds, return_inverse=True)
        tiles = np.zeros((len(used), TILE, TILE), dtype=bool)
        tiles[used == FULL_TILE] = True
        masked = used >= 0
        tiles[masked] = unpack(self._schedule.masks[used[masked]])
        whole = tiles[place.reshape(kinds.shape)].transpose(0, 2, 1, 3)
        rows, columns = kinds.shape
        seen = torch.from_numpy(whole.reshape(rows * TILE, columns * TILE)).to(self._device)
        return Mask(seen, torch.where(seen, float("inf"), float("-inf")).to(self._dtype))


def _group_tiles(schedule: Schedule, first: int, last: int) -> tuple[np.ndarray, np.ndarray]:
    """The key blocks that some row of a group sees, sorted, and for each row what kind of tile it has there."""
    runs = [schedule.runs[schedule.row_ptr[r] : schedule.row_ptr[r + 1]] for r in range(first, last)]
    partial = [schedule.partial[schedule.partial_ptr[r] : schedule.partial_ptr[r + 1]] for r in range(first, last)]
    full = [np.concatenate([np.arange(a, b) for a, b in run] or [np.zeros(0, dtype=np.int64)]) for run in runs]
    columns = np.unique(np.concatenate([*full, *(entry[:, 0] for entry in partial)]))
    kinds = np.full((last - first, len(columns)), NO_TILE, dtype=np.int64)
    for row, (whole, masked) in enumerate(zip(full, partial, strict=True)):
        kinds[row, np.searchsorted(columns, whole)] = FULL_TILE
        kinds[row, np.searchsorted(columns, masked[:, 0])] = masked[:, 1]
    return columns, kinds


def _cut(columns: np.ndarray, most: int) -> list[np.ndarray]:
    """Places in a sorted list of key blocks, cut into steps: long runs by themselves, scattered blocks gathered."""
    edges = np.concatenate([[0], 1 + np.flatnonzero(np.diff(columns) != 1), [len(columns)]])
    runs = [np.arange(a, b) for a, b in pairwise(edges)]
    if len(runs) == 1:
        pieces = runs
    else:
        scattered = [run for run in runs if len(run) < SHORTEST_RUN]
        pieces = [run for run in runs if len(run) >= SHORTEST_RUN] + ([np.concatenate(scattered)] if scattered else [])
    return [piece[at : at + most] for piece in pieces for at in range(0, len(piece), most)]


def _grouped_tiles(schedule: Schedule, together: int) -> int:
    """How many tiles are computed when `together` query blocks share their key blocks."""
    stride = schedule.cols + 1
    run_row = np.repeat(np.arange(schedule.rows), np.diff(schedule.row_ptr)) // together * stride
    partial_row = np.repeat(np.arange(schedule.rows), np.diff(schedule.partial_ptr)) // together * stride
    starts = np.concatenate([run_row + schedule.runs[:, 0], partial_row + schedule.partial[:, 0]])
    stops = np.concatenate([run_row + schedule.runs[:, 1], partial_row + schedule.partial[:, 0] + 1])
    return line.size(line.union(starts, stops)) * together
