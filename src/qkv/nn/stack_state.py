"""What a stack of layers remembers between calls: one state a layer, and the keys of a memory, made once."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from copy import copy
from dataclasses import replace
from typing import cast

import torch
from torch import Tensor, nn

from qkv.cache import RollingKVCache
from qkv.cache.arguments import read_integers
from qkv.cache.base import Cache
from qkv.errors import DTypeError, ShapeError, UnsupportedError, ValueOutOfRange, message
from qkv.linear.state_draft import own
from qkv.nn.attention_state import Keys
from qkv.nn.layer_state import LayerState
from qkv.nn.rows import Rows
from qkv.nn.state_checks import Place, check_place, check_states


class StackState:
    """The states of a stack's layers for B sequences, from the first layer to the last, which advance together.

    layers: a cache for each layer of softmax attention, a LayerState for each recurrent one. cross: the keys and values
    that each layer made of the memory, where there is one. memory: where the real rows of that memory stand in it.

    A stack advances it in place, between `begin` and `settle`. A call that fails after a layer has gone on, or that is
    interrupted there, leaves tokens that no caller got an answer for; every later call refuses such a state. Where all
    layers keep their keys, `truncate` to what was before makes it whole again.
    """

    def __init__(
        self,
        layers: Sequence[Cache | LayerState],
        cross: Sequence[Keys] | None = None,
        memory: Rows | None = None,
    ) -> None:
        self.layers = list(layers)
        self.cross = None if cross is None else [_kept(keys) for keys in cross]
        self.memory = None if memory is None else _kept_rows(memory)
        self._began: tuple[int, ...] | None = None  # the lengths before a pass that has not ended; () where all is lost
        self._fits: Place | None = None  # what all layers were last found to be made for
        self._stood: list[int] = []  # how far the numbers of recurrent layers stood then
        if not self.layers:
            raise ValueOutOfRange(message("`layers` must hold the state of a layer", "got none", "give one a layer"))
        for name, entries in (("layers", self.layers), ("cross", self.cross or ())):
            batches = {_batch(entry) for entry in entries}
            if batches - {self.batch}:
                seen = f"got {sorted(batches | {self.batch})} sequences in `{name}`"
                raise ShapeError(message("all layers must have as many sequences", seen, "make them for one batch"))
        if self.cross is not None and len(self.cross) != len(self.layers):
            seen = f"got {len(self.cross)} for {len(self.layers)} layers"
            raise ShapeError(message("`cross` must hold the keys of each layer", seen, "give one a layer"))

    @property
    def batch(self) -> int:
        """B, how many sequences."""
        return self.layers[0].batch

    @property
    def lengths(self) -> tuple[int, ...]:
        """How many tokens each sequence has seen; where its next one will stand."""
        return self.layers[0].lengths

    @property
    def length(self) -> int:
        """The length of the longest sequence."""
        return max(self.lengths, default=0)

    @property
    def nbytes(self) -> int:
        """Bytes that are held now, those of the memory's keys included."""
        memory = sum(keys.key.nbytes + keys.value.nbytes for keys in self.cross or ())
        return memory + sum(layer.nbytes for layer in self.layers)

    def check(self, layers: int, batch: int) -> None:
        """Raise where this is not the state of so many layers and sequences, or its layers are not at one token."""
        if (len(self.layers), self.batch) != (layers, batch):
            raise ShapeError(
                message(
                    f"`state` must be of {layers} layers and {batch} sequences, as the call",
                    f"got one of {len(self.layers)} layers and {self.batch} sequences",
                    "make it with this model's initial_state(batch, max_length)",
                )
            )
        lengths = self.lengths
        for number, layer in enumerate(self.layers):
            if layer.lengths != lengths:
                raise ValueOutOfRange(
                    message(
                        "all layers of `state` must have seen the same tokens",
                        f"layer 0 has seen {lengths} and layer {number} {layer.lengths}, as after a call that failed",
                        "go on from a fork() made before, or from a new state",
                    )
                )
        self._check_whole()

    def begin(self, layers: Iterable[nn.Module], x: Tensor, lengths: Sequence[int] | None) -> None:
        """A pass over x (B, L, dim), `lengths` of its rows real, begins through layers with an `attention` each.

        Raises where one of them cannot go on: a state of the other kind, of another type or device, a full cache,
        dropout of weights. Else the state is open until `settle`.
        """
        place = Place.of(x)
        if place != self._fits:
            for state in self.layers:
                check_place(state, place)
            self._fits = place
        check_states([cast("nn.Module", layer.attention) for layer in layers], self.layers, x, lengths)
        self._stood = self._stands()
        self._began = self.lengths

    def settle(self) -> None:
        """The pass has come to its end: what the layers took counts."""
        self._began = None

    def reorder(self, index: Sequence[int] | Tensor) -> None:
        """Make sequence b what sequence index[b] was, as beam search does; index may have any length, the new B."""
        self._check_whole()
        first, *others = self.layers
        first.reorder(index)  # which refuses a wrong index
        self._began = ()
        for layer in others:
            layer.reorder(index)
        rows = torch.as_tensor(index, dtype=torch.int64)
        if self.cross is not None:
            self.cross = [_picked(keys, rows) for keys in self.cross]
        if self.memory is not None:
            self.memory = _picked_rows(self.memory, rows)
        self._began = None

    def truncate(self, n: int | Sequence[int] | Tensor) -> None:
        """Forget all tokens at position n and beyond: of each sequence, or one number a sequence.

        Raises UnsupportedError where a layer is recurrent, and ValueOutOfRange where a rolling cache has dropped keys
        that are seen from there; nothing has changed then. After a call that failed, n is at most what was before it.
        """
        caches = [layer for layer in self.layers if isinstance(layer, Cache)]
        if len(caches) < len(self.layers):
            raise UnsupportedError(
                message(
                    "a state can be truncated where every layer keeps its keys",
                    f"{len(self.layers) - len(caches)} of {len(self.layers)} layers are recurrent and forget them",
                    "keep a fork() of the moment to come back to",
                )
            )
        if self._began is not None:
            wanted = read_integers("n", n, self.batch)
            if len(wanted) != len(self._began) or any(a > b for a, b in zip(wanted, self._began, strict=True)):
                self._check_whole()
        rolling = [cache for cache in caches if isinstance(cache, RollingKVCache)]
        unlike = {str(cache.pattern): cache for cache in rolling}  # caches of one pattern refuse the same lengths
        if len(unlike) > 1:
            for cache in unlike.values():
                copy(cache).truncate(n)
        for one in sorted(caches, key=lambda cache: cache not in rolling):  # those that may refuse first
            one.truncate(n)
        self._began = None

    def fork(self) -> StackState:
        """An independent state that continues from the same moment; the keys of the memory are shared."""
        self._check_whole()
        return StackState([copy(layer) for layer in self.layers], self.cross, self.memory)

    def __copy__(self) -> StackState:
        return self.fork()

    def __repr__(self) -> str:
        kinds = ", ".join(dict.fromkeys(type(layer).__name__ for layer in self.layers))
        return (
            f"StackState({len(self.layers)} layers of {kinds}, batch {self.batch}, "
            f"length={self.length}, nbytes={self.nbytes})"
        )

    def _check_whole(self) -> None:
        """Raise where the last pass failed after a layer had gone on."""
        if self._began is None:
            return
        if any(layer.lengths != self._began for layer in self.layers) or self._stands() != self._stood:
            way = f"from {self._began} to {self.lengths} tokens" if self._began else "through a part of a reorder"
            raise ValueOutOfRange(
                message(
                    "`state` must be as a call left it that came to its end",
                    f"the last one failed when it had gone {way}",
                    "go on from a fork() made before, or from a new state; truncate() it to what was before",
                )
            )
        self._began = None

    def _stands(self) -> list[int]:
        return [layer.recurrent.length for layer in self.layers if isinstance(layer, LayerState)]


