"""The plain cache: room for the longest sequence, one row of memory after another."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from qkv.backends.base import Pages
from qkv.cache.arguments import Shape, read_shape, read_size
from qkv.cache.base import Cache
from qkv.cache.memory import blank, positions_of, scattered
from qkv.cache.steps import Stage
from qkv.errors import ValueOutOfRange, message
from qkv.problem import Tensors


class KVCache(Cache):
    """Keys (B, G, max_length, D) and values (B, G, max_length, V), read where they lie.

    B sequences, each of its own length up to max_length; G heads of keys and values. The memory is taken at once.

    >>> cache = KVCache(1, 2, 100, 8)
    >>> step = torch.ones(1, 2, 1, 8)
    >>> cache.attend(step, step, step).shape, cache.length
    (torch.Size([1, 2, 1, 8]), 1)
    """

    def __init__(
        self,
        batch: int,
        heads: int,
        max_length: int,
        head_dim: int,
        value_dim: int | None = None,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__(read_shape(batch, heads, head_dim, value_dim, dtype, device))
        self.max_length = read_size("max_length", max_length, 1)
        self._keys, self._values = self._room_for(self._shape)

    @property
    def keys(self) -> Tensor:
        """The keys, a view (B, G, length, D)."""
        return self._keys.narrow(2, 0, self.length)

    @property
    def values(self) -> Tensor:
        """The values, a view (B, G, length, V)."""
        return self._values.narrow(2, 0, self.length)

    @property
    def key_positions(self) -> Tensor:
        return positions_of(self._lengths, self.device)

    @property
    def nbytes(self) -> int:
        return self._keys.nbytes + self._values.nbytes

    def _room_for(self, shape: Shape) -> tuple[Tensor, Tensor]:
        rows = shape.batch, shape.heads, self.max_length
        return (
            blank((*rows, shape.head_dim), shape.dtype, shape.device),
            blank((*rows, shape.value_dim), shape.dtype, shape.device),
        )

    def _check_room(self, stage: Stage) -> None:
        if stage.keys > self.max_length:
            b = stage.after.index(stage.keys)
            seen = f"sequence {b} of length {stage.before[b]} would have {stage.keys}"
            remedy = "make the cache longer, truncate it, or keep only what is still seen in a RollingKVCache"
            raise ValueOutOfRange(message(f"a sequence must fit into max_length = {self.max_length}", seen, remedy))

    def _logical(self, key: Tensor, value: Tensor, stage: Stage) -> tuple[Tensor, Tensor]:
        return self._keys.narrow(2, 0, stage.keys), self._values.narrow(2, 0, stage.keys)

    def _grow(
        self, key: Tensor, value: Tensor, stage: Stage, tensors: Tensors, in_place: bool
    ) -> tuple[Tensors, Pages | None]:
        self._store(key, value, stage)
        if in_place:
            return tensors._replace(key=self._keys, value=self._values), None
        keys, values = self._logical(key, value, stage)
        if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors):
            keys, values = keys.clone(), values.clone()  # a graph reads them after the next call has written here
        return tensors._replace(key=keys, value=values), None

    def _store(self, key: Tensor, value: Tensor, stage: Stage) -> None:
        rows, starts = stage.rows, stage.offsets
        if len(starts) == 1 and stage.keys - starts[0] == rows == min(stage.after, default=0) - starts[0]:
            self._keys.narrow(2, starts[0], rows).copy_(key)
            self._values.narrow(2, starts[0], rows).copy_(value)
        else:
            b, row, position = (number.to(self.device) for number in scattered(stage))
            self._keys[b, :, position] = key[b, :, row]
            self._values[b, :, position] = value[b, :, row]

    def _cut(self, lengths: Sequence[int]) -> None:
        """Nothing to do: what lies beyond a length is never read."""

    def _pick(self, index: Sequence[int]) -> None:
        chosen, length = torch.tensor(index, dtype=torch.int64, device=self.device), self.length
        memory = self._keys, self._values
        found = [source.narrow(2, 0, length)[chosen] for source in memory]  # both, before anything changes
        if len(index) != self.batch:
            memory = self._room_for(self._shape._replace(batch=len(index)))
        for target, rows in zip(memory, found, strict=True):
            target.narrow(2, 0, length).copy_(rows)
        self._keys, self._values = memory
