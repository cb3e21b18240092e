"""What mixes the tokens of a layer, chosen by one word: a pattern of softmax attention, or a linear variant.

Both kinds are then called in one way.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor, nn

from qkv.cache.base import Cache
from qkv.dispatch import BACKENDS
from qkv.errors import DTypeError, ShapeError, UnsupportedError, ValueOutOfRange, message, unknown_name
from qkv.linear.engine import NAMES
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


OPTIONS = {
    name for name, one in inspect.signature(MultiheadAttention).parameters.items() if one.kind is one.KEYWORD_ONLY
}
ELSEWHERE = {"pattern": "attention", "key_dim": "memory_dim", "value_dim": "memory_dim"}  # who says these of OPTIONS


def make_mixer(
    choice: Choice,
    dim: int,
    heads: int,
    *,
    causal: bool,
    attention_dropout: float = 0.0,
    bias: bool = True,
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
    attention_dropout, bias (of the projections), softmax_options: of MultiheadAttention. linear_options: of the linear
    layer. Those for the other kind are not looked at, so that an ablation changes the one word; a dropout of weights,
    which a linear layer does not have, is refused. None of them reaches what a function or a module brings: what is
    said here and is not so there is refused.
    """
    if choice is None or isinstance(choice, Pattern) or (isinstance(choice, str) and "(" in choice):
        pattern = parse(choice) if isinstance(choice, str) else choice
        if pattern is None and causal:
            pattern = causal_pattern()
        told = softmax_told(softmax_options, attention_dropout=attention_dropout, bias=bias, backend=backend)
        return MultiheadAttention(dim, heads, pattern=pattern, **told)
    if isinstance(choice, str):
        made: Mixer = _named(choice, dim, heads, backend, linear_options, causal=causal)
    else:
        brought = choice if isinstance(choice, nn.Module) or not callable(choice) else choice(dim, heads)
        made = _brought(brought, dim, causal=causal)
        said = {"attention_dropout": attention_dropout, "bias": bias, "backend": backend}
        _check_said(made, said, softmax_options if isinstance(made, MultiheadAttention) else linear_options)
    if isinstance(made, RecurrentLayer):
        _check_recurrent(made, causal=causal, attention_dropout=attention_dropout)
    return made


def softmax_told(
    options: Mapping[str, Any] | None, *, attention_dropout: float, bias: bool, backend: str
) -> dict[str, Any]:
    """What softmax attention is told beside its pattern: `options`, and where they are silent what the layer says.

    Raises UnknownName or ValueOutOfRange for a name that is not among MultiheadAttention's, or not said here.
    """
    told = _read_options("softmax_options", options, OPTIONS)
    for name in sorted(told.keys() & ELSEWHERE.keys()):
        remedy = f"say it as `{ELSEWHERE[name]}` of the layer"
        raise ValueOutOfRange(message("`softmax_options` must leave out what the layer says", f"got {name!r}", remedy))
    return {"attention_dropout": attention_dropout, "projection_bias": bias, "backend": backend, **told}


def backend_of_each(backend: str, layers: Sequence[Sequence[Choice]]) -> list[str]:
    """What each layer is told of a backend, given the attentions in it: "auto" where only others know that name.

    Softmax attention and linear layers have backends of their own. Where nobody knows the name all are told of it, so
    that it is refused.
    """
    known = [any(_knows(choice, backend) for choice in layer) for layer in layers]
    return [backend if knows or not any(known) else "auto" for knows in known]


def first_map(mixer: Mixer) -> nn.Module:
    """The first linear map of a mixer, which reads the stream."""
    if isinstance(mixer, MultiheadAttention):
        return mixer.q_proj
    return next((part for part in mixer.modules() if isinstance(part, nn.Linear)), mixer)


def mix(
    mixer: Mixer, x: Tensor, context: Context, state: Cache | LayerState | None = None
) -> tuple[Tensor, AuxOutput | None]:
    """One mixer over x (B, L, dim), whichever kind it is: y (B, L, dim), and what `context.aux` asks for.

    A recurrent layer has no weights to tell of, so that its AuxOutput is empty. state: of this mixer, advanced in
    place by the real rows alone.
    """
    check_kind(mixer, state)
    if isinstance(mixer, MultiheadAttention):
        return mixer.attend(x, context, state=cast("Cache | None", state))
    if context.pattern is not None:
        raise UnsupportedError(
            message(
                "a pass with a pattern must go through softmax attention",
                f"got {context.pattern} for {type(mixer).__name__}",
                "leave the pattern out, or choose a pattern as the layer's `attention`",
            )
        )
    y = _recurrent(mixer, x, context.lengths, cast("LayerState | None", state))
    return y, None if context.aux is None else AuxOutput()


def check_kind(mixer: nn.Module, state: Cache | LayerState | None) -> None:
    """Raise where a state is of the other kind of attention."""
    if isinstance(state, LayerState if isinstance(mixer, MultiheadAttention) else Cache):
        whose, kind = (
            ("softmax attention", "a cache") if isinstance(state, LayerState) else (_name(mixer), "a LayerState")
        )
        seen = f"got {type(state).__name__}"
        raise DTypeError(message(f"the state of {whose} must be {kind}", seen, "make it with initial_state"))


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


