"""Small models of every kind, for tests that ask all of them the same."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from qkv.models.bert import BertConfig
from qkv.models.gpt import GPTConfig
from qkv.models.hybrid import HybridConfig
from qkv.models.llama import LlamaConfig
from qkv.models.t5 import T5Config
from qkv.models.vit import ViTConfig

WORDS = 61  # prime: numbers times 100 are others of them
SMALL = {"layers": 2, "heads": 4, "width": 16, "feedforward": 24}
TEXT = {"vocabulary": WORDS, "positions": 100, **SMALL}
KEPT = {"embedding_dropout": 0.0, "attention_dropout": 0.0, "feedforward_dropout": 0.0, "residual_dropout": 0.0}
DROPPED = dict.fromkeys(KEPT, 0.2)
ROPE = {"rope_type": "default", "rope_theta": 10000.0}
LINEAR = {"mamba2": {"state_size": 8}, "gated_delta": {"head_k_dim": 4}}

BERT = BertConfig(**TEXT)
GPT_2 = GPTConfig(**TEXT, **KEPT)
LLAMA = LlamaConfig(**TEXT, kv_heads=2, head_dim=4)
T5_SMALL = T5Config(vocabulary=WORDS, head_dim=4, buckets=8, max_distance=20, **SMALL, **KEPT)
HYBRID = HybridConfig(**{**TEXT, "layers": 4}, linear_options=LINEAR["gated_delta"])
GRID = (4, 6)
VIT = ViTConfig(image=(8, 12), patch=(2, 2), **SMALL, kernel=3, window=2, classes=tuple("abcde"))
PIXELS = 3 * 2 * 2  # of a patch


def lively(kind: Callable[..., nn.Module], config: object) -> nn.Module:
    """A model with weights so large that every part of it shows."""
    torch.manual_seed(0)
    model = kind(config).double().eval()
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim == 1:
                weight.add_(0.2 * torch.randn_like(weight))
            elif weight.shape[1] > 1:  # no taps of a convolution
                weight.normal_(std=0.3)
    return model
