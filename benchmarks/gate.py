"""No number without a right result: outputs and gradients against float64, within the bound of tests/budgets.py.

Some rows of all heads are compared for the output and the query's gradient, each from its whole row in float64. Up to
WHOLE tokens, every number of the first and the last head besides; beyond, some keys of one head for the gradients of
key and value, each from all the rows that see it. What is compared is the very call that is timed, at full length.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from registry import Case, Data, Result

import budgets
import oracles

WHOLE = 1_024
ROWS = 24  # sampled rows, beside those at the edges of blocks
KEYS = 3  # sampled keys, beside those at the edges
CHUNK = 128  # rows that are computed together for the gradients of the sampled keys
Index: TypeAlias = tuple[int | slice | Tensor, ...]


class Refused(Exception):
    """A result that is not what float64 says, so that no number may be printed for it."""


class Claim(NamedTuple):
    """What some entries of one tensor of the result must be, and how far from it rounding may lead."""

    name: str  # a key of the result
    place: Index
    truth: Tensor
    bound: Tensor


def claims(case: Case, data: Data) -> list[Claim]:
    """Everything that is compared for one case at one length, whoever computed it."""
    rest = _whole if data.tokens <= WHOLE else _columns
    return [*_rows(case, data), *rest(case, data)]


def check(result: Result, expected: list[Claim]) -> float:
    """The greatest share of its bound that an entry uses; raises Refused where one goes beyond, or is NaN."""
    worst = 0.0
    for claim in expected:
        if claim.name in result:
            share = float(((result[claim.name][claim.place].double() - claim.truth).abs() / claim.bound).amax())
            if not share <= 1:
                what = claim.name if claim.name == "output" else f"gradient of {claim.name}"
                raise Refused(f"the {what} is {share:.3g} times its error bound away from float64")
            worst = max(worst, share)
    return worst


def _seen(case: Case, tokens: int, rows: Tensor, keys: Tensor | None = None) -> Tensor:
    """Which keys some rows see, (rows, S or keys), by the oracle's rule."""
    zero, keys = torch.zeros(1, dtype=torch.int64), torch.arange(tokens) if keys is None else keys
    pairs = oracles.Pairs(zero, zero, rows[:, None], keys, rows[:, None], tokens)
    return torch.as_tensor(case.rule(tokens)(pairs)).expand(len(rows), len(keys))


def _whole(case: Case, data: Data) -> Iterator[Claim]:
    """Every entry of the first and the last head."""
    allowed, last = _seen(case, data.tokens, torch.arange(data.tokens)), data.query.shape[1] - 1
    for head in (slice(0, 1), slice(last, last + 1)):
        part = Data(*(tensor[:, head] for tensor in data))
        yield from _oracle(part, allowed, (slice(None), head), ("query", "key", "value"))


def _rows(case: Case, data: Data) -> Iterator[Claim]:
    """Output and query's gradient of some rows of every head: all keys of these rows, nothing of others."""
    rows = sample(data.tokens, ROWS)
    allowed = _seen(case, data.tokens, rows)
    for head in range(data.query.shape[1]):
        one = Data(*(tensor[:, head : head + 1] for tensor in data))
        part = one._replace(query=one.query[:, :, rows], grad_output=one.grad_output[:, :, rows])
        yield from _oracle(part, allowed, (slice(None), slice(head, head + 1), rows), ("query",))


def _oracle(part: Data, allowed: Tensor, index: Index, names: tuple[str, ...]) -> Iterator[Claim]:
    """The oracle's output and gradients of part of the rows against all keys, with the bounds that belong to them."""
    q, k, v = (tensor.double().requires_grad_() for tensor in part[:3])
    call = budgets.Call(q, k, v, allowed, q.shape[-1] ** -0.5)
    truth = call.truth()
    gradients = torch.autograd.grad(truth.out, (q, k, v), part.grad_output.double())
    found = dict(zip(("query", "key", "value"), gradients, strict=True))
    bound, _ = budgets.backward(call, truth, torch.float32, part.grad_output)
    yield Claim("output", index, truth.out.detach(), budgets.forward(call, truth, torch.float32).out)
    for name in names:
        yield Claim(name, index, found[name], bound[name[0]])


