"""Cases of the covering sweep, each made from one integer: `case_of(n)` rebuilds it, tensors, pattern, truth and all.

A pattern is always built twice, as the package's object and as the oracle's own rule.
"""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

import budgets
import oracles
import qkv

COUNT = 480
SEED = 20260
DEVICES = ("cpu", *(["cuda"] if torch.cuda.is_available() else []))

AXES: dict[str, tuple[Any, ...]] = {
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


def candidate(number: int) -> dict[str, int]:
    """The choice of each axis, as an index, from one integer."""
    draw = random.Random(number)
    return {name: draw.randrange(len(values)) for name, values in AXES.items()}


@functools.cache
def covering(count: int, seed: int = SEED, tries: int = 24) -> tuple[tuple[int, ...], float]:
    """Integers of `count` cases, chosen greedily so that pairs of axis values meet, and the share of pairs that do."""
    names = list(AXES)
    pairs = list(itertools.combinations(range(len(names)), 2))
    met: set[tuple[int, int, int, int]] = set()
    chosen = []
    for step in range(count):
        best, gain = -1, set()
        for number in range(seed + step * tries, seed + (step + 1) * tries):
            c = [AXES[name].index(AXES[name][at]) for name, at in candidate(number).items()]
            new = {(a, b, c[a], c[b]) for a, b in pairs} - met
            if best < 0 or len(new) > len(gain):
                best, gain = number, new
        chosen.append(best)
        met |= gain
    total = sum(len(set(AXES[names[a]])) * len(set(AXES[names[b]])) for a, b in pairs)
    return tuple(chosen), len(met) / total


# Patterns: the package's and the oracle's own, side by side


class Sizes(NamedTuple):
    batch: int
    heads: int
    queries: int
    keys: int


Pattern = tuple[Any, oracles.Rule]
GRID = (5, 6)
# Patterns whose rule needs 0 <= i < S.
INSIDE = {"documents", "documents_batch", "cu_seqlens", "blocks", "blocks_heads", "strided_documents"}
INSIDE |= {"random_blocks", "random_ahead", "bigbird"}
GRIDS = {"neighborhood", "windows2d", "windows2d_shifted", "axial_width", "axial_height"}


def bits(draw: random.Random, *shape: int, share: float = 0.5) -> Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(draw.randrange(1 << 30))) < share


def runs(draw: random.Random, keys: int) -> list[int]:
    """Boundaries of documents over all keys."""
    return sorted({0, keys, *(draw.randrange(keys + 1) for _ in range(3))})


def ids_of(draw: random.Random, keys: int) -> list[int]:
    return (
        sorted(draw.randrange(4) for _ in range(keys))
        if draw.random() < 0.5
        else [draw.randrange(4) for _ in range(keys)]
    )


