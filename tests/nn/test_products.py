"""Products of linear maps without a graph: the values of the modules, by whoever makes them, and who is left alone.

The core's are held to float64: a sum of K products and a bias errs by (K + 4)·u·(Σ|x||w| + |b|), u of the type that it
is made in, and by one rounding where the result is narrower.
"""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.nn import functional as F

import engines
from qkv.errors import ValueOutOfRange
from qkv.nn import products as made
from qkv.nn.products import FEW, matrix_product, product, products

ROWS = [1, 2, FEW, FEW + 1, 70]
TYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
ROUNDOFF = {torch.float64: 2.0**-53, torch.float32: 2.0**-24, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}


def maps(*sizes, width=16, bias=False, dtype=torch.float32, seed=0):
    torch.manual_seed(seed)
    return [nn.Linear(width, size, bias=bias, dtype=dtype) for size in sizes]


def close(found, x, linear):
    within(found, x, linear.weight.detach(), None if linear.bias is None else linear.bias.detach())


def within(found, x, weight, bias=None):
    """The bound of the head of this file; float64's own truth is computed in it, which costs the bound once more."""
    truth, sizes = x.double() @ weight.double().T, x.double().abs() @ weight.double().abs().T
    if bias is not None:
        truth, sizes = truth + bias.double(), sizes + bias.double().abs()
    unit = ROUNDOFF[torch.float64 if x.dtype == torch.float64 else torch.float32]
    allowed = (x.shape[-1] + 4) * unit * sizes * (2 if x.dtype == torch.float64 else 1)
    if x.element_size() == 2:
        least = torch.finfo(x.dtype).smallest_normal * torch.finfo(x.dtype).eps / 2  # half of the smallest distance
        allowed = allowed + ROUNDOFF[x.dtype] * (truth.abs() + allowed) + least
    assert found.dtype == x.dtype and found.shape == truth.shape
    assert bool(((found.double() - truth).abs() <= allowed).all())


@pytest.fixture
def by_core(monkeypatch):
    """How many rows the core was asked for, call by call."""
    asked = []
    if made.native is not None:
        real = made.native.project
        spy = SimpleNamespace(project=lambda *given: asked.append(given[2]) or real(*given))
        monkeypatch.setattr(made, "native", spy)
    return asked


@pytest.fixture
def no_core(monkeypatch):
    monkeypatch.setattr(made, "MISSING", "was not built")
    monkeypatch.setattr(made, "native", None)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", ROWS)
def test_values_are_those_of_the_modules(dtype, bias, rows):
    three = maps(24, 8, 8, bias=bias, dtype=dtype)
    x = torch.randn(2, rows, 16).to(dtype)
    with torch.no_grad():
        for found, one in zip(products(x, *three), three, strict=True):
            close(found, x, one)
        close(product(x, three[0]), x, three[0])
        if not bias:
            close(matrix_product(x, three[1].weight), x, three[1])


SIZES = [0, 1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 23, 31, 32, 33, 40, 47, 48, 49, 63, 64, 65, 70]


@engines.EACH_NATIVE
@pytest.mark.parametrize("dtype", TYPES)
def test_all_sizes(backend, dtype, by_core):
    """Every K with some N and every N with some K, from memory without a place to spare behind it."""
    torch.manual_seed(0)
    for n, (outputs, inputs) in enumerate(itertools.product(SIZES, SIZES)):
        rows = 1 + n % FEW
        x, weight = torch.randn(rows, inputs).to(dtype), torch.randn(outputs, inputs).to(dtype)
        with torch.no_grad():
            within(matrix_product(x, weight), x, weight)
    assert len(by_core) == len(SIZES) * (len(SIZES) - 1)  # no rows without numbers


