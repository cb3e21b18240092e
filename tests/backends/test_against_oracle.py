"""A covering sweep: every backend against the oracle; output, aux, gradients, each element in its rounding bound."""

from __future__ import annotations

import pytest
import torch

import budgets
import engines
import qkv
from exams import exam_of, judge, naming, sit
from sweep import COUNT, bias_value, covering


def check(number: int, backend: str, device: torch.device, *, gradients: bool) -> None:
    exam = exam_of(number, gradients=gradients)
    if backend == "cpu" and device.type != "cpu":
        pytest.skip("cpu answers for CPU tensors alone")
    sit(exam, backend, device)


# On instruction sets other than the best one a third of them: tests/native/test_sweep.py has more.
ALL_OR_SOME = [
    (index, engine) for engine in engines.OURS for index in range(0, COUNT, 3 if engine in engines.NATIVE[1:] else 1)
]


@pytest.mark.filterwarnings("ignore:.*inverted")
@pytest.mark.parametrize("index, backend", ALL_OR_SOME, indirect=["backend"])
def test_case(index: int, backend: str, device: torch.device) -> None:
    number = covering(COUNT)[0][index]
    with naming(backend, number):
        check(number, backend, device, gradients=index % 2 == 0)


def test_cases_cover_nearly_all_pairs_of_axis_values() -> None:
    """All of them would take a case for each pair of a pattern and a length alone."""
    assert covering(COUNT)[1] > 0.94


def check_sdpa(number: int) -> bool:
    """Output and gradients of torch's own kernels within the bounds; False where the backend refuses."""
    exam = exam_of(number, bare=True, gradients=False)
    case, dtype = exam.case, exam.case.call.q.dtype
    options = dict(case.options) | ({} if case.bias is None else {"bias": bias_value(*case.bias, case.size)})
    leaves = [x.detach().requires_grad_() for x in case.tensors]
    try:
        out = qkv.attention(*leaves, **options, backend="sdpa")
    except qkv.errors.UnsupportedError:
        return False
    judge("output", out, exam.truth.out, budgets.forward(case.call, exam.truth, dtype, narrow=True).out)
    if dtype in {torch.float64, torch.float32}:
        g = torch.randn(out.shape, generator=torch.Generator().manual_seed(number), dtype=torch.float64).to(dtype)
        exact = [x.detach().double().requires_grad_() for x in leaves]
        call = case.call._replace(q=exact[0], k=exact[1], v=exact[2])
        truth = call.truth()
        found, _ = budgets.backward(call, truth, dtype, g)
        wanted = torch.autograd.grad(truth.out, exact, g.double())
        for name, got, want in zip("qkv", torch.autograd.grad(out, leaves, g), wanted, strict=True):
            judge(f"gradient of {name}", got, want, found[name])
    return True


@pytest.mark.filterwarnings("ignore:.*inverted")
def test_sdpa_agrees_wherever_it_does_not_refuse() -> None:
    answered = 0
    for number in covering(COUNT)[0][::2]:
        with naming("sdpa, bare", number):
            answered += check_sdpa(number)
    assert answered > COUNT // 8


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:.*inverted")
@engines.EACH
@pytest.mark.parametrize("chunk", range(48))
def test_many_cases(chunk: int, backend: str, device: torch.device) -> None:
    for number in range(10**6 + 100 * chunk, 10**6 + 100 * (chunk + 1)):
        with naming(backend, number):
            check(number, backend, device, gradients=number % 2 == 0)
