"""GPT learns to copy, with three patterns of attention that differ by one word of its config, and decodes what it read.

A text of 16 random tokens is followed by itself, so that each token of the copy stands 15 places behind the one that
predicts it. A strided pattern reaches it over a few keys, a window of 5 does not.
"""

import torch

from qkv.models.gpt import GPT, GPTConfig

WORDS, LENGTH, STEPS = 12, 16, 100


def texts(count, generator):
    """Random texts and their copies, (count, 2 · LENGTH)."""
    return torch.randint(WORDS, (count, LENGTH), generator=generator).repeat(1, 2)


def trained(pattern):
    torch.manual_seed(0)
    model = GPT(
        GPTConfig(
            vocabulary=WORDS, positions=2 * LENGTH, layers=1, heads=4, width=64, feedforward=128, pattern=pattern,
            embedding_dropout=0.0, attention_dropout=0.0, residual_dropout=0.0,
        )
    )  # fmt: skip
    generator = torch.Generator().manual_seed(1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(STEPS):
        ids = texts(32, generator)
        labels = ids.clone()
        labels[:, :LENGTH] = -100  # the text itself is random
        optimizer.zero_grad()
        model(ids, labels=labels).loss.backward()
        optimizer.step()
    return model.eval()


for pattern in ("causal()", "strided(5)", "sliding_window(5)"):
    model = trained(pattern)
    ids = texts(50, torch.Generator().manual_seed(2))
    written = model.generate(ids[:, :LENGTH], LENGTH)  # token by token, with the cache that the pattern allows
    right = (written == ids)[:, LENGTH:].float().mean()
    print(f"{pattern:<18} copies {right:>4.0%} of the tokens; a guess would copy {1 / WORDS:.0%}")
