"""The seeded tensors of a comparison: the same q, k and v for every family, gates as trained models have them."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from qkv.compare.families import Family
from qkv.compare.setting import Setting

FADES = 0.1  # the most that the logarithm of a state loses in a token


def make_streams(family: Family, setting: Setting, tokens: int, heads: int | None = None) -> dict[str, Tensor]:
    """Normal q, k (1, H, L, D) and v (1, H, L, V); g in -FADES .. 0, beta in 0 .. 1, the decay of a retention.

    A delta rule gets q and k of length 1. Gates are float32 beside 16 bits, as states are.
    """
    heads, dtype = setting.heads if heads is None else heads, setting.torch_dtype
    wide = torch.promote_types(dtype, torch.float32)
    generator = torch.Generator().manual_seed(setting.seed)
    query, key = torch.randn(2, 1, heads, tokens, setting.head_dim, generator=generator).unbind(0)
    value = torch.randn(1, heads, tokens, setting.value_dim, generator=generator)
    if family.unit:
        query, key = F.normalize(query, dim=-1), F.normalize(key, dim=-1)
    streams = {"query": query.to(dtype), "key": key.to(dtype), "value": value.to(dtype)}
    if "g" in family.reads:
        gate = (1, heads, tokens, setting.head_dim) if family.vector else (1, heads, tokens)
        streams["g"] = torch.rand(gate, generator=generator).mul_(-FADES).to(wide)
    if "beta" in family.reads:
        streams["beta"] = torch.rand(1, heads, tokens, generator=generator).to(wide)
    if "decay" in family.reads:
        streams["decay"] = decay(heads).to(wide)
    return streams


def make_gradient(setting: Setting, tokens: int, heads: int | None = None) -> Tensor:
    """What the output receives, (1, H, L, V)."""
    heads = setting.heads if heads is None else heads
    generator = torch.Generator().manual_seed(setting.seed + 1)
    return torch.randn(1, heads, tokens, setting.value_dim, generator=generator).to(setting.torch_dtype)


def decay(heads: int) -> Tensor:
    """(H,): log(1 - 2^(-5 - h)) of head h, from h = 8 on over again. Source: Sun et al., RetNet (2023)."""
    return torch.log1p(-torch.exp2(-5.0 - torch.arange(heads) % 8))
