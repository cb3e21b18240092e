"""What is compared: sizes, type, direction and families, checked before any work."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NoReturn, TypeAlias, get_args

import torch

from qkv.compare.families import BY_NAME, FAMILIES, GROUPS, Family
from qkv.errors import DTypeError, ValueOutOfRange, message, unknown_name

Direction: TypeAlias = Literal["forward", "forward+backward", "decode"]
DIRECTIONS: tuple[Direction, ...] = get_args(Direction)
DTYPES = {name: getattr(torch, name) for name in ("float32", "bfloat16", "float16", "float64")}
LENGTHS = (512, 1024, 2048, 4096)
BUDGET = 20.0  # seconds that the runs may take, about
SHORTEST, LONGEST = 64, 1 << 20
WIDEST = 256  # of heads that the native core takes


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """One comparison: B is 1, keys have as many heads as queries."""

    lengths: tuple[int, ...] = LENGTHS
    heads: int = 8
    head_dim: int = 64
    value_dim: int = 64
    dtype: str = "float32"
    direction: Direction = "forward"
    families: tuple[str, ...] = tuple(family.name for family in FAMILIES)
    threads: int = 1
    budget: float = BUDGET
    seed: int = 0

    @property
    def torch_dtype(self) -> torch.dtype:
        """The type of q, k and v."""
        return DTYPES[self.dtype]

    @property
    def chosen(self) -> tuple[Family, ...]:
        """The families, in the order of the table."""
        return tuple(BY_NAME[name] for name in self.families)


def read_setting(
    *,
    lengths: Iterable[int],
    heads: int,
    head_dim: int,
    value_dim: int | None,
    dtype: str | torch.dtype,
    direction: str,
    families: Sequence[str] | None,
    threads: int,
    budget: float,
    seed: int,
) -> Setting:
    """Check every argument by itself.

    Raises ValueOutOfRange for a size, DTypeError for a type, UnknownName for a family, a group or a direction.
    """
    lengths = tuple(sorted({_whole("lengths", length, SHORTEST, LONGEST) for length in lengths}))
    if not lengths:
        _refuse("`lengths` must name one length at least", "got none", "leave it out for 512 to 4,096")
    if direction not in DIRECTIONS:
        raise unknown_name("direction", direction, DIRECTIONS)
    if not 0 < budget < float("inf"):
        _refuse("`budget` must be a number of seconds above 0", f"got {budget}", f"{BUDGET:.0f} is the default")
    head_dim = _whole("head_dim", head_dim, 1, WIDEST)
    return Setting(
        lengths=lengths,
        heads=_whole("heads", heads, 1, 1024),
        head_dim=head_dim,
        value_dim=_whole("value_dim", head_dim if value_dim is None else value_dim, 1, WIDEST),
        dtype=_read_dtype(dtype),
        direction=direction,
        families=_read_families(families, direction),
        threads=_whole("threads", threads, 1, 1024),
        budget=float(budget),
        seed=_whole("seed", seed, 0, (1 << 63) - 1),
    )


def _read_families(names: Sequence[str] | None, direction: Direction) -> tuple[str, ...]:
    """Names of families and of groups, as the table orders them; those that cannot decode are left out of a group."""
    fits = [family for family in FAMILIES if direction != "decode" or family.decodes]
    if names is None:
        return tuple(family.name for family in fits)
    wanted: set[str] = set()
    for name in names:
        if name in GROUPS:
            wanted |= {family.name for family in fits if family.group == name}
        elif name in BY_NAME:
            wanted.add(name)
        else:
            raise unknown_name("families", name, (*GROUPS, *BY_NAME))
    found = tuple(family.name for family in fits if family.name in wanted)
    if len(found) != len(wanted) or not found:
        left = ", ".join(sorted(wanted - {*found})) or "none"
        holds = "`families` must name families that can answer"
        _refuse(holds, f"got {left} for {direction}", "a step of decoding sees no later key: take `causal`")
    return found


def _read_dtype(dtype: str | torch.dtype) -> str:
    name = str(dtype).removeprefix("torch.")
    if name not in DTYPES:
        raise DTypeError(
            message(f"`dtype` must be one of {', '.join(DTYPES)}", f"got {name}", "float32 is the default")
        )
    return name


def _whole(name: str, value: Any, least: int, most: int) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        _refuse(f"`{name}` must be a whole number in {least} .. {most:,}", f"got {value!r}", "choose one inside")
    return value


def _refuse(holds: str, seen: str, remedy: str) -> NoReturn:
    raise ValueOutOfRange(message(holds, seen, remedy))
