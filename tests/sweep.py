"""Cases of the sweeps, each made from one integer and the name of its table of axes: `case_of(n)` rebuilds tensors,
pattern, truth and all. `python tests/replay.py n` runs one and prints its errors.
"""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

import budgets
import oracles
import qkv
from sweep_patterns import GRIDS, INSIDE, Sizes, simple_pattern, tensor_pattern

COUNT = 480
SEED = 20260

SHARED: dict[str, tuple[Any, ...]] = {
    "batch": (1, 2, 3, 1, 2, 3, 2, 0),
    "heads": ((1, 1), (4, 4), (4, 2), (4, 1), (6, 3)),
    "queries": (1, 2, 7, 31, 32, 33, 63, 64, 65, 127, 129, 0),
    "keys": ("same", "same", "more", "fewer", "double", "one", "none", "other"),
    "width": (1, 3, 8, 16, 17, 40, 64, 128),
    "value_width": ("same", "half", "wider"),
    "dtype": (torch.float64, torch.float32, torch.bfloat16, torch.float16),
    "pattern": (
        "none", "full", "causal", "top_left", "window", "two_sided", "sliding_window", "dilated", "dilated_both",
        "strided", "fixed", "fixed_wide", "global", "global_list", "prefix_lm", "random_blocks", "random_ahead",
        "block_local", "documents", "documents_batch", "cu_seqlens", "key_lengths", "key_padding", "mask", "mask_4d",
        "mask_bls", "mask_hls", "blocks", "blocks_heads", "neighborhood", "windows2d", "windows2d_shifted",
        "axial_width", "axial_height", "where", "longformer", "bigbird", "sparse_transformer", "per_head",
        "sinks_and_window", "minus", "inverse", "strided_documents", "empty_rows", "union", "nothing_for_some",
    ),
    "bias": ("none", "none", "full", "row", "key", "scalar", "alibi", "relative", "hiding", "double"),
    "softcap": (None, None, 5.0, 0.5),
    "sinks": (False, False, True),
    "scale": (None, None, 0.0, -0.4, 0.3),
    "dropout": (0.0, 0.0, 0.1, 0.9),
    "strides": ("dense", "heads_transposed", "fused", "step", "expanded", "offset", "last_axis", "blhd"),
    "inputs": ("normal", "outliers", "ties", "one_hot", "constant", "low_rank", "tiny"),
    "offset": (None, None, "zero", "middle", "batch"),
    "weights": (False, True, "mean", "rows", "top_k", "row"),
}  # fmt: skip

# What the native core takes apart: widths by lanes, lengths by tiles of 64, memory by strides, work by threads.
NATIVE = SHARED | {
    "heads": ((1, 1), (2, 2), (4, 4), (4, 2), (4, 1), (6, 3)),
    "queries": (1, 2, 7, 31, 32, 33, 63, 64, 64, 65, 100, 127, 128, 129, 190, 257, 0),
    "keys": ("same", "same", "same", "more", "fewer", "double", "one", "none", "other"),
    "width": (1, 2, 3, 5, 8, 8, 16, 17, 32, 40, 64, 64, 80, 96, 128, 192, 256),
    "dtype": (torch.float64, torch.float32, torch.float32),
    "bias": (
        *("none",) * 6, "full", "row", "key", "scalar", "alibi", "alibi_double", "relative", "relative_wide", "hiding",
        "double", "single", "batch_rows", "heads_keys", "heads", "turned", "expanded",
    ),
    "strides": (*SHARED["strides"], "heads_last"),
    "inputs": (*SHARED["inputs"], "normal", "normal", "uniform", "denormal"),
    "dropout": (0.0, 0.0, 0.0, 0.0, 0.1, 0.9),
    "weights": (*(False,) * 20, True, "row"),
    "threads": (1, 2, 3),
    "wanted": ("", "", "", "", "q", "k", "v", "k v", "q v", "bias", "sinks", "q bias sinks"),
}  # fmt: skip

