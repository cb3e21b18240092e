"""Builds an explanation: asks the question as `qkv.attention` does, runs the steps, compares with torch and qkv."""

from __future__ import annotations

import math
import warnings
from collections import Counter
from collections.abc import Sequence
from typing import TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from qkv.attention import attention
from qkv.dropout import draw_seed
from qkv.errors import AddedMaskWarning, ShapeError, SizeLimit, ValueOutOfRange, message
from qkv.explain import stages
from qkv.explain.examples import example
from qkv.explain.explanation import Explanation
from qkv.explain.steps import Check, Setting, Step
from qkv.patterns.pattern import Pattern
from qkv.problem import Problem, Tensors
from qkv.question import ask
from qkv.scores import Alibi, Relative

MAX_CELLS = 2**22  # B·H·L·S: an explanation holds every score several times over
T = TypeVar("T")


def explain(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    pattern: Pattern | None = None,
    bias: Tensor | Alibi | Relative | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    dropout_p: float = 0.0,
    seed: int = 0,
    query_offset: int | Sequence[int] | None = None,
    row: int | None = None,
    head: int = 0,
    batch: int = 0,
    tokens: Sequence[str] | None = None,
    key_tokens: Sequence[str] | None = None,
    title: str = "scaled dot-product attention",
) -> Explanation:
    """Every step of one small attention call, number by number, in float64.

    query (..., L, D), key (..., S, D), value (..., S, V) and the options as in `qkv.attention`; integers are welcome.
    `seed` draws the dropout mask that `torch.manual_seed(seed); qkv.attention(...)` would. `row`, `head` and `batch`
    choose what is told in words (the last row, the first head and batch row unless given); the steps hold them all.
    `tokens` name the queries (the keys too where L = S and `key_tokens` is not given).
    Raises what `qkv.attention` raises; SizeLimit above B·H·L·S = 4,194,304; ValueOutOfRange for a row not there.

    >>> e = explain(torch.tensor([[1, 0]]), torch.tensor([[1, 2], [0, 1]]), torch.eye(2))
    >>> e.steps["scores"].value
    tensor([[[[1., 0.]]]], dtype=torch.float64)
    """
    q, k, v = (_as_float64(tensor) for tensor in (query, key, value))
    bias = _as_float64(bias) if isinstance(bias, Tensor) and bias.is_floating_point() else bias
    question = ask(
        q,
        k,
        v,
        pattern=pattern,
        bias=bias,
        scale=scale,
        softcap=softcap,
        dropout_p=dropout_p,
        query_offset=query_offset,
    )
    problem, tensors = question.problem, question.tensors
    _check_size(problem)
    names = _labels(problem, tokens, key_tokens)
    allowed, added = _allowed(problem), _dense_bias(problem, tensors)
    setting = Setting(
        title=title,
        query=tensors.query.contiguous(),
        key=tensors.key.contiguous(),
        value=tensors.value.contiguous(),
        query_tokens=names[0],
        key_tokens=names[1],
        pattern=pattern,
        allowed=allowed if added is None else allowed & (added != -math.inf),
        scale=problem.scale,
        scale_given=scale is not None,
        softcap=softcap,
        bias=added,
        dropout_p=problem.dropout_p,
        seed=draw_seed(torch.Generator().manual_seed(seed)),
        query_offset=problem.origin.query,
        batch=_index("batch", batch, problem.batch),
        head=_index("head", head, problem.heads),
        row=_index("row", problem.queries - 1 if row is None else row, problem.queries),
    )
    offset = list(query_offset) if isinstance(query_offset, Sequence) else query_offset
    ours = _answer(setting, torch.Generator().manual_seed(seed), offset)
    return Explanation(setting=setting, steps=_steps(setting, ours))


def _answer(setting: Setting, generator: torch.Generator, query_offset: int | list[int] | None) -> Tensor:
    """What `qkv.attention` says to the same question."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", AddedMaskWarning)  # `ask` has just given it
        return attention(
            setting.query,
            setting.key,
            setting.value,
            pattern=setting.pattern,
            bias=setting.bias,
            scale=setting.scale,
            softcap=setting.softcap,
            dropout_p=setting.dropout_p,
            generator=generator,
            query_offset=query_offset,
            backend="reference",
        )


def worked_example(name: str = "article") -> Explanation:
    """A built-in example, explained: `article` (six keys, numbers to check by hand), `cat` (causal) or `cross`."""
    chosen = example(name)
    return explain(
        *chosen.tensors,
        pattern=chosen.pattern,
        tokens=chosen.query_tokens,
        key_tokens=chosen.key_tokens,
        title=chosen.title(name),
    )


def _as_float64(tensor: T) -> T | Tensor:
    """A tensor of real numbers in float64 on the CPU; anything else as it is, for `ask` to refuse."""
    if not isinstance(tensor, Tensor) or tensor.is_complex() or tensor.dtype == torch.bool:
        return tensor
    return tensor.detach().to("cpu", torch.float64)


def _check_size(problem: Problem) -> None:
    sizes = {"B": problem.batch, "H": problem.heads, "L": problem.queries, "S": problem.keys}
    if math.prod(sizes.values()) > MAX_CELLS:
        seen = f"got {' · '.join(f'{axis} = {size:,}' for axis, size in sizes.items())}"
        remedy = "pass a few rows or one head of your tensors"
        raise SizeLimit(message(f"explain shows at most B·H·L·S = {MAX_CELLS:,} scores", seen, remedy))
    for axis in ("B", "H", "L"):
        if sizes[axis] == 0:
            raise ShapeError(message("explain needs at least one query", f"got {axis} = 0", "pass a query row"))


def _index(name: str, index: int, size: int) -> int:
    if not -size <= index < size:
        remedy = "negative ones count from the end"
        raise ValueOutOfRange(message(f"`{name}` must lie in 0..{size - 1}", f"got {index}", remedy))
    return index % size


def _labels(
    problem: Problem, queries: Sequence[str] | None, keys: Sequence[str] | None
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Names of queries and keys: given, shared where L = S, else q0.. and k0.."""
    L, S = problem.queries, problem.keys
    if keys is None and queries is not None and len(queries) == S == L:
        keys = queries
    for name, given, axis, size in (("tokens", queries, "L", L), ("key_tokens", keys, "S", S)):
        if given is not None and len(given) != size:
            raise ShapeError(
                message(f"`{name}` must have {axis} = {size} names", f"got {len(given)}", "give one a row")
            )
    return (
        _distinct(queries) if queries is not None else tuple(f"q{i}" for i in range(L)),
        _distinct(keys) if keys is not None else tuple(f"k{j}" for j in range(S)),
    )


