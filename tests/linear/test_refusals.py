"""What the functions of the linear family refuse before any work, and in which words."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import qkv
from linear.named import RULES, B, D, H, K, L, V, ask, given
from qkv.errors import DeviceError, DTypeError, QkvError, ShapeError, UnknownName, UnsupportedError, ValueOutOfRange

ONES = torch.ones


def call(name: str, **changed: Any) -> Any:
    """A legal call of float32 tensors but for what is changed."""
    one = given(name).to(torch.float32)
    arguments = dict(zip(("query", "key", "value"), one.tensors, strict=True)) | one.beside | changed
    return getattr(qkv, name)(**arguments)


def said(error: QkvError) -> str:
    """The text without the call that it came from."""
    text, found, _ = str(error).partition(" (in a call of ")
    assert found and text.count("; ") >= 2, str(error)
    return text


# Error, text, changed arguments; of `kimi_delta_attention`, which takes most.
REFUSED: dict[str, tuple[type[QkvError], str, dict[str, Any]]] = {
    "no tensor": (
        DTypeError,
        "`key` must be a torch.Tensor; got None; convert it with torch.as_tensor",
        {"key": None},
    ),
    "sparse": (
        UnsupportedError,
        "`value` must be a dense tensor; got a sparse tensor (sparse_coo); call .to_dense() first",
        {"value": ONES(B, H, L, V).to_sparse()},
    ),
    "nested": (
        UnsupportedError,
        (
            "`query` must be a dense tensor; got a nested tensor (jagged); "
            "lay its sequences one after another along L and say cu_seqlens=[0, ...]"
        ),
        {"query": torch.nested.nested_tensor([ONES(K, L, D)], layout=torch.jagged)},
    ),
    "integers": (
        DTypeError,
        "`query` must be float16, bfloat16, float32 or float64; got int64; convert it with query.float()",
        {"query": ONES(B, K, L, D, dtype=torch.int64)},
    ),
    "two types": (
        DTypeError,
        (
            "`query`, `key` and `value` must have one dtype; got float32, bfloat16, float32; "
            "cast them to one, such as key.to(query.dtype), or call under torch.autocast"
        ),
        {"key": ONES(B, K, L, D, dtype=torch.bfloat16)},
    ),
    "another device": (
        DeviceError,
        "`value` must be on the device of `query`; got meta beside cpu; move it with value.to('cpu')",
        {"value": ONES(B, H, L, V, device="meta")},
    ),
    "three axes": (
        ShapeError,
        (
            "`query` must have 4 axes, (B, H, L, D); got [2, 37, 5]; "
            "add the missing ones, as query[:, None] for one of size 1"
        ),
        {"query": ONES(B, L, D)},
    ),
    "three axes in the other layout": (
        ShapeError,
        "`key` must have 4 axes, (B, L, H, D); got [2, 37, 5]; add the missing ones, as key[:, None] for one of size 1",
        {"key": ONES(B, L, D), "layout": "BLHD"},
    ),
    "B": (
        ShapeError,
        (
            "`query`, `key` and `value` must have the same batch size B; got B = 1, 2, 2; "
            "repeat a batch of 1 without a copy by x.expand(B, -1, -1, -1)"
        ),
        {"query": ONES(1, K, L, D)},
    ),
    "L": (
        ShapeError,
        (
            "`query`, `key` and `value` must have the same length L; got L = 37, 37, 36; "
            "if the axes stand as (B, L, H, D), say layout='BLHD'"
        ),
        {"value": ONES(B, H, L - 1, V)},
    ),
    "L in the other layout": (
        ShapeError,
        (
            "`query`, `key` and `value` must have the same length L; got L = 2, 2, 4; "
            "if the axes stand as (B, H, L, D), say layout='BHLD'"
        ),
        {"layout": "BLHD"},
    ),
    "K": (
        ShapeError,
        (
            "`query` and `key` must have the same heads K; got K = 4 and 2; "
            "query heads that share keys need them repeated: key.repeat_interleave(2, 1)"
        ),
        {"query": ONES(B, H, L, D)},
    ),
    "fewer heads of keys and values": (
        ShapeError,
        (
            "`query` and `key` must have the same heads K; got K = 4 and 2; query heads that share keys need them "
            "repeated: key.repeat_interleave(2, 2), value.repeat_interleave(2, 2)"
        ),
        {
            "query": ONES(B, L, H, D),
            "key": ONES(B, L, K, D),
            "value": ONES(B, L, K, V),
            "layout": "BLHD",
        },
    ),
    "K that is no part of H": (
        ShapeError,
        (
            "`query` and `key` must have the same heads K; got K = 2 and 3; "
            "if the axes stand as (B, L, H, D), say layout='BLHD'"
        ),
        {"key": ONES(B, 3, L, D)},
    ),
    "H": (
        ShapeError,
        (
            "the heads H of `value` must be a multiple of the heads K of `query` and `key`; got H = 3 and K = 2; "
            "if the axes stand as (B, L, H, D), say layout='BLHD'"
        ),
        {"value": ONES(B, 3, L, V)},
    ),
    "no heads": (
        ShapeError,
        (
            "the heads H of `value` must be a multiple of the heads K of `query` and `key`; got H = 0 and K = 2; "
            "if the axes stand as (B, L, H, D), say layout='BLHD'"
        ),
        {"value": ONES(B, 0, L, V)},
    ),
    "D": (
        ShapeError,
        "`query` and `key` must have the same width D; got D = 5 and 6; only V may differ from D",
        {"key": ONES(B, K, L, D + 1)},
    ),
    "no width": (
        ShapeError,
        "the widths D and V must be at least 1; got D = 5 and V = 0; a state is a matrix of D rows and V columns",
        {"value": ONES(B, H, L, 0)},
    ),
    "layout": (
        UnknownName,
        "`layout` must be one of BHLD, BLHD; got 'BHDL'; did you mean 'BLHD'?",
        {"layout": "BHDL"},
    ),
    "no layout": (UnknownName, "`layout` must be one of BHLD, BLHD; got [1]; choose one of these", {"layout": [1]}),
    "no gate": (
        DTypeError,
        "`g` must be a torch.Tensor; got None; convert it with torch.as_tensor",
        {"g": None},
    ),
    "a gate of integers": (
        DTypeError,
        "`g` must be float16, bfloat16, float32 or float64; got bool; convert it with g.float()",
        {"g": ONES(B, H, L, D, dtype=torch.bool)},
    ),
    "a gate of one a head": (
        ShapeError,
        (
            "`g` must be (B, H, L, D) = [2, 4, 37, 5]; got [2, 4, 37]; it holds one a token and value head, "
            "and key channel"
        ),
        {"g": -ONES(B, H, L)},
    ),
    "a gate of key heads": (
        ShapeError,
        (
            "`g` must be (B, H, L, D) = [2, 4, 37, 5]; got [2, 2, 37, 5], whose H is 2 where the call has 4; "
            "it holds one a token and value head, and key channel"
        ),
        {"g": -ONES(B, K, L, D)},
    ),
    "a gate of another layout": (
        ShapeError,
        (
            "`g` must be (B, H, L, D) = [2, 4, 37, 5]; got [2, 37, 4, 5], whose H is 37 where the call has 4; "
            "say g.transpose(1, 2), or layout='BLHD' if all tensors stand so"
        ),
        {"g": -ONES(B, L, H, D)},
    ),
    "a gate of channels first": (
        ShapeError,
        (
            "`g` must be (B, H, L, D) = [2, 4, 37, 5]; got [2, 4, 5, 37], whose L is 5 where the call has 37; "
            "it holds one a token and value head, and key channel"
        ),
        {"g": -ONES(B, H, D, L)},
    ),
    "a wide gate": (
        DTypeError,
        "`g` must be float32 beside inputs of float32; got float64; cast it with g.to(torch.float32)",
        {"g": -ONES(B, H, L, D, dtype=torch.float64)},
    ),
    "a gate elsewhere": (
        DeviceError,
        "`g` must be on the device of `query`; got meta beside cpu; move it with g.to('cpu')",
        {"g": ONES(B, H, L, D, device="meta")},
    ),
    "a gate above 0": (
        ValueOutOfRange,
        (
            "`g` must be at most 0: it is the logarithm of a decay; its greatest number is 0.9; "
            "pass g.log() of factors in 0..1"
        ),
        {"g": 0.9 * ONES(B, H, L, D)},
    ),
    "beta of another length": (
        ShapeError,
        (
            "`beta` must be (B, H, L) = [2, 4, 37]; got [2, 4, 36], whose L is 36 where the call has 37; "
            "it holds one a token and value head"
        ),
        {"beta": ONES(B, H, L - 1)},
    ),
    "beta of another layout": (
        ShapeError,
        (
            "`beta` must be (B, H, L) = [2, 4, 37]; got [2, 37, 4], whose H is 37 where the call has 4; "
            "say beta.transpose(1, 2), or layout='BLHD' if all tensors stand so"
        ),
        {"beta": ONES(B, L, H)},
    ),
    "infinite beta": (
        ValueOutOfRange,
        "`beta` must be finite; its numbers go from 1 to inf; 0 writes nothing, 1 replaces what k names",
        {"beta": ONES(B, H, L).index_fill(2, torch.tensor(3), math.inf)},
    ),
    "narrow beta": (
        DTypeError,
        "`beta` must be float32 beside inputs of float32; got bfloat16; cast it with beta.to(torch.float32)",
        {"beta": ONES(B, H, L, dtype=torch.bfloat16)},
    ),
    "a list of beta": (
        DTypeError,
        "`beta` must be a torch.Tensor; got a builtins.list; convert it with torch.as_tensor",
        {"beta": [1.0]},
    ),
    "scale": (
        ValueOutOfRange,
        "`scale` must be finite; got nan; leave it out for 1/sqrt(D)",
        {"scale": math.nan},
    ),
    "no scale": (
        DTypeError,
        "`scale` must be a number; got 'one'; leave it out for 1/sqrt(D)",
        {"scale": "one"},
    ),
    "packed rows": (
        ShapeError,
        "B must be 1 where `cu_seqlens` is given; got B = 2; lay the sequences one after another along L",
        {"cu_seqlens": [0, L]},
    ),
    "state": (
        ShapeError,
        (
            "`initial_state` must be (B, H, D, V) = [2, 4, 5, 3]; got [2, 4, 3, 5], whose D is 3 where the call has 5; "
            "it holds one a sequence and value head"
        ),
        {"initial_state": ONES(B, H, V, D)},
    ),
    "no state": (
        DTypeError,
        "`initial_state` must be a torch.Tensor; got a builtins.float; convert it with torch.as_tensor",
        {"initial_state": 0.0},
    ),
    "narrow state": (
        DTypeError,
        (
            "`initial_state` must be float32 beside inputs of float32; got float16; "
            "cast it with initial_state.to(torch.float32)"
        ),
        {"initial_state": ONES(B, H, D, V, dtype=torch.float16)},
    ),
    "return_state": (
        DTypeError,
        "`return_state` must be True or False; got 1; pass a bool",
        {"return_state": 1},
    ),
    "backend": (
        UnknownName,
        "`backend` must be one of auto, chunked, cpu, reference; got 'chunk'; did you mean 'chunked'?",
        {"backend": "chunk"},
    ),
    "no backend": (
        UnknownName,
        "`backend` must be one of auto, chunked, cpu, reference; got None; choose one of these",
        {"backend": None},
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_refused_before_any_work(what: str) -> None:
    error, text, changed = REFUSED[what]
    with pytest.raises(error) as caught:
        call("kimi_delta_attention", **changed)
    assert said(caught.value) == text


PACKED: dict[str, tuple[type[QkvError], str, dict[str, Any]]] = {
    "a late start": (
        ValueOutOfRange,
        "`cu_seqlens` must start at 0; entry 0 is 1; prepend 0 to the ends of the documents",
        {"cu_seqlens": [1, L]},
    ),
    "falling": (
        ValueOutOfRange,
        "`cu_seqlens` must not decrease; entry 2 is 3 after 9; give running sums of document lengths",
        {"cu_seqlens": torch.tensor([0, 9, 3, L])},
    ),
    "no end": (
        ValueOutOfRange,
        "`cu_seqlens` must end at the 37 rows of `query`; its last entry is 36; every row belongs to one document",
        {"cu_seqlens": [0, 36]},
    ),
    "fractions": (
        DTypeError,
        "`cu_seqlens` must hold integers; got [0.0, 37.0]; list token numbers",
        {"cu_seqlens": [0.0, 37.0]},
    ),
    "nothing": (
        ShapeError,
        "`cu_seqlens` must hold at least the boundary 0; it is empty; start it with 0",
        {"cu_seqlens": []},
    ),
    "states of a batch": (
        ShapeError,
        (
            "`initial_state` must be (N, H, D, V) = [2, 4, 5, 3]; got [1, 4, 5, 3], whose N is 1 where the call has 2; "
            "it holds one a sequence and value head"
        ),
        {"cu_seqlens": [0, 9, L], "initial_state": ONES(1, H, D, V)},
    ),
}


@pytest.mark.parametrize("what", PACKED)
def test_packed_sequences_that_are_none(what: str) -> None:
    error, text, changed = PACKED[what]
    with pytest.raises(error) as caught:
        ask("ssd", given("ssd", batch=1).to(torch.float32), **changed)
    assert said(caught.value) == text


def test_lengths_that_cannot_be_read() -> None:
    with FakeTensorMode():
        edges = torch.tensor([0, L]) + 0
        tensors = [torch.empty(1, H, L, D) for _ in range(3)]
        with pytest.raises(UnsupportedError) as caught:
            qkv.retention(*tensors, decay=torch.empty(H), cu_seqlens=edges)
    assert said(caught.value) == (
        "`cu_seqlens` must hold lengths that are known; got a tensor whose numbers cannot be read here "
        "([2] int64 cpu); pass ints"
    )


# Arguments of one function


OWN: dict[str, tuple[type[QkvError], str, str, dict[str, Any]]] = {
    "decay of tokens": (
        ShapeError,
        "`decay` must be (H,) = [4]; got [2, 4, 37]; it holds one a value head",
        "retention",
        {"decay": -ONES(B, H, L)},
    ),
    "decay of key heads": (
        ShapeError,
        "`decay` must be (H,) = [4]; got [2], whose H is 2 where the call has 4; it holds one a value head",
        "retention",
        {"decay": -ONES(K)},
    ),
    "decay that is the factor": (
        ValueOutOfRange,
        (
            "`decay` must be at most 0: it is the logarithm of a decay; its greatest number is 0.96875; "
            "pass log(gamma) of factors gamma in 0..1, as decay=gamma.log(), or minus the slopes"
        ),
        "retention",
        {"decay": 1 - 2.0 ** (-5 - torch.arange(-3.0, 1.0))},
    ),
    "decay as a number": (
        DTypeError,
        "`decay` must be a torch.Tensor; got a builtins.float; convert it with torch.as_tensor",
        "retention",
        {"decay": -0.1},
    ),
    "a gate of channels": (
        ShapeError,
        "`g` must be (B, H, L) = [2, 4, 37]; got [2, 4, 37, 5]; it holds one a token and value head",
        "gated_delta_rule",
        {"g": -ONES(B, H, L, D)},
    ),
    "ssd's scale": (
        ValueOutOfRange,
        "`scale` must be finite; got inf; leave it out for 1.0",
        "ssd",
        {"scale": math.inf},
    ),
    "a state without the column of sums": (
        ShapeError,
        (
            "`initial_state` must be (B, H, D, V + 1) = [2, 4, 5, 4]; got [2, 4, 5, 3], whose V + 1 is 3 where the "
            "call has 4; it holds one a sequence and value head, the last column the sum of its keys"
        ),
        "linear_attention",
        {"initial_state": ONES(B, H, D, V)},
    ),
    "a state with one": (
        ShapeError,
        (
            "`initial_state` must be (B, H, D, V) = [2, 4, 5, 3]; got [2, 4, 5, 4], whose V is 4 where the call has 3; "
            "it holds one a sequence and value head"
        ),
        "linear_attention",
        {"initial_state": ONES(B, H, D, V + 1), "normalize": False},
    ),
    "a state of another map": (
        ShapeError,
        (
            "`initial_state` must be (B, H, M, V + 1) = [2, 4, 10, 4]; got [2, 4, 5, 4], whose M is 5 where the call "
            "has 10; it holds one a sequence and value head, the last column the sum of its keys"
        ),
        "linear_attention",
        {"initial_state": ONES(B, H, D, V + 1), "feature_map": "softmax"},
    ),
    "a state before all at once": (
        ValueOutOfRange,
        (
            "`initial_state` must be left out where `is_causal` is False; got one; "
            "only tokens in order have a state before and after them"
        ),
        "linear_attention",
        {"initial_state": ONES(B, H, D, V + 1), "is_causal": False},
    ),
    "a state after all at once": (
        ValueOutOfRange,
        (
            "`return_state` must be left out where `is_causal` is False; got True; "
            "only tokens in order have a state before and after them"
        ),
        "linear_attention",
        {"return_state": True, "is_causal": False},
    ),
    "an engine that goes in order": (
        UnsupportedError,
        (
            "`backend` 'reference' must be able to answer the call; it has no form for is_causal=False; "
            'use "auto" or "chunked"'
        ),
        "linear_attention",
        {"backend": "reference", "is_causal": False},
    ),
    "is_causal": (
        DTypeError,
        "`is_causal` must be True or False; got None; pass a bool",
        "linear_attention",
        {"is_causal": None},
    ),
    "normalize": (
        DTypeError,
        "`normalize` must be True or False; got 'sum'; pass a bool",
        "linear_attention",
        {"normalize": "sum"},
    ),
    "a map of another length": (
        ShapeError,
        (
            "`feature_map` must map (B, K, L, D) = [2, 2, 37, 5] to (B, K, L, M); got [2, 2, 5, 37] for `query`; "
            "change the last axis only"
        ),
        "linear_attention",
        {"feature_map": lambda x: x.mT},
    ),
    "a map to nothing": (
        ShapeError,
        (
            "`feature_map` must map (B, K, L, D) = [2, 2, 37, 5] to (B, K, L, M); got [2, 2, 37, 0] for `query`; "
            "change the last axis only"
        ),
        "linear_attention",
        {"feature_map": lambda x: x[..., :0]},
    ),
    "a map to integers": (
        DTypeError,
        "`feature_map` must give a floating-point tensor; got [2, 2, 37, 5] int64 cpu for `query`; return phi(x) alone",
        "linear_attention",
        {"feature_map": lambda x: x.long()},
    ),
    "a map to a pair": (
        DTypeError,
        "`feature_map` must give a floating-point tensor; got tuple for `query`; return phi(x) alone",
        "linear_attention",
        {"feature_map": lambda x: (x, x)},
    ),
}


@pytest.mark.parametrize("what", OWN)
def test_refused_by_one_function(what: str) -> None:
    error, text, name, changed = OWN[what]
    with pytest.raises(error) as caught:
        call(name, **changed)
    assert said(caught.value) == text


def test_a_map_that_gives_query_and_key_different_widths() -> None:
    widths = iter((3, 4))
    with pytest.raises(ShapeError) as caught:
        call("linear_attention", feature_map=lambda x: x[..., : next(widths)])
    assert said(caught.value) == (
        "`feature_map` must give query and key the same width; got 3 and 4; phi(q) · phi(k) is a sum over it"
    )


@pytest.mark.parametrize("feature_map, error", [("eluu", UnknownName), (3, DTypeError)])
def test_feature_maps_that_are_none(feature_map: Any, error: type[QkvError]) -> None:
    with pytest.raises(error, match="`feature_map` must be"):
        call("linear_attention", feature_map=feature_map)


def test_a_refused_call_runs_no_feature_map() -> None:
    def phi(x: Tensor) -> Tensor:
        raise AssertionError("work before a check")

    for changed in ({"scale": math.nan}, {"cu_seqlens": [0]}, {"backend": "?"}, {"is_causal": 1}, {"key": None}):
        with pytest.raises(QkvError):
            call("linear_attention", feature_map=phi, **changed)


# All functions


@pytest.mark.parametrize("name", RULES)
def test_an_error_names_its_call(name: str) -> None:
    with pytest.raises(ShapeError) as caught:
        call(name, key=ONES(B, K, L, D + 1))
    assert str(caught.value).endswith(
        f" (in a call of {name} with query [2, 2, 37, 5] float32 cpu, key [2, 2, 37, 6] float32 cpu, "
        "value [2, 4, 37, 3] float32 cpu)"
    )


@pytest.mark.parametrize("name", [name for name, rule in RULES.items() if set(rule.takes) & set("gG")])
def test_no_gate_grows_and_no_wide_one_stands_beside_narrow_inputs(name: str) -> None:
    one = given(name)
    with pytest.raises(ValueOutOfRange, match="`g` must be at most 0"):
        ask(name, one._replace(beside={**one.beside, "g": -one.beside["g"]}))
    with pytest.raises(DTypeError) as caught:
        ask(name, one.to(torch.bfloat16, torch.float64))
    assert said(caught.value) == (
        "`g` must be bfloat16 or float32 beside inputs of bfloat16; got float64; cast it with g.to(torch.float32)"
    )
    with pytest.raises(DTypeError, match="`g` must be float64 beside inputs of float64; got float32"):
        ask(name, one.to(torch.float64, torch.float32))


def test_gates_are_not_read_where_numbers_cannot_be_seen() -> None:
    one = given("ssd").to(torch.float32)
    up = -one.beside["g"]
    assert torch.func.vmap(lambda g: qkv.ssd(*one.tensors, g))(up[None]).shape == (1, B, H, L, V)


@pytest.mark.parametrize("number", [-math.inf, 0.0, -100.0, math.nan])
def test_gates_that_are_legal(number: float) -> None:
    call("ssd", g=torch.full((B, H, L), number))


@pytest.mark.parametrize("number", [-3.0, 0.0, 2.0, 100.0, math.nan])
def test_strengths_that_are_legal(number: float) -> None:
    call("delta_rule", beta=torch.full((B, H, L), number))


# Beside the recurrence


def test_a_convolution_of_channels_first() -> None:
    with pytest.raises(ShapeError) as caught:
        qkv.short_convolution(ONES(2, 24, 9), ONES(24, 4))
    assert str(caught.value) == (
        "`x` must be (B, L, C) with the C of `weight`, 24; got [2, 24, 9]; say x.transpose(1, 2) for (B, C, L)"
    )
    with pytest.raises(ShapeError, match="`weight` must be"):
        qkv.short_convolution(ONES(2, 24, 9), ONES(23, 4))
    with pytest.raises(ShapeError, match="`weight` must be"):
        qkv.short_convolution(ONES(2, 24, 9), ONES(24, 1, 4))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_gate_of_a_norm_in_another_type(dtype: torch.dtype) -> None:
    x = ONES(2, 3, dtype=torch.bfloat16 if dtype == torch.float64 else torch.float64)
    with pytest.raises(DTypeError) as caught:
        qkv.gated_rms_norm(x, x.to(dtype))
    legal = "bfloat16 or float32" if dtype == torch.float64 else "float64"
    assert str(caught.value).startswith(f"`gate` must be {legal} beside inputs of {str(x.dtype)[6:]}; got ")


def test_a_positive_gate_beside_nan_is_seen():
    given = torch.rand(1, 2, 3, 4), torch.rand(1, 2, 3, 4), torch.rand(1, 2, 3, 5)
    g = torch.tensor([torch.nan, 1.0, -1.0]).expand(1, 2, 3)
    with pytest.raises(ValueOutOfRange, match="its greatest number is 1"):
        qkv.ssd(*given, g)
