"""Plans cut out of longer ones hold the pairs of the pattern, and nothing beyond the call."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

import qkv
from qkv.patterns import cropped
from qkv.patterns.axis import Ordered
from qkv.patterns.cropped import plan_of_length
from qkv.patterns.schedule import Compiled, PatternPlan, Schedule

SIZES = [(1, 1), (17, 17), (63, 63), (64, 64), (65, 65), (100, 100), (130, 70), (70, 130), (129, 320), (200, 20)]
CUT = (
    "full()", "causal()", "causal(align='top_left')", "causal() & window(100)", "window(30, 70)",
    "causal() | prefix(70)", "causal() - window(20)", "~window(30, 60)", "block_local(96)", "random_blocks(2, 64, 3)",
    "per_head([causal(), window(9)])",
)  # fmt: skip
WHOLE = (
    "strided(16)",
    "fixed(32)",
    "longformer(64, [0, 5, 200])",
    "window(5) | global_tokens(3)",
    "dilated(9, dilation=5)",
)


def drawn(schedule: Schedule) -> np.ndarray:
    """How often each pair of slots is in a schedule, tiles in full."""
    seen = np.zeros((schedule.rows * 64, schedule.cols * 64), dtype=int)
    for r, (start, stop) in enumerate(itertools.pairwise(schedule.row_ptr)):
        for first, last in schedule.runs[start:stop]:
            seen[64 * r : 64 * r + 64, 64 * first : 64 * last] += 1
    bit = np.arange(64, dtype=np.uint64)[:, None]
    for r, (start, stop) in enumerate(itertools.pairwise(schedule.partial_ptr)):
        for col, mask in schedule.partial[start:stop]:
            words = schedule.masks[mask] >> bit & np.uint64(1)
            seen[64 * r : 64 * r + 64, 64 * col : 64 * col + 64] += words.astype(int)
    return seen


def pairs_of(member: Compiled, L: int, S: int) -> np.ndarray:
    """How often each pair of a call is in the parts of a member."""
    found = np.zeros((L, S), dtype=int)
    for part in member.parts:
        rows, keys = (
            axis.index if isinstance(axis, Ordered) else np.arange(axis.count) for axis in (part.queries, part.keys)
        )
        seen = drawn(part.schedule)[: len(rows), : len(keys)][np.ix_(rows >= 0, keys >= 0)]
        assert seen.sum() == part.schedule.pairs
        found[np.ix_(rows[rows >= 0], keys[keys >= 0])] += seen
    return found


@pytest.mark.parametrize("text", CUT + WHOLE)
def test_pairs_are_those_of_the_pattern(text: str) -> None:
    pattern = qkv.parse(text)
    heads = 2 if "per_head" in text else 1
    for (L, S), offset in itertools.product(SIZES, (0, 3)):
        plan = plan_of_length(pattern, L, S, heads=heads, query_offset=offset)
        want = pattern.to_dense(L, S, heads=heads, query_offset=offset).reshape(-1, L, S)
        for member, seen in zip(plan.index[0], want, strict=True):
            found = pairs_of(plan.members[member], L, S)
            assert np.array_equal(found, seen.numpy()), (L, S, offset)
        assert plan.pairs == int(want.sum())


@pytest.mark.parametrize("text", CUT)
def test_schedules_are_as_the_core_takes_them(text: str) -> None:
    """Types, memory in one piece, and no bit beyond the last query or key."""
    for L, S in SIZES:
        plan = plan_of_length(qkv.parse(text), L, S, heads=2, query_offset=0)
        for one in (part.schedule for member in plan.members for part in member.parts):
            arrays = one.row_ptr, one.runs, one.partial_ptr, one.partial
            assert all(a.dtype == np.int32 and a.flags.c_contiguous for a in arrays)
            assert one.masks.dtype == np.uint64 and one.masks.flags.c_contiguous
            assert (one.rows, one.cols) == (-(-L // 64), -(-S // 64))
            assert not len(one.runs) or one.runs.max() <= one.cols
            rows = np.repeat(np.arange(one.rows), np.diff(one.partial_ptr))
            for row, (col, mask) in zip(rows, one.partial, strict=True):
                height, width = min(64, L - 64 * row), min(64, S - 64 * col)
                assert not one.masks[mask][width:].any()
                assert not (one.masks[mask] >> np.uint64(height - 1) >> np.uint64(1)).any()


def test_many_lengths_compile_few(monkeypatch: pytest.MonkeyPatch) -> None:
    """One plan for each power of two; what depends on more than two positions is compiled for its own length."""
    asked: list[tuple[int, ...]] = []
    plan = cropped.Pattern.plan

    def counted(self: cropped.Pattern, L: int, S: int, **more: int) -> PatternPlan:
        asked.append((L, S, more["query_offset"]))
        return plan(self, L, S, **more)

    monkeypatch.setattr(cropped.Pattern, "plan", counted)
    for length in (65, 100, 128, 129, 256, 16):
        plan_of_length(qkv.causal(), length, length, heads=3, query_offset=0)
    assert asked == [(128, 128, 0)] * 3 + [(256, 256, 0)] * 2 + [(16, 16, 0)]
    asked.clear()
    keep = torch.ones(100, 100) > 0
    for pattern in (
        qkv.mask(keep),
        qkv.documents([0] * 100),
        qkv.neighborhood((10, 10), 3),
        qkv.where(lambda b, h, i, j: j <= i),
    ):
        plan_of_length(pattern, 100, 100, heads=1, query_offset=0)
    plan_of_length(qkv.causal(), 100, 150, heads=1, query_offset=50)
    assert asked == [(100, 100, 0)] * 4 + [(100, 150, 50)]
