"""The short convolution: against a float64 oracle, in plain torch and in the core on every instruction set."""

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
from qkv.errors import DTypeError, QkvError, ShapeError, UnknownName, UnsupportedError, ValueOutOfRange
from qkv.linear.convolution import _Convolution, short_convolution

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
LENGTHS, WIDTHS = (0, 1, 2, 3, 5, 64, 200), (1, 5, 16, 33)
CU = [0, 0, 1, 3, 3, 40, 360, 365]  # empty, shorter than the taps, longer than a unit of work
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


def tensors(length: int, channels: int, taps: int, dtype: torch.dtype, batch: int = 2, count: int | None = None):
    """x, weight, bias, tail."""
    count = batch if count is None else count
    shapes = ((batch, length, channels), (channels, taps), (channels,), (count, taps - 1, channels))
    return [normal(*shape, dtype=dtype, seed=n) for n, shape in enumerate(shapes)]


def exact(x: Tensor, weight: Tensor, bias: Tensor, tail: Tensor, *, silu: bool) -> tuple[np.ndarray, np.ndarray, float]:
    """Outputs and tails of sequences of one length, tap by tap in float64; and how great the sums may have been."""
    x, weight, bias, tail = (t.double().numpy() for t in (x, weight, bias, tail))
    rows, taps, length = np.concatenate([tail, x], axis=1), weight.shape[1], x.shape[1]
    z, size = np.zeros(x.shape) + bias, np.zeros(x.shape) + np.abs(bias)
    for t, k in itertools.product(range(length), range(taps)):
        z[:, t] += rows[:, t + k] * weight[:, k]
        size[:, t] += np.abs(rows[:, t + k] * weight[:, k])
    return z / (1 + np.exp(-z)) if silu else z, rows[:, length:], size.max(initial=0)


def close(got: Tensor, want: Tensor | np.ndarray, size: float, dtype: torch.dtype) -> bool:
    """Within a few roundings of the compute type on sums of this size, and one of the type of the result."""
    got, want = got.detach().double(), torch.as_tensor(want).double()
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    bound = (
        6 * torch.finfo(wide).eps * (1 + size)
        + torch.finfo(dtype).eps * 0.51 * want.abs()
        + 6e-8 * (dtype.itemsize == 2)
    )
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
    for taps, channels, length in itertools.product(range(1, 9), WIDTHS, LENGTHS):
        if length > 5 and taps not in {1, 4, 8}:
            continue
        given = tensors(length, channels, taps, dtype)
        for activation in ("silu", None):
            y, tail = short_convolution(*given[:3], activation=activation, initial_state=given[3], return_state=True)
            want, want_tail, size = exact(*given, silu=activation is not None)
            assert y.dtype == tail.dtype == dtype
            assert close(y, want, size, dtype), f"K = {taps}, C = {channels}, L = {length}, {activation}"
            assert torch.equal(tail.double(), torch.as_tensor(want_tail))


@EVERY
def test_what_may_be_left_out(form):
    x, weight, bias, tail = tensors(9, 33, 4, torch.float32)
    zero = torch.zeros_like
    assert same(form, short_convolution(x, weight), short_convolution(x, weight, zero(bias), initial_state=zero(tail)))
    y, after = short_convolution(x[:, :2], weight, return_state=True)
    assert same(form, y, short_convolution(x, weight)[:, :2])
    assert torch.equal(after, torch.cat([zero(tail[:, :1]), x[:, :2]], 1))


@EACH
def test_types_beside_one_another(form):
    """Weights may be of any type; all are read exactly."""
    x, weight, bias, _ = tensors(9, 33, 4, torch.bfloat16)
    want = short_convolution(x, weight, bias)
    for of_weight, of_bias in itertools.product(DTYPES, DTYPES):
        if torch.float16 in {of_weight, of_bias}:
            continue
        assert same(form, short_convolution(x, weight.to(of_weight), bias.to(of_bias)), want)
    wide = short_convolution(x.double(), weight, bias)
    assert wide.dtype == torch.float64 and same(
        form, wide, short_convolution(x.double(), weight.double(), bias.double())
    )


