"""The checks of what stands beside q, k and v: gates, write strengths and states, which may be of a wider type."""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor

from qkv.errors import DTypeError, ShapeError, ValueOutOfRange, message
from qkv.linear.recurrence import compute_dtype
from qkv.shapes import check_dense, check_device, check_float, dtype_name, values_can_be_seen
from qkv.types import Layout
from qkv.values import bounds, greatest

GateForm: TypeAlias = Literal["none", "constant", "scalar", "vector"]  # constant: (H,), the same for all tokens


# How each is given as a logarithm.
_IN_LOGS = {
    "g": "pass g.log() of factors in 0..1",
    "decay": "pass log(gamma) of factors gamma in 0..1, as decay=gamma.log(), or minus the slopes",
}


class Inputs(NamedTuple):
    """q, k and v of one call in the order (B, H, L, D), checked."""

    query: Tensor  # (B, K, L, D)
    key: Tensor  # (B, K, L, D)
    value: Tensor  # (B, H, L, V)
    layout: Layout

    @property
    def axes(self) -> dict[str, int]:
        """Sizes by axis letter."""
        batch, key_heads, length, key_dim = self.query.shape
        return {"B": batch, "H": self.value.shape[1], "K": key_heads, "L": length, "D": key_dim}

    @property
    def wide(self) -> torch.dtype:
        """The type of states."""
        return compute_dtype(self.query.dtype)


def other_layout(layout: Layout) -> Layout:
    """That in which heads and tokens have changed places."""
    return "BLHD" if layout == "BHLD" else "BHLD"


def read_gate(g: object, form: GateForm, inputs: Inputs) -> Tensor:
    """Log decay, (B, H, L) or (B, H, L, D), at most 0 where the numbers can be seen; NaN stays and spreads."""
    axes = inputs.axes
    if form == "constant":
        decay = check_beside("decay", g, inputs.query, {inputs.query.dtype, inputs.wide})
        check_shape("decay", decay, {"H": axes["H"]}, "one a value head")
        check_sign("decay", decay)
        return decay[None, :, None].expand(axes["B"], -1, axes["L"])
    gate = _read_stream("g", g, inputs, "D" if form == "vector" else "")
    check_sign("g", gate)
    return gate


def read_beta(beta: object, inputs: Inputs) -> Tensor:
    """Write strength, (B, H, L): any finite number where the numbers can be seen; NaN stays and spreads."""
    strength = _read_stream("beta", beta, inputs, "")
    check_finite("beta", strength)
    return strength


def check_beside(
    name: str, tensor: object, first: Tensor, types: Collection[torch.dtype] = (), *, of: str = "query"
) -> Tensor:
    """A dense tensor of floating-point numbers on the device of the first one, `of`; of one of `types`, if any."""
    found = check_dense(name, tensor)
    check_float(name, found)
    check_device(name, found, first.device, of)
    if types and found.dtype not in types:
        legal = " or ".join(sorted(dtype_name(dtype) for dtype in types))
        holds = f"`{name}` must be {legal} beside inputs of {dtype_name(first.dtype)}"
        widest = max(types, key=lambda dtype: dtype.itemsize)
        raise DTypeError(message(holds, f"got {dtype_name(found.dtype)}", f"cast it with {name}.to({widest})"))
    return found


def check_shape(name: str, tensor: Tensor, sizes: dict[str, int], what: str, swapped: Layout | None = None) -> None:
    """The sizes by axis letter; `what` says which numbers these are, `swapped` the layout that it may stand in."""
    wanted, got = list(sizes.values()), list(tensor.shape)
    if got == wanted:
        return
    axes = ", ".join(sizes) if len(sizes) > 1 else f"{next(iter(sizes))},"
    holds = f"`{name}` must be ({axes}) = {wanted}"
    seen, remedy = f"got {got}", f"it holds {what}"
    if len(got) == len(wanted):
        letter, size, whole = next((*pair, n) for *pair, n in zip(sizes, got, wanted, strict=True) if pair[1] != n)
        seen += f", whose {letter} is {size} where the call has {whole}"
        if swapped and [got[0], *got[2:0:-1], *got[3:]] == wanted:  # heads and tokens have changed places
            remedy = f"say {name}.transpose(1, 2), or layout={swapped!r} if all tensors stand so"
    raise ShapeError(message(holds, seen, remedy))


def check_finite(name: str, strength: Tensor) -> None:
    """No infinity, where the numbers can be seen; NaN is none."""
    if strength.numel() == 0 or not values_can_be_seen(strength):
        return
    least, most = bounds(strength)
    if math.isinf(least) or math.isinf(most):
        seen = f"its numbers go from {least:g} to {most:g}"
        raise ValueOutOfRange(message(f"`{name}` must be finite", seen, "0 writes nothing, 1 replaces what k names"))


def check_sign(name: str, gate: Tensor) -> None:
    """At most 0, where the numbers can be seen."""
    if gate.numel() == 0 or not values_can_be_seen(gate):
        return
    most = greatest(gate)
    if math.isnan(most):  # which hides the others
        most = greatest(gate.detach().nan_to_num(nan=-math.inf, posinf=math.inf, neginf=-math.inf))
    if most > 0.0:
        holds = f"`{name}` must be at most 0: it is the logarithm of a decay"
        raise ValueOutOfRange(message(holds, f"its greatest number is {most:g}", _IN_LOGS[name]))


def _read_stream(name: str, tensor: object, inputs: Inputs, width: str) -> Tensor:
    """One number, or one a key channel, for each token and value head; viewed as (B, H, L[, D])."""
    found = check_beside(name, tensor, inputs.query, {inputs.query.dtype, inputs.wide})
    letters = inputs.layout[:3] + width
    what = f"one a token and value head{', and key channel' if width else ''}"
    check_shape(name, found, {letter: inputs.axes[letter] for letter in letters}, what, other_layout(inputs.layout))
    return found if inputs.layout == "BHLD" else found.transpose(1, 2)