@engines.EACH_NATIVE
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("inputs", [5, 64, 700])
def test_strides_places_and_biases(backend, dtype, inputs, by_core):
    torch.manual_seed(0)
    wide = torch.randn(300, inputs + 9).to(dtype)
    bias = torch.randn(301).to(dtype)[1:]
    x = torch.randn(3 * inputs + 1).to(dtype)[1:].view(3, inputs)  # off by one number
    one, before = nn.Linear(inputs, 300, dtype=dtype), 0
    for weight in (wide[:, 3 : inputs + 3], wide[:1, :inputs].expand(300, inputs), wide.flatten()[1:][: 300 * inputs]):
        one.weight.data, one.bias.data = weight.reshape_as(one.weight) if weight.ndim == 1 else weight, bias
        with torch.no_grad():
            close(product(x, one), x, one)
        assert len(by_core) == (before := before + 1)


@engines.EACH_NATIVE
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("outputs, inputs", [(300, 257), (97, 1024), (40, 33)])
def test_bits_depend_on_nothing_but_the_row(backend, dtype, outputs, inputs, by_core):
    """Not on the other rows, the threads, the place in memory, or on how many outputs there are."""
    torch.manual_seed(0)
    x, weight = torch.randn(FEW, inputs).to(dtype), torch.randn(outputs, inputs).to(dtype)
    threads = torch.get_num_threads()
    try:
        with torch.no_grad():
            want = torch.stack([matrix_product(row, weight) for row in x])
            for count, rows in itertools.product((1, 2, 3), range(1, FEW + 1)):
                torch.set_num_threads(count)
                assert torch.equal(matrix_product(x[:rows], weight), want[:rows])
                assert torch.equal(matrix_product(x[FEW - rows :], weight), want[FEW - rows :])
    finally:
        torch.set_num_threads(threads)
    with torch.no_grad():
        assert torch.equal(matrix_product(x, weight[7:-5]), want[:, 7:-5])
        gaps = torch.full((outputs, inputs + 3), torch.nan, dtype=dtype)[:, 1:-2].copy_(weight)
        assert torch.equal(matrix_product(x, gaps), want)
    assert by_core


@engines.EACH_NATIVE
@pytest.mark.parametrize("dtype", TYPES)
def test_what_is_not_finite_passes_through(backend, dtype, by_core):
    for inputs, place in itertools.product((7, 40, 130), (0, -1)):
        x, weight = torch.ones(2, inputs).to(dtype), torch.ones(9, inputs).to(dtype)
        weight[1, place], weight[2, place], weight[3, place] = torch.nan, torch.inf, -torch.inf
        x[1, place] = torch.inf
        weight[4, place] = 0
        with torch.no_grad():
            assert torch.equal(matrix_product(x, weight).nan_to_num(7, 8, 9), F.linear(x, weight).nan_to_num(7, 8, 9))
    assert by_core


@engines.BEST
def test_what_the_core_is_asked_for(backend, by_core):
    """A few rows; not those that it cannot read: of two types, with gaps along a row, lazily negative."""
    weight = torch.randn(24, 16)
    with torch.no_grad():
        for rows in (1, FEW, FEW + 1):
            matrix_product(torch.randn(rows, 16), weight)
        assert by_core == [1, FEW]
        assert matrix_product(torch.randn(2, 1, 2, 16), weight).shape == (2, 1, 2, 24)
        assert matrix_product(torch.randn(16), weight).shape == (24,)
        assert by_core == [1, FEW, 4, 1]
        x, negative = torch.randn(2, 16), torch._neg_view(torch.randn(24, 16))
        for strange in (torch.randn(16, 24).T, torch.randn(24, 32)[:, ::2], negative):
            assert torch.allclose(matrix_product(x, strange), x @ strange.T.clone(), atol=1e-5)
        for strange in (torch.randn(16, 2).T, torch.randn(2, 32)[:, ::2], negative[:2]):
            assert torch.allclose(matrix_product(strange, weight), strange @ weight.T, atol=1e-5)
        assert len(by_core) == 4


@engines.BEST
def test_what_does_not_fit_is_refused_by_torch(backend):
    [one] = maps(24, bias=True)
    with torch.no_grad():
        for wrong in (torch.randn(2, 15), torch.randn(2, 16).double(), torch.randn(70, 17)):
            with pytest.raises(RuntimeError, match=r"shapes cannot be multiplied|same dtype|data type"):
                product(wrong, one)
        one.bias.data = torch.randn(23)
        for rows in ROWS:
            with pytest.raises(RuntimeError, match=r"size|shape|expand"):
                product(torch.randn(rows, 16), one)


