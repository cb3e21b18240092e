"""Oracle of the linear family: every token by itself in float64 numpy, sharing no code with qkv; and seeded questions.

`Question` says in a few words what is asked, `made` turns it into tensors, `known` answers it, and `hold` says how far
an engine may be off.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from qkv.linear import reference
from qkv.linear.recurrence import Outcome, Recurrence, Streams

Array = NDArray[np.float64]

# name: gate, delta, normalize, feature
MODES = {
    "add": ("none", False, False, "none"),
    "add-scalar": ("scalar", False, False, "none"),
    "add-vector": ("vector", False, False, "none"),
    "delta": ("none", True, False, "none"),
    "delta-scalar": ("scalar", True, False, "none"),
    "delta-vector": ("vector", True, False, "none"),
    "normalized": ("none", False, True, "elu"),
    "normalized-relu": ("none", False, True, "relu"),
    "normalized-scalar": ("scalar", False, True, "elu"),
    "squared": ("none", False, False, "squared_relu"),
}
GATED = [name for name, mode in MODES.items() if mode[0] != "none" and not mode[2]]
DELTA = [name for name, mode in MODES.items() if mode[1]]
PLAIN = ["add", "add-scalar", "add-vector", "delta", "delta-scalar", "delta-vector"]


@dataclass(frozen=True, kw_only=True)
class Question:
    """One call: mode, sizes, and what kind of numbers it reads."""

    mode: str
    batch: int = 2
    key_heads: int = 2
    group: int = 1
    length: int = 37
    key_dim: int = 24
    value_dim: int = 40
    dtype: torch.dtype = torch.float32
    gates: str = "mild"  # "mild", "mixed", "constant" with all strides 0, "line", or one number
    betas: str = "free"  # 0 .. 2, or one number
    keys: str = "unit"  # "unit", "identical", "alternating", "zero"
    strides: str = "dense"  # "dense", "swapped", "steps", "shared", "channels"
    state: bool = True
    starts: tuple[int, ...] | None = None
    seed: int = 0

    def but(self, **changes: object) -> Question:
        return replace(self, **changes)  # type: ignore[arg-type]

    @property
    def recurrence(self) -> Recurrence:
        gate, delta, normalize, feature = MODES[self.mode]
        return Recurrence(
            batch=self.batch,
            heads=self.key_heads * self.group,
            key_heads=self.key_heads,
            length=self.length,
            key_dim=self.key_dim,
            value_dim=self.value_dim,
            gate=gate,
            delta=delta,
            normalize=normalize,
            feature=feature,
            scale=1 / math.sqrt(self.key_dim),
            starts=self.starts,
            dtype=self.dtype,
        )


# Tensors


def made(question: Question) -> tuple[Recurrence, Streams]:
    """The question's tensors; the same numbers for the same seed, whatever the strides."""
    r, rng = question.recurrence, np.random.default_rng(question.seed)
    rows = (r.batch, r.heads, r.length)
    query = rng.standard_normal((r.batch, r.key_heads, r.length, r.key_dim))
    key = _keys(question.keys, rng, query.shape)
    value = rng.standard_normal((*rows, r.value_dim))
    gate = _gates(question.gates, rng, rows if r.gate == "scalar" else (*rows, r.key_dim))
    beta = rng.uniform(0, 2, rows) if question.betas == "free" else np.full(rows, float(question.betas))
    state = rng.standard_normal(r.state_shape)
    if r.normalize:
        state[..., -1] = np.abs(state[..., -1]) + 1  # sums of weights are not negative
    wide, narrow = r.compute_dtype, r.dtype
    laid = [
        _laid(torch.from_numpy(x).to(dtype), question.strides)
        for x, dtype in ((query, narrow), (key, narrow), (value, narrow), (gate, wide), (beta, wide))
    ]
    if question.gates == "constant":
        laid[3] = torch.full((), -0.3, dtype=wide).expand(gate.shape)
    q, k, v, g, b = laid
    first = torch.from_numpy(state).to(wide) if question.state else None
    return r, Streams(q, k, v, g if r.gate != "none" else None, b if r.delta else None, first)


def _keys(kind: str, rng: np.random.Generator, shape: tuple[int, ...]) -> Array:
    """Of length 1, or all zero."""
    keys = rng.standard_normal(shape)
    keys /= np.linalg.norm(keys, axis=-1, keepdims=True)
    if kind == "zero":
        return np.zeros(shape)
    if kind in {"identical", "alternating"} and shape[2]:
        keys = np.repeat(keys[:, :, :1], shape[2], 2)
    if kind == "alternating":
        keys[:, :, 1::2] *= -1
    return keys


