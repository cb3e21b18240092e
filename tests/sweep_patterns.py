"""Patterns of the sweep, always built twice: as the package's object and as the oracle's own rule."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

import oracles
import qkv


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
