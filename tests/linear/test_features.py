"""Feature maps: each formula again in numpy, what each promises, its gradients, and how far it is from softmax."""

from __future__ import annotations

import copy
import math

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import gradcheck, gradgradcheck

from qkv.errors import DTypeError, ShapeError, UnknownName
from qkv.linear.features import ELEMENTWISE, FEATURE_MAPS, FeatureMap, elementwise, read_feature_map
from qkv.linear.features_fixed import FavorFeatures, SoftmaxFeatures, TaylorFeatures, gaussian, orthogonal_rows
from qkv.linear.features_learned import HedgehogFeatures

D = 6


def whole(name: str, width: int = D) -> FeatureMap:
    """The map of a name as one function, whoever applies it."""
    feature, applied = read_feature_map(name, width)
    return (lambda x: elementwise(feature, x)) if applied is None else applied


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.from_numpy(np.random.default_rng(seed).standard_normal(shape)).to(dtype)


# The formulas again, for one vector of float64, without the tricks.


def softmax_of(x: np.ndarray) -> np.ndarray:
    return np.exp(x) / np.exp(x).sum()


def favor_of(x: np.ndarray) -> np.ndarray:
    rows = FavorFeatures(D).projection.double().numpy()
    y = x / D**0.25
    return np.array([math.exp(row @ y - y @ y / 2) for row in rows]) / math.sqrt(len(rows))


def taylor_of(x: np.ndarray) -> np.ndarray:
    pairs = [x[i] * x[j] / math.sqrt(D) for i in range(D) for j in range(i + 1, D)]
    return np.array([1, *(x / D**0.25), *pairs, *(x**2 / math.sqrt(2 * D))])


FORMULAS = {
    "none": lambda x: x,
    "elu": lambda x: np.where(x > 0, x, np.expm1(x)) + 1,
    "relu": lambda x: np.where(x > 0, x, 0),
    "squared_relu": lambda x: np.where(x > 0, x, 0) ** 2,
    "softmax": lambda x: np.concatenate([softmax_of(x), softmax_of(-x)]),
    "favor": favor_of,
    "hedgehog": lambda x: softmax_of(np.concatenate([2 * x, -2 * x])),
    "taylor": taylor_of,
}


@pytest.mark.parametrize("name", FEATURE_MAPS)
def test_each_name_is_its_formula(name):
    x = normal(2, 3, 5, D)
    wanted = np.apply_along_axis(FORMULAS[name], -1, x.numpy())
    np.testing.assert_allclose(whole(name)(x).numpy(), wanted, rtol=1e-12, atol=0)


@pytest.mark.parametrize("name", FEATURE_MAPS)
def test_gradients_twice(name):
    x = normal(1, 1, 2, D).requires_grad_()
    assert gradcheck(whole(name), (x,))
    assert gradgradcheck(whole(name), (x,))


