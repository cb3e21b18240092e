"""Padding leaves at the door: the real rows of a batch first, and everything back in its place at the end."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import torch
from torch import Tensor

from qkv.cache.arguments import read_counts, read_size
from qkv.errors import DTypeError, MaskError, ShapeError, UnsupportedError, message
from qkv.shapes import check_dense, describe
from qkv.types import AuxOutput, AuxRequest, TopK
from qkv.types import Rows as Chosen


@dataclass(frozen=True, eq=False)
class Rows:
    """Where the real rows of a batch (B, L, ...) stand.

    `front` moves them to the left of each sequence, in their order, and `back` undoes it. Between the two a batch is
    padded on the right only, so that one number a sequence, its length, says all: each real row stands at the position
    that it has in its sequence alone. `packed` and `unpacked` work between the two as well.

    >>> rows = Rows.of(torch.tensor([[0, 1, 1], [1, 1, 1]]), 2, 3)
    >>> rows.lengths, rows.front(torch.tensor([[0, 7, 8], [4, 5, 6]])).tolist()
    ((2, 3), [[7, 8, 0], [4, 5, 6]])
    """

    batch: int  # B
    length: int  # L
    lengths: tuple[int, ...] | None = None  # how many rows of each sequence are real; None: all
    keep: Tensor | None = None  # bool (B, L), where the real rows stand; None: on the left

    @classmethod
    def of(cls, attention_mask: Tensor | None, batch: int, length: int, *, name: str = "attention_mask") -> Rows:
        """The rows that a mask (B, L) keeps: where it is True or 1. None keeps all.

        Its numbers are read, which waits for a GPU. name: what an error calls the mask. Raises DTypeError, ShapeError,
        MaskError or UnsupportedError.
        """
        if attention_mask is None:
            return cls(batch, length)
        keep = _read_mask(name, attention_mask, (batch, length))
        counts = keep.sum(1)
        on_left = torch.arange(length, device=keep.device) < counts[:, None]
        lengths = tuple(int(n) for n in counts.tolist())
        if all(n == length for n in lengths):
            return cls(batch, length)
        return cls(batch, length, lengths, None if torch.equal(keep, on_left) else keep)

    @classmethod
    def padded(cls, lengths: Sequence[int] | None, batch: int, length: int) -> Rows:
        """A batch that is padded on the right already: `lengths` of each sequence are real, None: all."""
        if lengths is None:
            return cls(batch, length)
        counts = tuple(read_counts(lengths, read_size("batch", batch, 0), read_size("length", length, 0)))
        return cls(batch, length, None if all(n == length for n in counts) else counts)

    def front(self, x: Tensor) -> Tensor:
        """x (B, L, ...) with the real rows of each sequence first; x itself where they are."""
        self._check("x", x)
        return x if self.keep is None else _taken(x, self._order)

    def back(self, y: Tensor, blank: float = 0) -> Tensor:
        """y (B, L, ...), ordered by `front`, with the real rows where they came from and `blank` elsewhere."""
        self._check("y", y)
        if self.lengths is None:
            return y
        placed = y if self.keep is None else _taken(y, self._places)
        kept = (self._left if self.keep is None else self.keep).to(y.device)
        return torch.where(kept.view(*kept.shape, *(1,) * (y.ndim - 2)), placed, blank)

    def back_aux(self, aux: AuxOutput, keys: Rows | None = None, chosen: Chosen = True) -> AuxOutput:
        """What attention over ordered rows returned beside its output, in the order that came in.

        keys: the rows of the keys, where these are of another sequence. chosen: of which query rows the weights are, as
        the request said; others than all of them only where real rows are on the left. A row of padding has weights
        and entropy 0, log-sum-exp and maximum -inf, and of `top_k` the weight 0.
        """
        keys = self if keys is None else keys
        return AuxOutput(
            lse=_back_along(-1, self, aux.lse, -math.inf),
            max_scores=_back_along(-1, self, aux.max_scores, -math.inf),
            entropy=_back_along(-1, self, aux.entropy, 0),
            weights=self._back_weights(_back_along(-1, keys, aux.weights, 0), chosen),
            top_k=None if aux.top_k is None else _back_top(aux.top_k, self, keys),
        )

    def last(self, x: Tensor) -> Tensor:
        """The last real row of each sequence of x (B, L, ...), ordered by `front`: (B, 1, ...)."""
        self._check("x", x)
        if self.lengths is None:
            return x[:, -1:]
        ends = torch.tensor([max(n - 1, 0) for n in self.lengths], device=x.device)
        return _taken(x, ends[:, None])

    def positions(self, starts: Sequence[int] | None = None, device: torch.device | str | None = None) -> Tensor:
        """Where the ordered rows stand in their sequences, int64: (L,) where all agree, else (B, L).

        starts: where each sequence goes on, for example the `lengths` of a cache; None: 0. Padding stands no further
        than the last real row of the batch, or of its sequence where sequences differ.
        """
        first = starts[0] if starts else 0
        if not starts or all(start == first for start in starts):
            steps = torch.arange(first, first + self.length, device=device)
            most = first + max(self.lengths) - 1 if self.lengths else None
            return steps if most is None else steps.clamp_(max=max(most, 0))
        begin = torch.tensor(list(starts), dtype=torch.int64, device=device)[:, None]
        steps = begin + torch.arange(self.length, device=device)
        if self.lengths is None:
            return steps
        ends = begin + torch.tensor(self.lengths, device=device)[:, None] - 1
        return torch.minimum(steps, ends.clamp_(min=0))

    @property
    def cu_seqlens(self) -> tuple[int, ...]:
        """Where the sequences begin in `packed`, and its end: B + 1 numbers from 0 to T."""
        return tuple(accumulate(self._counts, initial=0))

    def packed(self, x: Tensor) -> Tensor:
        """The real rows alone of x (B, L, ...), ordered by `front`, one sequence after another: (1, T, ...)."""
        self._check("x", x)
        flat = x.flatten(0, 1)
        return (flat if self.lengths is None else flat.index_select(0, self._real.to(x.device)))[None]

    def unpacked(self, y: Tensor) -> Tensor:
        """What `packed` undoes: y (1, T, ...) as (B, L, ...), padded on the right with 0."""
        if y.ndim < 2 or tuple(y.shape[:2]) != (1, sum(self._counts)):
            holds = f"`y` must have the shape (1, T, ...) with T = {sum(self._counts)}"
            raise ShapeError(message(holds, f"got {describe(y)}", "pass what became of `packed(x)`"))
        sizes = self.batch, self.length
        if self.lengths is None:
            return y[0].unflatten(0, sizes)
        blank = y.new_zeros((self.batch * self.length, *y.shape[2:]))
        return blank.index_copy(0, self._real.to(y.device), y[0]).unflatten(0, sizes)

    @property
    def _counts(self) -> tuple[int, ...]:
        return (self.length,) * self.batch if self.lengths is None else self.lengths

    @cached_property
    def _left(self) -> Tensor:
        """Which of the ordered rows are real, bool (B, L)."""
        return torch.arange(self.length) < torch.tensor(self._counts, dtype=torch.int64)[:, None]

    @cached_property
    def _real(self) -> Tensor:
        """The flat numbers of the real rows among the ordered."""
        return self._left.flatten().nonzero().squeeze(1)

    @cached_property
    def _order(self) -> Tensor:
        """Which row comes where, (B, L): the real ones first, then the others, each kind in its order."""
        assert self.keep is not None
        return self.keep.logical_not().to(torch.uint8).argsort(dim=1, stable=True)

    @cached_property
    def _places(self) -> Tensor:
        """Where the row of each place went, (B, L)."""
        return self._order.argsort(dim=1)

    def _back_weights(self, weights: Tensor | None, chosen: Chosen) -> Tensor | None:
        """Query rows of weights (B, H, L, S) or (B, L, S) in their places; of chosen ones 0 in those of padding."""
        if weights is None or chosen is True or chosen == "mean":
            return _back_along(-2, self, weights, 0)
        if self.lengths is None:
            return weights
        assert self.keep is None  # else the numbers that the caller chose are others here
        numbers = chosen if isinstance(chosen, int) else _numbers(chosen, self.length)
        real = self._left[:, numbers].to(weights.device).unsqueeze(1).unsqueeze(-1)  # (B, 1, 1) where one was chosen
        return torch.where(real, weights, 0)

    def _check(self, name: str, x: Tensor) -> None:
        if x.ndim < 2 or x.shape[0] != self.batch or x.shape[1] != self.length:
            holds = f"`{name}` must have the shape (B, L, ...) with B = {self.batch} and L = {self.length}"
            raise ShapeError(message(holds, f"got {describe(x)}", "make the rows of the mask of this batch"))


def check_aux(request: AuxRequest | None, *rows: Rows) -> None:
    """Raise where some query rows were asked for by number, and padding before real rows would number them anew."""
    if request is None or all(one.keep is None for one in rows):
        return
    if isinstance(request.weights, bool) or request.weights == "mean":
        return
    raise UnsupportedError(
        message(
            "weights of chosen rows need sequences that are padded on the right",
            f"got weights={request.weights!r} and real tokens after padding",
            'ask for weights=True or "mean", and choose rows of what comes back',
        )
    )


def _back_along(axis: int, rows: Rows, tensor: Tensor | None, blank: float) -> Tensor | None:
    """`rows.back` along another axis than the second, counted from the last."""
    return None if tensor is None else rows.back(tensor.movedim(axis, 1), blank).movedim(1, axis)


def _numbers(chosen: slice | Sequence[int], length: int) -> list[int]:
    return list(range(length)[chosen] if isinstance(chosen, slice) else chosen)


def _back_top(found: TopK, rows: Rows, keys: Rows) -> TopK:
    """The rows of `top_k` (B, H, L, k) in their places, and its keys by the numbers that came in."""
    values, indices = found
    came = keys.front(torch.arange(keys.length, device=indices.device).expand(keys.batch, -1))
    indices = came[:, None, None, :].expand(*indices.shape[:3], -1).gather(3, indices)
    return TopK(*(rows.back(part.movedim(2, 1)).movedim(1, 2) for part in (values, indices)))


def _taken(x: Tensor, index: Tensor) -> Tensor:
    """x[b, index[b, i]] of x (B, L, ...) and index (B, n): (B, n, ...)."""
    batch, length = x.shape[:2]
    index = index.to(x.device)
    flat = index + torch.arange(batch, device=x.device)[:, None] * length
    return x.flatten(0, 1).index_select(0, flat.flatten()).unflatten(0, (batch, index.shape[1]))


def _read_mask(name: str, mask: Tensor, sizes: tuple[int, int]) -> Tensor:
    """A mask of padding as bool (B, L), True where a row is kept."""
    if not isinstance(mask, Tensor):
        seen = f"got {type(mask).__name__}"
        raise DTypeError(message(f"`{name}` must be a tensor (B, L)", seen, "wrap it in torch.tensor"))
    check_dense(name, mask)
    if tuple(mask.shape) != sizes:
        holds = f"`{name}` must be (B, L) = {sizes}"
        raise ShapeError(message(holds, f"got {describe(mask)}", "give one number a token, 1 to keep it"))
    if mask.is_meta:
        holds, remedy = f"`{name}` must have numbers, which say who is real", "or leave the mask out: all are real then"
        raise UnsupportedError(message(holds, "got a mask on the meta device", f"make it on another, {remedy}"))
    if mask.dtype == torch.bool:
        return mask
    keep = mask == 1
    if not bool((keep | (mask == 0)).all()):
        holds = f"`{name}` must hold 1 for tokens to keep and 0 for padding"
        raise MaskError(message(holds, "got other numbers", "of a mask that is added pass `mask == 0`"))
    return keep
