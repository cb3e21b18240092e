"""The checks of what one step of a recurrent state is given, and how such a step is answered."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch._C import _are_functorch_transforms_active

from qkv.backends.base import without_autocast
from qkv.backends.extension import check_isa
from qkv.backends.extension import native as binary
from qkv.errors import (
    DeviceError,
    DTypeError,
    ShapeError,
    UnsupportedError,
    message,
    unknown_name,
)
from qkv.linear import native
from qkv.linear.beside import check_finite, check_sign
from qkv.linear.engine import ENGINES, choose
from qkv.linear.features import FeatureMap
from qkv.linear.recurrence import Outcome, Recurrence, Streams
from qkv.linear.state_rules import Setting
from qkv.shapes import check_dense, check_float, describe, dtype_name

Core: TypeAlias = "binary.Recurrence"
LEAST = 64  # numbers, (B, H): up to these Python looks at them faster than torch
FEW = 1 << 15  # numbers: up to these torch reads by one thread, and needs no others in a forked child
NAMES = ("query", "key", "value", "g", "beta")


class Tokens(NamedTuple):
    """What one step is given."""

    query: Tensor  # (B, K, D), or (B, K, n, D)
    key: Tensor  # as the query
    value: Tensor  # (B, H, V), or (B, H, n, V)
    gate: Tensor | None  # (B, H), or (B, H, n), with one more axis D where it is one a key channel
    beta: Tensor | None  # (B, H), or (B, H, n)


@dataclass(frozen=True, slots=True, eq=False)
class Call:
    """A step that was checked: it answers all tokens of the same form."""

    recurrence: Recurrence
    single: bool  # without an axis n
    swapped: bool  # layout BLHD
    engine: str
    feature_map: FeatureMap | None  # of q and k, before the engine
    constant: Tensor | None  # the gate (B, H, n) that no token brings
    core: Core | None = None  # the same question as the native core knows it, where it reads the tokens as they are

    def streams(self, tokens: Tokens) -> Streams:
        """The tokens as the engines take them."""
        query, key, value, gate, beta = tokens
        if self.single:
            query, key, value = query.unsqueeze(2), key.unsqueeze(2), value.unsqueeze(2)
            gate = gate if gate is None else gate.unsqueeze(2)
            beta = beta if beta is None else beta.unsqueeze(2)
        elif self.swapped:
            query, key, value = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
            gate = gate if gate is None else gate.transpose(1, 2)
            beta = beta if beta is None else beta.transpose(1, 2)
        if self.feature_map is not None:
            query, key = self._features("query", query), self._features("key", key)
            value = value.to(query.dtype)
        return Streams(query, key, value, gate if self.constant is None else self.constant, beta)

    def shown(self, output: Tensor, dtype: torch.dtype) -> Tensor:
        """An output (B, H, n, V) in the form and type of the tokens."""
        if self.feature_map is not None:
            output = output.to(dtype)
        if self.single:
            return output.squeeze(2)
        return output.transpose(1, 2) if self.swapped else output

    def first(self, count: int) -> Call:
        """The same for the first `count` of the n tokens."""
        constant = None if self.constant is None else self.constant[:, :, :count]
        return replace(self, recurrence=replace(self.recurrence, length=count), constant=constant)

    def _features(self, name: str, tensor: Tensor) -> Tensor:
        """phi of (B, K, n, D), in the type of the state."""
        assert self.feature_map is not None
        recurrence = self.recurrence
        with torch.no_grad():
            found = self.feature_map(tensor)
        wanted = (recurrence.batch, recurrence.key_heads, recurrence.length, recurrence.key_dim)
        if not isinstance(found, Tensor) or tuple(found.shape) != wanted:
            holds = f"`feature_map` must map `{name}` {list(tensor.shape)} to {list(wanted)}"
            remedy = "a state has one row a feature: their number must not change"
            raise ShapeError(message(holds, f"got {describe(found)}", remedy))
        return found.detach().to(recurrence.dtype)


def all_plain(tokens: Tokens) -> bool:
    """Whether no tensor has a graph, and all numbers are in memory as they are meant."""
    query, key, value, gate, beta = tokens
    if query.requires_grad or key.requires_grad or value.requires_grad or query.is_neg() or key.is_neg():
        return False
    if value.is_neg() or (gate is not None and (gate.requires_grad or gate.is_neg())):
        return False
    return beta is None or not (beta.requires_grad or beta.is_neg())


def prepare(setting: Setting, batch: int, tokens: Tokens, layout: str) -> Call:
    """Check one step, and choose its engine as the functions do."""
    if _are_functorch_transforms_active():
        seen, remedy = "got a call inside torch.func", "use the functions, whose states are arguments and results"
        raise UnsupportedError(message("a state must be used outside of torch.func", seen, remedy))
    if not isinstance(layout, str) or layout not in ("BHLD", "BLHD"):
        raise unknown_name("layout", layout, ("BHLD", "BLHD"))
    _check_given(setting, tokens)
    for name, tensor in zip(NAMES, tokens, strict=True):
        if tensor is not None:
            check_float(name, check_dense(name, tensor))
    _check_types(setting, tokens)
    rank = tokens.query.ndim
    if rank not in (3, 4):
        holds = "`query` must have 3 axes, (B, K, D), or 4 for n tokens"
        raise ShapeError(message(holds, f"got {describe(tokens.query)}", "add the missing axes"))
    single, swapped = rank == 3, rank == 4 and layout == "BLHD"
    length = 1 if single else tokens.query.shape[1 if swapped else 2]
    _check_shapes(setting, batch, tokens, length, "single" if single else layout)
    dtype = tokens.query.dtype if setting.feature_map is None else setting.dtype
    recurrence = setting.recurrence(batch, length, dtype)
    constant = None
    if setting.decay is not None:
        constant = setting.decay[None, :, None].expand(batch, -1, length)
        constant = constant.contiguous() if length == 1 else constant
    call = Call(recurrence, single, swapped, "", setting.feature_map, constant)
    streams = call.streams(tokens)
    engine = choose(recurrence, streams, setting.backend)
    ready = engine == "cpu" and setting.feature_map is None and length * batch > 0
    return replace(call, engine=engine, core=_core_of(call, tokens, streams) if ready else None)


def _core_of(call: Call, tokens: Tokens, streams: Streams) -> Core | None:
    """What answers tokens of these types and strides without a view of them; None where it would convert some first."""
    check_isa()
    read = native.as_the_core_reads(call.recurrence, streams)
    if any(mine is not theirs for mine, theirs in zip(read, streams, strict=True)):
        return None
    output = call.streams(tokens._replace(value=tokens.value.new_empty(tokens.value.shape))).value
    return native.call(call.recurrence, read, output)


def at_once(call: Call, tokens: Tokens, state: Tensor) -> Tensor:
    """The output in the form of the tokens, and the state changed in place, where the call has a core."""
    query, key, value, gate, beta = tokens
    assert call.core is not None
    gate = gate if call.constant is None else call.constant
    output, held = value.new_empty(value.shape), state.data_ptr()
    call.core.forward(
        torch.get_num_threads(),
        query.data_ptr(),
        key.data_ptr(),
        value.data_ptr(),
        0 if gate is None else gate.data_ptr(),
        0 if beta is None else beta.data_ptr(),
        held,
        output.data_ptr(),
        held,
        0,
    )
    return output


def check_gate(gate: Tensor) -> None:
    """As the functions: the logs of decays are at most 0; NaN stays, and spreads."""
    if gate.ndim == 2 and 0 < gate.numel() <= LEAST:
        most: float = max(map(max, gate.tolist()))
    else:
        most = gate.max().item() if 0 < gate.numel() <= FEW else math.inf
    if most > 0:
        check_sign("g", gate)


def check_strength(beta: Tensor) -> None:
    """As the functions: write strengths are finite, which their sum tells at once; NaN stays, and spreads."""
    if beta.ndim == 2 and 0 < beta.numel() <= LEAST:
        total: float = sum(map(sum, beta.tolist()))
    else:
        total = beta.sum().item() if 0 < beta.numel() <= FEW else math.inf
    if not math.isfinite(total):
        check_finite("beta", beta)


def _check_given(setting: Setting, tokens: Tokens) -> None:
    """g and beta, where the rule has them and nowhere else."""
    rule = setting.rule
    shape = "(B, H, D)" if rule.gate == "vector" else "(B, H)"
    wanted = (
        ("g", tokens.gate, rule.gate != "none" and not rule.constant, f"the log decay, {shape}"),
        ("beta", tokens.beta, rule.delta, "the write strength, (B, H)"),
    )
    for name, tensor, needed, meaning in wanted:
        if needed and tensor is None:
            holds = f"`{name}` must be given for rule {setting.name!r}"
            raise DTypeError(message(holds, "got None", f"pass {meaning}"))
        if tensor is not None and not needed:
            holds = f"`{name}` must be left out for rule {setting.name!r}"
            raise DTypeError(message(holds, f"got {describe(tensor)}", "make the state for the rule that has it"))


def _check_types(setting: Setting, tokens: Tokens) -> None:
    """q, k and v of one type that the state takes; g and beta of that type, or of the state's."""
    wide = setting.dtype
    types = [tensor.dtype for tensor in tokens[:3]]
    if len(set(types)) > 1:
        seen = f"got {', '.join(map(dtype_name, types))}"
        raise DTypeError(message("`query`, `key` and `value` must have one dtype", seen, "cast them to one"))
    if (types[0] == torch.float64) != (wide == torch.float64):
        holds = f"`query` must suit a {dtype_name(wide)} state"
        remedy = f"make the state with dtype=torch.{dtype_name(types[0])}, or cast the inputs"
        raise DTypeError(message(holds, f"got {dtype_name(types[0])}", remedy))
    for name, tensor in zip(NAMES, tokens, strict=True):
        if tensor is None:
            continue
        if tensor.dtype not in (types[0], wide):
            holds = f"`{name}` must have the dtype of `query` or of the state, {dtype_name(wide)}"
            seen = f"got {dtype_name(tensor.dtype)}"
            raise DTypeError(message(holds, seen, f"cast it with {name}.to(torch.{dtype_name(wide)})"))
        if tensor.device != setting.device:
            holds = f"`{name}` must be on the state's device, {setting.device}"
            remedy = f"move it with {name}.to({str(setting.device)!r})"
            raise DeviceError(message(holds, f"got {tensor.device}", remedy))


