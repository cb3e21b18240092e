"""Decoding through every cache equals the whole pass within its bound, for every pattern, and nothing unseen leaks."""

from __future__ import annotations

import os

import pytest

from decoding import CACHES, KINDS, case_of, decode, poisoned

QUIET = pytest.mark.filterwarnings("ignore:.*inverted", "ignore:a rolling cache")


@QUIET
@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("kind", KINDS)
def test_every_pattern(kind, cache, monkeypatch):
    with poisoned(monkeypatch):
        decode(case_of(kind, CACHES.index(cache)), cache, "auto")


@QUIET
@pytest.mark.parametrize("backend", ["blockwise", "reference"])
@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("kind", ["causal", "sinks_and_window", "strided", "per_head", "documents_batch", "inverse"])
def test_other_backends_read_the_same(kind, cache, backend, monkeypatch):
    with poisoned(monkeypatch):
        decode(case_of(kind, 7, 90), cache, backend)


@pytest.mark.long
@QUIET
@pytest.mark.parametrize("chunk", range(4))
@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("kind", KINDS)
def test_many_cases(kind, cache, chunk, monkeypatch):
    first = int(os.environ["QKV_SWEEP_SEED"]) + 10 * chunk
    for number in range(first, first + 10):
        with poisoned(monkeypatch):
            decode(case_of(kind, number), cache, ("auto", "auto", "auto", "blockwise")[number % 4])