@pytest.mark.parametrize("rows", ROWS)
def test_a_bias_with_gaps(rows):
    [one], x = maps(24, bias=True), torch.randn(rows, 16)
    one.bias.data = torch.randn(48)[::2]
    with torch.no_grad():
        close(product(x, one), x, one)


def test_no_outputs():
    with torch.no_grad():
        assert all(matrix_product(torch.randn(rows, 16), torch.empty(0, 16)).shape == (rows, 0) for rows in ROWS)


@engines.BEST
def test_a_wrong_instruction_set_is_told(backend, monkeypatch):
    monkeypatch.setattr("qkv.backends.extension._WRONG_ISA", "no such instruction set")
    with torch.no_grad(), pytest.raises(ValueOutOfRange, match="no such"):
        matrix_product(torch.randn(1, 16), torch.randn(24, 16))


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("rows", [1, FEW])
@pytest.mark.parametrize("bias", [False, True])
def test_without_the_core(no_core, dtype, rows, bias):
    [one], x = maps(24, bias=bias, dtype=dtype), torch.randn(rows, 16).to(dtype)
    with torch.no_grad():
        if rows == 1 or dtype != torch.float32:  # else it may be oneDNN's
            assert torch.equal(product(x, one), F.linear(x, one.weight, one.bias))
        close(product(x, one), x, one)


def test_a_change_in_place_is_seen():
    two = maps(24, 8)
    with torch.no_grad():
        two[1].weight.mul_(3)
        for x in (torch.randn(1, 1, 16), torch.randn(1, 5, 16)):
            close(products(x, *two)[1], x, two[1])


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


def test_a_forward_of_its_own_on_a_module_is_called():
    [one], x = maps(8), torch.randn(1, 1, 16)
    plain = one.forward
    one.forward = lambda x: plain(x) + 100
    with torch.no_grad():
        for y in (product(x, one), *products(x, one)):
            assert torch.equal(y, F.linear(x, one.weight) + 100)


class Packed(torch.Tensor):
    """A weight that only torch's own functions know how to multiply, as that of a quantised layer."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func is F.linear:
            x, weight, *bias = args
            return F.linear(x, 2 * weight.as_subclass(torch.Tensor), *bias)
        return super().__torch_function__(func, types, args, kwargs or {})


@pytest.mark.parametrize("rows", ROWS)
def test_weights_of_other_types_go_to_torch(rows):
    [one], x = maps(24, bias=True), torch.randn(1, rows, 16)
    want = F.linear(x, 2 * one.weight, one.bias).detach()
    one.weight = nn.Parameter(one.weight.detach().as_subclass(Packed), requires_grad=False)
    assert type(one.weight) is Packed
    with torch.no_grad():
        assert torch.allclose(product(x, one), want, atol=1e-5)
        assert torch.allclose(matrix_product(x, one.weight), want - one.bias, atol=1e-5)


@pytest.mark.skipif(made._pointwise is None, reason="torch was built without oneDNN")
def test_onednn_that_is_switched_off_is_not_asked(monkeypatch):
    monkeypatch.setattr(made, "_pointwise", None)  # would fail where it is called
    monkeypatch.setattr(torch._C, "_get_mkldnn_enabled", lambda: False)
    monkeypatch.setattr(made, "_pointwise", pytest.fail)
    [one], x = maps(8), torch.randn(2, 70, 16)
    with torch.no_grad():
        assert torch.equal(product(x, one), F.linear(x, one.weight))


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
    x, wide = torch.randn(1, 70, 16), torch.randn(24, 32)
    with torch.no_grad():
        matrix_product(x, wide[:, :16])
        assert not seen
        for weight in (torch.randn(24, 16), torch.randn(16, 24).T):
            matrix_product(x, weight)
        assert len(seen) == 2
