"""Cases of decoding, each made from a kind of pattern, a kind of cache and one integer: sequences that grow in chunks
and single tokens, and for each step what it must give.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import budgets
import oracles
import qkv
from exams import judge
from qkv.cache import contiguous, pool
from sweep_patterns import GRIDS, Pattern, Sizes, bits, ids_of, runs, simple_pattern

NAN = float("nan")
CACHES = ("contiguous", "paged", "rolling")
TYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
OPTIONS = ("none", "alibi", "relative", "tensor", "softcap", "sinks", "all")
SIMPLE = (
    *("none", "full", "causal", "window", "two_sided", "sliding_window", "dilated", "dilated_both", "strided", "fixed"),
    *("fixed_wide", "global", "global_list", "prefix_lm", "random_blocks", "random_ahead", "block_local", "longformer"),
    *("bigbird", "sparse_transformer", "sinks_and_window", "minus", "inverse", "empty_rows", "union", "where"),
)
GIVEN = (  # whose tensors have the sizes of a call, and grow with it
    *("documents", "documents_batch", "cu_seqlens", "key_lengths", "nothing_for_some", "key_padding", "mask"),
    *("mask_4d", "mask_bls", "mask_hls", "blocks", "blocks_heads", "per_head", "strided_documents"),
)
KINDS = (*SIMPLE, *GIVEN, *sorted(GRIDS))
AHEAD = 80  # rows of padding that a chunk may reach beyond the end of all sequences


class Step(NamedTuple):
    """A chunk of n rows for all sequences: where each stands, and how many rows of each are real."""

    before: list[int]
    counts: list[int]
    rows: int

    @property
    def after(self) -> list[int]:
        return [old + new for old, new in zip(self.before, self.counts, strict=True)]

    @property
    def ragged(self) -> bool:
        return any(count != self.rows for count in self.counts)


def steps_of(draw: random.Random, batch: int, total: int, *, ragged: bool) -> list[Step]:
    """From a prompt over single tokens and chunks to `total` keys of the longest sequence."""
    before, steps = [0] * batch, []
    while max(before) < total:
        rows = draw.choice([1, 1, 1, 2, 7, 17, 64, 70]) if steps else draw.choice([1, 30, 64, 100, 150])
        rows = min(rows, total - max(before))
        counts = [draw.choice([rows, draw.randrange(rows + 1)]) if ragged else rows for _ in range(batch)]
        counts[draw.randrange(batch)] = rows
        if max(old + new for old, new in zip(before, counts, strict=True)) > total:
            continue
        steps.append(Step(before, counts, rows))
        before = steps[-1].after
    return steps


def whole(kind: str, draw: random.Random, sizes: Sizes) -> Any:
    """Patterns of this kind at all lengths: one with its rule, or the tensors that they are cut from."""
    batch, heads, _, keys = sizes
    made = simple_pattern(kind, draw, sizes) if kind != "strided_documents" else None
    if made is not None:
        return made
    if kind == "per_head":
        parts = [
            simple_pattern(draw.choice(("strided", "window", "causal", "fixed")), draw, sizes) for _ in range(heads)
        ]
        assert all(parts)
        return qkv.per_head([one[0] for one in parts if one]), oracles.per_head([one[1] for one in parts if one])
    if kind in {"documents", "strided_documents"}:
        return torch.tensor(ids_of(draw, keys))
    if kind == "documents_batch":
        return torch.tensor([ids_of(draw, keys) for _ in range(batch)])
    if kind == "cu_seqlens":
        return runs(draw, keys)
    if kind in {"key_lengths", "nothing_for_some"}:
        lengths = torch.tensor([draw.randrange(keys + 1) for _ in range(batch)])
        lengths[0] *= kind == "key_lengths"
        return lengths
    if kind == "key_padding":
        return bits(draw, batch, keys)
    if kind.startswith("mask"):
        several = {"mask": (1, 1), "mask_4d": (batch, 1), "mask_bls": (batch, 1), "mask_hls": (1, heads)}[kind]
        return bits(draw, *several, keys + AHEAD, keys)
    assert kind in {"blocks", "blocks_heads"}
    count = -(-(keys + AHEAD) // 16)
    return bits(draw, *(() if kind == "blocks" else (batch, heads)), count, count)


def at(kind: str, made: Any, step: Step) -> Pattern:
    """The pattern of one step, with its rule."""
    keys, first = max(step.after), step.before
    if isinstance(made, tuple):
        return made
    if kind in {"documents", "documents_batch"}:
        return qkv.documents(made[..., :keys]), oracles.documents(made[..., :keys])
    if kind == "strided_documents":
        rule = oracles.both(oracles.strided(5), oracles.documents(made[:keys]))
        return qkv.strided(5) & qkv.documents(made[:keys]), rule
    if kind == "cu_seqlens":
        ends = sorted({min(end, keys) for end in made})
        rule = oracles.both(oracles.document_lengths(ends), oracles.causal())
        return qkv.documents(cu_seqlens=ends) & qkv.causal(), rule
    if kind in {"key_lengths", "nothing_for_some"}:
        lengths = made.clamp(max=keys)
        return qkv.key_lengths(lengths) & qkv.causal(), oracles.both(oracles.key_lengths(lengths), oracles.causal())
    if kind == "key_padding":
        return qkv.key_padding(keep=made[:, :keys]), oracles.key_padding(made[:, :keys])
    if kind.startswith("mask"):
        same = len(set(first)) == 1
        rows = [made[b % len(made), :, n : n + step.rows, :keys] for b, n in enumerate(first[: 1 if same else None])]
        keep = made[:, :, first[0] : first[0] + step.rows, :keys] if same else torch.stack(rows)
        return qkv.mask(keep=keep), oracles.mask(keep)
    return qkv.blocks(keep=made, block_size=16), oracles.blocks(made, 16)


def allowed(rule: oracles.Rule, step: Step, heads: int) -> Tensor:
    """Which pairs exist within the sequences: bool (B, H, n, S)."""
    keys, batch = max(step.after), len(step.before)
    first, last = (torch.tensor(ends).reshape(-1, 1, 1, 1) for ends in (step.before, step.after))
    row, j = torch.arange(step.rows)[:, None], torch.arange(keys)
    i = (first + row).clamp(max=keys - 1)
    b, h = torch.arange(batch).reshape(-1, 1, 1, 1), torch.arange(heads).reshape(-1, 1, 1)
    answer = torch.as_tensor(rule(oracles.Pairs(b, h, i, j, row, keys)))
    return answer.expand(batch, heads, step.rows, keys) & (first + row < last) & (j < last)


def cache_of(kind: str, shape: Sequence[int], total: int, pattern: Any, dtype: torch.dtype) -> Any:
    """A cache (B, G, D, V) for sequences of `total` keys."""
    batch, groups, width, value = shape
    if kind == "contiguous":
        return qkv.KVCache(batch, groups, total, width, value, dtype=dtype)
    if kind == "paged":
        return qkv.PagedKVCache(batch, groups, batch * -(-total // 64), width, value, dtype=dtype)
    pattern = qkv.full() if pattern is None else pattern
    return qkv.RollingKVCache.for_pattern(pattern, batch, groups, width, value, dtype=dtype)


@contextmanager
def poisoned(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Memory that holds NaN before it is written to, and again once a page is free."""
    real, drop = contiguous.blank, pool.Pool.drop

    def blank(*arguments: Any) -> Tensor:
        return real(*arguments).fill_(NAN)

    def drop_and_poison(self: pool.Pool, page: int) -> None:
        drop(self, page)
        if not self.holders[page]:
            for memory in (self.keys, self.values):
                memory[:, page * self.size : (page + 1) * self.size] = NAN

    with monkeypatch.context() as patch:
        patch.setattr(contiguous, "blank", blank)
        patch.setattr(pool, "blank", blank)
        patch.setattr(pool.Pool, "drop", drop_and_poison)
        yield


