"""What each family must give, from its definition: plain, slow, in whatever type the streams have."""

from __future__ import annotations

from torch import Tensor

from qkv.compare.families import Family, Streams, call
from qkv.linear.features import elementwise, read_feature_map


def defined(family: Family, streams: Streams) -> Tensor:
    """The output (1, H, L, V), differentiable: a pattern over whole score matrices, a recurrence token by token."""
    if family.feature is None:
        return call(family, streams["query"].shape[2], "reference")(streams)
    return _over_pairs(family.feature, streams["query"], streams["key"], streams["value"])


def _over_pairs(name: str, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Linear attention with every pair's weight written out: phi(q)·phi(k) for the past, divided by their sum."""
    feature, mapping = read_feature_map(name, query.shape[-1])
    phi_q, phi_k = (elementwise(feature, x) if mapping is None else mapping(x) for x in (query, key))
    weights = (phi_q @ phi_k.mT).tril()
    return weights @ value / weights.sum(-1, keepdim=True)
