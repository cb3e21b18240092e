"""Linear attention in which every token sees every token of its sequence: one kᵀ v, then q times it. Plain torch."""

from __future__ import annotations

import torch
from torch import Tensor

from qkv.linear.recurrence import Outcome, Recurrence, Streams
from qkv.linear.sequences import Tokens, divided, joined, read, sequences


def answer(recurrence: Recurrence, streams: Streams) -> Outcome:
    """Outputs, and Σ_j phi(k_j) v_jᵀ over each sequence, which is the S that all its tokens read.

    o_i = scale · Sᵀ phi(q_i), or with `normalize` Sᵀ phi(q_i) / phi(q_i)·Σ_j phi(k_j), and 0 where that denominator is
    0. There are no gates, and no state comes in.
    """
    return joined(recurrence, [_run(recurrence, read(recurrence, one)) for one, _ in sequences(recurrence, streams)])


def _run(recurrence: Recurrence, tokens: Tokens) -> tuple[Tensor, Tensor]:
    query, key = tokens.query.squeeze(2), tokens.key.squeeze(2)  # shared by a group: einsum repeats neither
    state = torch.einsum("bkld,bkglw->bkgdw", key, tokens.value)
    return divided(recurrence, torch.einsum("bkld,bkgdw->bkglw", query, state)), state
