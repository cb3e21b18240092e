"""The delta rules: what a key already names is taken off the value before it is written."""

from __future__ import annotations

from typing import Literal, overload

from torch import Tensor

from qkv.linear.calling import Lengths, call
from qkv.types import Layout


@overload
def delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    beta: Tensor,
    *,
    scale: float | None = None,
    layout: Layout = "BHLD",
    cu_seqlens: Lengths | None = None,
    initial_state: Tensor | None = None,
    return_state: Literal[False] = False,
    backend: str = "auto",
) -> Tensor: ...
@overload
def delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    beta: Tensor,
    *,
    scale: float | None = None,
    layout: Layout = "BHLD",
    cu_seqlens: Lengths | None = None,
    initial_state: Tensor | None = None,
    return_state: Literal[True],
    backend: str = "auto",
) -> tuple[Tensor, Tensor]: ...
def delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    beta: Tensor,
    *,
    scale: float | None = None,
    layout: Layout = "BHLD",
    cu_seqlens: Lengths | None = None,
    initial_state: Tensor | None = None,
    return_state: bool = False,
    backend: str = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """Linear attention that corrects its state instead of adding to it: DeltaNet.

        S_t = S_{t-1} + beta_t k_t (v_t - S_{t-1}ᵀ k_t)ᵀ    o_t = scale · S_tᵀ q_t

    query, key (B, K, L, D), value (B, H, L, V); value head h reads key head h // (H / K). Result (B, H, L, V).

    beta: (B, H, L), the write strength, any finite number: 0 writes nothing, 1 replaces what k_t names. With |k_t| = 1,
        as by `l2_norm`, the state stays bounded for 0 to 2; keys are taken as they are.
    scale: 1/sqrt(D) by default.
    layout: "BHLD", or "BLHD" for (B, L, H, D) in query, key, value and beta, and in the output.
    cu_seqlens: where N sequences in a row of B = 1 begin, and their end: N + 1 rising integers from 0 to L. Each is as
        if it were alone.
    initial_state, and the state returned: before and after each sequence, (N, H, D, V), N = B without cu_seqlens.
    backend: "auto", "cpu", "chunked" or "reference"; a name is used or refused with its reasons.

    q, k and v have one dtype, that of the output; beta and states may be float32 beside 16 bits. All is computed in
    float32, in float64 for float64 inputs, and states are returned in that type.
    Raises the errors of `qkv.errors`, all before any work.
    Source: Yang et al., "Parallelizing Linear Transformers with the Delta Rule" (arXiv 2406.06484), section 2.

    >>> import torch
    >>> x, v = torch.ones(1, 1, 3, 1), torch.tensor([1.0, 5.0, 7.0]).reshape(1, 1, 3, 1)
    >>> delta_rule(x, x, v, torch.tensor([[[1.0, 0.5, 0.0]]])).flatten()
    tensor([1., 3., 3.])
    """
    return call(
        "delta_rule",
        query,
        key,
        value,
        delta=True,
        beta=beta,
        scale=scale,
        layout=layout,
        cu_seqlens=cu_seqlens,
        initial_state=initial_state,
        return_state=return_state,
        backend=backend,
    )


@overload
def gated_delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    scale: float | None = None,
    layout: Layout = "BHLD",
    cu_seqlens: Lengths | None = None,
    initial_state: Tensor | None = None,
    return_state: Literal[False] = False,
    backend: str = "auto",
) -> Tensor: ...
@overload
def gated_delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    scale: float | None = None,
    layout: Layout = "BHLD",
    cu_seqlens: Lengths | None = None,
    initial_state: Tensor | None = None,
    return_state: Literal[True],
    backend: str = "auto",
) -> tuple[Tensor, Tensor]: ...
def gated_delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    scale: float | None = None,
    layout: Layout = "BHLD",
    cu_seqlens: Lengths | None = None,
    initial_state: Tensor | None = None,
    return_state: bool = False,
    backend: str = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """The delta rule on a state that decays by a factor of each token: Gated DeltaNet (Qwen3-Next, Olmo-Hybrid).

        S' = exp(g_t) S_{t-1}    S_t = S' + beta_t k_t (v_t - S'ᵀ k_t)ᵀ    o_t = scale · S_tᵀ q_t

    query, key (B, K, L, D), value (B, H, L, V); value head h reads key head h // (H / K). Result (B, H, L, V).

    g: (B, H, L), the logarithm of the factor, at most 0; -inf forgets, NaN spreads.
    beta: (B, H, L), the write strength, any finite number: 0 writes nothing, 1 replaces what k_t names. With |k_t| = 1,
        as by `l2_norm`, the state stays bounded for 0 to 2; keys are taken as they are.
    scale: 1/sqrt(D) by default.
    layout: "BHLD", or "BLHD" for (B, L, H, D) in query, key, value, g and beta, and in the output.
    cu_seqlens: where N sequences in a row of B = 1 begin, and their end: N + 1 rising integers from 0 to L. Each is as
        if it were alone.
    initial_state, and the state returned: before and after each sequence, (N, H, D, V), N = B without cu_seqlens.
    backend: "auto", "cpu", "chunked" or "reference"; a name is used or refused with its reasons.

    q, k and v have one dtype, that of the output; g, beta and states may be float32 beside 16 bits. All is computed in
    float32, in float64 for float64 inputs, and states are returned in that type.
    Raises the errors of `qkv.errors`, all before any work.
    Source: Yang et al., "Gated Delta Networks" (arXiv 2412.06464), equation 10.

    >>> import torch
    >>> x, v = torch.ones(1, 1, 3, 1), torch.tensor([1.0, 5.0, 7.0]).reshape(1, 1, 3, 1)
    >>> g, beta = torch.tensor([[[0.0, 0.5, 1.0]]]).log(), torch.tensor([[[1.0, 0.5, 0.0]]])
    >>> gated_delta_rule(x, x, v, g, beta).flatten()  # 1, then half of it and halfway to 5, then as it was
    tensor([1.0000, 2.7500, 2.7500])
    """
    return call(
        "gated_delta_rule",
        query,
        key,
        value,
        gate="scalar",
        g=g,
        delta=True,
        beta=beta,
        scale=scale,
        layout=layout,
        cu_seqlens=cu_seqlens,
        initial_state=initial_state,
        return_state=return_state,
        backend=backend,
    )


