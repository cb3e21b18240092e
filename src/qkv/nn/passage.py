"""One call of a layer: how its parts read a state, and how the state is advanced."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from qkv.errors import DTypeError, message
from qkv.linear.convolution import short_convolution
from qkv.linear.recurrence import compute_dtype
from qkv.nn.layer_state import LayerState
from qkv.shapes import dtype_name


class Passage:
    """One call of a layer on x (B, L, dim): where its parts meet the state, if there is one.

    Parts leave here what the state shall become, and `finish` hands it over once the whole call has succeeded. A call
    that steps is over one token of each sequence, and runs the state's own in-place step.
    """

    def __init__(
        self, x: Tensor, state: LayerState | None, cu_seqlens: tuple[int, ...] | None, *, stepping: bool
    ) -> None:
        self.state = state
        self.stepping = stepping
        self.cu_seqlens = cu_seqlens
        self._sizes = x.shape[:2]
        self._recurrent: Tensor | None = None
        self._tail: Tensor | None = None

    def convolve(self, x: Tensor, convolution: nn.Conv1d) -> Tensor:
        """The causal depthwise convolution of x (B, L, C) with SiLU, begun with the state's tail."""
        weight, bias = convolution.weight.squeeze(1), convolution.bias
        if self.state is None:
            return short_convolution(x, weight, bias, activation="silu", cu_seqlens=self.cu_seqlens)
        if self.state.tail is not None:
            _check_made_for(x.dtype, self.state.tail.dtype)
        out, self._tail = short_convolution(
            x,
            weight,
            bias,
            activation="silu",
            cu_seqlens=self.cu_seqlens,
            initial_state=_kept(self.state.tail),
            return_state=True,
        )
        return out

    def recur(self, rule: Callable[..., Any], *streams: Tensor, backend: str, **options: Any) -> Tensor:
        """The recurrence over q, k, v and what else the rule reads, (B, L, heads, ...): its output (B, L, H, V).

        Streams that the layer has made float32 stay so under autocast: their range, or their digits, are needed.
        """
        kind = streams[0].device.type
        if streams[0].dtype == torch.float32 and _is_autocast(kind):
            with torch.autocast(kind, enabled=False):
                return self._recur(rule, *streams, backend=backend, **options)
        return self._recur(rule, *streams, backend=backend, **options)

    def _recur(self, rule: Callable[..., Any], *streams: Tensor, backend: str, **options: Any) -> Tensor:
        if self.state is None:
            return rule(*streams, layout="BLHD", cu_seqlens=self.cu_seqlens, backend=backend, **options)
        recurrent = self.state.recurrent
        _check_made_for(compute_dtype(streams[0].dtype), recurrent.dtype)
        if self.stepping:
            if recurrent.backend != backend:  # the layer's, whichever layer made the state
                recurrent.backend = backend
            out = recurrent.step(*(stream.squeeze(1) for stream in streams)).unsqueeze(1)
            self.finish()  # at once: what fails after this finds a state that is whole, one token further
            return out
        out, self._recurrent = rule(
            *streams,
            layout="BLHD",
            cu_seqlens=self.cu_seqlens,
            initial_state=_kept(recurrent.state),
            return_state=True,
            backend=backend,
            **options,
        )
        return out

    def positions(self, device: torch.device) -> Tensor:
        """Where each token of x stands in its sequence, int64 (1 or B, L)."""
        starts = (0,) if self.state is None else self.state.lengths
        if self.cu_seqlens is None:
            firsts = torch.tensor(starts if len(set(starts)) > 1 else (0, *starts)[-1:], device=device)
            return firsts[:, None] + torch.arange(self._sizes[1], device=device)
        pairs = zip(starts if self.state is not None else itertools.repeat(0), self._counts(), strict=False)
        rows = [torch.arange(start, start + count, device=device) for start, count in pairs]
        return torch.cat([torch.arange(0, device=device), *rows])[None]

    def finish(self) -> None:
        """Hand over to the state what it shall become."""
        if self.state is not None:
            self.state.advance(self._recurrent, self._tail, self._counts())

    def _counts(self) -> tuple[int, ...]:
        """How many tokens each sequence has in this call."""
        batch, length = self._sizes
        if self.cu_seqlens is None:
            return (length,) * batch
        return tuple(end - start for start, end in itertools.pairwise(self.cu_seqlens))


def _is_autocast(kind: str) -> bool:
    """Whether autocast is on for this kind of device."""
    return torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)


def _check_made_for(dtype: torch.dtype, made: torch.dtype) -> None:
    """The layer computes in one type, under autocast in another than its weights; its state must be for that one."""
    if dtype != made:
        holds = f"`state` must be made for inputs of {dtype_name(dtype)}, in which the layer runs here"
        remedy = f"make it with initial_state(batch, dtype={dtype})"
        raise DTypeError(message(holds, f"got one for {dtype_name(made)}", remedy))


def _kept(before: Tensor | None) -> Tensor | None:
    """What went before, for a call whose backward may read it after the state has moved on."""
    return before.clone() if before is not None and torch.is_grad_enabled() else before