def _distinct(names: Sequence[str]) -> tuple[str, ...]:
    """Names that can be told apart: the second "the" becomes "the#2"."""
    seen: Counter[str] = Counter()
    distinct = []
    for name in names:
        seen[name] += 1
        distinct.append(name if seen[name] == 1 else f"{name}#{seen[name]}")
    return tuple(distinct)


def _allowed(problem: Problem) -> Tensor:
    """Which pairs the pattern holds, bool (B, H, L, S)."""
    B, H, L, S = problem.batch, problem.heads, problem.queries, problem.keys
    return problem.pattern.to_dense(L, S, batch=B, heads=H, query_offset=problem.origin.query).expand(B, H, L, S)


def _dense_bias(problem: Problem, tensors: Tensors) -> Tensor | None:
    """The bias as one number a pair, (B, H, L, S), or None."""
    if tensors.bias is None:
        return None
    bias = tensors.bias.detach().to("cpu", torch.float64)
    i = torch.tensor(problem.origin.query)[:, None, None, None] + torch.arange(problem.queries)[:, None]
    distance = torch.arange(problem.keys) - i  # (B or 1, 1, L, S)
    if problem.bias == "alibi":
        bias = -bias[None, :, None, None] * distance.abs()
    elif problem.bias == "relative":
        radius = bias.shape[1] // 2
        bias = bias[:, distance[:, 0].clamp(-radius, radius) + radius].transpose(0, 1)
    return bias.expand(problem.batch, problem.heads, problem.queries, problem.keys)


def _steps(setting: Setting, ours: Tensor) -> dict[str, Step]:
    """All steps in their order."""
    steps = [stages.scores(setting)]
    steps.append(stages.scale(setting, steps[-1].value))
    if setting.softcap is not None:
        steps.append(stages.softcap(setting, steps[-1].value, setting.softcap))
    if setting.bias is not None:
        steps.append(stages.add_bias(setting, steps[-1].value, setting.bias))
    steps.append(stages.mask(setting, steps[-1].value))
    steps.append(stages.softmax(setting, steps[-1].value))
    weights = steps[-1].value
    steps.append(stages.dropout(setting, weights))
    checks = (_against_torch(setting, weights), _against_qkv(setting, steps[-1].value, ours))
    steps.append(stages.output(setting, steps[-1].value, checks))
    return {step.key: step for step in steps}


def _against_torch(setting: Setting, weights: Tensor) -> Check:
    """The output before dropout against torch's own function, where that means the same."""
    name = "torch's scaled_dot_product_attention"
    finite = all(bool(tensor.isfinite().all()) for tensor in (setting.query, setting.key, setting.value))
    reasons = {
        "it has no softcap": setting.softcap is not None,
        "it needs a scale above 0": setting.scale <= 0,
        "it spreads NaN and infinity to rows that do not see them": not finite,
    }
    reason = next((reason for reason, holds in reasons.items() if holds), "")
    if reason:
        return Check(against=name, reason=reason)
    given = setting.allowed
    if setting.bias is not None:
        given = torch.where(setting.allowed, setting.bias, -math.inf)
    heads = setting.query.shape[1]
    theirs = F.scaled_dot_product_attention(
        setting.query,
        stages.grouped(setting.key, heads),
        stages.grouped(setting.value, heads),
        attn_mask=given,
        scale=setting.scale,
    )
    if setting.dropout_p > 0:
        name += " (before dropout, whose mask is qkv's own)"
    error = stages.difference(stages.weighted(setting, weights), theirs)
    return Check(against=name, error=error, bound=stages.bound(setting, stages.largest(setting.value)))


def _against_qkv(setting: Setting, weights: Tensor, ours: Tensor) -> Check:
    error = stages.difference(stages.weighted(setting, weights), ours)
    size = stages.largest(setting.value) / (1 - setting.dropout_p)
    return Check(against="qkv.attention (reference)", error=error, bound=stages.bound(setting, size))
