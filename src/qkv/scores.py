"""What is added to scores by a rule in place of a full tensor: ALiBi slopes and relative-position tables.

Values only: they know their own sizes, no call, no kernel and no device but that of the tensor they hold.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Real

from torch import Tensor

from qkv.errors import DTypeError, ShapeError, ValueOutOfRange, message
from qkv.shapes import check_dense, check_float, values_can_be_seen


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Alibi:
    """A bias of -slopes[h]·|i - j|: made by `alibi`. Equal only to itself; a tuple has no device yet."""

    slopes: Tensor | tuple[float, ...]  # (H,)

    @property
    def heads(self) -> int:
        """How many query heads it is for."""
        return len(self.slopes)

    def __str__(self) -> str:
        return f"alibi({self.heads} heads)"

    __repr__ = __str__


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Relative:
    """A bias of table[h, clamp(j - i, -R, R) + R]: made by `relative`. Equal only to itself."""

    table: Tensor  # (H, 2R + 1)

    @property
    def heads(self) -> int:
        """How many query heads it is for."""
        return self.table.shape[0]

    @property
    def radius(self) -> int:
        """The greatest distance R that has an entry of its own."""
        return self.table.shape[1] // 2

    def __str__(self) -> str:
        return f"relative({self.heads} heads, radius {self.radius})"

    __repr__ = __str__


def alibi(slopes: Tensor | Sequence[float]) -> Alibi:
    """Attention with linear biases: the score of query i and key j of head h gains -slopes[h]·|i - j|.

    slopes: (H,), a floating-point tensor (gradients reach it) or a sequence of numbers; any finite value.
    Raises DTypeError, ShapeError or ValueOutOfRange. Source: Press et al., https://arxiv.org/abs/2108.12409.

    >>> alibi([0.5, 0.25])
    alibi(2 heads)
    """
    if not isinstance(slopes, Tensor):
        return Alibi(_finite_numbers(slopes))
    slopes = check_dense("slopes", slopes)
    check_float("slopes", slopes)
    if slopes.ndim != 1:
        raise ShapeError(message("`slopes` must be (H,), one a query head", f"got {list(slopes.shape)}", "flatten it"))
    if slopes.numel() and values_can_be_seen(slopes) and not bool(slopes.detach().isfinite().all()):
        raise ValueOutOfRange(message("`slopes` must be finite", "got NaN or an infinity in it", _SLOPES_REMEDY))
    return Alibi(slopes)


def alibi_slopes(heads: int) -> tuple[float, ...]:
    """The slopes of the ALiBi paper: 2^(-8h/H) for h = 1..H.

    Where H is no power of two: those of the next smaller power P, then every second one of those of 2P.

    >>> alibi_slopes(4)
    (0.25, 0.0625, 0.015625, 0.00390625)
    """
    if isinstance(heads, bool) or not isinstance(heads, int):
        raise DTypeError(message("`heads` must be an int", f"got {heads!r}", "say how many query heads"))
    if heads < 1:
        raise ValueOutOfRange(message("`heads` must be at least 1", f"got {heads}", "say how many query heads"))
    power = 1 << (heads.bit_length() - 1)
    slopes = [2.0 ** (-8.0 * h / power) for h in range(1, power + 1)]
    between = [2.0 ** (-4.0 * h / power) for h in range(1, 2 * power + 1, 2)]
    return tuple(slopes + between[: heads - power])


def relative(table: Tensor) -> Relative:
    """A learned bias by distance: the score of query i and key j of head h gains table[h, clamp(j - i, -R, R) + R].

    table: (H, 2R + 1), floating point (gradients reach it); an entry of -inf hides the keys at that distance.
    Raises DTypeError, ShapeError or ValueOutOfRange. Source: Shaw et al., https://arxiv.org/abs/1803.02155, in the
    form of one scalar a head and distance (Raffel et al., https://arxiv.org/abs/1910.10683).
    """
    table = check_dense("table", table)
    check_float("table", table)
    if table.ndim != 2 or table.shape[1] % 2 == 0:
        remedy = "give one entry for each distance -R..R"
        raise ShapeError(message("`table` must be (H, 2R + 1), of odd width", f"got {list(table.shape)}", remedy))
    if table.numel() and values_can_be_seen(table) and not table.detach().amax().item() < math.inf:
        raise ValueOutOfRange(message("`table` must hold no NaN and no +inf", "got one", "-inf hides a key"))
    return Relative(table)


_SLOPES_REMEDY = "alibi_slopes(heads) gives those of the paper"


def _finite_numbers(slopes: object) -> tuple[float, ...]:
    """Slopes that were given as a sequence, as floats."""
    if isinstance(slopes, str) or not isinstance(slopes, Sequence):
        holds = "`slopes` must be a tensor (H,) or a sequence of numbers"
        raise DTypeError(message(holds, f"got {slopes!r}", _SLOPES_REMEDY))
    for h, slope in enumerate(slopes):
        if isinstance(slope, bool) or not isinstance(slope, Real):
            raise DTypeError(message("`slopes` must hold numbers", f"got {slope!r} for head {h}", _SLOPES_REMEDY))
        if not math.isfinite(slope):
            raise ValueOutOfRange(message("`slopes` must be finite", f"got {slope} for head {h}", _SLOPES_REMEDY))
    return tuple(float(slope) for slope in slopes)
