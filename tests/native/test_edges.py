"""Where Python hands memory to the core, and numbers at the ends of their range."""

from __future__ import annotations

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

import qkv
from qkv import remembered

ROWS = 70


def inputs(heads: int = 2, rows: int = ROWS, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [x.requires_grad_() for x in torch.randn(3, 1, heads, rows, 8, dtype=dtype).unbind(0)]


def agree(options: dict[str, object], dtype: torch.dtype = torch.float32, times: int = 10) -> None:
    leaves = inputs(dtype=dtype)
    want = qkv.attention(*leaves, **options, backend="reference")
    for _ in range(times):
        torch.testing.assert_close(qkv.attention(*leaves, **options, backend="cpu"), want)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_sinks_slopes_and_tables_of_other_types_and_strides(dtype):
    """They are converted for the core, and the copies must live as long as it reads them."""
    agree({"sinks": torch.tensor([0.5, -1.0], dtype=torch.bfloat16)}, dtype)
    agree({"bias": qkv.alibi(torch.tensor([0.5, 0.25], dtype=torch.float64))}, dtype)
    agree({"bias": qkv.relative(torch.randn(9, 2).T)}, dtype)


def test_saved_tensors_that_come_back_with_other_strides():
    leaves = [x.detach().transpose(1, 2).contiguous().requires_grad_() for x in inputs()]
    want = torch.autograd.grad(qkv.attention(*leaves, layout="BLHD", backend="reference").sum(), leaves)
    for _ in range(3):  # from the second on the call is a remembered one
        with torch.autograd.graph.saved_tensors_hooks(lambda x: x.contiguous(), lambda x: x):
            output = qkv.attention(*leaves, layout="BLHD", backend="cpu")
        torch.testing.assert_close(torch.autograd.grad(output.sum(), leaves), want)


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_gradients_that_are_lazily_negated(backend):
    leaves = inputs()
    weight = torch.randn(1, 2, ROWS, 8, dtype=torch.complex64)

    def loss(output: torch.Tensor) -> torch.Tensor:
        return (torch.complex(torch.zeros_like(output), output).conj() * weight).real.sum()

    for _ in range(2):
        found = torch.autograd.grad(loss(qkv.attention(*leaves, backend=backend)), leaves)
        want = torch.autograd.grad(loss(torch.softmax(leaves[0] @ leaves[1].mT / 8**0.5, -1) @ leaves[2]), leaves)
        torch.testing.assert_close(found, want)


def test_gradients_that_are_zero_without_memory():
    leaves = inputs()
    for _ in range(2):
        output = qkv.attention(*leaves, backend="cpu")
        found = torch.autograd.grad(output, leaves, torch._efficientzerotensor(output.shape))
        assert all(not x.any() for x in found)


def test_a_long_table_has_the_same_gradient_on_any_number_of_threads():
    """Its sums are kept in chunks, which one pass and stages must cut alike."""
    leaves, table = inputs(heads=1, rows=1200), torch.randn(1, 1281, requires_grad=True)
    found, before = [], torch.get_num_threads()
    for threads in (1, 2):
        torch.set_num_threads(threads)
        output = qkv.attention(*leaves, bias=qkv.relative(table), backend="cpu")
        found.append(torch.autograd.grad(output.sum() + output.square().sum(), table)[0])
    torch.set_num_threads(before)
    assert torch.equal(*found)


def test_a_remembered_call_is_seen_by_a_tracer():
    leaves = [x.detach() for x in inputs()]
    want = qkv.attention(*leaves, backend="cpu")
    graph = make_fx(lambda query: qkv.attention(query, *leaves[1:], backend="cpu"))(leaves[0])
    torch.testing.assert_close(graph(leaves[0]), want)


def test_large_patterns_are_not_remembered_call_by_call():
    leaves = [x.detach() for x in inputs(rows=300)]
    remembered._known.clear()
    for _ in range(3):
        qkv.attention(*leaves, pattern=qkv.mask(torch.rand(300, 300) < 0.5), backend="cpu")
    assert not remembered._known
    qkv.attention(*leaves, pattern=qkv.causal(), backend="cpu")
    assert len(remembered._known) == 1


@pytest.mark.parametrize("softcap", [1e-46, 3e38])
def test_softcaps_at_the_ends_of_the_range(softcap):
    leaves = inputs()
    output = qkv.attention(*leaves, softcap=softcap, backend="cpu")
    torch.testing.assert_close(output, qkv.attention(*leaves, softcap=softcap, backend="reference"))
    found = torch.autograd.grad(output.square().sum(), leaves)
    exact = [x.detach().double().requires_grad_() for x in leaves]  # in float32 the reference divides 0 by 0
    truth = qkv.attention(*exact, softcap=softcap, backend="reference").square().sum()
    want = [x.float() for x in torch.autograd.grad(truth, exact)]
    torch.testing.assert_close(list(found), want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("slope", [3e38, -1e37])
def test_slopes_at_the_ends_of_the_range(slope):
    leaves = inputs(rows=3)
    found = qkv.attention(*leaves, bias=qkv.alibi([slope, slope]), pattern=qkv.causal(), backend="cpu")
    want = qkv.attention(*leaves, bias=qkv.alibi([slope, slope]), pattern=qkv.causal(), backend="reference")
    torch.testing.assert_close(found, want)
