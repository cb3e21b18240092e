"""A model of a few numbers that can do all that PretrainedModel asks for, and folders of it, for tests of files."""

from __future__ import annotations

from dataclasses import dataclass

import tokenizers
import torch
from torch import nn

from qkv.errors import ValueOutOfRange
from qkv.models.files.checkpoint import PretrainedModel
from qkv.models.files.tokenizer import Tokenizer


@dataclass(frozen=True, kw_only=True)
class TinyConfig:
    vocabulary: int = 10
    width: int = 4
    layers: int = 2

    def __post_init__(self):
        if self.width < 1:
            raise ValueOutOfRange("`width` must be at least 1; got 0; give the size used in training")

    @classmethod
    def from_fields(cls, fields):
        fields.one_of("model_type", "tiny")
        return cls(
            vocabulary=fields.integer("vocab_size"),
            width=fields.integer("hidden_size"),
            layers=fields.integer("num_hidden_layers"),
        )

    def to_fields(self):
        sizes = {"vocab_size": self.vocabulary, "hidden_size": self.width, "num_hidden_layers": self.layers}
        return {"model_type": "tiny", "architectures": ["Tiny"], **sizes}


class Tiny(PretrainedModel):
    """Linear layers between an embedding and a head that share one matrix; a buffer of integers beside them."""

    Config = TinyConfig

    def __init__(self, config):
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocabulary, config.width)
        self.layers = nn.ModuleList(nn.Linear(config.width, config.width) for _ in range(config.layers))
        self.register_buffer("steps", torch.zeros(1, dtype=torch.int64))
        self.head = nn.Linear(config.width, config.vocabulary, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids):
        x = self.embedding(ids)
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.head(x)

    @staticmethod
    def own_names(config, tensors):
        """The published file keeps weights transposed, has another prefix, and older ones hold an inner mask."""
        own = {name.replace("model.h.", "layers."): one for name, one in tensors.items() if name != "model.mask"}
        return {name: one.T if "layers" in name and one.ndim == 2 else one for name, one in own.items()}

    @staticmethod
    def file_names(config, tensors):
        own = {name: one.T if "layers" in name and one.ndim == 2 else one for name, one in tensors.items()}
        return {name.replace("layers.", "model.h."): one for name, one in own.items()}


def tiny(**sizes):
    """A model with random weights and a tokenizer of ten letters."""
    torch.manual_seed(0)
    model = Tiny(TinyConfig(**sizes)).eval()
    core = tokenizers.Tokenizer(tokenizers.models.BPE({letter: n for n, letter in enumerate("abcdefghij")}, []))
    model.tokenizer = Tokenizer(core)
    return model


def same(one, other):
    """Whether two models hold the same numbers of the same types."""
    a, b = one.state_dict(), other.state_dict()
    return a.keys() == b.keys() and all(a[n].dtype == b[n].dtype and torch.equal(a[n], b[n]) for n in a)
