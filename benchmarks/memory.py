"""Peak memory of a registry's call in a process of its own: `python benchmarks/memory.py` answers one question a line.

The figure is the high-water mark of resident memory (VmHWM) during the call, less what was resident once the library
was warm and the inputs, and the dense mask of a contender that needs one, were there; the mask's own size is added.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from registry import BY_NAME, CONTENDERS, Direction, make_data

from qkv.demo import memory

TINY = 64  # tokens of the call that sets up what libraries set up once


class Question(NamedTuple):
    """Whose call: one of the registry's contenders, cases, lengths and directions."""

    contender: str
    case: str
    tokens: int
    direction: Direction


class MemoryProbe(memory.MemoryProbe):
    """The helper process that measures the registry's calls."""

    def __init__(self) -> None:
        super().__init__(__file__)


def measure(asked: Sequence[object]) -> int:
    """Bytes that the call adds at its peak, its results included, in this process."""
    question = Question(*asked)
    case, contender = BY_NAME[question.case], CONTENDERS[question.contender]
    contender(case, make_data(TINY)).run(question.direction)
    call = contender(case, make_data(question.tokens))
    extra, result = memory.added_peak(lambda: call.run(question.direction))
    assert result["output"].shape[2] == question.tokens
    return extra + call.mask_bytes


if __name__ == "__main__":
    memory.serve(measure)
