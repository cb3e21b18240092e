"""No number without a right result: outputs and gradients against float64, within the bound of tests/budgets.py.

Some rows of all heads are compared for the output and the query's gradient, each from its whole row in float64. Up to
WHOLE tokens, every number of the first and the last head besides; beyond, some keys of one head for the gradients of
key and value, each from all the rows that see it. What is compared is the very call that is timed, at full length.

With 16-bit inputs the bound allows what implementations round besides their results: ours the weights, and their
gradients, before they multiply; torch's its sums of gradients too, once a block.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from registry import DROPOUT_STATE, Case, Contender, Data, Direction, Extras, Result, recording
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
Roundings: TypeAlias = dict[str, int]  # how many of a claim's roundings are allowed, by its name
OURS_ROUND: Roundings = dict.fromkeys(("output", "query", "key", "value"), 1)


class Refused(Exception):
    """A result that is not what float64 says, so that no number may be printed for it."""


class Claim(NamedTuple):
    """What some entries of one tensor of the result must be, and how far from it rounding may lead."""

    name: str  # a key of the result
    place: Index
    truth: Tensor
    bound: Tensor
    rounding: Tensor | None = None  # what rounding each product's factor or a sum of theirs once more may cost


class Part(NamedTuple):
    """Some query rows of one head of one batch row."""

    batch: int
    head: int
    rows: Tensor

    @property
    def place(self) -> Index:
        """Where they stand in (B, H, L, D)."""
        return slice(self.batch, self.batch + 1), slice(self.head, self.head + 1), self.rows


class Ready(NamedTuple):
    """A call whose first run was right, the seconds of that run, and the share of the bound that its result uses."""

    run: Callable[[], object]
    first: Sample
    share: float


def gated(
    who: str, contender: Contender, direction: Direction, expected: Sequence[Claim], roundings: Roundings = OURS_ROUND
) -> Ready:
    """Prepare, run once, and compare before anything else happens."""
    with recording(direction):
        call = contender.prepare(direction)
        first, found = timed(call.run)
    try:
        return Ready(call.run, first, check(call.read(found), expected, roundings))
    except Refused as refused:
        raise Refused(f"{who}, {direction}: {refused}") from None


def torch_rounds(case: Case, tokens: int) -> Roundings:
    """torch adds gradients up in the inputs' type: keys' over blocks of 32 to 256 queries, queries' of 512 keys."""
    sizes = case.lengths(tokens) if case.lengths else [tokens]
    blocks = max(math.ceil(size / (256 if size >= 768 else 64 if size >= 192 else 32)) for size in sizes)
    return {"output": 1, "query": 1 + math.ceil(max(sizes) / 512), "key": 1 + blocks, "value": 1 + blocks}


def claims(case: Case, data: Data, *, gradients: bool = True) -> list[Claim]:
    """Everything that is compared for one case at one length, whoever computed it."""
    found = list(_rows(case, data, gradients))
    if data.tokens <= WHOLE:
        found += _whole(case, data, gradients)
    elif gradients:
        found += _columns(case, data)
    return found


def check(result: Result, expected: Sequence[Claim], roundings: Roundings = OURS_ROUND) -> float:
    """The greatest share of its bound that an entry uses; raises Refused where one goes beyond, or is NaN."""
    worst = 0.0
    for claim in expected:
        if claim.name in result:
            bound = claim.bound if claim.rounding is None else claim.bound + roundings[claim.name] * claim.rounding
            share = float(((result[claim.name][claim.place].double() - claim.truth).abs() / bound).amax())
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
    squares = []
    for part in _parts(data, sample(data.tokens, ROWS)):
        call = _asked(whole, data, part)
        truth = call.truth()
        variance = truth.weights.square() @ call.v.square() * rate / (1 - rate)
        squares.append((output[part.place] - truth.out).square() / variance)
    mean = float(torch.stack(squares).mean())
    if not 0.5 < mean < 2:
        raise Refused(f"the output lies {mean:.3g} times as wide about the whole one as a dropout of {rate} makes it")


def _parts(data: Data, rows: Tensor) -> Iterator[Part]:
    """These rows of every head of every batch row."""
    for batch, head in product(*map(range, data.query.shape[:2])):
        yield Part(batch, head, rows)


def _whole(case: Case, data: Data, gradients: bool) -> Iterator[Claim]:
    """Every entry of the first and the last head."""
    batch, heads, queries, _ = data.query.shape
    for part in (Part(0, 0, torch.arange(queries)), Part(batch - 1, heads - 1, torch.arange(queries))):
        yield from _oracle(case, data, part, tuple(data.trained) if gradients else ())


