"""Products of linear maps without a graph: the values of the modules, whatever the layout, and who is left alone."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.nn import functional as F

from qkv.nn import products as made
from qkv.nn.products import lay_out, matrix_product, product, products

ROWS = [1, 2, 3, 70]


def maps(*sizes, width=16, bias=False, dtype=torch.float32, seed=0):
    torch.manual_seed(seed)
    return [nn.Linear(width, size, bias=bias, dtype=dtype) for size in sizes]


def close(found, x, linear):
    wide = x.double() @ linear.weight.detach().double().T
    wide = wide if linear.bias is None else wide + linear.bias.detach().double()
    sizes = x.double().abs() @ linear.weight.detach().double().abs().T + 1.0
    unit = torch.finfo(x.dtype).eps
    assert found.dtype == x.dtype
    assert bool(((found.double() - wide).abs() <= (x.shape[-1] + 2) * unit * sizes).all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", ROWS)
def test_values_are_those_of_the_modules(dtype, bias, rows):
    for laid in (False, True):
        three = maps(24, 8, 8, bias=bias, dtype=dtype)
        x = torch.randn(2, rows, 16).to(dtype)
        if laid:
            lay_out(*(one.weight for one in three))
        with torch.no_grad():
            for found, one in zip(products(x, *three), three, strict=True):
                close(found, x, one)
            close(product(x, three[0]), x, three[0])
            if not bias:
                close(matrix_product(x, three[1].weight), x, three[1])


def test_laid_out_weights_are_read_as_one(monkeypatch):
    three, x = maps(24, 8, 8), torch.randn(1, 1, 16)
    before = [one.weight.detach().clone() for one in three]
    lay_out(*(one.weight for one in three))
    assert all(torch.equal(one.weight, old) for one, old in zip(three, before, strict=True))
    assert {one.weight.stride() for one in three} == {(1, 40)}
    seen = []
    monkeypatch.setattr(made.F, "linear", lambda x, weight, bias: seen.append(weight.shape) or x @ weight.T)
    with torch.no_grad():
        parts = products(x, *three)
    assert seen == [(40, 16)]
    assert len({part.untyped_storage().data_ptr() for part in parts}) == 1
    three[1].weight.data = three[1].weight.clone()  # one has moved: each by itself
    seen.clear()
    with torch.no_grad():
        products(x, *three)
    assert seen == [(24, 16), (8, 16), (8, 16)]


def test_another_order_than_that_in_memory():
    three, x = maps(8, 8, 8), torch.randn(1, 1, 16)
    lay_out(*(one.weight for one in three))
    with torch.no_grad():
        for found, one in zip(products(x, *three[::-1]), three[::-1], strict=True):
            close(found, x, one)


def test_laying_out_twice_moves_nothing():
    three = maps(24, 8, 8)
    lay_out(*(one.weight for one in three))
    places = [one.weight.data_ptr() for one in three]
    lay_out(*(one.weight for one in three))
    assert [one.weight.data_ptr() for one in three] == places


@pytest.mark.parametrize("sizes, width, dtype", [((8,), 16, torch.float32), ((24,), 16, torch.bfloat16)])
def test_some_weights_stay(sizes, width, dtype):
    [one] = maps(*sizes, width=width, dtype=dtype)
    place = one.weight.data_ptr()
    lay_out(one.weight)
    assert one.weight.data_ptr() == place
    assert one.weight.is_contiguous()


def test_a_change_in_place_is_seen():
    two, x = maps(24, 8), torch.randn(1, 5, 16)
    lay_out(*(one.weight for one in two))
    with torch.no_grad():
        two[1].weight.mul_(3)
        close(products(x, *two)[1], x, two[1])


@pytest.mark.parametrize("biased", [0, 1])
def test_one_bias_among_several_is_added(biased):
    two, x = maps(24, 8), torch.randn(1, 1, 16)
    lay_out(*(one.weight for one in two))
    two[biased].bias = nn.Parameter(torch.randn(two[biased].out_features))
    with torch.no_grad():
        for found, one in zip(products(x, *two), two, strict=True):
            close(found, x, one)


class Louder(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


def test_other_modules_and_hooks_are_called():
    [plain], [loud] = maps(8), [Louder(16, 8, bias=False)]
    x = torch.randn(1, 1, 16)
    with torch.no_grad():
        assert torch.equal(products(x, plain, loud)[1], 2 * F.linear(x, loud.weight))
        hook = plain.register_forward_hook(lambda module, given, out: out + 1)
        assert torch.equal(product(x, plain), F.linear(x, plain.weight) + 1)
        hook.remove()
        hook = plain.register_forward_pre_hook(lambda module, given: (2 * given[0],))
        assert torch.equal(product(x, plain), F.linear(2 * x, plain.weight))
        hook.remove()
        hook = nn.modules.module.register_module_forward_hook(lambda module, given, out: out + 1)
        assert torch.equal(product(x, plain), F.linear(x, plain.weight) + 1)
        hook.remove()


def test_gradients_autocast_and_transforms_go_through_the_modules():
    [one] = maps(8)
    x = torch.randn(2, 5, 16)
    product(x, one).sum().backward()
    assert torch.allclose(one.weight.grad, x.sum((0, 1)).expand(8, 16), atol=1e-5)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        assert product(x, one).dtype == torch.bfloat16
        assert matrix_product(x, one.weight).dtype == torch.bfloat16
    with torch.no_grad():
        mapped = torch.func.vmap(lambda row: product(row, one))(x)
        assert torch.allclose(mapped, F.linear(x, one.weight), atol=1e-6)
    with torch.no_grad(), forward_ad.dual_level():
        tangent = forward_ad.unpack_dual(product(forward_ad.make_dual(x, x), one)).tangent
        assert torch.allclose(tangent, F.linear(x, one.weight), atol=1e-6)


def test_without_onednn(monkeypatch):
    monkeypatch.setattr(made, "_pointwise", None)
    [one], x = maps(8), torch.randn(2, 70, 16)
    with torch.no_grad():
        assert torch.equal(product(x, one), F.linear(x, one.weight))


@pytest.mark.skipif(made._pointwise is None, reason="torch was built without oneDNN")
def test_weights_with_gaps_do_not_go_to_onednn(monkeypatch):
    seen, real = [], made._pointwise
    monkeypatch.setattr(made, "_pointwise", lambda x, weight, *rest: seen.append(weight) or real(x, weight, *rest))
    two, x = maps(24, 8), torch.randn(1, 70, 16)
    lay_out(*(one.weight for one in two))
    with torch.no_grad():
        product(x, two[0])
        assert not seen
        products(x, *two)
        assert [weight.shape for weight in seen] == [(32, 16)]
