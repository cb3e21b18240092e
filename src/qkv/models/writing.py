"""Text in, text out, piece by piece: a model of the next token together with its tokenizer."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from qkv.errors import DTypeError, ValueOutOfRange, message
from qkv.models.files.tokenizer import Tokenizer
from qkv.models.generation import Generates, Stream


class Writing(Iterator[str]):
    """What a model writes after a text, in pieces as they become certain. Made by `write`.

    A piece is whole characters, and never the beginning of a stop text that is not yet ruled out; "" is not given.
    prompt_tokens and new_tokens count; reading_seconds is the time to the first token, writing_seconds that of the
    others, without what the reader of the pieces does in between.
    """

    def __init__(self, stream: Stream, tokenizer: Tokenizer, ends: Sequence[int], stops: StopTexts) -> None:
        self.prompt_tokens = stream.ids.shape[1]
        self.new_tokens = 0
        self.reading_seconds = 0.0
        self.writing_seconds = 0.0
        self.stream = stream
        self._ends = frozenset(ends)
        self._pieces = tokenizer.pieces()
        self._stops = stops
        self._finished = False

    @property
    def tokens_per_second(self) -> float:
        """How fast tokens came after the first; 0 where there was no other."""
        return (self.new_tokens - 1) / self.writing_seconds if self.writing_seconds else 0.0

    @property
    def memory(self) -> str:
        """What the model keeps of the tokens, in words: the kinds of state of its layers, and their bytes together.

        "" where it keeps nothing: before the first token, and after an interrupt.
        """
        state = self.stream.state
        if state is None:
            return ""
        kinds = " and ".join(dict.fromkeys(type(layer).__name__ for layer in state.layers))
        return f"{kinds} of {state.nbytes / 2**20:,.1f} MB"

    def __next__(self) -> str:
        while not self._finished:
            token = self._next_token()
            if token is None:
                piece = self._stops.push(self._pieces.finish()) + self._stops.finish()
                self._finished = True
            else:
                piece = self._stops.push("" if token in self._ends else self._pieces.push(token))
                self._finished = self._stops.found
            if piece:
                return piece
        raise StopIteration

    def _next_token(self) -> int | None:
        """The next token, timed; None after the last."""
        begin = time.perf_counter()
        tokens = next(self.stream, None)
        if tokens is None:
            return None
        seconds = time.perf_counter() - begin
        if self.new_tokens:
            self.writing_seconds += seconds
        else:
            self.reading_seconds = seconds
        self.new_tokens += 1
        return int(tokens[0])


class StopTexts:
    """Cuts a text that comes in pieces before the first of some texts that is in it."""

    def __init__(self, texts: Sequence[str]) -> None:
        if isinstance(texts, str):
            raise DTypeError(message("`stop` must be a sequence of strings", "got one string", "write [text]"))
        for text in texts:
            if not isinstance(text, str):
                raise DTypeError(message("a stop text must be a string", f"got {type(text).__name__}", "pass str"))
            if not text:
                raise ValueOutOfRange(message("a stop text must not be empty", "got ''", "leave it out"))
        self._texts = tuple(texts)
        self._held = ""  # the beginning of a stop text, perhaps
        self.found = False

    def push(self, piece: str) -> str:
        """What can be shown now: all that is before a stop text, and is not the beginning of one."""
        text = self._held + piece
        places = [place for place in map(text.find, self._texts) if place >= 0]
        if places:
            self.found, self._held = True, ""
            return text[: min(places)]
        held = max((_overlap(text, stop) for stop in self._texts), default=0)
        self._held = text[len(text) - held :]
        return text[: len(text) - held]

    def finish(self) -> str:
        """What is still held back, once nothing follows it."""
        text, self._held = self._held, ""
        return text


def write(model: Any, text: str, max_new_tokens: int, *, stop: Sequence[str] = (), **options: Any) -> Writing:
    """What `model` writes after `text`: an iterator of pieces of text.

    model: one that generates and has a `tokenizer`, as `from_pretrained` gives it. stop: texts that end the writing,
    and are not part of it. options: those of `generate`: temperature, top_k, top_p, repetition_penalty, generator.
    Raises DTypeError and ValueOutOfRange before any work.
    """
    tokenizer = getattr(model, "tokenizer", None)
    if not isinstance(model, Generates) or not isinstance(model, nn.Module) or tokenizer is None:
        seen = f"got {type(model).__name__}{'' if tokenizer else ' without a tokenizer'}"
        remedy = "use a model that predicts the next token, with tokenizer.json beside its weights"
        raise DTypeError(message("`model` must be one that writes text", seen, remedy))
    stops = StopTexts(stop)
    ids = tokenizer.encode(text)
    if not ids:
        raise ValueOutOfRange(message("`text` must hold a token to go on from", f"got {text!r}", "give a word"))
    device = next(model.parameters()).device
    stream = model.stream(torch.tensor([ids], device=device), max_new_tokens, **options)
    return Writing(stream, tokenizer, model.config.end_ids, stops)


def _overlap(text: str, stop: str) -> int:
    """How many characters at the end of a text are the beginning of a stop text that does not lie in it whole."""
    longest = min(len(text), len(stop) - 1)
    return next((size for size in range(longest, 0, -1) if text.endswith(stop[:size])), 0)
