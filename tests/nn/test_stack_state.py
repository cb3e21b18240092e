"""The state of a stack: its sizes, its moves, all or nothing, and what it refuses."""

from __future__ import annotations

import copy

import pytest
import torch

from qkv.cache import KVCache, RollingKVCache
from qkv.errors import ShapeError, UnsupportedError, ValueOutOfRange
from qkv.nn.attention_state import Keys
from qkv.nn.linear_attention import LinearAttention
from qkv.nn.rows import Rows
from qkv.nn.stack_state import StackState
from qkv.patterns import sliding_window

B, G, D = 2, 2, 4


def plain():
    return KVCache(B, G, 400, D)


def rolling(size):
    return RollingKVCache.for_pattern(sliding_window(size), B, G, D)


def grown(*layers, tokens=3):
    for number, layer in enumerate(layers):
        rows = torch.arange(tokens).float() + 100 * number
        rows = (rows + 1000 * torch.arange(B)[:, None])[:, None, :, None].expand(B, G, tokens, D)
        layer.append(rows, rows)
    return StackState(layers)


def keys_of(batch=B, lengths=None):
    rows = torch.arange(batch).float()[:, None, None, None].expand(batch, 5, G, D).clone()
    return Keys(rows, rows, lengths)


def test_sizes():
    state = grown(plain(), plain())
    assert (state.batch, state.length, state.lengths) == (B, 3, (3, 3))
    assert state.nbytes == 2 * state.layers[0].nbytes
    assert StackState([plain()], [keys_of()]).nbytes == plain().nbytes + 2 * B * 5 * G * D * 4
    assert repr(state) == f"StackState(2 layers of KVCache, batch 2, length=3, nbytes={state.nbytes})"
    state.check(2, B)


def test_reorder_moves_every_part():
    memory = Rows.of(torch.tensor([[0, 1, 1, 1, 1], [1, 1, 1, 0, 0]]), B, 5)
    state = StackState(grown(plain(), rolling(70)).layers, [keys_of(lengths=memory.lengths)] * 2, memory)
    state.reorder(torch.tensor([1, 1, 0]))
    assert (state.batch, state.lengths) == (3, (3, 3, 3))
    for layer in state.layers:
        assert (layer.keys[:, 0, 0, 0] >= 1000).tolist() == [True, True, False]
    for keys in state.cross:
        assert keys.key[:, 0, 0, 0].tolist() == keys.value[:, 0, 0, 0].tolist() == [1, 1, 0]
        assert keys.lengths == (3, 3, 4)
    assert state.memory.lengths == (3, 3, 4)
    assert state.memory.keep.int().sum(1).tolist() == [3, 3, 4] and not state.memory.keep[2, 0]
    plain_memory = StackState([plain()], [keys_of()], Rows.of(None, B, 5))
    plain_memory.reorder([0])
    assert plain_memory.memory.batch == 1 and plain_memory.cross[0].lengths is None


@pytest.mark.parametrize("way", [StackState.fork, copy.copy])
def test_a_fork_goes_its_own_way(way):
    layer = LinearAttention(8, 2)
    recurrent = layer.initial_state(B)
    state = StackState([plain(), recurrent], [keys_of()] * 2)
    other = way(state)
    other.layers[0].append(torch.ones(B, G, 1, D), torch.ones(B, G, 1, D))
    layer.step(torch.ones(B, 8), other.layers[1])
    assert other.lengths == (1, 1) and state.lengths == (0, 0)
    assert recurrent.lengths == (0, 0) and not recurrent.recurrent.state.any()
    assert other.cross == state.cross and other.cross is not state.cross


def test_truncate_cuts_every_layer():
    state = grown(plain(), rolling(70), rolling(65), tokens=90)
    state.truncate([80, 85])
    assert {layer.lengths for layer in state.layers} == {(80, 85)}
    state.check(3, B)


def test_truncate_leaves_all_where_one_refuses():
    state = grown(plain(), rolling(350), rolling(5), tokens=300)
    with pytest.raises(ValueOutOfRange, match="dropped"):
        state.truncate(250)
    assert {layer.lengths for layer in state.layers} == {(300, 300)}
    one_kind = grown(plain(), rolling(5), rolling(5), tokens=300)
    with pytest.raises(ValueOutOfRange, match="dropped"):
        one_kind.truncate(250)
    assert {layer.lengths for layer in one_kind.layers} == {(300, 300)}


def test_a_reorder_that_failed_halfway_is_noticed(monkeypatch):
    state = grown(plain(), plain())
    with pytest.raises(ValueOutOfRange, match="`index` must name sequences"):
        state.reorder([2])
    state.check(2, B)
    monkeypatch.setattr(state.layers[1], "reorder", lambda index: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        state.reorder([1, 0])
    for move in (lambda: state.check(2, B), state.fork, lambda: state.truncate(0)):
        with pytest.raises(ValueOutOfRange, match="gone through a part of a reorder"):
            move()


def test_truncate_is_refused_where_a_layer_is_recurrent():
    state = StackState([plain(), LinearAttention(8, 2).initial_state(B)])
    with pytest.raises(UnsupportedError, match=r"1 of 2 layers are recurrent .*; keep a fork\(\)"):
        state.truncate(0)


@pytest.mark.parametrize(
    "make, error, text",
    [
        (lambda: StackState([]), ValueOutOfRange, "`layers` must hold the state of a layer"),
        (lambda: StackState([plain(), KVCache(3, G, 4, D)]), ShapeError, r"got \[2, 3\] sequences in `layers`"),
        (lambda: StackState([plain()], [keys_of(3)]), ShapeError, r"got \[2, 3\] sequences in `cross`"),
        (lambda: StackState([plain()], [keys_of()] * 2), ShapeError, "got 2 for 1 layers"),
        (lambda: grown(plain()).check(2, B), ShapeError, "of 2 layers and 2 sequences, as the call; got one of 1"),
        (lambda: grown(plain()).check(1, 3), ShapeError, "of 1 layers and 3 sequences"),
        (
            lambda: StackState([plain(), *grown(plain()).layers]).check(2, B),
            ValueOutOfRange,
            r"layer 0 has seen \(0, 0\) and layer 1 \(3, 3\)",
        ),
    ],
)
def test_states_that_are_refused(make, error, text):
    with pytest.raises(error, match=text):
        make()
