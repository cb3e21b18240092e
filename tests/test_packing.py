"""Plans of packed calls: joined from those of the documents, made once, and fast."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

import qkv
from packs import inputs
from qkv import packing
from qkv.backends.base import Packing
from qkv.packing import Packed
from qkv.patterns.schedule import PatternPlan
from qkv.problem import Tensors
from qkv.settings import override


def test_plans_are_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a call, of a size, and where a tensor holds what is seen, of a pattern."""
    monkeypatch.setattr(packing, "_PLANS", packing.Plans())
    asked: list[tuple[int, int]] = []
    make = packing.plan_of_length

    def counted(pattern: Any, L: int, S: int, **more: Any) -> PatternPlan:
        asked.append((L, S))
        return make(pattern, L, S, **more)

    monkeypatch.setattr(packing, "plan_of_length", counted)
    first = packed_of([5, 70, 5, 70, 9], qkv.causal()).plan()
    assert sorted(asked) == [(5, 5), (9, 9), (70, 70)]
    assert len(first.members) == 3 and first.index[:, 0].tolist() == [0, 1, 0, 1, 2]
    assert packed_of([5, 70, 5, 70, 9], qkv.causal()).plan() is first
    packed_of([9, 9, 5, 8], qkv.causal()).plan()
    assert asked[3:] == [(8, 8)]
    packed_of([5], qkv.causal(align="top_left")).plan()
    assert asked[4:] == [(5, 5)]
    with override("QKV_PLAN_CACHE_MB", "0"):
        again = packed_of([5, 70, 5, 70, 10], qkv.causal())
        assert again.plan() is not again.plan()


def packed_of(lengths: list[int], pattern: qkv.Pattern) -> Packed:
    """What an engine is asked for documents of these lengths."""
    edges = tuple(itertools.accumulate(lengths, initial=0))
    problem = qkv.plan(*(x.transpose(0, 1)[None] for x in inputs(total=edges[-1])), pattern=pattern).problem
    tensors = Tensors(*(x.transpose(0, 1)[None] for x in inputs(total=edges[-1])))
    origin = problem.origin.__class__(query=(0,) * len(lengths))
    fields = {"batch": len(lengths), "queries": max(lengths), "keys": max(lengths), "origin": origin}
    return Packed(replace(problem, **fields), tensors, Packing(edges, edges))


def test_many_documents_are_planned_fast() -> None:
    """Once known, in a small part of a millisecond; the limit leaves room for a busy machine."""
    draw = random.Random(0)
    packed = packed_of([draw.randrange(1, 300) for _ in range(64)], qkv.causal() & qkv.window(99))
    packed.plan()
    assert shortest(packed.plan) < 1e-3


def shortest(function: Callable[[], Any]) -> float:
    """The least of some times in seconds."""
    found = []
    for _ in range(20):
        start = time.perf_counter()
        function()
        found.append(time.perf_counter() - start)
    return min(found)
