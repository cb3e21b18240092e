"""Retention: linear attention that forgets at a constant rate."""

from __future__ import annotations

from typing import Literal, overload

from torch import Tensor

from qkv.linear.calling import Lengths, call
from qkv.types import Layout


@overload
def retention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    decay: Tensor,
    scale: float | None = None,
    layout: Layout = "BHLD",
    cu_seqlens: Lengths | None = None,
    initial_state: Tensor | None = None,
    return_state: Literal[False] = False,
    backend: str = "auto",
) -> Tensor: ...
@overload
def retention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    decay: Tensor,
    scale: float | None = None,
    layout: Layout = "BHLD",
    cu_seqlens: Lengths | None = None,
    initial_state: Tensor | None = None,
    return_state: Literal[True],
    backend: str = "auto",
) -> tuple[Tensor, Tensor]: ...
def retention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    decay: Tensor,
    scale: float | None = None,
    layout: Layout = "BHLD",
    cu_seqlens: Lengths | None = None,
    initial_state: Tensor | None = None,
    return_state: bool = False,
    backend: str = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """Linear attention whose state decays by a constant factor of each head: RetNet, and Lightning attention.

        S_t = exp(decay_h) S_{t-1} + k_t v_tᵀ    o_t = scale · S_tᵀ q_t

    query, key (B, K, L, D), value (B, H, L, V); value head h reads key head h // (H / K). Result (B, H, L, V).

    decay: (H,), the logarithm of the factor of each value head, at most 0: RetNet has log(1 - 2^(-5 - h)), Lightning
        attention minus the slope of the head. -inf keeps nothing.
    scale: 1/sqrt(D) by default; Lightning attention has 1.
    layout: "BHLD", or "BLHD" for (B, L, H, D) in query, key and value, and in the output.
    cu_seqlens: where N sequences in a row of B = 1 begin, and their end: N + 1 rising integers from 0 to L. Each is as
        if it were alone.
    initial_state, and the state returned: before and after each sequence, (N, H, D, V), N = B without cu_seqlens.
    backend: "auto", "cpu", "chunked" or "reference"; a name is used or refused with its reasons.

    q, k and v have one dtype, that of the output; decay and states may be float32 beside 16 bits. All is computed in
    float32, in float64 for float64 inputs, and states are returned in that type.
    Raises the errors of `qkv.errors`, all before any work.
    Rotations of q and k, and the norm of each head, are for the layer around it.
    Source: Sun et al., "Retentive Network" (arXiv 2307.08621), equation 6; Qin et al., "Lightning Attention-2"
    (arXiv 2401.04658).

    >>> import torch
    >>> x = torch.ones(1, 1, 3, 1)
    >>> retention(x, x, x, decay=torch.tensor([0.5]).log()).flatten()
    tensor([1.0000, 1.5000, 1.7500])
    """
    return call(
        "retention",
        query,
        key,
        value,
        gate="constant",
        g=decay,
        scale=scale,
        layout=layout,
        cu_seqlens=cu_seqlens,
        initial_state=initial_state,
        return_state=return_state,
        backend=backend,
    )
