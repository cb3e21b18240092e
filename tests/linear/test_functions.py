"""The named functions of the linear family against their recurrences, and what all of them promise."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck

import qkv
from linear.named import (
    CU,
    EACH,
    ENGINES,
    LENGTHS,
    B,
    D,
    Given,
    H,
    K,
    L,
    V,
    ask,
    first_state,
    given,
    lengthwise,
    near,
    told,
)

# Against the recurrence


@EACH
@ENGINES
def test_output_and_state(name: str, backend: str) -> None:
    one, state = given(name), first_state(name)
    near(ask(name, one, backend=backend), told(name, one)[0])
    out, last = ask(name, one, initial_state=state, return_state=True, backend=backend)
    wanted = told(name, one, state)
    near(out, wanted[0])
    near(last, wanted[1])
    assert torch.equal(state, first_state(name)), "the state before is the caller's"


@EACH
def test_a_scale_of_the_caller(name: str) -> None:
    one = given(name)
    near(ask(name, one, scale=-0.3), told(name, one, scale=-0.3)[0])


@EACH
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("wide", [True, False])
def test_narrow_types(name: str, dtype: torch.dtype, wide: bool) -> None:
    """Computed in float32: what differs from float64 is the rounding of the output, and of sums in float32."""
    one = given(name).to(dtype, torch.float32 if wide else dtype)
    state = first_state(name).to(torch.float32 if wide else dtype)
    out, last = ask(name, one, initial_state=state, return_state=True)
    wanted, end = told(name, one, state)
    assert out.dtype == dtype and last.dtype == torch.float32
    near(out, wanted, torch.finfo(dtype).eps + 5e-6)
    near(last, end, 5e-6)


@EACH
def test_gradients_reach_every_argument(name: str) -> None:
    one = given(name, batch=1, heads=2, length=4)
    state = first_state(name, 1, 2)
    leaves = [x.requires_grad_() for x in (*one.tensors, *one.beside.values(), state)]

    def function(q: Tensor, k: Tensor, v: Tensor, *others: Tensor) -> Any:
        beside = dict(zip(one.beside, others, strict=False))
        return ask(name, Given([q, k, v], beside), initial_state=others[-1], return_state=True)

    assert gradcheck(function, leaves)


@EACH
def test_gradients_have_the_types_of_their_arguments(name: str) -> None:
    one = given(name).to(torch.bfloat16, torch.float32)
    leaves = [x.requires_grad_() for x in (*one.tensors, *one.beside.values())]
    grads = torch.autograd.grad(ask(name, one).sum(), leaves)
    assert [grad.dtype for grad in grads] == [leaf.dtype for leaf in leaves]
    assert [grad.shape for grad in grads] == [leaf.shape for leaf in leaves]


# Forms


@EACH
def test_layouts_agree(name: str) -> None:
    one, state = given(name).to(torch.float32), first_state(name).float()
    beside = {key: x if key == "decay" else lengthwise(x) for key, x in one.beside.items()}
    out, last = ask(name, one, initial_state=state, return_state=True)
    other, end = ask(
        name,
        Given([lengthwise(x) for x in one.tensors], beside),
        layout="BLHD",
        initial_state=state,
        return_state=True,
    )
    assert other.shape == (B, L, H, V)
    assert torch.equal(other, out.transpose(1, 2)) and torch.equal(end, last)


@EACH
@pytest.mark.parametrize("edges", [CU, torch.tensor(CU), torch.tensor(CU, dtype=torch.int32)])
def test_packed_sequences_are_alone(name: str, edges: Any) -> None:
    one, states = given(name, batch=1), first_state(name, len(LENGTHS))
    out, last = ask(name, one, cu_seqlens=edges, initial_state=states, return_state=True)
    assert out.shape == (1, H, L, V) and last.shape == states.shape
    for n, (start, end) in enumerate(itertools.pairwise(CU)):
        part = one.part(slice(start, end))
        alone, final = ask(name, part, initial_state=states[n : n + 1], return_state=True)
        near(out[:, :, start:end], alone)
        near(last[n : n + 1], final)
    near(ask(name, one, cu_seqlens=edges)[:, :, 6:], ask(name, one.part(slice(6, L))))


@EACH
@pytest.mark.parametrize("cut", [0, 1, 20, L])
def test_a_state_carries_on(name: str, cut: int) -> None:
    one = given(name)
    whole, end = ask(name, one, return_state=True)
    head, state = ask(name, one.part(slice(0, cut)), return_state=True)
    tail, last = ask(name, one.part(slice(cut, L)), initial_state=state, return_state=True)
    near(torch.cat([head, tail], 2), whole)
    near(last, end)


@EACH
def test_value_heads_share_key_heads_in_groups(name: str) -> None:
    one = given(name)
    q, k, v = one.tensors
    repeated = Given([q.repeat_interleave(H // K, 1), k.repeat_interleave(H // K, 1), v], one.beside)
    near(ask(name, one), ask(name, repeated))


@EACH
@ENGINES
def test_nothing_to_do(name: str, backend: str) -> None:
    for batch, length in ((B, 0), (0, L), (0, 0)):
        one, state = given(name, batch=batch, length=length), first_state(name, batch)
        out, last = ask(name, one, return_state=True, backend=backend)
        assert out.shape == (batch, H, length, V)
        assert torch.equal(last, torch.zeros_like(state))
        _, last = ask(name, one, initial_state=state, return_state=True, backend=backend)
        assert torch.equal(last, state)
    empty = given(name, batch=1, length=0)
    out, last = ask(name, empty, cu_seqlens=[0], return_state=True, backend=backend)
    assert out.shape == (1, H, 0, V) and last.shape == first_state(name, 0).shape
    out, last = ask(name, empty, cu_seqlens=[0, 0, 0], return_state=True, backend=backend)
    assert torch.equal(last, torch.zeros_like(first_state(name, 2)))


def test_one_function_is_another_with_settings() -> None:
    kimi, gated = given("kimi_delta_attention"), given("gated_delta_rule")
    g, beta = gated.beside["g"], gated.beside["beta"]
    channels = g[..., None].expand(*g.shape, D)
    by_token = qkv.gated_delta_rule(*gated.tensors, g, beta)
    near(qkv.kimi_delta_attention(*gated.tensors, channels, beta), by_token)
    near(qkv.gated_delta_rule(*gated.tensors, 0 * g, beta), qkv.delta_rule(*gated.tensors, beta))
    near(qkv.gated_linear_attention(*gated.tensors, channels), qkv.ssd(*gated.tensors, g, scale=1 / math.sqrt(D)))
    decay = torch.tensor([0.0, -0.1, -1.0, -math.inf], dtype=torch.float64)
    constant = decay[:, None].expand(B, H, L)
    near(qkv.retention(*gated.tensors, decay=decay, scale=1.0), qkv.ssd(*gated.tensors, constant))
    plain = qkv.linear_attention(*gated.tensors, feature_map=None, normalize=False)
    near(qkv.ssd(*gated.tensors, 0 * g), plain)
    assert not qkv.kimi_delta_attention(*kimi.tensors, kimi.beside["g"], 0 * beta).any(), "strength 0 writes nothing"


def test_a_gate_that_is_nan_stays_in_its_head() -> None:
    one = given("ssd")
    one.beside["g"][0, 1, 9] = math.nan
    out = ask("ssd", one)
    wanted = told("ssd", one)[0]
    assert torch.equal(out.isnan(), wanted.isnan()) and out[0, 1, 9:].isnan().all()
    near(out.nan_to_num(), wanted.nan_to_num())
