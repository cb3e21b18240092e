"""Sentences through a real model on qkv's attention: the known values, and where the words of a sentence look."""

from __future__ import annotations

from typing import NamedTuple

import torch

from qkv.models.minilm import MiniLM
from qkv.types import AuxRequest

FIRST = "Attention is all you need."
NEAR = "You only need the attention mechanism."
FAR = "The cat sits on the mat."
PRONOUN = "The animal did not cross the street because it was too tired."

# Computed with the model's own library, which shares no code with this package.
KNOWN_IDS = (101, 3086, 2003, 2035, 2017, 2342, 1012, 102)
KNOWN_VECTOR = (0.0711, -0.0142, -0.0131, -0.0388, 0.0479, 0.0679)
KNOWN_NEAR, KNOWN_FAR = 0.7628, -0.0355
FOUR_DECIMALS = 0.5e-4 + 1e-6  # the known values are rounded


class KnownValue(NamedTuple):
    """One result beside the value that it must have."""

    name: str
    expected: tuple[float, ...]
    seen: tuple[float, ...]

    @property
    def agrees(self) -> bool:
        """Equal to the four decimals that are known."""
        pairs = zip(self.expected, self.seen, strict=False)
        return len(self.expected) == len(self.seen) and all(abs(a - b) <= FOUR_DECIMALS for a, b in pairs)


class Look(NamedTuple):
    """Where one word looks in one head of one layer: tokens with their weights, the largest first."""

    layer: int
    head: int
    lesson: str
    tokens: tuple[tuple[str, float], ...]


class Place(NamedTuple):
    """A head whose habit is easy to see; layer and head count from 0."""

    layer: int
    head: int
    lesson: str


PLACES = (
    Place(0, 2, "the word before"),
    Place(2, 1, "what is said of it"),
    Place(5, 11, "whom it is about"),
)


def known_values(model: MiniLM) -> tuple[KnownValue, ...]:
    """Token numbers, the first entries of one embedding and two cosines, beside what they must be."""
    ids = model.tokenize([FIRST]).ids[0].tolist()
    vectors = model.embed([FIRST, NEAR, FAR])  # (3, E), of length 1
    _, near, far = (vectors @ vectors[0]).tolist()
    return (
        KnownValue("token numbers", KNOWN_IDS, tuple(ids)),
        KnownValue("embedding, first 6 of 384", KNOWN_VECTOR, tuple(vectors[0, :6].tolist())),
        KnownValue(f'cosine to "{NEAR}"', (KNOWN_NEAR,), (near,)),
        KnownValue(f'cosine to "{FAR}"', (KNOWN_FAR,), (far,)),
    )


@torch.no_grad()
def looks(model: MiniLM, *, sentence: str = PRONOUN, word: str = "it", count: int = 3) -> tuple[Look, ...]:
    """The tokens that a word attends to most, for each of PLACES; only these rows of the weights are ever built."""
    batch = model.tokenize([sentence])
    tokens = batch.tokens[0]
    aux = model.bert(batch.ids, batch.attention_mask, return_aux=AuxRequest(top_k=count)).aux
    assert aux is not None
    row = tokens.index(word)
    found = []
    for place in PLACES:
        top = aux[place.layer].top_k
        assert top is not None
        values, keys = top.values[0, place.head, row].tolist(), top.indices[0, place.head, row].tolist()
        found.append(Look(*place, tuple((tokens[key], value) for key, value in zip(keys, values, strict=True))))
    return tuple(found)