def gradients(given: list[Tensor], packed: list[int] | None = None, activation: str | None = "silu") -> list[Tensor]:
    """Output, tail, and the gradients of all tensors, with incoming ones for both results."""
    leaves = [t.detach().requires_grad_() for t in given]
    y, tail = short_convolution(
        *leaves[:3], activation=activation, cu_seqlens=packed, initial_state=leaves[3], return_state=True
    )
    grads = normal(*y.shape, dtype=y.dtype, seed=7), normal(*tail.shape, dtype=y.dtype, seed=8)
    return [y.detach(), tail.detach(), *torch.autograd.grad((y, tail), leaves, grads)]


@NATIVE
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gradients_of_the_core(form, dtype, monkeypatch):
    """As those of the plain form in float64 of the same numbers."""
    cases = [
        (4, 33, 200),
        (4, 300, 5),
        (8, 5, 300),
        (1, 16, 40),
        (3, 1, 2),
        (8, 16, 3),
        (4, 5, 0),
        (1, 5, 0),
        (2, 257, 17),
    ]
    for (taps, channels, length), activation in itertools.product(cases, ("silu", None)):
        given = tensors(length, channels, taps, dtype)
        got = gradients(given, activation=activation)[2:]
        with monkeypatch.context() as hidden:
            hidden.setattr(qkv.linear.fused, "MISSING", "hidden")
            leaves = [t.double().requires_grad_() for t in given]
            y, tail = short_convolution(*leaves[:3], activation=activation, initial_state=leaves[3], return_state=True)
            grads = normal(*y.shape, dtype=dtype, seed=7), normal(*tail.shape, dtype=dtype, seed=8)
            want = torch.autograd.grad((y, tail), leaves, [g.double() for g in grads])
        for name, one, other, tensor in zip(("x", "weight", "bias", "state"), got, want, given, strict=True):
            size = 8 * (1 + (length if name in {"weight", "bias"} else 8))
            assert one.dtype == tensor.dtype
            assert close(one, other, size, dtype), f"{name} of K = {taps}, C = {channels}, L = {length}"


@ONE_NATIVE
@pytest.mark.parametrize("packed", [None, [0, 0, 1, 6]], ids=["whole", "packed"])
def test_derivatives(form, packed):
    for taps, activation in ((4, "silu"), (3, None), (1, "silu")):
        count = 2 if packed is None else 3
        given = [t.requires_grad_() for t in tensors(6, 3, taps, torch.float64, 2 if packed is None else 1, count)]

        def call(x, weight, bias, tail, activation=activation):
            options = {"activation": activation, "cu_seqlens": packed, "return_state": True}
            y, tail = short_convolution(x, weight, bias, initial_state=tail, **options)
            return y.clone(), tail.clone()

        assert gradcheck(call, given)
        assert gradgradcheck(call, given)


@EACH
def test_some_gradients_alone(form):
    given = tensors(20, 33, 4, torch.float32)
    want = gradients(given)[2:]
    grad_y, grad_tail = normal(2, 20, 33, dtype=torch.float32, seed=7), normal(2, 3, 33, dtype=torch.float32, seed=8)
    for n in range(4):
        leaves = [t.detach().requires_grad_(m == n) for m, t in enumerate(given)]
        y, tail = short_convolution(*leaves[:3], initial_state=leaves[3], return_state=True)
        linked = [(r, g) for r, g in ((y, grad_y), (tail, grad_tail)) if r.requires_grad]
        results, incoming = zip(*linked, strict=True)
        (got,) = torch.autograd.grad(results, leaves[n], incoming)
        assert same(form, got, want[n])
    x = given[0].requires_grad_()
    _, tail = short_convolution(x, given[1], return_state=True)
    (got,) = torch.autograd.grad(tail.sum(), x)
    assert torch.equal(got, torch.cat([torch.zeros(2, 17, 33), torch.ones(2, 3, 33)], 1))


