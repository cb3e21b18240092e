"""Outputs of 16 bits are the float32 ones, rounded once to nearest: packed rows, keys in pages, few queries. The bits
of packed rows and of pages are those of plain calls. The sweep has the other forms of calls.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate, pairwise

import numpy as np
import pytest
import torch
from torch import Tensor

import engines
import qkv
from configurations import normal
from exams import same_bits
from qkv.backends.base import Incoming, Outcome, Packing, Pages, Work, pattern_plan
from qkv.backends.cpu import Cpu, Prepared
from qkv.patterns.schedule import PatternPlan
from qkv.problem import Origin, Tensors
from qkv.question import ask

TYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
PATTERNS = pytest.mark.parametrize("pattern", ["causal()", "causal() & strided(5)", "full()", "window(20, 9)"])
HEADS, GROUPS, SEED = 4, 2, 5
DOCUMENTS = [(70, 70), (0, 5), (130, 200), (1, 64), (3, 0), (33, 33), (64, 200)]  # queries and keys
ALL_WANTED = (True, True, True, False, False)
SAME = ("output", "lse", "shift", "total", "max_scores", "entropy")


def work_of(query: Tensor, key: Tensor, value: Tensor, pattern: str, **options: object) -> Work:
    """A plain call as an engine gets it."""
    aux = qkv.AuxRequest(lse=True, max_scores=True, entropy=True)
    problem = ask(query, key, value, pattern=qkv.parse(pattern), return_aux=aux, **options).problem
    return Work(problem, Tensors(query, key, value), pattern_plan(problem), SEED)


def answered(work: Work) -> Outcome:
    """The outcome, once it is seen to be the unrounded one rounded."""
    outcome, _ = Cpu().answer(work)
    wide, _ = Prepared.of(work, torch.float32).answer(work, torch.float32)
    assert outcome.output.dtype == work.problem.dtype and wide.output.dtype == torch.float32
    assert same_bits(outcome.output, wide.output.to(outcome.output.dtype)), "not rounded to nearest"
    for name in SAME[1:]:
        assert same_bits(getattr(outcome, name), getattr(wide, name)), f"{name} depends on the type of the output"
    return outcome


def rows_of(tensor: Tensor, first: int, stop: int) -> Tensor:
    return tensor[:, :, first:stop]


def packed_work(tensors: list[Tensor], pattern: str, form: str) -> tuple[Work, list[Work]]:
    """All documents in one call, and each in a call of its own."""
    packing = Packing(*(tuple(accumulate((0, *lengths))) for lengths in zip(*DOCUMENTS, strict=True)))
    each = []
    for (first, stop), (key_first, key_stop) in zip(pairwise(packing.queries), pairwise(packing.keys), strict=True):
        q, k, v = (
            rows_of(tensors[0], first, stop),
            *(rows_of(x, key_first, key_stop) for x in tensors[1:]),
        )
        each.append(work_of(q, k, v, pattern))
    members = tuple(work.plan.members[0] for work in each)
    index = np.arange(len(DOCUMENTS), dtype=np.int32)[:, None]
    longest = [max(lengths) for lengths in zip(*DOCUMENTS, strict=True)]
    problem = replace(
        each[0].problem,
        batch=len(DOCUMENTS),
        queries=longest[0],
        keys=longest[1],
        origin=Origin(query=tuple(work.problem.origin.query[0] for work in each)),
    )
    placed = [x.transpose(1, 2).contiguous().transpose(1, 2) if form == "heads last" else x for x in tensors]
    plan = PatternPlan(members, index, len(DOCUMENTS), HEADS)
    return Work(problem, Tensors(*placed), plan, SEED, packing), each


@TYPES
@PATTERNS
@engines.EACH_NATIVE
@pytest.mark.parametrize("width, form", [(17, "dense"), (64, "heads last")])
def test_packed_rows(dtype: torch.dtype, pattern: str, width: int, form: str, backend: str) -> None:
    total = [sum(lengths) for lengths in zip(*DOCUMENTS, strict=True)]
    shapes = (1, HEADS, total[0], width), (1, GROUPS, total[1], width), (1, GROUPS, total[1], 24)
    packed, each = packed_work([normal(*s, seed=n, dtype=dtype) for n, s in enumerate(shapes)], pattern, form)
    outcome = answered(packed)
    grad = normal(*outcome.output.shape, seed=8, dtype=dtype)
    grad_lse = torch.where(outcome.lse.isfinite(), normal(*outcome.lse.shape, seed=9, dtype=torch.float32), 0.0)
    incoming = Incoming(grad, grad_lse)
    gradients = Cpu().gradients(packed, outcome, incoming, ALL_WANTED, careful=False)
    assert all(g.dtype == dtype for g in gradients[:3])
    ends = zip(pairwise(packed.packing.queries), pairwise(packed.packing.keys), each, strict=True)
    for queries, keys, alone in ends:
        want = answered(alone)
        for name in SAME:
            agree(rows_of(getattr(outcome, name), *queries), getattr(want, name), alone)
        own = Incoming(rows_of(grad, *queries), rows_of(grad_lse, *queries).contiguous())
        made = Cpu().gradients(alone, want, own, ALL_WANTED, careful=False)
        for rows, got, expected in zip((queries, keys, keys), gradients[:3], made[:3], strict=True):
            agree(rows_of(got, *rows), expected, alone)


def agree(got: Tensor, want: Tensor, alone: Work) -> None:
    """To the bit, but for calls of few queries."""
    if alone.problem.queries > engines.FEW:
        assert same_bits(got, want)
    else:
        tolerance = 4 * torch.finfo(torch.bfloat16).eps if engines.casts(got.dtype) else 4 * torch.finfo(got.dtype).eps
        torch.testing.assert_close(got, want, rtol=4 * tolerance, atol=tolerance)


def in_pages(x: Tensor, table: Tensor, size: int, form: str) -> Tensor:
    """Keys or values (B, G, S, D) in pages of a pool, which all batch rows have; NaN in pages and rows of nobody."""
    pages = int(table.max()) + 2
    heads, width = x.shape[1], x.shape[3]
    shape = (pages * size, heads, width) if form == "heads last" else (heads, pages * size, width)
    pool = x.new_full(shape, float("nan"))
    pool = pool.transpose(0, 1)[None] if form == "heads last" else pool[None]
    for b, c in np.ndindex(*table.shape):
        page, rows = int(table[b, c]) * size, x[b, :, c * size : (c + 1) * size]
        pool[0, :, page : page + rows.shape[1]] = rows
    return pool.expand(len(table), -1, -1, -1)


@TYPES
@engines.EACH_NATIVE
@pytest.mark.parametrize("pattern", ["causal() & strided(5)", "window(20, 9)"])
@pytest.mark.parametrize("queries", [1, 5, 100])
@pytest.mark.parametrize("size, form", [(16, "dense"), (48, "heads last"), (64, "heads last"), (128, "dense")])
def test_keys_in_pages(dtype: torch.dtype, pattern: str, queries: int, size: int, form: str, backend: str) -> None:
    batch, keys = 2, 200
    count = -(-keys // size)
    shapes = (batch, HEADS, queries, 40), (batch, GROUPS, keys, 40), (batch, GROUPS, keys, 64)
    q, k, v = (normal(*s, seed=n, dtype=dtype) for n, s in enumerate(shapes))
    plain = work_of(q, k, v, pattern)
    table = torch.randperm(batch * count + 3, generator=torch.Generator().manual_seed(size))[: batch * count]
    table = table.to(torch.int32).reshape(batch, count)
    pools = [in_pages(x, table, size, form) for x in (k, v)]
    paged = plain._replace(tensors=Tensors(q, *pools), pages=Pages(table, size))
    outcome, want = answered(paged), answered(plain)
    for name in SAME:
        assert same_bits(getattr(outcome, name), getattr(want, name)), name


@TYPES
@PATTERNS
@engines.EACH_NATIVE
@pytest.mark.parametrize("queries", [1, 2, 7, 16])
def test_few_queries_beside_many_keys(dtype: torch.dtype, pattern: str, queries: int, backend: str) -> None:
    shapes = (2, 8, queries, 64), (2, 2, 1500, 64), (2, 2, 1500, 96)
    tensors = [normal(*s, seed=n, dtype=dtype) for n, s in enumerate(shapes)]
    answered(work_of(*tensors, pattern))
    answered(work_of(*tensors, pattern, softcap=3.0))
    answered(work_of(*tensors, pattern, dropout_p=0.3, generator=torch.Generator()))
