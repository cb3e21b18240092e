"""Tensors that a file holds more than once: a head, or the embeddings of a second stack, that are the embeddings."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from qkv.errors import ValueOutOfRange, message

BELONGS = "use the file that belongs to this config"
UNTIE = "say tie_word_embeddings false in the config, if the head is a matrix of its own"


def without_copies(tensors: Mapping[str, Tensor], name: str, *copies: str, remedy: str = BELONGS) -> dict[str, Tensor]:
    """A file's tensors with one tensor under `name`, and without its `copies`, any of which may stand in for it.

    Raises ValueOutOfRange, whose text ends in `remedy`, when two of them differ: then the file is of a model that does
    not share them.
    """
    kept = dict(tensors)
    for copy in copies:
        second = kept.pop(copy, None)
        if second is not None and not torch.equal(kept.setdefault(name, second), second):
            holds = f"`{copy}` must equal `{name}`, which it is by the config"
            raise ValueOutOfRange(message(holds, "they differ", remedy))
    return kept
