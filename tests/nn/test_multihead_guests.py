"""Modules of others in the layer's places, and derivatives of other kinds: adapters, quantised maps, many gradients."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from torch import nn

import qkv
from qkv.nn import Decoder, Rotary
from qkv.nn.multihead_attention import MultiheadAttention

DIM, HEADS, B, L = 16, 4, 2, 6


class Adapter(nn.Module):
    """A linear map and a low rank beside it; it has no `weight` of its own."""

    def __init__(self, base):
        super().__init__()
        self.base = base
        self.down = nn.Linear(base.in_features, 2, bias=False)
        self.up = nn.Linear(2, base.out_features, bias=False)

    def forward(self, x):
        return self.base(x) + self.up(self.down(x))


def merged(adapter):
    plain = copy.deepcopy(adapter.base)
    with torch.no_grad():
        plain.weight += adapter.up.weight @ adapter.down.weight
    return plain


@pytest.mark.parametrize("dtype, bound", [(torch.float64, 1e-12), (torch.bfloat16, 0.05)])
def test_adapters_stand_in_every_place(dtype, bound):
    torch.manual_seed(0)
    layer = MultiheadAttention(DIM, HEADS, pattern=qkv.causal(), rotary=Rotary(4)).to(dtype).eval()
    places = ("q_proj", "k_proj", "v_proj", "o_proj")
    for place in places:
        setattr(layer, place, Adapter(getattr(layer, place)).to(dtype))
    plain = copy.deepcopy(layer)
    for place in places:
        setattr(plain, place, merged(getattr(layer, place)))
    x = torch.randn(B, L, DIM, dtype=dtype)
    want, _ = plain(x)
    state = layer.initial_state(B, L)
    assert state.dtype == dtype
    stepped = torch.stack([layer.step(x[:, t], state)[0] for t in range(L)], 1)
    for found in (layer(x)[0], layer.attend(x)[0], stepped):
        assert (found - want).abs().max() <= bound


def test_a_sequence_of_modules_stands_in_a_place():
    layer = MultiheadAttention(DIM, HEADS, pattern=qkv.causal()).double().eval()
    x = torch.randn(B, L, DIM, dtype=torch.float64)
    want, _ = layer(x)
    layer.q_proj, layer.k_proj = nn.Sequential(layer.q_proj), nn.Sequential(nn.Identity(), layer.k_proj)
    torch.testing.assert_close(layer(x)[0], want, atol=1e-12, rtol=0)
    assert layer.initial_state(B, L).dtype == torch.float64


@pytest.mark.parametrize("norm", ["layer", "rms"])
def test_a_decoder_of_quantised_maps_decodes(norm):
    torch.manual_seed(0)
    plain = Decoder(2, DIM, HEADS, cross_attention=False, norm=norm).eval()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own: it will move
        quantised = torch.ao.quantization.quantize_dynamic(plain, {nn.Linear})
        layer = torch.ao.quantization.quantize_dynamic(
            nn.ModuleList([MultiheadAttention(DIM, HEADS, pattern=qkv.causal())]), {nn.Linear}
        )[0]
    x = torch.randn(B, L, DIM)
    want = quantised(x)
    assert (want - plain(x)).abs().max() < 0.2  # 8 bits
    state = quantised.initial_state(B, L)
    for t in range(L):
        y, _ = quantised.step(x[:, t], state)
        assert (y - want[:, t]).abs().max() < 0.2  # a step has scales of its own
    assert not list(layer.parameters())
    assert layer.initial_state(B, L).dtype == torch.float32


@pytest.mark.parametrize("length", [5, 300])
@pytest.mark.parametrize("options", [{}, {"rotary": Rotary(4), "sinks": True}], ids=["plain", "more"])
def test_many_gradients_at_once(length, options):
    layer = MultiheadAttention(DIM, HEADS, pattern=qkv.causal(), **options).double()
    x = torch.randn(B, length, DIM, dtype=torch.float64, requires_grad=True)
    for _ in range(2):  # the second call is a remembered one
        y, _ = layer(x)
    given = torch.randn(3, *y.shape, dtype=torch.float64)
    want = torch.stack([torch.autograd.grad(y, x, one, retain_graph=True)[0] for one in given])
    (found,) = torch.autograd.grad(y, x, given, is_grads_batched=True, retain_graph=True)
    torch.testing.assert_close(found, want, atol=1e-12, rtol=0)
    assert not found.requires_grad
    mapped = torch.func.vmap(lambda one: torch.autograd.grad(y, x, one, retain_graph=True)[0])(given)
    torch.testing.assert_close(mapped, want, atol=1e-12, rtol=0)


@pytest.mark.parametrize("name", ["causal()", "retention", "gated_delta", "linear", "mamba2"])
def test_many_gradients_at_once_through_a_decoder(name):
    torch.manual_seed(0)
    stack = Decoder(1, DIM, HEADS, attention=name, cross_attention=False, norm="rms", activation="swiglu")
    x = torch.randn(B, 150, DIM, requires_grad=True)
    y = stack(x)
    given = torch.randn(3, *y.shape)
    want = torch.stack([torch.autograd.grad(y, x, one, retain_graph=True)[0] for one in given])
    (found,) = torch.autograd.grad(y, x, given, is_grads_batched=True)
    torch.testing.assert_close(found, want, atol=2e-5, rtol=0)
