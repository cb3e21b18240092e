"""Tokens that may be taken back: copies of them, and of the state before them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from qkv.linear.recurrence import Streams
from qkv.linear.state_tokens import Call


def own(tensor: Tensor) -> Tensor:
    """A dense copy without a graph, which may be written to in every mode, also where it is made in inference mode."""
    with torch.inference_mode(False), torch.no_grad():
        return tensor.clone(memory_format=torch.contiguous_format)


@dataclass(slots=True, eq=False)
class Draft:
    """Tokens that were stepped and may be taken back: the state before them, and what each call was given."""

    before: Tensor
    length: int  # before them
    calls: list[tuple[Call, Streams]] = field(default_factory=list)

    @property
    def tokens(self) -> int:
        return sum(call.recurrence.length for call, _ in self.calls)

    @property
    def nbytes(self) -> int:
        held = [tensor for _, streams in self.calls for tensor in streams if tensor is not None]
        return self.before.nbytes + sum(tensor.nbytes for tensor in held)

    def add(self, call: Call, streams: Streams) -> None:
        """Keep what a call is given: copies, but for a gate that every token shares."""
        copies = (x if x is None or x is call.constant else own(x) for x in streams)
        self.calls.append((replace(call, core=None), Streams._make(copies)))

    def first(self, count: int) -> Iterator[tuple[Call, Streams]]:
        """The calls again, for the first `count` tokens: the last of them shorter where it must be."""
        for call, streams in self.calls:
            length = min(call.recurrence.length, count)
            if length == 0:
                return
            if length == call.recurrence.length:
                yield call, streams
            else:
                yield call.first(length), Streams._make(None if x is None else x[:, :, :length] for x in streams)
            count -= length

    def copy(self) -> Draft:
        """The same in memory of its own, where anything may change."""
        return Draft(own(self.before), self.length, list(self.calls))
