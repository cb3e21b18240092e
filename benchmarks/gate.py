"""No number without a right result: outputs and gradients against float64, within the bound of tests/budgets.py.

Some rows of all heads are compared for the output and the query's gradient, each from its whole row in float64. Up to
WHOLE tokens, every number of the first and the last head besides; beyond, some keys of one head for the gradients of
key and value, each from all the rows that see it. What is compared is the very call that is timed, at full length.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from registry import DROPOUT_STATE, Case, Contender, Data, Direction, Extras, Result, make_data, recording
from timing import Sample, timed

import budgets
import oracles
from qkv import alibi_slopes

WHOLE = 1_024
ROWS = 24  # sampled rows, beside those at the edges of blocks
KEYS = 3  # sampled keys, beside those at the edges
CHUNK = 128  # rows that are computed together for the gradients of the sampled keys
LEVELS = 65_536  # of the numbers that decide what is dropped
Index: TypeAlias = tuple[int | slice | Tensor, ...]


class Refused(Exception):
    """A result that is not what float64 says, so that no number may be printed for it."""


class Claim(NamedTuple):
    """What some entries of one tensor of the result must be, and how far from it rounding may lead."""

    name: str  # a key of the result
    place: Index
    truth: Tensor
    bound: Tensor


class Ready(NamedTuple):
    """A call whose first run was right, the seconds of that run, and the share of the bound that its result uses."""

    run: Callable[[], object]
    first: Sample
    share: float


def gated(who: str, contender: Contender, direction: Direction, expected: Sequence[Claim]) -> Ready:
    """Prepare, run once, and compare before anything else happens."""
    with recording(direction):
        call = contender.prepare(direction)
        first, found = timed(call.run)
    try:
        return Ready(call.run, first, check(call.read(found), expected))
    except Refused as refused:
        raise Refused(f"{who}, {direction}: {refused}") from None


@cache
def expected(case: Case, tokens: int, head_dim: int, *, gradients: bool) -> list[Claim]:
    """The claims on the registry's own data, computed once."""
    return claims(case, make_data(tokens, case, head_dim), gradients=gradients)


def claims(case: Case, data: Data, *, gradients: bool = True) -> list[Claim]:
    """Everything that is compared for one case at one length, whoever computed it."""
    found = list(_rows(case, data, gradients))
    if data.tokens <= WHOLE:
        found += _whole(case, data, gradients)
    elif gradients:
        found += _columns(case, data)
    return found


def check(result: Result, expected: Sequence[Claim]) -> float:
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


def check_spread(output: Tensor, case: Case, data: Data) -> None:
    """Whether an output that another's random numbers dropped lies about the whole one as widely as the rate says.

    Dropping gives Σ p_j v_j a variance of Σ (p_j v_j)² · rate / (1 - rate). The mean square of what is seen over it is
    about 1; 0 where nothing is dropped, 2.25 where 0.2 is instead of 0.1.
    """
    rate, whole = case.extras.dropout_p, case._replace(extras=case.extras._replace(dropout_p=0.0))
    rows, squares = sample(data.tokens, ROWS), []
    for head in range(data.query.shape[1]):
        call = _asked(whole, data, rows, head)
        truth = call.truth()
        variance = truth.weights.square() @ call.v.square() * rate / (1 - rate)
        squares.append((output[:, head : head + 1, rows] - truth.out).square() / variance)
    mean = float(torch.stack(squares).mean())
    if not 0.5 < mean < 2:
        raise Refused(f"the output lies {mean:.3g} times as wide about the whole one as a dropout of {rate} makes it")


def _whole(case: Case, data: Data, gradients: bool) -> Iterator[Claim]:
    """Every entry of the first and the last head."""
    rows = torch.arange(data.tokens)
    for head in (0, data.query.shape[1] - 1):
        yield from _oracle(case, data, rows, head, tuple(data.trained) if gradients else ())


def _rows(case: Case, data: Data, gradients: bool) -> Iterator[Claim]:
    """Output and query's gradient of some rows of every head: all keys of these rows, nothing of others."""
    names = tuple(name for name in ("query", "bias") if name in data.trained and gradients)
    for head in range(data.query.shape[1]):
        yield from _oracle(case, data, sample(data.tokens, ROWS), head, names)


def _oracle(case: Case, data: Data, rows: Tensor, head: int, names: tuple[str, ...]) -> Iterator[Claim]:
    """The oracle's output and gradients of part of the rows against all keys, with the bounds that belong to them."""
    call, one = _asked(case, data, rows, head), slice(head, head + 1)
    trained = dict(zip(data.trained, (call.q, call.k, call.v, call.bias), strict=False))
    for name in names:
        trained[name].requires_grad_()
    truth = call.truth()
    place = {name: (slice(None), one, rows) for name in ("output", "query", "bias")}
    yield Claim("output", place["output"], truth.out.detach(), budgets.forward(call, truth, torch.float32).out)
    if names:
        grad_output = data.grad_output[:, one, rows]
        found = torch.autograd.grad(truth.out, [trained[name] for name in names], grad_output.double())
        bound, summed = budgets.backward(call, truth, torch.float32, grad_output)
        for name, gradient in zip(names, found, strict=True):
            most = summed(lambda each: each, 1) if name == "bias" else bound[name[0]]
            yield Claim(name, place.get(name, (slice(None), one)), gradient, most)


