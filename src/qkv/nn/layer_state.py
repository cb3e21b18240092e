"""What a layer remembers between calls: the recurrent state, and the last inputs of its convolution."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from qkv.errors import ValueOutOfRange, message
from qkv.linear.state import RecurrentState
from qkv.linear.state_draft import own


class LayerSnapshot(NamedTuple):
    """A copy of a state at one moment. It shares no memory with the state and fits every state of the same form."""

    form: tuple[object, ...]
    recurrent: Any  # what RecurrentState.snapshot gives
    tail: Tensor | None
    lengths: tuple[int, ...]


class LayerState:
    """The memory of one layer for N sequences, of a size that does not grow with their length.

    `layer.initial_state(batch)` makes one; `layer.forward(x, state)` and `layer.step(x_t, state)` advance it in
    place. No gradient flows through it. `form` names the layer and its sizes: a state serves every layer of the same
    form, though it means something only to the one that filled it.
    """

    def __init__(self, form: tuple[object, ...], recurrent: RecurrentState, tail: Tensor | None = None) -> None:
        self.form = form
        self.recurrent = recurrent
        self.tail = _own(
            tail
        )  # (N, K - 1, C): the last inputs of the convolution, oldest first, zero where there was none
        self.lengths: tuple[int, ...] = (0,) * recurrent.state.shape[0]

    @property
    def batch(self) -> int:
        """N, how many sequences."""
        return len(self.lengths)

    @property
    def length(self) -> int:
        """How many tokens the longest sequence has seen; `lengths` says it for each."""
        return max(self.lengths, default=0)

    @property
    def nbytes(self) -> int:
        """Bytes that are held now."""
        return self.recurrent.nbytes + (0 if self.tail is None else self.tail.nbytes)

    def snapshot(self) -> LayerSnapshot:
        """A copy of all that `restore` needs to come back to this moment."""
        return LayerSnapshot(self.form, self.recurrent.snapshot(), _own(self.tail), self.lengths)

    @torch.no_grad()
    def restore(self, snapshot: LayerSnapshot) -> None:
        """Go back to a snapshot of this state, or of another of the same form and batch. It may be used again."""
        if snapshot.form != self.form or len(snapshot.lengths) != self.batch:
            raise ValueOutOfRange(
                message(
                    "a snapshot must come from a state of the same layer, sizes and batch",
                    f"this one is of {shown(snapshot.form)}, batch {len(snapshot.lengths)}",
                    f"restore one of {shown(self.form)}, batch {self.batch}",
                )
            )
        self.recurrent.restore(snapshot.recurrent)
        if self.tail is not None and snapshot.tail is not None:
            self.tail.copy_(snapshot.tail)
        self.lengths = snapshot.lengths

    def fork(self) -> LayerState:
        """An independent state that continues from the same moment."""
        other = LayerState(self.form, self.recurrent.fork(), self.tail)
        other.lengths = self.lengths
        return other

    def reorder(self, index: Sequence[int] | Tensor) -> None:
        """Make sequence n what sequence index[n] was, as beam search does; index may have any length, the new N."""
        self.recurrent.reorder(index)
        rows = torch.as_tensor(index, dtype=torch.int64)
        if self.tail is not None:
            self.tail = _own(self.tail.index_select(0, rows.to(self.tail.device)))
        self.lengths = tuple(self.lengths[row] for row in rows.tolist())

    @torch.no_grad()
    def advance(self, recurrent: Tensor | None, tail: Tensor | None, new: Sequence[int]) -> None:
        """Take over what a call left: the recurrent state unless a step wrote it, the tail, the tokens seen."""
        lengths = tuple(old + more for old, more in zip(self.lengths, new, strict=True))
        if recurrent is not None:
            self.recurrent.load(recurrent, length=max(lengths, default=0))
        if tail is not None and self.tail is not None:
            self.tail.copy_(tail)
        self.lengths = lengths

    def __copy__(self) -> LayerState:
        return self.fork()

    def __deepcopy__(self, memo: dict[int, Any]) -> LayerState:
        return self.fork()

    def __setstate__(self, held: dict[str, Any]) -> None:
        self.__dict__.update(held)
        self.tail = _own(self.tail)

    def __repr__(self) -> str:
        return f"LayerState({shown(self.form)}, batch {self.batch}, length={self.length}, nbytes={self.nbytes})"


def _own(tail: Tensor | None) -> Tensor | None:
    """Memory that may be written to in every mode, also where it is made in inference mode."""
    return None if tail is None else own(tail)


def shown(form: tuple[object, ...]) -> str:
    """A form as text: the layer, (H, K, D, V), and the taps and channels of its convolution."""
    return " ".join(str(part) for part in form if part is not None)
