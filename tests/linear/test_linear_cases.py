"""Reports of users of linear attention as small inputs with the right answer; each stands for a kind of fault."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

import qkv

ENGINES = pytest.mark.parametrize("backend", ["auto", "chunked", "reference"])
# Each function of the family with what it takes besides q, k and v, for B rows, H heads, L tokens and width D.
FAMILY = {
    "linear_attention": lambda B, H, L, D: {},
    "retention": lambda B, H, L, D: {"decay": -torch.rand(H)},
    "gated_linear_attention": lambda B, H, L, D: {"g": -torch.rand(B, H, L, D)},
    "delta_rule": lambda B, H, L, D: {"beta": torch.rand(B, H, L)},
    "gated_delta_rule": lambda B, H, L, D: {"g": -torch.rand(B, H, L), "beta": torch.rand(B, H, L)},
    "kimi_delta_attention": lambda B, H, L, D: {"g": -torch.rand(B, H, L, D), "beta": torch.rand(B, H, L)},
    "ssd": lambda B, H, L, D: {"g": -torch.rand(B, H, L)},
}


def drawn(batch: int, heads: int, length: int, width: int = 8) -> list[Tensor]:
    """q, k and v, keys of length 1 as the delta rules need."""
    q, k, v = (torch.randn(batch, heads, length, width) for _ in range(3))
    return [q, k / k.norm(dim=-1, keepdim=True), v]


@pytest.fixture(autouse=True)
def _seeded():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        yield


# Case 96: elu(x) + 1 in bfloat16 rounds to 0 at x = -8; an epsilon in the denominator then makes gradients of 3e6.


@ENGINES
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("size", [-8.0, -16.0, -30.0])
def test_a_single_token_gets_its_own_value(backend, dtype, size):
    q, k = (torch.full((1, 1, 1, 4), size, dtype=dtype, requires_grad=True) for _ in range(2))
    v = torch.ones(1, 1, 1, 2, dtype=dtype, requires_grad=True)
    out = qkv.linear_attention(q, k, v, backend=backend)
    torch.testing.assert_close(out.detach(), torch.ones_like(out), rtol=torch.finfo(dtype).eps, atol=0)
    grads = torch.autograd.grad(out.sum(), (q, k, v))
    assert float(max(grads[0].abs().max(), grads[1].abs().max())) < 1e-3, "the weight is 1 whatever q and k are"
    torch.testing.assert_close(grads[2], torch.ones_like(v), rtol=torch.finfo(dtype).eps, atol=0)


@ENGINES
@pytest.mark.parametrize("feature_map", ["relu", "squared_relu"])
def test_no_weight_at_all_is_zero_and_has_no_gradient(backend, feature_map):
    """relu of negative numbers: the denominator is exactly 0, and no epsilon turns that into slopes of millions."""
    q, k, v = (x.abs().neg().requires_grad_() for x in drawn(1, 2, 5))
    out = qkv.linear_attention(q, k, v, feature_map=feature_map, backend=backend)
    assert not out.any()
    for grad in torch.autograd.grad(out.sum(), (q, k, v)):
        assert not grad.any()


# Case 98: the reciprocal of the normaliser was missing, and a running sum went over heads.


@ENGINES
@pytest.mark.parametrize("feature_map", ["elu", "softmax", "hedgehog", "favor", "taylor"])
@pytest.mark.parametrize("layout", ["BHLD", "BLHD"])
def test_equal_weights_give_running_means(backend, feature_map, layout):
    heads = torch.tensor([1.0, -10.0, 100.0])
    q = k = torch.zeros(2, 3, 4, 4)
    v = (heads[:, None, None] * torch.arange(4.0)[:, None]).expand(2, 3, 4, 2)
    q, k, v = (x if layout == "BHLD" else x.transpose(1, 2) for x in (q, k, v))
    out = qkv.linear_attention(q, k, v, feature_map=feature_map, layout=layout, backend=backend)
    out = out if layout == "BHLD" else out.transpose(1, 2)
    wanted = heads[:, None, None] * torch.tensor([0.0, 0.5, 1.0, 1.5])[:, None]
    torch.testing.assert_close(out, wanted.expand(2, 3, 4, 2), rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize("feature_map", ["elu", "softmax", "favor", "taylor"])
def test_equal_weights_give_the_mean_in_both_directions(feature_map):
    q = k = torch.zeros(1, 1, 4, 4)
    v = torch.arange(4.0)[:, None].expand(1, 1, 4, 2)
    out = qkv.linear_attention(q, k, v, feature_map=feature_map, is_causal=False)
    torch.testing.assert_close(out, torch.full((1, 1, 4, 2), 1.5))


@ENGINES
def test_without_a_normaliser_weights_add_up(backend):
    q = k = torch.zeros(1, 1, 4, 4)
    v = torch.arange(4.0)[:, None].expand(1, 1, 4, 2)
    out = qkv.linear_attention(q, k, v, normalize=False, backend=backend)
    assert out[0, 0, :, 0].tolist() == [0.0, 4.0, 12.0, 24.0]  # elu(0) + 1 = 1, four of them


# Case 99: the padding mask was skipped for a batch of one. There is no mask here: padding is a sequence of its own, or
# a gate of -inf at the first real token.


@ENGINES
@pytest.mark.parametrize("name", FAMILY)
@pytest.mark.parametrize("pads", [(2,), (2, 0, 5)], ids=["batch of one", "batch of three"])
def test_left_padding_as_a_sequence_of_its_own(backend, name, pads):
    """A batch padded on the left, laid out as one row in which every padding is a sequence: equal to unpadded runs."""
    batch, length, function = len(pads), 9, getattr(qkv, name)
    tensors, more = drawn(batch, 2, length), FAMILY[name](batch, 2, length, 8)
    for row, pad in enumerate(pads):
        for x in tensors:
            x[row, :, :pad] = math.nan
    row_of = {key: x if key == "decay" else flat(x) for key, x in more.items()}
    bounds = sorted({0, *(n * length + p for n, p in enumerate(pads)), *(n * length for n in range(1, batch + 1))})
    out = flat_back(function(*map(flat, tensors), **row_of, cu_seqlens=bounds, backend=backend), batch)
    for row, pad in enumerate(pads):
        alone = {key: x if key == "decay" else x[row : row + 1, :, pad:] for key, x in more.items()}
        wanted = function(*(x[row : row + 1, :, pad:] for x in tensors), **alone, backend=backend)
        torch.testing.assert_close(out[row : row + 1, :, pad:], wanted, rtol=1e-5, atol=1e-6)


def flat(x: Tensor) -> Tensor:
    """(B, H, L, ...) as one row (1, H, B L, ...)."""
    return x.transpose(0, 1).flatten(1, 2)[None]


def flat_back(x: Tensor, batch: int) -> Tensor:
    return x[0].unflatten(1, (batch, -1)).transpose(0, 1)


@ENGINES
@pytest.mark.parametrize("name", [name for name in FAMILY if "g" in FAMILY[name](1, 1, 1, 1)])
@pytest.mark.parametrize("batch", [1, 3])
def test_left_padding_by_a_gate_that_resets(backend, name, batch):
    """-inf at the first real token forgets what came before, however large, in the output and in every gradient."""
    pad, length, function = 4, 11, getattr(qkv, name)
    tensors, more = drawn(batch, 2, length), FAMILY[name](batch, 2, length, 8)
    more["g"][:, :, pad] = -math.inf
    leaves = [x.requires_grad_() for x in (*tensors, *more.values())]
    out = function(*tensors, **more, backend=backend)[:, :, pad:]
    wanted = function(*(x[:, :, pad:] for x in tensors), **{n: x[:, :, pad:] for n, x in more.items()}, backend=backend)
    torch.testing.assert_close(out, wanted, rtol=1e-5, atol=1e-6)
    grad = torch.randn_like(out)
    for found, true in zip(*(torch.autograd.grad(one, leaves, grad) for one in (out, wanted)), strict=True):
        assert not found[:, :, :pad].any()
        torch.testing.assert_close(found, true, rtol=1e-4, atol=1e-5)
