"""What the torch engines of the linear family share: each sequence by itself, in the compute type, heads in groups.

Axes as in recurrence.py; G = H / K value heads read one key head: q and k become (B, K, 1, L, D), v (B, K, G, L, V).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from qkv.linear.features import elementwise
from qkv.linear.recurrence import Outcome, Recurrence, Streams


class Tokens(NamedTuple):
    """What sequences that run side by side read, token by token along the fourth axis."""

    query: Tensor  # (B, K, 1, L, D)
    key: Tensor  # (B, K, 1, L, D)
    value: Tensor  # (B, K, G, L, V)
    gate: Tensor | None  # (B, K, G, L) or (B, K, G, L, D)
    beta: Tensor | None  # (B, K, G, L), where it is a delta rule

    def each(self, change: Callable[[Tensor], Tensor]) -> Tokens:
        """All that there are, changed."""
        gate, beta = (None if x is None else change(x) for x in self[3:])
        return Tokens(change(self.query), change(self.key), change(self.value), gate, beta)

    def split(self, lengths: list[int]) -> list[Tokens]:
        """Consecutive tokens. Split and never sliced: the gradient of N slices would be N tensors of full size."""
        gates, betas = ([None] * len(lengths) if x is None else x.split(lengths, 3) for x in self[3:])
        streams = (x.split(lengths, 3) for x in self[:3])
        return [Tokens(*one) for one in zip(*streams, gates, betas, strict=True)]


def sequences(recurrence: Recurrence, streams: Streams) -> list[tuple[Tokens, Tensor]]:
    """The batch as one, or each packed sequence, with its state (B, K, G, D, W) in the compute type."""
    shared, own = ((recurrence.key_heads, n) for n in (1, recurrence.group))
    query, key, value, gate, beta, state = streams
    gate, beta = (None if x is None else x.unflatten(1, own) for x in (gate, beta))
    tokens = Tokens(query.unflatten(1, shared), key.unflatten(1, shared), value.unflatten(1, own), gate, beta)
    if state is None:
        state = value.new_zeros(recurrence.state_shape, dtype=recurrence.compute_dtype)
    elif not recurrence.length:
        state = state.clone()  # it is the answer, in memory of its own
    state = state.unflatten(1, own)
    if recurrence.starts is None:
        return [(tokens, state)]
    lengths = [b - a for a, b in itertools.pairwise(recurrence.starts)]
    return list(zip(tokens.split(lengths), state.split(1), strict=True))


def joined(recurrence: Recurrence, found: list[tuple[Tensor, Tensor]]) -> Outcome:
    """One outcome of the outputs (B, K, G, L, V) and states (B, K, G, D, W) of consecutive sequences."""
    outputs, states = zip(*found, strict=True)
    output, state = (x[0] if len(x) == 1 else torch.cat(x, axis) for x, axis in ((outputs, 3), (states, 0)))
    return Outcome(output.flatten(1, 2).to(recurrence.dtype), state.flatten(1, 2))


def read(recurrence: Recurrence, tokens: Tokens) -> Tokens:
    """All in the compute type: features of q and k, q scaled, and the normaliser's column of ones beside v."""
    q, k, v, gate, beta = tokens.each(lambda x: x.to(recurrence.compute_dtype))
    q, k = (elementwise(recurrence.feature, x) for x in (q, k))
    if recurrence.scale != 1.0:
        q = q * recurrence.scale
    return Tokens(q, k, F.pad(v, (0, 1), value=1.0) if recurrence.normalize else v, gate, beta)


def divided(recurrence: Recurrence, output: Tensor) -> Tensor:
    """(..., W) to (..., V): by its last column, where there is a normaliser; 0, with no gradient, where that is 0."""
    if not recurrence.normalize:
        return output
    numerator, denominator = output.split([recurrence.value_dim, 1], -1)
    empty = denominator == 0
    return torch.where(empty, 0.0, numerator / torch.where(empty, 1.0, denominator))


def decay(log: Tensor) -> Tensor:
    """exp of sums of gates, exactly 0 below the smallest normal number: subnormal numbers are slow on a CPU."""
    return F.threshold(log, lowest(log.dtype), -math.inf).exp()


def lowest(dtype: torch.dtype) -> float:
    """The logarithm of the smallest normal number."""
    return math.log(torch.finfo(dtype).tiny)
