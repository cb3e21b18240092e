"""Sentences that say in words what the numbers of a step mean, for one batch row and head. Prints nothing."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

from torch import Tensor

from qkv.explain.figures import label, listed, number, short, vector

SAME = 1e-9  # relative difference below which two weights count as equal
FAINT = 1 / 3  # share of an even weight below which a key hardly counts


def dot_product(query: Tensor, key: Tensor, names: tuple[str, str]) -> str:
    """One score written out: "S[q0,k3] = 1·2 + 0·1 = 2"."""
    pairs = list(zip(query.tolist(), key.tolist(), strict=True))
    terms = [f"{_factor(a)}·{_factor(b)}" for a, b in pairs]
    if len(terms) > 8:
        terms = [*terms[:3], "\u2026", terms[-1]]
    total = float(query @ key)
    return f"S[{label(names[0])},{label(names[1])}] = {' + '.join(terms)} = {short(total)}"


def quoted(token: str) -> str:
    """A token as it stands in a sentence: in quotes, unless it is a bare q0 or k0 of ours."""
    name = label(token, 16)
    return name if re.fullmatch(r"[qk]\d+", name) else f'"{name}"'


def _factor(x: float) -> str:
    text = short(x)
    return f"({text})" if text.startswith("\u2212") else text


def weighted_sum(weights: Tensor, values: Tensor, output: Tensor, name: str) -> str:
    """One output row written out: "O[q0] = 0.2·(1, 0) + 0.8·(0, 1) = (0.2, 0.8)"."""
    parts = [(weight, row) for weight, row in zip(weights.tolist(), values.tolist(), strict=True) if weight != 0]
    parts = sorted(parts, key=lambda part: -part[0])[:6] if len(parts) > 8 else parts
    terms = [f"{number(weight, 3)}·{vector(row, 4)}" for weight, row in parts]
    if len(parts) < int((weights != 0).sum()):
        terms.append("\u2026")
    return f"O[{label(name)}] = {' + '.join(terms) or '0'} = {vector(output.tolist(), 4)}"


def row_in_words(weights: Tensor, visible: Tensor, query: str, keys: Sequence[str]) -> str:
    """What one row of weights says: where this query looks."""
    who = quoted(query)
    seen = [index for index, may in enumerate(visible.tolist()) if may]
    names = ["itself" if keys[index] == query else quoted(keys[index]) for index in seen]
    share = [weights[index].item() for index in seen]
    if not seen:
        return f"{who} sees no key: its output is 0"
    if not all(map(math.isfinite, share)):
        return f"{who} is not a number: NaN or infinity stands in its query or in a key that it sees"
    if len(seen) == 1:
        return f"{who} sees {names[0]} alone, so all its weight goes there"
    groups = _groups(share)
    if len(groups) == 1:
        how = "splits evenly between" if len(seen) <= 4 else f"spreads evenly over all {len(seen)} keys:"
        return f"{who} {how} {listed(names)}"
    return f"{who} {_ranking(groups, share, names)}"


def _groups(share: Sequence[float]) -> list[list[int]]:
    """Indices of equal weights together, the largest first."""
    groups: list[list[int]] = []
    for index in sorted(range(len(share)), key=lambda i: -share[i]):
        if groups and math.isclose(share[groups[-1][0]], share[index], rel_tol=SAME):
            groups[-1].append(index)
        else:
            groups.append([index])
    return [sorted(group) for group in groups]


def _ranking(groups: list[list[int]], share: Sequence[float], names: Sequence[str]) -> str:
    """The largest weights by name, and those that hardly count."""
    first, rest = groups[0], groups[1:]
    strong = [group for group in rest if share[group[0]] >= FAINT / len(share)]
    faint = sorted(i for group in rest for i in group if share[i] < FAINT / len(share))
    if len(first) == 1 and share[first[0]] > 0.9:
        return f"looks almost only at {_with_share(first, share, names)}"
    lead = "listens most to" if len(first) == 1 or strong else "listens equally to"
    parts = [f"{lead} {_with_share(first, share, names)}"]
    parts += [f"then {_with_share(group, share, names)}" for group in strong[:2]]
    if faint and len(strong) <= 2:
        parts.append(f"hardly to {listed([names[i] for i in faint])}")
    return ", ".join(parts)


def _with_share(group: list[int], share: Sequence[float], names: Sequence[str]) -> str:
    percent = f"{100 * share[group[0]]:.0f}%"
    return f"{listed([names[i] for i in group])} ({percent}{' each' if len(group) > 1 else ''})"
