"""How far a correct implementation may be from the truth: first-order rounding bounds, in float64, from the data.

Notation: u unit roundoff of the arithmetic, S_ij = |scale|·Σ_c|q_ic||k_jc|, b the additive bias (a sink counts as
one), A = P|V|.

Scores. A dot product of D terms, the scale and the casts cost (D + 4)u·S_ij; the soft cap four more operations on a
number no larger than S_ij (tanh has slope <= 1); building and adding a bias 4u|b_ij|. A pair whose weight is 0 in
float64 costs nothing.
Weights. p is a ratio, so an error e in the scores comes twice: E_i = 2·max_j e_ij + (S + 8)u, the last for the sum
over S keys and exp. Output: A·(E_i + u_p + u_o), u_p and u_o where P and the output are rounded to a narrower type.
lse: e once, the sum once, its own rounding: E_i + 2u|lse|. A weight recomputed from the lse: p(E_i + 2u|lse|). The
maximum: e. Entropy -Σ p ln p: the weights move it by E_i·Σ p(1 + |ln p|), ln p itself by E_i, and written as lse - Σ
p s it rounds as (S + 8)u·(|lse| + Σ p|s| + Σ p|ln p|), which also covers the direct sum.
Backward. With dP = dO·V (scaled where dropout kept it), D_i = Σ dO∘O, g the gradient of the lse:
  δS_ij = (p E + τ)|dP - D + g| + (p + τ)[(V + 4)u Σ|dO||V| + ((V + 4)u + E + u_o) Σ|dO|A],
u_o because the saved output is rounded.
Among the smallest numbers of a type each product of a sum may lose half their distance, however small it is.
dV, dQ, dK add products of known size, n terms cost (n + 4)u of their absolute sum. The bias, slopes, table and sinks
are plain sums over δS and dS with the same rule, n the number of summands. The soft cap multiplies dS by 1 - t², t =
tanh(x/softcap): 2|t|·e/softcap + 4u relative to dS. A final rounding to a 16-bit type costs u_o of the result.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

import oracles

ROUNDOFF = {torch.float64: 2.0**-53, torch.float32: 2.0**-24, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}


class Budget(NamedTuple):
    """The allowed absolute error of each result; the shapes of `Truth`."""

    out: Tensor
    lse: Tensor
    weights: Tensor
    max_scores: Tensor
    entropy: Tensor
    relative: Tensor  # E_i, (B, H, L, 1)
    small: bool  # whether first order is enough: E well below 1


class Call(NamedTuple):
    """One call as the oracle takes it; the tensors in any type."""

    q: Tensor
    k: Tensor
    v: Tensor
    allowed: Tensor
    scale: float
    softcap: float | None = None
    bias: Tensor | None = None  # dense, broadcastable to (B, H, L, S)
    sinks: Tensor | None = None
    keep: Tensor | None = None
    drop_scale: float = 1.0

    def truth(self) -> oracles.Truth:
        return oracles.attend(*self[:4], **dict(zip(self._fields[4:], self[4:], strict=True)))


def compute_type(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def constants(dtype: torch.dtype) -> tuple[float, float, float]:
    """u of the arithmetic, u_o of the output (0 where it is the type of the arithmetic), the underflow floor."""
    compute = compute_type(dtype)
    return ROUNDOFF[compute], 0.0 if dtype == compute else ROUNDOFF[dtype], torch.finfo(compute).tiny


def floor_of(dtype: torch.dtype) -> float:
    """Half the distance of the smallest numbers of a type: what rounding to it may cost however small the number."""
    info = torch.finfo(dtype)
    return info.tiny * info.eps


def plain(call: Call) -> tuple[Tensor, ...]:
    """q, k, v in float64 with k and v repeated over their group, detached."""
    group = call.q.shape[1] // call.k.shape[1]
    k, v = (x.detach().double().repeat_interleave(group, 1) for x in (call.k, call.v))
    return call.q.detach().double(), k, v


def score_errors(call: Call, truth: oracles.Truth, u: float, u_bias: float = 0.0) -> tuple[Tensor, Tensor]:
    """e_ij, 0 where the weight is 0, and the part of it that comes before the soft cap; both (B, H, L, S)."""
    q, k, _ = plain(call)
    size = abs(call.scale) * q.abs() @ k.abs().mT
    before = (q.shape[-1] + 4) * u * size
    after = before + (4 * u * size if call.softcap is not None else 0)
    if call.bias is not None:
        bias = call.bias.detach().double()
        after = after + (4 * u + u_bias) * torch.where(bias.isfinite(), bias.abs(), 0.0)
    return torch.where(truth.weights.detach() > 0, after, 0.0), before


def row_errors(call: Call, scores: Tensor, u: float) -> Tensor:
    """E_i, (B, H, L, 1)."""
    worst = (
        torch.cat([scores, torch.zeros_like(call.q[..., :1], dtype=torch.float64)], -1).amax(-1, keepdim=True).detach()
    )
    if call.sinks is not None:
        worst = worst.maximum(4 * u * call.sinks.detach().double().abs()[:, None, None])
    return 2 * worst + (scores.shape[-1] + 8) * u


def forward(call: Call, truth: oracles.Truth, dtype: torch.dtype, narrow: bool = False) -> Budget:
    """narrow: the implementation casts the bias and, before P·V, the weights to the type of the inputs."""
    u, u_o, tiny = constants(dtype)
    u_p = u_o if narrow else 0.0
    scores, _ = score_errors(call, truth, u, u_p)
    rows = row_errors(call, scores, u)
    weights = truth.weights.detach()
    dropped = weights if call.keep is None else weights * call.keep * call.drop_scale
    v = plain(call)[2]
    denormal = floor_of(dtype) * (1 + weights.shape[-1] * call.drop_scale)
    out = dropped @ v.abs() * (rows + u_p + u_o) + tiny * v.abs().sum(-2, keepdim=True) + denormal
    finite_lse = torch.where(truth.lse.isfinite(), truth.lse.detach().abs(), 0.0)[..., None]
    log = torch.where(weights > 0, weights.clamp_min(1e-320).log().abs(), 0.0)
    spread = (weights * log).sum(-1, keepdim=True)
    scored = (weights * (log + finite_lse)).sum(-1, keepdim=True)
    entropy = rows * (2 + spread) + (weights.shape[-1] + 8) * u * (finite_lse + scored + spread)
    top = torch.where(truth.max_scores.isfinite(), truth.max_scores.abs(), 0.0)[..., None]
    return Budget(
        out,
        (rows + 2 * u * finite_lse)[..., 0],
        weights * (rows + 2 * u * finite_lse) + tiny,
        (rows + u * top)[..., 0],
        entropy[..., 0],
        rows,
        bool((rows < 0.1).all()),
    )


def backward(
    call: Call, truth: oracles.Truth, dtype: torch.dtype, grad_out: Tensor, grad_lse: Tensor | None = None
) -> tuple[dict[str, Tensor], Callable[[Callable[[Tensor], Tensor], Tensor | float], Tensor]]:
    """Budgets of "q", "k", "v" (each in its own shape) and "sinks", and a function that bounds a linear sum over dS.

    The second is for a bias: `summed(gather, n)` takes `gather`, which maps a dense (B, H, L, S) tensor of non-negative
    numbers to the shape of the gradient by adding, and the number n of summands of each entry.
    """
    u, u_o, tiny = constants(dtype)
    q, k, v = plain(call)
    batch, heads, queries, _ = q.shape
    keys, width = v.shape[2:]
    group = heads // call.k.shape[1]
    errors, before = score_errors(call, truth, u)
    rows = row_errors(call, errors, u)
    p = truth.weights.detach()
    stay = torch.ones_like(p) if call.keep is None else call.keep * call.drop_scale
    go = grad_out.detach().double()
    absolute = (p * stay) @ v.abs()
    dP = stay * (go @ v.mT)
    centre = (go * ((p * stay) @ v)).sum(-1, keepdim=True)
    centre = centre if grad_lse is None else centre - grad_lse.detach().double()[..., None]
    mass = (go.abs() * absolute).sum(-1, keepdim=True)
    seen = call.allowed.expand_as(p).double()
    if call.bias is not None:
        seen = seen * (call.bias.detach() != -oracles.INF)
    loose = (width + 4) * u * stay * (go.abs() @ v.abs().mT) + ((width + 4) * u + rows + u_o) * mass
    d_error = seen * ((p * rows + tiny) * (dP - centre).abs() + (p + tiny) * loose)
    d_size = p * (dP - centre).abs()
    raw_error, raw_size = d_error, d_size
    if call.softcap is not None:
        t = torch.tanh(call.scale * (q @ k.mT) / call.softcap)
        slope = 1 - t * t
        raw_error = d_error * (slope + 4 * u) + d_size * (2 * t.abs() * before / call.softcap + 4 * u)
        raw_size = d_size * slope

    def ungroup(x: Tensor) -> Tensor:
        return x.reshape(batch, heads // group, group, *x.shape[2:]).sum(2)

    dv = ((p * rows + tiny) * stay).mT @ go.abs() + (queries * group + 4) * u * (p * stay).mT @ go.abs()
    dq = abs(call.scale) * (raw_error + (keys + 4) * u * raw_size) @ k.abs()
    dk = abs(call.scale) * (raw_error + (queries * group + 4) * u * raw_size).mT @ q.abs()
    dq = dq + u_o * abs(call.scale) * raw_size @ k.abs()
    dk = dk + u_o * abs(call.scale) * raw_size.mT @ q.abs()
    dv = dv + u_o * (p * stay).mT @ go.abs()
    denormal = floor_of(dtype) * max(1.0, abs(call.scale), call.drop_scale)
    found = {"q": dq + denormal * (1 + keys), "k": ungroup(dk), "v": ungroup(dv)}
    found |= {name: found[name] + denormal * (1 + queries * group) for name in "kv"}
    if call.sinks is not None:
        at_sink = torch.exp(call.sinks.detach().double()[:, None, None] - truth.lse.detach()[..., None])
        share = at_sink * (rows * centre.abs() + ((width + 4) * u + rows + u_o) * mass)
        found["sinks"] = (share + (batch * queries + 4) * u * at_sink * centre.abs()).sum((0, 2, 3)) + tiny

    def summed(gather: Callable[[Any], Tensor], n: Tensor | float) -> Tensor:
        return gather(d_error) + (n + 4) * u * gather(d_size) + tiny

    return found, summed
