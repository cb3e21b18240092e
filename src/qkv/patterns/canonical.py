"""A canonical form of expressions, so that == means the same pairs at every length: sound, not complete.

Thresholds on i - j cut the line of offsets into cells, thresholds on j cut the keys;
every other leaf is one Boolean axis.
The expression is a truth table over cells and axes; what a cell settles is filled in,
what nothing depends on is dropped.
"""

from __future__ import annotations

from collections.abc import Hashable
from itertools import pairwise
from typing import TypeGuard

import numpy as np

from qkv.patterns.expr import PerHead, evaluate, rebuild
from qkv.patterns.leaf import Expr, Leaf
from qkv.patterns.leaves.keys import COMPACT_RUNS, Keys
from qkv.patterns.leaves.offsets import Congruent, Offsets
from qkv.patterns.spans import FAR

TABLE_LIMIT = 1 << 14  # entries; beyond it trees are compared as they are written


def canonical(expr: Expr) -> Hashable:
    """A hashable form: equal forms hold the same pairs whatever the lengths, offsets, batch rows and heads."""
    heads = head_counts(expr)
    if not heads:
        return _table(expr)
    forms = tuple(_table(rebuild(expr, lambda leaf: leaf, head)) for head in range(min(heads)))
    return ("per_head", *forms)


def head_counts(expr: Expr) -> set[int]:
    """How many heads the per_head nodes of an expression list: one number, unless they do not go together."""
    own = {len(expr.members)} if isinstance(expr, PerHead) else set()
    return own.union(*(head_counts(child) for child in expr.children))


def _table(expr: Expr) -> Hashable:
    leaves = {leaf.key: leaf for leaf in expr.leaves()}
    distances = _cuts(
        [edge for leaf in leaves.values() if isinstance(leaf, Offsets) for edge in (leaf.low, leaf.high + 1)]
    )
    if any(isinstance(leaf, Congruent) for leaf in leaves.values()):
        distances = _cuts([*distances, 0, 1])  # at distance 0 every residue class agrees
    keys = _cuts([int(edge) for leaf in leaves.values() if _compact(leaf) for edge in leaf.runs.ravel()], floor=1)
    atoms = sorted((key for key, leaf in leaves.items() if not _cut(leaf)), key=repr)
    if (len(distances) + 1) * (len(keys) + 1) << len(atoms) > TABLE_LIMIT:
        return ("tree", expr.key)
    return _reduced(expr, leaves, distances, keys, atoms)


def _reduced(
    expr: Expr,
    leaves: dict[tuple[object, ...], Leaf],
    distances: list[int],
    keys: list[int],
    atoms: list[tuple[object, ...]],
) -> Hashable:
    shape = (len(distances) + 1, len(keys) + 1, *(2 for _ in atoms))
    # one representative a cell: its first member, and for the lowest cell the one before the first cut
    distance = np.array([(distances or [0])[0] - 1, *distances])
    position = np.array([0, *keys])

    def value(leaf: Leaf) -> np.ndarray:
        if isinstance(leaf, Offsets):
            return _along((leaf.low <= distance) & (distance <= leaf.high), 0, shape)
        if _compact(leaf):
            return _along(leaf.contains(np.zeros(1, dtype=np.int64), position), 1, shape)
        return _along(np.array([False, True]), 2 + atoms.index(leaf.key), shape)

    table = np.ascontiguousarray(evaluate(expr, value, np.ones(shape, dtype=bool)))
    for axis, key in enumerate(atoms, start=2):
        if isinstance(leaves[key], Congruent):
            _settle(table, axis, leaves[key].key[1], distances)  # type: ignore[arg-type]
    distances, table = _drop_cuts(table, 0, distances)
    keys, table = _drop_cuts(table, 1, keys)
    for axis in range(table.ndim - 1, 1, -1):
        false, true = np.take(table, 0, axis), np.take(table, 1, axis)
        if (false == true).all():
            table, atoms = false, atoms[: axis - 2] + atoms[axis - 1 :]
    return (tuple(distances), tuple(keys), tuple(atoms), table.tobytes())


def _settle(table: np.ndarray, axis: int, modulus: int, distances: list[int]) -> None:
    """Where a cell of distances decides a residue leaf, the entry that cannot occur takes the value of the other."""
    edges = [None, *distances, None]
    for cell, (low, high) in enumerate(pairwise(edges)):
        place: list[object] = [slice(None)] * table.ndim
        place[0] = cell
        false, true = ((*place[:axis], side, *place[axis + 1 :]) for side in (0, 1))
        if modulus == 1 or (low == 0 and high == 1):
            table[false] = table[true]  # type: ignore[index]
        elif low is not None and high is not None and -(-low // modulus) * modulus >= high:
            table[true] = table[false]  # type: ignore[index]


def _drop_cuts(table: np.ndarray, axis: int, cuts: list[int]) -> tuple[list[int], np.ndarray]:
    """Join neighbouring cells that agree."""
    changes = [
        (np.take(table, cell, axis) != np.take(table, cell - 1, axis)).any() for cell in range(1, table.shape[axis])
    ]
    kept = [0, *(cell for cell, change in enumerate(changes, start=1) if change)]
    return [cuts[cell - 1] for cell in kept[1:]], np.take(table, kept, axis)


def _cuts(edges: list[int], floor: int = -FAR + 1) -> list[int]:
    return sorted({edge for edge in edges if floor <= edge < FAR})


def _along(values: np.ndarray, axis: int, shape: tuple[int, ...]) -> np.ndarray:
    return np.broadcast_to(values.reshape([-1 if a == axis else 1 for a in range(len(shape))]), shape)


def _compact(leaf: Leaf) -> TypeGuard[Keys]:
    return isinstance(leaf, Keys) and len(leaf.runs) <= COMPACT_RUNS


def _cut(leaf: Leaf) -> bool:
    return isinstance(leaf, Offsets) or _compact(leaf)
