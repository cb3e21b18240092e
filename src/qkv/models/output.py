"""What one pass of a model gives, and the two losses over tokens."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from qkv.errors import DTypeError, ShapeError, ValueOutOfRange, message
from qkv.shapes import values_can_be_seen
from qkv.types import AuxOutput

IGNORED = -100  # a label that does not count, as everywhere in PyTorch


class ModelOutput(NamedTuple):
    """What one pass gives. E is the width of the model; a field that the model or the call has no use for is None."""

    hidden: Tensor  # (B, L, E) after the last norm
    logits: Tensor | None = None  # (B, L, vocabulary), (B, 1, vocabulary) of the last real token, or (B, classes)
    loss: Tensor | None = None  # the mean over the labels that count; one number
    aux: tuple[AuxOutput, ...] | None = None  # one a layer


def next_token_loss(logits: Tensor, labels: Tensor, keep: Tensor | None = None) -> Tensor:
    """The cross entropy of each token given those before it, in nats, the mean over the tokens that count.

    logits: (B, L, vocabulary). labels: integers (B, L), usually the ids themselves: the shift by one happens here. The
    label -100 does not count. keep: (B, L) bool, real where True; a hidden token is neither predicted nor predicts,
    and the token before a hole predicts the one behind it, so that a padded row loses what it loses alone.
    Without any label that counts the loss is 0. Raises DTypeError, ShapeError and ValueOutOfRange.
    """
    check_labels(labels, tuple(logits.shape[:-1]), logits.shape[-1])
    return _mean_loss(logits, _next(labels, keep))


def token_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """The cross entropy of each label at its own place, in nats, the mean over those that are not -100.

    logits: (..., classes). labels: integers (...): masked tokens, the targets of a decoder, or classes. Otherwise as
    `next_token_loss`.
    """
    check_labels(labels, tuple(logits.shape[:-1]), logits.shape[-1])
    return _mean_loss(logits, labels)


def _next(labels: Tensor, keep: Tensor | None) -> Tensor:
    """At each place the label of the next real token, -100 where there is none."""
    after = torch.full_like(labels, IGNORED)
    if keep is None:
        after[:, :-1] = labels[:, 1:]
        return after
    order = keep.logical_not().to(torch.int8).argsort(dim=1, stable=True)  # real tokens first
    labels = labels.masked_fill(~keep, IGNORED).gather(1, order)
    return after.scatter(1, order[:, :-1], labels[:, 1:])


def _mean_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """The mean over the targets that count; 0, with gradients of 0, where none does."""
    wide = logits if logits.dtype == torch.float64 else logits.float()
    total = F.cross_entropy(wide.flatten(0, -2), targets.flatten().long(), ignore_index=IGNORED, reduction="sum")
    return total / (targets != IGNORED).sum().clamp(min=1)


def check_labels(labels: Tensor, places: tuple[int, ...], classes: int) -> None:
    """Refuse what are not labels 0 .. classes - 1, or -100, one at each of these places."""
    if not isinstance(labels, Tensor) or labels.dtype not in (torch.int64, torch.int32):
        seen = f"got {labels.dtype}" if isinstance(labels, Tensor) else f"got {type(labels).__name__}"
        raise DTypeError(message("`labels` must be an int64 or int32 tensor", seen, "give token numbers"))
    if tuple(labels.shape) != places:
        holds = f"`labels` must have the shape {list(places)}"
        raise ShapeError(message(holds, f"got {list(labels.shape)}", "give one label a place, -100 where none counts"))
    if not labels.numel() or not values_can_be_seen(labels):
        return
    low, high = (int(bound) for bound in labels.masked_fill(labels == IGNORED, 0).aminmax())
    if not 0 <= low <= high < classes:
        holds = f"`labels` must lie in 0 .. {classes - 1}, or be -100"
        raise ValueOutOfRange(message(holds, f"got {low} .. {high}", "use the tokenizer of this model"))