def _gates(kind: str, rng: np.random.Generator, shape: tuple[int, ...]) -> Array:
    """Logarithms of decays. "line": sums go through -87 to -103, where exp is not a normal number."""
    if kind == "mild":
        return -rng.uniform(0, 0.3, shape)
    if kind == "mixed":
        return rng.choice([0.0, 0.0, -0.01, -1.0, -5.0, -80.0, -100.0, -math.inf], shape)
    if kind == "line":
        return np.full(shape, -1.55) - rng.uniform(0, 0.01, shape)
    return np.full(shape, -0.3 if kind == "constant" else float(kind))


def _laid(tensor: Tensor, kind: str) -> Tensor:
    """The same numbers in other places of memory."""
    if kind == "swapped":  # tokens before heads
        return tensor.transpose(1, 2).contiguous().transpose(1, 2)
    if kind == "steps":  # every second number of a larger tensor, of every axis
        room = tensor.new_full([2 * n for n in tensor.shape], math.nan)
        place = room[(slice(1, None, 2),) * tensor.ndim]
        place.copy_(tensor)
        return place
    if kind == "shared":  # one head for all
        return tensor[:, :1].expand(tensor.shape)
    if kind == "channels":  # the last axis outermost
        return tensor.movedim(-1, 0).contiguous().movedim(0, -1)
    return tensor.contiguous()


# The oracle


