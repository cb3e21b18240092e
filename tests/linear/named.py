"""Calls of the named functions of the linear family, and their recurrences told in numpy."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import qkv

B, H, K, L, D, V = 2, 4, 2, 37, 5, 3
CU = [0, 5, 5, 6, 37, 37]
LENGTHS = np.diff(CU).tolist()


class Rule(NamedTuple):
    """What a function takes beside q, k and v, in its order, and its default scale."""

    takes: str = ""  # g: a number a token, G: one a key channel, b: beta, d: a constant a head
    scale: float = 1 / math.sqrt(D)
    normalize: bool = False


RULES = {
    "linear_attention": Rule(scale=1.0, normalize=True),
    "retention": Rule("d"),
    "gated_linear_attention": Rule("G"),
    "delta_rule": Rule("b"),
    "gated_delta_rule": Rule("gb"),
    "kimi_delta_attention": Rule("Gb"),
    "ssd": Rule("g", 1.0),
}
EACH = pytest.mark.parametrize("name", RULES)
ENGINES = pytest.mark.parametrize("backend", ["auto", "chunked", "reference"])


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


class Given(NamedTuple):
    """Arguments of one call, in order (B, H, L, *)."""

    tensors: list[Tensor]  # q, k, v
    beside: dict[str, Tensor]  # by argument name

    def to(self, dtype: torch.dtype, beside: torch.dtype | None = None) -> Given:
        wide = beside or dtype
        return Given([x.to(dtype) for x in self.tensors], {name: x.to(wide) for name, x in self.beside.items()})

    def part(self, rows: slice) -> Given:
        beside = {name: x if name == "decay" else x[:, :, rows] for name, x in self.beside.items()}
        return Given([x[:, :, rows] for x in self.tensors], beside)


def given(name: str, *, batch: int = B, heads: int = H, length: int = L, seed: int = 0) -> Given:
    q, k = (normal(batch, K, length, D, seed=seed + n) for n in range(2))
    v = normal(batch, heads, length, V, seed=seed + 2)
    found = {
        "g": ("g", -normal(batch, heads, length, seed=seed + 3).exp()),
        "G": ("g", -normal(batch, heads, length, D, seed=seed + 3).exp()),
        "b": ("beta", normal(batch, heads, length, seed=seed + 4).sigmoid() * 2),
        "d": ("decay", -normal(heads, seed=seed + 5).exp()),
    }
    return Given([q, F.normalize(k, dim=-1), v], dict(found[letter] for letter in RULES[name].takes))


def first_state(name: str, count: int = B, heads: int = H) -> Tensor:
    state = normal(count, heads, D, V + RULES[name].normalize, seed=9)
    return state.abs() if RULES[name].normalize else state


def ask(name: str, one: Given, **options: Any) -> Any:
    return getattr(qkv, name)(*one.tensors, **one.beside, **options)


def told(name: str, one: Given, state: Tensor | None = None, scale: float | None = None) -> tuple[Tensor, Tensor]:
    """Output and last state by the recurrence, token by token, in float64 numpy."""
    rule = RULES[name]
    q, k, v = (x.double().numpy() for x in one.tensors)
    q, k = (np.repeat(x, v.shape[1] // x.shape[1], axis=1) for x in (q, k))
    if rule.normalize:
        q, k = (np.where(x > 0, x + 1, np.exp(np.minimum(x, 0))) for x in (q, k))
        v = np.concatenate([v, np.ones_like(v[..., :1])], axis=-1)
    beside = {key: x.double().numpy() for key, x in one.beside.items()}
    g = beside.get("g", np.zeros(v.shape[:3]))
    g = beside["decay"][None, :, None] + g if "decay" in beside else g
    g = g[..., None] if g.ndim == 3 else g
    s = np.zeros((*v.shape[:2], q.shape[-1], v.shape[-1])) if state is None else state.double().numpy()
    out = np.zeros(v.shape)
    for t in range(v.shape[2]):
        s = np.exp(g[:, :, t])[..., None] * s
        write = v[:, :, t]
        if "beta" in beside:
            write = beside["beta"][:, :, t, None] * (write - np.einsum("bhdv,bhd->bhv", s, k[:, :, t]))
        s = s + k[:, :, t, :, None] * write[:, :, None]
        out[:, :, t] = np.einsum("bhdv,bhd->bhv", s, q[:, :, t])
    out = out[..., :-1] / out[..., -1:] if rule.normalize else out * (rule.scale if scale is None else scale)
    return torch.from_numpy(out), torch.from_numpy(s)


def near(found: Tensor, wanted: Tensor, bound: float = 1e-12) -> None:
    torch.testing.assert_close(found.double(), wanted.double(), rtol=bound, atol=bound)


def lengthwise(x: Tensor) -> Tensor:
    """(B, H, L, ...) as a contiguous (B, L, H, ...)."""
    return x.transpose(1, 2).contiguous()
