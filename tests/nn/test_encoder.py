"""Encoders against torch's with the same weights; padding; what each dropout drops; aux; refusals."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn

from qkv.errors import DTypeError, MaskError, ShapeError, UnsupportedError, ValueOutOfRange
from qkv.nn.encoder import Encoder, EncoderLayer
from qkv.nn.feed_forward import FeedForward
from qkv.nn.multihead_attention import MultiheadAttention
from qkv.nn.norm import RMSNorm
from qkv.nn.rotary import Rotary
from qkv.patterns import global_tokens, window
from qkv.types import AuxRequest
from stacks import DIM, HEADS, HIDDEN, KEEP, LENGTH, close, drawn, gradients_agree, made


def theirs(layers=1, *, norm_first=False, activation="gelu", bias=True, **options):
    """torch's encoder, its weights all drawn anew so that none is 0 or 1."""
    layer = nn.TransformerEncoderLayer(
        DIM, HEADS, HIDDEN, 0.0, activation, batch_first=True, norm_first=norm_first, bias=bias, dtype=torch.float64
    )
    if layers > 1:
        norm = nn.LayerNorm(DIM, bias=bias, dtype=torch.float64) if norm_first else None
        layer = nn.TransformerEncoder(layer, layers, norm, enable_nested_tensor=False)
    for number, p in enumerate(layer.parameters()):
        p.data = drawn(*p.shape, seed=number) * 0.3
    return layer


NAMES = {
    "self_attn": "attention",
    "linear1": "feed_forward.up_proj",
    "linear2": "feed_forward.down_proj",
    "norm1": "attention_norm",
    "norm2": "feed_forward_norm",
}


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("activation", ["relu", "gelu"])
@pytest.mark.parametrize("norm_first", [True, False])
def test_layer_is_torchs(norm_first, activation, bias):
    want_layer = theirs(norm_first=norm_first, activation=activation, bias=bias)
    layer = made(EncoderLayer, DIM, HEADS, HIDDEN, norm_first=norm_first, activation=activation, bias=bias)
    layer.load_state_dict(want_layer.state_dict())
    x = drawn(2, LENGTH, DIM)
    got, want = layer(x), want_layer(x)
    close(got, want)
    (got * drawn(*got.shape, seed=5)).sum().backward()
    (want * drawn(*want.shape, seed=5)).sum().backward()
    gradients_agree(layer, want_layer, NAMES)


@pytest.mark.parametrize("norm_first", [True, False])
def test_encoder_is_torchs_with_masks(norm_first):
    want_stack = theirs(2, norm_first=norm_first)
    pattern = window(2, 1)
    stack = made(Encoder, 2, DIM, HEADS, HIDDEN, norm_first=norm_first, attention=pattern)
    stack.load_state_dict(want_stack.state_dict())
    x, keep = drawn(2, LENGTH, DIM), torch.ones(2, LENGTH, dtype=torch.bool)
    keep[1, 6:] = False
    hidden = ~pattern.to_dense(LENGTH, LENGTH)
    got = stack(x, keep)
    want = want_stack(x, mask=hidden, src_key_padding_mask=~keep)
    weight = drawn(*got.shape, seed=5) * keep[..., None]
    close(got * keep[..., None], (want * keep[..., None]).nan_to_num())
    (got * weight).sum().backward()
    # torch's rows of padding see no key and are NaN, in gradients too: it is asked row by row, each alone.
    want_stack.zero_grad()
    for b, n in ((0, LENGTH), (1, 6)):
        alone = want_stack(x[b : b + 1, :n], mask=hidden[:n, :n])
        close(got[b, :n], alone[0])
        (alone * weight[b : b + 1, :n]).sum().backward()
    gradients_agree(stack, want_stack, {**NAMES, "norm": "final_norm"} if norm_first else NAMES)


def test_a_state_dict_of_ours_loads_as_it_is():
    stack = made(Encoder, 2, DIM, HEADS, HIDDEN)
    other = made(Encoder, 2, DIM, HEADS, HIDDEN, seed=1)
    other.load_state_dict(stack.state_dict())
    x = drawn(1, LENGTH, DIM)
    assert torch.equal(other(x), stack(x))
    assert torch.equal(pickle.loads(pickle.dumps(stack))(x), copy.deepcopy(stack)(x))


