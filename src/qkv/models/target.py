"""What the decoder of an encoder-decoder reads in training: the labels, each at the place of the next."""

from __future__ import annotations

import torch
from torch import Tensor

from qkv.errors import ShapeError, ValueOutOfRange, message
from qkv.models.output import IGNORED
from qkv.nn.ids import check_ids
from qkv.nn.rows import Rows


def moved_on(target: Tensor, rows: Rows, start: int) -> Tensor:
    """Each real token of target (B, L) at the place of the next one, behind the token `start`."""
    first = target.new_full((rows.batch, 1), start)
    return rows.back(torch.cat([first, rows.front(target)[:, :-1]], dim=1), 0)


def read_labels(labels: Tensor, *, count: int, pad: int) -> Tensor:
    """Labels (B, L) as tokens of the vocabulary, `pad` where they are -100. Raises as `check_ids`."""
    tokens = labels.masked_fill(labels == IGNORED, pad) if isinstance(labels, Tensor) else labels
    check_ids("labels", tokens, count=count)
    return tokens


def check_target(ids: Tensor, decoder_ids: Tensor, labels: Tensor | None) -> None:
    """Refuse a target of other rows than the source ids, and labels of another shape."""
    if len(decoder_ids) != len(ids):
        seen = f"got {len(decoder_ids)} and {len(ids)}"
        raise ShapeError(message("target and source must have as many rows", seen, "give one target a source"))
    if labels is not None and labels.shape != decoder_ids.shape:
        holds = "`labels` must have the shape of `decoder_ids`"
        seen = f"got {tuple(labels.shape)} and {tuple(decoder_ids.shape)}"
        raise ShapeError(message(holds, seen, "give one label a place, -100 where none counts"))


def no_target() -> ValueOutOfRange:
    """The error for a call that says nothing of the target."""
    holds = "`labels` or `decoder_ids` must say what is decoded"
    return ValueOutOfRange(message(holds, "got neither", "give the target, or call generate"))
