"""Every probe that applies, of every layer; and every classical mistake, seen by the probes that should see it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from mistakes import LOSSES, ZOO, Attention, WindowOfTokens, mean_of_real, roles, subject_of
from probes import PROBES, check, fitting, loss_ignores_pads
from qkv.nn.decoder import Decoder, DecoderLayer
from qkv.nn.encoder import Encoder, EncoderLayer
from qkv.nn.linear_attention import LinearAttention
from qkv.nn.mixer import VARIANTS
from qkv.nn.multihead_attention import MultiheadAttention
from qkv.nn.relative import AlibiBias
from qkv.nn.rotary import Rotary
from qkv.patterns import causal
from subjects import Subject, embedded, numbers

DIM, HEADS = 16, 4
LINEAR_OPTIONS = {"mamba2": {"state_size": 8}}
FORGETFUL = {name for name in VARIANTS if name != "linear"}  # recurrences in which order counts


def built(kind, *sizes, **options) -> nn.Module:
    torch.manual_seed(0)
    return kind(*sizes, **options).double()


def attention(module: MultiheadAttention, **expected) -> Subject:
    """Softmax attention by itself."""
    looks_back = module.pattern is not None and module.pattern == causal()

    def call(module, x, keep=None, memory=None, memory_keep=None):
        hidden = keep if memory is None else memory_keep
        return module(x, memory, memory, key_padding_mask=None if hidden is None else ~hidden)[0]

    def decode(module, x):
        state = module.initial_state(x.shape[0], x.shape[1])
        return torch.stack([module.step(x[:, t], state)[0] for t in range(x.shape[1])], 1)

    glorot = (2 / (2 * DIM)) ** 0.5
    told = {
        "causal": looks_back,
        "decode": decode if looks_back else None,
        "ordered": False,
        "averages": True,
        "bare": True,
        "pads": "memory" not in expected,
        "dropout": module.attention_dropout > 0,
        "idle": ("k_proj.bias",),
        "spread": {"q_proj.weight": glorot, "v_proj.weight": glorot},
        "softmax_axis": False,
        **expected,
    }
    return Subject(module=module, call=call, draw=embedded(DIM), **told)


def recurrent(name: str, module: nn.Module, **expected) -> Subject:
    """A layer of the linear family by itself."""

    def decode(module, x):
        state = module.initial_state(x.shape[0])
        return torch.stack([module.step(x[:, t], state)[0] for t in range(x.shape[1])], 1)

    told = {
        "causal": True,
        "decode": decode,
        "ordered": name in FORGETFUL,
        "averages": name == "linear",
        "bare": True,
        "softmax_axis": False,
        **expected,
    }
    return Subject(module=module, call=lambda module, x: module(x), draw=embedded(DIM), **told)


def encoding(module: nn.Module, **expected) -> Subject:
    """An encoder, or a layer of one."""
    told = {
        "causal": False,
        "ordered": False,
        "averages": True,
        "pads": True,
        "idle": ("attention.k_proj.bias",),
        "softmax_axis": False,
        **expected,
    }
    return Subject(module=module, call=lambda module, x, keep=None: module(x, keep), draw=embedded(DIM), **told)


def decoding(module: nn.Module, name: str | None, **expected) -> Subject:
    """A decoder, or a layer of one."""

    def call(module, x, keep=None, memory=None, memory_keep=None):
        return module(x, memory, attention_mask=keep, memory_mask=memory_keep)

    def decode(module, x, memory=None):
        state = module.initial_state(x.shape[0], x.shape[1], memory)
        return torch.stack([module.step(x[:, t], state)[0] for t in range(x.shape[1])], 1)

    layer = module.layers[0] if isinstance(module, Decoder) else module
    crossing = layer.cross_attention is not None
    told = {
        "causal": True,
        "decode": decode,
        "ordered": True if name in FORGETFUL else None,
        "averages": name not in FORGETFUL,
        "pads": True,
        "memory": embedded(DIM) if crossing else None,
        "memory_pads": crossing,
        "idle": ("attention.k_proj.bias",),
        "softmax_axis": False,
        **expected,
    }
    return Subject(module=module, call=call, draw=embedded(DIM), **told)


def linear_options(name: str | None) -> dict[str, dict]:
    return {"linear_options": LINEAR_OPTIONS.get(name or "", {})}


def every_subject() -> dict[str, Subject]:
    mha = MultiheadAttention
    turning = {"ordered": True, "averages": False, "holes": False, "idle": ()}
    drops = {"attention_dropout": 0.3}
    found = {
        "attention": attention(built(mha, DIM, HEADS)),
        "attention, dropped": attention(built(mha, DIM, HEADS, **drops), crowd=500),
        "attention, grouped": attention(built(mha, DIM, HEADS, kv_heads=2), crowd=500, spread={}),
        "attention, qk norm": attention(built(mha, DIM, HEADS, qk_norm="head"), crowd=500, idle=()),
        "attention, causal": attention(built(mha, DIM, HEADS, pattern=causal())),
        "attention, causal, dropped": attention(built(mha, DIM, HEADS, pattern=causal(), **drops), decode=None),
        "attention, causal, sinks": attention(
            built(mha, DIM, HEADS, pattern=causal(), sinks=True), averages=False, idle=()
        ),
        "attention, rotary": attention(
            built(mha, DIM, HEADS, pattern=causal(), rotary=Rotary(DIM // HEADS)), **turning
        ),
        "attention, alibi": attention(
            built(mha, DIM, HEADS, pattern=causal(), bias=AlibiBias(HEADS)),
            **{**turning, "averages": True, "idle": ("k_proj.bias",)},
        ),
        "attention, cross": attention(
            built(mha, DIM, HEADS), memory=embedded(DIM), memory_pads=True, mixes=False, crowd=1000
        ),
        "attention, cross, dropped": attention(
            built(mha, DIM, HEADS, **drops), memory=embedded(DIM), memory_pads=True, mixes=False, crowd=500
        ),
        "linear, both ways": recurrent(
            "linear", built(LinearAttention, DIM, HEADS, is_causal=False), causal=False, decode=None, crowd=1000
        ),
    }
    for name, kind in VARIANTS.items():
        found[name] = recurrent(name, built(kind, DIM, HEADS, **LINEAR_OPTIONS.get(name, {})))
    band = torch.ones(7, 7, dtype=torch.bool).tril(2).triu(-2)
    rotary = {"rotary": Rotary(DIM // HEADS)}
    residual = {"attention_dropout": 0.2, "feedforward_dropout": 0.2, "residual_dropout": 0.2}
    for first in (True, False):
        order = "norm first" if first else "norm last"
        layer = {"hidden": 24, "norm_first": first}
        for word in (None, "linear", "window(2, 2)"):
            module = built(EncoderLayer, DIM, HEADS, attention=word, **layer)
            near = {"sees": band, "ordered": None} if word == "window(2, 2)" else {}
            found[f"encoder layer, {word}, {order}"] = encoding(module, **near)
        found[f"encoder layer, dropped, {order}"] = encoding(
            built(EncoderLayer, DIM, HEADS, **layer, **residual), dropout=True
        )
        found[f"encoder, {order}"] = encoding(built(Encoder, 2, DIM, HEADS, **layer))
        found[f"encoder, rotary, {order}"] = encoding(
            built(Encoder, 2, DIM, HEADS, softmax_options=rotary, norm="rms", activation="swiglu", **layer),
            ordered=True,
            averages=False,
            idle=(),
        )
        for word in (None, *VARIANTS):
            module = built(DecoderLayer, DIM, HEADS, attention=word, **layer, **linear_options(word))
            found[f"decoder layer, {word}, {order}"] = decoding(module, word)
        found[f"decoder layer, dropped, {order}"] = decoding(
            built(DecoderLayer, DIM, HEADS, cross_attention=False, **layer, **residual), None, dropout=True
        )
        mixed = built(Decoder, 2, DIM, HEADS, attention=["gated_delta", "causal()"], **layer)
        found[f"decoder, mixed, {order}"] = decoding(mixed, "gated_delta")
        found[f"decoder, rotary, {order}"] = decoding(
            built(Decoder, 2, DIM, HEADS, cross_attention=False, softmax_options=rotary, **layer),
            None,
            averages=False,
            ordered=True,
            idle=(),
        )
    over_numbers = nn.Sequential(built(nn.Embedding, 50, DIM), built(Encoder, 1, DIM, HEADS))
    found["encoder over token numbers"] = replace(
        encoding(over_numbers, spread={"0.weight": 1.0}),
        draw=numbers(50),
        call=lambda module, ids, keep=None: module[1](module[0](ids), keep),
    )
    return found


SUBJECTS = every_subject()


@pytest.mark.parametrize("name", SUBJECTS)
def test_layer(name):
    check(SUBJECTS[name])


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("kind", [MultiheadAttention, EncoderLayer, DecoderLayer])
def test_scores_are_scaled_by_the_width_of_a_head(kind, first):
    """P16, where the operator can be seen: backend "sdpa"."""
    options = {} if kind is MultiheadAttention else {"norm_first": first}
    module = built(kind, DIM, HEADS, backend="sdpa", **options)
    for part in module.modules():
        if isinstance(part, MultiheadAttention):
            nn.init.orthogonal_(part.q_proj.weight)
            nn.init.orthogonal_(part.k_proj.weight)
    if kind is MultiheadAttention:
        subject = attention(module, score_std=1.0)
    elif kind is EncoderLayer:
        subject = encoding(module, score_std=1.0)
    else:
        subject = decoding(module, None, score_std=1.0)
    check(replace(subject, softmax_axis=True, length=12), "P16")


def test_every_probe_is_asked_of_some_layer():
    asked = {name for subject in SUBJECTS.values() for name in fitting(subject)} | {"P16"}
    assert asked == set(PROBES)


@pytest.mark.parametrize("role", [*roles(Attention), "window"])
def test_probes_pass_what_is_right(role):
    check(subject_of(WindowOfTokens if role == "window" else Attention, role))


@pytest.mark.parametrize("mistake", ZOO)
def test_probes_see_the_mistake(mistake):
    _, kind, role, seen_by = ZOO[mistake]
    subject = subject_of(kind, role)
    for name in seen_by:
        assert PROBES[name].applies(subject)
        with pytest.raises(AssertionError, match=f"^{name}: "):
            check(subject, name)


def test_every_mistake_of_the_list_is_in_the_zoo():
    assert {mistake.number for mistake in ZOO.values()} | {20} >= set(range(1, 21))
    assert {name for mistake in ZOO.values() for name in mistake.seen_by} | {"P15"} == set(PROBES)


@pytest.mark.parametrize("wrong", LOSSES)
def test_padding_in_the_loss_is_seen(wrong):
    loss_ignores_pads(mean_of_real)
    with pytest.raises(AssertionError, match="padding must"):
        loss_ignores_pads(LOSSES[wrong])
