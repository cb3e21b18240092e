"""How near a call comes to what the machine does at most: its products to a loop of products, its reading to a loop
that only reads.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import peak
import torch
from gate import Ready
from registry import Case, Data
from timing import Pair, interleave, median, ratio, timed
from torch import Tensor


class Share(NamedTuple):
    """The loop, its operations or bytes a second, and what share of that rate ours and theirs reach."""

    loop: str
    rate: float
    ours: float
    theirs: float


def of_products(
    dtype: torch.dtype, threads: int, work: tuple[float, float], seconds: tuple[float, float]
) -> Share | None:
    """Useful operations a second of ours and theirs over those of the fastest loop; None without a compiler."""
    most = peak.most(dtype, threads)
    if most is None:
        return None
    return Share(*most, *(each / taken / most.rate for each, taken in zip(work, seconds, strict=True)))


def of_reading(case: Case, data: Data, mine: Ready, theirs: float, *, budget: float, least: int) -> Share | None:
    """The loop reads what the call must read, in turn with it, by thread CPU time; `theirs` in seconds."""
    pieces = visible(case, data)
    read = peak.reader(pieces)
    if read is None:
        return None
    first = Pair(timed(mine.run)[0], timed(read)[0])
    pairs = interleave(mine.run, read, first, budget=budget, least=least, most=41)
    seconds = median([pair.theirs for pair in pairs]).cpu
    return Share("read loop", sum(piece.nbytes for piece in pieces) / seconds, ratio(pairs), seconds / theirs)


def visible(case: Case, data: Data) -> Sequence[Tensor]:
    """From the first to the last key that a query of a batch row sees: keys and values of each head, as they lie."""
    axes = case.shape(data.tokens)
    seen = case.pattern(data.tokens).to_dense(axes.queries, data.tokens, batch=axes.batch)
    seen = seen.reshape(-1, axes.queries, data.tokens).any(1).expand(axes.batch, data.tokens)
    found = []
    for row, keys in enumerate(seen):
        at = keys.nonzero()[:, 0]
        if len(at):
            near = slice(int(at[0]), int(at[-1]) + 1)
            found += [tensor[row, head, near] for tensor in (data.key, data.value) for head in range(axes.kv_heads)]
    return found
