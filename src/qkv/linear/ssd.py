"""The state space dual form: Mamba-2's recurrence in the words of attention."""

from __future__ import annotations

from typing import Literal, overload

from torch import Tensor

from qkv.linear.calling import Lengths, call
from qkv.types import Layout


@overload
def ssd(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    *,
    scale: float | None = None,
    layout: Layout = "BHLD",
    cu_seqlens: Lengths | None = None,
    initial_state: Tensor | None = None,
    return_state: Literal[False] = False,
    backend: str = "auto",
) -> Tensor: ...
@overload
def ssd(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    *,
    scale: float | None = None,
    layout: Layout = "BHLD",
    cu_seqlens: Lengths | None = None,
    initial_state: Tensor | None = None,
    return_state: Literal[True],
    backend: str = "auto",
) -> tuple[Tensor, Tensor]: ...
def ssd(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    *,
    scale: float | None = None,
    layout: Layout = "BHLD",
    cu_seqlens: Lengths | None = None,
    initial_state: Tensor | None = None,
    return_state: bool = False,
    backend: str = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """Linear attention whose state decays by a factor of each token: the selective state space of Mamba-2.

        S_t = exp(g_t) S_{t-1} + k_t v_tᵀ    o_t = scale · S_tᵀ q_t

    In Mamba-2's letters q is C, k is B, v is Δ·x and g is Δ·A: h_t = exp(Δ_t A) h_{t-1} + Δ_t B_t x_tᵀ, y_t = C_tᵀ h_t.
    Groups of B and C are the K key heads; the skip D·x is for the layer around it.
    query, key (B, K, L, D), value (B, H, L, V); value head h reads key head h // (H / K). Result (B, H, L, V).

    g: (B, H, L), the logarithm of the factor, at most 0; -inf forgets, NaN spreads.
    scale: 1 by default.
    layout: "BHLD", or "BLHD" for (B, L, H, D) in query, key, value and g, and in the output.
    cu_seqlens: where N sequences in a row of B = 1 begin, and their end: N + 1 rising integers from 0 to L. Each is as
        if it were alone.
    initial_state, and the state returned: before and after each sequence, (N, H, D, V), N = B without cu_seqlens.
    backend: "auto", "cpu", "chunked" or "reference"; a name is used or refused with its reasons.

    q, k and v have one dtype, that of the output; g and states may be float32 beside 16 bits. All is computed in
    float32, in float64 for float64 inputs, and states are returned in that type.
    Raises the errors of `qkv.errors`, all before any work.
    Source: Dao and Gu, "Transformers are SSMs" (arXiv 2405.21060), equation 2 with A_t a multiple of the identity.

    >>> import torch
    >>> x, g = torch.ones(1, 1, 3, 1), torch.tensor([[[0.0, 0.5, 0.5]]]).log()
    >>> ssd(x, x, x, g).flatten()
    tensor([1.0000, 1.5000, 1.7500])
    """
    return call(
        "ssd",
        query,
        key,
        value,
        gate="scalar",
        g=g,
        default_scale=1.0,
        scale=scale,
        layout=layout,
        cu_seqlens=cu_seqlens,
        initial_state=initial_state,
        return_state=return_state,
        backend=backend,
    )
