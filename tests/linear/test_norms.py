"""The norms of the linear family: against a float64 oracle, in plain torch and in the core on every instruction set."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck

import engines
import qkv.linear.fused
from exams import threads
from qkv.errors import DTypeError, QkvError, ShapeError, UnknownName, ValueOutOfRange
from qkv.linear.norms import gated_rms_norm, l2_norm

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
WIDTHS = (1, 5, 16, 33, 64, 128, 200)
OPTIONS = tuple({"activation": act, "gate_first": first} for act in ("silu", "sigmoid") for first in (False, True))
# Instruction sets with products of bfloat16 have the kernels of avx512 here: a test or two of EVERY are enough.
KERNELS = tuple(name for name in engines.NATIVE if name.removeprefix("cpu-") not in engines.CASTING)
NATIVE = pytest.mark.parametrize("form", KERNELS, indirect=True)
EACH = pytest.mark.parametrize("form", ["plain", *KERNELS], indirect=True)
EVERY = pytest.mark.parametrize("form", ["plain", *engines.NATIVE], indirect=True)
ONE_NATIVE = pytest.mark.parametrize("form", ["plain", *KERNELS[:1]], indirect=True)


@pytest.fixture
def form(request, monkeypatch):
    """Who computes: plain torch, or the core with an instruction set."""
    if request.param == "plain":
        monkeypatch.setattr(qkv.linear.fused, "MISSING", "hidden by a test")
        yield request.param
    else:
        with engines.using(request.param):
            yield request.param


def normal(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape)), dtype=torch.float64).to(dtype)


def tensors(*shape: int, dtype: torch.dtype) -> list[Tensor]:
    """x, gate, weight."""
    return [normal(*shape, dtype=dtype), normal(*shape, dtype=dtype, seed=1), normal(shape[-1], dtype=dtype, seed=2)]


def exact(x: Tensor, gate: Tensor | None, weight: Tensor | None, *, activation: str, gate_first: bool) -> np.ndarray:
    """Row by row in float64."""
    a = x.double().numpy()
    factor = 1.0 if weight is None else weight.double().numpy()
    if gate is not None:
        z = gate.double().numpy()
        bent = (z if activation == "silu" else 1.0) / (1 + np.exp(-z))
        a, factor = (a * bent, factor) if gate_first else (a, factor * bent)
    return a / np.sqrt((a * a).mean(-1, keepdims=True) + 1e-6) * factor


def close(got: Tensor, want: Tensor | np.ndarray, dtype: torch.dtype, size: float = 1.0) -> bool:
    """Within a few roundings of the compute type, and one of the type of the result."""
    got, want = got.detach().double(), torch.as_tensor(want).double()
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    rounded = 0.51 * torch.finfo(dtype).eps * want.abs() + 6e-8 * (dtype.itemsize == 2)
    bound = 12 * torch.finfo(wide).eps * (size + want.abs()) + rounded
    return got.shape == want.shape and bool(((got - want).abs() <= bound).all())


def same(form: str, got: Tensor, want: Tensor) -> bool:
    """Bit for bit from the core; torch's own functions round the ends of rows in another way."""
    if form != "plain":
        return torch.equal(got, want)
    rough = 16 * torch.finfo(got.dtype).eps
    return torch.allclose(got, want, rtol=rough, atol=rough)


@EACH
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_oracle(form, dtype):
    for width, options in itertools.product(WIDTHS, OPTIONS):
        x, gate, weight = tensors(2, 3, width, dtype=dtype)
        for given in ((x, gate, weight), (x, None, weight), (x, gate, None), (x, None, None)):
            got = gated_rms_norm(*given, **options)
            assert got.dtype == dtype and close(got, exact(*given, **options), dtype), f"W = {width}, {options}"
        a = x.double()
        assert close(l2_norm(x), a / (a.square().sum(-1, keepdim=True) + 1e-6).sqrt(), dtype)


@EACH
def test_sizes(form):
    """No rows, one row, one axis, many rows."""
    for shape in ((0, 5), (3, 0, 16), (7,), (1, 1, 33), (700, 33), (33, 1, 2, 600)):
        x, gate, weight = tensors(*shape, dtype=torch.float32)
        assert close(gated_rms_norm(x, gate, weight), exact(x, gate, weight, **OPTIONS[0]), torch.float32)


@EVERY
def test_epsilon(form):
    for eps in (0.0, 1e-5, 3.0):
        x = normal(4, 33)
        assert torch.allclose(gated_rms_norm(x, eps=eps), x / (x.square().mean(-1, keepdim=True) + eps).sqrt())
        assert torch.allclose(l2_norm(x, eps=eps), x / (x.square().sum(-1, keepdim=True) + eps).sqrt())
    zero = torch.zeros(2, 5, requires_grad=True)
    (grad,) = torch.autograd.grad(l2_norm(zero).sum(), zero)
    assert not l2_norm(zero).any() and torch.allclose(grad, torch.full((2, 5), 1000.0))


