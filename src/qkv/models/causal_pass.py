"""One pass of a model that predicts the next token: the checks at its door, its layers in turn, and the way out."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from torch import Tensor, nn

from qkv.errors import ShapeError, message
from qkv.models.output import ModelOutput, check_labels, next_token_loss
from qkv.nn.context import Context
from qkv.nn.ids import check_ids
from qkv.nn.products import matrix_product
from qkv.nn.rows import Rows, check_aux
from qkv.nn.stack_state import StackState, read_state
from qkv.types import AuxOutput, AuxRequest


@dataclass(frozen=True, kw_only=True, eq=False)
class CausalPass:
    """What every layer of the pass works on. Padding leaves at the door: each row's real tokens come first."""

    rows: Rows
    ids: Tensor  # (B, L), ordered by `rows`
    positions: Tensor  # where they stand, (L,) or (B, L)
    state: StackState | None
    labels: Tensor | None
    keep: Tensor | None  # the mask as bool
    last_only: bool
    seen: list[AuxOutput] = field(default_factory=list)  # one a layer, where the caller asked for it

    @classmethod
    def begin(
        cls,
        ids: Tensor,
        attention_mask: Tensor | None,
        *,
        vocabulary: int,
        layers: int,
        labels: Tensor | None,
        state: StackState | None,
        last_only: bool,
        return_aux: AuxRequest | None,
        longest: int | None = None,
    ) -> CausalPass:
        """Check what a caller gave, before any work; `longest` bounds a sequence that has learned positions."""
        check_ids("ids", ids, count=vocabulary)
        if labels is not None:
            if last_only:
                seen = "got both"
                raise ShapeError(message("`last_only` leaves no logits for `labels`", seen, "ask for one of the two"))
            check_labels(labels, tuple(ids.shape), vocabulary)
        if state is not None:
            read_state(state).check(layers, ids.shape[0])
        rows = Rows.of(attention_mask, *ids.shape)
        check_aux(return_aux, rows)
        starts = None if state is None else state.lengths
        if longest is not None:
            _check_length(rows, starts, longest)
        return cls(
            rows=rows,
            ids=rows.front(ids),
            positions=rows.positions(starts, ids.device),
            state=state,
            labels=labels,
            keep=None if attention_mask is None else attention_mask == 1,
            last_only=last_only,
        )

    def through(self, layers: Iterable[nn.Module], x: Tensor, contexts: Context | Sequence[Context]) -> Tensor:
        """x (B, L, E) after the layers, each with its own state; `contexts`: one for all of them, or one a layer."""
        layers = list(layers)
        told = [contexts] * len(layers) if isinstance(contexts, Context) else contexts
        states = [None] * len(layers) if self.state is None else self.state.layers
        keys = None  # of the weights to return: with a state they stand at their positions, else where the ids stand
        if self.state is not None:
            keys = Rows(self.rows.batch, max(_ends(self.rows, self.state.lengths), default=0))
            self.state.begin(layers, x, self.rows.lengths)
        for layer, context, state in zip(layers, told, states, strict=True):
            x, aux = layer(x, context, state)
            if aux is not None and context.aux is not None:
                self.seen.append(self.rows.back_aux(aux, keys, context.aux.weights))
        return x

    def leave(self, x: Tensor, norm: nn.Module, head: Tensor) -> ModelOutput:
        """Hidden states at the caller's places, logits by the matrix of the head (vocabulary, E), and the loss."""
        hidden = norm(self.rows.last(x)) if self.last_only else self.rows.back(norm(x))
        logits = matrix_product(hidden, head)
        loss = None if self.labels is None else next_token_loss(logits, self.labels, self.keep)
        if self.state is not None:
            self.state.settle()
        return ModelOutput(hidden, logits, loss, tuple(self.seen) if self.seen else None)


def _ends(rows: Rows, starts: Sequence[int] | None) -> list[int]:
    """How long each sequence is with these rows."""
    lengths = rows.lengths or (rows.length,) * rows.batch
    return [start + n for start, n in zip(starts or (0,) * rows.batch, lengths, strict=True)]


def _check_length(rows: Rows, starts: Sequence[int] | None, longest: int) -> None:
    length = max(_ends(rows, starts), default=0)
    if length > longest:
        holds = f"a sequence must be at most {longest} tokens long"
        raise ShapeError(message(holds, f"got {length}", "cut the text into windows"))
