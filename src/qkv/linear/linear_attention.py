"""Linear attention: weights phi(q)·phi(k), in one pass over the tokens."""

from __future__ import annotations

from typing import Literal, overload

from torch import Tensor

from qkv.linear.calling import Lengths, call
from qkv.linear.features import FeatureMap
from qkv.types import Layout


@overload
def linear_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    feature_map: str | FeatureMap | None = "elu",
    is_causal: bool = True,
    normalize: bool = True,
    scale: float | None = None,
    layout: Layout = "BHLD",
    cu_seqlens: Lengths | None = None,
    initial_state: Tensor | None = None,
    return_state: Literal[False] = False,
    backend: str = "auto",
) -> Tensor: ...
@overload
def linear_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    feature_map: str | FeatureMap | None = "elu",
    is_causal: bool = True,
    normalize: bool = True,
    scale: float | None = None,
    layout: Layout = "BHLD",
    cu_seqlens: Lengths | None = None,
    initial_state: Tensor | None = None,
    return_state: Literal[True],
    backend: str = "auto",
) -> tuple[Tensor, Tensor]: ...
def linear_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    feature_map: str | FeatureMap | None = "elu",
    is_causal: bool = True,
    normalize: bool = True,
    scale: float | None = None,
    layout: Layout = "BHLD",
    cu_seqlens: Lengths | None = None,
    initial_state: Tensor | None = None,
    return_state: bool = False,
    backend: str = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention whose weight of a pair is phi(q)·phi(k), at a cost in proportion to L.

        S_t = S_{t-1} + phi(k_t) v_tᵀ    z_t = z_{t-1} + phi(k_t)    o_t = S_tᵀ phi(q_t) / z_t·phi(q_t)

    query, key (B, K, L, D), value (B, H, L, V); value head h reads key head h // (H / K). Result (B, H, L, V).

    feature_map: "elu" (elu(x) + 1), "relu", "squared_relu", "softmax", "favor", "hedgehog", "taylor", None for
        phi(x) = x, or a module or function that maps (B, K, L, D) to (B, K, L, M); states then have M for D.
    is_causal: False lets every token of a sequence see every other; there is no state then.
    normalize: divide by the sum of the weights; a sum of exactly 0 gives 0, with zero gradient. False: o_t = scale ·
        S_tᵀ phi(q_t). Sums of weights of both signs may come near 0 and are divided by as they are: with a phi of your
        own that is for you to rule out.
    scale: 1 by default; cancels where the result is normalised.
    layout: "BHLD", or "BLHD" for (B, L, H, D) in query, key and value, and in the output.
    cu_seqlens: where N sequences in a row of B = 1 begin, and their end: N + 1 rising integers from 0 to L. Each is as
        if it were alone.
    initial_state, and the state returned: before and after each sequence, (N, H, D, V), N = B without cu_seqlens;
        with `normalize` (N, H, D, V + 1), whose last column is z.
    backend: "auto", "cpu", "chunked" or "reference"; a name is used or refused with its reasons.

    q, k and v have one dtype, that of the output; states may be float32 beside 16 bits. All is computed in
    float32, in float64 for float64 inputs, and states are returned in that type.
    Raises the errors of `qkv.errors`, all before any work but that of phi.
    Source: Katharopoulos et al., "Transformers are RNNs" (2020), equations 4 to 12.

    >>> import torch
    >>> q = k = torch.zeros(1, 1, 3, 2)
    >>> v = torch.tensor([0.0, 1.0, 2.0]).reshape(1, 1, 3, 1)
    >>> linear_attention(q, k, v).flatten()  # all weights are alike: the mean so far
    tensor([0.0000, 0.5000, 1.0000])
    >>> linear_attention(q, k, v, is_causal=False).flatten()
    tensor([1., 1., 1.])
    """
    return call(
        "linear_attention",
        query,
        key,
        value,
        feature_map=feature_map,
        normalize=normalize,
        is_causal=is_causal,
        default_scale=1.0,
        scale=scale,
        layout=layout,
        cu_seqlens=cu_seqlens,
        initial_state=initial_state,
        return_state=return_state,
        backend=backend,
    )
