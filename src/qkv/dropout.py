"""The one rule that says which attention weights are dropped, the same on every backend: see docs/dropout.md.

A weight at batch b, head h, query position i and key position j is dropped when a 16-bit number is below
t = floor(65536 p + 1/2). The number is one of the eight halves, low half first, of the four words that Philox4x32-10
gives for the counter (j // 8, i, h, b) under the call's 64-bit seed: number j mod 8.
"""

from __future__ import annotations

import torch
from torch import Tensor

from qkv.errors import UnsupportedError, message
from qkv.philox import philox

LEVELS = 65536
GROUP = 8  # keys that share one counter


def threshold(p: float) -> int:
    """How many of the 65,536 equally likely 16-bit numbers drop a weight."""
    return int(LEVELS * p + 0.5)


def keep_scale(p: float) -> float:
    """What a kept weight is multiplied by: the reciprocal of the exact share that is kept."""
    return LEVELS / (LEVELS - threshold(p))


def draw_seed(generator: torch.Generator | None) -> int:
    """A 64-bit seed from torch's generator, so that `torch.manual_seed` reproduces a run."""
    device = "cpu" if generator is None else generator.device
    words = torch.randint(0, 1 << 32, (2,), generator=generator, device=device, dtype=torch.int64)
    if torch._C._functorch.is_batchedtensor(words):  # noqa: SLF001 - torch has no public way to ask
        raise UnsupportedError(
            message(
                "dropout under vmap must use one seed for all samples",
                'got vmap(..., randomness="different")',
                'say randomness="same", or loop over the samples',
            )
        )
    low, high = words.tolist()
    return low | (high << 32)


def dropout_keep(seed: int, p: float, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    """Which weights are kept: bool (B, H, L, S) for batch rows b (B,), heads h (H,), positions i (B or 1, L),
    j (B or 1, S).

    Positions may also be given as (L,) and (S,). All are int64 on one device; the result is there too.
    """
    i, j = torch.atleast_2d(i), torch.atleast_2d(j)
    counters, place = _counters(j)
    words = philox(seed, counters[:, None, None, :], i[:, None, :, None], h[:, None, None], b[:, None, None, None])
    table = torch.stack(words, dim=-1).flatten(-2)
    place = place[:, None, None, :].expand(*table.shape[:3], -1)
    number = (table.gather(-1, place >> 1) >> (16 * (place & 1))) & 0xFFFF
    return number >= threshold(p)


def _counters(j: Tensor) -> tuple[Tensor, Tensor]:
    """The counters that cover each row of positions, (B, n), and which of their 8 n halves is each position's, (B,
    S).
    """
    group = torch.div(j, GROUP, rounding_mode="floor")
    within = j - GROUP * group
    if not j.is_meta and bool((j.diff(dim=-1) == 1).all()):  # an unbroken range: neighbours share their counters
        covering = -(-(j.shape[-1] + GROUP - 1) // GROUP)
        first = group[:, :1]
        return first + torch.arange(covering, device=j.device), GROUP * (group - first) + within
    return group, GROUP * torch.arange(j.shape[-1], device=j.device) + within
