"""Linear attention by phi(q)·phi(k): its feature maps, and every token seeing every other."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck
from torch.nn import functional as F

import qkv
from linear.named import (
    CU,
    B,
    D,
    Given,
    H,
    K,
    L,
    V,
    ask,
    given,
    lengthwise,
    near,
)

# Feature maps


MAPS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "squared_relu": lambda x: F.relu(x) ** 2,
    "elu": lambda x: F.elu(x) + 1,
    "softmax": qkv.SoftmaxFeatures(),
    "hedgehog": qkv.HedgehogFeatures(1, D).double(),
    "taylor": qkv.TaylorFeatures(),
    "favor": qkv.FavorFeatures(D),
}


def weights(phi: Callable[[Tensor], Tensor], q: Tensor, k: Tensor, is_causal: bool) -> Tensor:
    q, k = (phi(x).detach().repeat_interleave(H // K, 1) for x in (q, k))
    found = q @ k.mT
    return found.tril() if is_causal else found


@pytest.mark.parametrize("name", MAPS)
@pytest.mark.parametrize("is_causal", [True, False])
def test_feature_maps_by_name_and_by_function(name: str, is_causal: bool) -> None:
    q, k, v = given("linear_attention").tensors
    pairs = weights(MAPS[name], q, k, is_causal)
    total = pairs.sum(-1, keepdim=True)
    wanted = torch.where(total == 0, 0.0, pairs @ v / total)
    for feature_map in (name, MAPS[name]):
        near(qkv.linear_attention(q, k, v, feature_map=feature_map, is_causal=is_causal), wanted, 1e-10)
        out = qkv.linear_attention(q, k, v, feature_map=feature_map, is_causal=is_causal, normalize=False, scale=0.5)
        near(out, pairs @ v / 2, 1e-10)


def test_a_feature_map_of_another_width_decides_that_of_states() -> None:
    q, k, v = given("linear_attention").to(torch.bfloat16).tensors
    seen = []

    def phi(x: Tensor) -> Tensor:
        seen.append(tuple(x.shape))
        return torch.cat([x, -x], -1).float().softmax(-1)

    out, state = qkv.linear_attention(q, k, v, feature_map=phi, return_state=True)
    assert out.dtype == torch.bfloat16 and state.shape == (B, H, 2 * D, V + 1)
    assert seen == [(B, K, L, D)] * 2
    q, k, v = (x.float() for x in (q, k, v))
    wanted = weights(phi, q, k, is_causal=True)
    near(out, wanted @ v / wanted.sum(-1, keepdim=True), torch.finfo(torch.bfloat16).eps)
    again = qkv.linear_attention(q, k, v, feature_map=phi, initial_state=state)
    wide = qkv.linear_attention(*(torch.cat([x, x], 2) for x in (q, k, v)), feature_map=phi)
    near(again, wide[:, :, L:], 1e-5)
    q, k, v = (lengthwise(x) for x in (q, k, v))
    out = qkv.linear_attention(q, k, v, feature_map=phi, layout="BLHD")
    near(out.transpose(1, 2), wanted @ v.transpose(1, 2) / wanted.sum(-1, keepdim=True), 1e-5)


def test_features_of_double_precision_beside_single() -> None:
    q, k, v = given("linear_attention").to(torch.float32).tensors
    out, state = qkv.linear_attention(q, k, v, feature_map=lambda x: x.double().exp(), return_state=True)
    assert (out.dtype, state.dtype) == (torch.float32, torch.float64)


def test_parameters_of_a_feature_map_learn() -> None:
    q, k, v = given("linear_attention", batch=1, length=5).tensors
    phi = qkv.HedgehogFeatures(K, D).double()
    mapped = [phi(x).repeat_interleave(H // K, dim=1) for x in (q, k)]
    weights = (mapped[0] @ mapped[1].mT).tril()
    wanted = weights / weights.sum(-1, keepdim=True) @ v
    seed, learned = torch.randn_like(wanted), (phi.weight, phi.bias)
    gradients = torch.autograd.grad((qkv.linear_attention(q, k, v, feature_map=phi) * seed).sum(), learned)
    for found, gradient in zip(gradients, torch.autograd.grad((wanted * seed).sum(), learned), strict=True):
        assert bool(gradient.any(dim=-1).all())
        near(found, gradient)


# Every token sees every other


def test_both_ways_packed_and_in_either_layout() -> None:
    one = given("linear_attention", batch=1)
    out = ask("linear_attention", one, is_causal=False, cu_seqlens=CU)
    for start, end in itertools.pairwise(CU):
        near(out[:, :, start:end], ask("linear_attention", one.part(slice(start, end)), is_causal=False))
    other = Given([lengthwise(x) for x in one.tensors], {})
    near(
        ask("linear_attention", other, is_causal=False, layout="BLHD", backend="chunked").transpose(1, 2),
        ask("linear_attention", one, is_causal=False),
    )
    empty = given("linear_attention", batch=1, length=0)
    assert ask("linear_attention", empty, is_causal=False, cu_seqlens=[0]).shape == (1, H, 0, V)
    assert ask("linear_attention", empty, is_causal=False).shape == (1, H, 0, V)


def test_both_ways_in_16_bits_are_summed_in_32() -> None:
    one = given("linear_attention", length=300).to(torch.bfloat16)
    wanted = ask("linear_attention", one.to(torch.float64), is_causal=False)
    out = ask("linear_attention", one, is_causal=False)
    assert out.dtype == torch.bfloat16
    assert float((out - wanted).abs().max() / wanted.abs().max()) < torch.finfo(torch.bfloat16).eps


@pytest.mark.parametrize("is_causal", [True, False])
def test_where_no_key_has_weight_there_is_nothing(is_causal: bool) -> None:
    q, k, v = (x.requires_grad_() for x in given("linear_attention", batch=1, heads=2, length=4).tensors)
    out = qkv.linear_attention(q, -k.abs(), v, feature_map="relu", is_causal=is_causal)
    assert not out.any()
    assert not any(grad.any() for grad in torch.autograd.grad(out.sum(), (q, k, v)))


def test_both_ways_has_gradients() -> None:
    leaves = [x.requires_grad_() for x in given("linear_attention", batch=1, length=4).tensors]
    assert gradcheck(lambda *x: qkv.linear_attention(*x, is_causal=False), leaves)
