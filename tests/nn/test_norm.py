"""Norms of a stream: against float64 and torch's, by the core at once and by the general way; gradients; refusals."""

from __future__ import annotations

import pytest
import torch

import engines
import qkv.linear.fused
import qkv.nn.norm
from qkv.errors import DTypeError, ShapeError, UnknownName, ValueOutOfRange
from qkv.linear.norms import gated_rms_norm
from qkv.nn import LayerNorm, RMSNorm
from qkv.nn.norm import make_norm

ROUNDOFF = {torch.float64: 2.0**-53, torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
EIGHT = torch.float8_e4m3fn
TYPES = pytest.mark.parametrize("dtype", ROUNDOFF, ids=str)
FORM = pytest.mark.parametrize("form", ["plain", *engines.NATIVE], indirect=True)


@pytest.fixture
def form(request, monkeypatch):
    """Who computes: plain torch, or the core with an instruction set."""
    if request.param == "plain":
        monkeypatch.setattr(qkv.linear.fused, "MISSING", "hidden by a test")
        monkeypatch.setattr(qkv.nn.norm, "MISSING", "hidden by a test")
        yield request.param
    else:
        with engines.using(request.param):
            yield request.param


def made(width, dtype, eps=1e-6):
    norm = RMSNorm(width, eps=eps)
    with torch.no_grad():
        norm.weight.copy_(1 + 0.5 * normal(width))
    return norm.to(dtype)


def normal(*shape, dtype=torch.float64, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape)), dtype=torch.float64).to(dtype)


def exact(norm, x):
    x = x.double()
    return x / (x.square().mean(-1, keepdim=True) + norm.eps).sqrt() * norm.weight.double()


def check(got, want, dtype, times=2):
    assert got.dtype == dtype and got.shape == want.shape
    room = times * ROUNDOFF[dtype] * want.abs() + (2.0**-24 if dtype == torch.float16 else 0)
    assert bool(((got.double() - want).abs() <= room).all())


@FORM
@TYPES
@pytest.mark.parametrize("shape", [(1, 1, 576), (2, 3, 33), (7,), (3, 0, 8), (1, 1)], ids=str)
@pytest.mark.parametrize("eps", [1e-6, 1e-2, 0.0])
def test_is_its_formula_rounded_once(form, dtype, shape, eps):
    norm, x = made(shape[-1], dtype, eps), normal(*shape, dtype=dtype)
    times = {torch.float64: 8, torch.float32: 8}.get(dtype, 1.01)
    with torch.no_grad():
        check(norm(x), exact(norm, x), dtype, times)
    check(norm(x).detach(), exact(norm, x).detach(), dtype, times)


@FORM
@TYPES
def test_both_ways_have_the_same_bits(form, dtype, monkeypatch):
    """The one call of a step of decoding, and that which asks more questions."""
    norm, x = made(48, dtype), normal(3, 5, 48, dtype=dtype)
    with torch.no_grad():
        at_once = norm(x)
    assert torch.equal(at_once, norm(x)) and torch.equal(at_once, gated_rms_norm(x, None, norm.weight))
    assert torch.equal(at_once[:, 2:3], norm(x[:, 2:3].contiguous()))


@FORM
def test_what_does_not_lie_row_after_row(form):
    norm, x = made(8, torch.float32), normal(3, 5, 16, dtype=torch.float32)
    views = (
        x[..., ::2],
        x[..., :8],
        x[..., :8].transpose(0, 1),
        x[:1, :, :8].expand(4, 5, 8),
        x.to(torch.float64)[..., 8:],
    )
    with torch.no_grad():
        for view in views:
            check(norm(view), exact(norm, view), view.dtype, 8 if view.dtype == torch.float32 else 2**30)
        negative = torch._neg_view(x[..., :8].contiguous())
        assert negative.is_neg()
        check(norm(negative), exact(norm, negative), torch.float32, 8)


@FORM
def test_16_bits_beside_a_float32_weight(form):
    norm, x = made(40, torch.float32), normal(2, 3, 40, dtype=torch.bfloat16)
    with torch.no_grad():
        check(norm(x), exact(norm, x), torch.bfloat16, 1.01)


@FORM
@pytest.mark.parametrize("dtype, other", [(torch.float32, torch.float64), (torch.float64, torch.float32)], ids=str)
def test_a_weight_of_another_width(form, dtype, other):
    norm, x = made(40, other), normal(2, 3, 40, dtype=dtype)
    with torch.no_grad():
        check(norm(x), exact(norm, x), dtype, 8)


@TYPES
def test_is_torchs_norm(dtype):
    norm, x = made(64, dtype), normal(2, 9, 64, dtype=dtype)
    theirs = torch.nn.RMSNorm(64, eps=1e-6, dtype=dtype)
    theirs.load_state_dict(norm.state_dict())
    with torch.no_grad():
        check(norm(x), theirs(x).double(), dtype, 8)


def test_is_the_norm_of_transformers():
    llama = pytest.importorskip("transformers.models.llama.modeling_llama")
    norm, x = made(64, torch.float32), normal(2, 9, 64, dtype=torch.float32)
    theirs = llama.LlamaRMSNorm(64, eps=1e-6)
    theirs.load_state_dict(norm.state_dict())
    with torch.no_grad():
        check(norm(x), theirs(x).double(), torch.float32, 8)


