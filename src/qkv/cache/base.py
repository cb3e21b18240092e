"""What all caches share: how they are asked, and in which order a call checks, appends and attends."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from copy import deepcopy
from typing import TYPE_CHECKING, Any, overload

import torch
from torch import Tensor

from qkv.backends.base import Pages, Work
from qkv.backends.cpu import Cpu
from qkv.cache.arguments import Shape, check_no_transform, check_queries, read_chunk, read_counts, read_integers
from qkv.cache.steps import Stage, Step, aligned, answer, may_follow, reads_in_place
from qkv.dispatch import choose
from qkv.errors import ValueOutOfRange, message
from qkv.inputs import in_call, read_pattern
from qkv.outside import outside_of_graphs
from qkv.patterns.pattern import Pattern
from qkv.patterns.schedule import PatternPlan
from qkv.problem import Problem, Tensors
from qkv.question import as_autocast_does, ask
from qkv.remembered import key_of
from qkv.scores import Alibi, Relative
from qkv.types import AuxOutput, AuxRequest, Layout

if TYPE_CHECKING:
    from typing_extensions import Self

MOST = 16  # steps remembered


def undoing(cache: Cache) -> AbstractContextManager[None]:
    """What fails within leaves the cache as it was, also where an `append` or `attend` within it, one, had ended."""
    return cache._all_or_nothing()  # noqa: SLF001 - a cache's own, for who works on with its answer


alone = outside_of_graphs("a cache keeps its state outside of the graph")


class Cache(ABC):
    """Keys and values of B sequences, each of its own length, that grow at their ends.

    No gradient flows into a cache: what is appended is taken without its graph. What a cache holds is replaced, never
    changed where anything may still read it, so that a call that fails can be undone.
    """

    def __init__(self, shape: Shape) -> None:
        self._shape = shape
        self._lengths = [0] * shape.batch
        self._steps: dict[Hashable, Step] = {}

    def __getstate__(self) -> dict[str, Any]:
        """For a copy and for pickle: without the steps, which are told apart by identity."""
        return {**self.__dict__, "_steps": {}}

    def __copy__(self) -> Self:
        """A cache of its own: two over one memory would write into each other's keys."""
        return deepcopy(self)

    @property
    def batch(self) -> int:
        """B, how many sequences."""
        return self._shape.batch

    @property
    def heads(self) -> int:
        """G, the heads of keys and values."""
        return self._shape.heads

    @property
    def head_dim(self) -> int:
        """D, the width of keys."""
        return self._shape.head_dim

    @property
    def value_dim(self) -> int:
        """V, the width of values."""
        return self._shape.value_dim

    @property
    def dtype(self) -> torch.dtype:
        return self._shape.dtype

    @property
    def device(self) -> torch.device:
        return self._shape.device

    @property
    def lengths(self) -> tuple[int, ...]:
        """How many keys each sequence has seen; where its next query will stand."""
        return tuple(self._lengths)

    @property
    def length(self) -> int:
        """The length of the longest sequence, S."""
        return max(self._lengths, default=0)

    @property
    @abstractmethod
    def keys(self) -> Tensor:
        """The keys that are kept, (B, G, n, D); `key_positions` says where each stands."""

    @property
    @abstractmethod
    def values(self) -> Tensor:
        """The values that are kept, (B, G, n, V)."""

    @property
    @abstractmethod
    def key_positions(self) -> Tensor:
        """Where each kept key stands, int64 (B, n); -1 in a row that holds none: its content has no meaning."""

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Bytes of memory that are held now."""

    @alone
    def append(self, key: Tensor, value: Tensor, lengths: Sequence[int] | Tensor | None = None) -> None:
        """Add keys (B, G, n, D) and values (B, G, n, V) at the end of each sequence.

        lengths: how many of the n rows are real, one number a sequence; the others, on the right, are padding.
        """
        check_no_transform()
        key, value = read_chunk(key, value, self._shape, "BHLD")
        stage = self._stage(read_counts(lengths, self.batch, key.shape[2]), key.shape[2])
        self._check_room(stage)
        with self._all_or_nothing():
            self._store(key, value, stage)
            self._let_go(stage.after)
            self._lengths = stage.after

    @overload
    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        pattern: Pattern | None = None,
        bias: Tensor | Alibi | Relative | None = None,
        scale: float | None = None,
        softcap: float | None = None,
        sinks: Tensor | None = None,
        layout: Layout = "BHLD",
        backend: str = "auto",
        lengths: Sequence[int] | Tensor | None = None,
        return_aux: None = None,
    ) -> Tensor: ...
    @overload
    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        pattern: Pattern | None = None,
        bias: Tensor | Alibi | Relative | None = None,
        scale: float | None = None,
        softcap: float | None = None,
        sinks: Tensor | None = None,
        layout: Layout = "BHLD",
        backend: str = "auto",
        lengths: Sequence[int] | Tensor | None = None,
        return_aux: AuxRequest,
    ) -> tuple[Tensor, AuxOutput]: ...
    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        pattern: Pattern | None = None,
        bias: Tensor | Alibi | Relative | None = None,
        scale: float | None = None,
        softcap: float | None = None,
        sinks: Tensor | None = None,
        layout: Layout = "BHLD",
        backend: str = "auto",
        lengths: Sequence[int] | Tensor | None = None,
        return_aux: AuxRequest | None = None,
    ) -> Tensor | tuple[Tensor, AuxOutput]:
        """Append n keys and values to each sequence, and attend from n queries that stand where they stand.

        query (B, H, n, D), key (B, G, n, D), value (B, G, n, V); the result is (B, H, n, V). What `qkv.attention` gives
        for the last n queries of the whole sequences, by the same arguments; S is the longest length after the append.
        lengths: how many of the n rows are real, one number a sequence; a query of padding gets 0.
        An error, or an interrupt, leaves the cache as it was. The gradient reaches the query, bias and sinks, but no
        key and no value.
        """
        if torch.compiler.is_dynamo_compiling():
            options = {"pattern": pattern, "bias": bias, "scale": scale, "softcap": softcap, "sinks": sinks}
            places = {"layout": layout, "backend": backend, "lengths": lengths, "return_aux": return_aux}
            return _attend(self, query, key, value, **options, **places)
        chosen = self._chosen(pattern)
        call = None
        if bias is None and sinks is None and lengths is None and return_aux is None:
            call = key_of(query, key, value, chosen, None, (scale, softcap, layout, backend))
            known = self._steps.get(call)
            output = None if known is None else self._again(known, query, key, value)
            if output is not None:
                return output
        with in_call(query, key, value, chosen):
            check_no_transform()
            query, key, value = as_autocast_does(query, key, value)
            new_key, new_value = read_chunk(key, value, self._shape, layout)
            stage = self._stage(read_counts(lengths, self.batch, new_key.shape[2]), new_key.shape[2])
            check_queries(query, stage.rows, layout)
            self._check_room(stage)
            legal = aligned(read_pattern(chosen), stage.before)
            key, value = self._logical(new_key, new_value, stage)
            question = ask(
                query,
                key if layout == "BHLD" else key.transpose(1, 2),
                value if layout == "BHLD" else value.transpose(1, 2),
                pattern=stage.narrowed(legal),
                bias=bias,
                scale=scale,
                softcap=softcap,
                sinks=sinks,
                query_offset=stage.offsets if len(stage.offsets) > 1 else stage.offsets[0],
                layout=layout,
                return_aux=return_aux,
            )
            problem = question.problem
            taken = choose(problem, backend).backend
            self._check_reach(legal, problem)
        if call is not None and isinstance(taken, Cpu) and not problem.needs_grad and may_follow(chosen):
            self._remember(call, Step.like(call, chosen, legal, problem, layout))
        in_place = reads_in_place(problem, question.tensors, taken)
        with self._all_or_nothing():
            tensors, pages = self._grow(new_key, new_value, stage, question.tensors, in_place)
            output, aux = answer(problem, tensors, taken, pages, in_place=in_place, warn=stage.grows)
            output = question.restore(output)
            self._let_go(stage.after)
            self._lengths = stage.after
        return output if return_aux is None else (output, aux)

    @alone
    def truncate(self, n: int | Sequence[int] | Tensor) -> None:
        """Forget all keys at position n and beyond: of each sequence, or one number a sequence."""
        lengths = read_integers("n", n, self.batch)
        for b, (wanted, length) in enumerate(zip(lengths, self._lengths, strict=True)):
            if not 0 <= wanted <= length:
                holds = "`truncate` must be given a length between 0 and that of the sequence"
                seen = f"got {wanted} for sequence {b} of length {length}"
                raise ValueOutOfRange(message(holds, seen, "append what is missing, or give one number a sequence"))
        with self._all_or_nothing():
            self._cut(lengths)
            self._lengths = lengths

    @alone
    def reorder(self, index: Sequence[int] | Tensor) -> None:
        """Make sequence b what sequence index[b] was, as beam search does; index may have any length, the new B."""
        chosen = read_integers("index", index, None)
        for place, b in enumerate(chosen):
            if not 0 <= b < self.batch:
                seen = f"entry {place} is {b}"
                remedy = "count sequences from 0"
                raise ValueOutOfRange(
                    message(f"`index` must name sequences in 0..B - 1 = {self.batch - 1}", seen, remedy)
                )
        with self._all_or_nothing():
            self._pick(chosen)
            self._lengths = [self._lengths[b] for b in chosen]
            self._shape = self._shape._replace(batch=len(chosen))
            self._steps = {}

    def _again(self, step: Step, query: Tensor, key: Tensor, value: Tensor) -> Tensor | None:
        """A step like an earlier one; None where it is to go the long way."""
        if step.swapped:
            query, key, value = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
        rows = step.problem.queries
        stage = self._stage([rows] * len(self._lengths), rows)
        self._check_room(stage)
        asked = step.at(stage)
        if asked is None:
            return None
        problem, plan = asked
        self._check_reach(step.pattern, problem, plan)
        held = self.__dict__.copy()
        try:  # as `_all_or_nothing`, which would cost more
            tensors, pages = self._grow(key.detach(), value.detach(), stage, Tensors(query, key, value), True)
            output = step.answer(Work(problem, tensors, plan, 0, None, pages))
            self._let_go(stage.after)
            self._lengths = stage.after
        except BaseException:
            self._put_back(held)
            raise
        return output.transpose(1, 2) if step.swapped else output

    @contextmanager
    def _all_or_nothing(self) -> Iterator[None]:
        """What fails within leaves the cache as it was, an interrupt included."""
        held = self.__dict__.copy()
        try:
            yield
        except BaseException:
            self._put_back(held)
            raise

    def _put_back(self, held: dict[str, Any]) -> None:
        self.__dict__.update(held)

    def _stage(self, counts: Sequence[int], rows: int) -> Stage:
        return Stage(self._lengths, [old + new for old, new in zip(self._lengths, counts, strict=True)], rows)

    def _remember(self, call: Hashable, step: Step) -> None:
        if len(self._steps) >= MOST:
            self._steps.clear()
        self._steps[call] = step

    def _chosen(self, pattern: Pattern | None) -> Pattern | None:
        """The pattern of a call that names none."""
        return pattern

    def check_room(self, lengths: Sequence[int], rows: int) -> None:
        """Raise ValueOutOfRange where n = `rows` more rows, `lengths` of them real, do not fit."""
        self._check_room(self._stage(lengths, rows))

    @abstractmethod
    def _check_room(self, stage: Stage) -> None:
        """Raise ValueOutOfRange where what is to be appended does not fit."""

    def _check_reach(  # noqa: B027 - only one kind drops keys
        self, pattern: Pattern, problem: Problem, plan: PatternPlan | None = None
    ) -> None:
        """Raise ValueOutOfRange where a query would see a key that was dropped."""

    @abstractmethod
    def _logical(self, key: Tensor, value: Tensor, stage: Stage) -> tuple[Tensor, Tensor]:
        """Keys (B, G, S, D) and values (B, G, S, V) as they will be, in form: their content does not count."""

    @abstractmethod
    def _grow(
        self, key: Tensor, value: Tensor, stage: Stage, tensors: Tensors, in_place: bool
    ) -> tuple[Tensors, Pages | None]:
        """Store, and what to attend over: the tensors of the call with the keys and values that the sequences have
        then. `in_place`: where they lie, which may be in pages, and more rows than S.
        """

    def _let_go(self, lengths: Sequence[int]) -> None:  # noqa: B027 - as above
        """Drop what no later query can see of sequences of these lengths; best effort, since the answer is there."""

    @abstractmethod
    def _store(self, key: Tensor, value: Tensor, stage: Stage) -> None:
        """Write what is appended where it will stand; it counts once the lengths say so."""

    @abstractmethod
    def _cut(self, lengths: Sequence[int]) -> None:
        """Forget what lies beyond these lengths, which are no longer than the sequences."""

    @abstractmethod
    def _pick(self, index: Sequence[int]) -> None:
        """Sequences in another order."""


@alone
def _attend(cache: Cache, *tensors: Tensor, **options: Any) -> Any:
    return cache.attend(*tensors, **options)
