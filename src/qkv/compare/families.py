"""The families that are compared, one row each: what it costs, what it is, and the call that computes it.

Costs are those of the article: dense O(L^2 d), sparse O(L sqrt(L) d), local O(L k d), linear O(L d^2).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from torch import Tensor

from qkv.attention import attention
from qkv.linear.delta_rule import delta_rule, gated_delta_rule, kimi_delta_attention
from qkv.linear.gated_linear_attention import gated_linear_attention
from qkv.linear.linear_attention import linear_attention
from qkv.linear.retention import retention
from qkv.linear.ssd import ssd
from qkv.patterns import bigbird, causal, fixed, full, sliding_window, strided
from qkv.patterns.pattern import Pattern

Group: TypeAlias = Literal["dense", "sparse", "local", "linear"]
GROUPS: tuple[Group, ...] = ("dense", "sparse", "local", "linear")
Kind: TypeAlias = Literal["softmax", "pattern", "features", "recurrence"]
KINDS: dict[Kind, str] = {
    "softmax": "softmax attention itself",
    "pattern": "exact for the pairs it sees",
    "features": "approximates softmax",
    "recurrence": "a rule of its own",
}
# The same for one more token of L.
ORDER_OF_A_STEP = {"L^2 d": "L d", "L^1.5 d": "L^.5 d", "L k d": "k d", "L d^2": "d^2", "L d^3": "d^3"}
WINDOW = 256  # keys
Streams: TypeAlias = Mapping[str, Tensor]  # "query", "key", "value", and "g", "beta" where the rule reads them


@dataclass(frozen=True, kw_only=True, slots=True)
class Family:
    """One row of the table."""

    name: str
    group: Group
    kind: Kind
    order: str  # what a call costs
    growth: float  # the exponent of L in it
    meaning: str
    function: Callable[..., Tensor] = attention
    pattern: Callable[[int], Pattern] | None = None  # by length
    feature: str | None = None  # the map of q and k
    reads: tuple[str, ...] = ()  # streams beside q, k and v: "g", "beta", "decay"
    unit: bool = False  # q and k of length 1, without which a delta rule diverges
    vector: bool = False  # g is one number a channel
    decodes: bool = True


def _sparse(name: str, meaning: str, pattern: Callable[[int], Pattern], order: str, growth: float) -> Family:
    return Family(
        name=name, group="sparse", kind="pattern", order=order, growth=growth, meaning=meaning, pattern=pattern
    )


def _features(feature: str, meaning: str, order: str = "L d^2") -> Family:
    return Family(
        name=f"linear-{feature}",
        group="linear",
        kind="features",
        order=order,
        growth=1,
        meaning=meaning,
        function=linear_attention,
        feature=feature,
    )


def _rule(name: str, meaning: str, function: Callable[..., Tensor], *reads: str, vector: bool = False) -> Family:
    return Family(
        name=name,
        group="linear",
        kind="recurrence",
        order="L d^2",
        growth=1,
        meaning=meaning,
        function=function,
        reads=reads,
        unit="beta" in reads,
        vector=vector,
    )


FAMILIES = (
    Family(
        name="full",
        group="dense",
        kind="softmax",
        order="L^2 d",
        growth=2,
        meaning="every token sees every token",
        pattern=lambda _: full(),
        decodes=False,
    ),
    Family(
        name="causal",
        group="dense",
        kind="softmax",
        order="L^2 d",
        growth=2,
        meaning="every token sees itself and all before it",
        pattern=lambda _: causal(),
    ),
    _sparse(
        "strided", "the last sqrt(L), and every sqrt(L)-th before", lambda n: strided(math.isqrt(n)), "L^1.5 d", 1.5
    ),
    _sparse(
        "fixed", "its block of sqrt(L), and each block's last token", lambda n: fixed(math.isqrt(n)), "L^1.5 d", 1.5
    ),
    _sparse(
        "bigbird", "blocks of 64: near, first and random ones", lambda _: causal() & bigbird(3, 64, 2, 0), "L k d", 1
    ),
    Family(
        name="window",
        group="local",
        kind="pattern",
        order="L k d",
        growth=1,
        meaning=f"the last {WINDOW} tokens",
        pattern=lambda _: sliding_window(WINDOW),
    ),
    _features("elu", "weights elu(q)+1 times elu(k)+1"),
    _features("softmax", "features: softmax over the entries"),
    _features("hedgehog", "features to be learned, at their start"),
    _features("favor", "4 d random features of the softmax kernel"),
    _features("taylor", "exp by its series to second order", "L d^3"),
    _rule("retention", "a state that fades by a constant a head", retention, "decay"),
    _rule("gated-linear", "fades by a gate a channel", gated_linear_attention, "g", vector=True),
    _rule("delta", "overwrites what a key held", delta_rule, "beta"),
    _rule("gated-delta", "the same, fading by a gate a token", gated_delta_rule, "g", "beta"),
    _rule("kimi-delta", "the same, by a gate a channel", kimi_delta_attention, "g", "beta", vector=True),
    _rule("ssd", "Mamba-2: fades by a gate a token", ssd, "g"),
)
BY_NAME = {family.name: family for family in FAMILIES}
BASELINE = BY_NAME["causal"]


def call(family: Family, tokens: int, backend: str = "auto") -> Callable[[Streams], Tensor]:
    """What computes a family: streams (1, H, L, *) to an output (1, H, L, V)."""
    options: dict[str, Any] = {"backend": backend}
    if family.pattern is not None:
        options |= {"pattern": family.pattern(tokens)}
    if family.feature is not None:
        options |= {"feature_map": family.feature}
    function = family.function

    def run(streams: Streams) -> Tensor:
        given = {name: streams[name] for name in family.reads}
        return function(streams["query"], streams["key"], streams["value"], **given, **options)

    return run
