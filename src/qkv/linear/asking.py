"""From a caller's arguments to a checked question of the linear family: every check of one call, before any work.

Raises only errors of `qkv.errors`. Layouts are views: everything behind this file has the order (B, H, L, D).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from qkv.errors import DTypeError, QkvError, ShapeError, UnsupportedError, ValueOutOfRange, message, unknown_name
from qkv.inputs import read_number
from qkv.linear.beside import GateForm, Inputs, check_beside, check_shape, other_layout, read_beta, read_gate
from qkv.linear.features import FeatureMap
from qkv.linear.recurrence import Feature, Recurrence, Streams
from qkv.patterns.arguments import one_flag
from qkv.question import as_autocast_does
from qkv.shapes import NAMES, check_dense, check_device, check_float, describe, dtype_name
from qkv.types import Layout
from qkv.varlen import read_boundaries

NO_GRAPH = message(
    "a compiled or exported graph must not depend on values",
    "got cu_seqlens, which are lengths",
    "call it outside of the graph, as torch.compile(fullgraph=False) does",
)
# What the shared checks say of `pattern`, which does not exist here.
_WORDS = {
    " (which keys a query may see is said by `pattern`)": "",
    "pad it and say pattern=key_lengths(...), or pack it and say pattern=documents(...)": (
        "lay its sequences one after another along L and say cu_seqlens=[0, ...]"
    ),
}


@dataclass(frozen=True, slots=True, eq=False)
class Question:
    """One call, checked: what is asked, of which tensors, and the form that the caller wants back."""

    recurrence: Recurrence
    streams: Streams
    layout: Layout
    dtype: torch.dtype  # of the output: the features, and with them the streams, may be wider
    width: str = "D"  # what the axis of a state is called that features decide

    def restore(self, output: Tensor) -> Tensor:
        """An output (B, H, L, V) in the caller's type and layout."""
        output = output.to(self.dtype)
        return output if self.layout == "BHLD" else output.transpose(1, 2)


@contextmanager
def in_call(name: str, query: object, key: object, value: object) -> Iterator[None]:
    """Adds to an error which call it came from."""
    try:
        yield
    except QkvError as error:
        call = f"query {describe(query)}, key {describe(key)}, value {describe(value)}"
        text = str(error)
        for theirs, ours in _WORDS.items():
            text = text.replace(theirs, ours)
        error.args = (f"{text} (in a call of {name} with {call})",)
        raise


def read_inputs(query: object, key: object, value: object, layout: str) -> Inputs:
    """q and k (B, K, L, D), v (B, H, L, V) in the order that `layout` names, viewed as (B, H, L, D)."""
    if layout not in ("BHLD", "BLHD"):
        raise unknown_name("layout", layout, ("BHLD", "BLHD"))
    order: Layout = "BHLD" if layout == "BHLD" else "BLHD"
    dense = [check_dense(name, tensor) for name, tensor in zip(NAMES, (query, key, value), strict=True)]
    q, k, v = as_autocast_does(*dense)
    _check_types(q, k, v)
    for name, tensor in zip(NAMES, (q, k, v), strict=True):
        if tensor.ndim != 4:
            holds = f"`{name}` must have 4 axes, ({', '.join(order)})"
            seen = f"got {list(tensor.shape)}"
            raise ShapeError(message(holds, seen, f"add the missing ones, as {name}[:, None] for one of size 1"))
    if order == "BLHD":
        q, k, v = (tensor.transpose(1, 2) for tensor in (q, k, v))
    inputs = Inputs(q, k, v, order)
    _check_sizes(inputs)
    return inputs


