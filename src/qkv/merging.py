"""Combining partial attentions over disjoint sets of keys by their log-sum-exp."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from qkv.backends.base import NEG_INF
from qkv.errors import DTypeError, ShapeError, message


class Merged(NamedTuple):
    """Attention over the union of the parts' keys."""

    output: Tensor  # (B, H, L, V)
    lse: Tensor  # (B, H, L)


def merge(outputs: Sequence[Tensor], lses: Sequence[Tensor]) -> Merged:
    """The attention over all keys from attentions over disjoint parts of them; differentiable in both.

    lse = ln sum_p exp(lse_p), output = sum_p exp(lse_p - lse) output_p.
    outputs: each (B, H, L, V), in this order of axes; lses: each (B, H, L), as `AuxRequest(lse=True)` gives them, -inf
    where a part saw nothing. Without heads, add the axis H = 1 to the outputs, which the lses have.
    A row that no part saw has output 0 and lse -inf. A sink must take part in one part only.
    Source: Milakov, Gimelshein (2018); Dao and others, "Flash-Decoding" (2023).
    """
    outputs, lses = list(outputs), list(lses)
    _check(outputs, lses)
    stacked = torch.stack(tuple(lses))
    top = stacked.detach().amax(dim=0)
    shift = torch.where(top == NEG_INF, 0.0, top)
    weights = torch.exp(stacked - shift)
    total = weights.sum(dim=0)
    empty = total == 0
    filled = torch.where(empty, 1.0, total)
    wide = stacked.dtype
    output = sum(output.to(wide) * weight[..., None] for output, weight in zip(outputs, weights, strict=True))
    assert isinstance(output, Tensor)
    lse = torch.where(empty, NEG_INF, shift + torch.log(filled))
    return Merged((output / filled[..., None]).to(outputs[0].dtype), lse)


def _check(outputs: Sequence[Tensor], lses: Sequence[Tensor]) -> None:
    if not len(outputs) or len(outputs) != len(lses):
        raise ShapeError(
            message(
                "`outputs` and `lses` must list the same parts, at least one",
                f"got {len(outputs)} outputs and {len(lses)} lses",
                "give each part's output and its lse",
            )
        )
    for tensor in (*outputs, *lses):
        if not isinstance(tensor, Tensor) or not tensor.is_floating_point():
            seen = tensor.dtype if isinstance(tensor, Tensor) else type(tensor).__name__
            raise DTypeError(
                message("`outputs` and `lses` must be floating-point tensors", f"got {seen}", "pass results")
            )
    shape = outputs[0].shape
    for part, (output, lse) in enumerate(zip(outputs, lses, strict=True)):
        if output.shape != shape or lse.shape != shape[:-1]:
            raise ShapeError(
                message(
                    f"every part must have output {list(shape)} and lse {list(shape[:-1])}",
                    f"part {part} has {list(output.shape)} and {list(lse.shape)}",
                    "all parts answer the same queries; an lse has the head axis even where the inputs had none",
                )
            )
