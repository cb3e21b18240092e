"""The linear family in plain torch, in the two ways that people write it: all chunks in one product, or one by one."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

CHUNK = 64  # tokens; the fastest in torch
VECTOR_CHUNK = 16  # with a gate a channel, whose pairs need a tensor (C, C, D) a chunk


class Pieces(NamedTuple):
    """What the chunks of one call are made of, (B, H, N, C, *)."""

    scores: Tensor  # q·k with the decay between them, (C, C), lower triangle
    queries: Tensor  # decayed from the start of the chunk, and scaled
    keys: Tensor  # decayed to the end of the chunk
    fade: Tensor | None  # of a state over a chunk, (B, H, N, 1 or D, 1)


def batched(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *beside: Tensor,
    feature: str,
    normalize: bool,
    scale: float | None,
    delta: bool,
) -> Tensor:
    """No gate or one a token: (B, H, L, D) to (B, H, L, V), in float32."""
    length, given = query.shape[2], value.dtype
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    query, key, value, *beside = (_chunks(x.float(), CHUNK) for x in (query, key, value, *beside))
    if feature == "elu":
        query, key = F.elu(query) + 1, F.elu(key) + 1
    if normalize:
        value = F.pad(value, (0, 1), value=1.0)
    total = beside[0].cumsum(-1) if beside else None
    pairs = torch.ones(CHUNK, CHUNK).tril() if total is None else _decay(total[..., :, None] - total[..., None, :])
    since = 1.0 if total is None else total.exp()[..., None]
    until = 1.0 if total is None else (total[..., -1:] - total).exp()[..., None]
    fade = None if total is None else total[..., -1, None, None].exp()
    pieces = Pieces(query @ key.mT * pairs * scale, query * since * scale, key * until, fade)
    if delta:
        values, states = _corrected(pieces, key @ key.mT * pairs, key * since, value, beside[1])
    else:
        values, states = value, _prefixes(pieces, value)
    output = (pieces.scores @ values + pieces.queries @ states).flatten(2, 3)[:, :, :length]
    return (output[..., :-1] / output[..., -1:] if normalize else output).to(given)


def batched_vectors(
    query: Tensor, key: Tensor, value: Tensor, gate: Tensor, beta: Tensor, *, scale: float | None, **_: object
) -> Tensor:
    """A delta rule with a gate a channel; every pair of a chunk has its decay in every channel written out."""
    length, given = query.shape[2], value.dtype
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    query, key, value, gate, beta = (_chunks(x.float(), VECTOR_CHUNK) for x in (query, key, value, gate, beta))
    total = gate.cumsum(-2)
    pairs = (
        _decay((total[..., :, None, :] - total[..., None, :, :]).movedim(-1, -3)).movedim(-3, -1) * key[..., None, :, :]
    )
    scores, alike = ((x[..., :, None, :] * pairs).sum(-1) for x in (query * scale, key))
    pieces = Pieces(
        scores,
        query * total.exp() * scale,
        key * (total[..., -1:, :] - total).exp(),
        total[..., -1, :, None].exp(),
    )
    values, states = _corrected(pieces, alike, key * total.exp(), value, beta)
    return (scores @ values + pieces.queries @ states).flatten(2, 3)[:, :, :length].to(given)


def looped(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *beside: Tensor,
    feature: str,
    normalize: bool,
    scale: float | None,
    delta: bool,
) -> Tensor:
    """No gate or one a token, chunk after chunk, each with the state before it at hand: less memory, no inverse."""
    length, given = query.shape[2], value.dtype
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    query, key, value, *beside = (_chunks(x.float(), CHUNK).unbind(2) for x in (query, key, value, *beside))
    width = value[0].shape[-1] + normalize
    state, outputs = query[0].new_zeros(*query[0].shape[:2], query[0].shape[-1], width), []
    for streams in zip(query, key, value, *beside, strict=True):
        output, state = _chunk(state, *streams, feature=feature, normalize=normalize, delta=delta)
        outputs.append(output)
    output = scale * torch.cat(outputs, 2)[:, :, :length]
    return (output[..., :-1] / output[..., -1:] if normalize else output).to(given)


def _chunk(
    state: Tensor, q: Tensor, k: Tensor, v: Tensor, *beside: Tensor, feature: str, normalize: bool, delta: bool
) -> tuple[Tensor, Tensor]:
    """The output of one chunk (B, H, C, V), not scaled, and the state after it."""
    pairs, since, until, fade = torch.ones(CHUNK, CHUNK).tril(), 1.0, 1.0, 1.0
    if feature == "elu":
        q, k = F.elu(q) + 1, F.elu(k) + 1
    if normalize:
        v = F.pad(v, (0, 1), value=1.0)
    if beside:
        total = beside[0].cumsum(-1)
        pairs = _decay(total[..., :, None] - total[..., None, :])
        since, until = total.exp()[..., None], (total[..., -1:] - total).exp()[..., None]
        fade = since[..., -1:, :]
    if delta:
        beta = beside[1][..., None]
        system, right = beta * (k @ k.mT * pairs), beta * (v - (k * since) @ state)
        v = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
    return (q @ k.mT * pairs) @ v + (q * since) @ state, state * fade + (k * until).mT @ v


def next_token(state: Tensor, query: Tensor, key: Tensor, value: Tensor, gate: Tensor, beta: Tensor) -> Tensor:
    """One token of the gated delta rule, the state (B, H, D, V) in place: four operations of torch on it."""
    state.mul_(gate.exp()[..., None])
    written = beta[..., None] * (value - key @ state)
    flat = state.flatten(0, 1)
    flat.baddbmm_(key.flatten(0, 1).mT, written.flatten(0, 1))
    return query @ state / math.sqrt(query.shape[-1])


def _chunks(x: Tensor, size: int) -> Tensor:
    """(B, H, L, *) as (B, H, N, C, *), the last chunk filled with zeros, which write nothing."""
    fill = -x.shape[2] % size
    x = F.pad(x, (0, 0) * (x.ndim - 3) + (0, fill)) if fill else x
    return x.unflatten(2, (-1, size))


def _decay(differences: Tensor) -> Tensor:
    """exp of the lower triangle; masked before, so that nothing overflows."""
    upper = torch.ones(differences.shape[-2:], dtype=torch.bool).triu(1)
    return differences.masked_fill(upper, -math.inf).exp()


def _prefixes(pieces: Pieces, value: Tensor) -> Tensor:
    """The state before each chunk."""
    written = pieces.keys.mT @ value
    if pieces.fade is None:
        return F.pad(written, (0, 0, 0, 0, 1, -1)).cumsum(2)
    state, states = torch.zeros_like(written[:, :, 0]), []
    for fade, more in zip(pieces.fade.unbind(2), written.unbind(2), strict=True):
        states.append(state)
        state = state * fade + more
    return torch.stack(states, 2)


def _corrected(pieces: Pieces, alike: Tensor, keys: Tensor, value: Tensor, beta: Tensor) -> tuple[Tensor, Tensor]:
    """What a delta rule writes, and the state before each chunk: the triangular systems of all chunks at once.

    alike (C, C): k·k with the decay between them; keys: decayed from the start of the chunk.
    """
    right = beta[..., None] * torch.cat([value, keys], -1)
    solved = torch.linalg.solve_triangular(beta[..., None] * alike, right, upper=False, unitriangular=True)
    fresh, seen = solved.split([value.shape[-1], keys.shape[-1]], -1)
    state, states, values = torch.zeros_like(keys[:, :, 0].mT @ value[:, :, 0]), [], []
    assert pieces.fade is not None
    for new, old, ends, fade in zip(
        fresh.unbind(2), seen.unbind(2), pieces.keys.unbind(2), pieces.fade.unbind(2), strict=True
    ):
        states.append(state)
        values.append(new - old @ state)
        state = state * fade + ends.mT @ values[-1]
    return torch.stack(values, 2), torch.stack(states, 2)
