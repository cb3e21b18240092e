"""From a caller's arguments to a checked question: every check of one attention call, before any work.

Raises only errors of `qkv.errors`; runs nothing and copies nothing but what views cannot say.
"""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass

import torch
from torch import Tensor

from qkv.errors import AddedMaskWarning, DTypeError, MaskError, ShapeError, ValueOutOfRange, message
from qkv.inputs import read_aux, read_dropout, read_offsets, read_pattern, read_scale, read_softcap
from qkv.problem import BiasKind, Origin, Problem, Tensors
from qkv.scores import Alibi, Relative
from qkv.shapes import (
    Axes,
    Views,
    check_dense,
    check_device,
    check_float,
    describe,
    dtype_name,
    restore,
    values_can_be_seen,
    view_inputs,
)
from qkv.types import AuxRequest
from qkv.values import all_equal, beyond, bounds

_BROADCASTS = "`bias` must broadcast to (B, H, L, S) = {}"
_MASK_REMEDY = "a mask is pattern=mask(keep=...), a bool tensor that is True where a query may see"

_ADDED = message(
    "`bias` is added to the scores, it hides nothing",
    "this one holds only 0 and 1, as a mask would",
    "for a mask say pattern=mask(keep=bias.bool())",
)


@dataclass(frozen=True, slots=True, eq=False)
class Question:
    """One call, checked: what is asked, the tensors it is asked of, and the form the caller wants back."""

    problem: Problem
    tensors: Tensors
    views: Views

    def restore(self, output: Tensor) -> Tensor:
        """An output (B, H, L, V) in the caller's rank and layout; aux tensors stay (B, H, L[, S])."""
        return restore(output, self.views)


def ask(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    pattern: object = None,
    bias: Tensor | Alibi | Relative | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    dropout_p: float = 0.0,
    generator: torch.Generator | None = None,
    query_offset: object = None,
    layout: str = "BHLD",
    return_aux: AuxRequest | None = None,
    broadcast: bool = False,
) -> Question:
    """Check the arguments of one attention call and put them in their one canonical form.

    query (..., L, D), key (..., S, D), value (..., S, V): 2-D without batch and heads (B = H = 1), 3-D (B, L, D)
    without heads (H = 1), 4-D in the order that `layout` names; axes before these are flattened into B.
    `broadcast` expands batch and head axes of size 1 as torch's own function does; otherwise they must agree.
    """
    query, key, value = as_autocast_does(query, key, value)
    views, axes = view_inputs(query, key, value, layout, broadcast=broadcast)
    scale = read_scale(scale, axes.head_dim)
    softcap = read_softcap(softcap)
    dropout_p = read_dropout(dropout_p, generator)
    kind, added = read_bias(bias, axes, views)
    if sinks is not None:
        sinks = read_sinks(sinks, axes, views.query.device)
    legal = read_pattern(pattern)
    offsets = read_offsets(query_offset, legal.align, axes)
    legal.check(batch=axes.batch, heads=axes.heads, queries=axes.queries, keys=axes.keys, offsets=offsets)
    tensors = Tensors(views.query, views.key, views.value, added, sinks)
    problem = Problem(
        batch=axes.batch,
        heads=axes.heads,
        kv_heads=axes.kv_heads,
        queries=axes.queries,
        keys=axes.keys,
        head_dim=axes.head_dim,
        value_dim=axes.value_dim,
        dtype=views.query.dtype,
        device=views.query.device,
        pattern=legal,
        scale=scale,
        softcap=softcap,
        bias=kind,
        bias_shape=None if added is None else tuple(added.shape),
        sinks=sinks is not None,
        dropout_p=dropout_p,
        origin=Origin(query=offsets),
        needs_grad=torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors),
        aux=read_aux(return_aux, axes),
    )
    return Question(problem, tensors, views)


def as_autocast_does(*tensors: Tensor) -> tuple[Tensor, ...]:
    """What torch's own function does under autocast: inputs but float64 take the autocast type."""
    if not all(isinstance(t, Tensor) and t.is_floating_point() for t in tensors):
        return tensors
    kind = tensors[0].device.type
    if not torch.amp.is_autocast_available(kind) or not torch.is_autocast_enabled(kind):
        return tensors
    return tuple(t if t.dtype == torch.float64 else t.to(torch.get_autocast_dtype(kind)) for t in tensors)


def read_sinks(sinks: object, axes: Axes, device: torch.device) -> Tensor:
    """One logit a query head."""
    sinks = check_dense("sinks", sinks)
    check_float("sinks", sinks)
    check_device("sinks", sinks, device)
    if tuple(sinks.shape) != (axes.heads,):
        seen = f"got {list(sinks.shape)} for H = {axes.heads}"
        raise ShapeError(message("`sinks` must be (H,), one logit a query head", seen, "expand one for all heads"))
    if values_can_be_seen(sinks) and not bool((sinks.detach() < math.inf).all()):
        raise ValueOutOfRange(message("`sinks` must hold no NaN and no +inf", "got one", "-inf is no sink"))
    return sinks


