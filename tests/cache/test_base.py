"""What a cache is after a call that failed, and what a copy of it is."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch

import qkv
from qkv.backends.cpu import Cpu, Prepared
from qkv.cache import pool, steps

CAUSAL = qkv.causal()
WINDOW = qkv.sliding_window(100)
KINDS = ("contiguous", "paged", "rolling")
EACH = pytest.mark.parametrize("kind", KINDS)
NATIVE = pytest.mark.skipif(Cpu.unavailable is not None, reason=str(Cpu.unavailable))


def make(kind, batch=1):
    if kind == "contiguous":
        return qkv.KVCache(batch, 2, 4000, 8)
    if kind == "paged":
        return qkv.PagedKVCache(batch, 2, 80, 8)
    return qkv.RollingKVCache.for_pattern(WINDOW, batch, 2, 8)


def tokens(n, seed=0, batch=1):
    generator = torch.Generator().manual_seed(seed)
    shapes = (batch, 4, n, 8), (batch, 2, n, 8), (batch, 2, n, 8)
    return [torch.randn(*shape, generator=generator) for shape in shapes]


def step(cache, seed, n=1, **options):
    return cache.attend(*tokens(n, seed, cache.batch), pattern=WINDOW, **options)


def state(cache):
    """All that shows, and what the pages are."""
    shown = [x.tolist() for x in (cache.keys, cache.values, cache.key_positions)]
    pages = ()
    if not isinstance(cache, qkv.KVCache):
        pages = cache.table.tolist(), sorted(cache._pool.free), list(cache._pool.holders)
    return (cache.batch, cache.lengths, cache.nbytes, shown, *pages)


@EACH
@pytest.mark.parametrize("how", [copy.copy, copy.deepcopy, lambda cache: pickle.loads(pickle.dumps(cache))])
def test_a_copy_goes_on_as_the_cache_does(kind, how):
    cache, other = make(kind), make(kind)
    for one in (cache, other):
        for n, seed in ((200, 0), (1, 1), (1, 2), (1, 3)):
            step(one, seed, n)
    twin = how(cache)
    for seed in range(4, 74):
        assert torch.equal(step(twin, seed), step(other, seed)), seed


@EACH
@pytest.mark.parametrize("how", [copy.copy, copy.deepcopy])
def test_a_copy_shares_nothing(kind, how):
    cache = make(kind)
    for seed in range(3):
        step(cache, seed)
    before, twin = state(cache), how(cache)
    for seed in range(70):
        step(twin, seed)
    assert state(cache) == before and twin.length == 73


def fails(error, real=None, after=0):
    """A function that raises after so many calls."""
    calls = []

    def raising(*arguments, **options):
        calls.append(1)
        if len(calls) > after:
            raise error
        return real(*arguments, **options)

    return raising


@NATIVE
@EACH
@pytest.mark.parametrize("error", [MemoryError("made up"), KeyboardInterrupt()])
@pytest.mark.parametrize("first, n", [(60, 1), (64, 1), (64, 3), (60, 2000), (0, 2000)])
def test_a_step_that_fails_in_the_core_leaves_no_trace(kind, error, first, n, monkeypatch):
    cache, straight = make(kind), make(kind)
    for one in (cache, straight):
        for seed in range(first):
            step(one, seed)
    before = state(cache)
    for method in ("output", "answer"):
        monkeypatch.setattr(Prepared, method, fails(error))
    with pytest.raises(type(error)):
        step(cache, 99, n)
    monkeypatch.undo()
    assert state(cache) == before
    for seed, rows in ((7, n), (8, 1), (9, 1)):
        assert torch.equal(step(cache, seed, rows), step(straight, seed, rows))


@NATIVE
@EACH
def test_beams_that_fail_share_what_they_shared(kind, monkeypatch):
    cache = make(kind)
    step(cache, 0, 70)
    cache.reorder([0, 0, 0])
    before = state(cache)
    monkeypatch.setattr(Prepared, "answer", fails(MemoryError("made up")))
    with pytest.raises(MemoryError):
        step(cache, 1)
    assert state(cache) == before


@EACH
@pytest.mark.filterwarnings("error")
def test_a_warning_that_is_an_error_leaves_no_trace(kind):
    cache = make(kind)
    cache.append(*tokens(5)[1:])
    before = state(cache)
    for _ in range(2):
        with pytest.raises(qkv.errors.InvertedMaskWarning):
            cache.attend(*tokens(1), pattern=qkv.causal() - qkv.full())
        assert state(cache) == before


@pytest.mark.parametrize("first", [0, 60, 300])
def test_an_append_without_memory_leaves_no_trace(first, monkeypatch):
    cache = make("rolling")
    cache.append(*tokens(first)[1:])
    before = state(cache)
    for name in ("take", "write"):
        monkeypatch.setattr(pool.Pool, name, fails(MemoryError("made up"), getattr(pool.Pool, name), name == "take"))
        with pytest.raises(MemoryError):
            cache.append(*tokens(5000)[1:])
        monkeypatch.undo()
        assert state(cache) == before
    cache.append(*tokens(5000)[1:])
    assert torch.equal(cache.keys[:, :, -90:], tokens(5000)[1][:, :, -90:])


def test_an_answer_is_not_lost_where_shrinking_finds_no_memory(monkeypatch):
    cache, straight = make("rolling"), make("rolling")
    cache.append(*tokens(10)[1:])
    straight.append(*tokens(10)[1:])
    monkeypatch.setattr(pool.Pool, "moved", fails(MemoryError("made up"), pool.Pool.moved, after=1))
    found = step(cache, 1, 900)
    monkeypatch.undo()
    assert torch.equal(found, step(straight, 1, 900)) and cache.nbytes > straight.nbytes
    assert torch.equal(step(cache, 2), step(straight, 2)) and cache.nbytes == straight.nbytes


def test_reorder_without_memory_leaves_no_trace(monkeypatch):
    cache = make("contiguous", batch=2)
    step(cache, 0, 70)
    before = state(cache)
    monkeypatch.setattr(torch.Tensor, "__getitem__", fails(MemoryError("made up"), torch.Tensor.__getitem__, after=1))
    with pytest.raises(MemoryError):
        cache.reorder([1, 0])
    monkeypatch.undo()
    assert state(cache) == before


@pytest.mark.parametrize("kind", KINDS[1:])
def test_reorder_interrupted_leaves_no_trace(kind, monkeypatch):
    cache = make(kind, batch=2)
    step(cache, 0, 70)
    before, real = state(cache), pool.Pool.recount

    def interrupted(self, table):
        real(self, table)
        monkeypatch.undo()
        raise KeyboardInterrupt

    monkeypatch.setattr(pool.Pool, "recount", interrupted)
    with pytest.raises(KeyboardInterrupt):
        cache.reorder([1, 1, 1])
    assert state(cache) == before


@pytest.mark.parametrize("kind", KINDS[1:])
def test_truncate_interrupted_leaves_no_trace(kind, monkeypatch):
    cache = make(kind, batch=2)
    step(cache, 0, 130)
    before = state(cache)
    monkeypatch.setattr(pool.Pool, "drop", fails(KeyboardInterrupt(), pool.Pool.drop, after=1))
    with pytest.raises(KeyboardInterrupt):
        cache.truncate(60)
    monkeypatch.undo()
    assert state(cache) == before


@EACH
def test_no_step_brings_a_graph_into_the_cache(kind):
    cache = make(kind)
    weight = torch.ones(8, requires_grad=True)
    for seed in range(4):
        q, k, v = tokens(1, seed)
        assert not cache.attend(q, k * weight, v * weight, pattern=WINDOW).requires_grad
        assert not cache.keys.requires_grad and not cache.values.requires_grad


@EACH
def test_top_left_is_refused_wherever_keys_are_held(kind):
    """Also where the same call was answered while nothing was."""
    cache, pattern = make(kind), qkv.causal(align="top_left") & WINDOW
    for _ in range(2):
        assert cache.attend(*tokens(1), pattern=pattern).shape == (1, 4, 1, 8)
        with pytest.raises(qkv.errors.LayoutError, match="must stand after the keys that it holds"):
            cache.attend(*tokens(1), pattern=pattern)
        assert cache.length == 1
        cache.truncate(0)


@EACH
def test_a_first_call_has_the_keys_of_its_longest_sequence(kind):
    q, k, v = tokens(5, batch=2)
    bias = torch.randn(5, 3)
    found = make(kind, batch=2).attend(q, k, v, pattern=CAUSAL & WINDOW, lengths=[2, 3], bias=bias)
    for b, n in enumerate((2, 3)):
        one = [x[b : b + 1, :, :n] for x in (q, k, v)]
        want = qkv.attention(*one, pattern=CAUSAL & WINDOW, bias=bias[:n, :n])
        assert torch.allclose(found[b : b + 1, :, :n], want, atol=1e-6) and not found[b, :, n:].any()
    cache = make(kind, batch=2)
    assert not cache.attend(q, k, v, pattern=WINDOW, lengths=[0, 0]).any() and cache.length == 0


@EACH
def test_append_is_refused_within_a_transform(kind):
    cache = make(kind)
    with pytest.raises(qkv.errors.UnsupportedError, match=r"outside of torch\.func"):
        torch.func.vmap(lambda x: cache.append(x, x) or x)(tokens(3)[1][None])
    assert cache.length == 0


def decoded(layers, pattern, made):
    """Three layers, each with tokens of its own, step by step; how many plans the steps took."""
    whole = [tokens(71, seed) for seed in range(len(layers))]
    for layer, (_, k, v) in zip(layers, whole, strict=True):
        layer.append(k[:, :, :60], v[:, :, :60])
    made.clear()
    for at in range(60, 71):
        for layer, (q, k, v) in zip(layers, whole, strict=True):
            found = layer.attend(*(x[:, :, at : at + 1] for x in (q, k, v)), pattern=pattern)
            want = qkv.attention(q[:, :, at : at + 1], k[:, :, : at + 1], v[:, :, : at + 1], pattern=WINDOW)
            assert torch.allclose(found, want, atol=1e-6)
    return len(made)


@NATIVE
@EACH
def test_layers_share_the_plan_of_a_step(kind, monkeypatch):
    made, real = [], steps.Step._made
    monkeypatch.setattr(steps.Step, "_made", lambda *given: made.append(given) or real(*given))
    monkeypatch.setattr(steps, "_shared", {})
    assert (
        decoded([make(kind) for _ in range(3)], WINDOW, made) == 10
    )  # the first step of each is not like an earlier one
    assert len(steps._shared) == 10
    unknown = WINDOW & qkv.where(lambda b, h, i, j: i >= j)
    assert decoded([make(kind) for _ in range(3)], unknown, made) == 30  # told by identity: each plans its own
    monkeypatch.setattr(steps, "SHARED", 4)
    monkeypatch.setattr(steps, "_shared", {})
    assert decoded([make(kind) for _ in range(3)], WINDOW, made) == 10 and len(steps._shared) <= 4
    monkeypatch.setattr(steps, "LARGEST", 8)
    monkeypatch.setattr(steps, "_shared", {})
    assert decoded([make(kind) for _ in range(3)], WINDOW, made) == 30 and not steps._shared
