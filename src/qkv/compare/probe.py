"""A process that measures the memory of calls: `python -m qkv.compare.probe`, one JSON question a line."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from qkv.compare.calls import prepare
from qkv.compare.families import BY_NAME
from qkv.compare.memory import added_peak, serve
from qkv.compare.setting import SHORTEST, Setting


def measure(asked: Sequence[Any]) -> int:
    """Bytes that a call holds at its peak beyond inputs and results; asked: family, fields of a Setting, tokens."""
    name, given, tokens = asked
    setting, family = Setting(**given), BY_NAME[name]
    prepare(family, setting, SHORTEST).run()  # what libraries set up once in a process belongs to no call
    call = prepare(family, setting, tokens)
    added, found = added_peak(call.run)
    return max(added - sum(tensor.nbytes for tensor in call.read(found).values()), 0)


if __name__ == "__main__":
    serve(measure)