@EACH
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_packed_sequences_are_as_if_alone(form, dtype):
    given = tensors(CU[-1], 300, 4, dtype, 1, len(CU) - 1)
    y, tail, grad_x, grad_weight, _, grad_tail = gradients(given, CU)
    totals = torch.zeros(300, 4, dtype=torch.float64)
    for n, (start, stop) in enumerate(itertools.pairwise(CU)):
        leaves = [t.detach().requires_grad_() for t in (given[0][:, start:stop], *given[1:3], given[3][n : n + 1])]
        alone, after = short_convolution(*leaves[:3], initial_state=leaves[3], return_state=True)
        assert same(form, alone, y[:, start:stop]) and torch.equal(after, tail[n : n + 1])
        incoming = (
            normal(*y.shape, dtype=dtype, seed=7)[:, start:stop],
            normal(*tail.shape, dtype=dtype, seed=8)[n : n + 1],
        )
        found = torch.autograd.grad((alone, after), leaves, incoming)
        assert same(form, found[0], grad_x[:, start:stop]) and same(form, found[3], grad_tail[n : n + 1])
        totals += found[1].double()
    assert torch.allclose(
        totals,
        grad_weight.double(),
        rtol=2e-2 if dtype == torch.bfloat16 else 1e-5,
        atol=0.5 if dtype == torch.bfloat16 else 1e-4,
    )
    assert same(form, short_convolution(*given[:3], cu_seqlens=torch.tensor(CU), initial_state=given[3]), y)


@EACH
def test_no_sequences(form):
    x, weight, bias, _ = tensors(0, 5, 4, torch.float32, 1)
    y, tail = short_convolution(x, weight, bias, cu_seqlens=[0], return_state=True)
    assert y.shape == (1, 0, 5) and tail.shape == (0, 3, 5)
    assert all(not g.any() for g in gradients([x, weight, bias, tail], [0])[2:])


@EACH
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_segments_are_the_whole(form, dtype):
    for taps, channels in ((4, 300), (8, 5), (1, 16)):
        x, weight, bias, tail = tensors(600, channels, taps, dtype)
        whole, end = short_convolution(x, weight, bias, initial_state=tail, return_state=True)
        for cuts in ((0, 1, 2, 3, 4, 17, 256, 257, 600), (0, 300, 300, 600)):
            state, parts = tail, []
            for start, stop in itertools.pairwise(cuts):
                part, state = short_convolution(x[:, start:stop], weight, bias, initial_state=state, return_state=True)
                parts.append(part)
            assert same(form, torch.cat(parts, 1), whole) and torch.equal(state, end)


@EACH
def test_pieces_are_the_whole(form):
    for taps, activation in ((4, "silu"), (8, None), (1, "silu")):
        x, weight, bias, tail = tensors(300, 33, taps, torch.bfloat16)
        options = {"activation": activation, "return_state": True}
        whole, end = short_convolution(x, weight, bias, initial_state=tail, **options)
        parts = []
        for start, stop in itertools.pairwise((0, 1, 2, 2, 4, 9, 270, 300)):
            part, tail = short_convolution(x[:, start:stop], weight, bias, initial_state=tail, **options)
            parts.append(part)
        assert same(form, torch.cat(parts, 1), whole) and torch.equal(tail, end)


@NATIVE
def test_the_number_of_threads_changes_nothing(form):
    cases = [(tensors(700, 300, 4, torch.float32, 1), None), (tensors(CU[-1], 600, 3, torch.bfloat16, 1, 7), CU)]
    for given, packed in cases:
        want = gradients(given, packed)
        for count in (2, 3):
            with threads(count):
                assert all(map(torch.equal, want, gradients(given, packed)))


@EACH
@pytest.mark.parametrize("content", [float("nan"), float("inf")])
def test_bad_numbers_stay_where_they_are_read(form, content):
    """In their channel, and from their token to the K - 1 behind it; backward from those K - 1 before it."""
    given = tensors(40, 33, 4, torch.float32)
    clean = gradients(given)
    given[0][1, 20, 7] = content
    got = gradients(given)
    read, of_weight = torch.zeros(2, 40, 33, dtype=torch.bool), torch.zeros(33, dtype=torch.bool)
    read[1, 20:24, 7] = of_weight[7] = True
    assert same(form, got[0][~read], clean[0][~read]) and same(form, got[1], clean[1])
    reach = torch.zeros_like(read)
    reach[1, 17:24, 7] = True
    assert same(form, got[2][~reach], clean[2][~reach])
    assert same(form, got[3][~of_weight], clean[3][~of_weight]) and same(form, got[5], clean[5])
    if content != content:
        assert got[0][read].isnan().all()


