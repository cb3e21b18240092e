"""How far a correct implementation may be from the truth: first-order rounding bounds, in float64, from the data.

Notation: u unit roundoff of the arithmetic, S_ij = |scale|·Σ_c|q_ic||k_jc|, b the additive bias (a sink counts as
one), A = P|V|.

Scores. A dot product of D terms, the scale and the casts cost (D + 4)u·S_ij; the soft cap four more operations on a
number no larger than S_ij (tanh has slope <= 1); building and adding a bias 4u|b_ij|. A pair whose weight is 0 in
float64 costs nothing.
Weights. p is a ratio, so an error e in the scores comes twice: E_i = 2·max_j e_ij + (S + 8)u, the last for the sum
over S keys and exp. Output: A·E_i + u_o|o|, u_o where it is rounded to a narrower type.
lse: e once, the sum once, its own rounding: E_i + 2u|lse|. A weight recomputed from the lse: p(E_i + 2u|lse|). The
maximum: e, and no exp. Entropy -Σ p ln p: the weights move it by E_i·Σ p(1 + |ln p|), ln p itself by E_i, and written
as lse - Σ p s it rounds as (S + 8)u·(|lse| + Σ p|s| + Σ p|ln p|), which also covers the direct sum.
Backward. With dP = dO·V (scaled where dropout kept it), D_i = Σ dO∘O, g the gradient of the lse:
  δS_ij = (p E + τ)|dP - D + g| + (p + τ)[(V + 4)u Σ|dO||V| + ((V + 4)u + E + u_o) Σ|dO|A],
u_o because the saved output is rounded.
Cast. A unit of dot products takes its operands in the type of the inputs, with roundoff u_p, and exp may then err by
u_e in relative size: E_i grows by 2u_e, once above and once below the fraction. Weights cast for P·V and for the sum
that divides it are P(1 + ε), |ε| <= u_p, so that the output moves by Σ p ε v - o Σ p ε: u_p(A + |o|). D_i, made from
that output, moves by 2u_p Σ|dO|A at most. For dV the weights are cast again, u_p Σ p|dO|; for dQ and dK the gradients
of the scores are, u_p Σ|dS||k|. Such units take subnormal operands, products and sums for 0: each operand of a product
may lose κ, the least normal number, beside the other's size, and each product two κ.
Among the smallest numbers of a type each product of a sum may lose half their distance, however small it is.
dV, dQ, dK add products of known size, n terms cost (n + 4)u of their absolute sum. The bias, slopes, table and sinks
are plain sums over δS and dS with the same rule, n the number of summands. The soft cap multiplies dS by 1 - t², t =
tanh(x/softcap): 2|t|·e/softcap + 4u relative to dS. A final rounding to a 16-bit type costs u_o of the result, and
half the distance of the type's smallest numbers.
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


EXP = 4e-6  # u_e: what exp may cost beside weights that are cast


class Cast(NamedTuple):
    """What casts to the type of the inputs before a product cost; all 0 where there are none."""

    weights: float = 0.0  # u_p
    exp: float = 0.0  # u_e
    least: float = 0.0  # κ

    @classmethod
    def to(cls, dtype: torch.dtype) -> Cast:
        return cls(ROUNDOFF[dtype], EXP, torch.finfo(dtype).tiny)


def floor_of(dtype: torch.dtype) -> float:
    """Half the distance of the smallest numbers of a type: what rounding to it may cost however small the number."""
    info = torch.finfo(dtype)
    return info.tiny * info.eps


def plain(call: Call) -> tuple[Tensor, ...]:
    """q, k, v in float64 with k and v repeated over their group, detached."""
    group = call.q.shape[1] // call.k.shape[1]
    k, v = (x.detach().double().repeat_interleave(group, 1) for x in (call.k, call.v))
    return call.q.detach().double(), k, v


def score_errors(
    call: Call, truth: oracles.Truth, u: float, u_bias: float = 0.0, least: float = 0.0
) -> tuple[Tensor, Tensor]:
    """e_ij, 0 where the weight is 0, and the part of it that comes before the soft cap; both (B, H, L, S)."""
    q, k, _ = plain(call)
    size = abs(call.scale) * q.abs() @ k.abs().mT
    before = (q.shape[-1] + 4) * u * size + abs(call.scale) * lost(q, k, least)
    after = before + (4 * u * size if call.softcap is not None else 0)
    if call.bias is not None:
        bias = call.bias.detach().double()
        after = after + (4 * u + u_bias) * torch.where(bias.isfinite(), bias.abs(), 0.0)
    return torch.where(truth.weights.detach() > 0, after, 0.0), before


def lost(a: Tensor, b: Tensor, least: float) -> Tensor | float:
    """What the products a·bᵀ of rows lose where operands below `least` count as 0."""
    if not least:
        return 0.0
    return least * (a.abs().sum(-1, keepdim=True) + b.abs().sum(-1)[..., None, :] + 2 * a.shape[-1])


def row_errors(call: Call, scores: Tensor, u: float) -> Tensor:
    """E_i, (B, H, L, 1)."""
    worst = (
        torch.cat([scores, torch.zeros_like(call.q[..., :1], dtype=torch.float64)], -1).amax(-1, keepdim=True).detach()
    )
    if call.sinks is not None:
        worst = worst.maximum(4 * u * call.sinks.detach().double().abs()[:, None, None])
    return 2 * worst + (scores.shape[-1] + 8) * u


def forward(
    call: Call,
    truth: oracles.Truth,
    dtype: torch.dtype,
    narrow: bool = False,
    *,
    output: torch.dtype | None = None,
    cast: bool = False,
) -> Budget:
    """dtype: of the inputs; output: of the output where that is another.

    narrow: the implementation casts the bias and, before P·V, the weights to the type of the inputs, and multiplies in
    it. cast: it uses a unit of dot products of the type of the inputs, as the head of this file says.
    """
    u, u_o, tiny = constants(dtype)
    u_o = 0.0 if output == compute_type(dtype) else u_o
    casts = Cast.to(dtype) if cast else Cast()
    scores, _ = score_errors(call, truth, u, u_o if narrow else 0.0, casts.least)
    exact = row_errors(call, scores, u)
    rows = exact + 2 * casts.exp
    weights = truth.weights.detach()
    dropped = weights if call.keep is None else weights * call.keep * call.drop_scale
    v = plain(call)[2]
    absolute, size, count = dropped @ v.abs(), truth.out.detach().abs(), weights.shape[-1] * call.drop_scale
    out = absolute * rows + casts.weights * (absolute + size)
    out = out + tiny * call.drop_scale * v.abs().sum(-2, keepdim=True) + 2 * casts.least * (call.drop_scale + count)
    if narrow:
        out = out + 2 * u_o * absolute + floor_of(dtype) * (1 + count)
    else:
        out = out * (1 + u_o) + u_o * size + floor_of(compute_type(dtype)) * (1 + count) + floor_of(output or dtype)
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
        (exact + u * top)[..., 0],
        entropy[..., 0],
        rows,
        bool((rows < 0.1).all()),
    )


def backward(
    call: Call,
    truth: oracles.Truth,
    dtype: torch.dtype,
    grad_out: Tensor,
    grad_lse: Tensor | None = None,
    *,
    output: torch.dtype | None = None,
    cast: bool = False,
) -> tuple[dict[str, Tensor], Callable[[Callable[[Tensor], Tensor], Tensor | float], Tensor]]:
    """Budgets of "q", "k", "v" (each in its own shape) and "sinks", and a function that bounds a linear sum over dS.

    The second is for a bias: `summed(gather, n)` takes `gather`, which maps a dense (B, H, L, S) tensor of non-negative
    numbers to the shape of the gradient by adding, and the number n of summands of each entry. Others as for `forward`.
    """
    u, u_g, tiny = constants(dtype)
    u_o = 0.0 if output == compute_type(dtype) else u_g
    u_p, u_e, least = casts = Cast.to(dtype) if cast else Cast()
    q, k, v = plain(call)
    batch, heads, queries, _ = q.shape
    keys, width = v.shape[2:]
    group = heads // call.k.shape[1]
    errors, before = score_errors(call, truth, u, least=least)
    rows = row_errors(call, errors, u) + 2 * u_e
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
    through = ((width + 4) * u + rows + u_o + 2 * u_p) * mass  # errors of D
    loose = stay * ((width + 4) * u * (go.abs() @ v.abs().mT) + lost(go, v, least)) + through
    d_error = seen * ((p * rows + tiny) * (dP - centre).abs() + (p + tiny) * loose)
    d_size = p * (dP - centre).abs()
    raw_error, raw, slope = d_error, p * (dP - centre), 1.0
    if call.softcap is not None:
        t = torch.tanh(call.scale * (q @ k.mT) / call.softcap)
        slope = 1 - t * t
        raw_error = d_error * (slope + 4 * u) + d_size * (2 * t.abs() * before / call.softcap + 4 * u)
        raw = raw * slope

    def product(a: Tensor, error: Tensor | float, b: Tensor, n: int) -> Tensor:
        """The budget of a·b, b exact, over n terms; the result rounded to the type of the inputs."""
        found = (error + ((n + 4) * u + u_p) * a.abs()) @ b.abs()
        if casts.least:
            found = found + least * (a.abs().sum(-1, keepdim=True) + b.abs().sum(-2, keepdim=True) + 2 * n)
        return found

    def ungroup(x: Tensor) -> Tensor:
        return x.reshape(batch, heads // group, group, *x.shape[2:]).sum(2)

    n = queries * group
    weights = p * stay
    found = {
        "q": abs(call.scale) * product(raw, raw_error, k, keys),
        "k": ungroup(abs(call.scale) * product(raw.mT, raw_error.mT, q, n)),
        "v": ungroup(product(weights.mT, ((p * rows + tiny) * stay).mT, go, n)),
    }
    true = {
        "q": call.scale * raw @ k,
        "k": ungroup(call.scale * raw.mT @ q),
        "v": ungroup(weights.mT @ go),
    }
    underflow = floor_of(compute_type(dtype)) * max(1.0, abs(call.scale), call.drop_scale)
    for name, count in (("q", keys), ("k", n), ("v", n)):
        found[name] = found[name] * (1 + u_g) + u_g * true[name].abs() + underflow * (1 + count) + floor_of(dtype)
    if call.sinks is not None:
        at_sink = torch.exp(call.sinks.detach().double()[:, None, None] - truth.lse.detach()[..., None])
        share = at_sink * (rows * centre.abs() + through)
        found["sinks"] = (share + (batch * queries + 4) * u * at_sink * centre.abs()).sum((0, 2, 3)) + tiny

    def summed(gather: Callable[[Any], Tensor], n: Tensor | float) -> Tensor:
        return gather(d_error) + (n + 4) * u * gather(d_size) + tiny

    return found, summed
