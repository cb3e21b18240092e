"""Plans for many lengths at the cost of few: what a pattern compiles to for a length is cut out of what it compiles to
for a longer one, wherever that is only a matter of leaving tiles out.
"""

from __future__ import annotations

import numpy as np

from qkv.errors import QkvError
from qkv.patterns.axis import TILE, Natural
from qkv.patterns.few import FEW
from qkv.patterns.leaf import Leaf
from qkv.patterns.masks import ALL_BITS
from qkv.patterns.pattern import Pattern
from qkv.patterns.schedule import Compiled, Part, PatternPlan, Schedule


def plan_of_length(pattern: Pattern, L: int, S: int, *, heads: int, query_offset: int) -> PatternPlan:
    """The plan of a pattern for one batch row: the pairs of `pattern.plan(L, S)`, though perhaps with a bit mask where
    that has a full tile or none.
    """
    if query_offset == 0 and L > FEW and S and _rules_alone(pattern):
        longer_L, longer_S = _rounded(L), _rounded(S)
        if _fits(pattern, heads, longer_L, longer_S):
            cut = _cut_plan(pattern.plan(longer_L, longer_S, heads=heads, query_offset=0), L, S)
            if cut is not None:
                return cut
    return pattern.plan(L, S, heads=heads, query_offset=query_offset)


def _rounded(length: int) -> int:
    """The next power of two of whole tiles."""
    return TILE << (-(-length // TILE) - 1).bit_length()


def _rules_alone(pattern: Pattern) -> bool:
    """Whether each pair depends on its two positions alone, and not on the sizes of the call or its batch row."""
    return all(type(leaf).bind is Leaf.bind for leaf in pattern.expr.leaves())


def _fits(pattern: Pattern, heads: int, L: int, S: int) -> bool:
    """Whether the pattern may be asked about calls of these sizes."""
    try:
        pattern.check(batch=1, heads=heads, queries=L, keys=S, offsets=(0,))
    except QkvError:
        return False
    return True


def _cut_plan(plan: PatternPlan, L: int, S: int) -> PatternPlan | None:
    """The first L queries and S keys of a plan; None where a part has an order of its own."""
    parts = [part for member in plan.members for part in member.parts]
    if not all(isinstance(axis, Natural) for part in parts for axis in (part.queries, part.keys)):
        return None
    members = (tuple(_cut(part.schedule, L, S) for part in member.parts) for member in plan.members)
    axes = Natural(0, L), Natural(0, S)
    return PatternPlan(
        tuple(Compiled(tuple(Part(*axes, one) for one in schedules if one.pairs)) for schedules in members),
        plan.index,
        plan.batch,
        plan.heads,
    )


def _cut(whole: Schedule, L: int, S: int) -> Schedule:
    """The tiles of the first L queries and S keys, and of each only what lies within."""
    rows, cols = -(-L // TILE), -(-S // TILE)
    row_ptr, runs = _first(whole.row_ptr, whole.runs, rows, cols)
    partial_ptr, partial = _first(whole.partial_ptr, whole.partial, rows, cols)
    runs[:, 1] = np.minimum(runs[:, 1], cols)
    masks = _trim(partial, partial_ptr[rows - 1], whole.masks, L - TILE * (rows - 1), S, cols)
    width = np.minimum(TILE * runs, S)
    height = np.minimum(TILE, L - TILE * np.repeat(np.arange(rows), np.diff(row_ptr)))
    bits = np.bitwise_count(masks).sum(axis=1, dtype=np.int64)
    pairs = int((height * (width[:, 1] - width[:, 0])).sum()) + int(bits[partial[:, 1]].sum())
    return Schedule(rows, cols, row_ptr, runs, partial_ptr, partial, masks, pairs, whole.uncertain)


def _first(pointer: np.ndarray, entries: np.ndarray, rows: int, cols: int) -> tuple[np.ndarray, np.ndarray]:
    """The entries (n, 2) of the first block rows that begin before `cols`, in memory of their own."""
    pointer, entries = pointer[: rows + 1], entries[: pointer[rows]]
    kept = entries[:, 0] < cols
    before = np.concatenate([[0], np.cumsum(kept)]).astype(np.int32)
    return before[pointer], np.ascontiguousarray(entries[kept])


def _trim(partial: np.ndarray, last_row: int, masks: np.ndarray, height: int, S: int, cols: int) -> np.ndarray:
    """The masks, with more of them for the tiles of the last block row and column, whose numbers in `partial` change:
    `partial[last_row:]` are those of the last row, which holds `height` queries.
    """
    width = S - TILE * (cols - 1)
    in_last_col = partial[:, 0] == cols - 1 if width < TILE else np.zeros(len(partial), dtype=bool)
    in_last_row = np.arange(len(partial)) >= (last_row if height < TILE else len(partial))
    (edge,) = np.nonzero(in_last_col | in_last_row)
    words = masks[partial[edge, 1]]
    words[in_last_col[edge], width:] = 0
    words[in_last_row[edge]] &= ALL_BITS >> np.uint64(TILE - height)
    partial[edge, 1] = len(masks) + np.arange(len(edge))
    return np.concatenate([masks, words])
