"""A small BERT learns a language of five-word sentences, hides a word from itself, and fills it in."""

import torch

from qkv.models import BertConfig, BertForMaskedLM

torch.manual_seed(0)
WORDS = ["[PAD]", "[MASK]", "the", "a", "cat", "dog", "bird", "meows", "barks", "sings", "at", "night", "dawn", "home"]
VOICE = {"cat": "meows", "dog": "barks", "bird": "sings"}
NUMBER = {word: n for n, word in enumerate(WORDS)}
MASK = NUMBER["[MASK]"]


def sentences(count):
    """(count, 5): an article, an animal, its voice, "at", a time or place."""
    rows = []
    for article, animal, when in torch.stack([torch.randint(n, (count,)) for n in (2, 3, 3)], 1).tolist():
        name = list(VOICE)[animal]
        rows.append([["the", "a"][article], name, VOICE[name], "at", ["night", "dawn", "home"][when]])
    return torch.tensor([[NUMBER[word] for word in row] for row in rows])


def words(ids):
    return " ".join(WORDS[n] for n in ids.tolist())


model = BertForMaskedLM(BertConfig(vocabulary=len(WORDS), positions=5, layers=2, heads=4, width=32, feedforward=64))
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
for _ in range(150):
    ids = sentences(64)
    hidden = torch.rand(ids.shape).argsort(1) == 0  # one word of each sentence
    loss = model(ids.masked_fill(hidden, MASK), labels=ids.masked_fill(~hidden, -100)).loss
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()

model.eval()
asked = torch.tensor(
    [[NUMBER[word] for word in row.split()] for row in ("the bird [MASK] at dawn", "a [MASK] barks at home")]
)
with torch.no_grad():
    filled = torch.where(asked == MASK, model(asked).logits.argmax(-1), asked)
print(" | ".join(f"{words(before)} -> {words(after)}" for before, after in zip(asked, filled, strict=True)))
