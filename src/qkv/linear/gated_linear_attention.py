"""Gated linear attention: each key channel forgets at a rate that the token says."""

from __future__ import annotations

from typing import Literal, overload

from torch import Tensor

from qkv.linear.calling import Lengths, call
from qkv.types import Layout


@overload
def gated_linear_attention(
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
def gated_linear_attention(
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
def gated_linear_attention(
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
    """Linear attention whose state decays by a factor of each token and key channel: GLA, HGRN-2.

        S_t = Diag(exp g_t) S_{t-1} + k_t v_tᵀ    o_t = scale · S_tᵀ q_t

    query, key (B, K, L, D), value (B, H, L, V); value head h reads key head h // (H / K). Result (B, H, L, V).

    g: (B, H, L, D), the logarithm of the factor, at most 0; -inf forgets, NaN spreads.
    scale: 1/sqrt(D) by default.
    layout: "BHLD", or "BLHD" for (B, L, H, D) in query, key, value and g, and in the output.
    cu_seqlens: where N sequences in a row of B = 1 begin, and their end: N + 1 rising integers from 0 to L. Each is as
        if it were alone.
    initial_state, and the state returned: before and after each sequence, (N, H, D, V), N = B without cu_seqlens.
    backend: "auto", "cpu", "chunked" or "reference"; a name is used or refused with its reasons.

    q, k and v have one dtype, that of the output; g and states may be float32 beside 16 bits. All is computed in
    float32, in float64 for float64 inputs, and states are returned in that type.
    Raises the errors of `qkv.errors`, all before any work.
    Source: Yang et al., "Gated Linear Attention Transformers with Hardware-Efficient Training" (arXiv 2312.06635),
    section 4.

    >>> import torch
    >>> x, g = torch.ones(1, 1, 3, 2), torch.tensor([0.5, 1.0]).log().expand(1, 1, 3, 2)
    >>> gated_linear_attention(x, x, x, g, scale=1.0)[0, 0, :, 0]
    tensor([2.0000, 3.5000, 4.7500])
    """
    return call(
        "gated_linear_attention",
        query,
        key,
        value,
        gate="vector",
        g=g,
        scale=scale,
        layout=layout,
        cu_seqlens=cu_seqlens,
        initial_state=initial_state,
        return_state=return_state,
        backend=backend,
    )
