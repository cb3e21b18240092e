"""Packed calls for tests, each made from one integer, with their truth: every document by the oracle, alone."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import budgets
import oracles
import qkv
from exams import judge, rounding
from qkv.varlen import varlen_attention
from sweep_patterns import GRIDS, INSIDE, Sizes, simple_pattern, tensor_pattern

LENGTHS = [5, 0, 70, 1, 66, 130]
CU = [0, *itertools.accumulate(LENGTHS)]
H, G, D, V = 4, 2, 8, 5


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def inputs(dtype: torch.dtype = torch.float64, total: int = CU[-1]) -> list[Tensor]:
    return [normal(total, *shape, seed=n, dtype=dtype) for n, shape in enumerate(((H, D), (G, D), (G, V)))]


Document = tuple[int, int]  # queries and keys
SEED = 99

KINDS = (
    "none", "full", "causal", "top_left", "window", "two_sided", "sliding_window", "dilated", "dilated_both", "strided",
    "fixed", "fixed_wide", "global", "global_list", "prefix_lm", "random_blocks", "random_ahead", "block_local",
    "documents", "documents_batch", "cu_seqlens", "key_lengths", "key_padding", "mask", "mask_4d", "mask_bls",
    "mask_hls", "blocks", "blocks_heads", "neighborhood", "windows2d", "windows2d_shifted", "axial_width",
    "axial_height", "where", "where_rows", "longformer", "bigbird", "per_head", "sinks_and_window", "minus", "inverse",
    "strided_documents", "empty_rows", "union", "nothing_for_some",
)  # fmt: skip
# Patterns that hold something of each key or query of a call: documents of one size.
ALIKE = GRIDS | {"documents", "documents_batch", "cu_seqlens", "key_padding", "strided_documents"}
ALIKE |= {"mask", "mask_4d", "mask_bls", "mask_hls", "blocks", "blocks_heads"}
PACKS: tuple[tuple[Document, ...], ...] = (
    ((5, 5), (0, 0), (130, 130), (1, 1), (70, 70), (64, 64)),
    ((3, 9), (65, 66), (0, 4), (1, 40), (100, 129)),
    ((1, 1), (1, 1), (1, 1)),
    ((191, 191),),
    ((17, 80), (63, 63), (80, 80), (17, 80)),
)
UNEVEN: tuple[tuple[Document, ...], ...] = (((9, 3), (5, 0), (70, 65), (2, 2)), ((40, 1), (0, 0), (33, 32)))


@dataclass
class Pack:
    """One packed call: its documents, numbers and options."""

    kind: str
    documents: tuple[Document, ...]
    leaves: dict[str, Tensor]  # "q", "k", "v", perhaps "bias" and "sinks"
    bias: str
    options: dict[str, Any]
    pattern: Any
    rule: oracles.Rule

    @property
    def boundaries(self) -> tuple[list[int], list[int]]:
        queries, keys = zip(*self.documents, strict=True)
        return [0, *itertools.accumulate(queries)], [0, *itertools.accumulate(keys)]

    @property
    def dropout(self) -> float:
        return self.options.get("dropout_p", 0.0)

    def call(self, leaves: dict[str, Tensor], **more: Any) -> Any:
        """The packed call on these tensors."""
        options = dict(self.options)
        if self.bias in ("alibi", "relative"):
            options["bias"] = getattr(qkv, self.bias)(leaves["bias"])
        elif "bias" in leaves:
            options["bias"] = leaves["bias"]
        if self.dropout:
            options["generator"] = torch.Generator().manual_seed(SEED)
        tensors = (leaves[name] for name in "qkv")
        sinks = leaves.get("sinks")
        return varlen_attention(*tensors, *self.boundaries, pattern=self.pattern, sinks=sinks, **options, **more)


def pack_of(number: int, dtype: torch.dtype | None = None) -> Pack:
    """The kinds of patterns in turn, all else drawn."""
    draw = random.Random(number)
    kind = KINDS[number % len(KINDS)]
    heads, groups = draw.choice([(1, 1), (4, 4), (4, 2), (4, 1), (6, 3)])
    documents = draw.choice(PACKS if kind in INSIDE else PACKS + UNEVEN)
    if kind in ALIKE:
        side = {"windows2d": 24, "windows2d_shifted": 54}.get(kind, 30)
        documents = ((side, side),) * 3 if kind in GRIDS else ((37, 70),) * 3
    size = Sizes(len(documents), heads, *(max(lengths) for lengths in zip(*documents, strict=True)))
    if kind in ("key_lengths", "nothing_for_some"):
        lengths = torch.tensor([draw.randrange(keys + 1) for _, keys in documents])
        lengths[0] = 0 if kind == "nothing_for_some" else lengths[0]
        pattern = (
            qkv.key_lengths(lengths) | qkv.window(0),
            oracles.either(oracles.key_lengths(lengths), oracles.window(0)),
        )
    elif kind == "where_rows":
        pattern = qkv.where(lambda b, h, i, j: (i + j + b) % 3 > 0), lambda p: (p.i + p.j + p.b) % 3 > 0
    else:
        pattern = simple_pattern(kind, draw, size) or tensor_pattern(kind, draw, size)
    dtype = dtype or draw.choice([torch.float64, torch.float32, torch.bfloat16, torch.float16])
    width, value = draw.choice([(8, 8), (17, 5), (64, 64), (1, 3), (40, 80)])
    totals = [sum(lengths) for lengths in zip(*documents, strict=True)]
    shapes = {"q": (totals[0], heads, width), "k": (totals[1], groups, width), "v": (totals[1], groups, value)}
    bias = draw.choice(["none", "none", "alibi", "relative", "heads", "rows"])
    shapes |= {"alibi": {"bias": (heads,)}, "relative": {"bias": (heads, 2 * 9 + 1)}}.get(bias, {})
    shapes |= {"heads": {"bias": (1, heads, 1, 1)}, "rows": {"bias": (len(documents), 1, 1, 1)}}.get(bias, {})
    shapes |= {"sinks": (heads,)} if draw.random() < 0.3 or bias in ("heads", "rows") else {}
    generator = torch.Generator().manual_seed(number)
    leaves = {
        name: torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for name, shape in shapes.items()
    }
    options = draw.choice([{}, {}, {"softcap": 2.0}, {"scale": -0.3}, {"dropout_p": 0.2}, {"dropout_p": 0.5}])
    return Pack(kind, documents, leaves, bias, dict(options), *pattern)


def sit(pack: Pack, backend: str, **more: Any) -> None:
    """Let a backend answer, and judge output, aux and gradients document by document."""
    dtype = pack.leaves["q"].dtype
    leaves = {name: x.detach().requires_grad_() for name, x in pack.leaves.items()}
    exact = {name: x.detach().double().requires_grad_() for name, x in pack.leaves.items()}
    request = qkv.AuxRequest(lse=True, max_scores=True, entropy=True)
    out, aux = pack.call(leaves, backend=backend, return_aux=request, **more)
    total, heads = pack.leaves["q"].shape[:2]
    assert out.shape == (total, heads, pack.leaves["v"].shape[2]) and out.dtype == dtype
    assert aux.lse.shape == aux.entropy.shape == aux.max_scores.shape == (heads, total)
    generator = torch.Generator().manual_seed(5)
    grad = torch.randn(out.shape, generator=generator, dtype=torch.float64).to(dtype)
    grad_lse = torch.randn(aux.lse.shape, generator=generator, dtype=torch.float64).to(aux.lse.dtype)
    grad_lse = torch.where(aux.lse.detach().isfinite(), grad_lse, 0.0)
    got = torch.autograd.grad([out, aux.lse], list(leaves.values()), [grad, grad_lse])
    found, bounds = {}, {name: [] for name in leaves}
    cast = backend == "cpu" and dtype == torch.bfloat16  # some units take the factors of products in this type
    for n, (queries, keys) in enumerate(zip(*map(itertools.pairwise, pack.boundaries), strict=True)):
        call, offset = document_of(pack, exact, n, slice(*queries), slice(*keys))
        truth, rows = call.truth(), slice(*queries)
        bound = budgets.forward(call, truth, dtype, cast=cast)
        assert bound.small
        judge("output", out[rows].transpose(0, 1)[None], truth.out.detach(), bound.out)
        judge("lse", aux.lse[None, :, rows], truth.lse.detach(), bound.lse)
        judge("max_scores", aux.max_scores[None, :, rows], truth.max_scores, bound.max_scores)
        judge("entropy", aux.entropy[None, :, rows], truth.entropy, bound.entropy)
        go, gl = grad[rows].transpose(0, 1)[None], grad_lse[None, :, rows]
        linked = [(x, g.double()) for x, g in ((truth.out, go), (truth.lse, gl)) if x.requires_grad]
        if linked:
            parts, incoming = zip(*linked, strict=True)
            wanted = torch.autograd.grad(parts, list(exact.values()), incoming, allow_unused=True)
            for name, g in zip(exact, wanted, strict=True):
                found[name] = found.get(name, 0.0) + (torch.zeros_like(exact[name]) if g is None else g)
        limits, summed = budgets.backward(call, truth, dtype, go, gl, cast=cast)
        if "bias" in leaves:
            limits["bias"] = bias_bound(pack, n, (1, heads, rows.stop - rows.start, call.k.shape[2]), offset, summed)
        for name, limit in limits.items():
            bounds[name].append(limit)
    for name, g in zip(leaves, got, strict=True):
        if name in "qkv":
            bound = torch.cat([x[0].transpose(0, 1) for x in bounds[name]])
        else:
            bound = sum(bounds[name]) + (rounding(dtype, dtype) + budgets.floor_of(dtype)) * (1 + found[name].abs())
        judge(f"gradient of {name}", g, found[name], bound)


def document_of(
    pack: Pack, exact: dict[str, Tensor], n: int, queries: slice, keys: slice
) -> tuple[budgets.Call, int | None]:
    """Document n as the oracle takes it, and the place of its first query, None for S - L."""
    q, k, v = exact["q"][queries], exact["k"][keys], exact["v"][keys]
    sizes = (1, q.shape[1], len(q), len(k))
    offset = 0 if pack.kind == "top_left" else None
    allowed = oracles.dense(pack.rule, (len(pack.documents), *sizes[1:]), offset)[n : n + 1]
    keep, kept_scale = None, 1.0
    if pack.dropout:
        seed = oracles.drawn_seed(SEED)
        keep = oracles.dropout_keep(seed, pack.dropout, (n + 1, *sizes[1:]), offset)[n:]
        kept_scale = 65536 / (65536 - oracles.threshold(pack.dropout))
    bias = exact.get("bias")
    if pack.bias in ("alibi", "relative"):
        bias = getattr(oracles, pack.bias)(bias, sizes, offset)
    elif pack.bias == "rows":
        bias = bias[n : n + 1]
    scale = pack.options.get("scale", q.shape[2] ** -0.5)
    tensors = (x.transpose(0, 1)[None] for x in (q, k, v))
    call = budgets.Call(
        *tensors, allowed, scale, pack.options.get("softcap"), bias, exact.get("sinks"), keep, kept_scale
    )
    return call, offset


def bias_bound(
    pack: Pack, n: int, size: tuple[int, int, int, int], offset: int | None, summed: Callable[..., Tensor]
) -> Tensor:
    """What document n may add to the error of the gradient of a bias."""
    leaf, (_, heads, queries, keys) = pack.leaves["bias"], size
    if pack.bias == "alibi":
        far = oracles.distance(size, offset).abs().double()
        return summed(lambda x: (x * far).sum((0, 2, 3)), queries * keys)
    if pack.bias == "relative":
        reach = leaf.shape[1] // 2
        entry = (-oracles.distance(size, offset)).clamp(-reach, reach) + reach
        entry = entry.expand(1, heads, -1, -1) + leaf.shape[1] * torch.arange(heads)[:, None, None]

        def by_entry(x: Tensor) -> Tensor:
            return x.new_zeros(leaf.numel()).index_add_(0, entry.flatten(), x.flatten()).reshape(leaf.shape)

        return summed(by_entry, torch.bincount(entry.flatten(), minlength=leaf.numel()).reshape(leaf.shape))
    if pack.bias == "heads":
        return summed(lambda x: x.sum((0, 2, 3), keepdim=True), queries * keys)
    row = summed(lambda x: x.sum((1, 2, 3), keepdim=True), heads * queries * keys)
    return torch.zeros(leaf.shape, dtype=torch.float64).index_add_(0, torch.tensor([n]), row)
