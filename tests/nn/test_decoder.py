"""Decoders against torch's with the same weights; states; memories and padding; aux; refusals."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from qkv.cache import KVCache
from qkv.errors import DeviceError, DTypeError, MaskError, ShapeError, UnsupportedError, ValueOutOfRange
from qkv.nn.attention_state import Keys
from qkv.nn.decoder import Decoder, DecoderLayer
from qkv.nn.mixer import VARIANTS
from qkv.nn.multihead_attention import MultiheadAttention
from qkv.nn.rotary import Rotary
from qkv.patterns import causal, global_tokens, window
from qkv.types import AuxRequest
from stacks import DIM, HEADS, HIDDEN, KEEP, LENGTH, close, drawn, gradients_agree, made

MEMORY = torch.tensor([[0, 1, 1, 1, 0], [1, 1, 0, 0, 0], [1, 0, 1, 0, 1], [1, 1, 1, 1, 1], [0, 0, 0, 0, 1]])
SMALL = {"mamba2": {"state_size": 8}}
NAMES = {
    "self_attn": "attention",
    "multihead_attn": "cross_attention",
    "linear1": "feed_forward.up_proj",
    "linear2": "feed_forward.down_proj",
    "norm1": "attention_norm",
    "norm2": "cross_attention_norm",
    "norm3": "feed_forward_norm",
    "norm": "final_norm",
}


def theirs(layers=1, *, norm_first=False, activation="gelu", bias=True):
    """torch's decoder, its weights all drawn anew so that none is 0 or 1."""
    layer = nn.TransformerDecoderLayer(
        DIM, HEADS, HIDDEN, 0.0, activation, batch_first=True, norm_first=norm_first, bias=bias, dtype=torch.float64
    )
    if layers > 1:
        layer = nn.TransformerDecoder(
            layer, layers, nn.LayerNorm(DIM, bias=bias, dtype=torch.float64) if norm_first else None
        )
    for number, p in enumerate(layer.parameters()):
        p.data = drawn(*p.shape, seed=number) * 0.3
    return layer


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("activation", ["relu", "gelu"])
@pytest.mark.parametrize("norm_first", [True, False])
def test_layer_is_torchs(norm_first, activation, bias):
    want_layer = theirs(norm_first=norm_first, activation=activation, bias=bias)
    layer = made(DecoderLayer, DIM, HEADS, HIDDEN, norm_first=norm_first, activation=activation, bias=bias)
    layer.load_state_dict(want_layer.state_dict())
    x, memory = drawn(2, LENGTH, DIM), drawn(2, 5, DIM, seed=2).requires_grad_()
    copied = memory.detach().clone().requires_grad_()
    later = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)
    got, want = layer(x, memory), want_layer(x, copied, tgt_mask=later)
    close(got, want)
    (got * drawn(*got.shape, seed=5)).sum().backward()
    (want * drawn(*want.shape, seed=5)).sum().backward()
    close(memory.grad, copied.grad)
    gradients_agree(layer, want_layer, NAMES)


@pytest.mark.parametrize("norm_first", [True, False])
def test_decoder_is_torchs_with_masks(norm_first):
    want_stack = theirs(2, norm_first=norm_first)
    pattern = causal() & window(3)
    stack = made(Decoder, 2, DIM, HEADS, HIDDEN, norm_first=norm_first, attention=pattern)
    stack.load_state_dict(want_stack.state_dict())
    x, memory = drawn(2, LENGTH, DIM), drawn(2, 5, DIM, seed=2)
    keep, memory_keep = torch.ones(2, LENGTH, dtype=torch.bool), torch.tensor([[0, 1, 1, 0, 1], [1, 1, 0, 0, 0]])
    keep[1, 6:] = False
    hidden = ~pattern.to_dense(LENGTH, LENGTH)
    got = stack(x, memory, attention_mask=keep, memory_mask=memory_keep)
    want = want_stack(
        x, memory, tgt_mask=hidden, tgt_key_padding_mask=~keep, memory_key_padding_mask=~memory_keep.bool()
    )
    weight = drawn(*got.shape, seed=5) * keep[..., None]
    close(got * keep[..., None], (want * keep[..., None]).nan_to_num())
    (got * weight).sum().backward()
    want_stack.zero_grad()
    for b, n in ((0, LENGTH), (1, 6)):  # alone: torch's gradients of rows that see no key are NaN
        alone = want_stack(x[b : b + 1, :n], memory[b : b + 1, memory_keep[b].bool()], tgt_mask=hidden[:n, :n])
        (alone * weight[b : b + 1, :n]).sum().backward()
    gradients_agree(stack, want_stack, NAMES)


