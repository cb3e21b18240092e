"""The linear family by the native core: the recurrence in blocks of four tokens, the state in the nearest cache.

Every result is computed column by column of the value, so it does not depend on the number of threads. Numbers below
the smallest normal one count as zero inside. The backward pass starts from the states before each 64 tokens, which the
forward pass keeps: N · H · ceil(L / 64) · D · W numbers; with the normaliser it also keeps the output, unrounded.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from qkv.backends.autograd import gradients_through, in_operations
from qkv.backends.base import without_autocast
from qkv.backends.cpu import TYPES, address, fresh, in_memory
from qkv.backends.extension import MISSING, check_isa, native
from qkv.linear import chunked
from qkv.linear.fused import readable, side_by_side
from qkv.linear.recurrence import Outcome, Recurrence, Streams
from qkv.shapes import dtype_name

__all__ = ["advance", "answer", "as_the_core_reads", "call", "reasons_against"]

WIDEST = 256  # the greatest D: beyond it a state does not stay near
CHUNK = 64  # tokens between checkpoints, of csrc/kernels/chunk-inl.h
GATES = {"none": 0, "scalar": 1, "vector": 2}
FEATURES = {"none": 0, "elu": 1, "relu": 2, "squared_relu": 3}
REMEMBERED = 256  # calls


def reasons_against(recurrence: Recurrence, device: torch.device) -> list[str]:
    """Why the core cannot answer; empty when it can."""
    if MISSING is not None:
        return [MISSING]
    reasons = []
    if device.type != "cpu":
        reasons.append(f"it runs on the CPU, the tensors are on {device}")
    if recurrence.dtype not in TYPES:
        reasons.append(f"it takes {', '.join(map(dtype_name, TYPES))}, not {dtype_name(recurrence.dtype)}")
    if recurrence.key_dim > WIDEST:
        reasons.append(f"it takes widths D up to {WIDEST}, not {recurrence.key_dim}")
    if recurrence.delta and recurrence.normalize:
        reasons.append("it has no normaliser for delta rules")
    if recurrence.normalize and recurrence.scale == 0:
        reasons.append("its normaliser leaves the scale out, and 0 / 0 is not 1")
    return reasons


def answer(recurrence: Recurrence, streams: Streams) -> Outcome:
    """Output and last state; differentiable, and any number of times by way of `chunked`."""
    check_isa()
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in streams):
        return Outcome(*_Recurrence.apply(recurrence, *streams))  # type: ignore[no-untyped-call]
    with torch.no_grad():
        return _forward(recurrence, as_the_core_reads(recurrence, streams))


def advance(recurrence: Recurrence, streams: Streams, state: Tensor) -> Tensor:
    """The output, without a graph; `state` (N, H, D, W), dense and of the compute type, is carried on in place."""
    check_isa()
    with torch.no_grad():
        read = as_the_core_reads(recurrence, streams._replace(state=None))
        output = _like(read.value)
        where = (*map(address, read[:5]), state.data_ptr(), output.data_ptr(), state.data_ptr(), 0)
        call(recurrence, read, output).forward(torch.get_num_threads(), *where)
        return output


class _Recurrence(torch.autograd.Function):
    """Forward without a graph; backward by the core, or through plain operations where it is differentiated itself."""

    @staticmethod
    def forward(ctx: Any, recurrence: Recurrence, *streams: Tensor | None) -> tuple[Tensor, Tensor]:
        read = as_the_core_reads(recurrence, Streams(*streams))  # type: ignore[arg-type]
        checkpoints = fresh(read.value.new_empty(_kept(recurrence), dtype=recurrence.compute_dtype))
        wide = recurrence.compute_dtype if recurrence.normalize else recurrence.dtype
        output, state = _forward(recurrence, read, checkpoints, wide)
        ctx.save_for_backward(*streams, checkpoints, output if recurrence.normalize else None)
        ctx.recurrence = recurrence
        ctx.set_materialize_grads(False)
        return output.to(recurrence.dtype), state

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor | None, grad_state: Tensor | None) -> Any:
        recurrence, saved = ctx.recurrence, ctx.saved_tensors
        streams, (checkpoints, output) = Streams(*saved[:6]), saved[6:]
        wanted = ctx.needs_input_grad[1:]
        with without_autocast(streams.query.device):
            if in_operations(grad_output, grad_state):

                def again(*given: Tensor | None) -> Outcome:
                    return chunked.answer(recurrence, Streams(*given))  # type: ignore[arg-type]

                return None, *gradients_through(again, streams, wanted, (grad_output, grad_state))
            grads = _backward(recurrence, streams, (checkpoints, output), (grad_output, grad_state), wanted)
        return None, *grads


def _forward(
    recurrence: Recurrence, read: Streams, checkpoints: Tensor | None = None, dtype: torch.dtype | None = None
) -> Outcome:
    """Both results in memory of their own; the output lies as the value does, of its type unless `dtype` is given."""
    output = _like(read.value, dtype)
    state = read.value.new_empty(recurrence.state_shape, dtype=recurrence.compute_dtype)
    where = (*map(address, read), output.data_ptr(), state.data_ptr(), address(checkpoints))
    call(recurrence, read, output).forward(torch.get_num_threads(), *where)  # `read` lives until the core returns
    return Outcome(output, state)


def _backward(
    recurrence: Recurrence,
    streams: Streams,
    kept: tuple[Tensor, Tensor | None],
    incoming: tuple[Tensor | None, Tensor | None],
    wanted: tuple[bool, ...],
) -> list[Tensor | None]:
    """Gradients in the types of the streams, None where not wanted."""
    read, (checkpoints, output), wide = as_the_core_reads(recurrence, streams), kept, recurrence.compute_dtype
    grad_output = _like(read.value).zero_() if incoming[0] is None else side_by_side(in_memory(incoming[0]))
    grad_state = None if incoming[1] is None else in_memory(incoming[1]).contiguous()
    made = [_like(t) if want else None for t, want in zip(read[:3], wanted[:3], strict=True)]
    made += [
        fresh(t.new_empty(t.shape, dtype=wide)) if t is not None and want else None
        for t, want in zip(streams[3:], wanted[3:], strict=True)
    ]
    where = (*map(address, read[:5]), *map(address, (checkpoints, output, grad_output, grad_state, *made)))
    prepared = call(recurrence, read, read.value if output is None else output)
    prepared.backward(torch.get_num_threads(), tuple(map(_steps, (grad_output, *made[:3]))), *where)
    return [g if g is None or t is None else g.to(t.dtype) for g, t in zip(made, streams, strict=True)]


def as_the_core_reads(recurrence: Recurrence, streams: Streams) -> Streams:
    """Channels side by side, the state dense; all else as it is."""
    query, key, value, gate, beta, state = streams
    wide = recurrence.compute_dtype
    if gate is not None:
        gate = readable(gate, wide)
        gate = side_by_side(gate) if recurrence.gate == "vector" else gate
    if beta is not None:
        beta = readable(beta, wide)
    if state is not None:
        state = state.contiguous()
    return Streams(side_by_side(query), side_by_side(key), side_by_side(value), gate, beta, state)


def _like(tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Memory that lies as a tensor does where that leaves its last axis dense."""
    made = torch.empty_like(tensor, dtype=dtype)
    made = made if side_by_side(made) is made else tensor.new_empty(tensor.shape, dtype=dtype)
    return fresh(made)


