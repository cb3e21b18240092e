"""docs/numerics.md#the-linear-family: which bits repeat on the native core, and how far a NaN goes."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

import qkv
from qkv.backends.extension import MISSING

needs_core = pytest.mark.skipif(MISSING is not None, reason="the native core is not there")
B, H, L, D, V = 3, 4, 200, 24, 40
GATES = {
    "linear_attention": (),
    "retention": ("decay",),
    "gated_linear_attention": ("vector",),
    "delta_rule": ("beta",),
    "gated_delta_rule": ("scalar", "beta"),
    "kimi_delta_attention": ("vector", "beta"),
    "ssd": ("scalar",),
}
EACH = pytest.mark.parametrize("name", GATES)


def drawn(name: str, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """Arguments by name, for B rows of L tokens."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    made = {"query": normal(B, 2, L, D), "key": qkv.l2_norm(normal(B, 2, L, D)), "value": normal(B, H, L, V)}
    made = {key: x.to(dtype) for key, x in made.items()}
    of = {
        "decay": ("decay", (H,)),
        "vector": ("g", (B, H, L, D)),
        "scalar": ("g", (B, H, L)),
        "beta": ("beta", (B, H, L)),
    }
    for kind in GATES[name]:
        key, shape = of[kind]
        made[key] = normal(*shape).sigmoid() * (1 if kind == "beta" else -0.3)
    return made


def part(arguments: dict[str, Tensor], rows: slice, tokens: slice = slice(None)) -> dict[str, Tensor]:
    return {key: x if key == "decay" else x[rows, :, tokens] for key, x in arguments.items()}


def answer(name: str, arguments: dict[str, Tensor], **options) -> list[Tensor]:
    """Output, state, and the gradients of all arguments."""
    leaves = {key: x.detach().requires_grad_() for key, x in arguments.items()}
    found = getattr(qkv, name)(**leaves, backend="cpu", return_state=True, **options)
    return [*found, *torch.autograd.grad([x.float().square().sum() for x in found], list(leaves.values()))]


@needs_core
@EACH
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bits_do_not_depend_on_threads(name, dtype):
    one = answer(name, drawn(name, dtype))
    torch.set_num_threads(3)
    try:
        three = answer(name, drawn(name, dtype))
    finally:
        torch.set_num_threads(1)
    assert all(map(torch.equal, one, three))


@needs_core
@EACH
def test_bits_do_not_depend_on_the_batch_or_the_layout(name):
    arguments = drawn(name)
    whole = answer(name, arguments)
    for row in range(B):
        rows = slice(row, row + 1)
        alone = answer(name, part(arguments, rows))
        for key, a, b in zip(("output", "state", *arguments), whole, alone, strict=True):
            if key != "decay":  # whose gradient is a sum over the batch
                assert torch.equal(a[rows], b)
    turned = {key: x if key == "decay" else x.transpose(1, 2).contiguous() for key, x in arguments.items()}
    other = answer(name, turned, layout="BLHD")
    for key, a, b in zip(("output", "state", *arguments), whole, other, strict=True):
        assert torch.equal(a, b if key in ("state", "decay") else b.transpose(1, 2))


@needs_core
@EACH
@pytest.mark.parametrize("cut", [4, 64, 100])
def test_a_cut_at_a_multiple_of_four_keeps_the_bits(name, cut):
    arguments, options = drawn(name), {"backend": "cpu", "return_state": True}
    whole, last = getattr(qkv, name)(**arguments, **options)
    first, state = getattr(qkv, name)(**part(arguments, slice(None), slice(cut)), **options)
    rest = part(arguments, slice(None), slice(cut, None))
    second, end = getattr(qkv, name)(**rest, initial_state=state, **options)
    assert torch.equal(torch.cat([first, second], dim=2), whole)
    assert torch.equal(end, last)


@pytest.mark.parametrize("backend", ["auto", "chunked", "reference"])
@EACH
def test_nan_goes_forward_only(name, backend):
    """From token 130 on, in its row of the batch; by chunks from the start of its chunk of 64."""
    for key in drawn(name):
        if key == "decay":
            continue
        arguments = drawn(name)
        clean = getattr(qkv, name)(**arguments, backend=backend)
        arguments[key][1, :, 130] = math.nan
        out = getattr(qkv, name)(**arguments, backend=backend)
        bad = out.isnan()
        assert bool(bad[1, :, 130].all())
        chunked = backend == "chunked" or (backend == "auto" and MISSING is not None)
        before = 128 if chunked else 130
        for rows, tokens in ((0, slice(None)), (2, slice(None)), (1, slice(before))):
            assert torch.equal(out[rows, :, tokens], clean[rows, :, tokens])
        if key == "query":
            assert not bool(bad[1, :, 131:].any())
        elif not chunked:
            assert bool(bad[1, :, 130:].all())