def _check_shapes(setting: Setting, batch: int, tokens: Tokens, length: int, form: str) -> None:
    """Every tensor of the sizes of the state, and of one number of tokens."""
    sizes = {"B": batch, "K": setting.key_heads, "H": setting.heads, "n": length, "D": setting.key_dim}
    sizes["V"] = setting.value_dim
    sizes["M"] = setting.features
    gate = "H" if setting.rule.gate != "vector" else "HD" if setting.feature_map is None else "HM"
    for name, tensor, letters in zip(NAMES, tokens, ("KD", "KD", "HV", gate, "H"), strict=True):
        if tensor is None:
            continue
        axes = "B" + _with_tokens(letters, form)
        wanted = tuple(sizes[axis] for axis in axes)
        if tuple(tensor.shape) == wanted:
            continue
        if tensor.ndim != len(axes):
            holds = f"`{name}` must have {len(axes)} axes, ({', '.join(axes)})"
            remedy = "n tokens have an axis n in every tensor"
            raise ShapeError(message(holds, f"got {describe(tensor)}", remedy))
        pairs = zip(axes, tensor.shape, wanted, strict=True)
        seen = f"got {', '.join(f'{axis} = {have}, not {want}' for axis, have, want in pairs if have != want)}"
        remedy = "make the state for the sizes of its tokens"
        if form != "single" and _is_swapped(tensor, wanted, form):
            remedy = f"say layout={'BLHD' if form == 'BHLD' else 'BHLD'!r}"
        raise ShapeError(message(f"`{name}` must have the sizes of the state", seen, remedy))


def _with_tokens(letters: str, form: str) -> str:
    """The axes after B: heads first, the tokens after them, before them, or nowhere."""
    if form == "single":
        return letters
    heads, width = letters[0], letters[1:]
    return f"{heads}n{width}" if form == "BHLD" else f"n{heads}{width}"


def _is_swapped(tensor: Tensor, wanted: tuple[int, ...], form: str) -> bool:
    """Whether heads and tokens may have changed places, by the sizes of all axes but the tokens'."""
    here, there = (1, 2) if form == "BHLD" else (2, 1)
    batch, width = tensor.shape[0], tensor.shape[3:]
    return (batch, tensor.shape[there], *width) == (wanted[0], wanted[here], *wanted[3:])


def compute(call: Call, streams: Streams, state: Tensor) -> Outcome:
    """The output (B, H, n, V) and the next state, without a graph; the state is left alone."""
    with torch.no_grad(), without_autocast(state.device):
        return ENGINES[call.engine](call.recurrence, streams._replace(state=state))
