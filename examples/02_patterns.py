"""Patterns: pictures, algebra, text, and what a call computes for them."""

import torch

import qkv
from qkv import causal, global_tokens, window

# Longformer-like, but causal: the last four tokens, and the first one for all.
pattern = causal() & (window(3) | global_tokens(1))
print(pattern)
print(pattern.show(10))

# The text is the constructor; equality is by meaning, not by writing.
assert qkv.parse(str(pattern)) == pattern
assert causal() & window(3) | causal() & global_tokens(1) == pattern
print("\nlast query of 10, alone:", pattern.show(1, 10))

# Two heads that look at different things, on two texts packed into one row.
texts = qkv.documents([0] * 6 + [1] * 4)
heads = qkv.per_head([causal(), qkv.strided(3)]) & texts
print("\nhead 0 of", heads)
print(heads.show(10))

# What a function says is a pattern too, asked tile by tile.
same_parity = qkv.where(lambda _b, _h, i, j: (i - j) % 2 == 0)
assert (same_parity & window(4)).equivalent(qkv.dilated(2, dilation=2), 100)

print(f"\n{'for 4,096 tokens':<42} {'keys a query':>12} {'computed':>9}")
for text in (
    "causal()",
    "sliding_window(256)",
    "causal() & (window(255) | global_tokens(4))",
    "strided(64)",
    "longformer(256, 4)",
    "bigbird(3, 64, 3, seed=0)",
):
    plan = qkv.parse(text).plan(4096)
    print(f"{text:<42} {plan.pairs / 4096:>12.0f} {plan.tiles * 64 * 64 / 4096:>9.0f}")

# All of them are one argument of the same call.
q, k, v = (torch.randn(1, 2, 10, 16) for _ in range(3))
out = qkv.attention(q, k, v, pattern=heads)
dense = qkv.attention(q, k, v, pattern=qkv.mask(heads.to_dense(10, heads=2)))
print("\nrule and dense mask agree:", torch.allclose(out, dense, atol=1e-6))
