"""What every config checks of its sizes, before a model is built of them."""

from __future__ import annotations

import math

from qkv.errors import ValueOutOfRange, message


def check_sizes(config: object, *names: str) -> None:
    """Refuse sizes below 1. The fields of a config are named in the errors."""
    for name in names:
        if getattr(config, name) < 1:
            _refuse(name, "be at least 1", getattr(config, name), "give the size used in training")


def check_multiple(config: object, name: str, of: str, remedy: str) -> None:
    """Refuse a size that is no multiple of another."""
    size, unit = getattr(config, name), getattr(config, of)
    if size % unit:
        _refuse(name, f"be a multiple of `{of}` = {unit}", size, remedy)


def check_positive(config: object, *names: str) -> None:
    """Refuse numbers that are not above 0 and finite."""
    for name in names:
        value = getattr(config, name)
        if not (math.isfinite(value) and value > 0):
            _refuse(name, "be a positive number", value, "give the number used in training")


def check_dropouts(config: object, *names: str) -> None:
    """Refuse shares outside of [0, 1)."""
    for name in names:
        if not 0 <= getattr(config, name) < 1:
            _refuse(name, "lie in [0, 1)", getattr(config, name), "0 switches it off")


def _refuse(name: str, must: str, value: object, remedy: str) -> None:
    raise ValueOutOfRange(message(f"`{name}` must {must}", f"got {value!r}", remedy))
