"""Text to token numbers and back, over the package `tokenizers`: from tokenizer.json or from a GGUF file's metadata.

Text is data: what looks like a special token in it stays text unless the caller says `special=True`.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from torch import Tensor

from qkv.errors import DTypeError, ValueOutOfRange, message
from qkv.models.files.tokenizer_file import (
    BESIDE,
    TOKENIZER,
    SpecialTokens,
    guarded,
    json_bytes,
    read_tokenizer,
    side_table,
    without,
)
from qkv.models.files.tokenizer_gguf import read_metadata

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Core


class TokenBatch(NamedTuple):
    """Texts as numbers, shorter ones filled up with padding on one side."""

    ids: Tensor  # (B, L) int64
    attention_mask: Tensor  # (B, L) bool, True where there is a token
    tokens: list[list[str]]  # a row's tokens in words, without padding


class Tokenizer:
    """What turns text into the token numbers of one model and back.

    bos_id, eos_id, pad_id: the numbers of these tokens where the files name them, else None.
    """

    def __init__(self, core: Core, named: SpecialTokens | None = None) -> None:
        self._core = core
        self._named = named or SpecialTokens()
        self._lock = threading.Lock()  # `encode_special_tokens` is a switch of the shared core
        self._control = {n for n, token in core.get_added_tokens_decoder().items() if token.special}
        self._plain: Core | None = None

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> Tokenizer:
        """The tokenizer of a `tokenizer.json`, without the cutting and padding that its file may ask for.

        `tokenizer_config.json` beside it names the special tokens. Raises CheckpointError when a file cannot be read.
        """
        return cls(*read_tokenizer(Path(path)))

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, Any], *, source: str | os.PathLike[str] = "the file") -> Tokenizer:
        """The tokenizer that the metadata of a GGUF file describes, as `qkv.gguf_file.read_gguf` gives it.

        Byte-level BPE with the splits of "gpt-2", "smollm", "llama-bpe" and "qwen2"; CheckpointError for others, naming
        the `source`.
        """
        return cls(*read_metadata(Path(source), metadata))

    @property
    def vocabulary(self) -> int:
        """How many numbers there are, added tokens included."""
        return int(self._core.get_vocab_size())

    @property
    def bos_id(self) -> int | None:
        return self._id(self._named.bos)

    @property
    def eos_id(self) -> int | None:
        return self._id(self._named.eos)

    @property
    def pad_id(self) -> int | None:
        return self._id(self._named.pad)

    @property
    def chat_template(self) -> str | None:
        """The template of a conversation as the files give it (Jinja): carried along, never run."""
        return self._named.chat_template

    def encode(self, text: str, *, special: bool = False, template: bool = True) -> list[int]:
        """The numbers of a text's tokens.

        special: read "<|im_end|>" and its like in the text as the special tokens; without it they are plain text, so
        that no input can end a turn. template: put around the text what the model was trained with ([CLS], <s>).
        """
        return self._encode([text], special, template)[0].ids

    def decode(self, ids: Sequence[int] | Tensor, *, special: bool = False) -> str:
        """The text of token numbers (L,); special tokens are left out unless `special`."""
        numbers = self._numbers(ids)
        holds = "the tokenizer must be able to decode the numbers"
        return guarded(holds, lambda: str(self._core.decode(numbers, skip_special_tokens=not special)))

    def batch(
        self,
        texts: Sequence[str],
        *,
        side: Literal["left", "right"] = "right",
        special: bool = False,
        template: bool = True,
    ) -> TokenBatch:
        """Several texts as one (B, L) of numbers, the shorter ones padded on one side: "left" for generation."""
        if isinstance(texts, str):
            raise DTypeError(message("`texts` must be a sequence of strings", "got one string", "write [text]"))
        if side not in {"left", "right"}:
            holds = "`side` must be 'left' or 'right'"
            raise ValueOutOfRange(message(holds, f"got {side!r}", "'left' for generation, 'right' for an encoder"))
        rows = self._encode(list(texts), special, template)
        length = max((len(row.ids) for row in rows), default=0)
        ids = torch.full((len(rows), length), self.pad_id or 0, dtype=torch.int64)
        keep = torch.zeros(ids.shape, dtype=torch.bool)
        for i, row in enumerate(rows):
            n = len(row.ids)
            place = slice(length - n, length) if side == "left" else slice(n)
            ids[i, place] = torch.tensor(row.ids, dtype=torch.int64)
            keep[i, place] = True
        return TokenBatch(ids, keep, [row.tokens for row in rows])

    def tokens(self, ids: Sequence[int] | Tensor) -> list[str]:
        """The tokens as the vocabulary spells them, to be looked at."""
        return [str(self._core.id_to_token(n)) for n in self._numbers(ids)]

    def pieces(self, *, special: bool = False) -> Pieces:
        """For streaming: an object whose `push(id)` gives the text that one more token adds."""
        return Pieces(self, special=special)

    def files(self) -> dict[str, bytes]:
        """The files that transformers reads, by name: tokenizer.json and tokenizer_config.json."""
        text = str(self._core.to_str(pretty=False))
        return {TOKENIZER: text.encode(), BESIDE: json_bytes(side_table(self._named))}

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write `tokenizer.json` at the path, and what names the special tokens beside it."""
        file = Path(path)
        for name, text in self.files().items():
            (file if name == "tokenizer.json" else file.with_name(name)).write_bytes(text)

    def _encode(self, texts: list[str], special: bool, template: bool) -> list[Any]:
        for text in texts:
            if not isinstance(text, str):
                raise DTypeError(message("a text must be a string", f"got {type(text).__name__}", "pass str"))
        with self._lock:
            self._core.encode_special_tokens = not special
            holds = "the tokenizer must be able to encode the text"
            return guarded(holds, lambda: [self._encode_one(text, special, template) for text in texts])

    def _encode_one(self, text: str, special: bool, template: bool) -> Any:
        """One text; a control token that its vocabulary found in plain text is taken out of its reach."""
        row = self._core.encode(text, add_special_tokens=template)
        if special or not any(
            n in self._control and not added for n, added in zip(row.ids, row.special_tokens_mask, strict=True)
        ):
            return row
        if self._plain is None:
            names = {token.content for token in self._core.get_added_tokens_decoder().values() if token.special}
            self._plain = without(self._core, frozenset(names))
        return self._plain.encode(text, add_special_tokens=template)

    def _numbers(self, ids: Sequence[int] | Tensor) -> list[int]:
        numbers = ids.tolist() if isinstance(ids, Tensor) else [int(n) for n in ids]
        for n in numbers:
            if not isinstance(n, int) or not 0 <= n < 2**32:
                raise ValueOutOfRange(message("`ids` must be token numbers (L,)", f"got {n!r}", "decode row by row"))
        return numbers

    def _id(self, token: str | None) -> int | None:
        return None if token is None else self._core.token_to_id(token)


