"""A real model writes: SmolLM2 goes on from a text on qkv's attention, and the tokens are those that it must give."""

from __future__ import annotations

from typing import NamedTuple

import torch

from qkv.models.smollm2 import SmolLM2
from qkv.nn.stack_state import StackState
from qkv.patterns import causal
from qkv.planning import plan

PROMPT = "A transformer reads a sentence by"
# The most probable tokens, computed with transformers from the same file.
KNOWN_TOKENS = (
    *(8659, 357, 1187, 618, 624, 26227, 2391, 42, 260, 6330, 2581, 28),
    *(260, 1924, 338, 919, 357, 614, 28, 284, 260, 1924, 2253, 30),
)


class Words(NamedTuple):
    """What was written, how fast, and what ran."""

    prompt: str
    text: str  # what follows the prompt
    tokens: tuple[int, ...]
    prompt_tokens: int
    reading_seconds: float  # to the first token
    tokens_per_second: float  # of the others
    backend: str  # of one token's attention
    memory: str  # what the model keeps of the tokens

    @property
    def agrees(self) -> bool:
        """Whether the tokens are those that are known."""
        return self.tokens == KNOWN_TOKENS


def words(model: SmolLM2) -> Words:
    """What SmolLM2 writes after PROMPT, always the most probable token."""
    writing = model.write(PROMPT, len(KNOWN_TOKENS))
    text = "".join(writing)
    ids, state = writing.stream.ids, writing.stream.state
    assert state is not None
    return Words(
        PROMPT,
        text,
        tuple(ids[0, writing.prompt_tokens :].tolist()),
        writing.prompt_tokens,
        writing.reading_seconds,
        writing.tokens_per_second,
        _backend(model, state),
        writing.memory,
    )


def _backend(model: SmolLM2, state: StackState) -> str:
    """What answers the attention of one token over those that are kept."""
    config, keys = model.llama.config, state.length
    query = torch.empty(1, config.heads, 1, config.head_dim)
    key = torch.empty(1, config.kv_heads, keys, config.head_dim)
    return plan(query, key, key, pattern=causal(), query_offset=keys - 1).backend
