"""What mixes the tokens of a layer, chosen by one word: a pattern of softmax attention, or a linear variant.

Both kinds are then called in one way.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from qkv.cache.base import Cache
from qkv.errors import DTypeError, ShapeError, UnsupportedError, ValueOutOfRange, message, unknown_name
from qkv.nn.context import Context
from qkv.nn.gated_delta_net import GatedDeltaNet
from qkv.nn.gated_linear_attention import GatedLinearAttention
from qkv.nn.kimi_delta_attention import KimiDeltaAttention
from qkv.nn.layer import RecurrentLayer
from qkv.nn.layer_state import LayerState
from qkv.nn.linear_attention import LinearAttention
from qkv.nn.mamba2 import Mamba2Mixer
from qkv.nn.multihead_attention import MultiheadAttention
from qkv.nn.retention import Retention
from qkv.nn.rows import Rows
from qkv.patterns import causal as causal_pattern
from qkv.patterns.pattern import Pattern
from qkv.patterns.text import parse
from qkv.types import AuxOutput

Mixer: TypeAlias = MultiheadAttention | RecurrentLayer
Choice: TypeAlias = Pattern | str | Mixer | Callable[[int, int], Mixer] | None

VARIANTS: dict[str, type[RecurrentLayer]] = {
    "linear": LinearAttention,
    "retention": Retention,
    "gated_linear": GatedLinearAttention,
    "gated_delta": GatedDeltaNet,
    "kimi_delta": KimiDeltaAttention,
    "mamba2": Mamba2Mixer,
}


def make_mixer(
    choice: Choice,
    dim: int,
    heads: int,
    *,
    causal: bool,
    attention_dropout: float = 0.0,
    backend: str = "auto",
    softmax_options: Mapping[str, Any] | None = None,
    linear_options: Mapping[str, Any] | None = None,
) -> Mixer:
    """The module that a layer's `attention=` says, for x (B, L, dim) and so many heads.

    choice: None, all tokens, or those up to one's own where `causal`; a pattern, or its text as `qkv.parse` reads it:
    softmax attention over exactly that; the name of a linear variant, one of VARIANTS; a function of (dim, heads) that
    makes a MultiheadAttention or a recurrent layer, such as the class itself; or one that is made.
    causal: whether it stands in a decoder, where every linear variant fits, or in an encoder, where the one that can
    read both ways does, "linear".
    attention_dropout, softmax_options: of MultiheadAttention. linear_options: of the linear layer. Those for the other
    kind are not looked at, so that an ablation changes the one word; a dropout of weights, which a linear layer
    does not have, is refused. None of them reaches a module that is made elsewhere.
    """
    if isinstance(choice, str) and "(" not in choice:
        if choice not in VARIANTS:
            raise unknown_name("attention", choice, (*VARIANTS, "the text of a pattern such as 'causal()'"))
        options = {**_ways(choice, causal), "backend": backend, **(linear_options or {})}
        made: object = VARIANTS[choice](dim, heads, **options)
    elif choice is None or isinstance(choice, str | Pattern):
        if choice is None:
            choice = causal_pattern() if causal else None
        pattern = parse(choice) if isinstance(choice, str) else choice
        options = {"attention_dropout": attention_dropout, "backend": backend, **(softmax_options or {})}
        return MultiheadAttention(dim, heads, pattern=pattern, **options)
    elif isinstance(choice, nn.Module):
        made = choice
    elif callable(choice):
        made = choice(dim, heads)
    else:
        made = choice
    return _checked(made, dim, causal=causal, attention_dropout=attention_dropout)


def mix(
    mixer: Mixer, x: Tensor, context: Context, state: Cache | LayerState | None = None
) -> tuple[Tensor, AuxOutput | None]:
    """One mixer over x (B, L, dim), whichever kind it is: y (B, L, dim), and what `context.aux` asks for.

    A recurrent layer has no weights to tell of, so that its AuxOutput is empty. state: of this mixer, advanced in
    place by the real rows alone.
    """
    if isinstance(mixer, MultiheadAttention):
        if isinstance(state, LayerState):
            raise DTypeError(_state_of("softmax attention", "a cache", state))
        return mixer.attend(x, context, state=state)
    if isinstance(state, Cache):
        raise DTypeError(_state_of(type(mixer).__name__, "a LayerState", state))
    if context.pattern is not None:
        raise UnsupportedError(
            message(
                "a pass with a pattern must go through softmax attention",
                f"got {context.pattern} for {type(mixer).__name__}",
                "leave the pattern out, or choose a pattern as the layer's `attention`",
            )
        )
    return _recurrent(mixer, x, context.lengths, state), None if context.aux is None else AuxOutput()


def _recurrent(mixer: RecurrentLayer, x: Tensor, lengths: Sequence[int] | None, state: LayerState | None) -> Tensor:
    """A recurrent layer over the real rows of x (B, L, dim), `lengths` of each sequence from the left."""
    if lengths is None:
        if state is None:
            return mixer(x)
        if x.shape[1] == 1 and not torch.is_grad_enabled():
            return mixer.step(x[:, 0], state)[0][:, None]
        return mixer(x, state)[0]
    rows = Rows.padded(lengths, *x.shape[:2])
    packed = rows.packed(x)
    if state is None:
        return rows.unpacked(mixer(packed, cu_seqlens=rows.cu_seqlens))
    return rows.unpacked(mixer(packed, state, rows.cu_seqlens)[0])


def _ways(choice: str, causal: bool) -> dict[str, bool]:
    """What a linear variant by name must be told of the ways that it reads."""
    if causal:
        return {}
    if choice != "linear":
        raise _one_way(choice)
    return {"is_causal": False}


def _checked(mixer: object, dim: int, *, causal: bool, attention_dropout: float) -> Mixer:
    """A mixer that was not made here as softmax attention: of a kind that fits, of this width."""
    if not isinstance(mixer, MultiheadAttention | RecurrentLayer):
        raise DTypeError(
            message(
                "`attention` must be a pattern, its text, the name of a linear variant, or make "
                "a MultiheadAttention or a recurrent layer of qkv.nn",
                f"got {type(mixer).__name__}",
                f"write 'causal()' or one of {', '.join(VARIANTS)}",
            )
        )
    if mixer.dim != dim:
        seen = f"got {type(mixer).__name__} with dim {mixer.dim}"
        raise ShapeError(message(f"`attention` must have the layer's dim = {dim}", seen, "make it of that width"))
    if isinstance(mixer, RecurrentLayer):
        both_ways = isinstance(mixer, LinearAttention) and not mixer.is_causal
        if not (causal or both_ways):
            raise _one_way(type(mixer).__name__)
        if causal and both_ways:
            seen = "got LinearAttention with is_causal=False"
            raise UnsupportedError(message("a decoder's layers must not read what follows", seen, "say is_causal=True"))
        if attention_dropout:
            raise ValueOutOfRange(
                message(
                    "`attention_dropout` must be 0 where `attention` is linear, which has no weights to drop",
                    f"got {attention_dropout} for {type(mixer).__name__}",
                    "use residual_dropout, which drops what the layer adds",
                )
            )
    return mixer


def _one_way(name: str) -> UnsupportedError:
    return UnsupportedError(
        message(
            "an encoder's tokens must read both ways",
            f"{name} is a recurrence that reads from left to right",
            "choose 'linear' or a pattern, or stand it in a decoder",
        )
    )


def _state_of(layer: str, kind: str, state: object) -> str:
    return message(f"the state of {layer} must be {kind}", f"got {type(state).__name__}", "use initial_state(batch)")