def ask(
    inputs: Inputs,
    *,
    gate: GateForm = "none",
    g: object = None,
    delta: bool = False,
    beta: object = None,
    normalize: bool = False,
    feature: Feature = "none",
    scale: object = None,
    default_scale: float | None = None,
    cu_seqlens: object = None,
) -> Question:
    """The question without features that are made before the engine, and without a state before the first token."""
    axes = inputs.axes
    starts = None if cu_seqlens is None else _read_starts(cu_seqlens, axes)
    streams = Streams(
        inputs.query,
        inputs.key,
        inputs.value,
        None if gate == "none" else read_gate(g, gate, inputs),
        read_beta(beta, inputs) if delta else None,
    )
    recurrence = Recurrence(
        batch=axes["B"],
        heads=axes["H"],
        key_heads=axes["K"],
        length=axes["L"],
        key_dim=axes["D"],
        value_dim=inputs.value.shape[-1],
        gate="scalar" if gate == "constant" else gate,
        delta=delta,
        normalize=normalize,
        feature=feature,
        scale=_read_scale(scale, default_scale, axes["D"]),
        starts=starts,
        dtype=inputs.query.dtype,
    )
    return Question(recurrence, streams, inputs.layout, inputs.value.dtype)


def with_features(question: Question, feature_map: FeatureMap) -> Question:
    """The question of phi(q) and phi(k), which decide D; where phi gives a wider type, v goes along."""
    query, key, value, *others = question.streams
    mapped = [_mapped(name, tensor, feature_map) for name, tensor in (("query", query), ("key", key))]
    if mapped[0].shape[-1] != mapped[1].shape[-1]:
        holds = "`feature_map` must give query and key the same width"
        seen = f"got {mapped[0].shape[-1]} and {mapped[1].shape[-1]}"
        raise ShapeError(message(holds, seen, "phi(q) · phi(k) is a sum over it"))
    dtype = torch.promote_types(torch.promote_types(mapped[0].dtype, mapped[1].dtype), value.dtype)
    streams = Streams(mapped[0].to(dtype), mapped[1].to(dtype), value.to(dtype), *others)
    recurrence = replace(question.recurrence, key_dim=mapped[0].shape[-1], dtype=dtype)
    return replace(question, recurrence=recurrence, streams=streams, width="M")


def with_state(question: Question, initial_state: object) -> Question:
    """The question with a state before the first token of each sequence, in the compute type."""
    recurrence, streams = question.recurrence, question.streams
    if initial_state is None:
        return question
    name, wide = "initial_state", recurrence.compute_dtype
    state = check_beside(name, initial_state, streams.query, {question.dtype, wide})
    letters = ("B" if recurrence.starts is None else "N", "H", question.width, "V + 1" if recurrence.normalize else "V")
    what = "one a sequence and value head"
    if recurrence.normalize:
        what += ", the last column the sum of its keys"
    check_shape(name, state, dict(zip(letters, recurrence.state_shape, strict=True)), what)
    return replace(question, streams=streams._replace(state=state.to(wide)))


def read_flags(**flags: object) -> None:
    """True or False, nothing that merely counts as one."""
    for name, flag in flags.items():
        one_flag(name, flag)


def _check_types(q: Tensor, k: Tensor, v: Tensor) -> None:
    """One type and one device."""
    for name, tensor in zip(NAMES, (q, k, v), strict=True):
        check_float(name, tensor)
    if not q.dtype == k.dtype == v.dtype:
        types = ", ".join(dtype_name(t.dtype) for t in (q, k, v))
        remedy = "cast them to one, such as key.to(query.dtype), or call under torch.autocast"
        raise DTypeError(message("`query`, `key` and `value` must have one dtype", f"got {types}", remedy))
    check_device("key", k, q.device)
    check_device("value", v, q.device)


