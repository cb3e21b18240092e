"""What a recurrent state holds, and its ways back: snapshots, copies, beams, and what an interrupt leaves."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from qkv.cache.arguments import read_integers, read_size
from qkv.errors import DTypeError, ShapeError, UnsupportedError, ValueOutOfRange, message
from qkv.linear.engine import check_name
from qkv.linear.state_draft import Draft, own
from qkv.linear.state_rules import Setting, same_map
from qkv.linear.state_tokens import Call
from qkv.outside import outside_of_graphs
from qkv.shapes import check_dense, describe, dtype_name

if TYPE_CHECKING:
    from typing_extensions import Self

alone = outside_of_graphs("a recurrent state is kept outside of the graph")


@dataclass(frozen=True, slots=True, eq=False)
class Snapshot:
    """What a `RecurrentState` was at one moment, in memory of its own; nothing changes it."""

    setting: Setting = field(repr=False)
    length: int
    _state: Tensor = field(repr=False)

    @property
    def state(self) -> Tensor:
        """A copy of the numbers, (B, H, D, W)."""
        return own(self._state)

    @property
    def nbytes(self) -> int:
        """Bytes of memory that are held."""
        return self._state.nbytes


class Held:
    """The matrices (B, H, D, W) of B sequences, how many tokens they have seen, and an open draft."""

    _setting: Setting
    _state: Tensor
    _length: int
    _draft: Draft | None
    _torn: bool  # a step ended early, perhaps while it wrote
    _calls: dict[Hashable, Call]  # steps that were checked before, of a state that is whole

    def _begin(self, setting: Setting, state: Tensor, length: int) -> None:
        self._setting = setting
        self._state = state
        self._length = length
        self._draft = None
        self._torn = False
        self._calls = {}

    @property
    def state(self) -> Tensor:
        """The matrices (B, H, D, W): the memory itself, which a step changes and `reorder` replaces."""
        return self._state

    @property
    def length(self) -> int:
        """How many tokens each sequence has seen, those of a draft included."""
        return self._length

    @property
    def drafted(self) -> int:
        """How many tokens `accept` and `reject` decide on."""
        return 0 if self._draft is None else self._draft.tokens

    @property
    def batch(self) -> int:
        """B, how many sequences."""
        return self._state.shape[0]

    @property
    def rule(self) -> str:
        return self._setting.name

    @property
    def dtype(self) -> torch.dtype:
        """The type of the state."""
        return self._setting.dtype

    @property
    def device(self) -> torch.device:
        return self._setting.device

    @property
    def backend(self) -> str:
        """What answers a step: an engine by its name, or "auto"; another one from when it is set."""
        return self._setting.backend

    @backend.setter
    def backend(self, name: str) -> None:
        check_name(name)
        self._setting, self._calls = replace(self._setting, backend=name), {}

    @property
    def nbytes(self) -> int:
        """Bytes of memory that are held now: the state, and a draft's state before it and copies of its tokens."""
        return self._state.nbytes + (0 if self._draft is None else self._draft.nbytes)

    def __repr__(self) -> str:
        sizes = ", ".join(map(str, self._state.shape))
        return f"{type(self).__name__}({self.rule!r}, ({sizes}) {dtype_name(self.dtype)}, length={self._length})"

    @alone
    def snapshot(self) -> Snapshot:
        """What the state is now, to come back to as often as one likes."""
        self.check_settled("snapshot")
        return Snapshot(self._setting, self._length, own(self._state))

    @alone
    def restore(self, snapshot: Snapshot) -> None:
        """Be again what a state of this shape and rule was; a draft is dropped."""
        if not isinstance(snapshot, Snapshot):
            holds = "`snapshot` must come from snapshot()"
            raise DTypeError(message(holds, f"got {describe(snapshot)}", "give a tensor to load(state)"))
        theirs = snapshot._state  # noqa: SLF001 - the property makes a copy
        pairs = (self._state, self._setting), (theirs, snapshot.setting)
        mine, given = (f"{list(state.shape)} with {setting.facts()}" for state, setting in pairs)
        remedy = "restore it into a state that was made the same way"
        if mine != given:
            raise ShapeError(message(f"`snapshot` must be of a state like this one, {mine}", f"it is {given}", remedy))
        if not same_map(snapshot.setting.feature_map, self._setting.feature_map):
            holds = "`snapshot` must be of a state with the same `feature_map`"
            seen = f"its {self._setting.features_name} is another, or holds other numbers"
            raise ValueOutOfRange(message(holds, seen, remedy))
        self._put(theirs, snapshot.length)

    @alone
    def load(self, state: Tensor, *, length: int = 0) -> None:
        """Take the numbers of a state (B, H, D, W) as its own: a copy; a draft is dropped.

        length: how many tokens it has seen.
        """
        given, seen = check_dense("state", state), read_size("length", length, 0)
        if given.shape != self._state.shape or given.dtype != self.dtype:
            holds = f"`state` must be {list(self._state.shape)} {dtype_name(self.dtype)}"
            remedy = "give what a function returned for the same sizes, with one more column where it is normalised"
            raise ShapeError(message(holds, f"got {describe(given)}", remedy))
        self._put(given.detach(), seen)

    @alone
    def reset(self) -> None:
        """Forget all tokens; a draft is dropped."""
        with self._written():
            self._state.zero_()
            self._length, self._draft = 0, None

    @alone
    def fork(self) -> Self:
        """Another state that goes on from here by itself, in memory of its own; an open draft is open in both."""
        self._check_whole()
        twin = object.__new__(type(self))
        twin._begin(self._setting, own(self._state), self._length)
        twin._draft = None if self._draft is None else self._draft.copy()
        return twin

    @alone
    def reorder(self, index: Sequence[int] | Tensor) -> None:
        """Make sequence b what sequence index[b] was, as beam search does; index may have any length, the new B."""
        self.check_settled("reorder")
        chosen = read_integers("index", index, None)
        for place, b in enumerate(chosen):
            if not 0 <= b < self.batch:
                holds = f"`index` must name sequences in 0..B - 1 = {self.batch - 1}"
                raise ValueOutOfRange(message(holds, f"entry {place} is {b}", "count sequences from 0"))
        with torch.inference_mode(False):
            rows = torch.tensor(chosen, dtype=torch.int64, device=self.device)
            self._state = self._state.index_select(0, rows)
        self._calls = {}

    def state_dict(self) -> dict[str, Tensor]:
        """What no setting tells, as tensors that any format can hold: "state", a copy, and "length", int64 ()."""
        self.check_settled("state_dict")
        return {"state": own(self._state), "length": torch.tensor(self._length)}

    def load_state_dict(self, tensors: Mapping[str, Tensor]) -> None:
        """Be what the `state_dict` of a state that was made the same way says."""
        if set(tensors) != {"state", "length"}:
            holds, seen = "`tensors` must hold state and length", f"got {', '.join(sorted(tensors)) or 'none'}"
            raise ValueOutOfRange(message(holds, seen, "give what state_dict() gave"))
        self.load(tensors["state"], length=int(tensors["length"]))

    def __copy__(self) -> Self:
        return self.fork()

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self.fork()

    def __getstate__(self) -> dict[str, Any]:
        self._check_whole()
        return {**self.__dict__, "_calls": {}}

    def __setstate__(self, held: dict[str, Any]) -> None:
        self.__dict__.update(held)
        self._state = own(self._state)

    def _put(self, state: Tensor, length: int) -> None:
        with self._written():
            self._state.copy_(state)
            self._length, self._draft = length, None

    @contextmanager
    def _written(self) -> Iterator[None]:
        """What is interrupted within leaves a state that only what writes all of it mends."""
        try:
            yield
        except BaseException:
            self._tear()
            raise
        self._torn = False

    def _tear(self) -> None:
        self._torn = True
        self._calls = {}  # so that the next step goes the long way

    def _check_whole(self) -> None:
        if self._torn:
            holds, seen = "a state must be whole", "a step ended early while it was written"
            remedy = "call reject() of its draft" if self._draft is not None else "restore a snapshot, load, or reset()"
            raise UnsupportedError(message(holds, seen, remedy))

    def check_settled(self, method: str) -> None:
        """Raise where `method`, which needs all tokens to stay, meets an interrupted state or an open draft."""
        self._check_whole()
        if self._draft is not None:
            holds = f"`{method}` must not meet an open draft"
            seen = f"{self._draft.tokens} tokens are drafted"
            remedy = "call accept(n) or reject() first, or step(..., draft=True) for more of them"
            raise UnsupportedError(message(holds, seen, remedy))