def read_state(state: object) -> StackState:
    """The state of a stack, and nothing else."""
    if not isinstance(state, StackState):
        remedy = "make it with this model's initial_state(batch, max_length)"
        raise DTypeError(message("`state` must be a StackState", f"got {type(state).__name__}", remedy))
    return state


def _batch(entry: Cache | LayerState | Keys) -> int:
    """How many sequences it is of."""
    return entry.batch if isinstance(entry, Cache | LayerState) else entry.key.shape[0]


def _kept(keys: Keys) -> Keys:
    """Keys that may be read in every mode: what was made in inference mode is copied."""
    return Keys(_readable(keys.key), _readable(keys.value), keys.lengths)


def _kept_rows(memory: Rows) -> Rows:
    keep = None if memory.keep is None else _readable(memory.keep)
    return memory if keep is memory.keep else replace(memory, keep=keep)


def _readable(tensor: Tensor) -> Tensor:
    return own(tensor) if tensor.is_inference() else tensor


def _picked(keys: Keys, rows: Tensor) -> Keys:
    """The keys of the memory of these rows."""
    where = rows.to(keys.key.device)
    key, value = keys.key.index_select(0, where), keys.value.index_select(0, where)
    return _kept(Keys(key, value, _of_rows(keys.lengths, rows)))


def _picked_rows(memory: Rows, rows: Tensor) -> Rows:
    """Where the real rows of these sequences stand."""
    keep = None if memory.keep is None else memory.keep[rows.to(memory.keep.device)]
    return _kept_rows(Rows(len(rows), memory.length, _of_rows(memory.lengths, rows), keep))


def _of_rows(lengths: tuple[int, ...] | None, rows: Tensor) -> tuple[int, ...] | None:
    return None if lengths is None else tuple(lengths[row] for row in rows.tolist())