def _kept(recurrence: Recurrence) -> tuple[int, int, int, int]:
    """The shape of the checkpoints: (H, chunks of all sequences, D, W)."""
    starts = recurrence.starts
    if starts is None:
        lengths = [recurrence.length] * recurrence.batch
    else:
        lengths = [stop - start for start, stop in pairwise(starts)]
    _, heads, key_dim, width = recurrence.state_shape
    return heads, sum(-(-length // CHUNK) for length in lengths), key_dim, width


def _steps(tensor: Tensor | None) -> tuple[int, int, int]:
    """The strides of batch, head and token."""
    return (0, 0, 0) if tensor is None else tensor.stride()[:3]  # type: ignore[return-value]


def call(recurrence: Recurrence, read: Streams, output: Tensor) -> native.Recurrence:
    """The question for streams as `as_the_core_reads` gives them and an output, remembered by types and strides."""
    assert read.query.dtype == read.key.dtype == read.value.dtype == recurrence.dtype
    assert read.state is None or read.state.dtype == recurrence.compute_dtype
    types = tuple(TYPES[read.query.dtype if t is None else t.dtype] for t in (read.query, read.gate, read.beta, output))
    strides = tuple(map(_steps, (*read[:5], output)))
    return _prepared(recurrence, types, strides)


@lru_cache(REMEMBERED)
def _prepared(recurrence: Recurrence, types: tuple[int, ...], strides: tuple[Any, ...]) -> native.Recurrence:
    """The question as the core knows it, for tensors of these types and strides."""
    r = recurrence
    return native.Recurrence(
        (r.sequences, r.heads, r.key_heads, r.length, r.key_dim, r.value_dim),
        types,
        (GATES[r.gate], FEATURES[r.feature], int(r.delta), int(r.normalize)),
        r.scale,
        [] if r.starts is None else list(r.starts),
        *strides,
    )
