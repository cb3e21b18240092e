"""Feature maps phi of linear attention: what is done to q and k, so that phi(q)·phi(k) is the weight of a pair.

Three maps work element by element and run inside every engine: `elementwise`. The others are modules from (..., D) to
(..., M) that are applied before it: features_fixed.py and features_learned.py. `read_feature_map` tells them apart.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias, get_args

import torch
from torch import Tensor

from qkv.errors import DTypeError, ShapeError, message, unknown_name
from qkv.linear.features_fixed import favor_by_name, softmax_features, taylor_features
from qkv.linear.features_learned import mirrored_softmax
from qkv.linear.recurrence import Feature

FeatureMap: TypeAlias = Callable[[Tensor], Tensor]

ELEMENTWISE: tuple[Feature, ...] = get_args(Feature)
WHOLE: dict[str, FeatureMap] = {
    "softmax": softmax_features,
    "favor": favor_by_name,
    "hedgehog": mirrored_softmax,  # at its identity start
    "taylor": taylor_features,
}
FEATURE_MAPS = (*ELEMENTWISE, *WHOLE)


def elementwise(name: Feature, x: Tensor) -> Tensor:
    """One of the maps that work on each number by itself, in the type of x.

    "elu" is elu(x) + 1 (Katharopoulos et al., 2020) in branches, x + 1 above 0 and exp(x) below: the sum would round
    to 0 where exp(x) does not, from x = -8 in bfloat16. "relu" is max(x, 0), "squared_relu" its square.
    """
    if name == "elu":
        return torch.where(x > 0, x + 1, x.clamp(max=0).exp())
    if name == "relu":
        return x.relu()
    if name == "squared_relu":
        return x.relu() * x.relu()
    return x


def read_feature_map(feature_map: str | FeatureMap | None, head_dim: int) -> tuple[Feature, FeatureMap | None]:
    """What an engine is told, and what is to be applied to q and to k before it, if anything.

    A module or callable gets q and k as (B, K, L, D) and gives (B, K, L, M) in any floating type: the maps of this
    package give float32 for 16-bit inputs, so that features are not rounded again. None is "none".
    """
    if feature_map is None:
        return "none", None
    if callable(feature_map):
        _check_width(feature_map, head_dim)
        return "none", feature_map
    if not isinstance(feature_map, str):
        raise DTypeError(
            message(
                "`feature_map` must be a name, or a module or function from (..., D) to (..., M)",
                f"got {type(feature_map).__name__}",
                f"choose one of {', '.join(FEATURE_MAPS)}, or pass a callable",
            )
        )
    for name in ELEMENTWISE:
        if feature_map == name:
            return name, None
    if feature_map not in WHOLE:
        raise unknown_name("feature_map", feature_map, FEATURE_MAPS)
    return "none", WHOLE[feature_map]


def _check_width(feature_map: FeatureMap, head_dim: int) -> None:
    """A map that says for which width it was made must be given that width."""
    made_for = getattr(feature_map, "head_dim", head_dim)
    if made_for != head_dim:
        holds = "`feature_map` must be made for the width D of `query` and `key`"
        seen = f"it has head_dim {made_for}, and D is {head_dim}"
        raise ShapeError(message(holds, seen, f"make it with head_dim={head_dim}"))