def steps(decoder, x, state):
    rows = []
    for t in range(x.shape[1]):
        y, state = decoder.step(x[:, t], state)
        rows.append(y)
    return torch.stack(rows, 1)


CHOICES = {
    "causal": (None, {}),
    "window": ("causal() & window(3)", {}),
    "global tokens": (causal() & (window(2) | global_tokens([0, 3])), {}),
    "rotary": (None, {"rotary": Rotary(DIM // HEADS), "kv_heads": 2}),
    **{name: (name, {}) for name in VARIANTS},
    "mixed": (["gated_delta", "causal() & window(3)"], {}),
}


def decoder_of(name, *, cross=True, **options):
    attention, softmax_options = CHOICES[name]
    return made(
        Decoder,
        2,
        DIM,
        HEADS,
        HIDDEN,
        attention=attention,
        cross_attention=cross,
        softmax_options=softmax_options,
        linear_options=SMALL.get(name, {}),
        **options,
    ).eval()


@pytest.mark.parametrize("name", CHOICES)
def test_padding_gives_each_row_what_it_gives_alone(name):
    """With and without a state, with a memory that is padded too; gradients of a batch are the sum of its rows'."""
    decoder = decoder_of(name)
    keep, known = KEEP.bool(), MEMORY.bool()
    x, memory = drawn(*KEEP.shape, DIM), drawn(*MEMORY.shape, DIM, seed=2)
    hurt = torch.where(keep[..., None], x, torch.nan)
    hurt_memory = torch.where(known[..., None], memory, torch.nan)
    got = decoder(hurt, hurt_memory, attention_mask=KEEP, memory_mask=MEMORY)
    assert not got[~keep].any()
    weight = drawn(*got.shape, seed=5)
    (got * weight).sum().backward()
    grads = {key: p.grad.clone() for key, p in decoder.named_parameters()}
    decoder.zero_grad()
    state = decoder.initial_state(5, 2 * LENGTH, hurt_memory, MEMORY)
    first = decoder(hurt[:, :6], attention_mask=KEEP[:, :6], state=state)
    second = decoder(hurt[:, 6:], attention_mask=KEEP[:, 6:], state=state)
    assert state.lengths == tuple(KEEP.sum(1).tolist())
    close(torch.cat([first, second], 1), got)
    further = steps(decoder, drawn(5, 2, DIM, seed=3), state)
    for b in range(5):
        row, of_memory = x[b : b + 1, keep[b]], memory[b : b + 1, known[b]]
        alone = decoder(row, of_memory)
        close(got[b, keep[b]], alone[0])
        (alone * weight[b : b + 1, keep[b]]).sum().backward()
        whole = torch.cat([row, drawn(5, 2, DIM, seed=3)[b : b + 1]], 1)
        close(further[b], decoder(whole, of_memory)[0, -2:])
    for key, p in decoder.named_parameters():
        close(grads[key], p.grad, bound=1e-11)


@pytest.mark.parametrize("name", [name for name in CHOICES if name != "mixed"])
def test_a_layer_by_itself_decodes(name):
    attention, options = CHOICES[name]
    told = {"attention": attention, "softmax_options": options, "linear_options": SMALL.get(name)}
    layer = made(DecoderLayer, DIM, HEADS, **told)
    x, memory = drawn(2, LENGTH, DIM), drawn(2, 5, DIM, seed=2)
    close(steps(layer, x, layer.initial_state(2, LENGTH, memory)), layer(x, memory))


def test_states_fork_reorder_and_truncate():
    decoder = decoder_of("causal")
    x, memory = drawn(2, LENGTH, DIM), drawn(2, 5, DIM, seed=2)
    mask = torch.tensor([[0, 1, 1, 1, 1], [1, 1, 1, 0, 0]])
    want = decoder(x, memory, memory_mask=mask)
    state = decoder.initial_state(2, LENGTH, memory, mask)
    steps(decoder, x[:, :5], state)
    other = state.fork()
    other.reorder([1, 1, 0])
    close(steps(decoder, x[[1, 1, 0], 5:], other), want[[1, 1, 0], 5:])
    other.truncate(5)
    _, _, cross = decoder(x[[1, 1, 0], :1], state=other, return_aux=AuxRequest(weights=True))
    hidden = ~mask[[1, 1, 0]].bool()
    assert not cross[0].weights.movedim(-1, 1)[hidden].any() and cross[0].weights.movedim(-1, 1)[~hidden].all()
    state.truncate(3)
    close(steps(decoder, x[:, 3:], state), want[:, 3:])


def test_keys_of_the_memory_are_made_once(monkeypatch):
    made_keys = []
    real = MultiheadAttention.keys_of
    monkeypatch.setattr(
        MultiheadAttention,
        "keys_of",
        lambda self, *given, **named: made_keys.append(self) or real(self, *given, **named),
    )
    decoder = decoder_of("causal")
    state = decoder.initial_state(2, LENGTH, drawn(2, 5, DIM))
    steps(decoder, drawn(2, LENGTH, DIM), state)
    assert made_keys == [layer.cross_attention for layer in decoder.layers]
    assert all(isinstance(keys, Keys) and not keys.key.requires_grad for keys in state.cross)


def test_a_memory_of_another_width():
    decoder = made(Decoder, 2, DIM, HEADS, memory_dim=7, softmax_options={"kv_heads": 2, "rotary": Rotary(4)})
    layer = decoder.layers[0]
    assert layer.cross_attention.k_proj.weight.shape == (DIM // 2, 7)
    assert layer.cross_attention.rotary is None and layer.attention.rotary is not None
    assert decoder(drawn(1, 3, DIM), drawn(1, 4, 7)).shape == (1, 3, DIM)


def test_memory_at_every_call_of_a_state_without_one():
    decoder = decoder_of("causal")
    x, memory = drawn(2, LENGTH, DIM), drawn(2, 5, DIM, seed=2)
    state = decoder.initial_state(2, LENGTH)
    got = torch.cat([decoder(x[:, :4], memory, state=state), decoder(x[:, 4:], memory, state=state)], 1)
    close(got, decoder(x, memory))


def test_aux_tells_of_both_attentions_at_the_places_that_came_in():
    decoder = decoder_of("causal")
    keep, known = KEEP.bool(), MEMORY.bool()
    x, memory = drawn(*KEEP.shape, DIM), drawn(*MEMORY.shape, DIM, seed=2)
    request = AuxRequest(weights=True, lse=True, top_k=1)
    _, own, cross = decoder(x, memory, attention_mask=KEEP, memory_mask=MEMORY, return_aux=request)
    assert len(own) == len(cross) == 2
    state = decoder.initial_state(5, LENGTH, memory, MEMORY)
    _, later, later_cross = decoder(x, attention_mask=KEEP, state=state, return_aux=request)
    for b in range(5):
        _, alone, crossed = decoder(x[b : b + 1, keep[b]], memory[b : b + 1, known[b]], return_aux=request)
        n = int(keep[b].sum())
        for layer in range(2):
            got = own[layer].weights[b][:, keep[b]]
            close(got[:, :, keep[b]], alone[layer].weights[0])
            close(later[layer].weights[b][:, keep[b]][..., :n], alone[layer].weights[0])  # keys by their positions
            for told in (cross[layer], later_cross[layer]):
                close(told.weights[b][:, keep[b]][:, :, known[b]], crossed[layer].weights[0])
                assert not told.weights[b][:, :, ~known[b]].any()
                close(told.lse[b][:, keep[b]], crossed[layer].lse[0])
                numbers = known[b].nonzero().flatten()[crossed[layer].top_k.indices[0]]
                assert torch.equal(told.top_k.indices[b][:, keep[b]], numbers)
    plain = decoder_of("linear", cross=False)
    y, aux = plain(x, attention_mask=KEEP, return_aux=request)
    assert len(aux) == 2 and aux[0] == (None,) * 5
    assert torch.equal(y, plain(x, attention_mask=KEEP))


@pytest.mark.parametrize("place", ["attention_dropout", "feedforward_dropout", "residual_dropout"])
def test_dropouts_reach_both_attentions_and_act_in_training_only(place):
    layer = made(DecoderLayer, DIM, HEADS, HIDDEN, **{place: 0.5})
    x, memory = drawn(1, LENGTH, DIM).repeat(64, 1, 1), drawn(1, 5, DIM).repeat(64, 1, 1)
    assert layer.eval()(x, memory).std(0).max() < 1e-12
    assert layer.train()(x, memory).std(0).min() > 0
    assert layer.cross_attention.attention_dropout == (0.5 if place == "attention_dropout" else 0.0)


def test_a_failed_pass_is_noticed(monkeypatch):
    decoder = decoder_of("causal", cross=False)
    state = decoder.initial_state(1, LENGTH)
    monkeypatch.setattr(decoder.layers[1].attention, "pattern", "not a pattern")
    with pytest.raises(Exception, match="pattern"):
        decoder(drawn(1, 2, DIM), state=state)
    monkeypatch.undo()
    with pytest.raises(ValueOutOfRange, match=r"seen the same tokens; layer 0 has seen \(2,\) and layer 1 \(0,\)"):
        decoder(drawn(1, 2, DIM), state=state)


class Fault(nn.Module):
    """Stands for what runs out of memory, or for Ctrl-C."""

    def __init__(self, error):
        super().__init__()
        self.error = error

    def forward(self, x):
        raise self.error


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("place", ["final_norm", "layers.1.feed_forward", "layers.1.cross_attention_norm"])
def test_a_pass_that_failed_after_the_last_cache_is_noticed(place, error):
    decoder = decoder_of("causal")
    x = drawn(2, LENGTH, DIM)
    memory = drawn(2, 5, DIM, seed=2)
    state = decoder.initial_state(2, LENGTH, memory)
    decoder(x[:, :3], state=state)
    whole, broken = decoder.get_submodule(place), state.fork()
    decoder.set_submodule(place, Fault(error))
    with pytest.raises(error):
        decoder(x[:, 3:5], state=broken)
    decoder.set_submodule(place, whole)
    text = r"as a call left it that came to its end; .* from \(3, 3\) to \(5, 5\) tokens; go on from a fork"
    for move in (
        lambda: decoder.step(x[:, 3], broken),
        lambda: decoder(x[:, 3:5], state=copy.deepcopy(broken)),
        lambda: broken.reorder([1, 0]),
        broken.fork,
        lambda: broken.truncate(4),
        lambda: broken.truncate([2, 4]),
    ):
        with pytest.raises(ValueOutOfRange, match=text):
            move()
    broken.truncate(3)
    for way in (state, broken):
        close(steps(decoder, x[:, 3:], way), decoder(x, memory)[:, 3:])


def test_a_pass_that_failed_before_the_first_cache_changes_nothing():
    for name in ("causal", "mixed"):
        decoder, x = decoder_of(name, cross=False), drawn(1, LENGTH, DIM)
        state = decoder.initial_state(1, LENGTH)
        decoder(x[:, :3], state=state)
        norm, decoder.layers[0].attention_norm = decoder.layers[0].attention_norm, Fault(RuntimeError)
        with pytest.raises(RuntimeError):
            decoder(x[:, 3:5], state=state)
        decoder.layers[0].attention_norm = norm
        close(steps(decoder, x[:, 3:], state.fork()), decoder(x)[:, 3:])


def refused_before_work(decoder, error, text, **held):
    """A call that a later layer cannot answer leaves the state of the first one as it was."""
    x = drawn(1, LENGTH, DIM).float()
    state = decoder.initial_state(1, 4, **held)
    with pytest.raises(error, match=text):
        decoder(x[:, :5] if "max_length" in text else x[:, :3], state=state)
    assert state.lengths == (0,) and not state.layers[0].recurrent.state.any()
    return state, x


def test_a_hybrid_state_is_left_as_it_was():
    def hybrid(*attention):
        return Decoder(len(attention), DIM, HEADS, attention=list(attention), cross_attention=False)

    decoder = hybrid("retention", "causal()").eval()
    state, x = refused_before_work(decoder, ValueOutOfRange, "max_length = 4")
    close(steps(decoder, x[:, :4], state), decoder(x[:, :4]), bound=1e-5)
    refused_before_work(decoder, DTypeError, "made for inputs of float32, .*; got one for float64", dtype=torch.float64)
    with torch.autocast("cpu", torch.bfloat16):
        refused_before_work(decoder, DTypeError, "made for inputs of bfloat16, .*; got one for float32")
        decoder(drawn(1, 3, DIM).float(), state=decoder.initial_state(1, 4, dtype=torch.bfloat16))
    for name in ("gated_delta", "mamba2"):
        convolving = hybrid("retention", name)
        with torch.autocast("cpu", torch.bfloat16):
            refused_before_work(convolving, DTypeError, "made for inputs of bfloat16, .*; got one for float32")
            convolving(drawn(1, 3, DIM).float(), state=convolving.initial_state(1, 4, dtype=torch.bfloat16))
    drops = hybrid("retention", MultiheadAttention(DIM, HEADS, pattern=causal(), attention_dropout=0.1))
    refused_before_work(drops, UnsupportedError, r"without dropout: .*; got 0.1 in training; call .eval\(\)")
    three, other = hybrid("retention", "causal()", "retention"), hybrid("retention", "retention", "causal()")
    state = other.initial_state(1, 4)
    with pytest.raises(DTypeError, match="state of softmax attention must be a cache; got LayerState"):
        three(drawn(1, 2, DIM).float(), state=state)
    other(drawn(1, 2, DIM).float(), state=state)
    state = decoder.initial_state(1, 4, device="meta")
    with pytest.raises(DeviceError, match="`x` and `state` must be on one device; got cpu and meta"):
        decoder(x[:, :2], state=state)


def test_a_memory_read_in_inference_mode_serves_gradients():
    decoder = decoder_of("mixed")
    x, memory = drawn(5, LENGTH, DIM), drawn(*MEMORY.shape, DIM, seed=2)
    with torch.inference_mode():
        state = decoder.initial_state(5, LENGTH, memory, MEMORY)
        decoder(x[:, :2], state=state)
        state.reorder([0, 1, 2, 3, 4])
        decoder(x[:, 2:3], state=state, return_aux=AuxRequest(weights=True))
    y, _, cross = decoder(x[:, 3:], state=state, return_aux=AuxRequest(weights=True))
    close(y, decoder(x, memory, memory_mask=MEMORY)[:, 3:])
    (y.sum() + cross[0].weights.square().sum()).backward()
    assert decoder.layers[0].cross_attention.q_proj.weight.grad.isfinite().all()


def test_a_full_state_is_left_as_it_was():
    decoder = decoder_of("causal", cross=False)
    state = decoder.initial_state(1, 3)
    decoder(drawn(1, 2, DIM), state=state)
    with pytest.raises(ValueOutOfRange, match="max_length"):
        decoder(drawn(1, 2, DIM), state=state)
    assert state.lengths == (2,)
    decoder.step(drawn(1, DIM), state)


X, M = torch.zeros(2, 3, DIM), torch.zeros(2, 5, DIM)


@pytest.mark.parametrize(
    "call, error, text",
    [
        (lambda d: d(X), ValueOutOfRange, "must be given a `memory`; got none"),
        (lambda d: d(X, M[:1]), ShapeError, "a row for each sequence; got 1 for a batch of 2"),
        (lambda d: d(X, M[..., :3]), ShapeError, r"`memory` must be \(B, L, 16\)"),
        (lambda d: d(X, M.double()), DTypeError, "`memory` must have the type of the layer's weights"),
        (lambda d: d(X.double(), M), DTypeError, "`x` must have the type of the layer's weights"),
        (
            lambda d: d(X, M, memory_mask=torch.full((2, 5), 3)),
            MaskError,
            "`memory_mask` must hold 1 for tokens to keep",
        ),
        (lambda d: d(X, M, state=KVCache(2, HEADS, 4, 4)), DTypeError, "must be a StackState; got KVCache"),
        (lambda d: d.step(X[:, 0], None), DTypeError, "must be a StackState; got NoneType"),
        (lambda d: d.step([1.0], d.initial_state(2, 5, M)), ShapeError, "one token of each sequence"),
        (lambda d: Decoder(1, DIM, HEADS, cross_attention="x"), DTypeError, "`cross_attention` must be True or False"),
        (lambda d: d(X, M, state=d.initial_state(2, 5, M)), ValueOutOfRange, "has the keys of a memory"),
        (lambda d: d(X, state=d.initial_state(1, 5, M[:1])), ShapeError, "of 1 layers and 2 sequences"),
        (lambda d: d.initial_state(1, 5, M), ShapeError, "got 2 for a batch of 1"),
        (lambda d: d.step(X, d.initial_state(2, 5, M)), ShapeError, "one token of each sequence"),
        (lambda d: Decoder(1, DIM, HEADS, cross_attention=False)(X, M), ValueOutOfRange, "have no cross-attention"),
        (lambda d: DecoderLayer(DIM, HEADS, cross_attention=False, memory_dim=3), ValueOutOfRange, "`memory_dim`"),
        (
            lambda d: d(X, M, memory_mask=torch.tensor([[0, 1, 1, 1, 1]] * 2), return_aux=AuxRequest(weights=[0])),
            UnsupportedError,
            "padded on the right",
        ),
    ],
)
def test_calls_that_are_refused(call, error, text):
    with pytest.raises(error, match=text):
        call(Decoder(1, DIM, HEADS))
