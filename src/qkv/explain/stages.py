"""The numbers of each step of one attention call, in float64 and by the plainest operations. Prints nothing."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from qkv.dropout import dropout_keep, keep_scale
from qkv.explain.figures import listed, short
from qkv.explain.steps import Check, Setting, Step
from qkv.explain.words import dot_product, quoted, row_in_words, weighted_sum

EPS = torch.finfo(torch.float64).eps


def bound(setting: Setting, size: float = 1.0) -> float:
    """How far two float64 orders of the same sums may lie apart: first order, from the size of the numbers."""
    q, k = largest(setting.query), largest(setting.key)
    D, S = setting.query.shape[3], setting.key.shape[2]
    scores = (D + 8) * D * q * k * max(1.0, abs(setting.scale))
    return EPS * (scores + S + 8) * 4 * max(size, 1e-300)


def largest(tensor: Tensor) -> float:
    """The greatest finite size of a number in a tensor, 0 where there is none."""
    finite = tensor[tensor.isfinite()]
    return float(finite.abs().amax()) if finite.numel() else 0.0


def difference(ours: Tensor, theirs: Tensor) -> float:
    """The greatest absolute difference; equal infinities, and NaN beside anything not finite, count as none."""
    wild = ~ours.isfinite() & ~theirs.isfinite() & (ours.isnan() | theirs.isnan())
    same = (ours == theirs) | wild
    gaps = torch.where(same, 0.0, (ours - theirs).abs())
    return float(gaps.nan_to_num(nan=math.inf).amax()) if gaps.numel() else 0.0


def grouped(tensor: Tensor, heads: int) -> Tensor:
    """A key or value head for each query head: (B, G, S, D) -> (B, H, S, D), head h reads h // (H/G)."""
    return tensor.repeat_interleave(heads // max(1, tensor.shape[1]), dim=1)


def _shapes(setting: Setting, *names: str) -> tuple[tuple[str, tuple[int, ...]], ...]:
    sizes = setting.sizes
    axes = {"Q": "BHLD", "K": "BGSD", "V": "BGSV", "S": "BHLS", "P": "BHLS", "O": "BHLV"}
    return tuple((name, tuple(sizes[axis] for axis in axes[name])) for name in names)


def scores(setting: Setting) -> Step:
    """S = Q Kᵀ, with one dot product of the chosen row written out."""
    key = grouped(setting.key, setting.query.shape[1])
    value = torch.einsum("bhld,bhsd->bhls", setting.query, key)
    words: list[str] = []
    if value.shape[-1]:
        column = _telling(setting, setting.pick(value)[setting.row])
        names = (setting.query_tokens[setting.row], setting.key_tokens[column])
        words.append(dot_product(setting.queries[setting.row], setting.keys[column], names))
    letter = "h" if setting.key.shape[1] == setting.query.shape[1] else "g"
    return Step(
        key="scores",
        title="scores",
        formula="S = Q Kᵀ",
        einsum=f"b h l d , b {letter} s d -> b h l s",
        shapes=_shapes(setting, "Q", "K", "S"),
        value=value,
        words=tuple(words),
        pitfalls=("rows are queries, columns are keys: do not swap them where L = S",),
        checks=(Check(against="torch.matmul", error=difference(value, setting.query @ key.mT), bound=bound(setting)),),
    )


def _telling(setting: Setting, row: Tensor) -> int:
    """The key whose dot product is worth writing out: the greatest finite score that the chosen row sees."""
    seen = setting.visible[setting.row] & row.isfinite()
    return int(torch.where(seen, row, -math.inf).argmax()) if bool(seen.any()) else 0


def scale(setting: Setting, before: Tensor) -> Step:
    """S · scale, 1/√D unless given."""
    value = before * setting.scale
    spread = [short(_spread(setting.pick(tensor))) for tensor in (before, value)]
    shown = f"{setting.scale:.4g}".replace("-", "\u2212")
    exact = setting.query * setting.scale @ grouped(setting.key, setting.query.shape[1]).mT
    return Step(
        key="scale",
        title="scale",
        formula=f"S · {shown}" if setting.scale_given else f"S · 1/√D = S · {shown}",
        shapes=_shapes(setting, "S"),
        value=value,
        words=(f"keeps the spread near 1 whatever D is: {spread[0]} before, {spread[1]} after",),
        pitfalls=("D is the width of one head, not of the model; scale only once",),
        checks=(Check(against="torch.matmul of scaled Q", error=difference(value, exact), bound=bound(setting)),),
    )


def _spread(tensor: Tensor) -> float:
    finite = tensor[tensor.isfinite()]
    return float(finite.std(correction=0)) if finite.numel() else 0.0


def softcap(setting: Setting, before: Tensor, cap: float) -> Step:
    """cap · tanh(S / cap)."""
    value = cap * torch.tanh(before / cap)
    return Step(
        key="softcap",
        title="softcap",
        formula=f"{short(cap)} · tanh(S / {short(cap)})",
        shapes=_shapes(setting, "S"),
        value=value,
        words=(f"no score can pass ±{short(cap)}; small ones stay nearly as they are",),
        pitfalls=("the cap comes before the mask: capping −∞ would show what is hidden",),
    )


def add_bias(setting: Setting, before: Tensor, bias: Tensor) -> Step:
    """S + bias."""
    return Step(
        key="bias",
        title="bias",
        formula="S + bias",
        shapes=_shapes(setting, "S"),
        value=before + bias,
        parts={"bias": bias},
        words=("added to the scores after scaling; −∞ in it hides a key like a pattern",),
        pitfalls=("a mask of 0 and 1 added as a bias hides nothing",),
    )


def mask(setting: Setting, before: Tensor) -> Step:
    """The scores where the pattern allows, −∞ elsewhere."""
    value = torch.where(setting.allowed, before, -math.inf)
    visible = setting.visible
    hidden, pairs = int((~visible).sum()), visible.numel()
    empty = [quoted(setting.query_tokens[i]) for i in (~visible.any(-1)).nonzero().flatten().tolist()] if pairs else []
    words = [f"{hidden} of {pairs} pairs are hidden" if hidden else "nothing is hidden: every query sees every key"]
    if empty:
        words.append(f"no key is left for {listed(empty)}: weights and output are 0 there")
    return Step(
        key="mask",
        title="mask",
        formula="S where allowed, else −∞",
        shapes=_shapes(setting, "S"),
        value=value,
        parts={"allowed": setting.allowed},
        words=tuple(words),
        pitfalls=("hide with −∞, before softmax: large scores can beat a mere −10000",),
    )


def softmax(setting: Setting, masked: Tensor) -> Step:
    """exp(S - max) / sum along the keys; rows that see nothing are 0."""
    highest = masked.amax(-1, keepdim=True) if masked.shape[-1] else masked.new_full((*masked.shape[:-1], 1), -math.inf)
    exponential = torch.where(setting.allowed, torch.exp(masked - torch.where(highest.isinf(), 0.0, highest)), 0.0)
    total = exponential.sum(-1, keepdim=True)
    value = torch.where(total == 0, 0.0, exponential / total)
    entropy = torch.special.entr(value).sum(-1, keepdim=True)
    theirs = torch.where(setting.allowed.any(-1, keepdim=True) & (total != 0), torch.softmax(masked, -1), 0.0)
    return Step(
        key="softmax",
        title="softmax",
        formula="P = exp(S − max) / sum",
        shapes=_shapes(setting, "S", "P"),
        value=value,
        parts={"max": highest, "shifted": masked - highest, "exp": exponential, "sum": total, "entropy": entropy},
        words=rows_in_words(setting, value),
        pitfalls=("along the keys, dim=-1; over the queries the columns sum to 1",),
        checks=(Check(against="torch.softmax", error=difference(value, theirs), bound=bound(setting)),),
    )


def rows_in_words(setting: Setting, weights: Tensor) -> tuple[str, ...]:
    """One sentence a row of a small case; the chosen row's alone of a large one."""
    chosen, visible = setting.pick(weights), setting.visible
    rows = range(chosen.shape[0]) if max(chosen.shape) <= 8 else [setting.row]
    return tuple(row_in_words(chosen[i], visible[i], setting.query_tokens[i], setting.key_tokens) for i in rows)


def dropout(setting: Setting, weights: Tensor) -> Step:
    """The kept weights times 1/(1-p), by the library's own rule: the mask that `qkv.attention` would draw."""
    B, H, L, S = weights.shape
    p, keep = setting.dropout_p, torch.ones_like(weights, dtype=torch.bool)
    words, formula = "off, p = 0: the weights pass unchanged", "P · keep / (1 − p)"
    value = weights
    if p > 0:
        positions = torch.arange(L)[None] + torch.tensor(setting.query_offset)[:, None]
        keep = dropout_keep(setting.seed, p, torch.arange(B), torch.arange(H), positions, torch.arange(S)[None])
        value = torch.where(keep, weights * keep_scale(p), 0.0)
        total = setting.pick(value)[setting.row].sum().item()
        formula = f"P · keep / (1 − {p:g})"
        gone = int((~setting.pick(keep) & setting.visible).sum())
        words = f"{gone} visible weight{'' if gone == 1 else 's'} dropped, the kept ones × {short(keep_scale(p))}; "
        words += f"row {quoted(setting.query_tokens[setting.row])} now sums to {short(total)}, on average to 1"
    return Step(
        key="dropout",
        title="dropout",
        formula=formula,
        shapes=_shapes(setting, "P"),
        value=value,
        parts={"keep": keep},
        words=(words,),
        pitfalls=("in training only; on the weights after softmax, never on the scores",),
    )


def output(setting: Setting, weights: Tensor, checks: tuple[Check, ...]) -> Step:
    """O = P V, with the chosen row written out."""
    value = weighted(setting, weights)
    row = setting.row
    name = setting.query_tokens[row]
    sentence = weighted_sum(setting.pick(weights)[row], setting.values, setting.pick(value)[row], name)
    letter = "h" if setting.key.shape[1] == setting.query.shape[1] else "g"
    return Step(
        key="output",
        title="output",
        formula="O = P V",
        einsum=f"b h l s , b {letter} s v -> b h l v",
        shapes=_shapes(setting, "P", "V", "O"),
        value=value,
        words=(sentence,),
        pitfalls=("join heads by a transpose back to (B, L, H, V), not by a view",),
        checks=checks,
    )


def weighted(setting: Setting, weights: Tensor) -> Tensor:
    """P V in which NaN and infinity behind a hidden pair do not reach the query."""
    value = grouped(setting.value, setting.query.shape[1])
    if bool(value.isfinite().all()):
        return torch.einsum("bhls,bhsv->bhlv", weights, value)
    products = weights[..., None] * value[:, :, None]  # (B, H, L, S, V)
    return torch.where(setting.allowed[..., None], products, 0.0).sum(-2)
