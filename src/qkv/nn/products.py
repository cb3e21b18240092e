"""Products of linear maps where no graph is recorded: each by the code that is fastest for it.

A few rows of x times a weight (N, K) take as long as reading the weight, which the native core does best, row by row as
weights lie. With more rows the arithmetic counts, of which oneDNN does more a second than MKL; torch has no public call
of it, so that it is called where torch was built with it.

Wherever a gradient, a hook, autocast, a transform or another kind of module might want to know, the modules themselves
are called. Results differ from theirs by rounding alone.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules import module as hooks

from qkv.backends.autograd import forward_mode
from qkv.backends.cpu import TYPES
from qkv.backends.extension import MISSING, check_isa, native
from qkv.shapes import ORDINARY, values_can_be_seen

FEW = 4  # rows up to which the core is faster than torch's libraries

_pointwise = getattr(torch.ops.mkldnn, "_linear_pointwise", None) if torch.backends.mkldnn.is_available() else None


def product(x: Tensor, linear: nn.Linear) -> Tensor:
    """linear(x), x (..., K) -> (..., N)."""
    if not _is_free(x, linear):
        y: Tensor = linear(x)
        return y
    return _product(x, linear.weight, linear.bias, for_core=_is_for_core(x))


def products(x: Tensor, *maps: nn.Linear) -> tuple[Tensor, ...]:
    """Each map of one x, (..., K) -> (..., N)."""
    if not _is_free(x, *maps):
        return tuple(one(x) for one in maps)
    for_core = _is_for_core(x)
    return tuple([_product(x, one.weight, one.bias, for_core=for_core) for one in maps])


def matrix_product(x: Tensor, weight: Tensor) -> Tensor:
    """x · weightᵀ, x (..., K) and weight (N, K) -> (..., N): a head that is an embedding too."""
    return _product(x, weight, None, for_core=_is_for_core(x)) if _is_free(x) else F.linear(x, weight)


def _product(x: Tensor, weight: Tensor, bias: Tensor | None, *, for_core: bool) -> Tensor:
    """One product, of which only the values are wanted. What does not fit is for torch to refuse."""
    if for_core and _core_reads(weight, bias, x):
        return _of_few_rows(x, weight, bias)
    if _pointwise is not None and _is_for_onednn(x, weight, bias):
        y: Tensor = _pointwise(x, weight, bias, "none", [], "")
        return y
    return F.linear(x, weight, bias)


def _of_few_rows(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The product by the core; each row of x gives the bits that it gives alone."""
    outputs, inputs = weight.shape
    y = x.new_empty((*x.shape[:-1], outputs))
    native.project(
        torch.get_num_threads(),
        TYPES[x.dtype],
        x.numel() // inputs,
        outputs,
        inputs,
        inputs,
        weight.stride(0),
        x.data_ptr(),
        weight.data_ptr(),
        0 if bias is None else bias.data_ptr(),
        y.data_ptr(),
    )
    return y


def _is_for_core(x: Tensor) -> bool:
    """Whether the core does better, and can read x: a few rows without gaps, of a type that it knows."""
    if MISSING is not None or not 0 < x.numel() <= FEW * x.shape[-1] or x.dtype not in TYPES:
        return False
    check_isa()
    return _is_plain(x, x.dtype) and x.is_contiguous()


def _core_reads(weight: Tensor, bias: Tensor | None, x: Tensor) -> bool:
    """Whether the core can read these beside x: of its type, each row without gaps."""
    if not _is_plain(weight, x.dtype) or weight.ndim != 2 or weight.shape[1] != x.shape[-1] or weight.stride()[1] != 1:
        return False
    return bias is None or _adds_plainly(bias, weight)


def _adds_plainly(bias: Tensor, weight: Tensor) -> bool:
    return _is_plain(bias, weight.dtype) and bias.is_contiguous() and bias.shape == weight.shape[:1]


def _is_plain(tensor: Tensor, dtype: torch.dtype) -> bool:
    """Whether a tensor's numbers lie in the processor's memory as they are meant."""
    return (
        tensor.dtype == dtype
        and tensor.is_cpu
        and type(tensor) in ORDINARY
        and tensor.layout is torch.strided
        and not tensor.is_neg()
    )


def _is_free(x: Tensor, *maps: nn.Linear) -> bool:
    """Whether nothing but the values of these maps of x is wanted."""
    if torch.is_grad_enabled() or torch.is_autocast_enabled("cpu") or not values_can_be_seen(x):
        return False
    for one in maps:
        if type(one) is not nn.Linear or one._forward_hooks or one._forward_pre_hooks:  # noqa: SLF001
            return False
        if "forward" in one.__dict__:  # as adapters put their own in its place
            return False
    return not forward_mode() and not hooks._has_any_global_hook()  # noqa: SLF001 - torch has no public way to ask


def _is_for_onednn(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Whether oneDNN does better: more than one row in float32 on the CPU, and a weight without gaps, since it takes a
    thousand times as long for one with gaps. It reads a bias as if it had none.
    """
    if type(weight) not in ORDINARY or not torch._C._get_mkldnn_enabled():  # noqa: SLF001 - its public name is slower
        return False
    if x.numel() <= x.shape[-1] or x.dtype != torch.float32 or weight.dtype != x.dtype or not x.is_cpu:
        return False
    if weight.shape[-1] != x.shape[-1] or not (bias is None or _adds_plainly(bias, weight)):
        return False
    return weight.is_contiguous() or weight.T.is_contiguous()
