"""The attention layer with a state: tokens one by one and in chunks, sequences of different lengths, which cache."""

from __future__ import annotations

import pytest
import torch

import qkv
from qkv.cache import KVCache, PagedKVCache, RollingKVCache
from qkv.nn.context import Context
from qkv.nn.multihead_attention import MultiheadAttention
from qkv.nn.relative import AlibiBias, T5RelativeBias
from qkv.nn.rotary import Rotary
from qkv.types import AuxRequest

DIM, HEADS, B = 24, 4, 3
OPTIONS = {
    "causal": {"pattern": qkv.causal()},
    "grouped, rotary": {"pattern": qkv.causal(), "kv_heads": 2, "rotary": Rotary(6)},
    "window": {"pattern": qkv.sliding_window(5), "kv_heads": 1, "rotary": Rotary(6, interleaved=True)},
    "window and first tokens": {"pattern": qkv.causal() & (qkv.window(3) | qkv.prefix(2)), "qk_norm": "head"},
    "sinks": {"pattern": qkv.sliding_window(4), "sinks": True, "softcap": 2.0},
    "alibi": {"pattern": qkv.causal(), "bias": AlibiBias(HEADS)},
    "t5": {"pattern": qkv.causal(), "bias": T5RelativeBias(HEADS, bidirectional=False, max_distance=20), "scale": 1.0},
    "per head": {"pattern": qkv.per_head([qkv.causal(), qkv.sliding_window(2)] * 2), "qk_norm": "model"},
}


def make(name, dtype=torch.float64, **more):
    torch.manual_seed(1)
    layer = MultiheadAttention(DIM, HEADS, **{**OPTIONS[name], **more}).to(dtype).eval()
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return layer


def rows(length, batch=B, dtype=torch.float64):
    return torch.randn(batch, length, DIM, generator=torch.Generator().manual_seed(2), dtype=dtype)


def near(found, wanted, bound=1e-12):
    assert (found - wanted).abs().max() <= bound * max(1.0, wanted.abs().max().item())


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("dtype, bound", [(torch.float64, 1e-12), (torch.float32, 4e-6)])
def test_token_by_token_is_the_full_pass(name, dtype, bound):
    layer, x = make(name, dtype), rows(130 if dtype == torch.float64 else 30, dtype=dtype)
    want, _ = layer.attend(x)
    state = layer.initial_state(B, x.shape[1])
    for t in range(x.shape[1]):
        y, same = layer.step(x[:, t], state)
        assert same is state
        assert y.shape == (B, DIM)
        near(y, want[:, t], bound)
    assert state.lengths == (x.shape[1],) * B


@pytest.mark.parametrize("name", OPTIONS)
def test_sequences_of_different_length_go_on_from_their_own_ends(name):
    layer, x = make(name), rows(140)
    want, _ = layer.attend(x)
    state = layer.initial_state(B, 140)
    ends = [0, 0, 0]
    for lengths in ((70, 2, 101), (1, 1, 1), (0, 5, 3), (1, 1, 1), (1, 1, 1), (9, 0, 12)):
        chunk = torch.full((B, max(lengths), DIM), torch.nan, dtype=torch.float64)
        for b, n in enumerate(lengths):
            chunk[b, :n] = x[b, ends[b] : ends[b] + n]
        real = None if lengths == (1, 1, 1) else lengths
        y, _ = layer.attend(chunk, Context(lengths=real), state=state)
        for b, n in enumerate(lengths):
            if n:
                near(y[b, :n], want[b, ends[b] : ends[b] + n])
            ends[b] += n
        assert state.lengths == tuple(ends)


def test_a_step_shows_its_weights_and_reads_the_pattern_of_the_pass():
    layer, x = make("grouped, rotary"), rows(9)
    context = Context(pattern=qkv.sliding_window(3), aux=AuxRequest(weights=True))
    want, seen = layer.attend(x, context)
    state = layer.initial_state(B, 9)
    layer.attend(x[:, :8], context, state=state)
    y, aux = layer.attend(x[:, 8:], context, state=state)
    near(y, want[:, 8:])
    near(aux.weights, seen.weights[:, :, 8:])
    assert not aux.weights[..., :6].any()


def test_any_cache_of_the_right_sizes_serves():
    layer, x = make("grouped, rotary"), rows(20)
    want, _ = layer.attend(x)
    state = PagedKVCache(B, 2, 8, 6, page_size=16, dtype=torch.float64)
    near(layer.attend(x[:, :13], state=state)[0], want[:, :13])
    near(layer.attend(x[:, 13:], state=state)[0], want[:, 13:])


def test_the_state_can_be_reordered_and_cut():
    layer, x = make("grouped, rotary"), rows(12)
    want, _ = layer.attend(x)
    state = layer.initial_state(B, 20)
    layer.attend(x, state=state)
    state.truncate(8)
    state.reorder([2, 0])
    y, _ = layer.attend(x[[2, 0], 8:], state=state)
    near(y, want[[2, 0], 8:])


@pytest.mark.parametrize(
    "pattern, length, kind",
    [
        (qkv.causal(), 1000, KVCache),
        (qkv.sliding_window(100), 1000, RollingKVCache),
        (qkv.sliding_window(100), 100, KVCache),
        (qkv.sliding_window(100), 150, KVCache),  # all of one page is seen to the end
        (qkv.sliding_window(100), 230, RollingKVCache),
        (qkv.causal() & (qkv.window(50) | qkv.global_tokens(4)), 1000, RollingKVCache),
        (qkv.strided(30), 1000, KVCache),
        (qkv.per_head([qkv.sliding_window(10), qkv.causal()]), 1000, KVCache),
        (qkv.per_head([qkv.sliding_window(10), qkv.sliding_window(20)]), 1000, RollingKVCache),
    ],
)
def test_the_cache_rolls_where_the_pattern_lets_keys_go(pattern, length, kind):
    state = MultiheadAttention(8, 2, pattern=pattern).initial_state(2, length)
    assert type(state) is kind
    assert state.max_length == length


