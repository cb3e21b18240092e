"""The checks of a layer of softmax attention: of what it is made with, and of what it is called with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import torch
from torch import Tensor, nn

from qkv.cache.base import Cache
from qkv.cache.within import draws_by_length, looks_back
from qkv.dispatch import BACKENDS
from qkv.errors import DTypeError, ShapeError, UnsupportedError, ValueOutOfRange, message, unknown_name
from qkv.inputs import read_pattern
from qkv.nn.attention_state import Keys
from qkv.nn.rotary import Rotary
from qkv.patterns.pattern import Pattern
from qkv.scores import Alibi, Relative
from qkv.shapes import check_dense, describe, dtype_name

Bias: TypeAlias = Tensor | Alibi | Relative
BIAS_HOLDS = "`bias` must be a tensor, alibi(slopes), relative(table), or a module whose forward() gives one of them"


def read_own_pattern(pattern: object) -> Pattern | None:
    """A pattern or None, which stays None."""
    return None if pattern is None else read_pattern(pattern)


def read_own_bias(bias: object) -> Bias | nn.Module | None:
    """What is added to the scores, or a module whose forward() gives it."""
    if bias is None or isinstance(bias, nn.Module | nn.Parameter):
        return bias
    if isinstance(bias, Tensor | Alibi | Relative):
        numbers = bias.table if isinstance(bias, Relative) else bias.slopes if isinstance(bias, Alibi) else bias
        if isinstance(numbers, Tensor) and numbers.requires_grad:
            holds = "a `bias` that is learned must be a parameter or a module, to be among the layer's parameters"
            remedy = "give nn.Parameter(tensor), or a module such as T5RelativeBias or AlibiBias; else detach it"
            raise UnsupportedError(message(holds, f"got {_kind(bias)} that requires a gradient", remedy))
        return bias
    remedy = "say projection_bias for those of the projections" if isinstance(bias, bool) else "make one of these"
    raise DTypeError(message(BIAS_HOLDS, f"got {bias!r}", remedy))


def _kind(bias: Tensor | Alibi | Relative) -> str:
    return f"the tensor {describe(bias)}" if isinstance(bias, Tensor) else str(bias)


def read_rotary(rotary: object, head_dim: int) -> Rotary | None:
    """Rotary positions for heads of this width."""
    if rotary is None:
        return None
    remedy = f"say rotary=Rotary({head_dim})"
    if not isinstance(rotary, Rotary):
        raise DTypeError(message("`rotary` must be a Rotary or None", f"got {rotary!r}", remedy))
    if rotary.head_dim != head_dim:
        seen = f"got one for {rotary.head_dim}"
        raise ShapeError(message(f"`rotary` must be for heads of width D = {head_dim}", seen, remedy))
    return rotary


def check_backend(backend: object) -> None:
    """Raise UnknownName for a name that does not exist."""
    names = ["auto", *(known.name for known in BACKENDS)]
    if backend not in names:
        raise unknown_name("backend", backend, names)


def check_rows(name: str, x: object, width: int, projection: nn.Module) -> None:
    """Raise unless x is (B, L, width), in a type that its projection reads."""
    if not isinstance(x, Tensor):
        raise DTypeError(message(f"`{name}` must be a tensor", f"got {type(x).__name__}", "pass a torch.Tensor"))
    if x.layout is not torch.strided or x.is_nested:
        check_dense(name, x)
    if x.ndim != 3 or x.shape[2] != width:
        remedy = "a single sequence is x[None]" if x.ndim == 2 else "the last axis is the width that the layer reads"
        raise ShapeError(message(f"`{name}` must be (B, L, {width})", f"got {describe(x)}", remedy))
    weight = getattr(projection, "weight", None)  # one that was put there may keep it elsewhere, or none
    if isinstance(weight, Tensor) and x.dtype != weight.dtype and not _may_differ(x, weight):
        holds = f"`{name}` must have the type of the layer's weights, {dtype_name(weight.dtype)}"
        remedy = f"cast it with .to(torch.{dtype_name(weight.dtype)}), or the layer, or call under torch.autocast"
        raise DTypeError(message(holds, f"got {describe(x)}", remedy))


def check_token(x: object, width: int) -> None:
    """Raise unless x is one token of each sequence."""
    if not isinstance(x, Tensor) or x.ndim != 2 or x.shape[1] != width:
        remedy = "`attend` takes more than one, (B, L, dim), with state=state"
        holds = f"`x` must be one token of each sequence, (B, {width})"
        raise ShapeError(message(holds, f"got {describe(x)}", remedy))


def _may_differ(x: Tensor, weight: Tensor) -> bool:
    """Autocast casts both; a quantised weight is no number of its own type."""
    return torch.is_autocast_enabled(x.device.type) or not weight.is_floating_point()


def check_alike(name: str, x: Tensor, other: str, y: Tensor, *, axes: int) -> None:
    """Raise unless two tensors have the same B, and with two axes the same length too."""
    if x.shape[:axes] != y.shape[:axes]:
        holds = f"`{name}` and `{other}` must have the same {'B' if axes == 1 else 'B and S'}"
        raise ShapeError(message(holds, f"got {describe(x)} and {describe(y)}", "give one sequence for each of B"))


def check_lengths(lengths: Sequence[int], batch: int, rows: int) -> None:
    """Raise unless a pass tells how many rows of each sequence are real."""
    if len(lengths) != batch or not all(0 <= n <= rows for n in lengths):
        holds = f"`lengths` of the context must be {batch} numbers in 0 .. {rows}, one a sequence"
        seen = f"got {tuple(lengths)}"
        raise ShapeError(message(holds, seen, "take those of Rows.of(attention_mask, B, L), made for this call"))


def check_drawn(pattern: Pattern | None, what: str) -> None:
    """Raise where who sees whom is drawn anew for each length: a sequence would then depend on those beside it."""
    if pattern is None or torch.compiler.is_compiling() or not draws_by_length(pattern.expr):
        return
    holds = f"a pattern that draws among all keys of a call must meet sequences of one length, not {what}"
    remedy = "leave padding out, or draw among earlier blocks alone: random_blocks(count, size, seed), without ahead"
    raise UnsupportedError(message(holds, f"got {pattern}", remedy))


def check_steps(pattern: Pattern | None) -> None:
    """Raise unless queries that come one by one see what they see all at once."""
    if pattern is None or not looks_back(pattern.expr, but_for_fixed=True):
        holds = "a layer that goes token by token must have a pattern that shows no later token"
        remedy = "give the layer pattern=causal()" + ("" if pattern is None else f" & ({pattern})")
        raise UnsupportedError(message(holds, f"got pattern={pattern}", remedy))
    check_drawn(pattern, "one that grows")


def check_state(state: object, batch: int, dropout_p: float) -> None:
    """Raise unless a state can take the keys of a call."""
    if not isinstance(state, Cache):
        remedy = "make one with initial_state(batch, max_length)"
        raise DTypeError(message("`state` must be a cache", f"got {type(state).__name__}", remedy))
    if state.batch != batch:
        holds = "`state` must hold as many sequences as the call"
        remedy = "make it with initial_state(batch, max_length), or reorder it to the rows of the call"
        raise ShapeError(message(holds, f"got a state of {state.batch} and a call of {batch}", remedy))
    if dropout_p:
        holds = "a call with a state must be without dropout: the weights of keys that are kept are not drawn again"
        raise UnsupportedError(message(holds, f"got {dropout_p} in training", "call .eval() on the model first"))


def check_itself(dim: int, key_dim: int, value_dim: int) -> None:
    """Raise unless keys and values can be made from x itself."""
    if not dim == key_dim == value_dim:
        seen = f"got key_dim={key_dim} and value_dim={value_dim} for dim={dim}"
        remedy = "attend over keys=layer.keys_of(memory), or pass key and value"
        raise ShapeError(message("a layer that attends over x itself must read keys from x", seen, remedy))


def check_cross(rotary: Rotary | None) -> None:
    """Raise where a layer turns by positions what has none in common."""
    if rotary is not None:
        holds = "keys of another sequence must come without rotary positions: the two do not share them"
        seen = "got keys for a layer with `rotary`"
        raise UnsupportedError(message(holds, seen, "make the layer without rotary, or attend over x itself"))


def check_keys(keys: object, state: object) -> None:
    """Raise unless `keys` says alone what to attend over."""
    if not isinstance(keys, Keys):
        remedy = "make them with keys_of(memory)"
        raise DTypeError(message("`keys` must be Keys", f"got {type(keys).__name__}", remedy))
    if state is not None:
        seen = "got both"
        remedy = "the keys of a memory are made once by keys_of, and need no state"
        raise ValueOutOfRange(message("a call must have `state` or `keys`, not both", seen, remedy))


def check_torch_arguments(query: Tensor, key: Tensor | None, value: Tensor | None) -> None:
    """Raise unless key and value come together, for the batch of the query."""
    if (key is None) != (value is None):
        seen = f"got `{'value' if key is None else 'key'}` alone"
        raise ShapeError(message("`key` and `value` must be given together, or neither", seen, "pass key twice"))
    if key is not None and value is not None:
        check_alike("key", key, "query", query, axes=1)
        check_alike("value", value, "key", key, axes=2)


def both(own: Bias | None, added: Tensor | None) -> Bias | None:
    """The sum of a layer's bias and that of a call."""
    if own is None or added is None:
        return added if own is None else own
    if isinstance(own, Tensor):
        return own + added
    holds = "a mask that is added must meet a layer without `bias`, or with that of a tensor"
    remedy = "pass a bool mask, which hides where True, or add the bias to the mask"
    raise UnsupportedError(message(holds, f"got a floating-point mask beside {own}", remedy))