@EACH
def test_weights_of_groups(form):
    """A weight of more axes than one: each group's rows take their own, forward and backward."""
    for groups, width in ((3, 33), (2, 16), (40, 5)):
        x, gate, _ = tensors(2, 7, groups, width, dtype=torch.float64)
        weight = normal(groups, width, seed=3).requires_grad_()
        got = gated_rms_norm(x, gate, weight)
        want = gated_rms_norm(x, gate) * weight
        assert torch.allclose(got, want)
        grad = normal(*x.shape, seed=5)
        assert torch.allclose(*(torch.autograd.grad(y, weight, grad)[0] for y in (got, want)))
        assert torch.allclose(gated_rms_norm(x[0, 0], gate[0, 0], weight), want[0, 0])


@EACH
def test_types_beside_one_another(form):
    """A gate may be in float32 beside 16 bits, a weight in any type; all are read exactly."""
    x, gate, weight = tensors(3, 33, dtype=torch.bfloat16)
    want = gated_rms_norm(x, gate, weight)
    for of_gate, of_weight in itertools.product((torch.bfloat16, torch.float32), (torch.float32, torch.float64)):
        assert torch.equal(gated_rms_norm(x, gate.to(of_gate), weight.to(of_weight)), want)
    assert torch.equal(
        gated_rms_norm(x.double(), gate.double(), weight), gated_rms_norm(*(t.double() for t in (x, gate, weight)))
    )


def gradients(given: list[Tensor], norm=gated_rms_norm, **options: object) -> list[Tensor]:
    """Output and gradients."""
    leaves = [t.detach().requires_grad_() for t in given]
    y = norm(*leaves, **options)
    return [y.detach(), *torch.autograd.grad(y, leaves, normal(*y.shape, dtype=y.dtype, seed=7))]


@NATIVE
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gradients_of_the_core(form, dtype, monkeypatch):
    """As those of the plain form in float64 of the same numbers."""
    shapes = ((2, 3, 1), (4, 5), (2, 9, 16), (3, 33), (40, 128), (300, 200), (0, 5))
    for shape, options in itertools.product(shapes, OPTIONS):
        for norm, count in ((gated_rms_norm, 3), (gated_rms_norm, 2), (l2_norm, 1)):
            if norm is l2_norm and options is not OPTIONS[0]:
                continue
            more = {} if norm is l2_norm else options
            given = tensors(*shape, dtype=dtype)[:count]
            got = gradients(given, norm, **more)
            with monkeypatch.context() as hidden:
                hidden.setattr(qkv.linear.fused, "MISSING", "hidden")
                leaves = [t.double().requires_grad_() for t in given]
                y = norm(*leaves, **more)
                want = [y.detach(), *torch.autograd.grad(y, leaves, normal(*y.shape, dtype=dtype, seed=7).double())]
            scale = 1e3 if shape[-1] == 1 else 20.0  # a row of one number has its whole gradient cancelled
            for n, (one, other) in enumerate(zip(got, want, strict=True)):
                size = scale * (1 if n < 3 else 1 + shape[0])
                assert close(one, other, dtype, size), f"result {n} of {shape}, {options}"


@ONE_NATIVE
def test_derivatives(form):
    for options in OPTIONS:
        given = [t.requires_grad_() for t in tensors(2, 2, 3, dtype=torch.float64)]

        def call(*tensors, options=options):
            return gated_rms_norm(*tensors, **options)

        for count in (1, 2, 3):
            assert gradcheck(call, given[:count])
            assert gradgradcheck(call, given[:count])
    assert gradcheck(l2_norm, given[:1]) and gradgradcheck(l2_norm, given[:1])


@EACH
def test_some_gradients_alone(form):
    given = tensors(20, 33, dtype=torch.float32)
    for options in OPTIONS:
        want = gradients(given, **options)[1:]
        for n in range(3):
            leaves = [t.detach().requires_grad_(m == n) for m, t in enumerate(given)]
            y = gated_rms_norm(*leaves, **options)
            assert same(form, torch.autograd.grad(y, leaves[n], normal(20, 33, dtype=y.dtype, seed=7))[0], want[n])


@NATIVE
def test_the_number_of_threads_changes_nothing(form):
    for dtype, options in itertools.product((torch.float32, torch.bfloat16), OPTIONS):
        given = tensors(900, 100, dtype=dtype)
        want = gradients(given, **options)
        for count in (2, 3):
            with threads(count):
                assert all(map(torch.equal, want, gradients(given, **options)))