UNFINISHED = "\ufffd"  # what a decoder writes for bytes that are no character, or not one yet
HELD = 8  # tokens; a character has at most 4 bytes, so what is unfinished after that many will stay so
SEEN = 16  # tokens that are decoded again with each new one, for the space before it and for its bytes


class Pieces:
    """Tokens in, text out, one at a time: characters whose bytes are spread over tokens come out once, and whole.

    All that `push` returned and `finish` together is what `decode` gives for all ids at once.
    """

    def __init__(self, tokenizer: Tokenizer, *, special: bool = False) -> None:
        self._tokenizer = tokenizer
        self._special = special
        self._last: list[int] = []  # the last tokens
        self._out = 0  # how many characters of their text are out
        self._since = 0  # tokens since the last character came out

    def push(self, token: int) -> str:
        """The text that becomes certain with this token; "" while a character is unfinished."""
        self._last.append(int(token))
        text = self._text()
        certain = len(text.rstrip(UNFINISHED))
        self._since = 0 if certain == len(text) else self._since + 1
        if self._since >= HELD:
            certain = len(text) - 1  # bytes that are no character; the last may yet begin one
        piece = text[self._out : certain]
        self._out = max(self._out, certain)
        if len(self._last) > SEEN:
            held = len(text) - self._out
            self._last = self._last[-HELD:]
            self._out = max(len(self._text()) - held, 0)
        return piece

    def finish(self) -> str:
        """What is still held back, as it is."""
        piece = self._text()[self._out :]
        self._last, self._out, self._since = [], 0, 0
        return piece

    def _text(self) -> str:
        return self._tokenizer.decode(self._last, special=self._special)
