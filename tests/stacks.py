"""What tests of encoders and decoders share: sizes, padding, drawn numbers, and comparing gradients with torch's."""

from __future__ import annotations

import re

import torch

DIM, HEADS, HIDDEN, LENGTH = 16, 4, 24, 9
BOUND = 1e-12
KEEP = torch.tensor(
    [
        [0, 0, 0, 1, 1, 1, 1, 1, 1],  # padding on the left
        [1, 1, 1, 1, 1, 0, 0, 0, 0],  # on the right
        [0, 1, 1, 0, 1, 0, 0, 1, 1],  # holes
        [1, 1, 1, 1, 1, 1, 1, 1, 1],
        [0, 0, 0, 0, 1, 0, 0, 0, 0],  # one token
    ]
)


def drawn(*sizes, seed=1):
    return torch.randn(*sizes, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def made(kind, *sizes, seed=0, **options):
    torch.manual_seed(seed)
    return kind(*sizes, **options).double()


def close(got, want, bound=BOUND):
    worst = (got - want).abs().max().item()
    assert worst <= bound * max(1.0, want.abs().max().item()), worst


def gradients_agree(ours, torchs, names):
    """Every gradient of torch's, whose packed in_proj is ours of q, k and v one after another."""
    grads = {name: p.grad for name, p in ours.named_parameters()}
    for theirs, p in torchs.named_parameters():
        name = theirs
        for part, own in names.items():
            name = re.sub(rf"(^|\.){part}\.", rf"\1{own}.", name, count=1)
        if "in_proj" in name:
            kind = name.rpartition("_")[2]
            prefix = name.rpartition("in_proj")[0]
            got = torch.cat([grads.pop(f"{prefix}{letter}_proj.{kind}") for letter in "qkv"])
        else:
            got = grads.pop(name.replace("out_proj", "o_proj"))
        close(got, p.grad)
    assert not grads