def _check_sizes(inputs: Inputs) -> None:
    """Sizes of 4-D views, checked by axis."""
    (batch, key_heads, length, key_dim), k, v = inputs.query.shape, inputs.key.shape, inputs.value.shape
    if not batch == k[0] == v[0]:
        holds, seen = "`query`, `key` and `value` must have the same batch size B", f"got B = {batch}, {k[0]}, {v[0]}"
        raise ShapeError(message(holds, seen, "repeat a batch of 1 without a copy by x.expand(B, -1, -1, -1)"))
    if not length == k[2] == v[2]:
        holds, seen = "`query`, `key` and `value` must have the same length L", f"got L = {length}, {k[2]}, {v[2]}"
        raise ShapeError(message(holds, seen, _order_hint(inputs.layout)))
    if key_heads != k[1]:
        holds, seen = "`query` and `key` must have the same heads K", f"got K = {key_heads} and {k[1]}"
        raise ShapeError(message(holds, seen, _sharing_hint(inputs)))
    if key_heads < 1 or v[1] < 1 or v[1] % key_heads:
        holds = "the heads H of `value` must be a multiple of the heads K of `query` and `key`"
        raise ShapeError(message(holds, f"got H = {v[1]} and K = {key_heads}", _order_hint(inputs.layout)))
    if key_dim != k[3]:
        holds, seen = "`query` and `key` must have the same width D", f"got D = {key_dim} and {k[3]}"
        raise ShapeError(message(holds, seen, "only V may differ from D"))
    if key_dim == 0 or v[3] == 0:
        holds, seen = "the widths D and V must be at least 1", f"got D = {key_dim} and V = {v[3]}"
        raise ShapeError(message(holds, seen, "a state is a matrix of D rows and V columns"))


def _order_hint(layout: Layout) -> str:
    other = other_layout(layout)
    return f"if the axes stand as ({', '.join(other)}), say layout={other!r}"


def _sharing_hint(inputs: Inputs) -> str:
    """What to do where the heads of q and k differ: queries that share keys, or another layout."""
    heads, keys, values = (tensor.shape[1] for tensor in inputs[:3])
    if not 0 < keys < heads or heads % keys:
        return _order_hint(inputs.layout)
    axis = 1 if inputs.layout == "BHLD" else 2
    repeated = [f"{name}.repeat_interleave({heads // keys}, {axis})" for name in ("key", "value")]
    return f"query heads that share keys need them repeated: {', '.join(repeated if values == keys else repeated[:1])}"


def _read_starts(cu_seqlens: object, axes: dict[str, int]) -> tuple[int, ...]:
    """Where the sequences of a packed row begin, and its end."""
    if torch.compiler.is_compiling():
        raise UnsupportedError(NO_GRAPH)
    if axes["B"] != 1:
        holds, seen = "B must be 1 where `cu_seqlens` is given", f"got B = {axes['B']}"
        raise ShapeError(message(holds, seen, "lay the sequences one after another along L"))
    return read_boundaries("cu_seqlens", cu_seqlens, "query", axes["L"])


def _read_scale(scale: object, default: float | None, key_dim: int) -> float:
    """The factor of the output; finite."""
    if scale is None:
        return 1.0 / math.sqrt(key_dim) if default is None else default
    remedy = f"leave it out for {'1/sqrt(D)' if default is None else default}"
    number = read_number("scale", scale, remedy)
    if not math.isfinite(number):
        raise ValueOutOfRange(message("`scale` must be finite", f"got {scale}", remedy))
    return number


def _mapped(name: str, tensor: Tensor, feature_map: FeatureMap) -> Tensor:
    """phi of one tensor: (B, K, L, D) to (B, K, L, M)."""
    found = feature_map(tensor)
    if not isinstance(found, Tensor) or not found.dtype.is_floating_point:
        seen = f"got {describe(found)} for `{name}`"
        raise DTypeError(message("`feature_map` must give a floating-point tensor", seen, "return phi(x) alone"))
    if found.ndim != 4 or found.shape[:3] != tensor.shape[:3] or found.shape[3] == 0:
        holds = f"`feature_map` must map (B, K, L, D) = {list(tensor.shape)} to (B, K, L, M)"
        raise ShapeError(message(holds, f"got {list(found.shape)} for `{name}`", "change the last axis only"))
    return found