@pytest.mark.parametrize("norm", ["layer", "rms"])
@pytest.mark.parametrize(
    "attention, options",
    [
        (None, {}),
        ("linear", {}),
        (global_tokens([0, 3]) | window(1, 1), {}),
        ("window(2, 2)", {"rotary": Rotary(DIM // HEADS)}),
    ],
    ids=["full", "linear", "global tokens", "rotary"],
)
def test_padding_gives_each_row_what_it_gives_alone(attention, options, norm):
    """With gradients: those of a batch are the sum of those of its rows."""
    stack = made(Encoder, 2, DIM, HEADS, HIDDEN, attention=attention, norm=norm, softmax_options=options)
    x = drawn(*KEEP.shape, DIM)
    hurt = torch.where(KEEP.bool()[..., None], x, torch.nan).requires_grad_()
    got = stack(hurt, KEEP)
    assert not got[~KEEP.bool()].any()
    weight = drawn(*got.shape, seed=5)
    (got * weight).sum().backward()
    grads = {name: p.grad.clone() for name, p in stack.named_parameters()}
    assert not hurt.grad[~KEEP.bool()].any()
    stack.zero_grad()
    for b, keep in enumerate(KEEP.bool()):
        alone = stack(x[b : b + 1, keep])
        close(got[b, keep], alone[0])
        (alone * weight[b : b + 1, keep]).sum().backward()
    for name, p in stack.named_parameters():
        close(grads[name], p.grad, bound=1e-11)


def test_aux_tells_of_every_layer_at_the_places_that_came_in():
    stack = made(Encoder, 2, DIM, HEADS, attention=[None, "linear"])
    x = drawn(*KEEP.shape, DIM)
    request = AuxRequest(weights=True, lse=True, entropy=True, top_k=1)
    y, (first, second) = stack(x, KEEP, return_aux=request)
    assert torch.equal(y, stack(x, KEEP))
    assert second == (None,) * 5
    for b, keep in enumerate(KEEP.bool()):
        _, (alone, _) = stack(x[b : b + 1, keep], return_aux=request)
        close(first.weights[b][:, keep][:, :, keep], alone.weights[0])
        close(first.lse[b][:, keep], alone.lse[0])
        close(first.entropy[b][:, keep], alone.entropy[0])
        assert torch.equal(first.top_k.indices[b][:, keep], keep.nonzero().flatten()[alone.top_k.indices[0]])
        assert not first.weights[b][:, ~keep].any() and not first.weights[b][:, :, ~keep].any()
    on_right = KEEP[[1, 3]]
    _, (aux, _) = stack(x[[1, 3]], on_right, return_aux=AuxRequest(weights=[0, 2]))
    close(aux.weights, first.weights[[1, 3]][:, :, [0, 2]])
    layer = made(EncoderLayer, DIM, HEADS)
    _, aux = layer(x, return_aux=AuxRequest(weights="mean"))
    assert aux.weights.shape == (*KEEP.shape, LENGTH)


PLACES = {
    "attention_dropout": (MultiheadAttention, None),
    "feedforward_dropout": (FeedForward, None),
    "residual_dropout": (nn.Dropout, None),
}


def spread_of_draws(module, x):
    """Of each output of a submodule over many equal rows, the number that vary; and of its inputs."""
    seen = {}
    hooks = [
        part.register_forward_hook(lambda part, got, out, name=name: seen.__setitem__(name, (got[0], out)))
        for name, part in module.named_modules()
        if isinstance(part, FeedForward | nn.Dropout)
    ]
    y = module(x)
    for hook in hooks:
        hook.remove()
    return y, seen


@pytest.mark.parametrize("norm_first", [True, False])
@pytest.mark.parametrize("place", PLACES)
def test_each_dropout_acts_alone_at_its_place_and_in_training_only(place, norm_first):
    layer = made(EncoderLayer, DIM, HEADS, HIDDEN, norm_first=norm_first, **{place: 0.5})
    plain = made(EncoderLayer, DIM, HEADS, HIDDEN, norm_first=norm_first)
    x = drawn(1, LENGTH, DIM).repeat(64, 1, 1)
    assert torch.equal(layer.eval()(x), plain.eval()(x))
    y, seen = spread_of_draws(layer.train(), x)
    assert y.std(0).min() > 0
    fed_in, fed_out = seen["feed_forward"]
    varies = fed_in.std(0).max() > 1e-9
    assert varies == (place != "feedforward_dropout")  # what went before drops, or nothing has yet
    added_in, added_out = seen["residual_dropout"]  # the last call: what the feed-forward adds
    dropped = (added_out == 0) & (added_in != 0)
    if place == "residual_dropout":
        assert 0.45 < dropped.double().mean() < 0.55
        close(added_out[~dropped], 2 * added_in[~dropped])
    else:
        assert torch.equal(added_out, added_in)
    if place == "feedforward_dropout":  # dropped inside: y = down(drop(act(up x))), whose mean is that without
        assert fed_out.std(0).min() > 0
        want = plain.feed_forward(fed_in)
        deviations = (fed_out.mean(0) - want.mean(0)).abs() / fed_out.std(0) * 8
        assert deviations.max() < 6


def test_attention_dropout_drops_weights():
    """Equal tokens then vary by what one value is worth, times a common factor a head."""
    layer = made(EncoderLayer, DIM, HEADS, attention_dropout=0.5).train()
    with torch.no_grad():
        layer.attention.o_proj.weight.copy_(torch.eye(DIM))
    x = drawn(1, 1, DIM).repeat(32, LENGTH, 1)
    kept, _ = layer.attention.attend(x)
    one, _ = layer.eval().attention.attend(x)
    ratio = (kept / one).unflatten(-1, (HEADS, -1))
    close(ratio, ratio[..., :1].expand_as(ratio), bound=1e-10)
    shares = ratio[..., 0] * LENGTH / 2  # the number of weights that were kept
    close(shares, shares.round(), bound=1e-3)
    assert 0.4 < shares.mean() / LENGTH < 0.6


def test_first_values_are_those_of_the_blocks():
    layer = made(EncoderLayer, 64, 4, 256)
    glorot = {"attention.q_proj": 128, "attention.v_proj": 128, "attention.o_proj": 128}
    glorot |= {"feed_forward.up_proj": 320, "feed_forward.down_proj": 320}
    parts = dict(layer.named_modules())
    for name, fans in glorot.items():
        spread = parts[name].weight.std().item() / (2 / fans) ** 0.5
        assert 0.95 < spread < 1.05, (name, spread)
        assert not parts[name].bias.any()
    for norm in (layer.attention_norm, layer.feed_forward_norm):
        assert (norm.weight == 1).all() and not norm.bias.any()


def test_options_reach_their_parts():
    stack = Encoder(3, DIM, HEADS, norm="rms", norm_eps=1e-3, activation="swiglu", bias=False, attention="window(1, 1)")
    assert isinstance(stack.final_norm, RMSNorm)
    assert {norm.eps for norm in stack.modules() if isinstance(norm, RMSNorm)} == {1e-3}
    assert not [name for name, _ in stack.named_parameters() if name.endswith("bias")]
    assert stack.layers[0].feed_forward.up_proj.weight.shape == (4 * DIM, DIM)
    assert Encoder(1, DIM, HEADS, final_norm=False).final_norm is None
    assert Encoder(1, DIM, HEADS, norm_first=False).final_norm is None
    assert Encoder(1, DIM, HEADS, norm_first=False, final_norm=True).final_norm is not None
    assert Encoder(1, DIM, HEADS, bias=False).final_norm.bias is None
    grouped = Encoder(1, DIM, HEADS, softmax_options={"kv_heads": 2, "projection_bias": False})
    assert grouped.layers[0].attention.kv_heads == 2 and grouped.layers[0].attention.q_proj.bias is None


@pytest.mark.parametrize(
    "call, error, text",
    [
        (lambda e: e(torch.zeros(3, DIM)), ShapeError, r"`x` must be \(B, L, 16\)"),
        (lambda e: e(torch.zeros(1, 3, DIM + 1)), ShapeError, r"`x` must be \(B, L, 16\); got \[1, 3, 17\]"),
        (lambda e: e(torch.zeros(1, 3, DIM, dtype=torch.float64)), DTypeError, "type of the layer's weights, float32"),
        (lambda e: e([[0.0]]), DTypeError, "must be a tensor"),
        (lambda e: e(torch.zeros(1, 3, DIM), torch.ones(1, 4)), ShapeError, "attention_mask"),
        (lambda e: e(torch.zeros(1, 3, DIM), torch.full((1, 3), 0.5)), MaskError, "attention_mask"),
        (
            lambda e: e(torch.zeros(1, 3, DIM), torch.tensor([[0, 1, 1]]), return_aux=AuxRequest(weights=[1])),
            UnsupportedError,
            "padded on the right",
        ),
    ],
)
def test_calls_that_are_refused(call, error, text):
    with pytest.raises(error, match=text):
        call(Encoder(1, DIM, HEADS))


@pytest.mark.parametrize("norm", ["layer", "rms"])
@pytest.mark.parametrize("norm_first", [True, False])
@pytest.mark.parametrize("attention", [None, "linear"])
def test_another_type_is_refused_but_under_autocast(attention, norm_first, norm):
    stack = Encoder(1, DIM, HEADS, attention=attention, norm=norm, norm_first=norm_first)
    for dtype in (torch.float64, torch.bfloat16):
        with pytest.raises(DTypeError, match=r"weights, float32; got .*; cast it with .to\(torch.float32\)"):
            stack(torch.zeros(1, 3, DIM, dtype=dtype))
    with torch.autocast("cpu", torch.bfloat16):
        for dtype in (torch.float32, torch.bfloat16):
            assert stack(torch.zeros(1, 3, DIM, dtype=dtype)).isfinite().all()


MODULE = MultiheadAttention(DIM, HEADS)


@pytest.mark.parametrize(
    "make, error, text",
    [
        (lambda: Encoder(0, DIM, HEADS), ValueOutOfRange, "`layers` must be at least 1"),
        (lambda: Encoder(2, DIM, HEADS, attention=[None]), ValueOutOfRange, "one choice for each layer; got 1 for 2"),
        (
            lambda: Encoder(2, DIM, HEADS, attention=MultiheadAttention(DIM, HEADS)),
            ValueOutOfRange,
            "an attention of its own",
        ),
        (lambda: EncoderLayer(DIM, HEADS, residual_dropout=1.0), ValueOutOfRange, r"`residual_dropout` must lie in"),
        (lambda: EncoderLayer(DIM, HEADS, residual_dropout="0.1"), DTypeError, "`residual_dropout` must be a number"),
        (lambda: EncoderLayer(DIM, HEADS, norm_eps=-1.0, bias=False), ValueOutOfRange, "`eps` must be finite"),
        (lambda: EncoderLayer(DIM, HEADS, norm_first="no"), DTypeError, "`norm_first` must be True or False"),
        (lambda: EncoderLayer(DIM, HEADS, bias=None), DTypeError, "`bias` must be True or False"),
        (lambda: Encoder(1, DIM, HEADS, final_norm="x"), DTypeError, "`final_norm` must be True or False"),
        (
            lambda: Encoder(3, DIM, HEADS, attention=[MODULE, "full()", MODULE]),
            ValueOutOfRange,
            "an attention of its own; got one MultiheadAttention for more than one of 3",
        ),
        (lambda: Encoder(2, DIM, HEADS, attention=lambda *_: MODULE), ValueOutOfRange, "an attention of its own"),
        (lambda: EncoderLayer(DIM, 3), ShapeError, "divisible"),
    ],
)
def test_stacks_that_are_refused(make, error, text):
    with pytest.raises(error, match=text):
        make()
