"""A hybrid, three gated delta nets to one softmax layer, learns to recall what it read, then decodes with its state.

A line of text is pairs of a key and a value, then a key again; the next word is that key's value.
"""

import torch

from qkv.models import Hybrid, HybridConfig

torch.manual_seed(0)
WORDS, PAIRS = 10, 3


def lines(count):
    """Lines (count, 2 PAIRS + 2); the last word is the value of the key before it."""
    keys = torch.rand(count, WORDS // 2).argsort(dim=1)[:, :PAIRS]
    values = torch.randint(WORDS // 2, WORDS, (count, PAIRS))
    asked = torch.randint(PAIRS, (count, 1))
    pairs = torch.stack([keys, values], dim=2).flatten(1)
    return torch.cat([pairs, keys.gather(1, asked), values.gather(1, asked)], dim=1)


model = Hybrid(HybridConfig(vocabulary=WORDS, layers=4, heads=2, width=32, feedforward=64))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
for _ in range(250):
    ids = lines(64)
    labels = torch.full_like(ids, -100)
    labels[:, -1] = ids[:, -1]  # what cannot be known is not asked
    loss = model(ids, labels=labels).loss
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()

model.eval()
ids = lines(500)
said = model.generate(ids[:, :-1], 1)[:, -1]
right = (said == ids[:, -1]).float().mean()


def held(tokens):
    """Bytes of what the linear layers and the softmax layer remember of so many tokens."""
    state = model.initial_state(1, tokens)
    with torch.no_grad():
        model(torch.randint(WORDS, (1, tokens)), state=state)
    return sum(layer.nbytes for layer in state.layers[:3]), state.layers[3].nbytes


(linear, softmax), (linear_later, softmax_later) = held(8), held(800)
print(
    f"{right:.0%} of the lines are answered; after 8 and 800 tokens the linear layers hold {linear} and {linear_later} "
    f"bytes, the softmax layer {softmax} and {softmax_later}"
)
