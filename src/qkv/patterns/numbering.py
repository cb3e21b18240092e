"""Numbering equal things alike, exactly: rows of an array, and tuples across columns. Knows nothing of patterns."""

from __future__ import annotations

import numpy as np

LARGEST_CODE = 1 << 62


def number_rows(rows: np.ndarray) -> np.ndarray:
    """Number equal rows of a 2-D array alike, in the order in which they first occur. Exact: rows are compared,
    not hashes.
    """
    data, width = np.ascontiguousarray(rows).tobytes(), rows.shape[1] * rows.itemsize
    seen: dict[bytes, int] = {}
    pieces = (data[at : at + width] for at in range(0, len(data), width))
    return np.fromiter((seen.setdefault(piece, len(seen)) for piece in pieces), dtype=np.int64, count=len(rows))


def number_columns(columns: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Number equal tuples across columns alike; and a place where each number occurs. Exact: no hashing."""
    number, span = np.zeros(len(columns[0]), dtype=np.int64), 1
    for column in columns:
        low = column - column.min()
        width = int(low.max()) + 1
        if span * width > LARGEST_CODE:
            number, place = _dense_numbers(number, span)
            span = len(place)
            if span * width > LARGEST_CODE:
                low, place = _dense_numbers(low, width)
                width = len(place)
        number, span = number * width + low, span * width
    return _dense_numbers(number, span)


def _dense_numbers(codes: np.ndarray, span: int) -> tuple[np.ndarray, np.ndarray]:
    """Codes in 0..span - 1 renumbered without gaps, and a place where each number occurs."""
    if span > 4 * len(codes) + 64:
        _, place, number = np.unique(codes, return_index=True, return_inverse=True)
        return number, place
    where = np.full(span, -1, dtype=np.int64)
    where[codes] = np.arange(len(codes))
    used = np.flatnonzero(where >= 0)
    place = where[used]
    where[used] = np.arange(len(used))
    return where[codes], place
