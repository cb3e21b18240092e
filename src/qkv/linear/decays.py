"""All pairs of tokens inside chunks, and what each token has lost since its chunk began and will lose until it ends.

Gates are only ever added, never subtracted: G_i - G_j is the sum of the gates after j up to i. So nothing overflows, no
digits cancel, and a gate of -inf cuts what lies on its two sides apart without a NaN, in values and in gradients.

Axes: n chunks of C tokens, as (..., n, C, D); q and k may have one group where the gates have G.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from qkv.linear.sequences import decay, lowest


class Pairs(NamedTuple):
    """What chunks of q and k say by themselves, before any state is known."""

    weights: Tensor  # (..., C, C) q_i · k_j with the decay between them, 0 for j > i
    overlaps: Tensor | None  # (..., C, C) the same of k_i · k_j, which holds below the diagonal only
    reading: Tensor  # (..., C, D) q with the decay since the chunk began
    erasing: Tensor  # (..., C, D) k with the same
    writing: Tensor  # (..., C, D) k with the decay until the chunk ends
    keeping: Tensor | None  # (..., 1, 1) or (..., D, 1): the decay of the state over the chunk

    def each(self, change: Callable[[Tensor], Tensor]) -> Pairs:
        """All that there are, changed."""
        overlaps, keeping = (None if x is None else change(x) for x in (self.overlaps, self.keeping))
        reading, erasing, writing = (change(x) for x in (self.reading, self.erasing, self.writing))
        return Pairs(change(self.weights), overlaps, reading, erasing, writing, keeping)


def plain_pairs(q: Tensor, k: Tensor, *, overlaps: bool) -> Pairs:
    """Without gates."""
    return Pairs((q @ k.mT) * _lower(q), k @ k.mT if overlaps else None, q, k, k, None)


def scalar_pairs(q: Tensor, k: Tensor, gate: Tensor, *, overlaps: bool) -> Pairs:
    """With one gate a token, (..., n, C)."""
    gate = gate.clamp(min=lowest(gate.dtype))  # a decay of 0 all the same, and 0 · gate is 0
    since = decay(gate.cumsum(-1)).unsqueeze(-1)
    after = _lower(q, -1)  # [l, j]: l comes after j
    between = decay((gate.unsqueeze(-1) * after).cumsum(-2)) * _lower(q)
    until = between[..., -1, :].unsqueeze(-1)
    return Pairs(
        (q @ k.mT) * between,
        (k @ k.mT) * between if overlaps else None,
        q * since,
        k * since if overlaps else k,
        k * until,
        since[..., -1:, :],
    )


def vector_pairs(q: Tensor, k: Tensor, gate: Tensor, *, overlaps: bool) -> Pairs:
    """With one gate a key channel, (..., n, C, D); C is a power of two.

    The decay stands inside the sum over channels. Of two neighbouring blocks of h tokens, i of the later and j of the
    earlier meet at the border: exp(from the border up to i) · exp(after j up to the border), both at most 1, so that
    their pairs are one product of matrices. For h = 1, 2, 4, .. C / 2 these are all pairs, at log2(C) exps a number.
    """
    since, until, total = gate, torch.zeros_like(gate), gate  # within blocks of h tokens, and over each
    left = [q, k] if overlaps else [q]
    shape = torch.broadcast_shapes(q.shape, gate.shape)
    made = [(x * k).sum(-1).expand(shape[:-1]).unsqueeze(-1).unsqueeze(-1) for x in left]  # (..., C / h, h, h)
    h = 1
    while h < gate.shape[-2]:
        (_, late), (early, _) = (_halves(x, h) for x in (since, until))
        first, second = total.unflatten(-2, (-1, 2)).unbind(-2)
        met = decay(early) * _halves(k, h)[0]
        fallen = decay(late)
        made = [_grown(one, (fallen * _halves(x, h)[1]) @ met.mT) for one, x in zip(made, left, strict=True)]
        since = _joined(since, h, later=first)
        until = _joined(until, h, earlier=second)
        total, h = first + second, 2 * h
    weights, *below = (x.squeeze(-3) for x in made)
    since, until = decay(since), decay(until)
    erasing = k * since if overlaps else k
    return Pairs(weights, below[0] if overlaps else None, q * since, erasing, k * until, decay(total).mT)


def _lower(x: Tensor, diagonal: int = 0) -> Tensor:
    """(C, C) with 1 up to the diagonal or one beside it, and 0 after, for x of (..., C, D)."""
    return x.new_ones(x.shape[-2:-1] * 2).tril(diagonal)


def _halves(x: Tensor, h: int) -> tuple[Tensor, ...]:
    """The earlier and the later of each two blocks of h tokens: (..., C, D) to twice (..., C / 2h, h, D)."""
    return x.unflatten(-2, (-1, 2, h)).unbind(-3)


def _joined(x: Tensor, h: int, earlier: Tensor | None = None, later: Tensor | None = None) -> Tensor:
    """Sums within blocks of 2h tokens from those within blocks of h; what is added is (..., C / 2h, D)."""
    one, two = _halves(x, h)
    one = one if earlier is None else one + earlier.unsqueeze(-2)
    two = two if later is None else two + later.unsqueeze(-2)
    return torch.stack([one, two], -3).flatten(-4, -2)


def _grown(blocks: Tensor, across: Tensor) -> Tensor:
    """Blocks on the diagonal of twice the size: (..., 2m, h, h) and what joins each two, (..., m, h, h)."""
    h = across.shape[-1]
    first, second = blocks.unflatten(-3, (-1, 2)).unbind(-3)
    return torch.cat([F.pad(first, (0, h)), torch.cat([across, second], -1)], -2)