class Case(NamedTuple):
    """Sequences of one kind of pattern: sizes, tensors of their whole length, options, and how they grow."""

    kind: str
    number: int
    shape: tuple[int, int, int, int, int]  # B, H, G, D, V
    tensors: tuple[Tensor, Tensor, Tensor]
    steps: list[Step]
    made: Any
    options: dict[str, Any]
    bias: tuple[str, Tensor] | None
    layout: str
    dtype: torch.dtype

    @property
    def total(self) -> int:
        return self.tensors[1].shape[2]


def case_of(kind: str, number: int, total: int | None = None) -> Case:
    """Rebuild a case."""
    draw, generator = random.Random(f"{kind} {number}"), torch.Generator().manual_seed(number)
    total = draw.choice([90, 200, 331]) if total is None else total
    total = {"windows2d": 24, "windows2d_shifted": 54}.get(kind, 30) if kind in GRIDS else total
    batch, (heads, groups) = draw.choice([1, 2, 3]), draw.choice([(1, 1), (4, 2), (4, 1), (6, 3)])
    width, value, dtype = draw.choice([8, 16, 40]), draw.choice([8, 16, 24]), draw.choice(TYPES)
    made = whole(kind, draw, Sizes(batch, heads, total, total))
    shapes = (batch, heads, total + AHEAD, width), (batch, groups, total, width), (batch, groups, total, value)
    q, k, v = (torch.randn(*s, generator=generator, dtype=torch.float64).to(dtype) for s in shapes)
    chosen, options, bias = draw.choice(OPTIONS), {}, None
    if chosen in {"softcap", "all"}:
        options["softcap"] = 3.0
    if chosen in {"sinks", "all"}:
        options["sinks"] = torch.randn(heads, generator=generator, dtype=torch.float64).to(dtype)
    if chosen in {"alibi", "relative", "tensor", "all"}:
        sort = "alibi" if chosen == "all" else chosen
        size = {"alibi": (heads,), "relative": (heads, 9), "tensor": (heads, total + AHEAD, total)}[sort]
        bias = sort, torch.randn(*size, generator=generator, dtype=torch.float64).to(dtype)
    if kind in GRIDS:
        steps = [Step([0] * batch, [total - 7] * batch, total - 7), Step([total - 7] * batch, [7] * batch, 7)]
    else:
        steps = steps_of(draw, batch, total, ragged=draw.random() < 0.5)
    layout = draw.choice(["BHLD", "BHLD", "BLHD"])
    return Case(
        kind, number, (batch, heads, groups, width, value), (q, k, v), steps, made, options, bias, layout, dtype
    )


