"""The linear family token by token, as recurrence.py writes it: what explains, and what faster engines are held to.

Plain torch in the compute type, on any device, differentiable any number of times; a backward pass keeps every state.
"""

from __future__ import annotations

import torch
from torch import Tensor

from qkv.linear.recurrence import Outcome, Recurrence, Streams
from qkv.linear.sequences import Tokens, decay, divided, joined, read, sequences


def answer(recurrence: Recurrence, streams: Streams) -> Outcome:
    """Outputs, and the state after each sequence."""
    return joined(recurrence, [_run(recurrence, *one) for one in sequences(recurrence, streams)])


def _run(recurrence: Recurrence, tokens: Tokens, state: Tensor) -> tuple[Tensor, Tensor]:
    outputs = [tokens.value[..., :0, :].to(state.dtype)]
    for one in read(recurrence, tokens).split([1] * tokens.value.shape[3]):
        q, k, v, gate, beta = one.each(lambda x: x.unsqueeze(-1) if x.ndim == 4 else x)
        if gate is not None:
            state = decay(gate).mT * state
        state = state + k.mT @ (v if beta is None else beta * (v - k @ state))
        outputs.append(divided(recurrence, q @ state))
    return torch.cat(outputs, 3), state


def general(q: Tensor, k: Tensor, v: Tensor, w: Tensor, a: Tensor, b: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """The recurrence with a free transition, diagonal plus low rank, of which all others are settings.

    S_t = Diag(w_t) S_{t-1} + b_t (a_tᵀ S_{t-1}) + k_t v_tᵀ, o_t = S_tᵀ q_t; w is the decay itself, not its logarithm.
    q, k, w, a, b are (B, H, L, D), v (B, H, L, V), state (B, H, D, V). Gives output (B, H, L, V) and the last state.
    """
    outputs = [v[..., :0, :]]
    for q_t, k_t, v_t, w_t, a_t, b_t in zip(*(x.unbind(2) for x in (q, k, v, w, a, b)), strict=True):
        erased = b_t.unsqueeze(-1) * (a_t.unsqueeze(-2) @ state)
        state = w_t.unsqueeze(-1) * state + erased + k_t.unsqueeze(-1) * v_t.unsqueeze(-2)
        outputs.append(q_t.unsqueeze(-2) @ state)
    return torch.cat(outputs, 2), state
