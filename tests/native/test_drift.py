"""Errors of 16-bit calls over a sweep, beside torch's own attention: not larger on the whole, and not to one side."""

from __future__ import annotations

import math
import os
from collections import defaultdict
from typing import NamedTuple

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import budgets
import engines
from exams import answers, exam_of
from sweep import Example, dense_bias

CASES = 4000
# Of the type of the inputs, in which torch takes a bias.
BIASES = {"none", "full", "row", "key", "scalar", "batch_rows", "heads_keys", "heads", "turned", "expanded", "hiding"}


class Errors(NamedTuple):
    """Of one case, over rows that see something."""

    inputs: str
    ratio: float | None  # of our root mean square and torch's; None where either is exact
    bias: float | None  # the mean error in units of A·u; None where no weight meets a value


def torchs(case: Example) -> Tensor:
    """What torch's kernel makes of a case without options of ours."""
    hidden = torch.where(case.call.allowed, 0.0, -torch.inf).to(case.call.q.dtype)
    if case.bias is not None:
        hidden = hidden + dense_bias(*case.bias, case.size, case.offset)
    q, k, v = (x.contiguous() for x in case.tensors)
    return scaled_dot_product_attention(q, k, v, hidden, scale=case.call.scale, enable_gqa=True)


def errors_of(number: int, backend: str) -> Errors | None:
    """None for what torch cannot answer, or has nothing to round in."""
    exam = exam_of(number, "narrow", gradients=False, bare=True)
    case, truth = exam.case, exam.truth
    live = truth.lse.isfinite()
    if case.pick["bias"] not in BIASES or case.call.q.dtype == torch.float64 or not live.any():
        return None
    out, _, _ = answers(exam, backend)
    ours, theirs = ((x.double() - truth.out)[live] for x in (out, torchs(case)))
    absolute = (truth.weights @ budgets.plain(case.call)[2].abs())[live]
    felt = absolute > 1e-30
    bias = (ours[felt] / absolute[felt]).mean() / budgets.ROUNDOFF[out.dtype] if felt.any() else None
    squares = [float(x.square().mean()) for x in (ours, theirs)]
    ratio = math.sqrt(squares[0] / squares[1]) if min(squares) > 1e-40 else None
    return Errors(case.pick["inputs"], ratio, None if bias is None else float(bias))


@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.filterwarnings("ignore:.*inverted")
@engines.EACH_NATIVE
def test_errors_are_no_larger_than_torchs_and_have_no_side(backend: str) -> None:
    first = int(os.environ["QKV_SWEEP_SEED"])
    found = [errors for n in range(first, first + CASES) if (errors := errors_of(n, backend)) is not None]
    logs = [math.log(errors.ratio) for errors in found if errors.ratio is not None]
    drift = math.exp(sum(logs) / len(logs))
    print(f"\n{engines.isa()}: {len(logs)} cases from {first}: errors are {drift:.3f} of torch's")
    assert len(logs) > CASES / 10 and drift <= 1.30
    kinds = defaultdict(list)
    for errors in found:
        if errors.bias is not None:
            kinds[errors.inputs].append(errors.bias)
    for kind, each in kinds.items():
        mean = sum(each) / len(each)
        print(f"{kind}: bias {mean:+.4f} u over {len(each)} cases")
        assert len(each) < 20 or abs(mean) <= 0.5, f"errors for inputs of {kind} go to one side"
