"""An ablation changes one word: every pattern and every linear variant builds, trains and, where causal, decodes."""

from __future__ import annotations

import inspect

import pytest
import torch
from torch import nn

import qkv.nn
from qkv import patterns
from qkv.errors import DTypeError, PatternSyntaxError, ShapeError, UnknownName, UnsupportedError, ValueOutOfRange
from qkv.nn.context import Context
from qkv.nn.decoder import Decoder
from qkv.nn.encoder import Encoder, EncoderLayer
from qkv.nn.layer import RecurrentLayer
from qkv.nn.linear_attention import LinearAttention
from qkv.nn.mamba2 import Mamba2Mixer
from qkv.nn.mixer import VARIANTS, make_mixer, mix
from qkv.nn.multihead_attention import MultiheadAttention
from qkv.patterns import causal, documents, full, key_padding, mask, parse, per_head, where, window
from qkv.patterns.text import CONSTRUCTORS
from qkv.types import AuxOutput, AuxRequest
from stacks import DIM, HEADS, HIDDEN, close, drawn, made

LENGTH = 12
KEEP = torch.arange(LENGTH) % 3 > 0
TEXTS = {
    "full": "full()",
    "causal": "causal()",
    "window": "window(3, 1)",
    "sliding_window": "sliding_window(3)",
    "dilated": "dilated(3, dilation=2)",
    "strided": "strided(3)",
    "fixed": "fixed(4)",
    "global_tokens": "global_tokens(2)",
    "prefix": "prefix(3)",
    "random_blocks": "random_blocks(1, 4, 0)",
    "block_local": "block_local(4)",
    "key_lengths": "key_lengths([12, 7])",
    "longformer": "longformer(4, 1)",
    "bigbird": "bigbird(1, 1, 1, 0, block_size=2)",
    "sparse_transformer": "sparse_transformer(3)",
    "neighborhood": "neighborhood((3, 4), 3)",
    "windows2d": "windows2d((4, 3), 2)",
    "axial": "axial((3, 4), 'width')",
}
PATTERNS = {
    **{name: parse(text) for name, text in TEXTS.items()},
    "documents": documents(torch.arange(LENGTH) // 5),
    "key_padding": key_padding(keep=KEEP[None].expand(2, -1)),
    "mask": mask(keep=drawn(LENGTH, LENGTH) > 0),
    "blocks": patterns.blocks(keep=torch.eye(3, dtype=torch.bool) | (drawn(3, 3) > 0), block_size=4),
    "where": where(lambda b, h, i, j: (i + j) % 3 > 0),
    "per_head": per_head([causal(), full(), window(2, 2), window(0)]),
}
# Those whose sets of keys depend on the size of the call, so that a step is not a row of the whole.
OF_WHOLE_CALLS = {
    "key_lengths",
    "mask",
    "blocks",
    "bigbird",
    "neighborhood",
    "windows2d",
    "axial",
    "key_padding",
    "documents",
}
SMALL = {"mamba2": {"state_size": 8}}


def trained(stack: nn.Module, *inputs: torch.Tensor) -> None:
    """One step of a gradient lowers the loss."""
    target = drawn(*inputs[0].shape, seed=9)
    rate = torch.optim.SGD(stack.parameters(), lr=0.05)
    first = (stack(*inputs) - target).square().mean()
    first.backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in stack.parameters())
    rate.step()
    assert (stack(*inputs) - target).square().mean() < first


@pytest.mark.parametrize("name", PATTERNS)
def test_an_encoder_of_every_pattern_trains_a_step(name):
    stack = made(Encoder, 2, DIM, HEADS, HIDDEN, attention=PATTERNS[name])
    trained(stack, drawn(2, LENGTH, DIM))


@pytest.mark.parametrize("name", PATTERNS)
def test_a_decoder_of_every_pattern_trains_and_decodes(name):
    pattern = PATTERNS[name] & causal()
    stack = made(Decoder, 2, DIM, HEADS, HIDDEN, attention=pattern, cross_attention=False)
    trained(stack, drawn(2, LENGTH, DIM))
    if name not in OF_WHOLE_CALLS:
        decodes(stack)


@pytest.mark.parametrize("name", VARIANTS)
def test_a_decoder_of_every_linear_variant_trains_and_decodes(name):
    options = {"linear_options": SMALL.get(name, {}), "cross_attention": False}
    stack = made(Decoder, 2, DIM, HEADS, HIDDEN, attention=name, **options)
    trained(stack, drawn(2, LENGTH, DIM))
    decodes(stack)


def decodes(stack: nn.Module) -> None:
    """Three tokens, then one by one, with gradients on and off."""
    x = drawn(2, LENGTH, DIM)
    want = stack(x)
    state = stack.initial_state(2, LENGTH)
    rows = [stack(x[:, :3], state=state), stack(x[:, 3:4], state=state)]
    rows += [stack.step(x[:, t], state)[0][:, None] for t in range(4, LENGTH)]
    close(torch.cat(rows, 1), want)
    assert state.length == LENGTH