@EVERY
def test_far_numbers(form):
    """Sigmoid and its derivative where exponentials end: exact zeros, no overflow."""
    x = torch.tensor([-1e30, -200.0, -104.0, -88.0, -0.0, 0.0, 88.0, 200.0, 1e30])[None, None].requires_grad_()
    y = short_convolution(x, torch.ones(9, 1))
    (grad,) = torch.autograd.grad(y.sum(), x)
    want = x.detach().double().requires_grad_()
    (of_want,) = torch.autograd.grad(torch.nn.functional.silu(want).sum(), want)
    assert torch.allclose(y.double(), torch.nn.functional.silu(want), rtol=1e-5, atol=1e-36)
    assert torch.allclose(grad.double(), of_want, rtol=1e-5, atol=1e-36)


@EACH
def test_any_strides(form):
    given = tensors(40, 33, 4, torch.float32)
    want = gradients(given)
    x, weight, bias, tail = given
    wide = torch.cat([x, x + 1], 2)[..., :33]
    assert wide.stride() != x.stride()
    forms = (wide, x.transpose(1, 2).contiguous().transpose(1, 2), x.transpose(0, 1).contiguous().transpose(0, 1))
    for strided in (*forms, torch.stack([x, x], -1)[..., 0]):
        other = strided, weight.t().contiguous().t(), torch.stack([bias, bias], -1)[:, 0], tail.mT.contiguous().mT
        y = short_convolution(*other[:3], initial_state=other[3])
        assert same(form, y, want[0])
    leaf = x.clone().requires_grad_()
    (one,) = torch.autograd.grad(short_convolution(leaf, weight, bias).sum(), leaf)  # an expanded gradient comes in
    (other,) = torch.autograd.grad(short_convolution(leaf, weight, bias), leaf, torch.ones(2, 33, 40).mT)
    assert same(form, one, other)


@NATIVE
def test_fresh_memory_is_not_read(form):
    given = tensors(300, 37, 4, torch.float32)
    want = gradients(given)
    torch.use_deterministic_algorithms(True)
    try:
        assert torch.empty(3).isnan().all()
        assert all(map(torch.equal, want, gradients(given)))
    finally:
        torch.use_deterministic_algorithms(False)


@EACH
def test_as_torch_convolves(form):
    for taps, channels in ((4, 33), (3, 16)):
        x, weight, bias, _ = tensors(50, channels, taps, torch.float64)
        module = torch.nn.Conv1d(channels, channels, taps, groups=channels, padding=taps - 1, dtype=torch.float64)
        with torch.no_grad():
            module.weight.copy_(weight[:, None])
            module.bias.copy_(bias)
            want = torch.nn.functional.silu(module(x.mT)[..., :50]).mT
            got = short_convolution(x, module.weight.squeeze(1), module.bias)
        assert torch.allclose(got, want, rtol=1e-12, atol=1e-13)


def test_as_transformers_convolves():
    pytest.importorskip("transformers", reason="needs transformers, which is not installed")
    from transformers.models.qwen3_next import modeling_qwen3_next as their

    x, weight, bias, _ = tensors(12, 33, 4, torch.float32)
    want = their.causal_conv1d_fn(x.mT, weight, bias, "silu")
    got, state = short_convolution(x[:, :11], weight, bias, return_state=True)
    assert torch.allclose(got, want.mT[:, :11], atol=1e-6)
    theirs = torch.nn.functional.pad(state.mT, (1, 0)).contiguous()  # which keeps one more
    last = their.causal_conv1d_update(x[:, 11:].mT, theirs, weight, bias, "silu")
    got, state = short_convolution(x[:, 11:], weight, bias, initial_state=state, return_state=True)
    assert torch.allclose(got, last.mT, atol=1e-6)
    assert torch.equal(state.mT, theirs[..., 1:])


def test_in_torchs_transforms():
    """Graphs, forward mode and maps take the plain form, which is right for all of them."""
    x, weight, bias, tail = tensors(9, 5, 4, torch.float64)

    def call(x: Tensor, weight: Tensor) -> Tensor:
        return short_convolution(x, weight, bias, initial_state=tail)

    want = call(x, weight)
    assert torch.allclose(torch.compile(call, backend="eager", fullgraph=True)(x, weight), want)
    mapped = torch.func.vmap(call, (0, None))(torch.stack([x, x + 1]), weight)
    assert torch.allclose(mapped, torch.stack([want, call(x + 1, weight)]))
    _, slope = torch.func.jvp(lambda x: call(x, weight), (x,), (torch.ones_like(x),))
    with torch.autograd.forward_ad.dual_level():
        dual = call(torch.autograd.forward_ad.make_dual(x, torch.ones_like(x)), weight)
        assert torch.allclose(torch.autograd.forward_ad.unpack_dual(dual).tangent, slope)
    near = (call(x + 1e-6, weight) - call(x - 1e-6, weight)) / 2e-6
    assert torch.allclose(slope, near, atol=1e-7)


