"""One call: the same numbers as torch, then grouped heads, the other layout, and decoding token by token."""

import torch
import torch.nn.functional as F

import qkv

torch.manual_seed(0)
query, key, value = (torch.randn(2, 8, 300, 64) for _ in range(3))  # (B, H, L, D)


def compare(what, ours, expected):
    print(f"{what:<34} {list(ours.shape)!s:<18} differs by at most {(ours - expected).abs().max():.0e}")
    assert torch.allclose(ours, expected, atol=1e-5)


compare("every key", qkv.attention(query, key, value), F.scaled_dot_product_attention(query, key, value))

past = qkv.attention(query, key, value, pattern=qkv.causal())
compare("the past", past, F.scaled_dot_product_attention(query, key, value, is_causal=True))

# Two key heads for eight query heads: query head h reads key head h // 4, and nothing is copied.
few_keys, few_values = key[:, :2], value[:, :2]
grouped = qkv.attention(query, few_keys, few_values, pattern=qkv.causal())
spelt_out = qkv.attention(
    query, few_keys.repeat_interleave(4, dim=1), few_values.repeat_interleave(4, dim=1), pattern=qkv.causal()
)
compare("grouped heads", grouped, spelt_out)

# (B, L, H, D), as a linear layer leaves it: named, not guessed.
tokens_first = [tensor.transpose(1, 2) for tensor in (query, key, value)]
other_layout = qkv.attention(*tokens_first, pattern=qkv.causal(), layout="BLHD")
compare("tokens before heads", other_layout, past.transpose(1, 2))

# Decoding: one query stands at the last of the keys so far, with the same pattern.
steps = [
    qkv.attention(query[:, :, n : n + 1], key[:, :, : n + 1], value[:, :, : n + 1], pattern=qkv.causal())
    for n in range(290, 300)
]
compare("ten decoding steps", torch.cat(steps, dim=2), past[:, :, 290:])

# Another scale, a cap on the scores, and a sink: a logit a head that takes part in the softmax without a value.
capped = qkv.attention(query, key, value, scale=0.2, softcap=5.0, sinks=torch.ones(8))
scores = 5 * torch.tanh(0.2 * query @ key.mT / 5)
weights = torch.cat([scores, torch.ones(2, 8, 300, 1)], dim=-1).softmax(dim=-1)[..., :-1]
compare("scale, softcap and sinks", capped, weights @ value)
