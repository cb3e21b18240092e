"""A boolean matrix as text."""

from __future__ import annotations

import numpy as np

WIDEST = 64  # cells a side that are drawn one by one
SHADES = " ·░▒▓█"


def picture(dense: np.ndarray) -> str:
    """Query rows downward, key columns to the right: ■ for a pair, · for none; beyond 64 a side, shades by share."""
    if not dense.size:
        return "(no pairs: a length is 0)"
    if max(dense.shape) <= WIDEST:
        return "\n".join(" ".join("■" if seen else "·" for seen in row) for row in dense)
    step = -(-max(dense.shape) // WIDEST)
    rows, cols = (-(-size // step) for size in dense.shape)
    edges = [np.arange(0, size, step) for size in dense.shape]
    seen = np.add.reduceat(np.add.reduceat(dense, edges[0], axis=0, dtype=np.int32), edges[1], axis=1)
    sides = [np.diff([*starts, size]) for starts, size in zip(edges, dense.shape, strict=True)]
    inside = np.multiply.outer(*sides)
    shade = np.ceil(seen / inside * (len(SHADES) - 1)).astype(int)
    lines = ["".join(2 * SHADES[shade[r, c]] for c in range(cols)) for r in range(rows)]
    return "\n".join([*lines, f"one cell = {step} x {step} pairs; shades from ' ' none to '█' all"])
