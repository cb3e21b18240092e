"""Attention over a block schedule in torch operations: any device, memory O(L·block), cost of the pattern,
forward and backward.
"""

from __future__ import annotations

from qkv.backends.autograd import Wanted, run
from qkv.backends.base import Cost, Gradients, Incoming, Outcome, Result, Work, all_finite, pattern_plan
from qkv.backends.blockwise_backward import backward
from qkv.backends.online import forward
from qkv.backends.walk import WORKSPACE
from qkv.patterns.axis import TILE
from qkv.problem import Problem, Tensors


class Blockwise:
    """Online softmax over groups of query blocks and runs of key blocks; the backward pass recomputes the scores."""

    name = "blockwise"
    unavailable: str | None = None

    def reasons_against(self, problem: Problem) -> list[str]:
        return []

    def cost(self, problem: Problem) -> Cost:
        plan = pattern_plan(problem)
        rows, width = problem.batch * problem.heads * problem.queries, problem.compute_dtype.itemsize
        computed = plan.tiles * TILE * TILE
        widths = problem.head_dim + problem.value_dim
        state = rows * (2 * problem.value_dim + 4) * width
        moved = rows * widths * problem.dtype.itemsize + plan.tiles * TILE * widths * problem.dtype.itemsize
        reordered = rows * widths * width if plan.parts > 1 else 0
        return Cost(
            pairs=plan.pairs,
            computed=computed,
            flops=2 * computed * widths,
            bytes_moved=moved + plan.parts * rows * problem.value_dim * width,
            peak_bytes=state + reordered + 4 * min(WORKSPACE, max(computed, 1)) * width,
        )

    def run(self, problem: Problem, tensors: Tensors, seed: int) -> Result:
        return run(self, problem, tensors, seed)

    def answer(self, work: Work) -> tuple[Outcome, bool]:
        """What the pattern hides comes in with weight 0, and if it was NaN or infinite the output shows it, for
        0 · NaN is NaN. Then everything is done again with care.
        """
        outcome = forward(*work[:4], careful=False)
        if all_finite(outcome.output, outcome.total):
            return outcome, False
        return forward(*work[:4], careful=True), True

    def gradients(
        self, work: Work, outcome: Outcome, incoming: Incoming, wanted: Wanted, *, careful: bool
    ) -> Gradients:
        found = backward(*work[:4], outcome, *incoming, wanted, careful=careful)
        if careful or all_finite(*found):
            return found
        return backward(*work[:4], outcome, *incoming, wanted, careful=True)