def test_an_encoder_of_linear_attention_trains_a_step():
    stack = made(Encoder, 2, DIM, HEADS, HIDDEN, attention="linear")
    assert not stack.layers[0].attention.is_causal
    trained(stack, drawn(2, LENGTH, DIM))


def test_every_pattern_and_every_layer_is_here():
    assert set(PATTERNS) == set(CONSTRUCTORS)
    layers = {kind for _, kind in inspect.getmembers(qkv.nn, inspect.isclass) if issubclass(kind, RecurrentLayer)}
    assert set(VARIANTS.values()) == layers - {RecurrentLayer}


def test_what_a_choice_makes():
    softmax, linear = {"kv_heads": 2}, {"feature_map": "relu"}

    def make(choice, **told):
        return make_mixer(choice, DIM, HEADS, **{"causal": True, **told})

    assert make(None).pattern == causal() and make(None, causal=False).pattern is None
    assert make("window(3)").pattern == window(3) == make(window(3)).pattern
    both = {"softmax_options": softmax, "linear_options": linear, "backend": "reference"}
    assert make("causal()", **both).kv_heads == 2 and make(None, **both).backend == "reference"
    assert make("linear", **both).elementwise == "relu" and make("linear", **both).backend == "reference"
    assert make(None, attention_dropout=0.25).attention_dropout == 0.25
    assert isinstance(make(Mamba2Mixer), Mamba2Mixer)
    assert make(lambda dim, heads: MultiheadAttention(dim, heads, pattern=full(), sinks=True)).sinks is not None
    given = LinearAttention(DIM, HEADS)
    assert make(given) is given


@pytest.mark.parametrize(
    "choice, told, error, text",
    [
        ("lineer", {}, UnknownName, "did you mean 'linear'"),
        ("causal", {}, UnknownName, r"the text of a pattern such as 'causal\(\)'"),
        ("causal(", {}, PatternSyntaxError, "was never closed"),
        (3, {}, DTypeError, "must be a pattern, its text, the name of a linear variant, .*; got int"),
        (nn.Identity(), {}, DTypeError, "got Identity"),
        (nn.Linear, {}, DTypeError, "got Linear"),
        (MultiheadAttention(DIM * 2, HEADS), {}, ShapeError, "got MultiheadAttention with dim 32"),
        ("linear", {"attention_dropout": 0.1}, ValueOutOfRange, "which has no weights to drop; got 0.1"),
        ("mamba2", {"causal": False}, UnsupportedError, "mamba2 is a recurrence that reads from left to right"),
        (Mamba2Mixer, {"causal": False}, UnsupportedError, "Mamba2Mixer is a recurrence"),
        (LinearAttention, {"causal": False}, UnsupportedError, "LinearAttention is a recurrence"),
        (LinearAttention(DIM, HEADS, is_causal=False), {}, UnsupportedError, "must not read what follows"),
        (
            MultiheadAttention,
            {},
            UnsupportedError,
            r"follows; got .* without a pattern, .*; give it pattern=causal\(\)",
        ),
        (MultiheadAttention(DIM, HEADS), {}, UnsupportedError, "must not read what follows"),
        (None, {"softmax_options": {"pattern": causal()}}, ValueOutOfRange, "got 'pattern'; say it as `attention`"),
        (None, {"softmax_options": {"key_dim": 8}}, ValueOutOfRange, "say it as `memory_dim`"),
        (None, {"softmax_options": {"kvheads": 2}}, UnknownName, "did you mean 'kv_heads'"),
        (None, {"softmax_options": 3}, DTypeError, "must be a dict of options by name; got int"),
        ("linear", {"linear_options": {"statesize": 8}}, UnknownName, "`linear_options` must be one of"),
        ("linear", {"backend": "blockwise"}, UnknownName, "`backend` must be one of auto, chunked, cpu, reference"),
    ],
)
def test_choices_that_are_refused(choice, told, error, text):
    with pytest.raises(error, match=text):
        make_mixer(choice, DIM, HEADS, **{"causal": True, **told})


OWN = MultiheadAttention(DIM, HEADS, attention_dropout=0.5, projection_bias=False, backend="reference")