def _columns(case: Case, data: Data) -> Iterator[Claim]:
    """Gradients of some keys and values of one head, from every row that sees them.

    dV_j = Σ_i p_ij dO_i and dK_j = scale Σ_i dS_ij q_i with dS = p (dP - D), D = dO·O; the bounds are those of
    `budgets.backward` for these columns alone, so that a chunk of rows costs one pass over its scores.
    """
    head = data.tokens % data.query.shape[1]
    keys = sample(data.tokens, KEYS, few=True)
    q, k, v, go = (tensor[0, head].double() for tensor in data)
    sums = [torch.zeros(len(keys), q.shape[1], dtype=torch.float64) for _ in range(4)]
    seeing = _seen(case, data.tokens, torch.arange(data.tokens), keys).any(1).nonzero()[:, 0]
    for rows in seeing.split(CHUNK) if len(seeing) else ():
        parts = _chunk(q[rows], k, v, go[rows], _seen(case, data.tokens, rows), keys, len(seeing))
        for total, part in zip(sums, parts, strict=True):
            total.add_(part)
    dk, dk_bound, dv, dv_bound = sums
    floor = budgets.floor_of(torch.float32)  # a key that nobody sees has gradient 0
    yield Claim("key", (0, head, keys), dk, dk_bound + floor)
    yield Claim("value", (0, head, keys), dv, dv_bound + floor)


def _chunk(
    q: Tensor, k: Tensor, v: Tensor, go: Tensor, allowed: Tensor, keys: Tensor, seeing: int
) -> tuple[Tensor, ...]:
    """dK and dV of the chosen keys with their bounds, as far as some rows give to them; `seeing` rows give in all."""
    u, _, tiny = budgets.constants(torch.float32)
    width, scale = q.shape[1], q.shape[1] ** -0.5
    scores = (scale * q @ k.mT).masked_fill_(~allowed, -oracles.INF)
    weights = scores.sub_(scores.amax(1, keepdim=True)).exp_()
    weights = weights.div_(weights.sum(1, keepdim=True))
    size = (scale * q.abs() @ k.abs().mT).masked_fill_(~allowed, 0.0).amax(1, keepdim=True)
    rows = 2 * (width + 4) * u * size + (allowed.sum(1, keepdim=True) + 8) * u
    p, centre = weights[:, keys], (go * (weights @ v)).sum(1, keepdim=True)
    d_weights, seen = go @ v[keys].mT - centre, allowed[:, keys].double()
    loose = (width + 4) * u * go.abs() @ v[keys].abs().mT
    loose = loose + ((width + 4) * u + rows) * (go.abs() * (weights @ v.abs())).sum(1, keepdim=True)
    slack = seen * ((p * rows + tiny) * d_weights.abs() + (p + tiny) * loose)
    slack = slack + (seeing + 4) * u * p * d_weights.abs()
    dk_bound, dv_bound = scale * slack.mT @ q.abs(), (p * rows + tiny + (seeing + 4) * u * p).mT @ go.abs()
    return scale * (p * d_weights).mT @ q, dk_bound, p.mT @ go, dv_bound


def sample(tokens: int, count: int, *, few: bool = False) -> Tensor:
    """Positions at edges of blocks and of the sequence, and `count` random ones; `few`: at the end alone."""
    edges = [tokens - 1, tokens - 64] if few else [0, 1, 63, 64, tokens // 2, tokens - 65, tokens - 64, tokens - 1]
    drawn = torch.randint(tokens, (count,), generator=torch.Generator().manual_seed(tokens + few))
    return torch.tensor(sorted({*edges, *drawn.tolist()}))
