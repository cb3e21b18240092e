"""What a call would do, without doing it: the backend, every refusal, pairs, arithmetic, traffic and memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from qkv.backends.base import pattern_plan
from qkv.dispatch import choose
from qkv.inputs import in_call
from qkv.patterns.pattern import Pattern
from qkv.problem import Problem
from qkv.question import ask
from qkv.scores import Alibi, Relative
from qkv.types import AuxRequest, Layout


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The answer of `plan`; print it.

    backend: the name of what would run. refusals: for every other backend, why not.
    pairs: visible (query, key) pairs over all batch rows and heads. computed: pairs whose score is computed.
    flops: multiplications and additions of the forward pass; backward_flops: of the backward pass, 0 without gradients.
    bytes_moved, peak_bytes: estimates of memory traffic, and of memory held at once beyond the inputs, forward.
    parts: how many attentions in orders of their own one head merges.
    """

    problem: Problem
    backend: str
    refusals: dict[str, tuple[str, ...]]
    pairs: int
    computed: int
    flops: int
    backward_flops: int
    bytes_moved: int
    peak_bytes: int
    parts: int

    @property
    def density(self) -> float:
        """Visible pairs as a share of all."""
        problem = self.problem
        return self.pairs / max(problem.batch * problem.heads * problem.queries * problem.keys, 1)

    def __str__(self) -> str:
        merged = f", {self.parts} parts merged" if self.parts > 1 else ""
        forward = f"{_amount(self.flops, 1000, 'FLOP')} forward"
        backward = f", {_amount(self.backward_flops, 1000, 'FLOP')} backward" if self.backward_flops else ""
        moved, held = (_amount(number, 1024, "B") for number in (self.bytes_moved, self.peak_bytes))
        lines = [
            f"qkv.attention  {self.problem}",
            f"  backend      {self.backend}",
            f"  pairs        {self.pairs:,} visible ({self.density:.2%} of all), {self.computed:,} computed{merged}",
            f"  arithmetic   {forward}{backward}",
            f"  memory       {moved} moved, {held} held beyond the inputs",
            "  not taken",
            *(f"    {name:<10} {'; '.join(reasons)}" for name, reasons in self.refusals.items()),
        ]
        return "\n".join(lines)


def plan(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    pattern: Pattern | None = None,
    bias: Tensor | Alibi | Relative | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    dropout_p: float = 0.0,
    generator: torch.Generator | None = None,
    query_offset: int | Sequence[int] | Tensor | None = None,
    layout: Layout = "BHLD",
    backend: str = "auto",
    return_aux: AuxRequest | None = None,
) -> Plan:
    """What `attention` would do with the same arguments; runs nothing, and takes tensors on the meta device.

    Raises what `attention` would raise.
    """
    with in_call(query, key, value, pattern):
        problem = ask(
            query,
            key,
            value,
            pattern=pattern,
            bias=bias,
            scale=scale,
            softcap=softcap,
            sinks=sinks,
            dropout_p=dropout_p,
            generator=generator,
            query_offset=query_offset,
            layout=layout,
            return_aux=return_aux,
        ).problem
        choice = choose(problem, backend)
    cost = choice.backend.cost(problem)
    # backward recomputes the scores and makes four more products: dP, dV, dQ, dK
    backward = 2 * cost.computed * (3 * problem.head_dim + 2 * problem.value_dim) if problem.needs_grad else 0
    return Plan(
        problem=problem,
        backend=choice.backend.name,
        refusals=choice.refusals,
        pairs=cost.pairs,
        computed=cost.computed,
        flops=cost.flops,
        backward_flops=backward,
        bytes_moved=cost.bytes_moved,
        peak_bytes=cost.peak_bytes,
        parts=pattern_plan(problem).parts,
    )


def _amount(number: int, step: int, unit: str) -> str:
    """A number with the prefix that keeps it short: 1.5 GFLOP, 12.0 MiB."""
    prefixes = ("", "k", "M", "G", "T", "P") if step == 1000 else ("", "Ki", "Mi", "Gi", "Ti", "Pi")
    value, power = float(number), 0
    while value >= step and power < len(prefixes) - 1:
        value, power = value / step, power + 1
    return f"{value:.{1 if power else 0}f} {prefixes[power]}{unit}"