@overload
def kimi_delta_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    scale: float | None = None,
    layout: Layout = "BHLD",
    cu_seqlens: Lengths | None = None,
    initial_state: Tensor | None = None,
    return_state: Literal[False] = False,
    backend: str = "auto",
) -> Tensor: ...
@overload
def kimi_delta_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    scale: float | None = None,
    layout: Layout = "BHLD",
    cu_seqlens: Lengths | None = None,
    initial_state: Tensor | None = None,
    return_state: Literal[True],
    backend: str = "auto",
) -> tuple[Tensor, Tensor]: ...
def kimi_delta_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    scale: float | None = None,
    layout: Layout = "BHLD",
    cu_seqlens: Lengths | None = None,
    initial_state: Tensor | None = None,
    return_state: bool = False,
    backend: str = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """The delta rule on a state whose key channels decay each by a factor of its own: KDA (Kimi Linear).

        S' = Diag(exp g_t) S_{t-1}    S_t = S' + beta_t k_t (v_t - S'ᵀ k_t)ᵀ    o_t = scale · S_tᵀ q_t

    query, key (B, K, L, D), value (B, H, L, V); value head h reads key head h // (H / K). Result (B, H, L, V).

    g: (B, H, L, D), the logarithm of the factor, at most 0; -inf forgets, NaN spreads.
    beta: (B, H, L), the write strength, any finite number: 0 writes nothing, 1 replaces what k_t names. With |k_t| = 1,
        as by `l2_norm`, the state stays bounded for 0 to 2; keys are taken as they are.
    scale: 1/sqrt(D) by default.
    layout: "BHLD", or "BLHD" for (B, L, H, D) in query, key, value, g and beta, and in the output.
    cu_seqlens: where N sequences in a row of B = 1 begin, and their end: N + 1 rising integers from 0 to L. Each is as
        if it were alone.
    initial_state, and the state returned: before and after each sequence, (N, H, D, V), N = B without cu_seqlens.
    backend: "auto", "cpu", "chunked" or "reference"; a name is used or refused with its reasons.

    q, k and v have one dtype, that of the output; g, beta and states may be float32 beside 16 bits. All is computed in
    float32, in float64 for float64 inputs, and states are returned in that type.
    Raises the errors of `qkv.errors`, all before any work.
    Source: Kimi Team, "Kimi Linear" (arXiv 2510.26692), equation 1.

    >>> import torch
    >>> x, v = torch.ones(1, 1, 2, 2) * 0.5**0.5, torch.tensor([1.0, 2.0]).reshape(1, 1, 2, 1)
    >>> g, beta = torch.tensor([0.0, 1.0]).log().expand(1, 1, 2, 2), torch.ones(1, 1, 2)
    >>> _, state = kimi_delta_attention(x, x, v, g, beta, return_state=True)
    >>> state.flatten()  # 0.71, 0.71 from the first token; the first channel is forgotten; then 1.5 / sqrt(2) is added
    tensor([1.0607, 1.7678])
    """
    return call(
        "kimi_delta_attention",
        query,
        key,
        value,
        gate="vector",
        g=g,
        delta=True,
        beta=beta,
        scale=scale,
        layout=layout,
        cu_seqlens=cu_seqlens,
        initial_state=initial_state,
        return_state=return_state,
        backend=backend,
    )
