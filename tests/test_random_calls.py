"""Calls made at random from good and bad ingredients: each gives the oracle's result, or one error in three parts.

Stricter than either-or: what is good must be answered, and what is bad must be refused by one of the classes that its
bad ingredients stand with in `BAD_OPTIONS` and `BAD_TENSORS`, before any work.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from fractions import Fraction
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import budgets
import engines
import oracles
import qkv
import strategies
from qkv import errors
from qkv.errors import (
    DeviceError,
    DTypeError,
    MaskError,
    ShapeError,
    UnknownName,
    UnsupportedError,
    ValueOutOfRange,
)
from strategies import Sizes, choice

NAN, INF = float("nan"), float("inf")
LENGTHS = (0, 1, 2, 3, 5, 8, 17, 65)
MADE = 300, 120  # examples of the default run: of attention, of scaled_dot_product_attention
MADE_LONG = 2000, 1000

Make = Callable[[Sizes], Any]
Bad = tuple[type[errors.QkvError], Make]


class Plain(NamedTuple):
    """The good call under whatever is bad: tensors in their one form, and what it asks."""

    sizes: Sizes
    axes: str  # the axes of the caller's tensors, of which N and B together are the batch
    tensors: list[Tensor]  # query, key, value, (B, H, L, D)
    options: dict[str, Any]
    rule: oracles.Rule
    bias: Tensor | None  # dense
    drop_seed: int


# What is bad, and the class of the error that says so


def each(error: type[errors.QkvError], *values: Any) -> list[Bad]:
    """Values that are bad whatever the sizes."""
    return [(error, lambda z, value=value: value) for value in values]


def made(error: type[errors.QkvError], *makers: Make) -> list[Bad]:
    """Values that are made for the sizes of a call; an error may come from the constructor already."""
    return [(error, maker) for maker in makers]


def no(*shape: int, dtype: torch.dtype = torch.float64, **options: Any) -> Tensor:
    return torch.zeros(shape, dtype=dtype, **options)


def keep(*shape: int, **options: Any) -> Tensor:
    return torch.ones(shape, dtype=torch.bool, **options)


BAD_PATTERNS = [
    *each(DTypeError, "causal()", 3, qkv.causal, no(2, 3), keep(2, 3), [qkv.causal()], lambda b, h, i, j: j <= i),
    *made(DTypeError, lambda z: qkv.window(4.5), lambda z: qkv.window(True), lambda z: qkv.window(torch.tensor(3))),
    *made(DTypeError, lambda z: qkv.key_lengths(no(z.batch)), lambda z: qkv.documents([0.5] * z.keys)),
    *made(DTypeError, lambda z: qkv.documents([2**80]), lambda z: qkv.documents({1, 2}), lambda z: qkv.documents("ab")),
    *made(DTypeError, lambda z: qkv.global_tokens(2.5), lambda z: qkv.where(3), lambda z: qkv.causal() & keep(2, 2)),
    *made(DTypeError, lambda z: qkv.mask([[True]]), lambda z: qkv.random_blocks(1, 2, 3, ahead=1)),
    *made(ValueOutOfRange, lambda z: qkv.window(-1), lambda z: qkv.window(2, -1), lambda z: qkv.sliding_window(0)),
    *made(ValueOutOfRange, lambda z: qkv.dilated(-1, dilation=2), lambda z: qkv.dilated(1, dilation=0)),
    *made(ValueOutOfRange, lambda z: qkv.strided(0), lambda z: qkv.strided(-3), lambda z: qkv.fixed(0)),
    *made(ValueOutOfRange, lambda z: qkv.fixed(2, 3), lambda z: qkv.prefix(-1), lambda z: qkv.block_local(0)),
    *made(ValueOutOfRange, lambda z: qkv.blocks(keep(99, 99), 0), lambda z: qkv.global_tokens([-1])),
    *made(ValueOutOfRange, lambda z: qkv.random_blocks(1, 4, -1), lambda z: qkv.random_blocks(1, 4, 2**64)),
    *made(ValueOutOfRange, lambda z: qkv.neighborhood((2, 3), 3), lambda z: qkv.windows2d((4, 4), 2, 2)),
    *made(ValueOutOfRange, lambda z: qkv.documents([-1] * z.keys + [-1]), lambda z: qkv.documents([2**31])),
    *made(ValueOutOfRange, lambda z: qkv.documents(cu_seqlens=[0, 3, 2]), lambda z: qkv.documents(cu_seqlens=[1, 2])),
    *made(ValueOutOfRange, lambda z: qkv.key_lengths([-1] * z.batch), lambda z: qkv.longformer(-1, 0)),
    *made(ValueOutOfRange, lambda z: qkv.key_lengths([z.keys + 1] * z.batch)),
    *made(UnknownName, lambda z: qkv.causal(align="topleft"), lambda z: qkv.axial((2, 3), "hight")),
    *made(UnknownName, lambda z: qkv.mask(keep(2, 2, 2), axes="LBS")),
    *made(MaskError, lambda z: qkv.mask(no(z.queries, z.keys, dtype=torch.int64)), lambda z: qkv.mask(keep(3))),
    *made(MaskError, lambda z: qkv.mask(no(z.queries, z.keys, dtype=torch.uint8)), lambda z: qkv.mask(keep(2, 2, 2))),
    *made(MaskError, lambda z: qkv.mask(keep(z.queries + 2, z.keys)), lambda z: qkv.mask(keep(z.queries, z.keys + 2))),
    *made(MaskError, lambda z: qkv.mask(keep(z.batch + 1, 1, z.queries, z.keys))),
    *made(MaskError, lambda z: qkv.mask(keep(1, z.heads + 1, z.queries, z.keys)), lambda z: qkv.documents()),
    *made(MaskError, lambda z: qkv.where(lambda b, h, i, j: i - j), lambda z: qkv.where(lambda b, h, i, j: None)),
    *made(MaskError, lambda z: qkv.where(lambda b, h, i, j: keep(3)), lambda z: qkv.where(lambda b, h, i, j: True)),
    *made(MaskError, lambda z: qkv.causal(align="top_left") & qkv.causal(align="bottom_right")),
    *made(MaskError, lambda z: qkv.documents([0], cu_seqlens=[0, 1])),
    *made(ShapeError, lambda z: qkv.key_lengths([0] * (z.batch + 1)), lambda z: qkv.documents([[0, 1], [2]])),
    *made(ShapeError, lambda z: qkv.key_padding(keep(z.batch, z.keys + 1)), lambda z: qkv.global_tokens([[1], [2, 3]])),
    *made(ShapeError, lambda z: qkv.documents([0] * (z.keys + 1)), lambda z: qkv.documents(cu_seqlens=[0, z.keys + 1])),
    *made(ShapeError, lambda z: qkv.per_head([qkv.full()] * (z.heads + 1)), lambda z: qkv.per_head([])),
    *made(ShapeError, lambda z: qkv.per_head([qkv.full(), "causal()"]), lambda z: qkv.per_head(3)),
    *made(ShapeError, lambda z: qkv.neighborhood((1, z.keys + 1), 1), lambda z: qkv.windows2d((1, z.keys + 1), 2)),
    *made(ShapeError, lambda z: qkv.axial((z.keys + 1, 1), "width"), lambda z: qkv.neighborhood(6, 3)),
    *made(UnsupportedError, lambda z: qkv.mask(keep(2, 2).to_sparse()), lambda z: qkv.mask(keep(2, 2, device="meta"))),
    *made(UnsupportedError, lambda z: qkv.documents(no(z.keys, dtype=torch.int64, device="meta"))),
]

BAD_BIAS = [
    *each(DTypeError, "alibi", 0.5, [[0.0]], np.zeros((1, 1)), qkv.alibi),
    *made(DTypeError, lambda z: no(z.queries, z.keys, dtype=torch.float8_e5m2), lambda z: qkv.alibi(["a"] * z.heads)),
    *made(DTypeError, lambda z: no(z.queries, z.keys, dtype=torch.complex64), lambda z: qkv.relative([[1.0]])),
    *made(MaskError, lambda z: keep(z.queries, z.keys), lambda z: no(z.queries, z.keys, dtype=torch.int64)),
    *made(MaskError, lambda z: no(z.queries, z.keys, dtype=torch.uint8)),
    *made(ShapeError, lambda z: no(z.queries + 2, z.keys), lambda z: no(z.queries, z.keys + 2), lambda z: no(7, 1, 1)),
    *made(ShapeError, lambda z: no(1, z.heads + 1, 1, 1), lambda z: no(1, 1, 1, 1, 1, 1, 1)),
    *made(ShapeError, lambda z: qkv.alibi([0.5] * (z.heads + 1)), lambda z: qkv.relative(no(z.heads + 1, 3))),
    *made(ShapeError, lambda z: qkv.relative(no(z.heads, 4)), lambda z: qkv.alibi(no(z.heads, 1))),
    *made(ValueOutOfRange, lambda z: no(1, 1) + NAN, lambda z: no(1) + INF, lambda z: qkv.alibi([NAN] * z.heads)),
    *made(ValueOutOfRange, lambda z: qkv.relative(no(z.heads, 3) + NAN), lambda z: qkv.alibi(no(z.heads) - INF)),
    *made(DeviceError, lambda z: no(1, 1, device="meta"), lambda z: qkv.alibi(no(z.heads, device="meta"))),
    *made(UnsupportedError, lambda z: no(z.queries, z.keys).to_sparse()),
]

BAD_OPTIONS: dict[str, list[Bad]] = {
    "pattern": BAD_PATTERNS,
    "bias": BAD_BIAS,
    "scale": [
        *each(ValueOutOfRange, NAN, INF, -INF, 10**400),
        *each(DTypeError, "1", True, 1j, [1.0], torch.tensor(1.0), np.ones(2)),
    ],
    "softcap": [
        *each(ValueOutOfRange, 0.0, -1, NAN, INF),
        *each(DTypeError, "5", True, torch.tensor(5.0)),
    ],
    "dropout_p": [
        *each(ValueOutOfRange, -0.1, 1.0, 1, 1.5, NAN, INF, 1 - 2**-20),
        *each(DTypeError, "0.1", None, False, torch.tensor(0.1)),
    ],
    "generator": each(DTypeError, 7, "cpu", torch.default_generator.get_state()),
    "layout": each(UnknownName, "bhld", "BHDL", "", None, 4, ["BHLD"], np.zeros(2)),
    "backend": [
        *each(UnknownName, "block", "Reference", "", None, 3, ["auto"], np.zeros(2)),
        *each(UnsupportedError, "flex", "triton"),
    ],
    "query_offset": [
        *each(DTypeError, 1.0, True, "12", 1j, {0}, np.array(1.5), np.zeros(1, dtype=int), no(), [0.5]),
        *made(DTypeError, lambda z: [True] * z.batch, lambda z: no(z.batch), lambda z: np.zeros(z.batch)),
        *made(ShapeError, lambda z: [0] * (z.batch + 1), lambda z: no(z.batch, 1, dtype=torch.int64)),
        *each(ValueOutOfRange, 2**70, -(2**63)),
        *made(ValueOutOfRange, lambda z: [2**70] * z.batch),
        *each(UnsupportedError, no(dtype=torch.int64, device="meta")),
    ],
    "sinks": [
        *each(DTypeError, [0.0], 1.0, "sink"),
        *made(DTypeError, lambda z: no(z.heads, dtype=torch.int64), lambda z: no(z.heads, dtype=torch.complex64)),
        *made(ShapeError, lambda z: no(z.heads + 1), lambda z: no(z.heads, 1), lambda z: no()),
        *made(DeviceError, lambda z: no(z.heads, device="meta")),
        *made(UnsupportedError, lambda z: no(z.heads).to_sparse()),
    ],
    "return_aux": [
        *each(DTypeError, True, "lse", {"lse": True}, qkv.AuxRequest),
        *each(DTypeError, *(qkv.AuxRequest(lse=x) for x in (1, None, "yes"))),
        *each(DTypeError, *(qkv.AuxRequest(weights=x) for x in (1.5, None, [0.5], torch.tensor([0]), np.zeros(2)))),
        *each(DTypeError, *(qkv.AuxRequest(top_k=x) for x in (1.0, True, "2", np.zeros(2)))),
        *each(UnknownName, qkv.AuxRequest(weights="median")),
        *made(ValueOutOfRange, lambda z: qkv.AuxRequest(weights=z.queries)),
        *made(ValueOutOfRange, lambda z: qkv.AuxRequest(weights=[0, -z.queries - 1])),
        *made(ValueOutOfRange, lambda z: qkv.AuxRequest(top_k=0), lambda z: qkv.AuxRequest(top_k=z.keys + 1)),
        *each(ValueOutOfRange, qkv.AuxRequest(weights=slice(0, 2, 0))),
    ],
}  # fmt: skip

BAD_ATTN_MASK = [
    *each(DTypeError, "causal", [[True]], 1.0, np.ones((1, 1), dtype=bool)),
    *made(MaskError, lambda z: keep(z.queries, z.keys).long(), lambda z: keep(z.queries, z.keys).to(torch.uint8)),
    *made(MaskError, lambda z: keep(z.queries + 2, z.keys), lambda z: keep(z.queries, z.keys + 2)),
    *made(ShapeError, lambda z: no(z.queries + 2, z.keys), lambda z: no(z.queries, z.keys + 2)),
    *made(ShapeError, lambda z: keep(1, 1, 1, 1, 1, 1, 1), lambda z: no(1, 1, 1, 1, 1, 1, 1)),
    *made(ValueOutOfRange, lambda z: no(1, 1) + NAN, lambda z: no(1, 1) + INF),
    *made(DeviceError, lambda z: no(1, 1, device="meta")),
    *made(UnsupportedError, lambda z: keep(2, 2, device="meta"), lambda z: keep(2, 2).to_sparse()),
    *made(UnsupportedError, lambda z: no(2, 2).to_sparse()),
]


class BadTensor(NamedTuple):
    """One thing that is wrong with one tensor of a call."""

    error: type[errors.QkvError]
    names: tuple[str, ...]
    change: Callable[[Tensor], Any]
    axis: str = ""  # the one that grows by one, where it exists and is at least `least` long
    least: int = 0


def nested(x: Tensor) -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says that nested tensors are a prototype
        return torch.nested.nested_tensor([torch.zeros(2, 3), torch.zeros(1, 3)])


def quantized(x: Tensor) -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says that they go away
        return torch.quantize_per_tensor(x.float(), 0.1, 0, torch.qint8)


def kinds(name: str) -> dict[str, BadTensor]:
    """What is bad about any of the three tensors by itself."""
    types = (torch.int64, torch.bool, torch.complex64, torch.float8_e4m3fn, torch.bfloat16)
    others = {"None": None, "a list": [[0.0]], "an array": np.zeros((2, 2)), "a text": "query", "a number": 1.0}
    found = {f"{name} as {dtype}": (DTypeError, lambda x, dtype=dtype: x.to(dtype)) for dtype in types}
    found |= {f"{name} as {text}": (DTypeError, lambda x, value=value: value) for text, value in others.items()}
    found |= {f"{name} on meta": (DeviceError, lambda x: x.to("meta"))}
    forms = {"sparse": Tensor.to_sparse, "nested": nested, "quantized": quantized}
    found |= {f"{name} {form}": (UnsupportedError, change) for form, change in forms.items()}
    return {text: BadTensor(error, (name,), change) for text, (error, change) in found.items()}


def grown(name: str, axis: str, least: int = 0) -> BadTensor:
    return BadTensor(ShapeError, (name,), lambda x: x, axis, least)


ALL = ("query", "key", "value")
BAD_TENSORS: dict[str, BadTensor] = {
    **{text: bad for name in ALL for text, bad in kinds(name).items()},
    **{f"{axis} of {name}": grown(name, axis, 2) for axis in "NB" for name in ALL},
    **{f"H of {name}": grown(name, "H", 2) for name in ALL},
    **{f"L of {name}": grown(name, "L") for name in ("key", "value")},
    **{f"D of {name}": grown(name, "D") for name in ("query", "key")},
    "D of 0": BadTensor(ShapeError, ("query", "key"), lambda x: x[..., :0]),
    "one axis": BadTensor(ShapeError, ALL, lambda x: x.new_zeros(3)),
    "one axis of key": BadTensor(ShapeError, ("key",), lambda x: x.new_zeros(3)),
    "no axis": BadTensor(ShapeError, ALL, lambda x: x.new_zeros(())),
}
ONLY_OURS: dict[str, BadTensor] = {  # torch's function broadcasts these
    **{f"{name} without its first axis": BadTensor(ShapeError, (name,), lambda x: x.sum(0)) for name in ALL},
    **{f"{name} with one axis more": BadTensor(ShapeError, (name,), lambda x: x[None]) for name in ALL},
    **{f"one more {axis} of {name}": grown(name, axis) for axis in "NB" for name in ALL},
    "one more H of value": grown("value", "H"),
}


def spoil(bad: BadTensor, tensors: dict[str, Any], axes: str) -> bool:
    """Put the bad tensors in; False where the call has no such axis."""
    lengths = [tensors[name].shape[axes.index(bad.axis)] for name in ALL if bad.axis in axes]
    if bad.axis and (bad.axis not in axes or min(lengths) < bad.least):
        return False
    for name in bad.names:
        x = tensors[name]
        shape = [n + (axis == bad.axis) for n, axis in zip(x.shape, axes, strict=True)]
        tensors[name] = x.new_zeros(shape) if bad.axis else bad.change(x)
    return True


# Good calls


def shaped(x: Tensor, axes: str, count: int = 1) -> Tensor:
    """A tensor (B, H, L, D) in the caller's axes; `count` is the size of N."""
    x = x.unflatten(0, (count, x.shape[0] // count)) if "N" in axes else x
    x = x.transpose(-3, -2) if axes.endswith("LHD") else x
    return {2: lambda: x[0, 0], 3: lambda: x[:, 0]}.get(len(axes), lambda: x)()


@st.composite
def plain_calls(draw: st.DrawFn) -> Plain:
    """A good call of `attention`; what its numbers are is a pure function of one seed."""
    z = draw(strategies.sizes(LENGTHS, heads=4))
    axes = draw(choice("BHLD", "BHLD", "BLHD", "NBHLD", "NBLHD", "BLD", "LD"))
    z = z._replace(heads=z.heads if "H" in axes else 1, batch=z.batch if "B" in axes else 1)
    z = z._replace(offsets=z.offsets[: z.batch])
    groups = draw(choice(*(g for g in range(1, z.heads + 1) if z.heads % g == 0)))
    width, value_width, seed = draw(choice(1, 3, 8)), draw(choice(1, 4, 8)), draw(st.integers(0, 2**16))
    dtype = draw(choice(torch.float64, torch.float64, torch.float32))
    shapes = [(z.batch, z.heads, z.queries, width), (z.batch, groups, z.keys, width)]
    g = torch.Generator().manual_seed(seed)
    tensors = [torch.randn(s, generator=g, dtype=dtype) for s in [*shapes, (*shapes[1][:3], value_width)]]
    case = draw(strategies.cases(z, depth=1))
    options = {
        "pattern": case.pattern,
        "scale": draw(choice(None, None, 0, 0.0, -0.4, 0.7, Fraction(1, 3), np.float32(0.5))),
        "softcap": draw(choice(None, None, 4.0, 1, np.float64(0.5))),
        "sinks": draw(choice(None, None, torch.randn(z.heads, generator=g, dtype=dtype))),
        "dropout_p": draw(choice(0.0, 0.0, 0, 0.1, 0.9, np.float64(0.5))),
        "generator": torch.Generator().manual_seed(seed),
        "layout": "BLHD" if axes.endswith("LHD") else "BHLD",
        "backend": draw(choice("auto", "reference", "blockwise", "cpu", "cpu", "sdpa")),
        "return_aux": draw(requests(z)),
    }
    options |= draw(offset_options(z, case.pattern))
    options["bias"], dense = draw(biases(z, g, "N" in axes))
    return Plain(z, axes, tensors, options, case.rule, dense, seed)


@st.composite
def offset_options(draw: st.DrawFn, z: Sizes, pattern: Any) -> dict[str, Any]:
    """The legal ways to say where query 0 stands."""
    first, same = z.offsets[0], len(set(z.offsets)) == 1
    each_row = list(z.offsets) * (1 if len(z.offsets) == z.batch else z.batch)
    ways: list[dict[str, Any]] = [{"query_offset": x} for x in (each_row, tuple(each_row), torch.tensor(each_row))]
    if same:
        ways += [{"query_offset": x} for x in (first, np.int64(first), torch.tensor(first, dtype=torch.int32))]
    if same and first == z.keys - z.queries:
        ways += [{}, {"query_offset": None}, {"pattern": pattern & (qkv.causal("bottom_right") | qkv.full())}]
    if z.offsets == (0,):
        ways += [{"pattern": pattern & (qkv.causal("top_left") | qkv.full())}]
    return draw(st.sampled_from(ways))


@st.composite
def requests(draw: st.DrawFn, z: Sizes) -> qkv.AuxRequest | None:
    rows = [
        False,
        True,
        "mean",
        "mean",
        slice(None, None, 2),
        [],
        *([-1, np.int64(0), (0, 0, -1)] if z.queries else []),
    ]
    top = draw(choice(None, None, *([1, z.keys] if z.keys else [])))
    request = qkv.AuxRequest(
        lse=True, max_scores=draw(st.booleans()), entropy=True, weights=draw(st.sampled_from(rows)), top_k=top
    )
    return draw(choice(None, request, request))


@st.composite
def biases(draw: st.DrawFn, z: Sizes, g: torch.Generator, one_for_all: bool) -> tuple[Any, Tensor | None]:
    """A legal bias and the dense tensor that it stands for."""
    kind, dtype = draw(choice("none", "none", "full", "last", "01", "alibi", "relative")), torch.float32
    sizes = z[:4]
    if kind == "none":
        return None, None
    if kind == "alibi":
        slopes = torch.rand(z.heads, generator=g)
        return qkv.alibi(draw(choice(slopes, slopes.tolist()))), oracles.alibi(slopes, sizes, z.offsets)
    if kind == "relative":
        table = hidden_some(torch.randn(z.heads, 5, generator=g), g)
        return qkv.relative(table), oracles.relative(table, sizes, z.offsets)
    shape = [draw(choice(1, n)) for n in sizes]
    shape = [1 if one_for_all else shape[0], *shape[1:]] if kind == "full" else shape[-draw(choice(1, 2)) :]
    x = hidden_some(torch.randn(shape, generator=g), g)
    x = (torch.rand(shape, generator=g) < 0.5).to(dtype) if kind == "01" else x
    return x.to(draw(choice(dtype, torch.float64))), x[(None,) * (4 - x.ndim)]


def hidden_some(x: Tensor, g: torch.Generator) -> Tensor:
    """A third of the entries at -inf in one of three tensors."""
    hide = torch.rand(x.shape, generator=g) < 0.3 * float(torch.rand(1, generator=g) < 0.34)
    return torch.where(hide, -INF, x)


# Ask and judge


@st.composite
def spoiled(draw: st.DrawFn, options: dict[str, list[Bad]]) -> list[tuple[str, Bad]]:
    """At most two options that go wrong."""
    names = draw(st.lists(st.sampled_from(sorted(options)), max_size=2, unique=True))
    return [(name, draw(st.sampled_from(options[name]))) for name in names]


Outcome = tuple[Any, list[warnings.WarningMessage]]


def outcome(function: Callable[..., Any], given_: dict[str, Any], makers: dict[str, Make], z: Sizes) -> Outcome:
    """What came back, the error if it was one of ours, and the warnings; any other error is a failure by itself."""
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        try:
            return function(**{**given_, **{name: maker(z) for name, maker in makers.items()}}), warned
        except errors.QkvError as error:
            return error, warned


def three_parts(text: str) -> bool:
    return text.count("; ") == 2 and all(part.strip() for part in text.split("; "))


def judge_error(error: Any, allowed: set[type[errors.QkvError]]) -> None:
    assert isinstance(error, errors.QkvError), f"accepted, where one of {allowed} was due"
    assert type(error) in allowed, f"{type(error).__name__}, where one of {allowed} was due: {error}"
    assert three_parts(str(error)), f"not in three parts: {error}"
    assert error.__context__ is None or error.__suppress_context__, f"came out of {error.__context__!r}"


def judge(name: str, got: Tensor, want: Tensor, bound: Tensor) -> None:
    got, want = got.double(), want.detach()
    assert got.shape == want.shape, f"{name}: shape {list(got.shape)}, expected {list(want.shape)}"
    error = torch.where(got == want, 0.0, (got - want).abs())  # NaN stays, and fails
    assert bool((error <= bound).all()), f"{name}: off by {error.max():.3g}, {(error / bound).max():.3g} bounds"


def judge_aux(aux: Any, asked: qkv.AuxRequest, truth: oracles.Truth, bound: budgets.Budget, dtype: torch.dtype) -> None:
    judge("lse", aux.lse, truth.lse, bound.lse)
    judge("entropy", aux.entropy, truth.entropy, bound.entropy)
    assert (aux.max_scores is not None) == asked.max_scores
    if aux.max_scores is not None:
        judge("max_scores", aux.max_scores, truth.max_scores, bound.max_scores)
    assert (aux.top_k is None) == (asked.top_k is None)
    if aux.top_k is not None:
        limit = bound.weights.amax(-1, keepdim=True)
        judge("top_k", aux.top_k.values, truth.weights.topk(asked.top_k, -1).values, limit)
        judge("top_k at its indices", truth.weights.gather(-1, aux.top_k.indices), aux.top_k.values.double(), 2 * limit)
    assert (aux.weights is None) == (asked.weights is False)
    if asked.weights == "mean":
        limit = bound.weights.mean(1) + (truth.weights.shape[1] + 1) * budgets.ROUNDOFF[dtype] * truth.weights.mean(1)
        judge("weights", aux.weights, truth.weights.mean(1), limit)
    elif asked.weights is not False:
        rows = slice(None) if asked.weights is True else asked.weights
        rows = list(rows) if isinstance(rows, tuple) else rows
        judge("weights", aux.weights, truth.weights[:, :, rows], bound.weights[:, :, rows])


def judge_warnings(warned: list[warnings.WarningMessage], call: budgets.Call, bias: Any, exact: bool = True) -> None:
    """A mask that hides all and a bias that looks like a mask are asked about; nothing else warns.

    With sinks, and for sdpa (`exact` false), a pattern and a bias that only together hide all need not be noticed.
    """
    pairs = call.q.shape[:3].numel() * call.k.shape[2]
    both = call.allowed if call.bias is None else call.allowed & (call.bias != -INF)
    alone = not call.allowed.any() or (isinstance(bias, Tensor) and bool((bias == -INF).all()))
    hidden = pairs > 0 and not both.any()
    asked = errors.InvertedMaskWarning in {w.category for w in warned}
    assert asked <= hidden and asked >= (hidden and (alone or (exact and call.sinks is None)))
    masks = isinstance(bias, Tensor) and bias.is_floating_point() and set(bias.flatten().tolist()) == {0.0, 1.0}
    assert masks == (errors.AddedMaskWarning in {w.category for w in warned})
    assert len(warned) == asked + masks, [str(w.message) for w in warned]
    assert all(three_parts(str(w.message)) for w in warned)


def dropped(seed: int, p: float, z: Sizes) -> tuple[Tensor | None, float]:
    """The weights that stay, and what they are multiplied with."""
    keep_ = oracles.dropout_keep(oracles.drawn_seed(seed), p, z[:4], z.offsets) if p else None
    return keep_, 65536 / (65536 - oracles.threshold(p))


def asked_of(call: Plain) -> budgets.Call:
    """The question as the oracle takes it."""
    z, options = call.sizes, call.options
    scale = call.tensors[0].shape[-1] ** -0.5 if options["scale"] is None else float(options["scale"])
    seen = oracles.dense(call.rule, z[:4], z.offsets)
    drop = dropped(call.drop_seed, float(options["dropout_p"]), z)
    return budgets.Call(*call.tensors, seen, scale, options["softcap"], call.bias, options["sinks"], *drop)


def beyond_sdpa(options: dict[str, Any]) -> bool:
    asks = options["dropout_p"] > 0 or any(options[x] is not None for x in ("softcap", "sinks", "return_aux"))
    return options["backend"] == "sdpa" and asks


def check_attention(call: Plain, wrong: list[tuple[str, Bad]], tensor: BadTensor | None) -> None:
    options, generator = call.options, call.options["generator"].manual_seed(call.drop_seed)
    count, state = call.sizes.batch if call.drop_seed % 2 else 1, generator.get_state()  # the size of N
    tensors = dict(zip(ALL, (shaped(x, call.axes, count) for x in call.tensors), strict=True))
    allowed = {bad[0] for _, bad in wrong} | ({UnsupportedError} if beyond_sdpa(options) else set())
    if tensor is not None and spoil(tensor, tensors, call.axes):
        allowed.add(tensor.error)
    makers = {name: bad[1] for name, bad in wrong}
    planned = outcome(qkv.plan, {**tensors, **options}, makers, call.sizes)[0]
    assert torch.equal(state, generator.get_state()), "a plan drew a number"
    got, warned = outcome(qkv.attention, {**tensors, **options}, makers, call.sizes)
    if allowed:
        judge_error(got, allowed)
        assert str(planned).split(" (in a call")[0] == str(got).split(" (in a call")[0]
        assert torch.equal(state, generator.get_state()), "a refused call drew a number"
        return
    assert not isinstance(got, errors.QkvError), f"refused: {got}"
    assert planned.backend == options["backend"] or options["backend"] == "auto"
    judge_answer(call, got, warned, count)


def judge_answer(call: Plain, got: Any, warned: list[warnings.WarningMessage], count: int) -> None:
    asked, dtype, request = asked_of(call), call.tensors[0].dtype, call.options["return_aux"]
    truth = asked.truth()
    cast = call.options["backend"] in {"auto", "cpu"} and engines.casts(dtype)
    bound = budgets.forward(asked, truth, dtype, cast=cast)
    out, aux = (got, None) if request is None else got
    assert out.dtype == dtype
    judge("output", out, shaped(truth.out, call.axes, count), shaped(bound.out, call.axes, count))
    if request is not None:
        judge_aux(aux, request, truth, bound, dtype)
    judge_warnings(warned, asked, call.options["bias"], exact=call.options["backend"] != "sdpa")


# torch's signature


class TorchCall(NamedTuple):
    """A good call of scaled_dot_product_attention, and the question that it means."""

    sizes: Sizes
    axes: str
    given: dict[str, Any]
    asked: budgets.Call
    shape: list[int]  # of the output
    drop_seed: int


def canonical(x: Tensor, size: list[int], axes: str) -> Tensor:
    """A tensor of the caller's axes, broadcast to their sizes, as (B, H, L, D)."""
    lead = sum(axis in "NB" for axis in axes)
    return x.expand(size).reshape(math.prod(size[:lead]), size[lead] if "H" in axes else 1, *size[-2:])


@st.composite
def torch_calls(draw: st.DrawFn) -> TorchCall:
    axes, seed = draw(choice("BHLD", "BHLD", "NBHLD", "BLD", "LD")), draw(st.integers(0, 2**16))
    length = choice(0, 1, 2, 5, 17, 65)
    n = {axis: draw(choice(1, 2, 3)) for axis in "NB"} | {"L": draw(length), "S": draw(length), "D": 4}
    n["H"], n["G"], grouped = draw(choice((1, 1, False), (4, 4, False), (4, 1, False), (4, 2, True), (4, 1, True)))
    g = torch.Generator().manual_seed(seed)
    forms = {"query": axes, "key": axes.replace("H", "G").replace("L", "S")}
    shapes = {name: [n[axis] for axis in forms.get(name, forms["key"])] for name in ALL}
    once = draw(choice(None, None, *ALL))  # the tensor whose batch axes are broadcast
    lead = [axis in "NB" for axis in axes]
    full = {name: torch.randn(shape, generator=g, dtype=torch.float64) for name, shape in shapes.items()}
    if once is not None:
        full[once] = full[once][tuple(slice(0, 1) if first else slice(None) for first in lead)]
    mask_axes = axes[:-2] + "LS"
    size = [n[axis] for axis in mask_axes]
    mask = draw(torch_masks(size, g))
    z = Sizes(math.prod(n[axis] for axis in axes if axis in "NB"), n["H"] if "H" in axes else 1, n["L"], n["S"], (0,))
    is_causal, scale, p = draw(st.booleans()), draw(choice(None, 0.3, -1)), draw(choice(0.0, 0.0, 0.3))
    given_ = {**full, "attn_mask": mask, "dropout_p": p, "is_causal": is_causal, "scale": scale, "enable_gqa": grouped}
    flat = [canonical(full[name], shapes[name], axes) for name in ALL]
    seen = oracles.dense(oracles.causal() if is_causal else oracles.full(), z[:4], 0)
    dense = None if mask is None else canonical(mask, size, axes)
    if dense is not None and dense.dtype == torch.bool:
        seen, dense = seen & dense, None
    asked = budgets.Call(*flat, seen, 0.5 if scale is None else scale, None, dense, None, *dropped(seed, p, z))
    return TorchCall(z, axes, given_, asked, [*size[:-1], n["D"]], seed)


@st.composite
def torch_masks(draw: st.DrawFn, size: list[int], g: torch.Generator) -> Tensor | None:
    """A legal attn_mask: as many of the last axes as drawn, each whole or 1."""
    shape = [draw(choice(1, length)) for length in size][draw(st.integers(0, len(size))) :]
    x = torch.randn(shape, generator=g)
    return draw(choice(None, x > 0, hidden_some(x, g), x.double()))


TORCH_OPTIONS = {"attn_mask": BAD_ATTN_MASK, **{name: BAD_OPTIONS[name] for name in ("dropout_p", "scale")}}


def check_torch(call: TorchCall, wrong: list[tuple[str, Bad]], tensor: BadTensor | None) -> None:
    given_, allowed = dict(call.given), {bad[0] for _, bad in wrong}
    whole = all(given_[name].shape[:-2] == given_["value"].shape[:-2] for name in ("query", "key"))
    if tensor is not None and whole and spoil(tensor, given_, call.axes):
        allowed.add(tensor.error)
    if given_["enable_gqa"] and call.asked.k.shape[1] > 1 and call.drop_seed % 4 == 0:
        given_["enable_gqa"] = False
        allowed.add(ShapeError)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(call.drop_seed)
        makers = {name: bad[1] for name, bad in wrong}
        got, warned = outcome(qkv.scaled_dot_product_attention, given_, makers, call.sizes)
    if allowed:
        judge_error(got, allowed)
        return
    assert not isinstance(got, errors.QkvError), f"refused: {got}"
    truth = call.asked.truth()
    bound = budgets.forward(call.asked, truth, torch.float64)
    judge("output", got, truth.out.reshape(call.shape), bound.out.reshape(call.shape))
    judge_warnings(warned, call.asked, given_["attn_mask"])


# Tests

BASE = Plain(
    Sizes(2, 4, 5, 6, (1,)),
    "BHLD",
    [torch.linspace(-1, 1, math.prod(shape)).reshape(shape) for shape in ((2, 4, 5, 8), (2, 2, 6, 8), (2, 2, 6, 3))],
    dict.fromkeys(("scale", "softcap", "bias", "sinks", "return_aux"))
    | {"pattern": qkv.causal(), "dropout_p": 0.5, "generator": torch.Generator(), "backend": "auto"},
    oracles.causal(),
    None,
    1,
)
ROWS = [(name, row) for name, rows in BAD_OPTIONS.items() for row in range(len(rows))]


@pytest.mark.parametrize("name, row", ROWS)
def test_every_bad_option_alone_is_refused(name, row) -> None:
    check_attention(BASE, [(name, BAD_OPTIONS[name][row])], None)


@pytest.mark.parametrize("name", BAD_TENSORS | ONLY_OURS)
def test_every_bad_tensor_alone_is_refused(name) -> None:
    bad = (BAD_TENSORS | ONLY_OURS)[name]
    check_attention(BASE._replace(axes="NBHLD" if bad.axis == "N" else "BHLD"), [], bad)


@pytest.mark.parametrize("name", BAD_TENSORS)
@pytest.mark.parametrize("mask", [None, keep(5, 6), keep(2, 1, 5, 6), no(5, 6)], ids=["", "bool", "by row", "float"])
def test_every_bad_tensor_alone_is_refused_under_torch_signature(name, mask) -> None:
    bad = BAD_TENSORS[name]
    axes = "NBHLD" if bad.axis == "N" else "BHLD"
    given_ = {text: shaped(x, axes, 2) for text, x in zip(ALL, BASE.tensors, strict=True)}
    assert spoil(bad, given_, axes)
    given_ |= {"attn_mask": mask, "enable_gqa": True}
    judge_error(outcome(qkv.scaled_dot_product_attention, given_, {}, BASE.sizes)[0], {bad.error})


@pytest.mark.parametrize("row", range(len(BAD_ATTN_MASK)))
def test_every_bad_attn_mask_alone_is_refused(row) -> None:
    error, maker = BAD_ATTN_MASK[row]
    given_ = dict(zip(ALL, BASE.tensors, strict=True)) | {"enable_gqa": True}
    judge_error(outcome(qkv.scaled_dot_product_attention, given_, {"attn_mask": maker}, BASE.sizes)[0], {error})


def test_base_is_good() -> None:
    check_attention(BASE, [], None)


ANY_TENSOR = st.one_of(st.none(), st.sampled_from(list((BAD_TENSORS | ONLY_OURS).values())))
TORCH_TENSOR = st.one_of(st.none(), st.sampled_from(list(BAD_TENSORS.values())))
OURS = given(plain_calls(), st.one_of(st.just([]), spoiled(BAD_OPTIONS)), ANY_TENSOR)
TORCHS = given(torch_calls(), st.one_of(st.just([]), spoiled(TORCH_OPTIONS)), TORCH_TENSOR)


@pytest.mark.parametrize("make", [keep, no])
@pytest.mark.parametrize("queries, keys", [(0, 0), (0, 3), (3, 0)])
def test_an_empty_attn_mask_of_several_rows_is_a_good_one(queries, keys, make) -> None:
    q, k, mask = no(2, 1, queries, 4), no(2, 1, keys, 4), make(2, 1, queries, keys)
    assert qkv.scaled_dot_product_attention(q, k, k, mask).equal(no(2, 1, queries, 4))


@pytest.mark.parametrize("backend", ["auto", "reference", "blockwise", "cpu"])
def test_a_call_without_numbers_gives_a_form_or_one_error(backend) -> None:
    given_ = {name: x.to("meta") for name, x in zip(ALL, BASE.tensors, strict=True)}
    got = outcome(qkv.attention, {**given_, "backend": backend, "pattern": qkv.causal()}, {}, BASE.sizes)[0]
    if isinstance(got, Tensor):
        assert got.is_meta and got.shape == (2, 4, 5, 3)
    else:
        judge_error(got, {UnsupportedError})


@settings(max_examples=MADE[0])
@OURS
def test_attention_answers_as_the_oracle_or_refuses(call, wrong, tensor) -> None:
    check_attention(call, wrong, tensor)


@settings(max_examples=MADE[1])
@TORCHS
def test_torch_signature_answers_as_the_oracle_or_refuses(call, wrong, tensor) -> None:
    check_torch(call, wrong, tensor)


@pytest.mark.long
@settings(max_examples=MADE_LONG[0])
@OURS
def test_many_calls_of_attention(call, wrong, tensor) -> None:
    check_attention(call, wrong, tensor)


@pytest.mark.long
@settings(max_examples=MADE_LONG[1])
@TORCHS
def test_many_calls_of_torch_signature(call, wrong, tensor) -> None:
    check_torch(call, wrong, tensor)