@pytest.mark.parametrize("choice", [MultiheadAttention, MultiheadAttention(DIM, HEADS)])
@pytest.mark.parametrize(
    "told",
    [{"attention_dropout": 0.5}, {"softmax_options": {"kv_heads": 2}}, {"bias": False}, {"backend": "reference"}],
    ids=lambda told: next(iter(told)),
)
def test_what_is_said_of_a_module_and_is_not_so_is_refused(choice, told):
    (name,) = told
    text = f"`{name}` must be told to what makes the attention, .*; got .* for a MultiheadAttention that differs"
    with pytest.raises(ValueOutOfRange, match=text):
        make_mixer(choice, DIM, HEADS, causal=False, **told)
    if name != "softmax_options":
        assert make_mixer(OWN, DIM, HEADS, causal=False, **told) is OWN
    assert make_mixer(choice, DIM, HEADS, causal=False, softmax_options={}, linear_options={"feature_map": "relu"})


def test_options_that_a_brought_linear_layer_cannot_be_told_are_refused():
    for told in ({"linear_options": {"feature_map": "relu"}}, {"backend": "reference"}):
        with pytest.raises(ValueOutOfRange, match=r"got .* for a LinearAttention that differs"):
            make_mixer(LinearAttention, DIM, HEADS, causal=True, **told)
    assert make_mixer(LinearAttention, DIM, HEADS, causal=True, bias=False, softmax_options={"kv_heads": 2})


def test_options_of_a_kind_come_before_what_is_said_of_all():
    stack = Decoder(1, DIM, HEADS, softmax_options={"attention_dropout": 0.1, "backend": "reference"})
    for part in (stack.layers[0].attention, stack.layers[0].cross_attention):
        assert (part.attention_dropout, part.backend) == (0.1, "reference")


def test_a_backend_goes_to_the_kinds_that_know_it():
    def backends(kind, attention, backend, **told):
        layers = kind(len(attention), DIM, HEADS, attention=attention, backend=backend, **told).layers
        parts = [(layer.attention, getattr(layer, "cross_attention", None)) for layer in layers]
        return [part.backend for pair in parts for part in pair if part is not None]

    mixed, alone = ["gated_delta", "causal()"], {"cross_attention": False}
    assert backends(Decoder, mixed, "blockwise", **alone) == ["auto", "blockwise"]
    assert backends(Decoder, mixed, "chunked", **alone) == ["chunked", "auto"]
    assert backends(Decoder, mixed, "reference", **alone) == ["reference", "reference"]
    assert backends(Decoder, mixed, "blockwise") == ["auto", "blockwise", "blockwise", "blockwise"]
    assert backends(Decoder, mixed[:1], "chunked") == ["chunked", "auto"]
    assert backends(Encoder, ["linear", None], "sdpa") == ["auto", "sdpa"]
    for name in ("blockwise", "cuda", 3):
        with pytest.raises(UnknownName, match="`backend` must be one of"):
            Encoder(2, DIM, HEADS, attention="linear", backend=name)
    for told in ({}, alone):
        with pytest.raises(UnknownName, match="`backend` must be one of"):
            Decoder(2, DIM, HEADS, attention=mixed, backend="cuda", **told)


def test_a_list_gives_each_layer_its_own():
    shared = MultiheadAttention(DIM, HEADS)
    stack = Encoder(3, DIM, HEADS, attention=["linear", "window(1, 1)", shared])
    kinds = [type(layer.attention) for layer in stack.layers]
    assert kinds == [LinearAttention, MultiheadAttention, MultiheadAttention]
    assert stack.layers[2].attention is shared
    assert EncoderLayer(DIM, HEADS, attention=shared).attention is shared


@pytest.mark.parametrize("word", [None, "linear", "gated_delta"])
def test_mix_reads_real_rows_alone(word):
    mixer = make_mixer(word, DIM, HEADS, causal=True).double()
    x, lengths = drawn(3, 5, DIM), (5, 0, 2)
    state = mixer.initial_state(3, 8) if word is None else mixer.initial_state(3)
    context = Context(lengths=lengths)
    y, aux = mix(mixer, x, context)
    held, _ = mix(mixer, x, context, state)
    assert aux is None and state.lengths == lengths
    for b, n in enumerate(lengths):
        alone, _ = mix(mixer, x[b : b + 1, :n], Context())
        for got in (y, held):
            close(got[b, :n], alone[0]) if n else None
    _, aux = mix(mixer, x, Context(aux=AuxRequest(lse=True)))
    assert aux == AuxOutput() if word else aux.lse.shape == (3, HEADS, 5)


def test_passes_that_are_refused():
    softmax, linear = (make_mixer(word, DIM, HEADS, causal=True) for word in (None, "linear"))
    x = torch.zeros(1, 2, DIM)
    with pytest.raises(UnsupportedError, match="must go through softmax attention; got window"):
        mix(linear, x, Context(pattern=window(2)))
    with pytest.raises(DTypeError, match="state of softmax attention must be a cache; got LayerState"):
        mix(softmax, x, Context(), linear.initial_state(1))
    with pytest.raises(DTypeError, match="state of LinearAttention must be a LayerState; got KVCache"):
        mix(linear, x, Context(), softmax.initial_state(1, 4))
