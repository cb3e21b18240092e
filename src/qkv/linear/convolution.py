"""The short causal convolution in front of the linear family's q, k and v: of each channel alone, over K tokens."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, overload

import torch
from torch import Tensor
from torch.nn import functional as F

from qkv.backends.autograd import Wanted
from qkv.backends.cpu import TYPES, address
from qkv.backends.extension import native
from qkv.errors import DTypeError, ShapeError, UnsupportedError, message, unknown_name
from qkv.linear.asking import NO_GRAPH
from qkv.linear.beside import check_beside
from qkv.linear.fused import Given, core_reads, run, side_by_side
from qkv.linear.recurrence import compute_dtype
from qkv.outside import outside_of_graphs
from qkv.patterns.arguments import one_flag
from qkv.shapes import check_dense, check_float, describe, dtype_name
from qkv.varlen import read_boundaries

Activation: TypeAlias = Literal["silu"] | None
MOST_TAPS = 8


@overload
def short_convolution(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    activation: Activation = "silu",
    cu_seqlens: Tensor | Sequence[int] | None = None,
    initial_state: Tensor | None = None,
    return_state: Literal[False] = False,
) -> Tensor: ...
@overload
def short_convolution(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    activation: Activation = "silu",
    cu_seqlens: Tensor | Sequence[int] | None = None,
    initial_state: Tensor | None = None,
    return_state: Literal[True],
) -> tuple[Tensor, Tensor]: ...
def short_convolution(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    activation: Activation = "silu",
    cu_seqlens: Tensor | Sequence[int] | None = None,
    initial_state: Tensor | None = None,
    return_state: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """A causal convolution of each channel over its last K tokens, and an activation.

        y[t, c] = act(bias[c] + Σ_k weight[c, k] · x[t - K + 1 + k, c]),  act(z) = z · sigmoid(z), or z

    x: (B, L, C), in any strides. weight: (C, K) with K of 1 to 8; its last tap meets the token itself, as in
    `torch.nn.Conv1d(C, C, K, groups=C, padding=K - 1).weight.squeeze(1)`. bias: (C,).
    cu_seqlens: where N sequences that lie one after another in a single row (B = 1) begin, and their end: N + 1 rising
    integers from 0 to L. No token reads one of another sequence; a sequence may be empty.
    initial_state: (N, K - 1, C), the inputs before token 0 of each sequence, oldest first, in the type of x; None:
    zeros. Without `cu_seqlens` N is B. return_state: also give the last K - 1 inputs of each sequence, where a longer
    one would go on; gradients flow through both.

    Result: (B, L, C) in the type of x; with return_state a pair (y, state). Computed in float32 (float64 for float64).
    On the CPU it is one pass of the native core, forward and backward, and does not depend on the number of threads.

    Raises the errors of `qkv.errors`. With cu_seqlens it cannot be captured by torch.compile, which runs it outside.

    Source: Gu, Dao, "Mamba" (2023), section 3.4, and the authors' causal_conv1d.

    >>> import torch
    >>> x = torch.tensor([[[1.0], [2.0], [3.0]]])
    >>> short_convolution(x, torch.tensor([[10.0, 1.0]]), activation=None).flatten()
    tensor([ 1., 12., 23.])
    """
    options = activation, cu_seqlens, initial_state, return_state
    if cu_seqlens is not None and torch.compiler.is_dynamo_compiling():
        return _outside_of_the_graph(x, weight, bias, *options)
    return _answer(x, weight, bias, *options)


@dataclass(frozen=True, slots=True)
class _Convolution:
    """One convolution besides its tensors x, weight, bias and the tail before."""

    silu: bool
    starts: tuple[int, ...] | None  # of packed sequences, and their end
    keeps: bool  # the tail after is wanted

    def plain(self, x: Tensor, weight: Tensor, bias: Tensor | None, before: Tensor | None) -> tuple[Tensor, ...]:
        wide = compute_dtype(x.dtype)
        taps = weight.to(wide).unbind(1)
        outputs, tails = [], []
        for rows in self._rows(x, before, len(taps) - 1):
            length = rows.shape[1] - len(taps) + 1
            given = rows.to(wide)
            terms = [given.narrow(1, k, length) * tap for k, tap in enumerate(taps)]
            outputs.append(sum(terms[1:], terms[0]))
            tails.append(rows.narrow(1, length, len(taps) - 1))
        z = torch.cat(outputs, 1).reshape(x.shape)
        if bias is not None:
            z = z + bias.to(wide)
        y = (F.silu(z) if self.silu else z).to(x.dtype)
        if not self.keeps:
            return (y,)
        return y, torch.cat(tails)

    def _rows(self, x: Tensor, before: Tensor | None, halo: int) -> list[Tensor]:
        """Each sequence, or all that are of one length, behind its history."""
        if before is None:
            count = x.shape[0] if self.starts is None else len(self.starts) - 1
            before = x.new_zeros(count, halo, x.shape[2])
        if self.starts is None or not len(before):
            return [torch.cat([before, x[: len(before)]], 1)]
        sizes = [stop - start for start, stop in itertools.pairwise(self.starts)]
        return [torch.cat(pair, 1) for pair in zip(before.split(1), x.split(sizes, 1), strict=True)]

    def fused(self, x: Tensor, weight: Tensor, bias: Tensor | None, before: Tensor | None) -> tuple[Tensor, ...]:
        before = None if before is None else before.contiguous()
        if not self.keeps:
            return (self.compute(x, weight, bias, before, None),)
        count = x.shape[0] if self.starts is None else len(self.starts) - 1
        after = x.new_empty(count, weight.shape[1] - 1, x.shape[2])
        return self.compute(x, weight, bias, before, after), after

    def compute(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, before: Tensor | None, after: Tensor | None
    ) -> Tensor:
        """The output; the tail goes to `after`."""
        asked, kept = self._asked(x, weight, bias)
        output = torch.empty_like(x, memory_format=torch.contiguous_format)
        native.convolution(*asked, address(before), output.data_ptr(), address(after))  # `kept` lives until it returns
        del kept
        return output

    def gradients(self, tensors: Any, grads: Given, wanted: Wanted) -> Given:
        x, weight, bias, before = tensors
        wide = compute_dtype(x.dtype)
        given = x.new_zeros(x.shape) if grads[0] is None else side_by_side(grads[0])
        tail = grads[1].contiguous() if self.keeps and grads[1] is not None else None
        before = None if before is None else before.contiguous()
        made = [
            torch.empty(tensor.shape, dtype=dtype, device=x.device) if needed and tensor is not None else None
            for tensor, needed, dtype in zip(tensors, wanted, (x.dtype, wide, wide, x.dtype), strict=True)
        ]
        asked, kept = self._asked(x, weight, bias)
        native.convolution_backward(
            *asked, address(before), given.stride()[:2], given.data_ptr(), address(tail), *map(address, made)
        )
        del kept
        return tuple(g if g is None else g.to(t.dtype) for g, t in zip(made, tensors, strict=True))

    def _asked(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[tuple[Any, ...], Given]:
        """What the core is told first, and the tensors that it then reads."""
        wide = compute_dtype(x.dtype)
        if bias is not None and bias.dtype != weight.dtype:
            weight, bias = weight.to(wide), bias.to(wide)
        x, weight = side_by_side(x), core_reads(weight, wide)
        bias = None if bias is None else core_reads(bias, wide)
        batch, length, channels = x.shape
        count = batch if self.starts is None else len(self.starts) - 1
        asked = (
            torch.get_num_threads(),
            TYPES[x.dtype],
            TYPES[weight.dtype],
            (count, length, channels, weight.shape[1]),
            x.stride()[:2],
            self.starts or (),
            self.silu,
            *map(address, (x, weight, bias)),
        )
        return asked, (x, weight, bias)


@outside_of_graphs(NO_GRAPH)
def _outside_of_the_graph(*arguments: Any) -> Any:
    """The call where torch.compile does not look; it breaks its graph here, or says why it must not."""
    return _answer(*arguments)


def _answer(
    x: Any, weight: Any, bias: Any, activation: Any, cu_seqlens: Any, initial_state: Any, return_state: Any
) -> Tensor | tuple[Tensor, Tensor]:
    silu, keeps = _read_activation(activation), one_flag("return_state", return_state)
    starts = None if cu_seqlens is None else _read_starts(cu_seqlens, x)
    tensors = _read_tensors(x, weight, bias, starts, initial_state)
    output, *tail = run(_Convolution(silu, starts, keeps), *tensors)
    return (output, tail[0]) if keeps else output


def _read_activation(activation: object) -> bool:
    if activation is not None and activation != "silu":
        raise unknown_name("activation", activation, ("silu", "None"))
    return activation is not None


def _read_starts(cu_seqlens: object, x: object) -> tuple[int, ...]:
    """Where the sequences of a packed row begin, and its end."""
    if torch.compiler.is_compiling():
        raise UnsupportedError(NO_GRAPH)
    x = check_dense("x", x)
    if x.ndim != 3 or x.shape[0] != 1:
        seen = f"got {describe(x)}"
        remedy = "lay the sequences one after another along L"
        raise ShapeError(message("`x` must be (1, L, C) where `cu_seqlens` is given", seen, remedy))
    return read_boundaries("cu_seqlens", cu_seqlens, "x", x.shape[1])


def _read_tensors(
    x: object, weight: object, bias: object, starts: tuple[int, ...] | None, state: object
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """The tensors of one call, checked against each other."""
    x = check_dense("x", x)
    check_float("x", x)
    if x.ndim != 3:
        holds, seen = "`x` must have 3 axes, (B, L, C)", f"got {list(x.shape)}"
        raise ShapeError(message(holds, seen, "say x[None] for a single sequence, x.transpose(1, 2) for (B, C, L)"))
    weight, channels = check_beside("weight", weight, x, of="x"), x.shape[2]
    if weight.ndim == 2 and weight.shape[0] == x.shape[1] != channels:
        holds, seen = f"`x` must be (B, L, C) with the C of `weight`, {weight.shape[0]}", f"got {list(x.shape)}"
        raise ShapeError(message(holds, seen, "say x.transpose(1, 2) for (B, C, L)"))
    if weight.ndim != 2 or weight.shape[0] != channels or not 1 <= weight.shape[1] <= MOST_TAPS:
        holds = f"`weight` must be (C, K) with C = {channels} and K from 1 to {MOST_TAPS}"
        remedy = "say conv.weight.squeeze(1) for that of a torch.nn.Conv1d"
        raise ShapeError(message(holds, f"got {list(weight.shape)}", remedy))
    if bias is not None:
        bias = check_beside("bias", bias, x, of="x")
        if tuple(bias.shape) != (channels,):
            holds, seen = f"`bias` must be (C,) = [{channels}]", f"got {list(bias.shape)}"
            raise ShapeError(message(holds, seen, "it holds one number a channel"))
    if state is not None:
        count = x.shape[0] if starts is None else len(starts) - 1
        state = _read_state(state, x, [count, weight.shape[1] - 1, channels])
    return x, weight, bias, state


def _read_state(state: object, x: Tensor, shape: list[int]) -> Tensor:
    """The inputs before token 0 of each sequence."""
    name = "initial_state"
    state = check_beside(name, state, x, of="x")
    if list(state.shape) != shape:
        holds, seen = f"`{name}` must be (N, K - 1, C) = {shape}", f"got {list(state.shape)}"
        raise ShapeError(message(holds, seen, "it holds the inputs before token 0 of each sequence, oldest first"))
    if state.dtype != x.dtype:
        holds = f"`{name}` must be of the type of `x`, {dtype_name(x.dtype)}"
        raise DTypeError(message(holds, f"got {dtype_name(state.dtype)}", f"cast it with {name}.to({x.dtype})"))
    return state