def _rows(case: Case, data: Data, gradients: bool) -> Iterator[Claim]:
    """Output and query's gradient of some rows of every head: all keys of these rows, nothing of others."""
    names = tuple(name for name in ("query", "bias") if name in data.trained and gradients)
    for part in _parts(data, sample(data.query.shape[2], ROWS)):
        yield from _oracle(case, data, part, names)


def _oracle(case: Case, data: Data, part: Part, names: tuple[str, ...]) -> Iterator[Claim]:
    """The oracle's output and gradients of part of the rows against all keys, with the bounds that belong to them."""
    assert not {"key", "value"} & {*names} or data.key.shape[1] == data.query.shape[1], "a group shares its gradient"
    call, dtype = _asked(case, data, part), data.query.dtype
    trained = dict(zip(data.trained, (call.q, call.k, call.v, call.bias), strict=False))
    for name in names:
        trained[name].requires_grad_()
    truth = call.truth()
    grad_output = data.grad_output[part.place]
    rounding = _roundings(call, truth, dtype, grad_output)
    bound = budgets.forward(call, truth, dtype).out
    yield Claim("output", part.place, truth.out.detach(), bound, rounding.get("output"))
    if names:
        found = torch.autograd.grad(truth.out, [trained[name] for name in names], grad_output.double())
        bounds, summed = budgets.backward(call, truth, dtype, grad_output)
        for name, gradient in zip(names, found, strict=True):
            most = summed(lambda each: each, 1) if name == "bias" else bounds[name[0]]
            place = part.place if name in ("query", "bias") else part.place[:2]
            yield Claim(name, place, gradient, most, rounding.get(name))


def _roundings(call: budgets.Call, truth: oracles.Truth, dtype: torch.dtype, grad_output: Tensor) -> dict[str, Tensor]:
    """For 16-bit inputs, by result: what rounding every weight, or its gradient, to their type may cost."""
    _, u_o, _ = budgets.constants(dtype)
    if not u_o:
        return {}
    assert call.softcap is None, "no formula here for 16 bits under a softcap"
    q, k, v = budgets.plain(call)
    stay = torch.ones(()) if call.keep is None else call.keep * call.drop_scale
    weights, go = truth.weights.detach(), grad_output.double()
    kept = weights * stay
    moved = abs(call.scale) * weights * (stay * (go @ v.mT) - (go * truth.out.detach()).sum(-1, keepdim=True)).abs()
    sizes = {"output": kept @ v.abs(), "query": moved @ k.abs(), "key": moved.mT @ q.abs(), "value": kept.mT @ go.abs()}
    return {name: u_o * size for name, size in sizes.items()}


