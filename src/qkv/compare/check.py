"""No figure without a right result: each family first meets its own definition in float64, at a short length."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from qkv.compare.calls import Call, next_token, whole
from qkv.compare.families import BASELINE, BY_NAME, Family, call
from qkv.compare.inputs import make_gradient, make_streams
from qkv.compare.setting import Setting
from qkv.compare.truth import defined

TOKENS, HEADS = 333, 2  # more than a window, and a part of a block
# What rounding may move a row of a result by, as a share of its length: some tens of roundings of the type.
ALLOWED = {"float64": 1e-12, "float32": 1e-5, "float16": 1.5e-3, "bfloat16": 1e-2}
GRADIENTS = 4  # times as much for a gradient, whose sums are longer


class Verdict(NamedTuple):
    """The worst of a result's rows: its distance from float64, as a share of what is allowed, and whose row it is."""

    share: float
    what: str

    @property
    def passed(self) -> bool:
        """Never where a number is NaN."""
        return self.share <= 1

    def __str__(self) -> str:
        return f"{self.what} is {self.share:.3g} times what rounding may explain away from float64"


def check(family: Family, setting: Setting) -> Verdict:
    """The call that is measured, on TOKENS tokens and HEADS heads, against the plain form of the same in float64."""
    streams, gradient = make_streams(family, setting, TOKENS, HEADS), make_gradient(setting, TOKENS, HEADS)
    truth = _truth(family, streams, gradient, setting)
    if setting.direction == "decode":
        mine = _ran(next_token(family, setting, streams, TOKENS, all_read=True))
        truth = {"output": truth["output"][:, :, -1:]}
    else:
        mine = _ran(whole(call(family, TOKENS), streams, gradient, setting.direction))
    return max(_compared(name, mine[name], truth[name], setting.dtype) for name in truth)


def distance(family: Family, setting: Setting, tokens: int) -> float:
    """How far the output is from dense softmax attention's on the same q, k, v: relative Frobenius norm.

    Dense attention sees what the family may see: all tokens for `full`, the past for all others. A rule of its own is
    compared up to one factor, which a norm behind it would take away.
    """
    dense = BASELINE if family.name != "full" else BY_NAME["full"]
    mine, theirs = (_output(one, setting, tokens) for one in (family, dense))
    if family.kind == "recurrence":
        mine = mine * ((mine * theirs).sum() / mine.square().sum())
    return float((mine - theirs).norm() / theirs.norm())


def _output(family: Family, setting: Setting, tokens: int) -> Tensor:
    streams = make_streams(family, setting, tokens)
    with torch.no_grad():
        return call(family, tokens)(streams).double()


def _truth(family: Family, streams: dict[str, Tensor], gradient: Tensor, setting: Setting) -> dict[str, Tensor]:
    wide = {name: tensor.double() for name, tensor in streams.items()}
    direction = "forward" if setting.direction == "decode" else setting.direction
    return _ran(whole(partial(defined, family), wide, gradient.double(), direction))


def _ran(ready: Call) -> dict[str, Tensor]:
    return ready.read(ready.run())


def _compared(name: str, mine: Tensor, truth: Tensor, dtype: str) -> Verdict:
    """Row by row; a row shorter than the typical one counts as long as that."""
    is_output = name == "output"
    what, allowed = "the output" if is_output else f"the gradient of {name}", ALLOWED[dtype]
    allowed *= 1 if is_output else GRADIENTS
    lengths = truth.norm(dim=-1)
    typical = lengths.square().mean().sqrt()
    off = (mine.double() - truth).norm(dim=-1) / lengths.clamp_min(typical)
    return Verdict(float(off.nan_to_num(nan=torch.inf).amax()) / allowed, what)
