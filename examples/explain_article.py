"""The worked example by hand, by `qkv.explain`, and by PyTorch: three ways to the same numbers."""

import math

import torch
import torch.nn.functional as F

import qkv

query = torch.tensor([[1.0, 0.0]])
key = torch.tensor([[1.0, 2.0], [0.0, 1.0], [1.0, 0.0], [2.0, 1.0], [0.0, 2.0], [1.0, 1.0]])
value = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 0.0], [0.0, 1.0], [1.0, 0.0], [0.0, 1.0]])

# By hand: one score is a dot product, a weight is its share of the sum of exponentials.
scores = [sum(a * b for a, b in zip(query[0].tolist(), row, strict=True)) for row in key.tolist()]
exponentials = [math.exp(score / math.sqrt(2)) for score in scores]
weights = [e / sum(exponentials) for e in exponentials]

# By qkv: the same steps, each with its numbers.
explanation = qkv.explain(query, key, value)
print(explanation)

assert explanation.steps["scores"].value.flatten().tolist() == scores == [1, 0, 1, 2, 0, 1]
by_hand = torch.tensor(weights, dtype=torch.float64)
assert torch.allclose(explanation.steps["softmax"].value.flatten(), by_hand)

# By PyTorch, in float32.
expected = F.scaled_dot_product_attention(query[None], key[None], value[None])
assert torch.allclose(explanation.steps["output"].value[0].float(), expected)
assert explanation.agrees
