"""What a recurrent state is made for: a rule of the linear family by name, its sizes and its options.

Names and defaults are those of the functions: "linear" is `linear_attention`, "gated_delta" is `gated_delta_rule`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from qkv.cache.arguments import read_size
from qkv.errors import DeviceError, DTypeError, ShapeError, ValueOutOfRange, message, unknown_name
from qkv.inputs import read_scale
from qkv.linear.beside import check_sign
from qkv.linear.engine import check_name
from qkv.linear.features import FeatureMap, read_feature_map
from qkv.linear.recurrence import Feature, Gate, Recurrence, compute_dtype
from qkv.shapes import FLOATS, check_dense, describe, dtype_name, values_can_be_seen


class Rule(NamedTuple):
    """One setting of the recurrence, and what its function takes where nothing is said."""

    gate: Gate = "none"
    delta: bool = False
    constant: bool = False  # the gate is a number a head, given once
    feature: str = "none"
    normalize: bool = False
    scale: float | None = None  # None: 1/sqrt(D)


RULES = {
    "linear": Rule(feature="elu", normalize=True, scale=1.0),
    "retention": Rule("scalar", constant=True),
    "gated_linear": Rule("vector"),
    "delta": Rule(delta=True),
    "gated_delta": Rule("scalar", delta=True),
    "kimi_delta": Rule("vector", delta=True),
    "ssd": Rule("scalar", scale=1.0),
}


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Setting:
    """All of a state that no token changes, but for B, the number of sequences."""

    name: str
    heads: int  # H
    key_heads: int  # K
    key_dim: int  # D, the width of q and k
    features: int  # the width of phi(q) and phi(k): that of the state
    value_dim: int  # V
    feature: Feature  # phi element by element, within the engine
    feature_map: FeatureMap | None  # phi that is applied before it
    normalize: bool
    scale: float
    decay: Tensor | None  # (H,) in the type of the state
    dtype: torch.dtype  # of the state: float32, or float64
    device: torch.device
    backend: str

    @property
    def rule(self) -> Rule:
        return RULES[self.name]

    def shape(self, batch: int) -> tuple[int, int, int, int]:
        """(B, H, D, W), with the width of the features as D."""
        return batch, self.heads, self.features, self.value_dim + self.normalize

    def recurrence(self, batch: int, length: int, dtype: torch.dtype) -> Recurrence:
        """The question of `length` tokens of this type to each of `batch` sequences."""
        return Recurrence(
            batch=batch,
            heads=self.heads,
            key_heads=self.key_heads,
            length=length,
            key_dim=self.features,
            value_dim=self.value_dim,
            gate=self.rule.gate,
            delta=self.rule.delta,
            normalize=self.normalize,
            feature=self.feature,
            scale=self.scale,
            dtype=dtype,
        )

    def facts(self) -> str:
        """In a line, what the numbers of a state mean, its shape and the inside of a feature map apart."""
        facts = [f"rule {self.name!r}", f"features {self.features_name}", f"normalize {self.normalize}"]
        facts += [f"scale {self.scale!r}", dtype_name(self.dtype)]
        if self.decay is not None and values_can_be_seen(self.decay):
            facts.insert(-1, f"decay {self.decay.tolist()}")
        return ", ".join(facts)

    @property
    def features_name(self) -> str:
        """What phi is called."""
        return self.feature if self.feature_map is None else type(self.feature_map).__name__


def read_setting(
    heads: object,
    key_dim: object,
    value_dim: object,
    rule: object,
    *,
    key_heads: object,
    feature_map: object,
    normalize: object,
    scale: object,
    decay: object,
    dtype: object,
    device: torch.device | str | None,
    backend: object,
) -> Setting:
    """Check what a state is made with; None is the default of the rule's function."""
    if not isinstance(rule, str) or rule not in RULES:
        raise unknown_name("rule", rule, RULES)
    if not isinstance(dtype, torch.dtype) or dtype not in FLOATS:
        holds = "`dtype` must be float16, bfloat16, float32 or float64"
        raise DTypeError(message(holds, f"got {dtype!r}", "give the type of q, k and v"))
    if normalize is not None and not isinstance(normalize, bool):
        raise DTypeError(message("`normalize` must be a bool", f"got {normalize!r}", "leave it out for the rule's own"))
    check_name(backend)
    known, width = RULES[rule], read_size("key_dim", key_dim, 1)
    count = read_size("heads", heads, 1)
    wide = compute_dtype(dtype)
    place = torch.empty(0, device=device).device
    groups = _read_key_heads(key_heads, count)
    feature, applied = read_feature_map(known.feature if feature_map is None else feature_map, width)  # type: ignore[arg-type]
    features = width if applied is None else _width_of(applied, groups, width, wide, place)
    return Setting(
        name=rule,
        heads=count,
        key_heads=groups,
        key_dim=width,
        features=features,
        value_dim=read_size("value_dim", value_dim, 1),
        feature=feature,
        feature_map=applied,
        normalize=known.normalize if normalize is None else normalize,
        scale=known.scale if scale is None and known.scale is not None else read_scale(scale, width),
        decay=_read_decay(decay, rule, count, wide, place),
        dtype=wide,
        device=place,
        backend=str(backend),
    )


