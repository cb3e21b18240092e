"""Attention by a state of fixed size: every form of one computation, and what decoding costs."""

import torch

import qkv

torch.manual_seed(0)
HEADS, LENGTH, WIDTH = 4, 600, 32
query, key, value = torch.randn(3, 1, HEADS, LENGTH, WIDTH).unbind()
key = qkv.l2_norm(key)  # as the delta rules need
gate = -0.2 * torch.rand(1, HEADS, LENGTH)  # the log of what the state keeps at each token
beta = torch.rand(1, HEADS, LENGTH)  # how much of what the key names is replaced
tokens = (query, key, value, gate, beta)

# Whole, in segments that hand on the state, and token by token.
whole = qkv.gated_delta_rule(*tokens)

parts, state = [], None
for part in zip(*(x.split(250, dim=2) for x in tokens), strict=True):
    out, state = qkv.gated_delta_rule(*part, initial_state=state, return_state=True)
    parts.append(out)
segments = torch.cat(parts, dim=2)

memory = qkv.RecurrentState(batch=1, heads=HEADS, key_dim=WIDTH, value_dim=WIDTH, rule="gated_delta")
steps = torch.stack([memory.step(*(x[:, :, t] for x in tokens)) for t in range(LENGTH)], dim=2)
for name, other in (("segments", segments), ("steps", steps)):
    print(f"whole and {name} differ by at most {(whole - other).abs().max():.0e}")
    assert torch.allclose(whole, other, atol=1e-5)
cache = qkv.KVCache(batch=1, heads=HEADS, max_length=LENGTH, head_dim=WIDTH)
print(f"memory after {LENGTH} tokens: {memory.nbytes:,} bytes of state, {cache.nbytes:,} bytes of keys and values")

# A guess of four tokens of which only the first two were right.
guess = [torch.randn(1, HEADS, 4, *x.shape[3:]).sigmoid() for x in tokens]
guess[3] = -guess[3]
short = memory.fork()
memory.step(*guess, draft=True)
memory.accept(2)
short.step(*(x[:, :, :2] for x in guess))
print("after a draft of 4, of which 2 are kept, bit for bit as without it:", torch.equal(memory.state, short.state))
assert torch.equal(memory.state, short.state)

# Linear attention is exactly what its feature map says; how near that is to softmax is another question.
softmax = qkv.attention(query, 5 * key, value, pattern=qkv.causal())
for name in ("elu", "favor", "taylor"):
    out = qkv.linear_attention(query, 5 * key, value, feature_map=name)
    print(f"{name:6} is {(out - softmax).norm() / softmax.norm():.2f} away from softmax")
