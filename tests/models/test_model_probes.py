"""Every probe that applies, of every model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import reduce

import pytest
import torch
from torch import Tensor, nn

from probes import PROBES, check, fitting
from qkv.models.bert import Bert, BertForMaskedLM
from qkv.models.gpt import GPT
from qkv.models.hybrid import Hybrid
from qkv.models.llama import Llama
from qkv.models.t5 import T5, Memory
from qkv.models.vit import ViT, ViTConfig, ViTForImageClassification
from qkv.nn.mixer import VARIANTS
from qkv.nn.rows import Rows
from qkv.patterns import window
from small_models import BERT, DROPPED, GPT_2, GRID, HYBRID, LINEAR, LLAMA, PIXELS, ROPE, T5_SMALL, VIT, WORDS, lively
from subjects import Subject, embedded, numbers, same, seeded


def in_parts(read: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """What `read` says of one token, of three, and of the others one by one."""
    return torch.cat([read(part) for part in (x[:, :1], x[:, 1:4], *x[:, 4:].split(1, 1))], 1)


def speaking(model: nn.Module, **expected) -> Subject:
    """A language model that reads from left to right."""

    def decode(module, ids):
        state = module.initial_state(*ids.shape)
        return in_parts(lambda part: module(part, state=state).logits, ids)

    told = {"causal": True, "ordered": True, "pads": True, "decode": decode, "softmax_axis": False, **expected}
    return Subject(
        module=model, call=lambda module, ids, keep=None: module(ids, keep).logits, draw=numbers(WORDS), **told
    )


def reading(model: nn.Module, call: Callable[..., Tensor], **expected) -> Subject:
    """An encoder of text."""
    told = {"causal": False, "ordered": True, "pads": True, "softmax_axis": False, **expected}
    return Subject(module=model, call=call, draw=numbers(WORDS), **told)


def bert_says(module, ids, keep=None):
    out = module(ids, keep)
    return out.hidden + out.pooled[:, None]


def of_each(pooled: Tensor, ids: Tensor) -> Tensor:
    """What is said of a whole row, at each token of it: (B, L, ...)."""
    return pooled[:, None].expand(-1, ids.shape[1], -1)


def encoded(module, ids, keep=None):
    """The encoder of a T5."""
    memory = module.encode(ids, keep)
    return memory.rows.back(memory.hidden)


def writing(model: nn.Module, **expected) -> Subject:
    """A T5 whose target is looked at, and whose source is token numbers."""

    def call(module, x, keep=None, memory=None, memory_keep=None):
        return module(memory % WORDS, memory_keep, decoder_ids=x, decoder_mask=keep).logits

    def decode(module, x, memory):
        state = module.initial_state(*x.shape, module.encode(memory))
        return in_parts(lambda part: module.decode(part, state=state).logits, x)

    told = {"memory": numbers(WORDS), "memory_pads": True, "pads": True, "decode": decode, "causal": True}
    told |= {"ordered": True, "softmax_axis": False, **expected}
    return Subject(module=model, call=call, draw=numbers(WORDS), **told)


def writing_of(model: nn.Module, **expected) -> Subject:
    """The decoder of a T5 by itself, over what an encoder might have given."""

    def read(hidden: Tensor, keep: Tensor | None = None) -> Memory:
        rows = Rows.of(keep, *hidden.shape[:2])
        return Memory(rows.front(hidden), rows)

    def call(module, x, keep=None, memory=None, memory_keep=None):
        return module.decode(x, keep, memory=read(memory, memory_keep)).hidden

    def decode(module, x, memory):
        state = module.initial_state(*x.shape, read(memory))
        return in_parts(lambda part: module.decode(part, state=state).hidden, x)

    told = {"memory": embedded(T5_SMALL.width), "decode": decode, "idle": parts_of(model, "encoder.")}
    return replace(writing(model, **told, **expected), call=call)


def parts_of(model: nn.Module, *starts: str) -> tuple[str, ...]:
    return tuple(name for name, _ in model.named_parameters() if name.startswith(starts))


def seeing(model: nn.Module, say: Callable[..., Tensor], **expected) -> Subject:
    """A model of images, given as patches (B, L, C·p·p); those of another number than it learned stand in a row."""

    def call(module, x):
        grid = GRID if x.shape[1] == GRID[0] * GRID[1] else (1, x.shape[1])
        pixels = x.unflatten(2, (3, 2, 2)).unflatten(1, grid).permute(0, 3, 1, 4, 2, 5)
        return say(module(pixels.flatten(4).flatten(2, 3), interpolate=grid != GRID), x)

    told = {"causal": False, "ordered": True, "length": GRID[0] * GRID[1], "idle": ("k_proj.bias",), **expected}
    return Subject(module=model, call=call, draw=embedded(PIXELS), softmax_axis=False, **told)


def of_patches(out, x: Tensor) -> Tensor:
    return out.hidden[:, 1:]


def pooled_token(out, x: Tensor) -> Tensor:
    return of_each(out.pooled, x)


def classes(out, x: Tensor) -> Tensor:
    return of_each(out.logits, x)


def band(length: int, before: int, after: int = 0) -> Tensor:
    return torch.ones(length, length, dtype=torch.bool).tril(after).triu(-before)


def through(*layers: Tensor) -> Tensor:
    """Which token each row depends on behind layers that see so far, bool (L, L)."""
    return reduce(lambda below, above: (above.double() @ below.double()) > 0, layers)


def around(grid: tuple[int, int], reach: int) -> Tensor:
    """Patches that are at most so far from a centre that lies as far from the border: bool (h·w, h·w)."""
    places = [(i, j) for i in range(grid[0]) for j in range(grid[1])]
    centres = [tuple(min(max(n, reach), size - 1 - reach) for n, size in zip(at, grid, strict=True)) for at in places]
    return torch.tensor([[max(abs(a - c), abs(b - d)) <= reach for a, b in places] for c, d in centres])


def together(grid: tuple[int, int], side: int, shift: int) -> Tensor:
    """Patches of one window, where windows begin at `shift` and what lies before it is cut off: bool (h·w, h·w)."""
    windows = [((i - shift) // side, (j - shift) // side) for i in range(grid[0]) for j in range(grid[1])]
    return torch.tensor([[a == b for a in windows] for b in windows])


def second_alone(config: ViTConfig) -> ViT:
    """A model of two layers of which the first adds nothing: it would carry all patches through the class token."""
    model = lively(ViT, config)
    with torch.no_grad():
        for name, weight in model.layers[0].named_parameters():
            if name.startswith(("attention.o_proj", "feedforward.down_proj")):
                weight.zero_()
    return model


def every_subject() -> dict[str, Subject]:
    found = {}
    bias = {"idle": ("k_proj.bias",)}  # it moves all scores of a row alike
    weights = {"averages": True}  # positions turn or move scores alone

    mixed = through(band(11, 2, 2), band(11, 2, 2))
    bare = lively(Bert, replace(BERT, pooling=False))
    found["bert"] = reading(lively(Bert, BERT), bert_says, **bias)
    found["bert, dropped"] = reading(lively(Bert, replace(BERT, **DROPPED)), bert_says, dropout=True, **bias)
    found["bert, window"] = reading(
        bare, lambda m, ids, keep=None: m(ids, keep, pattern=window(2, 2)).hidden, sees=mixed, length=11, **bias
    )
    found["bert, embedded"] = reading(
        bare,
        lambda m, ids, keep=None: of_each(m.embed(ids, torch.ones_like(ids) if keep is None else keep), ids),
        **bias,
    )
    found["masked words"] = reading(
        lively(BertForMaskedLM, BERT), lambda m, ids, keep=None: m(ids, keep).logits, **bias
    )

    strided = band(13, 3) | (band(13, 12) & ((torch.arange(13)[:, None] - torch.arange(13)) % 4 == 0))
    sparse = replace(GPT_2, pattern=("strided(4)", "sliding_window(3)"))
    found["gpt"] = speaking(lively(GPT, replace(GPT_2, scaled_by_layer=True)), **bias)
    found["gpt, head of its own"] = speaking(lively(GPT, replace(GPT_2, tied=False)), **bias)
    found["gpt, dropped"] = speaking(lively(GPT, replace(GPT_2, **DROPPED)), dropout=True, **bias)
    found["gpt, sparse"] = speaking(lively(GPT, sparse), sees=through(strided, band(13, 2)), length=13, **bias)

    first = torch.zeros(11, 11, dtype=torch.bool)
    first[:, :2] = True
    streaming = band(11, 2) | (first & band(11, 10))
    biases = {"attention_bias": True, "output_bias": True, "feedforward_bias": True}
    found["llama"] = speaking(lively(Llama, LLAMA), **weights)
    found["llama, tied"] = speaking(lively(Llama, replace(LLAMA, tied=True)), **weights)
    found["llama, normed, biases"] = speaking(lively(Llama, replace(LLAMA, qk_norm="head", **biases)), **weights)
    found["llama, sinks"] = speaking(lively(Llama, replace(LLAMA, sinks=True)))
    found["llama, dropped"] = speaking(lively(Llama, replace(LLAMA, **DROPPED)), dropout=True, **weights)
    found["llama, window"] = speaking(
        lively(Llama, replace(LLAMA, pattern="sliding_window(3)")),
        sees=through(band(11, 2), band(11, 2)),
        length=11,
        **weights,
    )
    found["llama, streaming"] = speaking(
        lively(Llama, replace(LLAMA, layers=1, pattern="sliding_window(3) | causal() & prefix(2)", sinks=True)),
        sees=streaming,
        length=11,
    )

    t5 = lively(T5, T5_SMALL)
    long = lively(T5, replace(T5_SMALL, pattern="window(1, 1)"))
    dropped = lively(T5, replace(T5_SMALL, **DROPPED))
    ours = replace(T5_SMALL, activation="geglu_tanh", tied=False, scaled_head=False, decoder_layers=1)
    near = through(band(7, 1, 1), band(7, 1, 1))
    found["t5"] = writing(t5)
    found["t5, 1.1"] = writing(lively(T5, ours))
    found["t5, dropped"] = writing(dropped, dropout=True)
    found["t5, encoder"] = reading(t5, encoded, idle=parts_of(t5, "decoder."), **weights)
    found["t5, encoder, dropped"] = reading(
        dropped, encoded, idle=parts_of(dropped, "decoder."), dropout=True, **weights
    )
    found["t5, encoder, window"] = reading(long, encoded, idle=parts_of(long, "decoder."), sees=near, **weights)
    found["t5, decoder"] = writing_of(t5, **weights)

    found["vit"] = seeing(lively(ViT, replace(VIT, pooling=False)), of_patches)
    found["vit, pooled"] = seeing(lively(ViT, VIT), pooled_token)
    found["vit, dropped"] = seeing(lively(ViT, replace(VIT, pooling=False, **DROPPED)), of_patches, dropout=True)
    one = replace(VIT, layers=1, pooling=False)
    found["vit, neighbourhood"] = seeing(
        lively(ViT, replace(one, attention="neighborhood")), of_patches, sees=around(GRID, 1)
    )
    found["vit, windows"] = seeing(
        lively(ViT, replace(one, attention="windows")), of_patches, sees=together(GRID, 2, 0)
    )
    shifted = second_alone(replace(VIT, pooling=False, attention="windows"))
    found["vit, shifted windows"] = seeing(
        shifted, of_patches, sees=together(GRID, 2, 1), idle=("k_proj.bias", *parts_of(shifted, "layers.0."))
    )
    found["vit, classes"] = seeing(lively(ViTForImageClassification, VIT), classes)
    found["vit, classes of neighbourhoods"] = seeing(
        lively(ViTForImageClassification, replace(VIT, attention="neighborhood")), classes
    )

    found["hybrid"] = speaking(lively(Hybrid, HYBRID))
    found["hybrid, dropped"] = speaking(lively(Hybrid, replace(HYBRID, rope=ROPE, **DROPPED)), dropout=True)
    for name in VARIANTS:
        config = replace(HYBRID, linear=name, layers=2, ratio=1, rope=ROPE, linear_options=LINEAR.get(name))
        found[f"hybrid, {name}"] = speaking(lively(Hybrid, config), averages=name == "linear")
    found["hybrid, window"] = speaking(
        lively(Hybrid, replace(HYBRID, softmax_layers=(0, 1), layers=2, pattern="sliding_window(3)", kv_heads=2)),
        sees=through(band(11, 2), band(11, 2)),
        length=11,
        ordered=None,
    )
    return found


SUBJECTS = every_subject()
# A source whose order counts; a row without a token has no mean; a row of patches has no neighbourhood, no windows.
UNASKED = {
    **dict.fromkeys(("t5", "t5, 1.1", "t5, dropped"), ("P10",)),
    **dict.fromkeys(
        ("bert, embedded", *(name for name in SUBJECTS if "neighb" in name or "windows" in name)), ("P14",)
    ),
}


def asked_of(name: str) -> list[str]:
    return [probe for probe in fitting(SUBJECTS[name]) if probe not in UNASKED.get(name, ())]


@pytest.mark.parametrize("name", SUBJECTS)
def test_model(name):
    check(SUBJECTS[name], *asked_of(name))


def test_every_probe_of_a_model_is_asked():
    """P6, P9 and P11 are of attention by itself; P16 of scores, see test_model_beginnings."""
    assert {probe for name in SUBJECTS for probe in asked_of(name)} == set(PROBES) - {"P6", "P9", "P11", "P16"}


SPEAKING = [name for name, subject in SUBJECTS.items() if name.startswith(("gpt", "llama", "hybrid"))]
PROMPTS = torch.tensor([[1, 1, 1, 1, 1], [0, 0, 1, 1, 1], [1, 1, 1, 0, 0], [0, 1, 0, 1, 0]])


@pytest.mark.parametrize("name", SPEAKING)
def test_padded_prompts_go_on_as_alone(name):
    """Prompts that are padded, then more tokens, some of them padding too: as each whole sequence alone."""
    model, keep = SUBJECTS[name].module, PROMPTS
    with seeded(1), torch.no_grad():
        ids, more = torch.randint(WORDS, (4, 5)), torch.randint(WORDS, (4, 4))
        kept = torch.tensor([[1, 1, 0], [1, 0, 1], [0, 1, 1], [1, 1, 1]])
        state = model.initial_state(4, 12)
        last = model(ids, keep, state=state, last_only=True).logits
        parts = [model(more[:, :3], kept, state=state).logits, model(more[:, 3:], state=state).logits]
        got = torch.cat([last, *parts], 1)
        for b in range(4):
            real, after = keep[b] == 1, torch.cat([kept[b], torch.ones(1)]) == 1
            want = model(torch.cat([ids[b, real], more[b, after]])[None]).logits[0]
            shown = got[b, torch.cat([torch.tensor([True]), after])]
            same(shown, want[real.sum() - 1 :], f"{name}: row {b} must go on as it does alone")
