"""What is asked of all layers before the first one goes on: one that cannot would leave the others ahead of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from qkv.cache.base import Cache
from qkv.errors import DeviceError, DTypeError, message
from qkv.linear.recurrence import compute_dtype
from qkv.nn.attention_checks import check_state
from qkv.nn.layer_state import LayerState
from qkv.nn.mixer import check_kind
from qkv.nn.multihead_attention import MultiheadAttention
from qkv.shapes import dtype_name


class Place(NamedTuple):
    """Where states must lie, and the type of inputs that they must be made for."""

    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, x: Tensor) -> Place:
        """What linear maps give of x."""
        kind = x.device.type
        if x.dtype != torch.float64 and torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):
            return cls(torch.get_autocast_dtype(kind), x.device)
        return cls(x.dtype, x.device)


def check_place(state: Cache | LayerState, place: Place) -> None:
    """Raise unless a state is made for this type and lies on this device."""
    if isinstance(state, Cache):
        fits, made, device = state.dtype == place.dtype, state.dtype, state.device
    else:
        recurrent, tail = state.recurrent.state, state.tail
        made, device = recurrent.dtype if tail is None else tail.dtype, recurrent.device
        fits = recurrent.dtype == compute_dtype(place.dtype) and (tail is None or made == place.dtype)
    if not fits:
        holds = f"`state` must be made for inputs of {dtype_name(place.dtype)}, in which the layers run here"
        remedy = f"make it with initial_state(..., dtype={place.dtype})"
        raise DTypeError(message(holds, f"got one for {dtype_name(made)}", remedy))
    if device != place.device:
        seen, remedy = f"got {place.device} and {device}", "make it with initial_state(..., device=...)"
        raise DeviceError(message("`x` and `state` must be on one device", seen, remedy))


def check_states(
    mixers: Sequence[nn.Module], states: Sequence[Cache | LayerState], x: Tensor, lengths: Sequence[int] | None
) -> None:
    """Raise where some layer cannot take x (B, L, dim), `lengths` of its rows real, into its state.

    That is a state of the other kind, a cache that is full, or dropout of weights.
    """
    for mixer, state in zip(mixers, states, strict=True):
        check_kind(mixer, state)
        if mixer.training and isinstance(mixer, MultiheadAttention) and mixer.attention_dropout:
            check_state(state, x.shape[0], mixer.attention_dropout)
    _check_room(states, [x.shape[1]] * x.shape[0] if lengths is None else list(lengths), x.shape[1])


def _check_room(states: Sequence[Cache | LayerState], counts: Sequence[int], rows: int) -> None:
    """Raise where a cache has no room for so many more tokens; those of one max_length are asked once."""
    caches = (state for state in states if isinstance(state, Cache))
    for cache in {getattr(cache, "max_length", id(cache)): cache for cache in caches}.values():
        cache.check_room(counts, rows)