@EACH
def test_rows_are_as_if_alone(form):
    for dtype, options in itertools.product((torch.float32, torch.float16), OPTIONS):
        x, gate, weight = tensors(300, 33, dtype=dtype)
        whole = gated_rms_norm(x, gate, weight, **options)
        for rows in (slice(0, 1), slice(17, 40), slice(299, 300)):
            assert same(form, gated_rms_norm(x[rows], gate[rows], weight, **options), whole[rows])


@EACH
@pytest.mark.parametrize("content", [float("nan"), float("inf")])
def test_bad_numbers_stay_in_their_row(form, content):
    for options, place in itertools.product(OPTIONS, (0, 1)):
        given = tensors(40, 33, dtype=torch.float32)
        clean = gradients(given, **options)
        given[place][20, 7] = content
        got, others = gradients(given, **options), torch.arange(40) != 20
        for n in range(3):
            assert torch.equal(got[n][others], clean[n][others])
        if content != content:
            assert got[0][20, 7].isnan()


@EACH
def test_far_gates(form):
    """Sigmoid and its derivative where exponentials end: exact zeros, no overflow."""
    z = torch.tensor([-1e30, -200.0, -104.0, -88.0, -20.0, -0.0, 0.0, 20.0, 88.0, 200.0, 1e30], requires_grad=True)
    for activation, function in (("silu", torch.nn.functional.silu), ("sigmoid", torch.sigmoid)):
        wide = z.detach().double().requires_grad_()
        (got,) = torch.autograd.grad(gated_rms_norm(torch.ones(11), z, eps=0.0, activation=activation).sum(), z)
        (want,) = torch.autograd.grad(function(wide).sum(), wide)
        rough = 1e-7 if form == "plain" else 1e-36  # torch subtracts from 1 what is near it
        assert torch.allclose(got.double(), want, rtol=1e-5, atol=rough)


@EACH
def test_any_strides(form):
    x, gate, weight = tensors(3, 4, 5, 33, dtype=torch.float32)
    want = gradients([x, gate, weight])
    forms = (
        lambda t: t.transpose(1, 2).contiguous().transpose(1, 2),
        lambda t: torch.cat([t, t + 1], -1)[..., :33],
        lambda t: torch.cat([t, t + 1], 2)[:, :, :5],
        lambda t: torch.stack([t, t], -1)[..., 0],
        lambda t: t.permute(3, 0, 2, 1).contiguous().permute(1, 3, 2, 0),
        lambda t: t,
    )
    for n, (first, second) in enumerate(itertools.product(forms, forms)):
        leaves = [first(x), second(gate), torch.stack([weight, weight], -1)[:, 0]]
        leaves = [t.detach().requires_grad_() for t in leaves]
        y = gated_rms_norm(*leaves)
        grad = forms[n % len(forms)](normal(*y.shape, dtype=y.dtype, seed=7))
        assert all(same(form, *pair) for pair in zip(torch.autograd.grad(y, leaves, grad), want[1:], strict=True))
        assert same(form, y, want[0])
    row = x[:1, :1].expand(3, 4, -1, -1)
    assert same(form, gated_rms_norm(row, gate, weight), gated_rms_norm(row.contiguous(), gate, weight))
    leaf = x.clone().requires_grad_()
    one, other = (
        torch.autograd.grad(l2_norm(leaf), leaf, g)[0] for g in (torch.ones(()).expand_as(x), torch.ones_like(x))
    )
    assert same(form, one, other)


@NATIVE
def test_fresh_memory_is_not_read(form):
    given = tensors(40, 37, dtype=torch.float32)
    want = gradients(given)
    torch.use_deterministic_algorithms(True)
    try:
        assert torch.empty(3).isnan().all()
        assert all(map(torch.equal, want, gradients(given)))
    finally:
        torch.use_deterministic_algorithms(False)


