"""Products of linear maps where no graph is recorded: by the way through memory, and the library, that are fastest.

One row of x times a weight (N, K) takes as long as reading the weight. MKL reads one that lies column by column up to
twice as fast as one that lies row by row, where N is at least K, and several weights in one go faster than apart:
`lay_out` puts them so. From a few rows on the arithmetic counts, of which oneDNN does more a second than MKL; torch has
no public call of it, so that it is called where torch was built with it.

Wherever a gradient, a hook, autocast, a transform or another kind of module might want to know, the modules themselves
are called. Results differ from theirs by rounding alone.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules import module as hooks

from qkv.backends.autograd import forward_mode
from qkv.shapes import values_can_be_seen

FEW = 2  # rows up to which a product takes as long as reading the weight
LAID_OUT = (torch.float32, torch.float64)  # float16 and bfloat16 have other ways for one row, which read row by row

_pointwise = getattr(torch.ops.mkldnn, "_linear_pointwise", None) if torch.backends.mkldnn.is_available() else None


@torch.no_grad()
def lay_out(*weights: Tensor) -> None:
    """Put weights (N, K) of one input where one row is multiplied by them fastest: side by side, column by column.

    Values, shapes and types stay; the weights share new memory. Nothing happens to those that are read fast row by row,
    with fewer rows in all than columns, or that are not in float32 or float64 on the CPU.
    """
    first, sizes = weights[0], [len(weight) for weight in weights]
    alike = all(weight.dtype == first.dtype and weight.is_cpu for weight in weights)
    if alike and first.dtype in LAID_OUT and sum(sizes) >= first.shape[1] and _joined(weights) is None:
        joined = torch.empty(first.shape[1], sum(sizes), dtype=first.dtype).T
        for weight, place in zip(weights, joined.split(sizes), strict=True):
            weight.data = place.copy_(weight)


def product(x: Tensor, linear: nn.Linear) -> Tensor:
    """linear(x), x (..., K) -> (..., N)."""
    y: Tensor = _product(x, linear.weight, linear.bias) if _is_free(x, linear) else linear(x)
    return y


def products(x: Tensor, *maps: nn.Linear) -> tuple[Tensor, ...]:
    """Each map of one x, (..., K) -> (..., N); views into one memory where `lay_out` put their weights together."""
    if not _is_free(x, *maps):
        return tuple(one(x) for one in maps)
    weights = [one.weight for one in maps]
    joined = None if any(one.bias is not None for one in maps) else _joined(weights)
    if joined is None:
        return tuple(_product(x, one.weight, one.bias) for one in maps)
    return _product(x, joined, None).split_with_sizes([weight.shape[0] for weight in weights], -1)


def matrix_product(x: Tensor, weight: Tensor) -> Tensor:
    """x · weightᵀ, x (..., K) and weight (N, K) -> (..., N): a head that is an embedding too."""
    return _product(x, weight, None) if _is_free(x) else F.linear(x, weight)


def _product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    if _pointwise is not None and _is_for_onednn(x, weight):
        y: Tensor = _pointwise(x, weight, bias, "none", [], "")
        return y
    return F.linear(x, weight, bias)


def _joined(weights: Sequence[Tensor]) -> Tensor | None:
    """Weights of one input as one, (sum of N, K); None where they do not lie as `lay_out` puts them."""
    rows = 0
    for weight in weights:  # loops without generators: this runs twice a layer and token
        rows += weight.shape[0]
    first, stride = weights[0], (1, rows)
    place, size = first.data_ptr(), first.element_size()
    for weight in weights:
        if weight.stride() != stride or weight.data_ptr() != place:
            return None
        place += weight.shape[0] * size
    return first.as_strided((rows, first.shape[1]), stride)


def _is_free(x: Tensor, *maps: nn.Linear) -> bool:
    """Whether nothing but the values of these maps of x is wanted."""
    if torch.is_grad_enabled() or torch.is_autocast_enabled("cpu") or not values_can_be_seen(x):
        return False
    for one in maps:
        if type(one) is not nn.Linear or one._forward_hooks or one._forward_pre_hooks:  # noqa: SLF001
            return False
    return not forward_mode() and not hooks._has_any_global_hook()  # noqa: SLF001 - torch has no public way to ask


def _is_for_onednn(x: Tensor, weight: Tensor) -> bool:
    """Whether oneDNN does better: more than a few rows in float32 on the CPU, and a weight without gaps, since it takes
    a thousand times as long for one with gaps.
    """
    if x.numel() <= FEW * x.shape[-1] or x.dtype != torch.float32 or weight.dtype != x.dtype or not x.is_cpu:
        return False
    return weight.is_contiguous() or weight.T.is_contiguous()
