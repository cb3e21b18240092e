"""One right module of attention, and the classical mistakes, each as the few lines by which it differs.

`ZOO` names for every mistake the subject that it spoils and the probes that must see it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from subjects import Subject, embedded

DIM, HEADS = 16, 4


class Attention(nn.Module):
    """Right: self-attention, or cross-attention over `memory`; keep is bool (B, S), True for real keys."""

    def __init__(self, *, causal=False, p=0.0, rotary=False):
        super().__init__()
        self.causal, self.p, self.rotary = causal, p, rotary
        self.q, self.k, self.v, self.o = (nn.Linear(DIM, DIM, bias=False) for _ in range(4))
        self.begin()
        self.double()

    def begin(self):
        for part in (self.q, self.k):
            nn.init.orthogonal_(part.weight)

    def split(self, x):
        return x.unflatten(-1, (HEADS, -1)).transpose(1, 2)  # (B, H, L, d)

    def merge(self, x):
        return x.transpose(1, 2).flatten(2)

    def turn(self, x, start=0):
        """Rotary positions of (B, H, L, d)."""
        return turned(x, torch.arange(start, start + x.shape[2]).to(x)[:, None]) if self.rotary else x

    def scale(self):
        return (DIM // HEADS) ** -0.5

    def ahead(self, queries, keys):
        """Which keys the causal mask shows, bool (L, S)."""
        return torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries)

    def visible(self, queries, keys, keep):
        seen = self.ahead(queries, keys) if self.causal else torch.ones(queries, keys, dtype=torch.bool)
        return seen if keep is None else seen & keep[:, None, None, :]

    def weigh(self, scores, visible):
        some = visible.any(-1, keepdim=True)
        scores = torch.where(some, scores.masked_fill(~visible, -torch.inf), 0.0)
        return scores.softmax(-1) * some

    def drop(self, weights):
        return F.dropout(weights, self.p, self.training)

    def forward(self, x, memory=None, keep=None):
        source = x if memory is None else memory
        q, k, v = self.split(self.q(x)), self.split(self.k(source)), self.split(self.v(source))
        return self.attend(self.turn(q), self.turn(k), v, keep)

    def attend(self, q, k, v, keep):
        wide = torch.promote_types(q.dtype, torch.float32)
        scores = (q.to(wide) @ k.to(wide).transpose(-1, -2)) * self.scale()
        weights = self.drop(self.weigh(scores, self.visible(q.shape[2], k.shape[2], keep)))
        return self.o(self.merge(weights.to(v.dtype) @ v))

    def first(self, t):
        """The position of the query of step t."""
        return t

    def decode(self, x):
        """Token by token with a cache."""
        keys, values, rows = [], [], []
        for t in range(x.shape[1]):
            token = x[:, t : t + 1]
            keys.append(self.turn(self.split(self.k(token)), self.first(t)))
            values.append(self.split(self.v(token)))
            query = self.turn(self.split(self.q(token)), self.first(t))
            rows.append(self.attend(query, torch.cat(keys, 2), torch.cat(values, 2), None))
        return torch.cat(rows, 1)


def turned(x: Tensor, positions: Tensor) -> Tensor:
    """x with its pairs (2i, 2i + 1) turned by positions, which broadcast over the pairs."""
    rate = 10.0 ** -torch.arange(x.shape[-1] // 2).to(x)
    angle = positions * rate
    pair = x.unflatten(-1, (-1, 2))
    cos, sin = angle.cos()[..., None], angle.sin()[..., None]
    return torch.cat(
        [pair[..., :1] * cos - pair[..., 1:] * sin, pair[..., 1:] * cos + pair[..., :1] * sin], -1
    ).flatten(-2)


def roles(kind: type[nn.Module]) -> dict[str, Subject]:
    """A module of this kind in every role."""

    def call(module, x, keep=None, memory=None, memory_keep=None):
        return (
            module(x) if keep is None and memory is None else module(x, memory, keep if memory is None else memory_keep)
        )

    def of(seed=0, **options):
        torch.manual_seed(seed)
        return kind(**options)

    plain = {"call": call, "draw": embedded(DIM), "bare": True, "averages": True, "crowd": 1000}
    free = {**plain, "causal": False, "ordered": False}
    spread = {f"{part}.weight": (2 / (2 * DIM)) ** 0.5 for part in "qk"}
    return {
        "self": Subject(module=of(), pads=True, score_std=1.0, spread=spread, **free),
        "causal": Subject(
            module=of(causal=True), pads=True, causal=True, ordered=False, decode=lambda m, x: m.decode(x), **plain
        ),
        "cross": Subject(module=of(), memory=embedded(DIM), memory_pads=True, mixes=False, **free),
        "dropout": Subject(module=of(p=0.3), dropout=True, **free),
        "causal dropout": Subject(module=of(p=0.3, causal=True), dropout=True, causal=True, **plain),
        "rotary": Subject(
            module=of(rotary=True, causal=True),
            pads=True,
            holes=False,
            causal=True,
            decode=lambda m, x: m.decode(x),
            **{**plain, "ordered": True, "averages": False},
        ),
    }


class SoftmaxOverQueries(Attention):
    def weigh(self, scores, visible):
        return scores.masked_fill(~visible, -torch.inf).softmax(-2)


class SoftmaxOverHeads(Attention):
    def weigh(self, scores, visible):
        return scores.masked_fill(~visible, -torch.inf).softmax(1)


class HeadsByView(Attention):
    def split(self, x):
        return x.reshape(x.shape[0], HEADS, x.shape[1], -1)


class MergedWithoutTranspose(Attention):
    def merge(self, x):
        return x.reshape(x.shape[0], x.shape[2], -1)


class SequenceFirst(Attention):
    def forward(self, x, memory=None, keep=None):
        return super().forward(x.transpose(0, 1)).transpose(0, 1)


class NoScale(Attention):
    def scale(self):
        return 1.0


class ScaledByModel(Attention):
    def scale(self):
        return DIM**-0.5


class InvertedMask(Attention):
    def visible(self, queries, keys, keep):
        if keep is None and not self.causal:
            return super().visible(queries, keys, keep)
        return ~super().visible(queries, keys, keep)


class MaskMultiplied(Attention):
    def weigh(self, scores, visible):
        return (scores * visible).softmax(-1)


class TinyFill(Attention):
    def weigh(self, scores, visible):
        return scores.masked_fill(~visible, 1e-9).softmax(-1)


class MaskAfterSoftmax(Attention):
    def weigh(self, scores, visible):
        return scores.softmax(-1) * visible


class WeakFill(Attention):
    fill = -1e4

    def weigh(self, scores, visible):
        return scores.masked_fill(~visible, self.fill).softmax(-1)


class StrongFill(WeakFill):
    fill = -1e9


class DiagonalHidden(StrongFill):
    def ahead(self, queries, keys):
        return super().ahead(queries, keys).tril(keys - queries - 1)


class DiagonalHiddenByInfinity(DiagonalHidden):
    fill = -torch.inf


class NextVisible(Attention):
    def ahead(self, queries, keys):
        return torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries + 1)


class CausalLostInTraining(Attention):
    def ahead(self, queries, keys):
        seen = super().ahead(queries, keys)
        return torch.ones_like(seen) if self.training else seen


class BufferTooShort(Attention):
    def ahead(self, queries, keys):
        seen = torch.ones(queries, keys, dtype=torch.bool)
        seen[:16, :16] = seen[:16, :16].tril()
        return seen


class PaddingIgnored(Attention):
    def visible(self, queries, keys, keep):
        return super().visible(queries, keys, None)


class PaddingOnQueries(Attention):
    def visible(self, queries, keys, keep):
        seen = super().visible(queries, keys, None)
        return seen if keep is None or queries != keys else seen & keep[:, None, :, None]


class HeadsOfMaskRepeated(Attention):
    """The mask (B, L, S) is repeated over heads in the order of the batch: row (b, h) gets that of (b·H + h) mod B."""

    def visible(self, queries, keys, keep):
        seen = super().visible(queries, keys, keep)
        if keep is None:
            return seen
        batch = keep.shape[0]
        each = seen.expand(batch, 1, queries, keys)[:, 0]
        return each.repeat(HEADS, 1, 1).unflatten(0, (batch, HEADS))


class DropoutInEval(Attention):
    def drop(self, weights):
        return F.dropout(weights, self.p)


class DropoutOnScores(Attention):
    def weigh(self, scores, visible):
        scores = F.dropout(scores.masked_fill(~visible, -torch.inf), self.p, self.training)
        return scores.softmax(-1)

    def drop(self, weights):
        return weights


class NoPositions(Attention):
    def turn(self, x, start=0):
        return x


class PositionsOverHeads(Attention):
    def turn(self, x, start=0):
        return turned(x, torch.arange(x.shape[1]).to(x)[:, None, None]) if self.rotary else x


class WrongOffset(Attention):
    def first(self, t):
        return max(t - 1, 0)


class HeadsInList(Attention):
    def begin(self):
        super().begin()
        self.parts = [nn.Linear(DIM, DIM, bias=False, dtype=torch.float64)]

    def forward(self, x, memory=None, keep=None):
        return self.parts[0](super().forward(x, memory, keep))


class OneLinearForAll(Attention):
    def begin(self):
        super().begin()
        self.k = self.q


class PackedFanOut(Attention):
    """Glorot's bound of the packed (3 D, D) weight, √2 less than that of its three parts."""

    def begin(self):
        for part in (self.q, self.k, self.v):
            nn.init.normal_(part.weight, std=(2 / (4 * DIM)) ** 0.5)