def test_as_transformers_norms():
    pytest.importorskip("transformers", reason="needs transformers, which is not installed")
    from transformers.models.kimi_linear.modeling_kimi_linear import KimiLinearRMSNormGated
    from transformers.models.mamba2.modeling_mamba2 import MambaRMSNormGated
    from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextRMSNormGated

    x, gate, weight = tensors(2, 7, 64, dtype=torch.float32)
    pairs = (
        (Qwen3NextRMSNormGated(64), {}),
        (KimiLinearRMSNormGated(64), {"activation": "sigmoid"}),
        (MambaRMSNormGated(64, 64), {"gate_first": True}),
    )
    for module, options in pairs:
        leaves = [x.clone().requires_grad_(), gate.clone().requires_grad_()]
        module.weight.data.copy_(weight)
        leaves.append(module.weight)
        results = module(*leaves[:2]), gated_rms_norm(*leaves, **options)
        assert torch.allclose(*results, atol=2e-6), type(module)
        grad = normal(*x.shape, dtype=x.dtype, seed=7)
        for one, other in zip(*(torch.autograd.grad(y, leaves, grad) for y in results), strict=True):
            assert torch.allclose(one, other, atol=1e-5), type(module)
    module = MambaRMSNormGated(64, 16)
    module.weight.data.copy_(weight)
    x, gate = (t.unflatten(-1, (4, 16)) for t in (x, gate))
    got = gated_rms_norm(x, gate, weight.unflatten(0, (4, 16)), gate_first=True).flatten(-2)
    assert torch.allclose(module(x.flatten(-2), gate.flatten(-2)), got, atol=2e-6)


def test_in_torchs_transforms():
    """Graphs, forward mode and maps take the plain form, which is right for all of them."""
    x, gate, weight = tensors(4, 5, dtype=torch.float64)
    want = gated_rms_norm(x, gate, weight)
    assert torch.allclose(torch.compile(gated_rms_norm, backend="eager", fullgraph=True)(x, gate, weight), want)
    assert torch.allclose(torch.func.vmap(gated_rms_norm, (0, 0, None))(x, gate, weight), want)
    _, slope = torch.func.jvp(lambda x: gated_rms_norm(x, gate, weight), (x,), (torch.ones_like(x),))
    with torch.autograd.forward_ad.dual_level():
        dual = gated_rms_norm(torch.autograd.forward_ad.make_dual(x, torch.ones_like(x)), gate, weight)
        assert torch.allclose(torch.autograd.forward_ad.unpack_dual(dual).tangent, slope)
    near = (gated_rms_norm(x + 1e-6, gate, weight) - gated_rms_norm(x - 1e-6, gate, weight)) / 2e-6
    assert torch.allclose(slope, near, atol=1e-7)
    shadow = gated_rms_norm(*(t.to("meta") for t in (x, gate, weight)))
    assert shadow.is_meta and shadow.shape == x.shape


X, GATE, WEIGHT = tensors(2, 3, 5, dtype=torch.float32)
REFUSED = {
    "x is a list": (DTypeError, lambda: l2_norm([1.0]), "`x` must be a torch.Tensor"),
    "x of integers": (DTypeError, lambda: l2_norm(X.int()), "`x` must be float16"),
    "x of no width": (ShapeError, lambda: l2_norm(X[..., :0]), "W of at least 1"),
    "x of no axis": (ShapeError, lambda: l2_norm(X.sum()), "W of at least 1"),
    "eps": (ValueOutOfRange, lambda: l2_norm(X, eps=-1e-6), "`eps` must be finite and at least 0"),
    "eps is NaN": (ValueOutOfRange, lambda: gated_rms_norm(X, eps=float("nan")), "`eps` must be finite"),
    "eps is a text": (DTypeError, lambda: gated_rms_norm(X, eps="1"), "`eps` must be a number"),
    "gate of others": (ShapeError, lambda: gated_rms_norm(X, GATE[:1]), "the shape of `x`"),
    "wide gate": (DTypeError, lambda: gated_rms_norm(X, GATE.double()), "`gate` must be float32"),
    "gate of 16 bits": (DTypeError, lambda: gated_rms_norm(X, GATE.half()), "`gate` must be float32"),
    "gate elsewhere": (QkvError, lambda: gated_rms_norm(X, GATE.to("meta")), "on the device of `x`"),
    "weight of others": (ShapeError, lambda: gated_rms_norm(X, None, WEIGHT[:4]), "`weight` must be (W,) = [5]"),
    "weight of more": (ShapeError, lambda: gated_rms_norm(X, None, WEIGHT.expand(2, 5)), "last axes of `x`"),
    "weight of no axis": (ShapeError, lambda: gated_rms_norm(X, None, WEIGHT.sum()), "`weight` must be"),
    "weight of integers": (DTypeError, lambda: gated_rms_norm(X, None, WEIGHT.int()), "`weight` must be float16"),
    "activation": (UnknownName, lambda: gated_rms_norm(X, GATE, activation="swish"), "did you mean"),
    "a flag": (DTypeError, lambda: gated_rms_norm(X, GATE, gate_first=1), "`gate_first` must be True"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name):
    kind, call, part = REFUSED[name]
    with pytest.raises(kind) as caught:
        call()
    text = str(caught.value)
    assert part in text and text.count("; ") == 2
