"""Writing on from a prompt, token by token: what every model that predicts the next token can do.

`generate` gives all tokens at once, `stream` gives them as they come. B prompts of different lengths make one batch,
padded on either side; each row gets the tokens that it would get alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from qkv.cache.arguments import read_size
from qkv.errors import DTypeError, MaskError, ValueOutOfRange, message
from qkv.models.sampling import Sampling
from qkv.nn.ids import check_ids
from qkv.nn.rows import Rows
from qkv.nn.stack_state import StackState


class Start(NamedTuple):
    """What the loop begins with: tokens that the model reads first, which of them are real, where it keeps them."""

    ids: Tensor  # (B, L)
    attention_mask: Tensor | None  # (B, L), keeps where 1; None keeps all
    state: StackState


class Generates:
    """For models of the next token: `generate` and `stream`.

    A model gives `config` with `end_ids` and `pad_id` (and `positions` where it has a greatest length),
    `initial_state(batch, max_length)` and `forward(ids, attention_mask, state=, last_only=)`. One that begins
    otherwise than by reading the prompt, as an encoder-decoder does, has its own `_begin` and `_next`.
    """

    if TYPE_CHECKING:
        config: Any

        __call__: Callable[..., Any]

        def initial_state(self, batch: int, max_length: int) -> StackState: ...

    def generate(
        self,
        ids: Tensor,
        max_new_tokens: int,
        *,
        attention_mask: Tensor | None = None,
        temperature: float = 0.0,
        top_k: int | None = None,
        top_p: float | None = None,
        repetition_penalty: float = 1.0,
        stop: int | Sequence[int] | None = None,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """The prompts and what follows them, int64 (B, L + n), n at most `max_new_tokens`.

        ids: integers (B, L). attention_mask: (B, L), keeps where 1; padding may stand on the left (as usual, so that
        what is new follows the prompt at once) or on the right. What follows stands from column L on.
        temperature, top_k, top_p, repetition_penalty: see `Sampling`; temperature 0 takes the most probable token.
        stop: tokens that end a row and are its last; None takes `config.end_ids`, () ends no row. A row that ended is
        filled with `config.pad_id` (its first stop token where that is no token) and leaves the computation. It
        ends early when all rows have ended.
        generator: where the random numbers come from, torch's default one if None: one number a row a token, for rows
        that have ended too, so what a row says does not depend on the others. A row alone gets the same tokens as in a
        batch at temperature 0; above it, the first row of a batch does not get the numbers it would get alone.

        Dropout is off, whatever mode the model is in, and no gradient is recorded. Raises DTypeError, ShapeError,
        MaskError and ValueOutOfRange before any work, also where prompt and new tokens are more than the model's
        positions.
        """
        stream = self.stream(
            ids,
            max_new_tokens,
            attention_mask=attention_mask,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            repetition_penalty=repetition_penalty,
            stop=stop,
            generator=generator,
        )
        for _ in stream:
            pass
        return stream.ids

    def stream(
        self,
        ids: Tensor,
        max_new_tokens: int,
        *,
        attention_mask: Tensor | None = None,
        temperature: float = 0.0,
        top_k: int | None = None,
        top_p: float | None = None,
        repetition_penalty: float = 1.0,
        stop: int | Sequence[int] | None = None,
        generator: torch.Generator | None = None,
    ) -> Stream:
        """As `generate`, an iterator that gives the next token of every row, int64 (B,), as soon as it is known."""
        sampling = Sampling(temperature=temperature, top_k=top_k, top_p=top_p, repetition_penalty=repetition_penalty)
        return Stream(self, ids, max_new_tokens, attention_mask, sampling, _stop_ids(self.config, stop), generator)

    def _begin(self, ids: Tensor, attention_mask: Tensor | None, max_new_tokens: int) -> Start:
        """Check what is asked for, and make what the loop goes on from: here the prompt itself and an empty state."""
        longest = max(_counts(ids, attention_mask), default=0) + max_new_tokens
        positions = getattr(self.config, "positions", None)
        if positions is not None and longest > positions:
            holds = f"prompt and `max_new_tokens` must fit in the model's {positions} positions"
            seen = f"got {longest - max_new_tokens} + {max_new_tokens} tokens"
            raise ValueOutOfRange(message(holds, seen, "ask for fewer, or cut the prompt"))
        return Start(ids, attention_mask, self.initial_state(ids.shape[0], longest))

    def _next(self, ids: Tensor, attention_mask: Tensor | None, state: StackState) -> Tensor:
        """Logits (B, 1, V) of the token that follows each row; ids go to the end of the state."""
        logits: Tensor = self(ids, attention_mask, state=state, last_only=True).logits
        return logits


class Stream(Iterator[Tensor]):
    """The tokens of B rows as they come, int64 (B,) each. Made by `model.stream(...)`.

    One can go on after a step that failed or was interrupted (Ctrl-C): the next one reads prompt and tokens anew. All
    that is known follows from the prompt and the tokens so far; what the model keeps only saves reading them again.
    """

    def __init__(
        self,
        model: Generates,
        ids: Tensor,
        max_new_tokens: int,
        attention_mask: Tensor | None,
        sampling: Sampling,
        stop: tuple[int, ...],
        generator: torch.Generator | None,
    ) -> None:
        self.max_new_tokens = read_size("max_new_tokens", max_new_tokens, 0)
        check_ids("ids", ids, count=model.config.vocabulary)
        _check_rows(_counts(ids, attention_mask))
        self._model = model
        self._prompt = ids.long()
        self._mask = attention_mask
        self._sampling = sampling
        self._generator = generator
        self._stop = torch.tensor(stop, dtype=torch.int64, device=ids.device)
        self._pad = _pad_id(model.config, stop)
        self._new: list[Tensor] = []
        self._held: _Held | None = None
        with _passing(model):
            self._start: Start | None = model._begin(self._prompt, attention_mask, self.max_new_tokens)  # noqa: SLF001

    @property
    def ids(self) -> Tensor:
        """Prompts and tokens so far, int64 (B, L + n)."""
        return torch.cat([self._prompt, *(tokens[:, None] for tokens in self._new)], dim=1)

    @property
    def state(self) -> StackState | None:
        """What the model keeps of the rows that have not ended; None before the first token and after a fault."""
        return None if self._held is None else self._held.state

    def __next__(self) -> Tensor:
        held = self._held
        if held is not None and held.tokens != len(self._new):
            held = None  # an interrupt came between the last two lines
        rows = self._alive() if held is None else held.rows
        if len(self._new) == self.max_new_tokens or not len(rows):
            raise StopIteration
        self._held = None  # stays so where what follows does not come to its end
        with _passing(self._model):
            tokens, held = self._advanced(self._read_anew(rows) if held is None else held)
        self._held = held
        self._new.append(tokens)  # from here on the token counts
        return tokens

    def _read_anew(self, rows: Tensor) -> _Held:
        """Begin with all that is known of these rows: prompts and tokens so far, none of them read."""
        start, self._start = self._start, None
        if start is None:
            mask = None if self._mask is None else self._mask[rows]
            start = self._model._begin(self._prompt[rows], mask, self.max_new_tokens)  # noqa: SLF001 - one mechanism
        tokens = torch.stack(self._new, dim=1)[rows] if self._new else start.ids[:, :0]
        ids, mask = torch.cat([start.ids, tokens], dim=1), start.attention_mask
        if mask is not None:
            mask = torch.cat([mask.bool(), mask.new_ones(tokens.shape, dtype=torch.bool)], dim=1)
        return _Held(start.state, rows, ids, mask, self._seen(ids, mask), len(self._new))

    def _advanced(self, held: _Held) -> tuple[Tensor, _Held]:
        """The next token of every row (B,), and what is held then."""
        logits = self._model._next(held.unread, held.mask, held.state)[:, -1]  # noqa: SLF001 - (rows, V)
        chosen = self._sampling.choose(logits, held.seen, self._draws(held.rows))
        tokens = self._prompt.new_full((self._prompt.shape[0],), self._pad).index_copy_(0, held.rows, chosen)
        rows, seen = held.rows, held.seen
        if seen is not None:
            seen[torch.arange(len(rows), device=seen.device), chosen] = True
        going_on = torch.isin(chosen, self._stop, invert=True)
        if not bool(going_on.all()):
            index = going_on.nonzero().squeeze(1)
            rows, chosen, seen = rows[index], chosen[index], None if seen is None else seen[index]
            if len(rows):
                held.state.reorder(index)
        return tokens, _Held(held.state, rows, chosen[:, None], None, seen, held.tokens + 1)

    def _alive(self) -> Tensor:
        """The rows that have not ended, int64."""
        going_on = torch.ones(self._prompt.shape[0], dtype=torch.bool, device=self._prompt.device)
        for tokens in self._new:
            going_on &= torch.isin(tokens, self._stop, invert=True)
        return going_on.nonzero().squeeze(1)

    def _seen(self, ids: Tensor, mask: Tensor | None) -> Tensor | None:
        """Which tokens of the vocabulary each row holds, bool (B, V); None where nothing asks for it."""
        if not self._sampling.penalises:
            return None
        seen = torch.zeros(ids.shape[0], self._model.config.vocabulary, dtype=torch.bool, device=ids.device)
        rows, places = (torch.ones_like(ids) if mask is None else mask).nonzero(as_tuple=True)
        seen[rows, ids[rows, places]] = True
        return seen

    def _draws(self, rows: Tensor) -> Tensor | None:
        """A uniform number for each of these rows, float64; every row of the batch takes one, so that none moves."""
        if self._sampling.temperature == 0:
            return None
        device = None if self._generator is None else self._generator.device
        batch = self._prompt.shape[0]
        draws = torch.rand(batch, dtype=torch.float64, generator=self._generator, device=device)
        return draws.to(rows.device)[rows]


class _Held(NamedTuple):
    """What a step goes on from: of each row that has not ended, the tokens that the state has not read."""

    state: StackState
    rows: Tensor  # int64, which rows of the batch these are
    unread: Tensor  # (rows, n)
    mask: Tensor | None  # (rows, n), which of them are real
    seen: Tensor | None  # (rows, V), which tokens each row holds
    tokens: int  # how many new tokens there are with this; others: it is of another moment


@contextmanager
def _passing(model: Any) -> Iterator[None]:
    """Without gradients, and without dropout whatever mode the model is in; as it was afterwards."""
    training = [module for module in model.modules() if module.training] if model.training else []
    try:
        for module in training:
            module.training = False
        with torch.no_grad():
            yield
    finally:
        for module in training:
            module.training = True


def _check_rows(counts: tuple[int, ...]) -> None:
    """Every row needs a token to go on from."""
    for row, count in enumerate(counts):
        if not count:
            holds = "`attention_mask` must keep a token in every row"
            raise MaskError(message(holds, f"row {row} keeps none", "begin it with the model's first token"))


def _counts(ids: Tensor, attention_mask: Tensor | None) -> tuple[int, ...]:
    """How many tokens of each row are real."""
    batch, length = ids.shape
    return Rows.of(attention_mask, batch, length).lengths or (length,) * batch


def _stop_ids(config: Any, stop: int | Sequence[int] | None) -> tuple[int, ...]:
    """The tokens that end a row."""
    if stop is None:
        return tuple(config.end_ids)
    tokens = tuple(stop) if isinstance(stop, Sequence) and not isinstance(stop, str) else (stop,)
    for token in tokens:
        if isinstance(token, bool) or not isinstance(token, int):
            seen = f"got {type(token).__name__}"
            raise DTypeError(message("`stop` must be token numbers", seen, "tokenize the text that is to end a row"))
        if not 0 <= token < config.vocabulary:
            holds = f"`stop` must lie in 0 .. {config.vocabulary - 1}"
            raise ValueOutOfRange(message(holds, f"got {token}", "use the tokenizer of this model"))
    return tokens


def _pad_id(config: Any, stop: tuple[int, ...]) -> int:
    """What fills rows that ended: the first that is a token, since some files say -1 where there is no padding."""
    named = (config.pad_id, *stop, 0)
    return next(int(token) for token in named if token is not None and 0 <= token < config.vocabulary)
