"""The plan of a call: each batch row and head that means something of its own is compiled, or remembered."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np

from qkv.patterns.expr import specialise
from qkv.patterns.few import FEW, compile_few, look
from qkv.patterns.leaf import Expr, Extent, Sizes
from qkv.patterns.schedule import Compiled, PatternPlan, PlanCache


def plan_pattern(expr: Expr, sizes: Sizes, key_starts: Sequence[int]) -> PatternPlan:
    """Compile an expression for a call; batch rows and heads that mean the same share one result."""
    by_batch, by_head = expr.axes
    by_batch = by_batch or len(set(sizes.offsets)) > 1 or len(set(key_starts)) > 1
    rows, columns = sizes.batch if by_batch else min(sizes.batch, 1), sizes.heads if by_head else min(sizes.heads, 1)
    index = np.zeros((rows, columns), dtype=np.int32)
    members: list[Compiled] = []
    known: dict[tuple[object, ...], int] = {}
    for b in range(rows):
        start, key_start = sizes.offsets[b % len(sizes.offsets)], key_starts[b % len(key_starts)]
        extent = Extent(sizes.queries, sizes.keys, start, key_start)
        for h in range(columns):
            bound = specialise(expr, b, h, extent)
            key = (bound.key, extent) if rows * columns > 1 else ()  # the key of what holds a tensor has its price
            if key not in known:
                known[key] = len(members)
                members.append(compiled(bound, extent))
            index[b, h] = known[key]
    return PatternPlan(tuple(members), index, sizes.batch, sizes.heads)


def compiled(expr: Expr, extent: Extent) -> Compiled:
    """The parts of a specialised expression; what few queries see is cheaper to list anew than to keep."""
    if extent.queries > FEW:
        return _CACHE.compiled(expr, extent)
    if not extent.queries or not extent.keys:
        return Compiled(())
    sights = look(expr, extent)
    if any(sight.doubt for sight in sights):
        return _FEW.compiled(expr, extent, partial(compile_few, sights=sights))
    return compile_few(expr, extent, sights)


_CACHE = PlanCache()
_FEW = PlanCache(share=8)  # a plan for each step of decoding must not drive out those of whole passes
