"""The checked question: each bad input gives its one error, in three parts, before any work.

A number such as `row 53` or `53-` is the row of the project's list of bad inputs, of which `BAD` is this part.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from calls import INF, NAN, PLACES, K, Q, V, call, refused, tensors_on
from qkv.errors import (
    DeviceError,
    DTypeError,
    LayoutError,
    MaskError,
    ShapeError,
    SizeLimit,
    UnknownName,
    UnsupportedError,
    ValueOutOfRange,
)
from qkv.inputs import in_call
from qkv.patterns import causal, key_lengths, mask, per_head, prefix
from qkv.question import ask
from qkv.scores import alibi, relative
from qkv.types import AuxRequest


@pytest.fixture(params=PLACES)
def place(request):
    with tensors_on(request.param):
        yield request.param


def some(dtype, *shape):
    """Zeros (L, S), or of another shape, of any type."""
    return torch.zeros(shape or (5, 6)).to(dtype)


# Row and what is bad: the error, parts of its text, the options (a function, so that the test says where tensors are).
BAD = {
    "1-width of key": (ShapeError, "width D | D = 8 in query | D = 7 in key | only V", lambda: {"k": (2, 2, 6, 7)}),
    "2-value longer": (ShapeError, "S = 6 rows | value has S = 7 | layout='BLHD'", lambda: {"v": (2, 2, 7, 3)}),
    "3-value shorter": (ShapeError, "S = 6 rows | value has S = 5", lambda: {"v": (2, 2, 5, 3)}),
    "4-batch": (ShapeError, "batch size B | B = 3, 2, 2 | expand", lambda: {"q": (3, 4, 5, 8)}),
    "5-batch of one": (ShapeError, "batch size B | B = 1, 2, 2 | expand", lambda: {"q": (1, 4, 5, 8)}),
    "6-heads": (ShapeError, "multiple of | H = 3 | G = 2 | layout='BLHD'", lambda: {"q": (2, 3, 5, 8)}),
    "7-more key heads": (ShapeError, "multiple of | H = 1 | G = 2", lambda: {"q": (2, 1, 5, 8)}),
    "7-no heads": (ShapeError, "H = 0 | G = 0", lambda: {"q": (2, 0, 5, 8), "k": (2, 0, 6, 8), "v": (2, 0, 6, 3)}),
    "7-value heads": (ShapeError, "heads G | G = 2 heads | value has G = 4", lambda: {"v": (2, 4, 6, 3)}),
    "8-one axis": (ShapeError, "at least 2 axes | [8] | x[None, :]", lambda: {"q": (8,), "k": (8,), "v": (3,)}),
    "8-ranks": (ShapeError, "same number of axes | [2, 6, 8] | unsqueeze", lambda: {"k": (2, 6, 8)}),
    "9-width 0": (ShapeError, "at least 1 | D = 0", lambda: {"q": (2, 4, 5, 0), "k": (2, 2, 6, 0)}),
    "12-integer": (DTypeError, "`query` | float32 | int64 | .float()", lambda: {"dtype": torch.int64}),
    "12-bool": (DTypeError, "`query` | got bool | .float()", lambda: {"dtype": torch.bool}),
    "13-complex": (DTypeError, "`query` | complex64 | real part", lambda: {"dtype": torch.complex64}),
    "14-fp8": (DTypeError, "`query` | float8_e4m3fn | scales", lambda: {"dtype": torch.float8_e4m3fn}),
    "15-mixed": (
        DTypeError,
        "one dtype | bfloat16, float32, float32 | torch.autocast",
        lambda: {"q": some(torch.bfloat16, *Q)},
    ),
    "15-mixed value": (DTypeError, "one dtype | float32, float32, float64", lambda: {"v": some(torch.float64, *V)}),
    "18-list": (DTypeError, "`query` | torch.Tensor | list | as_tensor", lambda: {"q": [[1.0]]}),
    "18-ndarray": (DTypeError, "`key` | numpy.ndarray | as_tensor", lambda: {"k": np.zeros(K)}),
    "18-None": (DTypeError, "`value` | got None | as_tensor", lambda: {"v": None}),
    "25-bias int64": (MaskError, "`bias` | int64 | keep=", lambda: {"bias": some(torch.int64)}),
    "25-bias bool": (MaskError, "`bias` | bool | keep=", lambda: {"bias": some(torch.bool)}),
    "26-bias uint8": (MaskError, "`bias` | uint8 | keep=", lambda: {"bias": some(torch.uint8)}),
    "27-bias shape": (ShapeError, "[2, 4, 5, 6] | S is 7 | use 1 or all", lambda: {"bias": torch.zeros(5, 7)}),
    "27-bias heads": (ShapeError, "[2, 4, 5, 6] | H is 2", lambda: {"bias": torch.zeros(2, 2, 5, 6)}),
    "27-bias 3-D": (ShapeError, "(B, L, S) or (H, L, S) | bias[:, None]", lambda: {"bias": torch.zeros(2, 5, 6)}),
    "27-bias 5-D": (ShapeError, "broadcast | [1, 2, 4, 5, 6]", lambda: {"bias": torch.zeros(1, 2, 4, 5, 6)}),
    "27-bias fp8": (DTypeError, "`bias` | float8_e5m2", lambda: {"bias": some(torch.float8_e5m2)}),
    "27-bias list": (DTypeError, "`bias` | alibi(slopes) | [[0.0", lambda: {"bias": [[0.0] * 6] * 5}),
    "32-pattern for other batch": (ShapeError, "3", lambda: {"pattern": key_lengths([1, 2, 3])}),
    "39-patterns by head": (ShapeError, "H=4 | lists 2", lambda: {"pattern": per_head([causal()] * 2)}),
    "39-alibi heads": (ShapeError, "alibi(2 heads) | H = 4", lambda: {"bias": alibi([0.5, 0.25])}),
    "39-table heads": (ShapeError, "relative(2 heads | H = 4", lambda: {"bias": relative(torch.zeros(2, 3))}),
    "39-sinks": (ShapeError, "`sinks` | (H,) | [2] for H = 4", lambda: {"sinks": torch.zeros(2)}),
    "39-sinks int": (DTypeError, "`sinks` | int64", lambda: {"sinks": torch.zeros(4, dtype=torch.int64)}),
    "49-offset float": (DTypeError, "`query_offset` | 1.0 | S - L", lambda: {"query_offset": 1.0}),
    "49-offset bool": (DTypeError, "`query_offset` | True", lambda: {"query_offset": True}),
    "49-offset text": (DTypeError, "`query_offset` | '12'", lambda: {"query_offset": "12"}),
    "49-offset item": (DTypeError, "`query_offset` | 2.5 for batch row 1", lambda: {"query_offset": [1, 2.5]}),
    "49-offsets too few": (ShapeError, "`query_offset` | [1] for B = 2", lambda: {"query_offset": [1]}),
    "49-offsets float": (
        DTypeError,
        "`query_offset` | float32 | int64",
        lambda: {"query_offset": torch.zeros(2)},
    ),
    "49-offset 2-D": (
        ShapeError,
        "`query_offset` | [2, 1] for B = 2",
        lambda: {"query_offset": some(torch.int64, 2, 1)},
    ),
    "49-offset far": (ValueOutOfRange, "`query_offset` | 2^38 | 9223372036854775808", lambda: {"query_offset": 2**63}),
    "52-two sources": (
        LayoutError,
        "query_offset=1 | align='top_left' | says 0 | leave one",
        lambda: {"pattern": causal(align="top_left"), "query_offset": 1},
    ),
    "52-two sources by row": (
        LayoutError,
        "query_offset=[1, 2] | align='bottom_right' | says 1",
        lambda: {"pattern": causal(align="bottom_right"), "query_offset": [1, 2]},
    ),
    "53-scale NaN": (ValueOutOfRange, "`scale` | nan | 1/sqrt(D)", lambda: {"scale": NAN}),
    "54-scale inf": (ValueOutOfRange, "`scale` | -inf | 1/sqrt(D)", lambda: {"scale": -INF}),
    "54-scale beyond floats": (ValueOutOfRange, "`scale` | finite", lambda: {"scale": 10**400}),
    "54-scale bool": (DTypeError, "`scale` | True", lambda: {"scale": True}),
    "54-scale text": (DTypeError, "`scale` | '1'", lambda: {"scale": "1"}),
    "56-dropout -0.1": (ValueOutOfRange, "`dropout_p` | 0 ≤ p < 1 | -0.1", lambda: {"dropout_p": -0.1}),
    "56-dropout 1.5": (ValueOutOfRange, "`dropout_p` | 0 ≤ p < 1 | 1.5", lambda: {"dropout_p": 1.5}),
    "56-dropout NaN": (ValueOutOfRange, "`dropout_p` | 0 ≤ p < 1 | nan", lambda: {"dropout_p": NAN}),
    "57-dropout 1": (ValueOutOfRange, "`dropout_p` | 0 ≤ p < 1 | 1.0", lambda: {"dropout_p": 1.0}),
    "57-dropout as good as 1": (ValueOutOfRange, "leave weights over | 65536", lambda: {"dropout_p": 1 - 2**-18}),
    "57-dropout bool": (DTypeError, "`dropout_p` | False", lambda: {"dropout_p": False}),
    "57-generator": (DTypeError, "`generator` | 7 | manual_seed", lambda: {"generator": 7}),
    "58-softcap 0": (ValueOutOfRange, "`softcap` | above 0 | got 0", lambda: {"softcap": 0}),
    "58-softcap NaN": (ValueOutOfRange, "`softcap` | above 0 | nan", lambda: {"softcap": NAN}),
    "58-softcap inf": (ValueOutOfRange, "`softcap` | finite | inf", lambda: {"softcap": INF}),
    "58-softcap bool": (DTypeError, "`softcap` | True", lambda: {"softcap": True}),
    "69-scale tensor": (DTypeError, "`scale` | a tensor | scale.item() | gradient", lambda: {"scale": torch.ones(())}),
    "69-softcap tensor": (DTypeError, "`softcap` | softcap.item()", lambda: {"softcap": torch.ones(())}),
    "69-dropout tensor": (DTypeError, "`dropout_p` | dropout_p.item()", lambda: {"dropout_p": torch.ones(())}),
    "70-layout": (UnknownName, "`layout` | BHLD, BLHD | 'BLDH' | did you mean", lambda: {"layout": "BLDH"}),
    "70-layout None": (UnknownName, "`layout` | None", lambda: {"layout": None}),
    "70-weights name": (UnknownName, "`weights` | mean | maen", lambda: {"return_aux": AuxRequest(weights="maen")}),
    "70-aux dict": (DTypeError, "`return_aux` | AuxRequest(lse=True)", lambda: {"return_aux": {"lse": True}}),
    "70-aux flag": (DTypeError, "`lse` | got 1", lambda: {"return_aux": AuxRequest(lse=1)}),
    "70-aux row": (ValueOutOfRange, "row 5 for L = 5 | -L..L-1", lambda: {"return_aux": AuxRequest(weights=5)}),
    "70-aux row below": (ValueOutOfRange, "row -6 for L = 5", lambda: {"return_aux": AuxRequest(weights=[0, -6])}),
    "70-aux row float": (DTypeError, "`weights` | 0.5", lambda: {"return_aux": AuxRequest(weights=[0.5])}),
    "70-aux row tensor": (DTypeError, ".tolist()", lambda: {"return_aux": AuxRequest(weights=torch.zeros(1))}),
    "70-aux slice": (DTypeError, "slice(None, 0.5, None)", lambda: {"return_aux": AuxRequest(weights=slice(0.5))}),
    "70-aux step": (ValueOutOfRange, "step", lambda: {"return_aux": AuxRequest(weights=slice(0, 2, 0))}),
    "70-top_k 0": (ValueOutOfRange, "`top_k` | 1..S | S = 6", lambda: {"return_aux": AuxRequest(top_k=0)}),
    "70-top_k 7": (ValueOutOfRange, "`top_k` | got 7 for S = 6", lambda: {"return_aux": AuxRequest(top_k=7)}),
    "70-top_k bool": (DTypeError, "`top_k` | True", lambda: {"return_aux": AuxRequest(top_k=True)}),
    "70-pattern text": (DTypeError, "`pattern` | 'causal()' | qkv.parse", lambda: {"pattern": "causal()"}),
    "70-pattern bool": (DTypeError, "[5, 6] bool | keep=", lambda: {"pattern": some(torch.bool)}),
    "70-pattern float": (DTypeError, "[5, 6] float32 | say bias=", lambda: {"pattern": torch.ones(5, 6)}),
    "70-pattern uncalled": (DTypeError, "`pattern` | call the constructor | where(fn)", lambda: {"pattern": causal}),
    "70-pattern int": (DTypeError, "`pattern` | of type int | window(255)", lambda: {"pattern": 128}),
}


@pytest.mark.usefixtures("place")
@pytest.mark.parametrize("error, parts, make", BAD.values(), ids=BAD)
def test_bad_input_is_one_error(error, parts, make):
    refused(error, *parts.split(" | "), **make())


@pytest.mark.parametrize(
    "make, kind, remedy",
    [
        (lambda: torch.nested.nested_tensor([torch.zeros(2, 3)], layout=torch.jagged), "nested tensor", "key_lengths"),
        (lambda: torch.zeros(K).to_sparse(), "sparse tensor (sparse_coo)", ".to_dense()"),
        (lambda: torch.quantize_per_tensor(torch.zeros(K), 0.1, 0, torch.qint8), "quantised", ".dequantize()"),
    ],
    ids=["17-nested", "17-sparse", "17-quantised"],
)
@pytest.mark.filterwarnings("ignore:.*:UserWarning", "ignore:.*:DeprecationWarning")
def test_tensors_of_other_kinds_are_unsupported(make, kind, remedy):
    refused(UnsupportedError, "`key`", kind, remedy, k=make())


def test_rows_27_39_masks_of_other_sizes():
    for shape in ((5, 7), (6, 6), (2, 2, 5, 6), (3, 1, 5, 6)):
        with pytest.raises((MaskError, ShapeError), match="keep"):
            call(pattern=mask(keep=torch.rand(shape) > 0.5))


@pytest.mark.parametrize("name", ["k", "v", "bias", "sinks", "slopes", "table"])
def test_row_16_31_tensors_on_two_devices(name):
    elsewhere = {
        "k": lambda: {"k": torch.zeros(K, device="meta")},
        "v": lambda: {"v": torch.zeros(V, device="meta")},
        "bias": lambda: {"bias": torch.zeros(5, 6, device="meta")},
        "sinks": lambda: {"sinks": torch.zeros(4, device="meta")},
        "slopes": lambda: {"bias": alibi(torch.zeros(4, device="meta"))},
        "table": lambda: {"bias": relative(torch.zeros(4, 3, device="meta"))},
    }[name]
    refused(DeviceError, "device of `query`", "got meta beside cpu", ".to('cpu')", **elsewhere())


def test_row_11_more_elements_than_an_index_counts():
    def meta(*shape):
        return torch.zeros(1, device="meta").expand(*shape)

    with pytest.raises(SizeLimit, match=r"2\^63; got B = 1, H = 1, L = 8589934592, D = 1, V = 1073741824; split"):
        ask(meta(1, 1, 2**33, 1), meta(1, 1, 2, 1), meta(1, 1, 2, 2**30))
    assert ask(meta(1, 1, 2**32, 1), meta(1, 1, 2, 1), meta(1, 1, 2, 2**30)).problem.queries == 2**32


@pytest.mark.parametrize("bad", [NAN, INF])
@pytest.mark.parametrize("shape", [(5, 6), (2, 1, 5, 6), ()])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_rows_29_30_bias_that_is_not_finite_above(shape, bad, dtype):
    bias = torch.zeros(shape, dtype=dtype)
    bias.view(-1)[-1] = bad
    refused(ValueOutOfRange, "`bias`", "no NaN and no +inf", f"got {bad}", "-inf hides a key", bias=bias)
    refused(ValueOutOfRange, f"got {bad}", bias=bias.view(-1)[-1:].expand(5, 6))


def test_offsets_whose_numbers_cannot_be_read_are_refused():
    with torch.device("meta"):
        refused(UnsupportedError, "cannot be read", "pass ints", query_offset=torch.zeros(2, dtype=torch.int64))


def test_an_error_names_its_call_and_cuts_a_long_pattern():
    q, k, v = torch.zeros(Q), torch.zeros(K), torch.zeros(2, 2, 7, 3)
    long = causal()
    for n in range(40):
        long = long & prefix(n)
    for pattern, shown in ((causal(), "causal()"), (None, "None"), (long, f"{str(long)[:79]}…"), ("x", "str")):
        with pytest.raises(ShapeError) as caught, in_call(q, k, v, pattern):
            ask(q, k, v)
        end = f"value [2, 2, 7, 3] float32 cpu, pattern {shown})"
        assert str(caught.value).endswith(
            f"(in a call with query [2, 4, 5, 8] float32 cpu, key [2, 2, 6, 8] float32 cpu, {end}"
        )


def test_broadcasting_refuses_what_torch_cannot_expand():
    refused(ShapeError, "batch size B", "B = 3, 2, 2", q=(3, 4, 5, 8), broadcast=True)
    refused(ShapeError, "at least 2 axes", q=(8,), broadcast=True)
    assert call(k=(1, 2, 6, 8), broadcast=True).problem.batch == 2
    refused(ShapeError, "batch size B", k=(1, 2, 6, 8))


def test_row_27_bias_of_calls_with_more_axes():
    five = {"q": (3, 2, 4, 5, 8), "k": (3, 2, 2, 6, 8), "v": (3, 2, 2, 6, 3)}
    refused(ShapeError, "[3, 2, 4, 5, 6]", "[2, 4, 5, 6]", **five, bias=torch.zeros(2, 4, 5, 6))
    refused(ShapeError, "[3, 2, 4, 5, 6]", "[3, 3, 4, 5, 6]", **five, bias=torch.zeros(3, 3, 4, 5, 6))