@pytest.mark.parametrize("name", FEATURE_MAPS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_types(name, dtype):
    x = normal(1, 2, 3, D, dtype=dtype)
    out = whole(name)(x)
    assert out.dtype == (dtype if name in ELEMENTWISE else torch.float32)
    unit = torch.finfo(dtype if name in ELEMENTWISE else torch.float32).eps
    torch.testing.assert_close(out.double(), whole(name)(x.double()), rtol=20 * unit, atol=0)


@pytest.mark.parametrize("name", ["softmax", "hedgehog", "favor"])
@pytest.mark.parametrize("size", [1e-30, 1.0, 30.0, 1e4])
def test_positive_maps_stay_positive_and_finite(name, size):
    out = whole(name)(size * normal(1, 1, 50, D, dtype=torch.float32))
    assert bool(out.isfinite().all())
    assert bool((out.sum(dim=-1) > 0).all())


@pytest.mark.parametrize("name", FEATURE_MAPS)
def test_a_token_s_features_are_its_own(name):
    x = normal(1, 1, 5, D, dtype=torch.float32)
    other = torch.cat([x[:, :, :3], 1e3 * x[:, :, 3:]], dim=2)
    assert torch.equal(whole(name)(x)[:, :, :3], whole(name)(other)[:, :, :3])


@pytest.mark.parametrize("name", FEATURE_MAPS)
def test_nan_is_not_swallowed(name):
    x = normal(1, 1, 2, D)
    x[0, 0, 0, 2] = math.nan
    out = whole(name)(x)
    assert bool(out[0, 0, 0].isnan().any())
    assert not bool(out[0, 0, 1].isnan().any())


# elementwise


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_elu_is_zero_only_where_exp_is(dtype):
    x = torch.arange(-120, 0, dtype=torch.float32).to(dtype)
    out = elementwise("elu", x)
    assert torch.equal(out == 0, x.exp() == 0)
    assert torch.equal(out, x.exp())


def test_elu_at_its_seam_and_far_out():
    x = torch.tensor([-1e30, -1.0, 0.0, 1e30], requires_grad=True)
    out = elementwise("elu", x)
    assert out.tolist() == [0.0, pytest.approx(math.exp(-1)), 1.0, pytest.approx(1e30)]
    (slope,) = torch.autograd.grad(out.sum(), x)
    assert slope.tolist() == [0.0, pytest.approx(math.exp(-1)), 1.0, 1.0]


def test_kinks_have_slope_zero():
    for name in ("relu", "squared_relu"):
        x = torch.zeros(3, requires_grad=True)
        (slope,) = torch.autograd.grad(elementwise(name, x).sum(), x)
        assert slope.tolist() == [0.0] * 3


# Taylor


def test_taylor_s_product_is_the_series():
    q, k = normal(2, 3, 20, 8).unbind()
    z = q @ k.mT / math.sqrt(8)
    weights = TaylorFeatures()(q) @ TaylorFeatures()(k).mT
    torch.testing.assert_close(weights, 1 + z + z * z / 2, rtol=0, atol=1e-13)
    assert float(weights.min()) >= 0.5
    assert TaylorFeatures()(normal(1, 16)).shape[-1] == 153


# FAVOR+


@pytest.mark.parametrize("features, width", [(24, 8), (20, 8), (3, 8), (5, 1), (96, 24)])
def test_favor_rows_are_orthogonal_in_blocks(features, width):
    rows = orthogonal_rows(features, width, 7)
    assert rows.shape == (features, width)
    for first in range(0, features, width):
        block = rows[first : first + width]
        lengths = np.linalg.norm(block, axis=1)
        np.testing.assert_allclose(block @ block.T, np.diag(lengths**2), atol=1e-12)
        assert len(np.unique(lengths)) == len(block)


def test_favor_rows_are_gaussian_each():
    """Mean, variance, fourth moment, squared length and its variance, within 5 standard errors or a known bound."""
    width, rows = 16, 16 * 1000
    drawn = orthogonal_rows(rows, width, 3)
    count = drawn.size
    assert abs(drawn.mean()) < 5 / math.sqrt(count)
    assert abs((drawn**2).mean() - 1) < 5 * math.sqrt(2 / count)
    assert abs((drawn**4).mean() - 3) < 5 * math.sqrt(96 / count) * 2
    squares = (drawn**2).sum(axis=1)
    assert abs(squares.var() - 2 * width) < 5 * 2 * width * math.sqrt((2 + 12 / width) / rows)
    blocks = drawn.reshape(-1, width, width)
    for corner in (
        blocks[:, 0, 0],
        blocks[:, -1, -1],
        blocks[:, -1, 0],
    ):  # each place of a block by itself: no bias of signs
        assert abs(corner.mean()) < 5 / math.sqrt(len(blocks))


def test_gaussian_numbers_are_the_rule_s():
    numbers = gaussian(10, 5)
    assert numbers.shape == (10,)
    np.testing.assert_array_equal(numbers, gaussian(40, 5)[:10])
    assert not np.intersect1d(numbers, gaussian(10, 6)).size
    many = gaussian(40000, 1)
    assert abs(many.mean()) < 5 / 200
    assert abs(np.corrcoef(many[:-1], many[1:])[0, 1]) < 5 / 200


def test_favor_is_unbiased():
    """The mean over 400 draws is exp(q·k/√D) within 5 of its own standard errors, for each of 16 pairs."""
    q, k = (0.5 * normal(2, 4, D)).unbind()
    draws = torch.stack([one(q) @ one(k).mT for one in (FavorFeatures(D, 4 * D, seed).double() for seed in range(400))])
    wanted = (q @ k.mT / math.sqrt(D)).exp()
    error = (draws.mean(dim=0) - wanted).abs()
    assert bool((error < 5 * draws.std(dim=0) / math.sqrt(400)).all())
    assert bool((draws.std(dim=0) / math.sqrt(400) < 0.05 * wanted).all()), "or the test would say nothing"


def test_favor_redraws_in_place_and_is_saved():
    one, other = FavorFeatures(D, 10), FavorFeatures(D, 10, seed=1)
    held = one.projection
    assert not torch.equal(one.projection, other.projection)
    one.redraw(1)
    assert held is one.projection
    assert torch.equal(one.projection, other.projection)
    assert repr(one) == repr(other) == "FavorFeatures(head_dim=6, features=10, seed=1)"
    fresh = FavorFeatures(D, 10)
    fresh.load_state_dict(one.state_dict())
    x = normal(3, D)
    assert torch.equal(fresh(x), other(x))


def test_favor_keeps_to_its_range():
    """Aligned with the longest row, and far too long: finite, positive, and products are normal numbers."""
    map_ = FavorFeatures(128)
    longest = map_.projection[map_.projection.norm(dim=1).argmax()]
    x = torch.stack([longest * 128**0.25, 1e3 * longest, torch.zeros(128)]).requires_grad_()
    out = map_(x)
    assert float(out[0].detach().max()) == pytest.approx(math.exp(36) / math.sqrt(512), rel=1e-5)
    products = out @ out.mT
    tiny = torch.finfo(torch.float32).tiny
    assert bool(products.isfinite().all()) and float(products.detach().min()) > tiny
    (slope,) = torch.autograd.grad(products.log().sum(), x)
    assert bool(slope.isfinite().all())


def test_favor_is_not_rounded_by_autocast():
    map_, x = FavorFeatures(D), normal(3, D, dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(map_(x), map_(x.clone()))
        under = map_(x)
    assert torch.equal(under, map_(x))


# Hedgehog


def test_hedgehog_learns_by_head():
    map_ = HedgehogFeatures(3, D).double()
    with torch.no_grad():
        map_.weight += 0.3 * normal(3, D, D, seed=1)
        map_.bias += normal(3, D, seed=2)
    x = normal(2, 3, 4, D)
    for head in range(3):
        weight, bias = map_.weight[head].detach().numpy(), map_.bias[head].detach().numpy()
        y = 2 * (np.einsum("oi,bli->blo", weight, x[:, head].numpy()) + bias)
        wanted = np.apply_along_axis(softmax_of, -1, np.concatenate([y, -y], axis=-1))
        np.testing.assert_allclose(map_(x)[:, head].detach().numpy(), wanted, rtol=1e-12)

    def of_parameters(weight: Tensor, bias: Tensor) -> Tensor:
        return torch.func.functional_call(map_, {"weight": weight, "bias": bias}, (x,))

    assert gradcheck(of_parameters, tuple(map_.parameters()))
    assert repr(map_) == "HedgehogFeatures(heads=3, head_dim=6)"


def test_hedgehog_by_name_is_at_its_start():
    x = normal(1, 3, 4, D)
    assert torch.equal(whole("hedgehog")(x), HedgehogFeatures(3, D)(x).detach())


def test_softmax_features_of_one_half():
    x = normal(3, D)
    assert torch.equal(SoftmaxFeatures(mirrored=False)(x), SoftmaxFeatures()(x)[:, :D])
    assert repr(SoftmaxFeatures()) == "SoftmaxFeatures(mirrored=True)"


# By name


def test_reading():
    module = nn.Linear(D, 9)
    assert read_feature_map("elu", D) == ("elu", None)
    assert read_feature_map(None, D) == read_feature_map("none", D) == ("none", None)
    assert read_feature_map(module, D) == ("none", module)
    assert read_feature_map(torch.exp, D) == ("none", torch.exp)
    assert read_feature_map(FavorFeatures(D), D)[0] == "none"
    assert FEATURE_MAPS == ("none", "elu", "relu", "squared_relu", "softmax", "favor", "hedgehog", "taylor")


def test_names_mean_the_same_in_every_call():
    x = normal(1, 1, 4, D)
    for name in FEATURE_MAPS:
        assert torch.equal(whole(name)(x), whole(name)(x))
        assert read_feature_map(name, D)[1] is read_feature_map(name, D)[1]
    assert torch.equal(whole("favor")(x), FavorFeatures(D, 4 * D, seed=0)(x))


def test_modules_can_be_copied():
    x = normal(1, 2, 4, D)
    for map_ in (FavorFeatures(D), HedgehogFeatures(2, D), TaylorFeatures(), SoftmaxFeatures()):
        assert torch.equal(copy.deepcopy(map_)(x), map_(x))


def test_what_is_refused():
    with pytest.raises(UnknownName, match="did you mean 'hedgehog'"):
        read_feature_map("hedgehoq", D)
    with pytest.raises(DTypeError, match="got int"):
        read_feature_map(3, D)
    for made in (FavorFeatures(7), HedgehogFeatures(1, 7)):
        with pytest.raises(ShapeError, match="it has head_dim 7, and D is 6"):
            read_feature_map(made, D)


@pytest.mark.parametrize("name", FEATURE_MAPS)
def test_a_first_call_of_any_kind_leaves_no_trace(name):
    """Under inference, on meta tensors, or beside another default device; then an ordinary one with gradients."""
    width = 5  # used by no other test
    with torch.inference_mode():
        whole(name, width)(torch.zeros(1, 1, 2, width))
    with torch.device("meta"):
        assert whole(name, width)(torch.zeros(1, 1, 2, width)).is_meta
        assert whole(name, width)(torch.zeros(1, 1, 2, width, device="cpu")).device.type == "cpu"
    with FakeTensorMode():
        whole(name, width)(torch.zeros(1, 1, 2, width))
    x = normal(1, 1, 2, width).requires_grad_()
    assert torch.autograd.grad(whole(name, width)(x).sum(), x)[0].device.type == "cpu"


@pytest.mark.parametrize("name", FEATURE_MAPS)
def test_in_one_graph(name):
    x = normal(1, 1, 3, D, dtype=torch.float32)
    compiled = torch.compile(whole(name), fullgraph=True, backend="eager")
    assert torch.equal(compiled(x), whole(name)(x))


@pytest.mark.parametrize("name", FEATURE_MAPS)
def test_under_vmap(name):
    x = normal(3, 1, 1, 2, D)
    assert torch.allclose(torch.func.vmap(whole(name))(x), whole(name)(x), rtol=1e-12, atol=0)
