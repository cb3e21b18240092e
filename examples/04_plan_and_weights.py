"""What a call costs before it runs, and where a query looks after it ran."""

import torch

import qkv

# A plan runs nothing: tensors on the meta device have sizes and no memory.
LENGTH = 2**20
tokens = torch.empty(1, 8, LENGTH, 64, device="meta")
pattern = qkv.causal() & (qkv.window(255) | qkv.global_tokens(4))
plan = qkv.plan(tokens, tokens, tokens, pattern=pattern)
print(plan)
dense = qkv.plan(tokens, tokens, tokens, pattern=qkv.causal())
print(f"\ncausal alone would take {dense.flops / plan.flops:.0f} times the arithmetic\n")

# Only the rows that are asked for are built, never the L by S matrix.
torch.manual_seed(0)
query, key, value = (torch.randn(1, 2, 2000, 16) for _ in range(3))
key[:, :, 1900] = 2 * query[:, :, 1999]  # something for the last query to find
request = qkv.AuxRequest(weights=-1, top_k=3, entropy=True, lse=True)
out, aux = qkv.attention(query, key, value, pattern=pattern, return_aux=request)

print("weights of the last row", list(aux.weights.shape), "sum to", round(aux.weights[0, 0].sum().item(), 6))
for head in range(2):
    best = zip(aux.top_k.indices[0, head, -1].tolist(), aux.top_k.values[0, head, -1].tolist(), strict=True)
    print(f"head {head}: the last query looks at", ", ".join(f"{j} ({weight:.1%})" for j, weight in best))
print(f"entropy: {aux.entropy[0, 0, -1]:.2f} nats there, {aux.entropy[0, 0, :-1].mean():.2f} on average")

# The log-sum-exp makes any single weight: exp(score - lse).
score = query[0, 1, -1] @ key[0, 1, 1900] / 4
weight = torch.exp(score - aux.lse[0, 1, -1])
print(f"by hand, head 1 and key 1900: {weight:.1%}")
assert torch.allclose(weight, aux.weights[0, 1, 1900])
