"""T5 learns to write words backwards: it reads a source both ways, and writes the target letter by letter.

Words differ in length, so both are padded; each row learns and answers as it would alone. It knows distances, no
positions: that the letter before `e` is next, it finds out by a table of 16 distances and attention to the source.
"""

import torch

from qkv.models.t5 import T5, T5Config

LETTERS = " .adeilnoprstu"  # the first one pads and begins, the second ends
STEPS, LONGEST = 300, 6
NONE = dict.fromkeys(("embedding_dropout", "attention_dropout", "feedforward_dropout", "residual_dropout"), 0.0)


def numbers(words):
    """Words as padded numbers (B, L), and which of them are letters."""
    longest = max(map(len, words))
    ids = torch.tensor([[LETTERS.index(letter) for letter in word.ljust(longest)] for word in words])
    return ids, ids != 0


def drawn(count, generator):
    """Words of 3 to 6 letters, none of them twice in a word."""
    lengths = torch.randint(3, LONGEST + 1, (count,), generator=generator).tolist()
    orders = [torch.randperm(len(LETTERS) - 2, generator=generator)[:length].tolist() for length in lengths]
    return ["".join(LETTERS[2 + place] for place in order) for order in orders]


def backwards(model, words):
    ids, keep = numbers(words)
    rows = model.generate(ids, LONGEST + 1, attention_mask=keep).tolist()
    return ["".join(LETTERS[number] for number in row).split(".")[0] for row in rows]


torch.manual_seed(0)
sizes = {"heads": 4, "head_dim": 16, "width": 64, "feedforward": 64, "buckets": 16, "max_distance": 16}
model = T5(T5Config(vocabulary=len(LETTERS), layers=1, **sizes, **NONE))
tables = [model.encoder.relative.weight, model.decoder.relative.weight]  # they begin near 0 and have far to go
others = [weight for weight in model.parameters() if all(weight is not table for table in tables)]
groups = [{"params": others, "lr": 3e-3}, {"params": tables, "lr": 0.1}]
optimizer = torch.optim.AdamW(groups, weight_decay=0.0)
schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, [group["lr"] for group in groups], STEPS)
generator = torch.Generator().manual_seed(1)
for _ in range(STEPS):
    words = drawn(32, generator)
    ids, keep = numbers(words)
    target, counts = numbers([word[::-1] + "." for word in words])
    optimizer.zero_grad()
    model(ids, keep, labels=target.masked_fill(~counts, -100)).loss.backward()
    optimizer.step()
    schedule.step()

words = drawn(100, torch.Generator().manual_seed(2))
right = sum(written == word[::-1] for word, written in zip(words, backwards(model, words), strict=True))
print(f"{right} of 100 new words are written backwards; planet: {backwards(model, ['planet'])[0]}")