def _asked(case: Case, data: Data, rows: Tensor, head: int) -> budgets.Call:
    """Some rows of one head against all its keys, as the oracle takes them."""
    one, extras = slice(head, head + 1), case.extras
    query, key, value = (tensor[:, one].double() for tensor in data[:3])
    return budgets.Call(
        query[:, :, rows],
        key,
        value,
        _seen(case, data.tokens, rows),
        query.shape[-1] ** -0.5,
        extras.softcap,
        _bias(extras, data, rows, head),
        None if data.sinks is None else data.sinks[one].double(),
        _kept(extras, data.tokens, rows, head),
        LEVELS / (LEVELS - oracles.threshold(extras.dropout_p)),
    )


def _seen(case: Case, tokens: int, rows: Tensor, keys: Tensor | None = None) -> Tensor:
    """Which keys some rows see, (rows, S or keys), by the oracle's rule."""
    zero, keys = torch.zeros(1, dtype=torch.int64), torch.arange(tokens) if keys is None else keys
    pairs = oracles.Pairs(zero, zero, rows[:, None], keys, rows[:, None], tokens)
    return torch.as_tensor(case.rule(tokens)(pairs)).expand(len(rows), len(keys))


def _bias(extras: Extras, data: Data, rows: Tensor, head: int) -> Tensor | None:
    """(1, 1, rows, S); the oracle's ALiBi takes each row for a batch row of its own, that begins there."""
    if extras.bias == "alibi":
        slopes = torch.tensor(alibi_slopes(data.query.shape[1])[head : head + 1])
        return oracles.alibi(slopes, (len(rows), 1, 1, data.tokens), rows.tolist()).permute(2, 1, 0, 3)
    return None if data.bias is None else data.bias[:, head : head + 1, rows].double()


def _kept(extras: Extras, tokens: int, rows: Tensor, head: int) -> Tensor | None:
    """Which weights stay, (1, 1, rows, S), by the rule of the seed that our calls draw."""
    if not extras.dropout_p:
        return None
    seed, sizes = oracles.drawn_seed(DROPOUT_STATE), (1, head + 1, 1, tokens)
    kept = [oracles.dropout_keep(seed, extras.dropout_p, sizes, row)[:, head:] for row in rows.tolist()]
    return torch.cat(kept, 2)


def _columns(case: Case, data: Data) -> Iterator[Claim]:
    """Gradients of some keys and values of one head, from every row that sees them.

    dV_j = Σ_i p_ij dO_i and dK_j = scale Σ_i dS_ij q_i with dS = p (dP - D), D = dO·O; the bounds are those of
    `budgets.backward` for these columns alone, so that a chunk of rows costs few passes over its scores.
    """
    assert case.extras.softcap is None, "no formula here for the gradients under a softcap"
    head = data.tokens % data.query.shape[1]
    keys = sample(data.tokens, KEYS, few=True)
    sums = [torch.zeros(len(keys), data.query.shape[3], dtype=torch.float64) for _ in range(4)]
    seeing = _seen(case, data.tokens, torch.arange(data.tokens), keys).any(1).nonzero()[:, 0]
    for rows in seeing.split(CHUNK) if len(seeing) else ():
        part = _chunk(_asked(case, data, rows, head), data.grad_output[0, head, rows].double(), keys, len(seeing))
        for total, added in zip(sums, part, strict=True):
            total.add_(added)
    dk, dk_bound, dv, dv_bound = sums
    floor = budgets.floor_of(torch.float32)  # a key that nobody sees has gradient 0
    yield Claim("key", (0, head, keys), dk, dk_bound + floor)
    yield Claim("value", (0, head, keys), dv, dv_bound + floor)


def _chunk(call: budgets.Call, go: Tensor, keys: Tensor, seeing: int) -> tuple[Tensor, ...]:
    """dK and dV of the chosen keys with their bounds, as far as some rows give to them; `seeing` rows give in all."""
    u, _, tiny = budgets.constants(torch.float32)
    truth = call.truth()
    rows = budgets.row_errors(call, budgets.score_errors(call, truth, u)[0], u)[0, 0]
    q, v, weights = call.q[0, 0], call.v[0, 0], truth.weights[0, 0]
    width = v.shape[1]
    stay = torch.ones_like(weights) if call.keep is None else call.keep[0, 0].double() * call.drop_scale
    kept = weights * stay
    centre = (go * truth.out[0, 0]).sum(1, keepdim=True)
    p, stay, seen = weights[:, keys], stay[:, keys], call.allowed[:, keys].double()
    d_weights = stay * (go @ v[keys].mT) - centre
    loose = (width + 4) * u * stay * (go.abs() @ v[keys].abs().mT)
    loose = loose + ((width + 4) * u + rows) * (go.abs() * (kept @ v.abs())).sum(1, keepdim=True)
    slack = seen * ((p * rows + tiny) * d_weights.abs() + (p + tiny) * loose)
    slack = slack + (seeing + 4) * u * p * d_weights.abs()
    dv_bound = ((p * rows + tiny + (seeing + 4) * u * p) * stay).mT @ go.abs()
    return call.scale * (p * d_weights).mT @ q, call.scale * slack.mT @ q.abs(), (p * stay).mT @ go, dv_bound


def sample(tokens: int, count: int, *, few: bool = False) -> Tensor:
    """Positions at edges of blocks and of the sequence, and `count` random ones; `few`: at the end alone."""
    edges = [tokens - 1, tokens - 64] if few else [0, 1, 63, 64, tokens // 2, tokens - 65, tokens - 64, tokens - 1]
    drawn = torch.randint(tokens, (count,), generator=torch.Generator().manual_seed(tokens + few))
    return torch.tensor(sorted({edge for edge in edges if 0 <= edge < tokens} | {*drawn.tolist()}))
