"""An explanation as plain lists, numbers and text, for JSON. Numbers that JSON lacks become text."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TypeAlias

from torch import Tensor

from qkv.explain.steps import Check, Mistake, Setting, Step

Nested: TypeAlias = "float | bool | str | list[Nested]"


def record(setting: Setting, steps: Mapping[str, Step]) -> dict[str, object]:
    """The setting and every step; tensors as nested lists in the order of their axes."""
    return {
        "title": setting.title,
        "sizes": setting.sizes,
        "query_tokens": list(setting.query_tokens),
        "key_tokens": list(setting.key_tokens),
        "query": nested(setting.query),
        "key": nested(setting.key),
        "value": nested(setting.value),
        "pattern": None if setting.pattern is None else str(setting.pattern),
        "scale": setting.scale,
        "softcap": setting.softcap,
        "dropout_p": setting.dropout_p,
        "dropout_key": setting.seed,
        "query_offset": list(setting.query_offset),
        "chosen": {"batch": setting.batch, "head": setting.head, "row": setting.row},
        "steps": {key: _step(step) for key, step in steps.items()},
    }


def record_mistake(mistake: Mistake) -> dict[str, object]:
    """One mistake, its weights included."""
    return {
        "name": mistake.name,
        "title": mistake.title,
        "value": nested(mistake.value),
        "row": mistake.row,
        "words": list(mistake.words),
    }


def _step(step: Step) -> dict[str, object]:
    return {
        "title": step.title,
        "formula": step.formula,
        "einsum": step.einsum,
        "shapes": {name: list(shape) for name, shape in step.shapes},
        "value": nested(step.value),
        "parts": {name: nested(part) for name, part in step.parts.items()},
        "words": list(step.words),
        "pitfalls": list(step.pitfalls),
        "checks": [_check(check) for check in step.checks],
    }


def _check(check: Check) -> dict[str, object]:
    if check.reason:
        return {"against": check.against, "not_comparable": check.reason}
    error = _number(check.error)
    return {"against": check.against, "error": error, "bound": check.bound, "passed": check.passed}


def nested(tensor: Tensor) -> Nested:
    """A tensor as nested lists; infinities and NaN as "inf", "-inf" and "nan"."""
    return _number(tensor.tolist())


def _number(node: Nested) -> Nested:
    if isinstance(node, list):
        return [_number(child) for child in node]
    if isinstance(node, float) and not math.isfinite(node):
        return str(node)
    return node