# Several tiles one after another: long runs, and sums that are split among query tiles.
TALL = NATIVE | {
    "batch": (1,),
    "heads": ((1, 1), (2, 1)),
    "queries": (449, 577, 640, 1000),
    "keys": ("same", "same", "more", "other"),
    "width": (8, 16, 40),
    "weights": (False,),
}

# The same of 16 bits. Numbers below the least normal one of their type stand for those that units of dot products lose.
SIXTEEN = {
    "dtype": (torch.bfloat16, torch.float16),
    "inputs": (*NATIVE["inputs"], "subnormal"),
}
NARROW, NARROW_TALL = NATIVE | SIXTEEN, TALL | SIXTEEN
TABLES = {"shared": SHARED, "native": NATIVE, "tall": TALL, "narrow": NARROW, "narrow_tall": NARROW_TALL}
# Pairs: batch, heads, then keys shrink to it.
LARGEST = dict.fromkeys(TABLES, 1 << 40) | {"native": 24_000, "narrow": 24_000}


def candidate(number: int, table: str = "shared") -> dict[str, int]:
    """The choice of each axis, as an index, from one integer."""
    draw = random.Random(number)
    return {name: draw.randrange(len(values)) for name, values in TABLES[table].items()}


def pairs_of(number: int, table: str) -> set[tuple[int, int, int, int]]:
    """The pairs of axis values of a case, as (axis, axis, value, value)."""
    chosen = candidate(number, table)
    c = [values.index(values[chosen[name]]) for name, values in TABLES[table].items()]
    return {(a, b, c[a], c[b]) for a, b in itertools.combinations(range(len(c)), 2)}


def count_pairs(table: str) -> int:
    sizes = [len(set(values)) for values in TABLES[table].values()]
    return sum(a * b for a, b in itertools.combinations(sizes, 2))


@functools.cache
def covering(count: int, seed: int = SEED, tries: int = 24) -> tuple[tuple[int, ...], float]:
    """Integers of `count` cases, chosen greedily so that pairs of axis values meet, and the share of pairs that do."""
    met: set[tuple[int, int, int, int]] = set()
    chosen = []
    for step in range(count):
        numbers = range(seed + step * tries, seed + (step + 1) * tries)
        fresh = {number: pairs_of(number, "shared") - met for number in numbers}
        chosen.append(max(numbers, key=lambda number, fresh=fresh: len(fresh[number])))
        met |= fresh[chosen[-1]]
    return tuple(chosen), len(met) / count_pairs("shared")


def shape_of(pick: dict[str, Any], draw: random.Random, largest: int) -> tuple[Sizes, int, int | list[int] | None]:
    """Sizes that fit the pattern, the heads of keys, and the query offset."""
    kind, batch, queries, (heads, groups) = pick["pattern"], pick["batch"], pick["queries"], pick["heads"]
    if kind in GRIDS:
        queries = {"windows2d": 24, "windows2d_shifted": 54}.get(kind, 30)
        return Sizes(batch, heads, queries, queries), groups, None
    keys = {
        "same": queries,
        "more": queries + 1,
        "fewer": max(queries - 1, 0),
        "double": 2 * queries,
        "one": 1,
        "none": 0,
        "other": 50,
    }[pick["keys"]]
    if kind in INSIDE:
        keys = max(keys, 1)
        queries = min(queries, keys)
    if batch * heads * queries * keys > largest:
        batch = 1
    if heads * queries * keys > largest:
        heads, groups = heads // groups, 1
    if heads * queries * keys > 3 * largest and kind not in INSIDE:
        keys = 50
    room = max(keys - queries, 0)
    offsets = {
        None: None,
        "zero": 0,
        "middle": room // 2 if kind in INSIDE else 3,
        "batch": [draw.randrange(room + 1) for _ in range(batch)] if batch else None,
    }
    offset = offsets[pick["offset"]] if kind != "top_left" else None
    return Sizes(batch, heads, queries, keys), groups, offset


