"""The share of numbers that a layer drops in training."""

from __future__ import annotations

from qkv.errors import ValueOutOfRange, message
from qkv.inputs import read_number


def read_share(name: str, share: object) -> float:
    """The share p of numbers to set to 0, the others divided by 1 - p: 0 ≤ p < 1."""
    number = read_number(name, share, "say 0.0 for no dropout")
    if not 0.0 <= number < 1.0:
        raise ValueOutOfRange(message(f"`{name}` must lie in [0, 1)", f"got {share}", "0 switches it off"))
    return number
