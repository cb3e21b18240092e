"""The checks of one call's options, each of which returns the option in its one canonical form.

The tensors themselves are checked in `qkv.shapes`; which option goes where is `qkv.problem`'s.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from numbers import Real
from typing import SupportsIndex

import numpy as np
import torch
from torch import Tensor

from qkv.dropout import LEVELS, threshold
from qkv.errors import (
    DTypeError,
    LayoutError,
    QkvError,
    ShapeError,
    UnknownName,
    UnsupportedError,
    ValueOutOfRange,
    message,
)
from qkv.patterns.named import full
from qkv.patterns.pattern import Pattern
from qkv.shapes import Axes, describe, dtype_name, values_can_be_seen
from qkv.types import AuxRequest, Rows

POSITION_LIMIT = 2**38  # far below the distance that stands for "unbounded"
_INTEGERS = (torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.uint16, torch.uint32, torch.uint64)
_NOTHING = AuxRequest()
LONGEST_SHOWN = 80  # characters of a pattern in an error
_OFFSET_HOLDS = "`query_offset` must be an int, or a sequence or integer tensor of one a batch row"
_ROWS_HOLDS = '`weights` of AuxRequest must be a bool, "mean", or query rows as an int, a slice or a sequence of ints'


@contextmanager
def in_call(
    query: object, key: object, value: object, pattern: object, *, named: Mapping[str, str] | None = None
) -> Iterator[None]:
    """Adds to an error which call it came from: for the outermost public functions, so that inner texts stay short.

    `named` says what the caller wrote where our text names an argument that it was turned into.
    """
    try:
        yield
    except QkvError as error:
        shown = str(pattern) if pattern is None or isinstance(pattern, Pattern) else describe(pattern)
        shown = shown if len(shown) <= LONGEST_SHOWN else f"{shown[: LONGEST_SHOWN - 1]}…"
        call = f"query {describe(query)}, key {describe(key)}, value {describe(value)}, pattern {shown}"
        text = str(error)
        for ours, theirs in (named or {}).items():
            text = text.replace(ours, theirs)
        error.args = (f"{text} (in a call with {call})",)
        raise


def as_index(value: object) -> int | None:
    """The integer that a value stands for; None for a bool, a float, a tensor and anything else."""
    if type(value) is int:
        return value
    if isinstance(value, (bool, Tensor, np.ndarray)) or not isinstance(value, SupportsIndex):
        return None
    return value.__index__()


def read_number(name: str, value: object, remedy: str) -> float:
    """A real number as a float; a bool, a tensor, a string are none. Beyond the greatest float it reads as inf."""
    if isinstance(value, Tensor):
        seen = f"got a tensor ({describe(value)})"
        remedy = f"pass {name}.item() (a gradient reaches only tensors: fold the factor into one)"
    elif not isinstance(value, bool) and isinstance(value, Real):
        try:
            return float(value)
        except OverflowError:
            return math.inf
    else:
        seen = f"got {value!r}"
    raise DTypeError(message(f"`{name}` must be a number", seen, remedy))


def read_pattern(pattern: object) -> Pattern:
    """A pattern; None is the one that hides nothing."""
    if pattern is None:
        return full()
    if isinstance(pattern, Pattern):
        return pattern
    seen, remedy = f"got a value of type {type(pattern).__qualname__}", "make one, as by causal() or window(255)"
    if isinstance(pattern, str):
        seen, remedy = f"got the text {pattern!r}", "read it with qkv.parse(...)"
    elif isinstance(pattern, Tensor) and pattern.dtype == torch.bool:
        seen, remedy = f"got a tensor ({describe(pattern)})", "say pattern=mask(keep=...), True where a query may see"
    elif isinstance(pattern, Tensor):
        seen, remedy = f"got a tensor ({describe(pattern)})", "say bias=... for what is added to scores"
    elif callable(pattern):
        remedy = "call the constructor, or say where(fn) for a function of (b, h, i, j)"
    raise DTypeError(message("`pattern` must be a Pattern or None", seen, remedy))


def read_scale(scale: object, head_dim: int) -> float:
    """The factor of the scores, 1/sqrt(D) unless given; finite, zero and negative included."""
    if scale is None:
        return 1.0 / math.sqrt(head_dim)
    number = read_number("scale", scale, "leave it out for 1/sqrt(D)")
    if not math.isfinite(number):
        raise ValueOutOfRange(message("`scale` must be finite", f"got {scale}", "leave it out for 1/sqrt(D)"))
    return number


def read_softcap(softcap: object) -> float | None:
    """The bound of the scores, or None for no bound."""
    if softcap is None:
        return None
    number = read_number("softcap", softcap, "leave it out for no cap")
    if not 0.0 < number < math.inf:
        holds = "`softcap` must be a finite number above 0"
        raise ValueOutOfRange(message(holds, f"got {softcap}", "leave it out for no cap"))
    return number


def read_dropout(dropout_p: object, generator: object) -> float:
    """The share of weights to drop; what would round to all of them is refused."""
    if generator is not None and not isinstance(generator, torch.Generator):
        remedy = "say torch.Generator().manual_seed(...), or leave it out for torch's default one"
        raise DTypeError(message("`generator` must be a torch.Generator or None", f"got {generator!r}", remedy))
    if type(dropout_p) is float and dropout_p == 0.0:
        return 0.0
    number = read_number("dropout_p", dropout_p, "say 0.0 for no dropout")
    if not 0.0 <= number < 1.0:
        seen, remedy = f"got {dropout_p}", "it is the share of weights to drop, 0.0 for none"
        raise ValueOutOfRange(message("`dropout_p` must hold 0 ≤ p < 1", seen, remedy))
    if threshold(number) >= LEVELS:
        seen = f"got {dropout_p}, which rounds to dropping all of {LEVELS}"
        raise ValueOutOfRange(message("`dropout_p` must leave weights over", seen, f"take at most 1 - 1/{LEVELS}"))
    return number


def read_offsets(query_offset: object, align: str | None, axes: Axes) -> tuple[int, ...]:
    """The absolute position of query 0: one for all batch rows, or one each where they differ."""
    implied = 0 if align == "top_left" else axes.keys - axes.queries
    if query_offset is None:
        return (implied,)
    offsets = _read_given_offsets(query_offset, axes.batch)
    if align is not None and any(offset != implied for offset in offsets):
        holds = "`query_offset` and the pattern's align must agree where both are given"
        seen = f"query_offset={query_offset!r} beside align={align!r}, which says {implied}"
        raise LayoutError(message(holds, seen, "leave one of them out"))
    return offsets


def _read_given_offsets(query_offset: object, batch: int) -> tuple[int, ...]:
    """The offsets that the caller gave, one number where all are alike."""
    single = as_index(query_offset)
    if single is not None:
        found = [single]
    elif isinstance(query_offset, Tensor):
        found = _read_offset_tensor(query_offset, batch)
    else:
        found = _read_offset_sequence(query_offset, batch)
    for offset in found:
        if abs(offset) > POSITION_LIMIT:
            seen = f"got {offset}"
            raise ValueOutOfRange(message("`query_offset` must lie within ±2^38", seen, "count from nearer by"))
    return tuple(found) if any(offset != found[0] for offset in found) else tuple(found[:1]) or (0,)


def _read_offset_sequence(query_offset: object, batch: int) -> list[int]:
    """One offset a batch row, from a sequence."""
    if isinstance(query_offset, (str, bytes)) or not isinstance(query_offset, Sequence):
        raise DTypeError(message(_OFFSET_HOLDS, f"got {query_offset!r}", "leave it out for S - L"))
    found = []
    for b, item in enumerate(query_offset):
        offset = as_index(item)
        if offset is None:
            raise DTypeError(message(_OFFSET_HOLDS, f"got {item!r} for batch row {b}", "positions are whole numbers"))
        found.append(offset)
    _check_offset_count((len(found),), batch)
    return found


def _read_offset_tensor(query_offset: Tensor, batch: int) -> list[int]:
    """One offset a batch row, or one for all (0-D), from an integer tensor."""
    if query_offset.dtype not in _INTEGERS:
        seen = f"got a tensor of {dtype_name(query_offset.dtype)}"
        raise DTypeError(message(_OFFSET_HOLDS, seen, "positions are whole numbers: use torch.int64"))
    if query_offset.ndim > 0:
        _check_offset_count(tuple(query_offset.shape), batch)
    if not values_can_be_seen(query_offset):
        seen = f"got a tensor whose numbers cannot be read here ({describe(query_offset)})"
        raise UnsupportedError(message(_OFFSET_HOLDS, seen, "pass ints"))
    return [int(offset) for offset in query_offset.reshape(-1).tolist()]


def _check_offset_count(shape: tuple[int, ...], batch: int) -> None:
    """As many offsets as batch rows."""
    if shape != (batch,):
        raise ShapeError(message(_OFFSET_HOLDS, f"got shape {list(shape)} for B = {batch}", "give one a batch row"))


def read_aux(aux: object, axes: Axes) -> AuxRequest:
    """What to return beside the output: rows as non-negative integers (an int, a range or a tuple), None as nothing."""
    if aux is None:
        return _NOTHING
    if not isinstance(aux, AuxRequest):
        holds = "`return_aux` must be an AuxRequest or None"
        raise DTypeError(message(holds, f"got {aux!r}", "say AuxRequest(lse=True) or the like"))
    for name, flag in (("lse", aux.lse), ("max_scores", aux.max_scores), ("entropy", aux.entropy)):
        if not isinstance(flag, bool):
            raise DTypeError(message(f"`{name}` of AuxRequest must be a bool", f"got {flag!r}", "say True or False"))
    top_k = None if aux.top_k is None else _read_top_k(aux.top_k, axes.keys)
    return replace(aux, weights=_read_rows(aux.weights, axes.queries), top_k=top_k)


def _read_top_k(top_k: object, keys: int) -> int:
    """How many of the largest weights: at least one, at most all of them."""
    count = as_index(top_k)
    if count is None:
        raise DTypeError(message("`top_k` of AuxRequest must be an int", f"got {top_k!r}", "say how many a row"))
    if not 1 <= count <= keys:
        seen = f"got {count} for S = {keys} keys"
        raise ValueOutOfRange(message("`top_k` of AuxRequest must be in 1..S", seen, "weights=True gives all of them"))
    return count


def _read_rows(rows: object, queries: int) -> Rows:
    """Which rows of weights: False, True, "mean", or non-negative row numbers."""
    if isinstance(rows, bool):
        return rows
    if isinstance(rows, str):
        if rows != "mean":
            raise UnknownName(message(_ROWS_HOLDS, f"got {rows!r}", "say True for all rows of every head"))
        return "mean"
    if isinstance(rows, slice):
        return _read_slice(rows, queries)
    if isinstance(rows, Sequence):
        return tuple(_read_row(row, queries) for row in rows)
    return _read_row(rows, queries)


def _read_row(row: object, queries: int) -> int:
    """One row number, counted from the end where negative."""
    index = as_index(row)
    if index is None:
        raise DTypeError(message(_ROWS_HOLDS, f"got {row!r}", "use .tolist() on a tensor or an array of rows"))
    if not -queries <= index < queries:
        seen = f"got row {index} for L = {queries}"
        raise ValueOutOfRange(message("`weights` of AuxRequest must name rows in -L..L-1", seen, "rows count from 0"))
    return index % queries


def _read_slice(rows: slice, queries: int) -> range:
    """A slice as the rows it takes of L."""
    parts = [as_index(part) for part in (rows.start, rows.stop, rows.step) if part is not None]
    if None in parts:
        raise DTypeError(message(_ROWS_HOLDS, f"got {rows!r}", "the parts of a slice are whole numbers"))
    if rows.step is not None and as_index(rows.step) == 0:
        raise ValueOutOfRange(message("the step of a slice of rows must not be 0", f"got {rows!r}", "leave it out"))
    return range(*rows.indices(queries))
