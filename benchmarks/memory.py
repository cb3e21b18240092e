"""Peak memory of a registry's call in a process of its own: `python benchmarks/memory.py` answers one question a line.

The figure is the high-water mark of resident memory (VmHWM) during the call, less what was resident once the library
was warm and the inputs, and the dense mask of a contender that needs one, were there; the mask's own size is added.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

import linear_cases
import linear_peers
from peers import CONTENDERS
from registry import BY_NAME, Contender, Direction, make_data, recording

from qkv.compare import memory

TINY = 64  # tokens of the call that sets up what libraries set up once


class Question(NamedTuple):
    """Whose call: one of the registry's contenders, cases, lengths and directions."""

    contender: str
    case: str
    tokens: int
    direction: Direction


Ask: TypeAlias = Callable[[Question], int | None]  # None where it cannot be measured


class MemoryProbe(memory.MemoryProbe):
    """The helper process that measures the registry's calls."""

    def __init__(self) -> None:
        super().__init__(__file__)


def measure(asked: Sequence[object]) -> int:
    """Bytes that the call adds at its peak, its results included, in this process."""
    question = Question(*asked)
    direction = question.direction
    _contender(question, TINY).run(direction)
    contender = _contender(question, question.tokens)
    with recording(direction):
        call = contender.prepare(direction)
        extra, found = memory.added_peak(call.run)
    assert call.read(found)["output"].shape[2] == question.tokens
    return extra + contender.mask_bytes


def _contender(question: Question, tokens: int) -> Contender:
    if question.case in linear_cases.BY_NAME:
        linear = linear_cases.BY_NAME[question.case]
        contender = linear_peers.CONTENDERS[question.contender](linear, linear_cases.make_data(tokens, linear))
    else:
        case = BY_NAME[question.case]
        contender = CONTENDERS[question.contender](case, make_data(tokens, case))
    assert isinstance(contender, Contender)
    return contender


if __name__ == "__main__":
    memory.serve(measure)