def same_map(one: object, other: object) -> bool:
    """Whether two feature maps give the same features: one object, or modules of one kind with equal contents."""
    if not (isinstance(one, nn.Module) and type(one) is type(other)):
        return one is other
    mine, theirs = ({k: v for k, v in vars(phi).items() if k != "training"} for phi in (one, other))
    return _equal(mine, theirs)


def _equal(one: object, other: object) -> bool:
    """Whether what two modules hold under one name is the same; where that cannot be told it is not."""
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        alike = one.shape == other.shape and one.dtype == other.dtype
        return alike and (one is other or torch.equal(one.detach().cpu(), other.detach().cpu()))
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_equal(one[name], other[name]) for name in one)
    if isinstance(one, nn.Module):
        return same_map(one, other)
    try:
        return one is other or (type(one) is type(other) and bool(one == other))
    except (TypeError, ValueError, RuntimeError):
        return False


def _read_key_heads(key_heads: object, heads: int) -> int:
    if key_heads is None:
        return heads
    count = read_size("key_heads", key_heads, 1)
    if heads % count:
        holds = "the value heads H must be a multiple of the key heads K"
        raise ShapeError(message(holds, f"got H = {heads}, K = {count}", "give a divisor of `heads`"))
    return count


def _width_of(feature_map: FeatureMap, heads: int, width: int, dtype: torch.dtype, device: torch.device) -> int:
    """How many features a map makes of D numbers, found by asking it for those of a zero."""
    with torch.no_grad():
        return feature_map(torch.zeros(1, heads, 1, width, dtype=dtype, device=device)).shape[-1]


def _read_decay(decay: object, name: str, heads: int, dtype: torch.dtype, device: torch.device) -> Tensor | None:
    """The log of the constant of each head, in the type of the state and in memory of its own."""
    if not RULES[name].constant:
        if decay is not None:
            holds = f"`decay` must be left out for rule {name!r}"
            raise ValueOutOfRange(message(holds, f"got {describe(decay)}", "pass g to step"))
        return None
    holds = f"`decay` must be given for rule {name!r}: a tensor (H,), the log of each head's constant"
    if decay is None:
        raise DTypeError(message(holds, "got None", "say decay=torch.log1p(-2.0 ** (-5 - torch.arange(H)))"))
    given = check_dense("decay", decay)
    if tuple(given.shape) != (heads,) or given.dtype not in FLOATS:
        raise ShapeError(message(holds, f"got {describe(given)} for H = {heads}", "give one number a head"))
    if given.device != device:
        holds = f"`decay` must be on the state's device, {device}"
        raise DeviceError(message(holds, f"got {given.device}", f"move it with decay.to({str(device)!r})"))
    with torch.inference_mode(False):
        own = given.detach().to(dtype, copy=True)
    check_sign("decay", own)
    return own
