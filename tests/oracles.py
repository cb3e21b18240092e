"""The independent truth: dense attention in float64, every pattern's rule per element, Philox and the dropout rule.

Written from the documented semantics alone; imports nothing of the package.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

INF = float("inf")


class Truth(NamedTuple):
    """What one attention call must give, in float64."""

    out: Tensor  # (B, H, L, V)
    lse: Tensor  # (B, H, L)
    weights: Tensor  # (B, H, L, S), before dropout
    max_scores: Tensor  # (B, H, L)
    entropy: Tensor  # (B, H, L)


def pair_sum(equation: str, x: Tensor, y: Tensor, allowed: Tensor) -> Tensor:
    """A product of per-query and per-key rows in which rows of `y` (B, H, S, c) that are hidden never take part."""
    if bool(x.isfinite().all()) and bool(y.isfinite().all()):
        return torch.einsum(equation.replace("bhlsc", "bhsc"), x, y)
    return torch.einsum(equation, x, torch.where(allowed[..., None], y[:, :, None], 0.0))  # 0 * nan would be nan


def attend(
    q: Tensor,  # (B, H, L, D)
    k: Tensor,  # (B, G, S, D)
    v: Tensor,  # (B, G, S, V)
    allowed: Tensor,  # bool, broadcastable to (B, H, L, S)
    *,
    scale: float | None = None,
    softcap: float | None = None,
    bias: Tensor | None = None,
    sinks: Tensor | None = None,
    keep: Tensor | None = None,
    drop_scale: float = 1.0,
) -> Truth:
    """scale, softcap, bias, pattern, sinks, softmax, dropout, in this order; differentiable in every tensor."""
    q, k, v = (x.double() for x in (q, k, v))
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    allowed = allowed.expand(*q.shape[:3], k.shape[2])
    scores = pair_sum("bhlc,bhlsc->bhls", q, k, allowed) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if bias is not None:
        bias = bias.double().expand_as(scores)
        allowed = allowed & (bias.detach() != -INF)
        scores = scores + torch.where(allowed, bias, 0.0)
    seen = torch.where(allowed, scores.detach(), -INF)
    nothing = torch.full_like(q[..., :1], -INF).detach()
    sink = nothing if sinks is None else sinks.double()[None, :, None, None].expand_as(nothing)
    top = torch.cat([seen, sink.detach()], -1).amax(-1, keepdim=True)
    shift = torch.where(top == -INF, 0.0, top)
    exps = torch.where(allowed, torch.exp(torch.where(allowed, scores, 0.0) - shift), 0.0)
    total = exps.sum(-1, keepdim=True) + torch.exp(sink - shift)
    empty = top == -INF
    total = torch.where(empty, 1.0, total)
    lse = torch.where(empty, -INF, shift + torch.log(total))[..., 0]
    weights = exps / total
    kept = weights if keep is None else weights * keep * drop_scale
    out = pair_sum("bhls,bhlsc->bhlc", kept, v, allowed)
    entropy = torch.special.entr(weights.detach()).sum(-1)
    return Truth(out, lse, weights, torch.cat([seen, nothing], -1).amax(-1), entropy)


class Pairs(NamedTuple):
    """Index tensors that broadcast to (B, H, L, S): absolute positions i and j, and the row of the call."""

    b: Tensor
    h: Tensor
    i: Tensor
    j: Tensor
    row: Tensor
    keys: int


Rule = Callable[[Any], Any]  # takes Pairs, or anything with plain numbers of the same names


def dense(rule: Rule, sizes: tuple[int, int, int, int], offset: int | Sequence[int] | None = None) -> Tensor:
    """The rule at every element of (B, H, L, S); offset: place of query 0 (default S - L), one or one a batch row."""
    batch, heads, queries, keys = sizes
    first = torch.as_tensor(keys - queries if offset is None else offset).reshape(-1, 1, 1, 1)
    row = torch.arange(queries)[:, None]
    b, h = torch.arange(batch).reshape(-1, 1, 1, 1), torch.arange(heads).reshape(-1, 1, 1)
    answer = rule(Pairs(b, h, first + row, torch.arange(keys), row, keys))
    return torch.as_tensor(answer).expand(sizes)


def both(*rules: Rule) -> Rule:
    return lambda p: all_of([rule(p) for rule in rules])


def all_of(answers: list[Any]) -> Any:
    return answers[0] if len(answers) == 1 else answers[0] & all_of(answers[1:])


def either(*rules: Rule) -> Rule:
    return opposite(both(*[opposite(rule) for rule in rules]))


def opposite(rule: Rule) -> Rule:
    return lambda p: rule(p) ^ True


def full() -> Rule:
    return lambda p: p.j == p.j


def causal() -> Rule:
    return lambda p: p.j <= p.i


def window(left: int | None, right: int | None = 0) -> Rule:
    return lambda p: (left is None or p.i - left <= p.j) & (right is None or p.j <= p.i + right) & (p.j == p.j)


def sliding_window(size: int) -> Rule:
    return lambda p: (p.i - size < p.j) & (p.j <= p.i)


def dilated(left: int, right: int = 0, *, dilation: int) -> Rule:
    return lambda p: ((p.j - p.i) % dilation == 0) & (-left * dilation <= p.j - p.i) & (p.j - p.i <= right * dilation)


def strided(stride: int) -> Rule:
    return lambda p: (p.j <= p.i) & ((p.i - p.j < stride) | ((p.i - p.j) % stride == 0))


def fixed(block: int, summary: int = 1) -> Rule:
    return lambda p: (p.j <= p.i) & ((p.i // block == p.j // block) | (p.j % block >= block - summary))


def one_of(x: Any, tokens: int | Sequence[int]) -> Any:
    if isinstance(tokens, int):
        return (x >= 0) & (x < tokens)
    return sum((x == t) * 1 for t in tokens) > 0 if len(tokens) else x != x


def global_tokens(tokens: int | Sequence[int]) -> Rule:
    return lambda p: one_of(p.i, tokens) | one_of(p.j, tokens)


def prefix(n: int) -> Rule:
    return lambda p: p.j < n


def block_local(size: int) -> Rule:
    return lambda p: p.i // size == p.j // size


def documents(ids: Tensor) -> Rule:
    """ids (S,) or (B, S)."""
    return lambda p: (ids[p.i] == ids[p.j]) if ids.ndim == 1 else (ids[p.b, p.i] == ids[p.b, p.j])


def document_lengths(cu_seqlens: Sequence[int]) -> Rule:
    return documents(torch.tensor([n for n, (a, b) in enumerate(pairwise(cu_seqlens)) for _ in range(a, b)]))


def key_lengths(lengths: Tensor) -> Rule:
    return lambda p: p.j < lengths[p.b]


def key_padding(keep: Tensor) -> Rule:
    return lambda p: keep[p.b, p.j]


def mask(keep: Tensor, axes: str = "") -> Rule:
    """Rows of the mask are the call's rows; 3-D masks name their axes."""
    if keep.ndim == 3:
        keep = keep[:, None] if axes == "BLS" else keep[None]
    return lambda p: keep


