"""A process that measures the memory of attention calls: `python -m qkv.demo.probe`, one JSON question a line."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from qkv.compare.memory import added_peak, serve
from qkv.demo.contenders import Call, ours, sdpa
from qkv.patterns import parse

CONTENDERS = {"qkv": ours, "sdpa": sdpa}


class Question(NamedTuple):
    """Which call to measure: who computes it, the pattern in text, and the sizes."""

    contender: str  # one of CONTENDERS
    pattern: str
    tokens: int
    heads: int
    head_dim: int


def measure(asked: Sequence[object]) -> int:
    """Bytes that the call adds at its peak, output included, and the dense mask where torch needs one."""
    question = Question(*asked)  # type: ignore[arg-type]
    call, mask_bytes = _prepare(question, question.tokens)
    _prepare(question, 64).run()  # what libraries set up once in a process belongs to no call
    extra, output = added_peak(call)
    assert output.shape[-2] == question.tokens
    return extra + mask_bytes


def _prepare(question: Question, tokens: int) -> Call:
    query, key, value = torch.randn(3, 1, question.heads, tokens, question.head_dim).unbind(0)
    pattern = parse(question.pattern)
    return CONTENDERS[question.contender](query, key, value, pattern)


if __name__ == "__main__":
    serve(measure)
