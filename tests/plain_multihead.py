"""An oracle for the attention layer: its formula written out in float64, with every option, one tensor (B, H, L, S)."""

from __future__ import annotations

import math

import torch


def rms(x, weight, eps):
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight


def turned(x, positions, base):
    """x (B, L, H, D): the halves of each head turned by the angles positions · base^(-2m/D)."""
    half = x.shape[-1] // 2
    angles = positions[..., None].double() * base ** (-torch.arange(half).double() / half)
    cos, sin = angles.cos()[..., None, :], angles.sin()[..., None, :]
    a, b = x[..., :half], x[..., half:]
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


def attended(layer, x, memory=None, *, keep=None, added=None, positions=None):
    """y (B, L, dim) and the weights (B, H, L, S) of a layer; keep and added broadcast to (B, H, L, S)."""
    memory = x if memory is None else memory
    q, k, v = layer.q_proj(x), layer.k_proj(memory), layer.v_proj(memory)
    if layer.qk_norm == "model":
        q, k = (rms(t, n.weight, n.eps) for t, n in ((q, layer.q_norm), (k, layer.k_norm)))
    q, k, v = (t.unflatten(-1, (-1, layer.head_dim)) for t in (q, k, v))
    if layer.qk_norm == "head":
        q, k = (rms(t, n.weight, n.eps) for t, n in ((q, layer.q_norm), (k, layer.k_norm)))
    if layer.rotary is not None:
        positions = torch.arange(x.shape[1]) if positions is None else positions
        q, k = (turned(t, positions, layer.rotary.base) for t in (q, k))
    groups = layer.heads // layer.kv_heads
    k, v = (t.repeat_interleave(groups, 2) for t in (k, v))
    scale = 1 / math.sqrt(layer.head_dim) if layer.scale is None else layer.scale
    scores = torch.einsum("blhd,bshd->bhls", q, k) * scale
    if layer.softcap is not None:
        scores = layer.softcap * torch.tanh(scores / layer.softcap)
    if added is not None:
        scores = scores + added
    if keep is not None:
        scores = scores.masked_fill(~keep, -math.inf)
    sinks = x.new_full((layer.heads,), -math.inf) if layer.sinks is None else layer.sinks
    column = sinks[:, None, None].expand(*scores.shape[:3], 1)
    hidden = (scores == -math.inf).all(-1, keepdim=True)
    whole = torch.cat((scores, column), -1).masked_fill(hidden, 0.0)
    weights = torch.softmax(whole, -1)[..., :-1].masked_fill(hidden, 0.0)
    heads = torch.einsum("bhls,bshd->blhd", weights, v)
    return layer.o_proj(heads.flatten(2)), weights