def numbers(kind: str, shape: Sequence[int], generator: torch.Generator, dtype: torch.dtype = torch.float64) -> Tensor:
    """Float64 inputs of a kind, which the caller rounds to `dtype`."""
    x = torch.randn(*shape, generator=generator, dtype=torch.float64)
    if kind == "outliers" and x.shape[-1]:
        x[..., 0] *= 8
    elif kind == "ties":
        x = x.sign()
    elif kind == "one_hot":
        x = torch.nn.functional.one_hot(x.argmax(-1), shape[-1]).double() * 4 + x * 0.01 if x.numel() else x
    elif kind == "constant":
        x = torch.full_like(x, 0.75)
    elif kind == "low_rank":
        x = x[..., :1] * torch.linspace(-1, 1, shape[-1], dtype=torch.float64) if x.shape[-1] else x
    elif kind == "tiny":
        x = x * 1e-3
    elif kind == "uniform":
        x = x.abs() % 1
    elif kind == "denormal":  # in float32
        x = x * 1e-41
    elif kind == "subnormal":
        x = x * torch.finfo(dtype).tiny / 4
    return x


def laid_out(x: Tensor, form: str) -> Tensor:
    """The same numbers in another memory layout (expanded: the first head's numbers for all heads)."""
    if form in ("heads_transposed", "blhd"):
        return x.transpose(1, 2).contiguous().transpose(1, 2)
    if form == "fused":
        return torch.stack([x, x + 1, x - 1], -2)[..., 0, :]
    if form == "step":
        wide = torch.full((*x.shape[:2], 2 * x.shape[2], x.shape[3]), float("nan"), dtype=x.dtype)
        wide[:, :, ::2] = x
        return wide[:, :, ::2]
    if form == "expanded":
        return x[:, :1].contiguous().expand(x.shape)
    if form == "offset":
        return torch.cat([x.new_full((1,), float("nan")), x.flatten()])[1:].view(x.shape)
    if form == "heads_last":
        return x.movedim(1, 3).contiguous().movedim(3, 1)
    return x.transpose(2, 3).contiguous().transpose(2, 3) if form == "last_axis" else x


HALO = 67  # numbers on each side; odd, so that nothing is aligned by chance


def haloed(x: Tensor) -> Tensor:
    """The same numbers with the same strides inside a buffer of NaN."""
    if not x.numel():
        return x
    span = 1 + sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    room = x.new_full((span + 2 * HALO,), float("nan"))
    room[HALO : HALO + span] = x.as_strided((span,), (1,))
    return room.as_strided(x.shape, x.stride(), HALO)


class Example(NamedTuple):
    """One case, ready to ask."""

    pick: dict[str, Any]
    size: Sizes
    tensors: list[Tensor]  # q, k, v
    pattern: Any
    options: dict[str, Any]
    bias: tuple[str, Tensor] | None  # the leaf that can want a gradient
    call: budgets.Call
    offset: int | list[int] | None


