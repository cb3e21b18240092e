"""How models begin: the spread of first weights and of scores, as the papers have them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import nn

from probes import check
from qkv.models.bert import Bert, BertForMaskedLM
from qkv.models.gpt import GPT
from qkv.models.hybrid import Hybrid
from qkv.models.llama import Llama
from qkv.models.t5 import T5
from qkv.models.vit import ViT, ViTForImageClassification
from qkv.nn.multihead_attention import MultiheadAttention
from small_models import BERT, GPT_2, HYBRID, LLAMA, PIXELS, T5_SMALL, VIT, WORDS
from subjects import Subject, embedded, numbers, seeded

# model, config, how it is called, and the spread of scores where queries and keys are rotations of normed inputs.
SCORED = {
    "bert": (Bert, BERT, lambda m, x: m(x, backend="sdpa").hidden, 1.0),
    "gpt": (GPT, GPT_2, lambda m, x: m(x, backend="sdpa").logits, 1.0),
    "llama": (Llama, LLAMA, lambda m, x: m(x, backend="sdpa").logits, 1.0),
    "hybrid": (Hybrid, HYBRID, lambda m, x: m(x, backend="sdpa").logits, 1.0),
    "t5": (T5, T5_SMALL, lambda m, x: m(x, decoder_ids=x, backend="sdpa").logits, 2.0),
}


@pytest.mark.parametrize("name", SCORED)
def test_scores_are_scaled_as_the_paper_says(name):
    kind, config, call, spread = SCORED[name]
    model = rotating(kind, config)
    check(Subject(module=model, call=call, draw=numbers(WORDS), causal=False, score_std=spread, length=12), "P16")


@pytest.mark.parametrize("kind", [ViT, ViTForImageClassification])
def test_scores_of_patches_are_scaled(kind):
    """Of images of 4 by 24 patches."""

    def call(module, x):
        pixels = x.unflatten(2, (3, 2, 2)).unflatten(1, (4, -1)).permute(0, 3, 1, 4, 2, 5).flatten(4).flatten(2, 3)
        return module(pixels, interpolate=True, backend="sdpa").hidden

    model = rotating(kind, VIT)
    check(Subject(module=model, call=call, draw=embedded(PIXELS), causal=False, score_std=1.0, length=12), "P16")


def rotating(kind: Callable[..., nn.Module], config: object) -> nn.Module:
    """A model with first weights, whose queries and keys are rotations of what they are made from."""
    torch.manual_seed(0)
    model = kind(config).double()
    for part in model.modules():
        if isinstance(part, MultiheadAttention):
            nn.init.orthogonal_(part.q_proj.weight)
            nn.init.orthogonal_(part.k_proj.weight)
    return model


WIDE = {"layers": 2, "heads": 4, "width": 64, "feedforward": 128}
BOTH = ("layers.0.attention.q_proj.weight", "layers.1.feedforward.up_proj.weight")
WROTE = ("layers.0.attention.o_proj.weight", "layers.1.feedforward.down_proj.weight")
CUT = 0.02 * 0.8796  # of a normal distribution without what lies beyond two spreads
# model, config, and the standard deviations that its source begins with.
FIRST = {
    "bert": (Bert, replace(BERT, **WIDE), dict.fromkeys([*BOTH, *WROTE, "pooler.weight"], 0.02)),
    "masked words": (BertForMaskedLM, replace(BERT, **WIDE), {"head.dense.weight": 0.02}),
    "gpt": (
        GPT,
        replace(GPT_2, **WIDE),
        dict.fromkeys([*BOTH, "embedding.weight"], 0.02)
        | dict.fromkeys(WROTE, 0.02 / 4**0.5)
        | {"embedding.positions.weight": 0.01},
    ),
    "llama": (
        Llama,
        replace(LLAMA, **WIDE),
        dict.fromkeys([*BOTH, *WROTE, "embedding.weight", "head.weight"], 0.02),
    ),
    "hybrid": (
        Hybrid,
        replace(HYBRID, **WIDE, ratio=1),
        dict.fromkeys([*BOTH[1:], *WROTE[1:], "layers.1.attention.q_proj.weight", "embedding.weight"], 0.02),
    ),
    "t5": (
        T5,
        replace(T5_SMALL, **WIDE, head_dim=8, buckets=64, max_distance=100),
        {
            "embedding.weight": 1.0,
            "encoder.relative.weight": 64**-0.5,
            "encoder.layers.0.attention.q_proj.weight": (64 * 8) ** -0.5,
            "encoder.layers.0.attention.k_proj.weight": 64**-0.5,
            "decoder.layers.1.cross.o_proj.weight": 32**-0.5,
            "decoder.layers.1.feedforward.down_proj.weight": 128**-0.5,
        },
    ),
    "vit": (
        ViT,
        replace(VIT, **WIDE),
        dict.fromkeys([*BOTH, *WROTE, "embeddings.projection.weight", "embeddings.position_embeddings"], CUT),
    ),
}


@pytest.mark.parametrize("name", FIRST)
def test_first_weights_spread_as_in_the_source(name):
    kind, config, spread = FIRST[name]
    with seeded(0):
        model = kind(config)
    named = dict(model.named_parameters())
    for weight, wanted in spread.items():
        assert 0.9 < named[weight].std().item() / wanted < 1.1, weight
    for weight, values in named.items():
        if weight.endswith(".bias"):
            assert not values.any(), weight
        elif "norm" in weight.lower():
            assert (values == 1).all(), weight
