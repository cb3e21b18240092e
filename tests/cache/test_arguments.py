"""What a cache refuses, in three parts, and that a refusal leaves it as it was."""

from __future__ import annotations

import pytest
import torch

import qkv
from qkv.errors import DTypeError, LayoutError, QkvError, ShapeError, UnknownName, UnsupportedError, ValueOutOfRange

B, H, G, D, V = 2, 4, 2, 8, 3
CAUSAL = qkv.causal() & qkv.window(70)


def make(kind):
    if kind == "contiguous":
        return qkv.KVCache(B, G, 100, D, V)
    if kind == "paged":
        return qkv.PagedKVCache(B, G, 5, D, V)
    return qkv.RollingKVCache.for_pattern(CAUSAL, B, G, D, V, max_length=300)


EACH = pytest.mark.parametrize("kind", ["contiguous", "paged", "rolling"])


def rows(n, heads=G, width=D, batch=B, **options):
    return torch.ones(batch, heads, n, width, **options)


def chunk(n):
    return rows(n, H), rows(n), rows(n, width=V)


def refused(error, parts, call):
    """The one error of a call: of that class exactly, in three parts, with all of these in it."""
    with pytest.raises(QkvError) as caught:
        call()
    assert type(caught.value) is error, caught.value
    text = str(caught.value)
    assert text.count("; ") == 2, text
    for part in parts:
        assert part in text, f"{part!r} is not in {text!r}"


def state(cache):
    positions = cache.key_positions
    keys, values = (torch.where(positions[:, None, :, None] >= 0, x, 0.0) for x in (cache.keys, cache.values))
    return cache.lengths, keys, values, positions, cache.nbytes


def same(a, b):
    return all(torch.equal(x, y) if isinstance(x, torch.Tensor) else x == y for x, y in zip(a, b, strict=True))


ATTEND = {  # what differs from a good call, and the error
    "key without heads": ({"key": torch.ones(B, 1, D)}, ShapeError, ["`key` must have 4 axes", "(B, G, n, D)"]),
    "no tensor": ({"value": 3}, DTypeError, ["`value` must be a torch.Tensor"]),
    "key dtype": ({"key": rows(1).double()}, DTypeError, ["`key`", "float32", "got float64"]),
    "value dtype": ({"value": rows(1, width=V).half()}, DTypeError, ["`value`", "got float16"]),
    "batch": ({"key": rows(1, batch=3)}, ShapeError, ["`key`", "B = 3, not 2"]),
    "heads": ({"key": rows(1, 4)}, ShapeError, ["G = 4, not 2"]),
    "width": ({"key": rows(1, width=5)}, ShapeError, ["D = 5, not 8"]),
    "value width": ({"value": rows(1)}, ShapeError, ["`value`", "V = 8, not 3"]),
    "value rows": ({"value": rows(2, width=V)}, ShapeError, ["`value`", "n = 2, not 1"]),
    "layout": (
        {"key": rows(5).transpose(1, 2), "value": rows(5, width=V).transpose(1, 2), "query": rows(5, H)},
        ShapeError,
        ["say layout='BLHD'"],
    ),
    "unknown layout": ({"layout": "BDLH"}, UnknownName, ["`layout`"]),
    "more queries": ({"query": rows(2, H)}, ShapeError, ["as many rows as `key`", "got 2 queries for 1 keys"]),
    "query without heads": ({"query": torch.ones(B, 1, D)}, ShapeError, ["`query`", "4 axes"]),
    "query heads": ({"query": rows(1, 3)}, ShapeError, ["multiple of the key and value heads"]),
    "query width": ({"query": rows(1, H, 5)}, ShapeError, ["same width D"]),
    "query batch": ({"query": rows(1, H, batch=1)}, ShapeError, ["same batch size B"]),
    "query dtype": ({"query": rows(1, H).double()}, DTypeError, ["one dtype"]),
    "lengths": ({"lengths": [1, 2]}, ValueOutOfRange, ["`lengths` must lie in 0..n = 1", "sequence 1 has 2"]),
    "negative lengths": ({"lengths": [-1, 0]}, ValueOutOfRange, ["sequence 0 has -1"]),
    "how many lengths": ({"lengths": [1]}, ShapeError, ["one number a sequence", "got 1 for B = 2"]),
    "kind of lengths": ({"lengths": torch.ones(2)}, DTypeError, ["`lengths` must be", "float32"]),
    "lengths of text": ({"lengths": "11"}, DTypeError, ["`lengths` must be", "'11'"]),
    "pattern": ({"pattern": "causal()"}, DTypeError, ["`pattern` must be a Pattern"]),
    "sizes of the pattern": (
        {"pattern": qkv.documents([0, 0, 1])},
        ShapeError,
        ["`documents` must cover exactly the S=33 keys"],
    ),
    "alignment": (
        {"pattern": qkv.causal(align="top_left")},
        LayoutError,
        ["after the keys that it holds", "'top_left' where the cache holds 32", "leave `align` out"],
    ),
    "bias": ({"bias": torch.zeros(1, 40)}, ShapeError, ["`bias` must broadcast"]),
    "sinks": ({"sinks": torch.zeros(3)}, ShapeError, ["`sinks` must be (H,)"]),
    "scale": ({"scale": float("nan")}, ValueOutOfRange, ["`scale` must be finite"]),
    "softcap": ({"softcap": -1.0}, ValueOutOfRange, ["`softcap`"]),
    "backend": ({"backend": "cuda"}, UnknownName, ["`backend`"]),
    "backend that cannot": ({"backend": "sdpa", "softcap": 2.0}, UnsupportedError, ["must be able to answer"]),
    "aux": ({"return_aux": True}, DTypeError, ["`return_aux`"]),
}


