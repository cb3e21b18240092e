"""Documents that lie one after another in the tensors of one call: each as a call of its own, and the plan of all."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, replace

import numpy as np

from qkv.backends.base import Packing
from qkv.patterns.cropped import plan_of_length
from qkv.patterns.expr import PerHead, rebuild, specialise
from qkv.patterns.leaf import Expr, Extent, Sizes
from qkv.patterns.leaves.dense import Where
from qkv.patterns.pattern import Pattern
from qkv.patterns.schedule import Compiled, PatternPlan
from qkv.problem import Origin, Problem, Tensors
from qkv.settings import PLAN_CACHE_MB, read


@dataclass(frozen=True, slots=True, eq=False)
class Packed:
    """One call of N documents, checked.

    problem: B = N, L and S those of the longest, one query offset a document. tensors: q (1, H, total L, D) and so on.
    """

    problem: Problem
    tensors: Tensors
    packing: Packing

    def sizes(self, n: int) -> tuple[int, int]:
        """Queries and keys of document n."""
        return _size(self.packing, n)

    def document(self, n: int) -> tuple[Problem, Tensors]:
        """Document n as a call of its own, B = 1, whose batch row is called n."""
        problem, (query, key, value, bias, sinks) = self.problem, self.tensors
        queries, keys = self.sizes(n)
        start, key_start = self.packing.queries[n], self.packing.keys[n]
        if problem.bias == "tensor" and bias is not None and bias.shape[0] > 1:
            bias = bias.narrow(0, n, 1)
        tensors = Tensors(
            query.narrow(2, start, queries),
            key.narrow(2, key_start, keys),
            value.narrow(2, key_start, keys),
            bias,
            sinks,
        )
        alone = replace(
            problem,
            batch=1,
            queries=queries,
            keys=keys,
            pattern=self.pattern(n),
            bias_shape=None if bias is None else tuple(bias.shape),
            origin=Origin(query=(problem.origin.query[n],), batch=n),
        )
        return alone, tensors

    def documents(self) -> Iterator[tuple[Problem, Tensors]]:
        """Every document. What they share is handed out in the compute type, in which its gradients are then added."""
        _, _, _, bias, sinks = self.tensors
        wide = (None if tensor is None else tensor.to(self.problem.compute_dtype) for tensor in (bias, sinks))
        shared = replace(self, tensors=Tensors(*self.tensors[:3], *wide)) if self.problem.needs_grad else self
        return map(shared.document, range(self.problem.batch))

    def pattern(self, n: int) -> Pattern:
        """The pattern as document n sees it: what depends on the batch row is that of row n."""
        pattern, heads = self.problem.pattern, self.problem.heads
        extent = Extent(*self.sizes(n), self.problem.origin.query[n])
        expr = self._asked(pattern.expr, extent)
        by_batch, by_head = expr.axes
        if not by_batch:
            return pattern
        if by_head:
            expr = PerHead(tuple(specialise(expr, n, h, extent) for h in range(heads)))
        else:
            expr = specialise(expr, n, 0, extent)
        return replace(pattern, known=expr)

    def _asked(self, expr: Expr, extent: Extent) -> Expr:
        """The expression with its functions asked which of b and h they depend on."""
        sizes = Sizes(self.problem.batch, self.problem.heads, extent.queries, extent.keys, (extent.query_start,))
        return rebuild(expr, lambda leaf: leaf.probe(sizes) if isinstance(leaf, Where) else leaf)

    def plan(self) -> PatternPlan:
        """What every document and head walks, made or remembered: members are compiled for a document's own sizes."""
        pattern, heads = self.problem.pattern, self.problem.heads
        whole = _key(pattern, heads, self.packing, self.problem.origin.query)
        known = _PLANS.get(whole)
        if known is None:
            plan_of = self._plan_of_row if self._by_document else self._plan_of_size
            known = join([plan_of(n) for n in range(self.problem.batch)], heads)
            _PLANS.put(whole, known, pattern)
        return known

    @property
    def _by_document(self) -> bool:
        """Whether documents of one size may see different pairs; a function is asked document by document."""
        leaves = self.problem.pattern.expr.leaves()
        return any(leaf.batch is not None or isinstance(leaf, Where) for leaf in leaves)

    def _plan_of_row(self, n: int) -> PatternPlan:
        queries, keys = self.sizes(n)
        return self.pattern(n).plan(queries, keys, heads=self.problem.heads, query_offset=self.problem.origin.query[n])

    def _plan_of_size(self, n: int) -> PatternPlan:
        """The plan that documents of the size of document n share."""
        (queries, keys), heads, offset = self.sizes(n), self.problem.heads, self.problem.origin.query[n]
        pattern = self.problem.pattern
        one = _key(pattern, heads, queries, keys, offset)
        known = _PLANS.get(one)
        if known is None:
            known = plan_of_length(pattern, queries, keys, heads=heads, query_offset=offset)
            _PLANS.put(one, known, pattern)
        return known


def sizes_of(packing: Packing) -> list[tuple[int, int]]:
    """Queries and keys of every document."""
    return [_size(packing, n) for n in range(len(packing.queries) - 1)]


def _size(packing: Packing, n: int) -> tuple[int, int]:
    queries, keys = packing
    return queries[n + 1] - queries[n], keys[n + 1] - keys[n]


def join(plans: list[PatternPlan], heads: int) -> PatternPlan:
    """The plans of the documents, each of one batch row, as that of a call; what they share is there once."""
    columns = heads if any(plan.index.shape[1] > 1 for plan in plans) else 1
    numbers: dict[int, int] = {}
    members: list[Compiled] = []
    index = np.zeros((len(plans), columns), dtype=np.int32)
    for n, plan in enumerate(plans):
        for member in plan.members:
            if id(member) not in numbers:
                numbers[id(member)] = len(members)
                members.append(member)
        if len(plan.members):
            index[n] = [numbers[id(plan.members[k])] for k in plan.index[0].tolist()]
    return PatternPlan(tuple(members), index, len(plans), heads)


class Plans:
    """The plans used last, bounded by the bytes of their schedules; safe to use from several threads."""

    def __init__(self) -> None:
        self._entries: OrderedDict[Hashable, tuple[PatternPlan, Pattern, int]] = OrderedDict()
        self._nbytes = 0
        self._lock = threading.Lock()

    def get(self, key: Hashable) -> PatternPlan | None:
        with self._lock:
            if key not in self._entries:
                return None
            self._entries.move_to_end(key)
            return self._entries[key][0]

    def put(self, key: Hashable, plan: PatternPlan, pattern: Pattern) -> None:
        """Keep a plan, and the pattern whose identity may be in the key."""
        nbytes = plan.index.nbytes + sum(member.nbytes for member in plan.members)
        nbytes += sum(tensor.nbytes for tensor in pattern.tensors)
        with self._lock:
            if key not in self._entries:
                self._entries[key] = plan, pattern, nbytes
                self._nbytes += nbytes
            while self._nbytes > read(PLAN_CACHE_MB) << 20:
                self._nbytes -= self._entries.popitem(last=False)[1][2]


_PLANS = Plans()


def _key(pattern: Pattern, *sizes: Hashable) -> Hashable:
    """A pattern of literals by its text, all else by identity, together with the sizes of a call."""
    literal = not pattern.tensors and "<" not in pattern.form
    return pattern.form if literal else id(pattern), *sizes
