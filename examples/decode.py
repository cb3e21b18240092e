"""Greedy decoding of a toy model with each cache: the same tokens as without one, and the memory that each holds."""

import torch
from torch.nn.functional import one_hot

import qkv

torch.manual_seed(0)
HEADS, GROUPS, WIDTH, WORDS = 8, 2, 32, 50
embed, ahead = torch.randn(WORDS, HEADS * WIDTH), torch.randn(HEADS * WIDTH, WORDS) / 8
to_key, to_value = torch.randn(2, HEADS * WIDTH, GROUPS * WIDTH) / 16
pattern = qkv.causal() & (qkv.window(99) | qkv.global_tokens(2))


def project(tokens):
    """Queries, keys and values (B, heads, n, D) of tokens (B, n)."""
    x = embed[tokens]
    split = [(x, HEADS), (x @ to_key, GROUPS), (x @ to_value, GROUPS)]
    return [part.unflatten(-1, (heads, WIDTH)).transpose(1, 2) for part, heads in split]


def best(attended):
    """The most likely next token (B, 1) after the last of the rows (B, H, n, D)."""
    return (attended[:, :, -1].flatten(1) @ ahead).argmax(dim=-1, keepdim=True)


def greedy(prompt, count, attend):
    tokens = torch.cat([prompt, best(attend(*project(prompt)))], dim=1)
    for _ in range(count - 1):
        tokens = torch.cat([tokens, best(attend(*project(tokens[:, -1:])))], dim=1)
    return tokens


def without_cache(prompt, count):
    tokens = prompt
    for _ in range(count):
        tokens = torch.cat([tokens, best(qkv.attention(*project(tokens), pattern=pattern))], dim=1)
    return tokens


prompt = torch.randint(WORDS, (2, 40))
expected = without_cache(prompt, 300)
assert one_hot(expected[:, 40:], WORDS).sum(dim=(0, 1)).gt(0).sum() > 3, "the toy says more than one word"

for cache in (
    qkv.KVCache(2, GROUPS, 1024, WIDTH),
    qkv.PagedKVCache(2, GROUPS, 12, WIDTH),
    qkv.RollingKVCache.for_pattern(pattern, 2, GROUPS, WIDTH),
):
    attend = cache.attend
    tokens = greedy(prompt, 300, lambda q, k, v, attend=attend: attend(q, k, v, pattern=pattern))
    agree = (tokens == expected).float().mean()
    print(f"{type(cache).__name__:<15} {agree:>4.0%} the same tokens, length {cache.length}, {cache.nbytes:>7,} bytes")
    assert agree == 1