def _named(
    choice: str, dim: int, heads: int, backend: str, options: Mapping[str, Any] | None, *, causal: bool
) -> RecurrentLayer:
    """A linear variant by its name."""
    if choice not in VARIANTS:
        raise unknown_name("attention", choice, (*VARIANTS, "the text of a pattern such as 'causal()'"))
    if not causal and choice != "linear":
        raise _one_way(choice)
    told = _read_options(
        "linear_options", options, set(inspect.signature(VARIANTS[choice]).parameters) - {"dim", "heads"}
    )
    ways = {} if causal else {"is_causal": False}
    return VARIANTS[choice](dim, heads, **{**ways, "backend": backend, **told})


def _read_options(name: str, options: object, known: set[str]) -> dict[str, Any]:
    """Options by name, all of them known."""
    if options is None:
        return {}
    if not isinstance(options, Mapping):
        seen = f"got {type(options).__name__}"
        raise DTypeError(message(f"`{name}` must be a dict of options by name", seen, "or leave it out"))
    for one in options:
        if one not in known:
            raise unknown_name(name, one, known - ELSEWHERE.keys())
    return dict(options)


def _knows(choice: Choice, backend: str) -> bool:
    """Whether an attention may have a backend of this name; what a function or a module brings, is seen once made."""
    if choice is None or isinstance(choice, str | Pattern):
        linear = isinstance(choice, str) and choice in VARIANTS
        return backend in (NAMES if linear else ("auto", *(known.name for known in BACKENDS)))
    return True


def _brought(mixer: object, dim: int, *, causal: bool) -> Mixer:
    """What a function or a module brought: of a kind that fits, of this width, without the future in a decoder."""
    if not isinstance(mixer, MultiheadAttention | RecurrentLayer):
        raise DTypeError(
            message(
                "`attention` must be a pattern, its text, the name of a linear variant, or make "
                "a MultiheadAttention or a recurrent layer of qkv.nn",
                f"got {_name(mixer)}",
                f"write 'causal()' or one of {', '.join(VARIANTS)}",
            )
        )
    if mixer.dim != dim:
        seen = f"got {_name(mixer)} with dim {mixer.dim}"
        raise ShapeError(message(f"`attention` must have the layer's dim = {dim}", seen, "make it of that width"))
    if causal and isinstance(mixer, MultiheadAttention) and mixer.pattern is None:
        seen = f"got {_name(mixer)} without a pattern, which sees all tokens"
        raise UnsupportedError(_reads_ahead(seen, "give it pattern=causal(), or write attention='causal()'"))
    return mixer


def _check_said(mixer: Mixer, said: Mapping[str, Any], options: Mapping[str, Any] | None) -> None:
    """Raise where something was said that what a function or a module brought is not; nothing said is no error."""
    name = "softmax_options" if isinstance(mixer, MultiheadAttention) else "linear_options"
    if options:
        raise _not_told(mixer, name, options, "give these")
    if said["backend"] not in ("auto", mixer.backend):
        raise _not_told(mixer, "backend", said["backend"], "say it")
    if not isinstance(mixer, MultiheadAttention):
        return
    if said["attention_dropout"] not in (0.0, mixer.attention_dropout):
        raise _not_told(mixer, "attention_dropout", said["attention_dropout"], "say it")
    if not said["bias"] and getattr(mixer.q_proj, "bias", None) is not None:
        raise _not_told(mixer, "bias", said["bias"], "say projection_bias=False")


def _check_recurrent(mixer: RecurrentLayer, *, causal: bool, attention_dropout: float) -> None:
    """Raise where a recurrent layer does not read the ways that it must, or is to drop weights that it has not."""
    both_ways = isinstance(mixer, LinearAttention) and not mixer.is_causal
    if not (causal or both_ways):
        raise _one_way(_name(mixer))
    if causal and both_ways:
        raise UnsupportedError(_reads_ahead("got LinearAttention with is_causal=False", "say is_causal=True"))
    if attention_dropout:
        raise ValueOutOfRange(
            message(
                "`attention_dropout` must be 0 where `attention` is linear, which has no weights to drop",
                f"got {attention_dropout} for {_name(mixer)}",
                "use residual_dropout, which drops what the layer adds",
            )
        )


def _not_told(mixer: Mixer, name: str, value: object, what: str) -> ValueOutOfRange:
    holds = f"`{name}` must be told to what makes the attention, where that is a function or a module"
    return ValueOutOfRange(
        message(holds, f"got {value!r} for a {_name(mixer)} that differs", f"{what} where it is made")
    )


def _reads_ahead(seen: str, remedy: str) -> str:
    return message("a decoder's layers must not read what follows", seen, remedy)


def _one_way(name: str) -> UnsupportedError:
    return UnsupportedError(
        message(
            "an encoder's tokens must read both ways",
            f"{name} is a recurrence that reads from left to right",
            "choose 'linear' or a pattern, or stand it in a decoder",
        )
    )


def _name(thing: object) -> str:
    return type(thing).__name__