def blocks(keep: Tensor, block_size: int) -> Rule:
    """keep (rows, columns) or (B or 1, H or 1, rows, columns), of absolute blocks."""
    keep = keep[(None,) * (4 - keep.ndim)]
    return lambda p: keep[p.b % keep.shape[0], p.h % keep.shape[1], p.i // block_size, p.j // block_size]


def neighborhood(grid: tuple[int, int], kernel: int) -> Rule:
    def near(x: Any, y: Any, size: int) -> Any:
        first = (x - kernel // 2) * (x >= kernel // 2)
        first = first - (first - (size - kernel)) * (first > size - kernel)  # shifted inward at both borders
        return (first <= y) & (y < first + kernel)

    width = grid[1]
    return lambda p: near(p.i // width, p.j // width, grid[0]) & near(p.i % width, p.j % width, width)


def windows2d(grid: tuple[int, int], size: int, shift: int = 0) -> Rule:
    def same(x: Any, y: Any, extent: int) -> Any:
        return ((x - shift) % extent // size == (y - shift) % extent // size) & ((x < shift) == (y < shift))

    width = grid[1]
    return lambda p: same(p.i // width, p.j // width, grid[0]) & same(p.i % width, p.j % width, width)


def axial(grid: tuple[int, int], along: str) -> Rule:
    width = grid[1]
    return lambda p: (p.i // width == p.j // width) if along == "width" else (p.i % width == p.j % width)


def longformer(size: int, tokens: int | Sequence[int]) -> Rule:
    return either(lambda p: (p.i - p.j <= size // 2) & (p.j - p.i <= size // 2), global_tokens(tokens))


def random_blocks(count: int, block_size: int, seed: int, ahead: bool = False) -> Rule:
    def rule(p: Any) -> Any:
        total = -(-p.keys // block_size)
        rows = int(torch.as_tensor(p.i).max()) // block_size + 1 if torch.as_tensor(p.i).numel() else 1
        drawn = torch.zeros(max(rows, 1), max(rows, total, 1), dtype=torch.bool)
        for r in range(rows):
            drawn[r, list(floyd(r, total if ahead else r + 1, count, seed))] = True
        return drawn[p.i // block_size, p.j // block_size]

    return rule


def floyd(r: int, candidates: int, count: int, seed: int) -> set[int]:
    """`count` distinct numbers below `candidates`, drawn for row block r by Floyd's method."""
    taken: set[int] = set()
    least = candidates - min(count, candidates)
    for t in range(least, candidates):
        u = (philox((r, t - least, 0, 0), seed)[0] * (t + 1)) >> 32
        taken.add(t if u in taken else u)
    return taken


def bigbird(size: int, tokens: int, count: int, seed: int, block_size: int = 64) -> Rule:
    def near(p: Any) -> Any:
        distance = p.i // block_size - p.j // block_size
        return (distance <= size // 2) & (-distance <= size // 2)

    return either(near, global_tokens(tokens), random_blocks(count, block_size, seed, ahead=True))


def sparse_transformer(stride: int) -> Rule:
    return strided(stride)


def per_head(rules: Sequence[Rule]) -> Rule:
    def rule(p: Any) -> Any:
        return sum((rules[n](p) & (p.h == n)) * 1 for n in range(len(rules))) > 0

    return rule


def alibi(slopes: Tensor, sizes: tuple[int, int, int, int], offset: int | Sequence[int] | None = None) -> Tensor:
    """-slope·|i - j| as a dense bias; slopes (H,)."""
    return -slopes.double()[None, :, None, None] * distance(sizes, offset).abs()


def relative(table: Tensor, sizes: tuple[int, int, int, int], offset: int | Sequence[int] | None = None) -> Tensor:
    """table[h, clamp(j - i, -R, R) + R] as a dense bias; table (H, 2R + 1)."""
    reach = table.shape[1] // 2
    entry = (-distance(sizes, offset)).clamp(-reach, reach) + reach
    return table.double()[torch.arange(sizes[1])[:, None, None], entry]


def distance(sizes: tuple[int, int, int, int], offset: int | Sequence[int] | None) -> Tensor:
    """i - j, (B or 1, 1, L, S)."""
    first = torch.as_tensor(sizes[3] - sizes[2] if offset is None else offset).reshape(-1, 1, 1, 1)
    return first + torch.arange(sizes[2])[:, None] - torch.arange(sizes[3])


def philox(counter: Sequence[Any], key: int) -> tuple[Any, Any, Any, Any]:
    """Philox4x32-10 (Salmon et al., 2011): four 32-bit words for plain numbers or for uint64 arrays of 32-bit words."""
    low32 = 0xFFFFFFFF
    c0, c1, c2, c3 = counter
    k0, k1 = key & low32, key >> 32 & low32
    for _ in range(10):
        left, right = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c1, c2, c3 = right >> 32 ^ c1 ^ k0, right & low32, left >> 32 ^ c3 ^ k1, left & low32
        k0, k1 = (k0 + 0x9E3779B9) & low32, (k1 + 0xBB67AE85) & low32
    return c0, c1, c2, c3


def drawn_seed(state: int) -> int:
    """The 64-bit seed that a call takes after `manual_seed(state)`: two draws of 32 bits, low word first."""
    low, high = torch.randint(0, 1 << 32, (2,), generator=torch.Generator().manual_seed(state)).tolist()
    return low | high << 32


def threshold(p: float) -> int:
    """How many of the 65536 values drop a weight."""
    return int(np.floor(65536.0 * p + 0.5))


def dropout_keep(
    seed: int, p: float, sizes: tuple[int, int, int, int], offset: int | Sequence[int] | None = None
) -> Tensor:
    """Which weights stay, (B, H, L, S): value j mod 8 of counter (j // 8, i, h, b) is at least the threshold."""
    batch, heads, queries, keys = sizes
    first = np.asarray(keys - queries if offset is None else offset, dtype=np.int64).reshape(-1, 1, 1, 1)
    grid = (
        np.arange(keys) // 8,
        first + np.arange(queries)[:, None],
        np.arange(heads)[:, None, None],
        np.arange(batch)[:, None, None, None],
    )
    counter = [np.broadcast_to(x & 0xFFFFFFFF, sizes).astype(np.uint64) for x in grid]
    words = np.stack([np.broadcast_to(w, sizes) for w in philox(counter, seed)])
    number = np.broadcast_to(np.arange(keys) % 8, sizes)
    word = np.take_along_axis(words, (number // 2)[None], 0)[0]
    value = np.where(number % 2 == 0, word & 0xFFFF, word >> 16)
    return torch.from_numpy(value >= threshold(p))
