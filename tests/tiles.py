"""Plans against rules: the tiles of all parts together hold each pair of the rule once, and nothing else."""

from __future__ import annotations

import numpy as np

from qkv.patterns.axis import BEYOND, PADDING, ROW
from qkv.patterns.schedule import Compiled, Part
from strategies import Case, Sizes, truth

TILE = 64
BITS = np.arange(TILE, dtype=np.uint64)


def bits_of(words: np.ndarray) -> np.ndarray:
    """64 words, one a key, as bool (query, key)."""
    return (words[:, None] >> BITS & np.uint64(1)).astype(bool).T


def lay(part: Part, counts: np.ndarray, start: tuple[int, int]) -> int:
    """Add a part's tiles to the counts (L, S) and return how many pairs they hold; each tile is looked at in full."""
    made, added = part.schedule, 0
    kinds = part.queries.kinds(), part.keys.kinds()
    rows, columns = (
        axis.positions(np.arange(axis.blocks)) - first
        for axis, first in zip((part.queries, part.keys), start, strict=True)
    )
    assert (made.rows, made.cols) == (part.queries.blocks, part.keys.blocks)
    assert made.row_ptr[-1] == len(made.runs) and made.partial_ptr[-1] == len(made.partial)
    for r in range(made.rows):
        tiles = [(c, None) for a, b in made.runs[made.row_ptr[r] : made.row_ptr[r + 1]] for c in range(a, b)]
        tiles += [(c, made.masks[m]) for c, m in made.partial[made.partial_ptr[r] : made.partial_ptr[r + 1]]]
        assert len({c for c, _ in tiles}) == len(tiles)
        for c, words in tiles:
            worse = np.minimum(kinds[0][r][:, None], kinds[1][c][None, :])
            if words is None:
                assert (worse != PADDING).all(), "a full tile holds padding"
                bits = worse != BEYOND
            else:
                bits = bits_of(words)
                assert not (bits & (worse != ROW)).any(), "a mask has bits outside the rows"
                assert bits.any(), "an empty tile is kept"
                assert not (bits == (worse != BEYOND)).all(), "a full tile is kept as a mask"
            query, key = np.nonzero(bits)
            np.add.at(counts, (rows[r][query], columns[c][key]), 1)
            added += len(query)
    return added


def check(compiled: Compiled, want: np.ndarray, start: tuple[int, int]) -> None:
    """Parts are disjoint, cover the pairs, and count them."""
    counts = np.zeros(want.shape, dtype=np.int64)
    for part in compiled.parts:
        held = lay(part, counts, start)
        assert part.schedule.pairs == held > 0
        assert part.schedule.tiles <= part.schedule.rows * part.schedule.cols
    np.testing.assert_array_equal(counts, want)
    assert compiled.pairs == want.sum()


def check_plan(case: Case, sizes: Sizes, key_start: int = 0) -> int:
    """Every batch row and head of a call; the greatest number of parts."""
    want = truth(case, sizes, key_start).numpy()
    plan = case.pattern.plan(
        sizes.queries,
        sizes.keys,
        batch=sizes.batch,
        heads=sizes.heads,
        query_offset=sizes.offsets,
        key_offset=key_start,
    )
    for b in range(sizes.batch):
        for h in range(sizes.heads):
            member = plan.members[plan.index[b % plan.index.shape[0], h % plan.index.shape[1]]]
            check(member, want[b, h], (sizes.offsets[b % len(sizes.offsets)], key_start))
    assert plan.pairs == want.sum()
    assert plan.parts == max((len(member.parts) for member in plan.members), default=0)
    return plan.parts