@FORM
def test_gradients(form):
    norm, x = made(6, torch.float64, eps=1e-2), normal(2, 3, 6).requires_grad_()

    def call(x, weight):
        return torch.func.functional_call(norm, {"weight": weight}, (x,))

    assert torch.autograd.gradcheck(call, (x, norm.weight))
    assert torch.autograd.gradgradcheck(call, (x, norm.weight))


@FORM
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_gradients_of_narrow_types(form, dtype):
    norm, x, grad = (
        made(40, dtype),
        normal(4, 3, 40, dtype=dtype).requires_grad_(),
        normal(4, 3, 40, dtype=dtype, seed=1),
    )
    got = torch.autograd.grad(norm(x), (x, norm.weight), grad)
    wide = made(40, dtype).double()
    wide_x = x.detach().double().requires_grad_()
    want = torch.autograd.grad(exact(wide, wide_x), (wide_x, wide.weight), grad.double())
    for one, other in zip(got, want, strict=True):
        assert one.dtype == dtype
        assert (one.double() - other).abs().max() <= 8 * ROUNDOFF[dtype] * other.abs().max()


def test_only_the_weight_may_want_a_gradient():
    norm, x = made(6, torch.float64), normal(2, 6)
    norm(x).sum().backward()
    assert torch.allclose(norm.weight.grad, (exact(norm, x) / norm.weight).sum(0))
    norm.weight.requires_grad_(False)
    assert not norm(x).requires_grad and norm(x.requires_grad_()).requires_grad


def test_transforms_and_other_devices():
    norm, x, tangent = made(6, torch.float64), normal(2, 6), normal(2, 6, seed=1)
    with torch.no_grad():
        assert torch.allclose(torch.vmap(norm)(x), exact(norm, x))
        assert norm.to("meta")(x.to("meta")).shape == x.shape
    norm = made(6, torch.float64)
    with torch.no_grad(), torch.autograd.forward_ad.dual_level():
        made_dual = norm(torch.autograd.forward_ad.make_dual(x, tangent))
        got = torch.autograd.forward_ad.unpack_dual(made_dual).tangent
    step = 1e-6
    assert torch.allclose(
        got, (exact(norm, x + step * tangent) - exact(norm, x - step * tangent)) / (2 * step), atol=1e-8
    )


def test_autocast_keeps_its_own_type():
    norm, x = made(6, torch.float32), normal(2, 6, dtype=torch.bfloat16)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        assert norm(x).dtype == torch.bfloat16 and norm(x.float()).dtype == torch.float32


def test_compiles_without_a_break():
    norm, x = made(6, torch.float32), normal(2, 6, dtype=torch.float32)
    compiled = torch.compile(norm, fullgraph=True, backend="eager")
    assert torch.allclose(compiled(x), norm(x))


def test_norms_by_name():
    assert isinstance(make_norm("rms", 8), RMSNorm) and make_norm("rms", 8).eps == 1e-6
    layer = make_norm("layer", 8)
    assert isinstance(layer, LayerNorm) and layer.eps == 1e-5
    assert make_norm("layer", 8, 1e-12).eps == 1e-12 and make_norm("rms", 8, 1e-5).eps == 1e-5
    assert LayerNorm is torch.nn.LayerNorm
    assert str(RMSNorm(8)) == "RMSNorm(8, eps=1e-06)"


@pytest.mark.parametrize(
    "make, error, text",
    [
        (lambda: make_norm("batch", 8), UnknownName, "`norm` must be one of layer, rms; got 'batch'"),
        (lambda: make_norm("layer", 0), ValueOutOfRange, "`width` must be at least 1"),
        (lambda: make_norm("layer", 8, -1.0), ValueOutOfRange, "`eps` must be finite and at least 0; got -1.0"),
        (lambda: RMSNorm(8, eps=float("nan")), ValueOutOfRange, "`eps`"),
        (lambda: RMSNorm(8, eps="1e-6"), DTypeError, "`eps` must be a number"),
        (lambda: RMSNorm(8.0), DTypeError, "`width` must be an int"),
        (lambda: RMSNorm(8)(torch.zeros(2, 7)), ShapeError, "`weight` must be (W,) = [7]"),
        (lambda: RMSNorm(8)(torch.tensor(1.0)), ShapeError, "`x` must be (..., W)"),
        (lambda: RMSNorm(8)(torch.zeros(2, 8, dtype=torch.int64)), DTypeError, "`x` must be float16, bfloat16"),
        (lambda: RMSNorm(8).to(EIGHT)(torch.zeros(2, 8).to(EIGHT)), DTypeError, "got float8_e4m3fn"),
        (lambda: RMSNorm(8)([1.0] * 8), DTypeError, "`x` must be a torch.Tensor; got a builtins.list"),
    ],
)
def test_refusals(make, error, text):
    for grad in (True, False):
        with torch.set_grad_enabled(grad), pytest.raises(error) as caught:
            make()
        assert text in str(caught.value) and str(caught.value).count(";") == 2