def simple_pattern(kind: str, draw: random.Random, size: Sizes) -> Pattern | None:
    """Patterns that know nothing of the tensors."""
    n, m, block = draw.choice([0, 1, 3, 17, 40]), draw.choice([0, 2, 9]), draw.choice([1, 2, 5, 16, 48])
    stride, dilation, seed = draw.choice([1, 2, 5, 8, 33]), draw.choice([1, 2, 3, 7]), draw.randrange(1 << 40)
    tokens = sorted({draw.randrange(max(size.keys, 1)) for _ in range(3)})
    causal, window = oracles.causal(), oracles.window(n)
    table: dict[str, Callable[[], Pattern]] = {
        "none": lambda: (None, oracles.full()),
        "full": lambda: (qkv.full(), oracles.full()),
        "causal": lambda: (qkv.causal(), causal),
        "top_left": lambda: (qkv.causal(align="top_left"), causal),
        "window": lambda: (qkv.window(n), window),
        "two_sided": lambda: (qkv.window(n, m), oracles.window(n, m)),
        "sliding_window": lambda: (qkv.sliding_window(n + 1), oracles.sliding_window(n + 1)),
        "dilated": lambda: (qkv.dilated(n, dilation=dilation), oracles.dilated(n, dilation=dilation)),
        "dilated_both": lambda: (qkv.dilated(n, m, dilation=dilation), oracles.dilated(n, m, dilation=dilation)),
        "strided": lambda: (qkv.strided(stride), oracles.strided(stride)),
        "fixed": lambda: (qkv.fixed(block), oracles.fixed(block)),
        "fixed_wide": lambda: (qkv.fixed(block + 2, 2), oracles.fixed(block + 2, 2)),
        "global": lambda: (
            qkv.window(2) | qkv.global_tokens(n),
            oracles.either(oracles.window(2), oracles.global_tokens(n)),
        ),
        "global_list": lambda: (qkv.global_tokens(tokens), oracles.global_tokens(tokens)),
        "prefix_lm": lambda: (qkv.causal() | qkv.prefix(n), oracles.either(causal, oracles.prefix(n))),
        "random_blocks": lambda: (qkv.random_blocks(2, block, seed), oracles.random_blocks(2, block, seed)),
        "random_ahead": lambda: (
            qkv.random_blocks(2, block, seed, ahead=True),
            oracles.random_blocks(2, block, seed, ahead=True),
        ),
        "block_local": lambda: (qkv.block_local(block), oracles.block_local(block)),
        "longformer": lambda: (qkv.longformer(m, tokens), oracles.longformer(m, tokens)),
        "bigbird": lambda: (
            qkv.bigbird(3, block, 1, seed, block_size=block),
            oracles.bigbird(3, block, 1, seed, block_size=block),
        ),
        "sparse_transformer": lambda: (qkv.sparse_transformer(stride), oracles.sparse_transformer(stride)),
        "sinks_and_window": lambda: (
            qkv.causal() & (qkv.window(n) | qkv.prefix(4)),
            oracles.both(causal, oracles.either(window, oracles.prefix(4))),
        ),
        "minus": lambda: (
            qkv.strided(stride) - qkv.window(m),
            oracles.both(oracles.strided(stride), oracles.opposite(oracles.window(m))),
        ),
        "inverse": lambda: (~qkv.window(n, m), oracles.opposite(oracles.window(n, m))),
        "empty_rows": lambda: (qkv.causal() - qkv.window(n), oracles.both(causal, oracles.opposite(window))),
        "union": lambda: (
            qkv.window(m) | qkv.dilated(n, dilation=dilation) | qkv.block_local(block),
            oracles.either(oracles.window(m), oracles.dilated(n, dilation=dilation), oracles.block_local(block)),
        ),
        "neighborhood": lambda: (qkv.neighborhood(GRID, 3), oracles.neighborhood(GRID, 3)),
        "windows2d": lambda: (qkv.windows2d((4, 6), 2), oracles.windows2d((4, 6), 2)),
        "windows2d_shifted": lambda: (qkv.windows2d((6, 9), 3, 1), oracles.windows2d((6, 9), 3, 1)),
        "axial_width": lambda: (qkv.axial(GRID, along="width"), oracles.axial(GRID, "width")),
        "axial_height": lambda: (qkv.axial(GRID, along="height"), oracles.axial(GRID, "height")),
        "where": lambda: (
            qkv.where(lambda b, h, i, j: (i + 2 * j + h) % 3 == 0),
            lambda p: (p.i + 2 * p.j + p.h) % 3 == 0,
        ),
        "strided_documents": lambda: strided_documents(stride, ids_of(draw, size.keys)),
    }  # fmt: skip
    return table[kind]() if kind in table else None


def strided_documents(stride: int, ids: list[int]) -> Pattern:
    return qkv.strided(stride) & qkv.documents(ids), oracles.both(
        oracles.strided(stride), oracles.documents(torch.tensor(ids))
    )