def _asked(case: Case, data: Data, part: Part, keys: slice = slice(None)) -> budgets.Call:
    """Some rows of one head against its keys, as the oracle takes them; `keys`: all that these rows see."""
    batch, one = slice(part.batch, part.batch + 1), slice(part.head, part.head + 1)
    group, extras = data.query.shape[1] // data.key.shape[1], case.extras
    shared = slice(part.head // group, part.head // group + 1)
    bias = _bias(extras, data, part)
    kept = _kept(extras, data.tokens, part)
    return budgets.Call(
        data.query[part.place].double(),
        data.key[batch, shared, keys].double(),
        data.value[batch, shared, keys].double(),
        _seen(case, data, part, torch.arange(data.tokens)[keys]),
        data.query.shape[-1] ** -0.5,
        extras.softcap,
        None if bias is None else bias[..., keys],
        None if data.sinks is None else data.sinks[one].double(),
        None if kept is None else kept[..., keys],
        LEVELS / (LEVELS - oracles.threshold(extras.dropout_p)),
    )


def _seen(case: Case, data: Data, part: Part, keys: Tensor) -> Tensor:
    """Which keys some rows see, (rows, keys), by the oracle's rule; the last query stands at the last key."""
    row = part.rows[:, None]
    at = row + data.tokens - data.query.shape[2]
    pairs = oracles.Pairs(torch.tensor([part.batch]), torch.zeros(1, dtype=torch.int64), at, keys, row, data.tokens)
    return torch.as_tensor(case.rule(data.tokens)(pairs)).expand(len(row), len(keys))


def _bias(extras: Extras, data: Data, part: Part) -> Tensor | None:
    """(1, 1, rows, S); the oracle's ALiBi takes each row for a batch row of its own, that begins there."""
    if extras.bias == "alibi":
        slopes = torch.tensor(alibi_slopes(data.query.shape[1])[part.head : part.head + 1])
        return oracles.alibi(slopes, (len(part.rows), 1, 1, data.tokens), part.rows.tolist()).permute(2, 1, 0, 3)
    return None if data.bias is None else data.bias[part.place].double()


def _kept(extras: Extras, tokens: int, part: Part) -> Tensor | None:
    """Which weights stay, (1, 1, rows, S), by the rule of the seed that our calls draw."""
    if not extras.dropout_p:
        return None
    assert part.batch == 0, "the rule of the first batch row"
    seed, sizes = oracles.drawn_seed(DROPOUT_STATE), (1, part.head + 1, 1, tokens)
    kept = [oracles.dropout_keep(seed, extras.dropout_p, sizes, row)[:, part.head :] for row in part.rows.tolist()]
    return torch.cat(kept, 2)


def _columns(case: Case, data: Data) -> Iterator[Claim]:
    """Gradients of some keys and values of one head, from every row that sees them.

    dV_j = Σ_i p_ij dO_i and dK_j = scale Σ_i dS_ij q_i with dS = p (dP - D), D = dO·O; the bounds are those of
    `budgets.backward` for these columns alone, so that a chunk of rows costs few passes over its scores.
    """
    assert case.extras.softcap is None, "no formula here for the gradients under a softcap"
    head, dtype = data.tokens % data.query.shape[1], data.query.dtype
    keys = sample(data.tokens, KEYS, few=True)
    sums = [torch.zeros(len(keys), data.query.shape[3], dtype=torch.float64) for _ in range(6)]
    seeing = _seen(case, data, Part(0, head, torch.arange(data.tokens)), keys).any(1).nonzero()[:, 0]
    for rows in seeing.split(CHUNK) if len(seeing) else ():
        for total, added in zip(sums, _chunk(case, data, Part(0, head, rows), keys, len(seeing)), strict=True):
            total.add_(added)
    floor = budgets.floor_of(dtype) * (1 + len(seeing))  # a key that nobody sees has gradient 0
    for name, (truth, bound, size) in zip(("key", "value"), (sums[:3], sums[3:]), strict=True):
        _, u_o, _ = budgets.constants(dtype)
        yield Claim(name, (0, head, keys), truth, bound + u_o * truth.abs() + floor, u_o * size if u_o else None)


def _chunk(case: Case, data: Data, part: Part, keys: Tensor, seeing: int) -> tuple[Tensor, ...]:
    """dK and dV of the chosen keys, each with its bound and the sum of its products' sizes, as far as some rows give
    to them; `seeing` rows give in all.
    """
    u, u_o, tiny = budgets.constants(data.query.dtype)
    near = _seen(case, data, part, torch.arange(data.tokens)).any(0).nonzero()[:, 0]  # keys of any weight here
    first, last = int(near[0]), int(near[-1]) + 1
    call, go = _asked(case, data, part, slice(first, last)), data.grad_output[part.place][0, 0].double()
    truth = call.truth()
    rows = budgets.row_errors(call, budgets.score_errors(call, truth, u)[0], u)[0, 0]
    q, v, weights = call.q[0, 0], call.v[0, 0], truth.weights[0, 0]
    width = v.shape[1]
    stay = torch.ones_like(weights) if call.keep is None else call.keep[0, 0].double() * call.drop_scale
    kept = weights * stay
    centre = (go * truth.out[0, 0]).sum(1, keepdim=True)
    mass = (go.abs() * (kept @ v.abs())).sum(1, keepdim=True)
    inside = (keys >= first) & (keys < last)
    at = torch.where(inside, keys - first, 0)
    p, stay, seen = weights[:, at] * inside, stay[:, at] * inside, (call.allowed[:, at] & inside).double()
    d_weights = stay * (go @ v[at].mT) - centre
    loose = (width + 4) * u * stay * (go.abs() @ v[at].abs().mT) + ((width + 4) * u + rows + u_o) * mass
    slack = seen * ((p * rows + tiny) * d_weights.abs() + (p + tiny) * loose)
    slack = slack + (seeing + 4) * u * p * d_weights.abs()
    dv_slack = (p * rows + tiny + (seeing + 4) * u * p) * stay
    dk = [call.scale * grown.mT @ each for grown, each in ((p * d_weights, q), (slack, q.abs()))]
    dk_size = call.scale * (p * d_weights.abs()).mT @ q.abs()
    return *dk, dk_size, (p * stay).mT @ go, dv_slack.mT @ go.abs(), (p * stay).mT @ go.abs()


def sample(tokens: int, count: int, *, few: bool = False) -> Tensor:
    """Positions at edges of blocks and of the sequence, and `count` random ones; `few`: at the end alone."""
    edges = [tokens - 1, tokens - 64] if few else [0, 1, 63, 64, tokens // 2, tokens - 65, tokens - 64, tokens - 1]
    drawn = torch.randint(tokens, (count,), generator=torch.Generator().manual_seed(tokens + few))
    return torch.tensor(sorted({edge for edge in edges if 0 <= edge < tokens} | {*drawn.tolist()}))