def chunk(tensor: Tensor, step: Step, starts: Sequence[int]) -> Tensor:
    """Rows of each sequence from where it stands, NaN where they are padding."""
    out = tensor.new_full((*tensor.shape[:2], step.rows, tensor.shape[3]), NAN)
    for b, (start, count) in enumerate(zip(starts, step.counts, strict=True)):
        out[b, :, :count] = tensor[b, :, start : start + count]
    return out


def biases(case: Case, step: Step) -> tuple[Any, Tensor | None]:
    """The bias of one step as the call takes it, and densely."""
    if case.bias is None:
        return None, None
    sort, leaf = case.bias
    size = (case.shape[0], case.shape[1], step.rows, max(step.after))
    if sort == "alibi":
        return qkv.alibi(leaf), oracles.alibi(leaf, size, step.before)
    if sort == "relative":
        return qkv.relative(leaf), oracles.relative(leaf, size, step.before)
    rows = [leaf[:, start : start + step.rows, : size[3]] for start in step.before]
    return torch.stack(rows), torch.stack(rows)


def decode(case: Case, kind: str, backend: str) -> Any:
    """Run a case through a cache of this kind, every step within its bound; the cache as it is in the end."""
    batch, heads, groups, width, value = case.shape
    pattern = at(case.kind, case.made, Step([0] * batch, [case.total] * batch, case.total))[0]
    cache = cache_of(kind, (batch, groups, width, value), case.total, pattern, case.dtype)
    scale = width**-0.5
    for number, step in enumerate(case.steps):
        q, k, v = (chunk(tensor, step, step.before) for tensor in case.tensors)
        lengths = step.counts if step.ragged else None
        if case.kind in GRIDS and number == 0:
            cache.append(k, v)
            continue
        pattern, rule = at(case.kind, case.made, step)
        bias, dense = biases(case, step)
        turned = [x.transpose(1, 2) for x in (q, k, v)] if case.layout == "BLHD" else [q, k, v]
        asks = qkv.AuxRequest(lse=True) if number % 3 == 1 else None
        given = {"pattern": pattern, "bias": bias, "lengths": lengths, "layout": case.layout, "return_aux": asks}
        found = cache.attend(*turned, **given, **case.options, backend=backend)
        out, aux = found if asks else (found, None)
        assert cache.lengths == tuple(step.after)
        keys, values = (stored(tensor, step.after) for tensor in case.tensors[1:])
        queries = torch.where(q.isnan(), 0.0, q)
        call = budgets.Call(
            *(queries, keys, values, allowed(rule, step, heads)),
            *(scale, case.options.get("softcap"), dense, case.options.get("sinks")),
        )
        truth = call.truth()
        budget = budgets.forward(call, truth, case.dtype, narrow=case.dtype == torch.bfloat16 and backend == "auto")
        out = out.transpose(1, 2) if case.layout == "BLHD" else out
        name = f"case_of({case.kind!r}, {case.number}) on {kind}, {case.dtype}, step {number}"
        judge(f"{name}: output", *(real(x, step) for x in (out, truth.out, budget.out)))
        if aux is not None:
            judge(f"{name}: lse", *(real(x, step) for x in (aux.lse, truth.lse, budget.lse)))
        assert not padding(out, step).any(), f"{name}: a query of padding gets 0"
    return cache


def stored(tensor: Tensor, lengths: Sequence[int]) -> Tensor:
    """The keys or values so far, 0 beyond the end of a sequence."""
    out = tensor.new_zeros((*tensor.shape[:2], max(lengths), tensor.shape[3]))
    for b, length in enumerate(lengths):
        out[b, :, :length] = tensor[b, :, :length]
    return out


def real(tensor: Tensor, step: Step) -> Tensor:
    """The rows of a step that are no padding, one after another."""
    return torch.cat([tensor[b, :, :count].flatten() for b, count in enumerate(step.counts)])


def padding(tensor: Tensor, step: Step) -> Tensor:
    return torch.cat([tensor[b, :, count:].flatten() for b, count in enumerate(step.counts)])
