"""The memory of caches, and which row of a chunk goes where."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from qkv.cache.steps import Stage


def blank(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros that may be written to in every mode, also where they are made in inference mode."""
    with torch.inference_mode(False):
        return torch.zeros(tuple(shape), dtype=dtype, device=device)


def scattered(stage: Stage) -> tuple[Tensor, Tensor, Tensor]:
    """For each real row of a chunk its sequence, its row and its position, int64 (rows,) each."""
    before, after = np.array(stage.before, dtype=np.int64), np.array(stage.after, dtype=np.int64)
    counts = after - before
    b = np.repeat(np.arange(len(counts)), counts)
    row = np.arange(len(b)) - np.repeat(np.cumsum(counts) - counts, counts)
    return torch.from_numpy(b), torch.from_numpy(row), torch.from_numpy(row + before[b])


def positions_of(lengths: Sequence[int], device: torch.device) -> Tensor:
    """The positions of sequences from their start, int64 (B, longest), -1 beyond the end of one."""
    position = torch.arange(max(lengths, default=0), device=device).expand(len(lengths), -1)
    return torch.where(position < torch.tensor(lengths, dtype=torch.int64, device=device)[:, None], position, -1)