class WindowOfChunks(Attention):
    """Sees those of its own chunk of 3, where each token should see the 3 last."""

    def ahead(self, queries, keys):
        chunk = torch.arange(keys) // 3
        return super().ahead(queries, keys) & (chunk[-queries:, None] == chunk)


class WindowOfTokens(Attention):
    def ahead(self, queries, keys):
        return super().ahead(queries, keys).triu(keys - queries - 2)


def mean_of_all(logits: Tensor, labels: Tensor, keep: Tensor) -> Tensor:
    """Padding counted in the loss."""
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def mean_over_all(logits: Tensor, labels: Tensor, keep: Tensor) -> Tensor:
    """Padding left out of the sum, but not of the count."""
    return (F.cross_entropy(logits.transpose(1, 2), labels, reduction="none") * keep).mean()


def mean_of_real(logits: Tensor, labels: Tensor, keep: Tensor) -> Tensor:
    return F.cross_entropy(logits[keep], labels[keep])


class Mistake(NamedTuple):
    number: int  # the classical mistake
    module: Callable[..., nn.Module]
    role: str
    seen_by: tuple[str, ...]


ZOO: dict[str, Mistake] = {
    "softmax over queries": Mistake(1, SoftmaxOverQueries, "self", ("P6", "P16")),
    "softmax over queries, cross": Mistake(1, SoftmaxOverQueries, "cross", ("P9",)),
    "softmax over queries, causal": Mistake(1, SoftmaxOverQueries, "causal", ("P3",)),
    "softmax over heads": Mistake(1, SoftmaxOverHeads, "self", ("P5", "P6", "P16")),
    "heads by view": Mistake(2, HeadsByView, "self", ("P4", "P5", "P8")),
    "heads by view, cross": Mistake(2, HeadsByView, "cross", ("P10",)),
    "merged without transpose": Mistake(3, MergedWithoutTranspose, "self", ("P4", "P5")),
    "merged without transpose, causal": Mistake(3, MergedWithoutTranspose, "causal", ("P3",)),
    "merged without transpose, cross": Mistake(3, MergedWithoutTranspose, "cross", ("P9",)),
    "sequence first": Mistake(4, SequenceFirst, "dropout", ("P1",)),
    "no scale": Mistake(5, NoScale, "self", ("P16",)),
    "scaled by the model's width": Mistake(6, ScaledByModel, "self", ("P16",)),
    "inverted mask": Mistake(7, InvertedMask, "causal", ("P3", "P7", "P8")),
    "inverted padding": Mistake(7, InvertedMask, "self", ("P7", "P8")),
    "mask multiplied": Mistake(8, MaskMultiplied, "causal", ("P3", "P7")),
    "tiny fill": Mistake(8, TinyFill, "causal", ("P3", "P7")),
    "mask after softmax": Mistake(9, MaskAfterSoftmax, "causal", ("P5", "P3", "P7")),
    "weak fill": Mistake(10, WeakFill, "causal", ("P3",)),
    "strong fill": Mistake(10, StrongFill, "causal", ("P3",)),
    "diagonal hidden": Mistake(11, DiagonalHidden, "causal", ("P3", "P12")),
    "diagonal hidden by -inf": Mistake(11, DiagonalHiddenByInfinity, "causal", ("P3", "P12", "P14")),
    "next visible": Mistake(12, NextVisible, "causal", ("P3", "P12")),
    "causal lost in training": Mistake(13, CausalLostInTraining, "causal dropout", ("P3",)),
    "mask buffer too short": Mistake(13, BufferTooShort, "causal", ("P3",)),
    "padding ignored": Mistake(14, PaddingIgnored, "self", ("P7", "P8")),
    "padding ignored, causal": Mistake(14, PaddingIgnored, "causal", ("P7", "P8")),
    "padding ignored, cross": Mistake(14, PaddingIgnored, "cross", ("P7", "P8")),
    "padding on queries": Mistake(14, PaddingOnQueries, "self", ("P7", "P8")),
    "heads of the mask repeated": Mistake(15, HeadsOfMaskRepeated, "self", ("P1",)),
    "dropout in evaluation": Mistake(16, DropoutInEval, "dropout", ("P2",)),
    "dropout on scores": Mistake(17, DropoutOnScores, "dropout", ("P11",)),
    "dropout on masked scores": Mistake(17, DropoutOnScores, "causal dropout", ("P11", "P3")),
    "no positions": Mistake(18, NoPositions, "rotary", ("P4",)),
    "positions over heads": Mistake(18, PositionsOverHeads, "rotary", ("P4",)),
    "wrong offset with a cache": Mistake(18, WrongOffset, "rotary", ("P13",)),
    "heads in a list": Mistake(19, HeadsInList, "self", ("P17",)),
    "one linear for all": Mistake(19, OneLinearForAll, "self", ("P17",)),
    "packed fan-out": Mistake(19, PackedFanOut, "self", ("P17",)),
    "window of chunks": Mistake(21, WindowOfChunks, "window", ("P12",)),
}
LOSSES = {"padding counted": mean_of_all, "padding counted in the mean": mean_over_all}


def subject_of(kind: Callable[..., nn.Module], role: str) -> Subject:
    """A module in a role; "window" is causal with the three last tokens declared."""
    if role != "window":
        return roles(kind)[role]
    near = torch.ones(7, 7, dtype=torch.bool).tril().triu(-2)
    return replace(roles(kind)["causal"], sees=near, pads=False, ordered=None, decode=None)
