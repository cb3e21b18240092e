"""Attention over keys in pieces: each gives an output and a log-sum-exp, and `merge` puts them together."""

import torch

import qkv

torch.manual_seed(0)
LENGTH = 600
query, key, value = (torch.randn(1, 4, LENGTH, 32, dtype=torch.float64, requires_grad=True) for _ in range(3))
whole = qkv.attention(query, key, value, pattern=qkv.causal())

# Three pieces of the keys. Seen from a piece that begins at `start`, query 0 stands at -start.
outputs, lses = [], []
for start, stop in ((0, 100), (100, 350), (350, 600)):
    out, aux = qkv.attention(
        query,
        key[:, :, start:stop],
        value[:, :, start:stop],
        pattern=qkv.causal(),
        query_offset=-start,
        return_aux=qkv.AuxRequest(lse=True),
    )
    unseeing = int((aux.lse[0, 0] == -torch.inf).sum())
    print(f"keys {start:>3} to {stop - 1}: {unseeing:>3} queries see none of them")
    outputs.append(out)
    lses.append(aux.lse)

merged, lse = qkv.merge(outputs, lses)
print(f"merged and whole differ by at most {(merged - whole).abs().max():.0e}")
assert torch.allclose(merged, whole)

# Gradients flow through the merge as if it had been one call.
weight = torch.randn_like(whole)
expected = torch.autograd.grad((whole * weight).sum(), (query, key, value))
got = torch.autograd.grad((merged * weight).sum(), (query, key, value))
print(f"their gradients by at most {max((a - b).abs().max() for a, b in zip(got, expected, strict=True)):.0e}")
assert all(torch.allclose(a, b) for a, b in zip(got, expected, strict=True))

# The order of the pieces does not matter: a piece is a pair (output, lse), and merging is associative.
first, first_lse = qkv.merge(outputs[1:], lses[1:])
again, _ = qkv.merge([first, outputs[0]], [first_lse, lses[0]])
print("in another order:", torch.allclose(again, whole))