def test_the_state_has_the_type_and_device_of_the_weights_unless_said():
    layer = MultiheadAttention(8, 4, kv_heads=2, head_dim=6, pattern=qkv.causal()).bfloat16()
    state = layer.initial_state(5, 10)
    assert (state.batch, state.heads, state.head_dim, state.value_dim) == (5, 2, 6, 6)
    assert (state.dtype, state.device.type, state.max_length) == (torch.bfloat16, "cpu", 10)
    other = layer.initial_state(1, 10, dtype=torch.float32, device="meta")
    assert (other.dtype, other.device.type) == (torch.float32, "meta")
    assert layer.to("meta").initial_state(1, 10).device.type == "meta"


def test_a_step_makes_no_graph_and_a_pass_with_a_state_one_for_its_queries():
    layer, x = make("causal"), rows(5).requires_grad_()
    state = layer.initial_state(B, 10)
    y, _ = layer.attend(x, state=state)
    (grad,) = torch.autograd.grad(y.sum(), [layer.q_proj.weight], retain_graph=True)
    assert grad.isfinite().all()
    assert not state.keys.requires_grad
    stepped, _ = layer.step(x[:, 0], state)
    assert not stepped.requires_grad


def test_what_fails_leaves_the_state_as_it_was():
    layer, x = make("causal"), rows(5)
    state = layer.initial_state(B, 6)
    layer.attend(x, state=state)
    before = state.keys.clone()
    with pytest.raises(qkv.errors.ValueOutOfRange, match=r"max_length = 6; sequence 0 of length 5 would have 10"):
        layer.attend(x, state=state)
    assert state.lengths == (5,) * B
    assert torch.equal(state.keys, before)


@pytest.mark.parametrize("failure", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("kind", ["plain", "paged", "rolling"])
def test_what_fails_after_the_keys_were_written_leaves_the_state_as_it_was(kind, failure, monkeypatch):
    pattern = qkv.sliding_window(70) if kind == "rolling" else qkv.causal()
    layer, x = make("grouped, rotary", pattern=pattern), rows(300)
    want, _ = layer.attend(x)
    state = PagedKVCache(B, 2, 80, 6, page_size=16, dtype=torch.float64)
    if kind != "paged":
        state = layer.initial_state(B, 300)
        assert isinstance(state, RollingKVCache if kind == "rolling" else KVCache)

    def fail(x):
        raise failure

    start = 0
    for stop in (127, 128, 129, 190, 300):  # over the ends of pages, and far enough to let some go
        before, real = state.lengths, layer.o_proj
        layer.o_proj = torch.nn.Identity()
        monkeypatch.setattr(layer.o_proj, "forward", fail)
        for chunk in (x[:, start:stop], torch.randn_like(x[:, start:])):
            with pytest.raises(failure):
                layer.attend(chunk, state=state)
        layer.o_proj = real
        assert state.lengths == before
        near(layer.attend(x[:, start:stop], state=state)[0], want[:, start:stop])
        start = stop


@pytest.mark.parametrize("name", ["causal", "window", "sinks"])
def test_one_backward_goes_through_several_calls_with_a_state(name):
    layer, x = make(name), rows(12)
    chunks, found, wanted = x.split(4, 1), [], []
    for together in (True, False):
        layer.zero_grad()
        state = layer.initial_state(B, 12)
        losses = []
        for chunk in chunks:
            y, _ = layer.attend(chunk, state=state)
            losses.append(y.square().sum())
            if not together:
                losses[-1].backward()
        if together:
            sum(losses).backward()
        (found if together else wanted).extend(p.grad.clone() for p in layer.parameters() if p.grad is not None)
    for a, b in zip(found, wanted, strict=True):
        near(a, b)


AHEAD = {
    "all": None,
    "both ways": qkv.window(4, 4),
    "block": qkv.block_local(4),
    "global queries": qkv.causal() | qkv.global_tokens(2),
    "one head": qkv.per_head([qkv.causal(), qkv.full(), qkv.causal(), qkv.causal()]),
    "unknown": qkv.where(lambda b, h, i, j: j <= i),
    "drawn": qkv.random_blocks(1, 2, 0),
}


@pytest.mark.parametrize("name", AHEAD)
def test_a_pattern_that_shows_later_tokens_has_no_state(name):
    layer = MultiheadAttention(DIM, HEADS, pattern=AHEAD[name])
    remedy = r"give the layer pattern=causal\(\)" + ("$" if AHEAD[name] is None else r" & \(")
    with pytest.raises(qkv.errors.UnsupportedError, match=rf"shows no later token; got pattern=.*; {remedy}"):
        layer.initial_state(B, 9)
    if AHEAD[name] is not None:
        MultiheadAttention(DIM, HEADS, pattern=qkv.causal() & AHEAD[name]).initial_state(B, 9)


def test_a_prefix_decodes_where_it_comes_whole():
    layer, x = make("causal", pattern=qkv.causal() | qkv.prefix(3)), rows(9)
    want, _ = layer.attend(x)
    state = layer.initial_state(B, 9)
    near(layer.attend(x[:, :3], state=state)[0], want[:, :3])
    for t in range(3, 9):
        near(layer.step(x[:, t], state)[0], want[:, t])
