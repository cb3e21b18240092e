"""What all layers with a recurrent state share: how they are called, and how one call reads and advances a state."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias, overload

import torch
from torch import Tensor, nn

from qkv.cache.arguments import read_size
from qkv.errors import DeviceError, DTypeError, ShapeError, ValueOutOfRange, message
from qkv.linear.engine import check_name
from qkv.linear.recurrence import Feature, compute_dtype
from qkv.linear.state import RecurrentState
from qkv.nn.layer_state import LayerState, shown
from qkv.nn.names import below
from qkv.nn.passage import Passage
from qkv.varlen import read_boundaries

Boundaries: TypeAlias = Tensor | Sequence[int]
Rule = Literal["linear", "retention", "gated_linear", "delta", "gated_delta", "kimi_delta", "ssd"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Memory:
    """What a layer's state is made of, but for the batch: `RecurrentState` tells what each of these means."""

    rule: Rule
    heads: int
    key_dim: int
    value_dim: int
    key_heads: int
    feature_map: Feature = "none"
    normalize: bool | None = None
    scale: float | None = None
    decay: tuple[float, ...] | None = None
    taps: tuple[int, int] | None = None  # rows and channels of the convolution's tail, K - 1 and C


class RecurrentLayer(nn.Module, ABC):
    """A layer x (B, L, dim) -> (B, L, dim) that reads each sequence in order, through a state of fixed size."""

    def __init__(self, dim: int, heads: int, backend: str) -> None:
        super().__init__()
        check_name(backend)
        self.dim = read_size("dim", dim, 1)
        self.heads = read_size("heads", heads, 1)
        self.backend = backend

    @abstractmethod
    def mix(self, x: Tensor, passage: Passage) -> Tensor:
        """The layer itself."""

    @abstractmethod
    def memory(self) -> Memory:
        """What its state is made of."""

    def own_names(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """The tensors of a checkpoint, whatever its spelling, under this layer's names."""
        return tensors

    @overload
    def forward(self, x: Tensor, state: None = None, cu_seqlens: Boundaries | None = None) -> Tensor: ...
    @overload
    def forward(
        self, x: Tensor, state: LayerState, cu_seqlens: Boundaries | None = None
    ) -> tuple[Tensor, LayerState]: ...
    def forward(
        self, x: Tensor, state: LayerState | None = None, cu_seqlens: Boundaries | None = None
    ) -> Tensor | tuple[Tensor, LayerState]:
        """The layer over x (B, L, dim): y (B, L, dim), or (y, state) where a state is given.

        state: what went before, from `initial_state`. It is advanced in place, and no gradient flows through it.
        cu_seqlens: (N + 1,) boundaries of N sequences that lie one after another in x (1, L, dim), from 0 to L; a state
            then holds N sequences.

        Raises ShapeError, DTypeError, DeviceError, ValueOutOfRange or UnsupportedError, and leaves the state as it was.
        """
        self._check_x(x, ("B", "L", "dim"))
        starts = None if cu_seqlens is None else _read_starts(cu_seqlens, x)
        passage = Passage(x, state, starts, stepping=False)
        if state is None:
            return self.mix(x, passage)
        self._check_state(state, x, sequences=x.shape[0] if starts is None else len(starts) - 1, method="forward")
        y = self.mix(x, passage)
        passage.finish()
        return y, state

    @torch.no_grad()
    def step(self, x: Tensor, state: LayerState) -> tuple[Tensor, LayerState]:
        """One token of every sequence, x (B, dim): (y (B, dim), state), the state advanced in place. No gradients."""
        self._check_x(x, ("B", "dim"))
        self._check_state(state, x, sequences=x.shape[0], method="step")
        passage = Passage(x[:, None], state, None, stepping=True)
        return self.mix(x[:, None], passage).squeeze(1), state

    def initial_state(
        self, batch: int, *, dtype: torch.dtype | None = None, device: torch.device | str | None = None
    ) -> LayerState:
        """An empty state for `batch` sequences.

        dtype: of the inputs, by default that of the layer's weights. The recurrent state is float32, or float64 for
        that. device: by default that of the layer's weights.
        """
        weight, memory = next(self.parameters()), self.memory()
        dtype = weight.dtype if dtype is None else dtype
        device = weight.device if device is None else torch.device(device)
        wide = compute_dtype(dtype)
        recurrent = RecurrentState(
            read_size("batch", batch, 0),
            memory.heads,
            memory.key_dim,
            memory.value_dim,
            memory.rule,
            key_heads=memory.key_heads,
            feature_map=memory.feature_map,
            normalize=memory.normalize,
            scale=memory.scale,
            decay=None if memory.decay is None else torch.tensor(memory.decay, dtype=wide, device=device),
            dtype=dtype,
            device=device,
            backend=self.backend,
        )
        tail = None if memory.taps is None else torch.zeros(batch, *memory.taps, dtype=dtype, device=device)
        return LayerState(self._form(memory), recurrent, tail)

    def from_checkpoint(self, tensors: Mapping[str, Tensor], prefix: str = "") -> dict[str, Tensor]:
        """The tensors of a public checkpoint under this layer's names: what `load_state_dict` takes.

        tensors: the whole checkpoint, or the `state_dict` of another library's layer; those whose name begins with
            `prefix` are taken. Names that the layer does not know are kept, so that `load_state_dict` tells of them.
        """
        return self.own_names(below(tensors, prefix))

    def _form(self, memory: Memory) -> tuple[object, ...]:
        """What a state must share with this layer: its kind, the heads and widths, the taps of the convolution."""
        sizes = (memory.heads, memory.key_heads, memory.key_dim, memory.value_dim)
        return type(self).__name__, sizes, memory.taps

    def _check_x(self, x: Tensor, axes: tuple[str, ...]) -> None:
        if not isinstance(x, Tensor):
            raise DTypeError(message("`x` must be a tensor", f"got {type(x).__name__}", "pass a torch.Tensor"))
        if x.ndim != len(axes) or x.shape[-1] != self.dim:
            raise ShapeError(
                message(
                    f"`x` must have the shape ({', '.join(axes)}) with dim = {self.dim}",
                    f"got {tuple(x.shape)}",
                    "`step` takes one token of each sequence, (B, dim); `forward` takes (B, L, dim)",
                )
            )

    def _check_state(self, state: LayerState, x: Tensor, *, sequences: int, method: str) -> None:
        if not isinstance(state, LayerState):
            seen = f"got {type(state).__name__}"
            raise DTypeError(
                message("`state` must be a state of this layer", seen, "make one with initial_state(batch)")
            )
        form = self._form(self.memory())
        if state.form != form:
            raise ValueOutOfRange(
                message(
                    f"`state` must be of this layer: {shown(form)}",
                    f"got one of {shown(state.form)}",
                    "make it with this layer's initial_state(batch), and keep one for each layer of a model",
                )
            )
        if state.batch != sequences:
            raise ShapeError(
                message(
                    "`state` must hold as many sequences as the call",
                    f"got a state of {state.batch} and a call of {sequences}",
                    "make it with initial_state(batch)",
                )
            )
        if state.recurrent.state.device != x.device:
            raise DeviceError(
                message(
                    "`x` and `state` must be on one device",
                    f"got {x.device} and {state.recurrent.state.device}",
                    "make the state with initial_state(batch, device=...)",
                )
            )
        state.recurrent.check_settled(method)


def _read_starts(cu_seqlens: Boundaries, x: Tensor) -> tuple[int, ...]:
    """Where the sequences of a packed row begin, and its end."""
    if x.shape[0] != 1:
        seen = f"got x of {tuple(x.shape)}"
        raise ShapeError(
            message("B must be 1 where `cu_seqlens` is given", seen, "lay the sequences one after another along L")
        )
    return read_boundaries("cu_seqlens", cu_seqlens, "x", x.shape[1])
