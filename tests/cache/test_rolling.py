"""A rolling cache keeps what its pattern may still see, in memory that does not grow, and says when that is all."""

from __future__ import annotations

import warnings
from itertools import pairwise

import pytest
import torch

import qkv
from decoding import poisoned
from qkv.cache import pool
from qkv.errors import ValueOutOfRange

WINDOW = qkv.sliding_window(100)
REACHES = {  # patterns that let go, and how many keys each may still see
    "sliding_window(100)": 100,
    "causal() & (window(50) | global_tokens(4))": 55,
    "causal() & (window(50) | prefix(70))": 121,
    "dilated(10, dilation=7)": 71,
    "block_local(96)": 96,
    "per_head([window(10), window(120), window(10), causal() & (window(3) | global_tokens([5, 300]))])": 123,
    "longformer(64, [0])": 33,
}


def tokens(n, seed=0, batch=1):
    generator = torch.Generator().manual_seed(seed)
    shapes = (batch, 4, n, 8), (batch, 2, n, 8), (batch, 2, n, 8)
    return [torch.randn(*shape, generator=generator) for shape in shapes]


@pytest.mark.parametrize("text", REACHES)
def test_memory_follows_the_reach_over_10_000_tokens(text, monkeypatch):
    """Decoding by single tokens and by chunks; each step is what attention over the whole sequence gives."""
    pattern, reach = qkv.parse(text), REACHES[text]
    q, k, v = tokens(10_000)
    with poisoned(monkeypatch):
        cache, most, at = qkv.RollingKVCache.for_pattern(pattern, 1, 2, 8), 0, 0
        sizes = [3000, 1, 1, 63, 64, 65, *[1] * 150, *[400] * 16, *[1] * 40]
        for n in sizes:
            found = cache.attend(*(x[:, :, at : at + n] for x in (q, k, v)))
            at += n
            want = qkv.attention(q[:, :, at - n : at], k[:, :, :at], v[:, :, :at], pattern=pattern)
            assert torch.allclose(found, want, atol=1e-5), (at, n)
            most = max(most, cache.nbytes) if n == 1 else most
    pages = -(-reach // 64) + 3  # one that is not yet full, and those that the window has only half left
    page = 64 * 2 * (8 + 8) * 4
    table = 4 * 2 * -(-at // 64)  # twice as wide as needed at most
    assert most <= (2 * pages + 4 + pages // 8) * page + table
    assert int((cache._table >= 0).sum()) <= pages
    assert cache.keys.shape[2] <= 64 * pages and cache.length == at


def test_kept_keys_stand_where_they_say():
    cache = qkv.RollingKVCache.for_pattern(qkv.causal() & (qkv.window(20) | qkv.global_tokens(3)), 2, 2, 8)
    _, k, v = tokens(500, batch=2)
    cache.append(k, v, lengths=[500, 37])
    positions = cache.key_positions
    assert set(positions[0].tolist()) == {*range(64), *range(448, 500)}
    assert positions[1].tolist() == [*range(37), *[-1] * (positions.shape[1] - 37)]
    for b in range(2):
        real = positions[b] >= 0
        assert torch.equal(cache.keys[b, :, real], k[b, :, positions[b][real]])
        assert torch.equal(cache.values[b, :, real], v[b, :, positions[b][real]])
    assert cache.table.shape == (2, 8) and (cache.table[0, 1:7] == -1).all()


def test_a_long_prompt_leaves_no_memory_behind():
    page = 64 * 2 * (8 + 8) * 4
    cache = qkv.RollingKVCache.for_pattern(WINDOW, 1, 2, 8)
    cache.attend(*tokens(5000))
    assert cache.nbytes - cache._table.nbytes <= 8 * page
    cache.attend(*tokens(3000))  # all of it is in pages for the time of the call
    assert cache.nbytes - cache._table.nbytes <= 8 * page
    cache.append(*tokens(3000)[1:])
    assert cache.nbytes - cache._table.nbytes <= 8 * page


def test_a_long_append_takes_no_more_than_it_leaves_and_a_piece(monkeypatch):
    sizes = []
    real = pool.Pool.__init__
    monkeypatch.setattr(pool.Pool, "__init__", lambda self, *given: sizes.append(given[1]) or real(self, *given))
    cache = qkv.RollingKVCache.for_pattern(WINDOW, 1, 2, 8)
    cache.append(*tokens(5000)[1:])
    cache.attend(*tokens(100))
    assert max(sizes) <= 24


@pytest.mark.parametrize("text", [*REACHES, "causal() & (dilated(5, dilation=64) | prefix(130))"])
@pytest.mark.parametrize("start", [0, 100, 1000])
def test_a_long_append_keeps_what_short_ones_keep(text, start):
    """Also nothing: 1,920 and 1,536 are multiples of 64 and 96, where a page and a block begin."""
    pattern, counts = qkv.parse(text), [1920 - start, 1536 - start]
    long, short = (qkv.RollingKVCache.for_pattern(pattern, 2, 2, 8) for _ in range(2))
    _, k, v = tokens(1920, batch=2)
    for cache in (long, short):
        cache.append(k[:, :, :start], v[:, :, :start])
    chunk = [x[:, :, start:] for x in (k, v)]
    long.append(*chunk, lengths=counts)
    for at in range(0, 1920 - start, 50):
        part = [x[:, :, at : at + 50] for x in chunk]
        short.append(*part, lengths=[min(max(n - at, 0), part[0].shape[2]) for n in counts])
    assert long.lengths == short.lengths and long.key_positions.tolist() == short.key_positions.tolist()
    real = (long.key_positions >= 0)[:, None, :, None]
    for a, b in ((long.keys, short.keys), (long.values, short.values)):
        assert torch.equal(a * real, b * real)


def test_what_other_backends_get_is_0_where_keys_were_dropped():
    cache = qkv.RollingKVCache.for_pattern(WINDOW, 1, 2, 8)
    _, k, v = tokens(300)
    cache.append(k, v)
    keys, values = cache._gathered(300)
    kept = cache.key_positions[0]
    assert torch.equal(keys[:, :, kept], k[:, :, kept]) and torch.equal(values[:, :, kept], v[:, :, kept])
    assert keys.shape == k.shape and not keys[:, :, : int(kept[0])].any() and not values[:, :, : int(kept[0])].any()


def test_the_bits_are_those_of_a_plain_cache():
    rolling, plain = qkv.RollingKVCache.for_pattern(WINDOW, 1, 2, 8), qkv.KVCache(1, 2, 600, 8)
    q, k, v = tokens(600)
    for a, b in pairwise([0, 250, 251, 252, 300, 301, 400, 405, 600]):
        step = [x[:, :, a:b] for x in (q, k, v)]
        assert torch.equal(rolling.attend(*step), plain.attend(*step, pattern=WINDOW)), (a, b)


def test_sequences_of_different_length_let_go_each_for_itself():
    cache = qkv.RollingKVCache.for_pattern(WINDOW, 2, 2, 8)
    _, k, v = tokens(400, batch=2)
    cache.append(k, v, lengths=[400, 120])
    assert (cache.table >= 0).tolist() == [[False] * 4 + [True] * 3, [True] * 2 + [False] * 5]


def test_what_was_dropped_is_not_read():
    cache = qkv.RollingKVCache.for_pattern(WINDOW, 1, 2, 8)
    q, k, v = tokens(301)
    cache.append(k[:, :, :300], v[:, :, :300])
    before = cache.lengths, cache.nbytes
    last = [x[:, :, 300:] for x in (q, k, v)]
    for pattern in (qkv.causal(), qkv.window(150), qkv.strided(90), qkv.window(3) | qkv.global_tokens(1)):
        for _ in range(2):
            with pytest.raises(
                ValueOutOfRange, match="must not see keys that were dropped, as sliding_window"
            ) as caught:
                cache.attend(*last, pattern=pattern)
            assert str(caught.value).count("; ") == 2
    assert (cache.lengths, cache.nbytes) == before
    for pattern in (qkv.window(20), qkv.window(70) & qkv.strided(3), WINDOW, qkv.parse(str(WINDOW))):
        found = cache.attend(*last, pattern=pattern)
        assert torch.allclose(found, qkv.attention(last[0], k, v, pattern=pattern), atol=1e-5)
        cache.truncate(300)


def test_truncate_goes_back_as_far_as_the_keys():
    cache = qkv.RollingKVCache.for_pattern(WINDOW, 1, 2, 8)
    q, k, v = tokens(400)
    cache.attend(*(x[:, :, :300] for x in (q, k, v)))
    with pytest.raises(ValueOutOfRange, match=r"must not be truncated .* at 200 the keys from 64 on") as caught:
        cache.truncate(200)
    assert str(caught.value).count("; ") == 2 and cache.length == 300
    cache.truncate(293)
    found = cache.attend(*(x[:, :, 293:400] for x in (q, k, v)))
    assert torch.allclose(found, qkv.attention(q, k, v, pattern=WINDOW)[:, :, 293:], atol=1e-5)
    cache.truncate([400])
    cache.truncate(400 - 400 % 64)


def test_beams_share_and_let_go():
    cache = qkv.RollingKVCache.for_pattern(WINDOW, 1, 2, 8)
    _, k, v = tokens(300)
    cache.append(k, v)
    cache.reorder([0, 0, 0])
    held = cache.nbytes
    beams = tokens(200, seed=1, batch=3)
    for a, b in ((0, 1), (1, 2), (2, 200)):
        found = cache.attend(*(x[:, :, a:b] for x in beams))
        for beam in range(3):
            keys, values = (
                torch.cat([x, y[beam : beam + 1, :, :b]], 2) for x, y in zip((k, v), beams[1:], strict=True)
            )
            want = qkv.attention(beams[0][beam : beam + 1, :, a:b], keys, values, pattern=WINDOW)
            assert torch.allclose(found[beam : beam + 1], want, atol=1e-5)
    cache.reorder([1])
    for _ in range(70):
        cache.append(k[:, :, :1], v[:, :, :1])
    assert cache.nbytes <= held + cache._table.nbytes + 16 * 64 * 2 * 16 * 4


@pytest.mark.parametrize("text", ["full()", "causal()", "strided(8)", "fixed(64)", "random_blocks(2, 16, 0)"])
def test_a_pattern_that_lets_nothing_go_warns(text):
    with pytest.warns(UserWarning, match="a rolling cache should have keys to let go; after 65,536 tokens") as seen:
        cache = qkv.RollingKVCache.for_pattern(qkv.parse(text), 1, 2, 8)
    assert seen[0].filename == __file__
    assert cache.pattern == qkv.parse(text)


@pytest.mark.parametrize("text", REACHES)
def test_a_pattern_that_lets_go_does_not_warn(text):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        qkv.RollingKVCache.for_pattern(qkv.parse(text), 1, 2, 8)


def test_a_window_longer_than_all_sequences_warns_where_that_is_said():
    pattern = qkv.sliding_window(1000)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        qkv.RollingKVCache.for_pattern(pattern, 1, 2, 8)
    with pytest.warns(UserWarning, match="after 900 tokens"):
        qkv.RollingKVCache.for_pattern(pattern, 1, 2, 8, max_length=900)
