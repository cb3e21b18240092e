"""One attention call over what a cache holds: asked and checked, answered, and remembered for the steps after it that
differ in their length alone.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from qkv.attention import warn_if_all_hidden
from qkv.backends.autograd import Engine, result_of, transformed
from qkv.backends.base import Backend, Pages, Result, Work, pattern_plan, without_autocast
from qkv.backends.cpu import Cpu, Prepared
from qkv.cache.within import looks_back, within
from qkv.errors import LayoutError, message
from qkv.patterns.pattern import Pattern
from qkv.patterns.schedule import PatternPlan
from qkv.problem import Origin, Problem, Tensors
from qkv.shapes import values_can_be_seen
from qkv.types import AuxOutput
from qkv.weights import collect

VARIES = {"keys", "pattern", "origin"}  # in the problems of steps that are alike otherwise
SHARED = 64  # places that caches share their plans for
LARGEST = 1 << 16  # bytes of a plan that is shared

_shared: dict[Hashable, tuple[Problem, PatternPlan]] = {}  # by call and lengths: the layers of a model ask the same


class Stage(NamedTuple):
    """Where one call stands: how long each sequence is before and after it."""

    before: list[int]
    after: list[int]
    rows: int  # L, how many rows each sequence is given, real or not

    @property
    def keys(self) -> int:
        """S, the length of the longest."""
        return max(self.after, default=0)

    @property
    def grows(self) -> bool:
        """Whether any sequence gets a row."""
        return any(new > old for old, new in zip(self.before, self.after, strict=True))

    @property
    def offsets(self) -> tuple[int, ...]:
        """Where query 0 stands: one number where all agree."""
        first = self.before[0] if self.before else 0
        return tuple(self.before) if any(n != first for n in self.before) else (first,)

    def narrowed(self, pattern: Pattern) -> Pattern:
        """The pattern without what lies beyond the end of a sequence."""
        full = all(new - old == self.rows for old, new in zip(self.before, self.after, strict=True))
        alike = len(set(self.after)) <= 1
        return pattern if full and (alike or looks_back(pattern.expr)) else pattern & within(self.after)


@dataclass(frozen=True, slots=True, eq=False)
class Step:
    """What the steps that differ in their length alone have in common."""

    given: Pattern | None  # kept, since what it is remembered by may hold its identity
    pattern: Pattern
    problem: Problem
    swapped: bool  # layout BLHD
    common: dict[str, Any]  # of the problem, but for what differs
    call: Hashable | None  # what it is remembered by, where that means the same in every cache

    @classmethod
    def like(cls, call: Hashable, given: Pattern | None, pattern: Pattern, problem: Problem, layout: str) -> Step:
        names = (field.name for field in fields(problem) if field.name not in VARIES)
        common = {name: getattr(problem, name) for name in names}
        literal = given is None or (not given.tensors and "<" not in given.form)
        return cls(given, pattern, problem, layout == "BLHD", common, call if literal else None)

    def at(self, stage: Stage) -> tuple[Problem, PatternPlan] | None:
        """The problem and the plan of one step, checked; None where no query sees a key, which is worth a warning."""
        if self.call is None:
            return self._made(stage)
        place = self.call, *stage.before
        found = _shared.get(place)
        if found is None:
            found = self._made(stage)
            if found is not None and sum(member.nbytes for member in found[1].members) <= LARGEST:
                if len(_shared) >= SHARED:
                    _shared.clear()
                _shared[place] = found
        return found

    def _made(self, stage: Stage) -> tuple[Problem, PatternPlan] | None:
        pattern, offsets, keys = stage.narrowed(self.pattern), stage.offsets, stage.keys
        known = self.problem
        plan = pattern.plan(known.queries, keys, batch=known.batch, heads=known.heads, query_offset=offsets)
        if not any(member.parts for member in plan.members):
            return None
        return Problem(**self.common, keys=keys, pattern=pattern, origin=Origin(query=offsets)), plan

    def answer(self, work: Work) -> Tensor:
        """The output, (B, H, L, V)."""
        known = self.problem
        output = work.tensors.query.new_empty((known.batch, known.heads, known.queries, known.value_dim))
        return Prepared.of(work).output(work.tensors, output, 0)


def aligned(pattern: Pattern, before: Sequence[int]) -> Pattern:
    """The pattern with queries after the keys that the cache holds, as "bottom_right" also says."""
    if pattern.align == "top_left" and any(before):
        holds = "the queries of a call on a cache must stand after the keys that it holds"
        seen = f"`align` of the pattern says 'top_left' where the cache holds {max(before)}"
        raise LayoutError(message(holds, seen, "leave `align` out"))
    return pattern if pattern.align is None else replace(pattern, align=None)


def may_follow(pattern: Pattern | None) -> bool:
    """Whether a call of this pattern may stand where the cache holds keys; see `aligned`."""
    return pattern is None or pattern.align != "top_left"


def answer(
    problem: Problem, tensors: Tensors, backend: Backend, pages: Pages | None, *, in_place: bool, warn: bool
) -> tuple[Tensor, AuxOutput]:
    """Run: the output (B, H, L, V) and what else was asked for."""
    with without_autocast(problem.device):
        if in_place:
            assert isinstance(backend, Engine)
            result = _in_place(problem, tensors, backend, pages)
        else:
            result = backend.run(problem, tensors, 0)
        if warn:
            warn_if_all_hidden(problem, tensors, result)
        return result.output, collect(problem, tensors, result)


def _in_place(problem: Problem, tensors: Tensors, engine: Engine, pages: Pages | None) -> Result:
    """The answer of an engine that reads S keys where they lie, whatever lies around them."""
    with torch.no_grad():
        outcome, _ = engine.answer(Work(problem, tensors, pattern_plan(problem), 0, None, pages))
    return result_of(problem, outcome)


def reads_in_place(problem: Problem, tensors: Tensors, backend: Backend) -> bool:
    """Whether a call needs keys and values only where the native core reads them."""
    if not isinstance(backend, Cpu) or problem.needs_grad:
        return False
    if problem.aux.weights is not False or problem.aux.top_k is not None:
        return False
    return values_can_be_seen(tensors.query) and not transformed(tensors)