def read_bias(bias: object, axes: Axes, views: Views) -> tuple[BiasKind | None, Tensor | None]:
    """Which kind of bias it is, and the tensor that holds its numbers."""
    if bias is None:
        return None, None
    device = views.query.device
    if isinstance(bias, Tensor):
        return "tensor", _read_bias_tensor(bias, axes, views)
    if not isinstance(bias, (Alibi, Relative)):
        holds = "`bias` must be a floating-point tensor, alibi(slopes) or relative(table)"
        raise DTypeError(message(holds, f"got {bias!r}", _MASK_REMEDY))
    if bias.heads != axes.heads:
        seen = f"got {bias} for H = {axes.heads}"
        raise ShapeError(message("`bias` must have one row for each query head", seen, "make it for H heads"))
    if isinstance(bias, Relative):
        check_device("bias", bias.table, device)
        return "relative", bias.table
    if isinstance(bias.slopes, tuple):
        wide = torch.float64 if views.query.dtype == torch.float64 else torch.float32
        return "alibi", torch.tensor(bias.slopes, dtype=wide, device=device)
    check_device("bias", bias.slopes, device)
    return "alibi", bias.slopes


def _read_bias_tensor(bias: Tensor, axes: Axes, views: Views) -> Tensor:
    """A bias as a 4-D tensor that broadcasts to (B, H, L, S)."""
    bias = check_dense("bias", bias)
    if not (bias.is_floating_point() or bias.is_complex()):
        seen = f"got {dtype_name(bias.dtype)}"
        raise MaskError(message("`bias` must be floating point: it is added to the scores", seen, _MASK_REMEDY))
    check_float("bias", bias)
    check_device("bias", bias, views.query.device)
    full_shape = (axes.batch, axes.heads, axes.queries, axes.keys)
    bias = _view_bias(bias, full_shape, views)
    for axis, size, whole in zip("BHLS", bias.shape, full_shape, strict=True):
        if size not in (1, whole):
            seen = f"got {list(bias.shape)}, whose {axis} is {size} where the call has {whole}"
            raise ShapeError(message(_BROADCASTS.format(list(full_shape)), seen, "use 1 or all"))
    visible = values_can_be_seen(bias)
    if visible:
        _check_bias_values(bias)
    if bias.dtype == torch.float64 != views.query.dtype:  # a finite number stays one in the type of the scores
        most = torch.finfo(torch.float32).max
        if not visible or beyond(bias, most):
            bias = torch.where(bias == -math.inf, bias, bias.clamp(-most, most))
    return bias


def _view_bias(bias: Tensor, full_shape: tuple[int, int, int, int], views: Views) -> Tensor:
    """A bias with the axes that its number of axes leaves out."""
    rank, leading = bias.ndim, views.leading
    if rank == 3 and views.rank == 3:
        return bias.unsqueeze(1)
    if rank < 3 or (rank == 3 and bias.shape[0] == 1):
        return bias.reshape((1,) * (4 - rank) + tuple(bias.shape))
    if rank == 3:
        seen = f"got {list(bias.shape)}, which could be (B, L, S) or (H, L, S)"
        remedy = "say bias[:, None] for one a batch row, bias[None] for one a head"
        raise ShapeError(message("`bias` must be (L, S) or 4-D", seen, remedy))
    if rank == 4 and (views.rank <= 4 or bias.shape[0] == 1):
        return bias
    if rank != views.rank or any(s not in (1, n) for s, n in zip(bias.shape, leading, strict=False)):
        holds = f"`bias` must broadcast to (..., H, L, S) = {[*leading, *full_shape[1:]]}"
        raise ShapeError(message(holds, f"got {list(bias.shape)}", "use (L, S), (1, H, L, S) or the axes of `query`"))
    if all(size == 1 for size in bias.shape[:-3]):
        return bias.reshape(1, *bias.shape[-3:])
    return bias.expand(*leading, *bias.shape[-3:]).reshape(full_shape[0], *bias.shape[-3:])


def _check_bias_values(bias: Tensor) -> None:
    """Refuse NaN and +inf; warn of a mask of zeros and ones."""
    if bias.numel() == 0:
        return
    least, most = bounds(bias)
    if not most < float("inf"):
        remedy = "-inf hides a key, the others have no meaning"
        raise ValueOutOfRange(message("`bias` must hold no NaN and no +inf", f"got {most} in {describe(bias)}", remedy))
    if (least, most) == (0.0, 1.0) and not bias.requires_grad and all_equal(bias, 0.0, 1.0):
        warnings.warn(_ADDED, AddedMaskWarning, stacklevel=6)
