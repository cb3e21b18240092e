"""Linear attention is exactly the quadratic form of its feature map; how far the map is from softmax attention."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor, nn

import qkv
from qkv.linear.features import FeatureMap, elementwise, read_feature_map
from qkv.linear.features_fixed import FavorFeatures
from qkv.linear.features_learned import HedgehogFeatures

ENGINES = pytest.mark.parametrize("backend", ["auto", "chunked", "reference"])


@pytest.fixture(autouse=True)
def _seeded():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        yield


MAPS = ["elu", "relu", "squared_relu", "softmax", "hedgehog", "favor", "taylor"]


def featured(feature_map: str | FeatureMap, *tensors: Tensor) -> list[Tensor]:
    """Features of float32, in float64."""
    feature, applied = read_feature_map(feature_map, tensors[0].shape[-1])
    return [(elementwise(feature, x) if applied is None else applied(x)).double() for x in tensors]


def quadratic(weights: Tensor, v: Tensor) -> Tensor:
    """Rows of weights divided by their sum, times v; 0 where the sum is."""
    total = weights.sum(dim=-1, keepdim=True)
    return torch.where(total == 0, 0.0, weights / torch.where(total == 0, 1.0, total)) @ v


@ENGINES
@pytest.mark.parametrize("feature_map", MAPS)
@pytest.mark.parametrize("is_causal", [True, False])
def test_it_is_the_quadratic_form_of_its_map(backend, feature_map, is_causal):
    """Within (L + M + 8) u of the absolute sums of numerator and denominator: M features a product, L keys a sum."""
    if not is_causal and backend == "reference":
        pytest.skip("both directions have one form")
    q, k, v = (torch.randn(1, 2, 150, 16) for _ in range(3))
    phi_q, phi_k = featured(feature_map, q, k)
    seen = torch.ones(150, 150).tril() if is_causal else torch.ones(150, 150)
    weights, sizes = (seen * (a @ b.mT) for a, b in ((phi_q, phi_k), (phi_q.abs(), phi_k.abs())))
    wanted = quadratic(weights, v.double())
    out = qkv.linear_attention(q, k, v, feature_map=feature_map, is_causal=is_causal, backend=backend)
    total = weights.sum(dim=-1, keepdim=True)
    spread = sizes @ v.double().abs() + wanted.abs() * sizes.sum(dim=-1, keepdim=True)
    bound = (150 + phi_q.shape[-1] + 8) * 2.0**-24 * torch.where(total == 0, 0.0, spread / total)
    assert bool(((out.double() - wanted).abs() <= bound).all())


def from_softmax(feature_map: str | FeatureMap, size: float, length: int = 256, width: int = 64) -> float:
    """|o - softmax attention| / |softmax attention|, causal, on seeded normal numbers times `size` for q and k."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = torch.randn(3, 1, 2, length, width, generator=generator).unbind()
    exact = qkv.attention(size * q, size * k, v, pattern=qkv.causal())
    out = qkv.linear_attention(size * q, size * k, v, feature_map=feature_map)
    return float((out - exact).norm() / exact.norm())


MEASURED = {  # for q and k of size 0.25, 0.5 and 1; the running mean of v is at 0.056, 0.22 and 0.71
    "elu": (0.0563, 0.2077, 0.6862),
    "relu": (0.2594, 0.2357, 0.6362),
    "squared_relu": (0.5569, 0.5053, 0.6617),
    "softmax": (0.0491, 0.1944, 0.6506),
    "hedgehog": (0.0285, 0.1397, 0.7667),
    "favor": (0.0423, 0.3080, 1.6330),
    "taylor": (0.0002, 0.0101, 0.3207),
}


@pytest.mark.parametrize("feature_map", MAPS)
def test_distance_from_softmax_is_what_the_page_says(feature_map):
    """docs/linear.md#approximations"""
    found = [from_softmax(feature_map, size) for size in (0.25, 0.5, 1.0)]
    assert found == pytest.approx(MEASURED[feature_map], rel=0.02, abs=5e-5)


def test_favor_comes_nearer_with_more_features():
    errors = [from_softmax(FavorFeatures(64, features), 0.25) for features in (64, 256, 1024, 4096)]
    assert all(more < 0.75 * less for less, more in itertools.pairwise(errors))


def test_taylor_is_as_near_as_its_series():
    """All weights are off by factors between lo and hi, so the result by at most (hi / lo - 1) max|v - o|."""
    q, k, v = (torch.randn(1, 2, 60, 16, dtype=torch.float64) for _ in range(3))
    out = qkv.linear_attention(0.3 * q, 0.3 * k, v, feature_map="taylor")
    exact = qkv.attention(0.3 * q, 0.3 * k, v, pattern=qkv.causal())
    z = 0.09 * q @ k.mT / 4
    factor = (1 + z + z * z / 2) / z.exp()
    spread = (v.amax(dim=2) - v.amin(dim=2)).amax()
    assert float((out - exact).abs().max()) <= float((factor.max() / factor.min() - 1) * spread)
    assert float(factor.max() / factor.min() - 1) < 0.2, "or the test would say little"


def test_a_map_of_one_s_own_learns():
    map_ = nn.Sequential(nn.Linear(8, 12), nn.Softplus())
    q, k, v = (torch.randn(1, 2, 20, 8) for _ in range(3))
    phi_q, phi_k = map_(q), map_(k)
    wanted = quadratic((phi_q @ phi_k.mT).tril(), v)
    out = qkv.linear_attention(q, k, v, feature_map=map_)
    torch.testing.assert_close(out, wanted, rtol=1e-4, atol=1e-5)
    parameters = list(map_.parameters())
    for a, b in zip(*(torch.autograd.grad(x.square().sum(), parameters) for x in (out, wanted)), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)
    apart = qkv.linear_attention(map_(q), map_(k), v, feature_map=None)
    torch.testing.assert_close(apart, out)


def test_parameters_of_hedgehog_learn_in_16_bits():
    map_ = HedgehogFeatures(2, 8)
    q, k, v = (torch.randn(1, 2, 20, 8, dtype=torch.bfloat16) for _ in range(3))
    out = qkv.linear_attention(q, k, v, feature_map=map_)
    assert out.dtype == torch.bfloat16
    weight, bias = torch.autograd.grad(out.float().square().sum(), tuple(map_.parameters()))
    assert weight.dtype == torch.float32 and bool(weight.any()) and bool(bias.any())


def test_favor_never_looks_ahead():
    """A huge later key changes not a bit of the rows before it."""
    q, k, v = (torch.randn(1, 1, 100, 8) for _ in range(3))
    before = qkv.linear_attention(q, k, v, feature_map="favor")
    k[:, :, 60:] *= 1e4
    after = qkv.linear_attention(q, k, v, feature_map="favor")
    assert torch.equal(before[:, :, :60], after[:, :, :60])
    assert bool(after.isfinite().all())