def bias_leaf(kind: str, size: Sizes, dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    batch, heads, queries, keys = size
    shapes = {
        "full": tuple(size), "row": (1, heads, queries, 1), "key": (batch, 1, 1, keys), "scalar": (1, 1, 1, 1),
        "alibi": (heads,), "alibi_double": (heads,), "relative": (heads, 7), "relative_wide": (heads, 141),
        "batch_rows": (batch, 1, queries, 1),
        "heads_keys": (1, heads, 1, keys), "heads": (1, heads, 1, 1), "expanded": (1, heads, 1, keys),
    }  # fmt: skip
    x = torch.randn(*shapes.get(kind, (queries, keys)), generator=generator, dtype=torch.float64)
    if kind == "hiding":
        x = torch.where(x > 0.5, -oracles.INF, x)
    if kind == "turned":
        x = x.mT.contiguous().mT
    return x.to({"double": torch.float64, "alibi_double": torch.float64, "single": torch.float32}.get(kind, dtype))


def dense_bias(kind: str, leaf: Tensor, size: Sizes, offset: int | list[int] | None) -> Tensor:
    if kind.startswith("alibi"):
        return oracles.alibi(leaf, size, offset)
    return oracles.relative(leaf, size, offset) if kind.startswith("relative") else leaf


def bias_value(kind: str, leaf: Tensor, size: Sizes) -> Any:
    """What the call takes as `bias`."""
    if kind == "expanded":
        return leaf.expand(size)
    return {"alibi": qkv.alibi, "relative": qkv.relative}.get(kind.split("_", maxsplit=1)[0], lambda x: x)(leaf)


def case_of(number: int, table: str = "shared", dtype: torch.dtype | None = None, bare: bool = False) -> Example:
    """Rebuild a case. dtype: another type, such as float64 where first-order bounds hold; bare: what torch can do."""
    pick = {name: TABLES[table][name][index] for name, index in candidate(number, table).items()}
    if bare:
        pick |= {"softcap": None, "sinks": False, "dropout": 0.0}
    draw, generator = random.Random(number + 1), torch.Generator().manual_seed(number)
    size, groups, offset = shape_of(pick, draw, LARGEST[table])
    pattern, rule = simple_pattern(pick["pattern"], draw, size) or tensor_pattern(pick["pattern"], draw, size)
    dtype = dtype or pick["dtype"]
    width = pick["width"]
    value = min({"same": width, "half": max(width // 2, 1), "wider": width + 8}[pick["value_width"]], 256)
    shapes = [
        (size.batch, size.heads, size.queries, width),
        (size.batch, groups, size.keys, width),
        (size.batch, groups, size.keys, value),
    ]
    placed = haloed if table != "shared" else lambda x: x
    tensors = [
        placed(laid_out(numbers(pick["inputs"], s, generator, dtype).to(dtype), pick["strides"])) for s in shapes
    ]
    scale = width**-0.5 if pick["scale"] is None else pick["scale"]
    options: dict[str, Any] = {
        "pattern": pattern,
        "scale": pick["scale"],
        "softcap": pick["softcap"],
        "query_offset": offset,
    }
    absolute = 0 if pick["pattern"] == "top_left" else offset
    leaf, dense = None, None
    if pick["bias"] != "none":
        leaf = placed(bias_leaf(pick["bias"], size, dtype, generator))
        dense = dense_bias(pick["bias"], leaf, size, absolute)
    sinks = None
    if pick["sinks"]:
        sinks = torch.randn(size.heads, generator=generator, dtype=torch.float64).to(dtype)
        sinks = placed(torch.stack([sinks, sinks + 1], -1)[:, 0] if pick["strides"] == "fused" else sinks)
    p = pick["dropout"]
    keep = oracles.dropout_keep(oracles.drawn_seed(number), p, size, absolute) if p else None
    drop_scale = 65536 / (65536 - oracles.threshold(p))
    call = budgets.Call(
        *tensors, oracles.dense(rule, size, absolute), scale, pick["softcap"], dense, sinks, keep, drop_scale
    )
    bias = None if leaf is None else (pick["bias"], leaf)
    return Example(pick, size, tensors, pattern, options, bias, call, absolute)


def request(pick: dict[str, Any], size: Sizes) -> qkv.AuxRequest:
    rows = {"rows": slice(0, size.queries, 2), "row": 0 if size.queries else False}.get(
        pick["weights"], pick["weights"]
    )
    top = min(3, size.keys) if pick["weights"] == "top_k" else None
    return qkv.AuxRequest(
        lse=True, max_scores=True, entropy=True, weights=False if top is not None else rows, top_k=top or None
    )
