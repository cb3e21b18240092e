"""Pages: taken when a sequence grows, given back, shared, and copied before one of several writes."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

import qkv
from decoding import poisoned
from qkv.backends.cpu import Cpu

CAUSAL = qkv.causal()


def tokens(batch, n, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shapes = (batch, 4, n, 8), (batch, 2, n, 8), (batch, 2, n, 8)
    return [torch.randn(*shape, generator=generator) for shape in shapes]


def test_pages_are_taken_and_given_back():
    cache = qkv.PagedKVCache(3, 2, 6, 8, page_size=16)
    _, k, v = tokens(3, 20)
    cache.append(k, v, lengths=[20, 16, 0])
    assert cache.table.tolist() == [[0, 1], [2, -1], [-1, -1]] and cache.free_pages == 3
    cache.truncate([16, 3, 0])
    assert cache.table.tolist() == [[0], [2], [-1]] and cache.free_pages == 4
    cache.append(k[:, :, :1], v[:, :, :1])
    assert cache.table.tolist() == [[0, 1], [2, -1], [3, -1]] and cache.free_pages == 2
    cache.reorder([1])
    assert cache.table.tolist() == [[2]] and cache.free_pages == 5
    cache.truncate(0)
    assert cache.free_pages == 6 and cache.table.shape == (1, 0)
    assert cache.page_size == 16


def test_a_shared_page_is_copied_before_it_is_written_to():
    cache = qkv.PagedKVCache(1, 2, 8, 8, page_size=16)
    _, k, v = tokens(1, 40)
    cache.append(k[:, :, :20], v[:, :, :20])
    cache.reorder([0, 0, 0])
    assert cache.table.tolist() == [[0, 1]] * 3 and cache.free_pages == 6
    more = tokens(3, 3, seed=1)
    found = cache.attend(*more, pattern=CAUSAL)
    assert cache.table.tolist() == [[0, 2], [0, 3], [0, 1]] and cache.free_pages == 4
    for b in range(3):
        keys, values = (torch.cat([x[:, :, :20], y[b : b + 1]], 2) for x, y in zip((k, v), more[1:], strict=True))
        want = qkv.attention(more[0][b : b + 1], keys, values, pattern=CAUSAL)
        assert torch.allclose(found[b : b + 1], want, atol=1e-6)
        assert torch.equal(cache.keys[b : b + 1], keys) and torch.equal(cache.values[b : b + 1], values)


def test_sharing_counts_when_there_is_room_for_all_but_one_copy():
    cache = qkv.PagedKVCache(1, 2, 2, 8, page_size=16)
    _, k, v = tokens(1, 5)
    cache.append(k, v)
    cache.reorder([0, 0, 0])
    with pytest.raises(qkv.errors.ValueOutOfRange, match="2 more are needed where 1 of 2 are free"):
        cache.append(*(x[:, :, :1].expand(3, -1, -1, -1) for x in (k, v)))
    cache.append(*(x[:, :, :1].expand(3, -1, -1, -1) for x in (k, v)), lengths=[1, 0, 0])
    assert cache.table.tolist() == [[1], [0], [0]] and cache.free_pages == 0


def test_a_shared_page_stays_when_one_sequence_lets_go():
    cache = qkv.PagedKVCache(1, 2, 4, 8, page_size=16)
    _, k, v = tokens(1, 30)
    cache.append(k, v)
    cache.reorder([0, 0])
    cache.truncate([10, 30])
    assert cache.table.tolist() == [[0, -1], [0, 1]] and cache.free_pages == 2
    fresh = [x[:, :, :1].expand(2, -1, -1, -1) + 5 for x in (k, v)]
    cache.append(*fresh, lengths=[1, 0])  # in the middle of what the other one holds
    assert torch.equal(cache.keys[1], k[0]) and torch.equal(cache.keys[0, :, 10], fresh[0][0, :, 0])


@pytest.mark.parametrize("size", [16, 48, 64, 128])
def test_every_size_of_page(size, monkeypatch):
    q, k, v = tokens(2, 300)
    whole = qkv.attention(q, k, v, pattern=CAUSAL)
    with poisoned(monkeypatch):
        cache = qkv.PagedKVCache(2, 2, 40, 8, page_size=size)
        cuts = [0, 100, 101, 102, 180, 181, 300]
        found = [cache.attend(*(x[:, :, a:b] for x in (q, k, v)), pattern=CAUSAL) for a, b in pairwise(cuts)]
    assert torch.allclose(torch.cat(found, 2), whole, atol=1e-5)


def test_the_native_core_reads_pages_in_place_and_nobody_else(monkeypatch):
    cache = qkv.PagedKVCache(1, 2, 4, 8)
    q, k, v = tokens(1, 100)
    cache.append(k, v)
    gathered = []
    real = type(cache)._gathered
    monkeypatch.setattr(type(cache), "_gathered", lambda self, keys: gathered.append(keys) or real(self, keys))
    step = [x[:, :, :1] for x in (q, k, v)]
    for _ in range(3):
        cache.attend(*step, pattern=CAUSAL)
    assert gathered == ([] if Cpu.unavailable is None else [101, 102, 103])
    cache.attend(*step, pattern=CAUSAL, backend="blockwise")
    cache.attend(*step, pattern=CAUSAL, return_aux=qkv.AuxRequest(weights=True))
    cache.attend(step[0].clone().requires_grad_(), *step[1:], pattern=CAUSAL)
    assert gathered[-3:] == [104, 105, 106]


def test_scattered_pages_have_the_bits_of_a_plain_cache():
    """Two sequences that grow in turns: their pages lie mixed up."""
    paged, plain = qkv.PagedKVCache(2, 2, 20, 8), qkv.KVCache(2, 2, 400, 8)
    q, k, v = tokens(2, 300)
    for start in range(0, 300, 50):
        counts = [50, 20] if start % 100 else [10, 50]
        step = [x[:, :, start : start + 50] for x in (q, k, v)]
        found = [cache.attend(*step, pattern=CAUSAL, lengths=counts) for cache in (paged, plain)]
        assert torch.equal(*found)
    one = [x[:, :, :1] for x in (q, k, v)]
    for pattern in (CAUSAL, qkv.window(99), qkv.strided(16), None):
        assert torch.equal(*(cache.attend(*one, pattern=pattern) for cache in (paged, plain)))


def test_memory():
    cache = qkv.PagedKVCache(2, 3, 10, 8, 4, page_size=32, dtype=torch.bfloat16)
    assert cache.nbytes == 10 * 32 * 3 * (8 + 4) * 2 + cache._table.nbytes