def test_a_graph_breaks_at_lengths():
    x, weight, _, _ = tensors(9, 5, 4, torch.float32, 1)

    def call(x: Tensor) -> Tensor:
        return short_convolution(x, weight, cu_seqlens=[0, 4, 9])

    assert torch.equal(torch.compile(call, backend="eager")(x), call(x))
    torch.compiler.reset()
    with pytest.raises(Exception, match="must not depend on values"):
        torch.compile(call, backend="eager", fullgraph=True)(x)


X, WEIGHT, BIAS, TAIL = tensors(6, 5, 4, torch.float32)
REFUSED = {
    "x is a list": (DTypeError, lambda: short_convolution([1.0], WEIGHT), "`x` must be a torch.Tensor"),
    "x of integers": (DTypeError, lambda: short_convolution(X.int(), WEIGHT), "`x` must be float16"),
    "x without a batch": (ShapeError, lambda: short_convolution(X[0], WEIGHT), "`x` must have 3 axes"),
    "weight of a Conv1d": (ShapeError, lambda: short_convolution(X, WEIGHT[:, None]), "squeeze(1)"),
    "weight of others": (ShapeError, lambda: short_convolution(X, WEIGHT[:4]), "C = 5"),
    "nine taps": (ShapeError, lambda: short_convolution(X, torch.ones(5, 9)), "K from 1 to 8"),
    "no taps": (ShapeError, lambda: short_convolution(X, torch.ones(5, 0)), "K from 1 to 8"),
    "weight elsewhere": (QkvError, lambda: short_convolution(X, WEIGHT.to("meta")), "on the device of `x`"),
    "bias of others": (ShapeError, lambda: short_convolution(X, WEIGHT, BIAS[:4]), "`bias` must be (C,) = [5]"),
    "state of others": (
        ShapeError,
        lambda: short_convolution(X, WEIGHT, initial_state=TAIL[:1]),
        "`initial_state` must",
    ),
    "state as channels first": (
        ShapeError,
        lambda: short_convolution(X, WEIGHT, initial_state=TAIL.mT),
        "(N, K - 1, C)",
    ),
    "wide state": (DTypeError, lambda: short_convolution(X, WEIGHT, initial_state=TAIL.double()), "type of `x`"),
    "activation": (UnknownName, lambda: short_convolution(X, WEIGHT, activation="swish"), "did you mean"),
    "a flag": (DTypeError, lambda: short_convolution(X, WEIGHT, return_state=1), "`return_state` must be True"),
    "packed batch": (ShapeError, lambda: short_convolution(X, WEIGHT, cu_seqlens=[0, 6]), "(1, L, C)"),
    "packed beyond": (ValueOutOfRange, lambda: short_convolution(X[:1], WEIGHT, cu_seqlens=[0, 7]), "6 rows of `x`"),
    "packed falling": (ValueOutOfRange, lambda: short_convolution(X[:1], WEIGHT, cu_seqlens=[0, 4, 2, 6]), "decrease"),
    "packed states": (
        ShapeError,
        lambda: short_convolution(X[:1], WEIGHT, cu_seqlens=[0, 6], initial_state=TAIL),
        "= [1, 3, 5]",
    ),
    "sparse": (UnsupportedError, lambda: short_convolution(X.to_sparse(), WEIGHT), "dense"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name):
    kind, call, part = REFUSED[name]
    with pytest.raises(kind) as caught:
        call()
    text = str(caught.value)
    assert part in text and text.count("; ") == 2


def test_the_plain_form_is_what_others_fall_back_to():
    """On a device that holds no numbers, shapes and types come out as everywhere."""
    given = [t.to("meta") for t in tensors(6, 5, 4, torch.bfloat16)]
    y, tail = short_convolution(*given[:3], initial_state=given[3], return_state=True)
    assert (y.shape, y.dtype, tail.shape, tail.dtype) == ((2, 6, 5), torch.bfloat16, (2, 3, 5), torch.bfloat16)
    assert y.is_meta and _Convolution(silu=True, starts=None, keeps=False).plain(*given)[0].is_meta
