"""Pairs within sequences of different length, and which patterns need not be told of them."""

from __future__ import annotations

import pytest
import torch

import qkv
from qkv.cache.within import looks_back, within


def test_pairs_within_sequences():
    dense = within([3, 0, 5]).to_dense(4, 6, batch=3, query_offset=[1, 0, 2])
    i = torch.tensor([1, 0, 2]).view(3, 1, 1, 1) + torch.arange(4)[:, None]
    length = torch.tensor([3, 0, 5]).view(3, 1, 1, 1)
    assert torch.equal(dense, (i < length) & (torch.arange(6) < length))


BACK = (
    *(
        "causal()",
        "window(5)",
        "sliding_window(3)",
        "strided(4)",
        "fixed(4)",
        "causal() & full()",
        "window(2) | causal()",
    ),
    *("per_head([causal(), window(3)])", "causal() & (prefix(3) | block_local(4))", "causal() - window(3)"),
)
AHEAD = (
    *(
        "full()",
        "window(5, 1)",
        "prefix(3)",
        "causal() | prefix(3)",
        "~window(2)",
        "block_local(4)",
        "global_tokens(2)",
    ),
    *("per_head([causal(), full()])", "window(2) | window(0, 2)"),
)


@pytest.mark.parametrize("text", BACK + AHEAD)
def test_what_looks_back(text):
    """It may fail to see it, but never says so of a pattern that looks ahead."""
    pattern = qkv.parse(text)
    ahead = torch.ones(20, 20, dtype=torch.bool).triu(1) & pattern.to_dense(20, heads=2)
    assert looks_back(pattern.expr) == (text in BACK)
    assert bool(ahead.any()) == (text in AHEAD)