def oracle(r: Recurrence, streams: Streams) -> tuple[Array, Array]:
    """Output (B, H, L, V) and last state (N, H, D, W), token by token."""
    q, k, v, gate, beta, first = (None if x is None else x.detach().to(torch.float64).numpy() for x in streams)
    assert q is not None and k is not None and v is not None
    q, k = _phi(r.feature, q), _phi(r.feature, k)
    output, state = np.zeros(v.shape), np.zeros(r.state_shape)
    if first is not None:
        state[:] = first
    for n, (b, tokens) in enumerate(_sequences(r)):
        for h, t in itertools.product(range(r.heads), tokens):
            row, S = (b, h, t), state[n, h]
            q_t, k_t = q[b, h // r.group, t], k[b, h // r.group, t]
            v_t = np.append(v[row], 1.0) if r.normalize else v[row]
            if gate is not None:
                S *= np.exp(np.broadcast_to(gate[row], r.key_dim))[:, None]
            S += np.outer(k_t, v_t if beta is None else beta[row] * (v_t - S.T @ k_t))
            o = r.scale * (S.T @ q_t)
            if r.normalize:
                o = o[:-1] / o[-1] if o[-1] != 0 else np.zeros(r.value_dim)
            output[row] = o
    return output, state


def _sequences(r: Recurrence) -> list[tuple[int, range]]:
    """(row of the batch, its tokens) of each sequence."""
    if r.starts is None:
        return [(b, range(r.length)) for b in range(r.batch)]
    return [(0, range(*ends)) for ends in itertools.pairwise(r.starts)]


def _phi(feature: str, x: Array) -> Array:
    if feature == "elu":
        return np.where(x > 0, x + 1, np.exp(np.minimum(x, 0)))
    return {"none": x, "relu": np.maximum(x, 0), "squared_relu": np.maximum(x, 0) ** 2}[feature]


# What an engine gives, and what it may give


class Found(NamedTuple):
    """Everything about one call; gradients by stream name."""

    output: Tensor
    state: Tensor
    gradients: dict[str, Tensor]


def incoming(r: Recurrence, seed: int = 1) -> tuple[Tensor, Tensor]:
    """Gradients of output and last state, exact in the type of the output."""
    rng = np.random.default_rng(seed)
    shapes = ((r.batch, r.heads, r.length, r.value_dim), r.state_shape)
    output, state = (torch.from_numpy(rng.standard_normal(shape)) for shape in shapes)
    return output.to(r.dtype), state.to(r.compute_dtype)


def asked(answer: object, r: Recurrence, streams: Streams, given: tuple[Tensor, Tensor] | None = None) -> Found:
    """An engine's answer with the gradients of all streams, through output and last state."""
    leaves = Streams(*(None if x is None else x.detach().requires_grad_() for x in streams))
    outcome = answer(r, leaves)  # type: ignore[operator]
    named = {name: x for name, x in leaves._asdict().items() if x is not None}
    given = incoming(r) if given is None else given
    linked = [(x, g.to(x.dtype)) for x, g in zip(outcome, given, strict=True) if x.requires_grad]
    outputs, grads = ([pair[n] for pair in linked] for n in (0, 1))
    found = torch.autograd.grad(outputs, list(named.values()), grads, allow_unused=True)
    pairs = zip(named.items(), found, strict=True)
    gradients = {name: torch.zeros_like(x) if g is None else g for (name, x), g in pairs}
    return Found(outcome.output.detach(), outcome.state.detach(), gradients)


def exact(r: Recurrence, streams: Streams) -> Found:
    """The same in float64, by autograd through the reference, whose values are held against the oracle elsewhere."""
    wide = Streams(*(None if x is None else x.to(torch.float64) for x in streams))
    return asked(reference.answer, replace(r, dtype=torch.float64), wide, incoming(r))


def absolute(r: Recurrence, streams: Streams) -> Found:
    """The sums of the sizes of all terms: the exact answer of the same question without any sign.

    A quotient N / D counts as N / D + (N / D²) D, with no derivative of the factors 1 / D and N / D², so that its
    derivatives add up as well. Features are not negative, and neither are their slopes.
    """
    wide = Streams(*(None if x is None else x.to(torch.float64) for x in streams))
    q, k = (x.abs() if r.feature == "none" else x for x in wide[:2])
    v, state = wide.value.abs(), None if wide.state is None else wide.state.abs()
    given = incoming(r)
    positive = (given[0].double().abs(), given[1].double().abs())

    def signless(_: Recurrence, all_of: Streams) -> Outcome:
        if not r.normalize:
            return reference.answer(replace(r, dtype=torch.float64), all_of)
        value = torch.nn.functional.pad(all_of.value, (0, 1), value=1.0)
        alone = replace(r, dtype=torch.float64, value_dim=r.value_dim + 1, normalize=False)
        outcome = reference.answer(alone, all_of._replace(value=value))
        upper, lower = outcome.output.split([r.value_dim, 1], -1)
        fixed = torch.where(lower == 0, math.inf, lower).detach()
        return Outcome(upper / fixed + upper.detach() / fixed / fixed * lower, outcome.state)

    return asked(signless, replace(r, dtype=torch.float64), Streams(q, k, v, wide.gate, wide.beta, state), positive)


class Truth(NamedTuple):
    """The exact answer, and without delta rule the sizes of all terms of its sums."""

    exact: Found
    sizes: Found | None


def truth(r: Recurrence, streams: Streams) -> Truth:
    return Truth(exact(r, streams), None if r.delta else absolute(r, streams))


@lru_cache(64)
def known(question: Question) -> Truth:
    """That of a question as `made` makes it: engines are asked one after another."""
    return truth(*made(question))


SHARE = 84  # unit roundings that a delta rule may be off, of the greatest number: 5e-6 in float32


def hold(found: Found, r: Recurrence, true: Truth, what: str = "", *, share: int = SHARE) -> None:
    """Raise unless all results are within their bounds.

    Without delta rule every result is a sum of products. The bound is one rounding for each factor and addition on its
    longest way times the sum of the sizes of all terms, and SHARE roundings of the greatest such sum. For a delta rule
    it is SHARE roundings of the greatest exact number of the tensor. Decays add one a token: each is an exp, multiplied
    on. A result of 16 bits is rounded once more.
    """
    unit = torch.finfo(r.compute_dtype).eps / 2
    for name, mine, theirs, sizes in _named(found, true.exact, true.sizes or true.exact):
        narrow = name.split()[-1] in {"output", "query", "key", "value"}
        assert mine.dtype == (r.dtype if narrow else r.compute_dtype), name
        assert mine.shape == theirs.shape, name
        if not mine.numel():
            continue
        size = sizes.abs()
        decays = r.length if r.gate != "none" else 0
        allowed = (share + decays) * unit * size.max().expand(size.shape)
        if true.sizes is not None:
            allowed = torch.minimum(allowed, unit * (4 * r.length + r.key_dim + r.value_dim + 16) * size)
        kind = torch.finfo(mine.dtype)
        if mine.dtype != r.compute_dtype:
            allowed = allowed + kind.eps / 2 * theirs.abs() + kind.smallest_normal * kind.eps
        allowed = allowed + 64 * torch.finfo(r.compute_dtype).tiny * (1 + size.max())
        error = (mine.to(torch.float64) - theirs).abs()
        worst = (error / allowed).nan_to_num(math.inf).max().item()
        assert worst <= 1, f"{what} {name} is off by {worst:.3g} of its bound, {error.nan_to_num(math.inf).max():.3g}"


def _named(*all_found: Found) -> list[tuple[Any, ...]]:
    names = ["output", "state", *(f"gradient of {name}" for name in all_found[0].gradients)]
    columns = ((one.output, one.state, *one.gradients.values()) for one in all_found)
    return list(zip(names, *columns, strict=True))