def tensor_pattern(kind: str, draw: random.Random, size: Sizes) -> Pattern:
    """Patterns that hold tensors of the call's sizes."""
    batch, heads, queries, keys = size
    block = draw.choice([1, 4, 16, 30])
    if kind in ("documents", "documents_batch"):
        ids = torch.tensor([ids_of(draw, keys) for _ in range(batch)]).reshape(batch, keys).long()
        ids = ids if kind == "documents_batch" else torch.tensor(ids_of(draw, keys)).long()
        return qkv.documents(ids), oracles.documents(ids)
    if kind == "cu_seqlens":
        ends = runs(draw, keys)
        return qkv.documents(cu_seqlens=ends) & qkv.causal(), oracles.both(
            oracles.document_lengths(ends), oracles.causal()
        )
    if kind in ("key_lengths", "nothing_for_some"):
        lengths = torch.tensor([draw.randrange(keys + 1) for _ in range(batch)]).long()
        if kind == "nothing_for_some" and batch:
            lengths[0] = 0
        return qkv.key_lengths(lengths) & qkv.causal(), oracles.both(oracles.key_lengths(lengths), oracles.causal())
    if kind == "key_padding":
        keep = bits(draw, batch, keys)
        return qkv.key_padding(keep=keep), oracles.key_padding(keep)
    if kind.startswith("mask"):
        shape = {"mask": (queries, keys), "mask_4d": (batch, 1, queries, keys), "mask_bls": (batch, queries, keys)}
        keep = bits(draw, *shape.get(kind, (heads, queries, keys)))
        axes = kind[-3:].upper() if keep.ndim == 3 else ""
        return (qkv.mask(keep=keep, axes=axes) if axes else qkv.mask(keep=keep)), oracles.mask(keep, axes)
    if kind in ("blocks", "blocks_heads"):
        count = -(-keys // block)
        keep = bits(draw, *(() if kind == "blocks" else (batch, heads)), count, count)
        return qkv.blocks(keep=keep, block_size=block), oracles.blocks(keep, block)
    assert kind == "per_head"
    parts = [
        simple_pattern(part, draw, size) for part in draw.choices(("strided", "window", "causal", "fixed"), k=heads)
    ]
    return qkv.per_head([part[0] for part in parts if part]), oracles.per_head([part[1] for part in parts if part])


# Inputs


def shape_of(pick: dict[str, Any], draw: random.Random) -> tuple[Sizes, int | list[int] | None]:
    """Sizes that fit the pattern, and the query offset."""
    kind, batch, queries = pick["pattern"], pick["batch"], pick["queries"]
    if kind in GRIDS:
        queries = {"windows2d": 24, "windows2d_shifted": 54}.get(kind, 30)
        return Sizes(batch, pick["heads"][0], queries, queries), None
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
    room = max(keys - queries, 0)
    offsets = {
        None: None,
        "zero": 0,
        "middle": room // 2 if kind in INSIDE else 3,
        "batch": [draw.randrange(room + 1) for _ in range(batch)] if batch else None,
    }
    offset = offsets[pick["offset"]] if kind != "top_left" else None
    return Sizes(batch, pick["heads"][0], queries, keys), offset


def numbers(kind: str, shape: Sequence[int], generator: torch.Generator) -> Tensor:
    """Float64 inputs of a kind; the caller rounds them."""
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
    return x.transpose(2, 3).contiguous().transpose(2, 3) if form == "last_axis" else x


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
    shapes = {
        "full": tuple(size), "row": (1, size.heads, size.queries, 1), "key": (size.batch, 1, 1, size.keys),
        "scalar": (1, 1, 1, 1), "hiding": tuple(size[2:]), "double": tuple(size[2:]),
        "alibi": (size.heads,), "relative": (size.heads, 7),
    }  # fmt: skip
    x = torch.randn(*shapes[kind], generator=generator, dtype=torch.float64)
    if kind == "hiding":
        x = torch.where(x > 0.5, -oracles.INF, x)
    return x if kind == "double" else x.to(dtype)


def case_of(number: int, double: bool = False, bare: bool = False) -> Example:
    """Rebuild a case; `double` lifts it to float64, where first-order bounds hold; `bare` is what torch can do."""
    pick = {name: AXES[name][index] for name, index in candidate(number).items()}
    if bare:
        pick |= {"softcap": None, "sinks": False, "dropout": 0.0}
    draw, generator = random.Random(number + 1), torch.Generator().manual_seed(number)
    size, offset = shape_of(pick, draw)
    pattern, rule = simple_pattern(pick["pattern"], draw, size) or tensor_pattern(pick["pattern"], draw, size)
    dtype = torch.float64 if double else pick["dtype"]
    width = pick["width"]
    value = {"same": width, "half": max(width // 2, 1), "wider": width + 8}[pick["value_width"]]
    groups = pick["heads"][1]
    shapes = [
        (size.batch, size.heads, size.queries, width),
        (size.batch, groups, size.keys, width),
        (size.batch, groups, size.keys, value),
    ]
    tensors = [laid_out(numbers(pick["inputs"], s, generator).to(dtype), pick["strides"]) for s in shapes]
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
        leaf = bias_leaf(pick["bias"], size, dtype, generator)
        dense = dense_bias(pick["bias"], leaf, size, absolute)
    sinks = torch.randn(size.heads, generator=generator, dtype=torch.float64).to(dtype) if pick["sinks"] else None
    p = pick["dropout"]
    keep = oracles.dropout_keep(oracles.drawn_seed(number), p, size, absolute) if p else None
    drop_scale = 65536 / (65536 - oracles.threshold(p))
    call = budgets.Call(
        *tensors, oracles.dense(rule, size, absolute), scale, pick["softcap"], dense, sinks, keep, drop_scale
    )
    bias = None if leaf is None else (pick["bias"], leaf)
    return Example(pick, size, tensors, pattern, options, bias, call, absolute)


def dense_bias(kind: str, leaf: Tensor, size: Sizes, offset: int | list[int] | None) -> Tensor:
    if kind == "alibi":
        return oracles.alibi(leaf, size, offset)
    return oracles.relative(leaf, size, offset) if kind == "relative" else leaf


def bias_value(kind: str, leaf: Tensor) -> Any:
    return {"alibi": qkv.alibi, "relative": qkv.relative}.get(kind, lambda x: x)(leaf)


def request(pick: dict[str, Any], size: Sizes) -> qkv.AuxRequest:
    rows = {"rows": slice(0, size.queries, 2), "row": 0 if size.queries else False}.get(
        pick["weights"], pick["weights"]
    )
    top = min(3, size.keys) if pick["weights"] == "top_k" else None
    return qkv.AuxRequest(
        lse=True, max_scores=True, entropy=True, weights=False if top is not None else rows, top_k=top or None
    )
