"""Classic mistakes in attention code, made on purpose, to be seen beside the right weights."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from qkv.errors import unknown_name
from qkv.explain.figures import short
from qkv.explain.steps import Mistake, Setting, Step
from qkv.explain.words import quoted

Steps = Mapping[str, Step]


def _softmax(setting: Setting, scores: Tensor, axis: int = -1) -> Tensor:
    return torch.softmax(torch.where(setting.allowed, scores, -math.inf), axis)


def _unscaled(setting: Setting, steps: Steps) -> Tensor:
    scores = steps["scores"].value
    if setting.softcap is not None:
        scores = setting.softcap * torch.tanh(scores / setting.softcap)
    return _softmax(setting, scores if setting.bias is None else scores + setting.bias)


def _over_queries(setting: Setting, steps: Steps) -> Tensor:
    return _softmax(setting, steps["mask"].value, -2)


def _masked_late(setting: Setting, steps: Steps) -> Tensor:
    return torch.softmax(_before_mask(steps), -1) * setting.allowed


def _inverted(setting: Setting, steps: Steps) -> Tensor:
    return torch.softmax(torch.where(setting.allowed, -math.inf, _before_mask(steps)), -1)


def _before_mask(steps: Steps) -> Tensor:
    keys = list(steps)
    return steps[keys[keys.index("mask") - 1]].value


MISTAKES: Mapping[str, tuple[str, Callable[[Setting, Steps], Tensor]]] = {
    "no-scale": ("the scores go into softmax without the factor 1/√D", _unscaled),
    "wrong-axis": ("softmax over the queries instead of the keys (dim=-2)", _over_queries),
    "mask-after-softmax": ("weights set to 0 after softmax, the rest keep their size", _masked_late),
    "inverted-mask": ("read the wrong way round: what may be seen is hidden", _inverted),
}


def make_mistake(name: str, setting: Setting, steps: Steps) -> Mistake:
    """The weights of one mistake, and what shows in the chosen row."""
    if name not in MISTAKES:
        raise unknown_name("mistake", name, MISTAKES)
    title, weights = MISTAKES[name]
    value = weights(setting, steps)
    right, wrong = setting.pick(steps["softmax"].value), setting.pick(value)
    row = _telling_row(setting.row, right, wrong)
    if row is None:
        words = (
            "no difference: the pattern hides nothing here (causal() would)" if "mask" in name else "no difference here"
        )
        return Mistake(name=name, title=title, value=value, row=setting.row, words=(words,))
    words = _what_shows(name, quoted(setting.query_tokens[row]), right[row], wrong[row])
    return Mistake(name=name, title=title, value=value, row=row, words=(words,))


def _telling_row(chosen: int, right: Tensor, wrong: Tensor) -> int | None:
    """The chosen row where the mistake shows in it, else the first in which it does."""
    differs = [
        not torch.allclose(a, b, rtol=0.0, atol=1e-12, equal_nan=True) for a, b in zip(right, wrong, strict=True)
    ]
    return chosen if differs[chosen] else differs.index(True) if any(differs) else None


def _what_shows(name: str, who: str, right: Tensor, wrong: Tensor) -> str:
    if bool(wrong.isnan().any()):
        return f"row {who} has no key left: torch.softmax gives NaN, and so does every layer above it"
    if name == "no-scale":
        change = "sharper" if wrong.amax() > right.amax() else "flatter"
        before, after = short(right.amax().item()), short(wrong.amax().item())
        return f"the largest weight of row {who} goes from {before} to {after}: {change}"
    if name == "inverted-mask":
        return f"row {who} looks at nothing but the keys that it must not see"
    return f"row {who} sums to {short(wrong.sum().item())}, not to 1"
