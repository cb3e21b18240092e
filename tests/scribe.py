"""A model that writes what a test tells it to, byte by byte, with a tokenizer whose tokens are bytes."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from tokenizers import Tokenizer as Core
from tokenizers import decoders, models, pre_tokenizers
from torch import nn

from qkv.models.files.tokenizer import Tokenizer
from qkv.models.generation import Generates
from qkv.models.output import ModelOutput

END = 256
SHOWN = [*range(33, 127), *range(161, 173), *range(174, 256)]  # bytes that byte-level tokenizers spell as themselves
SPELLING = {byte: chr(byte) for byte in SHOWN} | {
    byte: chr(256 + place) for place, byte in enumerate(byte for byte in range(256) if byte not in SHOWN)
}


def byte_tokenizer() -> Tokenizer:
    """Token n is the byte n."""
    core = Core(models.BPE({spelling: byte for byte, spelling in SPELLING.items()}, []))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    return Tokenizer(core)


class Place:
    """How many tokens have been read."""

    def __init__(self, nbytes=3 * 2**20):
        self.read, self.layers, self.nbytes = 0, [self], nbytes


class Scribe(nn.Module, Generates):
    """Writes `script` after any prompt, then the end token for ever. `fails` is raised at the byte of that number."""

    def __init__(self, script: str | bytes, *, fails: tuple[int, BaseException] | None = None) -> None:
        super().__init__()
        self.config = SimpleNamespace(vocabulary=257, positions=10_000, end_ids=(END,), pad_id=END)
        self.tokenizer = byte_tokenizer()
        self.weight = nn.Parameter(torch.ones(()))
        self.script = script.encode() if isinstance(script, str) else script
        self.fails = fails
        self.prompts = []

    def initial_state(self, batch, max_length):
        return Place()

    def forward(self, ids, attention_mask=None, *, state, last_only):
        if not state.read:
            self.prompts.append(bytes(ids[0].tolist()))
        place = state.read and state.read - len(self.prompts[-1]) + 1
        state.read += ids.shape[1]
        if self.fails is not None and place == self.fails[0]:
            raise self.fails[1]
        logits = torch.zeros(1, 1, 257)
        logits[0, 0, self.script[place] if place < len(self.script) else END] = 100.0
        return ModelOutput(hidden=logits, logits=logits)
