"""Texts of different length in one call: laid one after another, without padding."""

import itertools

import torch

import qkv

torch.manual_seed(0)
HEADS, WIDTH = 4, 32
lengths = [12, 700, 1, 0, 260, 45]
cu_seqlens = list(itertools.accumulate(lengths, initial=0))
query, key, value = (torch.randn(sum(lengths), HEADS, WIDTH, requires_grad=True) for _ in range(3))
pattern = qkv.causal() & qkv.window(99)

out = qkv.varlen_attention(query, key, value, cu_seqlens, pattern=pattern)
print(f"{len(lengths)} texts of {min(lengths)} to {max(lengths)} tokens: {list(out.shape)}")

# The same by padding to the longest: as much memory and scores for a text of one token as for the longest.
padded = [
    torch.nn.utils.rnn.pad_sequence(list(x.detach().split(lengths)), batch_first=True).transpose(1, 2)
    for x in (query, key, value)
]
beside = qkv.attention(*padded, pattern=pattern & qkv.key_lengths(lengths))
kept = torch.cat([beside[n, :, :length].transpose(0, 1) for n, length in enumerate(lengths)])
print(f"padding to the longest would take {beside.shape[0] * beside.shape[2] / len(out):.1f} times the rows")
print(f"packed and padded differ by at most {(out - kept).abs().max():.0e}")
assert torch.allclose(out, kept, atol=1e-5)

# A text does not notice what lies beside it, in either direction.
start, stop = cu_seqlens[4:6]
grads = torch.autograd.grad(out[start:stop].sum(), (query, key, value))
outside = [torch.cat([g[:start], g[stop:]]) for g in grads]
print("gradients of text 4 stay in text 4:", not any(bool(g.any()) for g in outside))
assert not any(bool(g.any()) for g in outside)

# Fewer queries than keys: the last three tokens of each text, which see all that came before them.
new = [min(length, 3) for length in lengths]
last = torch.cat([query[end - n : end] for end, n in zip(cu_seqlens[1:], new, strict=True)])
tail = qkv.varlen_attention(last, key, value, [0, *itertools.accumulate(new)], cu_seqlens, pattern=pattern)
same = torch.cat([out[end - n : end] for end, n in zip(cu_seqlens[1:], new, strict=True)])
print(f"their last tokens alone differ by at most {(tail - same).abs().max():.0e}")
assert torch.allclose(tail, same, atol=1e-5)
