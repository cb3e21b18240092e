"""Philox4x32-10 against the published answers of Random123, in NumPy, in torch, and against the oracle's own."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import oracles
from qkv.philox import philox

# The known-answer file of Random123 (kat_vectors, philox4x32 with 10 rounds): counter, key, result.
KNOWN = [
    (
        (0x00000000, 0x00000000, 0x00000000, 0x00000000),
        (0x00000000, 0x00000000),
        (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8),
    ),
    (
        (0xFFFFFFFF, 0xFFFFFFFF, 0xFFFFFFFF, 0xFFFFFFFF),
        (0xFFFFFFFF, 0xFFFFFFFF),
        (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD),
    ),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


def in_numpy(seed: int, *counters: object) -> list[np.ndarray]:
    return list(philox(seed, *(np.atleast_1d(np.asarray(c, dtype=np.int64)) for c in counters)))


def in_torch(seed: int, *counters: object, device: str = "cpu") -> list[np.ndarray]:
    arrays = (torch.atleast_1d(torch.as_tensor(np.asarray(c, dtype=np.int64))).to(device) for c in counters)
    return [word.cpu().numpy() for word in philox(seed, *arrays)]


@pytest.mark.parametrize("form", [in_numpy, in_torch])
@pytest.mark.parametrize("counter, key, want", KNOWN)
def test_published_answers(form, counter, key, want):
    seed = key[0] | key[1] << 32
    words = form(seed, *counter)
    assert tuple(int(word[0]) for word in words) == want
    assert oracles.philox(counter, seed) == want


def test_numpy_torch_and_the_oracle_agree_everywhere(device):
    draw = np.random.default_rng(0)
    counters = [draw.integers(0, 1 << 32, 500) for _ in range(4)]
    for seed in (0, 1, 0xFFFFFFFF, 1 << 32, (1 << 64) - 1, int(draw.integers(0, 1 << 62))):
        mine, theirs = in_numpy(seed, *counters), in_torch(seed, *counters, device=str(device))
        want = oracles.philox([c.astype(np.uint64) for c in counters], seed)
        for a, b, c in zip(mine, theirs, want, strict=True):
            assert a.dtype == b.dtype == np.int64
            np.testing.assert_array_equal(a, b)
            np.testing.assert_array_equal(a, c.astype(np.int64))
            assert a.min() >= 0 and a.max() < 1 << 32


@pytest.mark.parametrize("form", [in_numpy, in_torch])
def test_counters_are_taken_modulo_two_to_the_32(form):
    """Negative positions and those beyond 2^32 wrap, as the dropout rule says."""
    at = form(7, [-1, -5], [1 << 32, (1 << 40) + 3], [0, -(1 << 33)], [5, 6])
    wrapped = form(7, [0xFFFFFFFF, 0xFFFFFFFB], [0, 3], [0, 0], [5, 6])
    for a, b in zip(at, wrapped, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("form", [in_numpy, in_torch])
def test_counters_broadcast(form):
    i, j = np.arange(3)[:, None], np.arange(4)[None, :]
    for word, flat in zip(form(9, j, i, [0], [2]), form(9, *np.broadcast_arrays(j, i, 0, 2)), strict=True):
        assert word.shape == (3, 4)
        np.testing.assert_array_equal(word, flat)


def test_neither_counter_nor_key_are_changed():
    counter = np.array([-3, 1 << 35])
    before = counter.copy()
    philox(3, counter, counter, counter, counter)
    np.testing.assert_array_equal(counter, before)


def test_both_halves_of_the_seed_matter():
    place = [np.arange(8)] * 4
    words = {seed: in_numpy(seed, *place)[0].tobytes() for seed in (0, 1, 1 << 31, 1 << 32, 1 << 63)}
    assert len(set(words.values())) == len(words)


def test_words_are_evenly_spread():
    """Each of the 128 bits is set half the time over 20,000 counters, within five deviations."""
    for word in in_numpy(123, np.arange(20_000), [0], [0], [0]):
        share = (word[:, None] >> np.arange(32) & 1).mean(axis=0)
        assert np.abs(share - 0.5).max() < 5 * 0.5 / 20_000**0.5