@EACH
@pytest.mark.parametrize("name", ATTEND)
def test_attend_refuses_and_changes_nothing(kind, name):
    change, error, parts = ATTEND[name]
    cache = make(kind)
    cache.append(*chunk(32)[1:])
    before = state(cache)
    query, key, value = chunk(1)
    given = {"query": query, "key": key, "value": value, "pattern": CAUSAL} | change
    refused(error, parts, lambda: cache.attend(**given))
    assert same(before, state(cache))
    assert cache.attend(query, key, value, pattern=CAUSAL).shape == (B, H, 1, V)


@EACH
def test_append_refuses(kind):
    cache = make(kind)
    refused(ShapeError, ["D = 5, not 8"], lambda: cache.append(rows(1, width=5), rows(1, width=V)))
    refused(ValueOutOfRange, ["0..n = 1"], lambda: cache.append(rows(1), rows(1, width=V), lengths=[0, 2]))
    assert cache.lengths == (0, 0)


@EACH
def test_truncate_refuses(kind):
    cache = make(kind)
    cache.append(rows(30), rows(30, width=V), lengths=[30, 20])
    refused(ValueOutOfRange, ["`truncate`", "got 25 for sequence 1 of length 20"], lambda: cache.truncate(25))
    refused(ValueOutOfRange, ["got -1"], lambda: cache.truncate([-1, 0]))
    refused(ShapeError, ["one number a sequence"], lambda: cache.truncate([1, 2, 3]))
    refused(DTypeError, ["`n` must be"], lambda: cache.truncate(2.0))
    assert cache.lengths == (30, 20)


@EACH
def test_reorder_refuses(kind):
    cache = make(kind)
    refused(ValueOutOfRange, ["0..B - 1 = 1", "entry 1 is 2"], lambda: cache.reorder([0, 2]))
    refused(ValueOutOfRange, ["entry 0 is -1"], lambda: cache.reorder([-1]))
    refused(DTypeError, ["`index` must be"], lambda: cache.reorder(torch.zeros(2)))
    refused(DTypeError, ["`index` must be"], lambda: cache.reorder(1))


FULL = {
    "contiguous": (90, ["fit into max_length = 100", "sequence 0 of length 90 would have 101"]),
    "paged": (90, ["fit into the pool", "2 more are needed where 1 of 5 are free"]),
    "rolling": (290, ["beyond max_length = 300", "sequence 0 would have 301"]),
}


@EACH
@pytest.mark.parametrize("call", ["append", "attend"])
def test_a_full_cache_refuses_and_changes_nothing(kind, call):
    length, parts = FULL[kind]
    cache = make(kind)
    cache.append(*chunk(length)[1:])
    before, grow = state(cache), chunk(39 if kind == "paged" else 11)
    given = {"attend": lambda: cache.attend(*grow, pattern=CAUSAL), "append": lambda: cache.append(*grow[1:])}
    refused(ValueOutOfRange, parts, given[call])
    assert same(before, state(cache))


@EACH
def test_a_step_like_the_one_before_looks_at_the_room_too(kind):
    cache, pattern = make(kind), CAUSAL
    last = {"contiguous": 100, "paged": 128, "rolling": 300}[kind]
    if kind == "paged":
        cache = qkv.PagedKVCache(B, G, 4, D, V)
    cache.append(*chunk(last - 3)[1:])
    for _ in range(3):
        cache.attend(*chunk(1), pattern=pattern)
    before = state(cache)
    refused(ValueOutOfRange, FULL[kind][1][0].split(" = ")[:1], lambda: cache.attend(*chunk(1), pattern=pattern))
    assert same(before, state(cache))


def test_sizes_of_a_new_cache():
    refused(ValueOutOfRange, ["`max_length` must be at least 1", "got 0"], lambda: qkv.KVCache(1, 1, 0, 8))
    refused(ValueOutOfRange, ["`heads`"], lambda: qkv.KVCache(1, 0, 5, 8))
    refused(DTypeError, ["`batch` must be an int", "got 1.5"], lambda: qkv.KVCache(1.5, 1, 5, 8))
    refused(DTypeError, ["`dtype` must be"], lambda: qkv.KVCache(1, 1, 5, 8, dtype=torch.int8))
    refused(
        ValueOutOfRange, ["`page_size` must be a multiple of 16"], lambda: qkv.PagedKVCache(1, 1, 5, 8, page_size=8)
    )
    refused(ValueOutOfRange, ["`pages`"], lambda: qkv.PagedKVCache(1, 1, 0, 8))
    refused(DTypeError, ["`pattern`"], lambda: qkv.RollingKVCache.for_pattern("causal()", 1, 1, 8))
    small = qkv.KVCache(0, 1, 5, 8)
    assert small.attend(*(torch.ones(0, 1, 1, 8),) * 3).shape == (0, 1, 1, 8)


@EACH
def test_the_error_of_a_call_says_which_call(kind):
    with pytest.raises(ValueOutOfRange, match=r"\(in a call with query \[2, 4, 1, 8\] float32 cpu, .* pattern causal"):
        make(kind).attend(*chunk(1), pattern=CAUSAL, scale=float("inf"))
