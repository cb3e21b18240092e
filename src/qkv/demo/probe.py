"""A process that measures the memory of attention calls: `python -m qkv.demo.probe`, one JSON question a line.

A fresh fork of this idle process answers each question, so that no call inherits what another one left behind. The
figure is the high-water mark of resident memory during the call, less what was resident once the inputs were there.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import NamedTuple

import torch

from qkv.demo.contenders import Call, ours, sdpa
from qkv.patterns import parse

STATUS = Path("/proc/self/status")
RESET = Path("/proc/self/clear_refs")
CONTENDERS = {"qkv": ours, "sdpa": sdpa}


class Question(NamedTuple):
    """Which call to measure: who computes it, the pattern in text, and the sizes."""

    contender: str  # one of CONTENDERS
    pattern: str
    tokens: int
    heads: int
    head_dim: int


def measure(question: Question) -> int:
    """Bytes that the call adds at its peak, output included, and the dense mask where torch needs one."""
    call, mask_bytes = _prepare(question, question.tokens)
    _prepare(question, 64).run()  # what libraries set up once in a process belongs to no call
    before = _resident("VmRSS")
    RESET.write_text("5", encoding="ascii")  # sets the high-water mark to what is resident now
    output = call()
    extra = _resident("VmHWM") - before
    assert output.shape[-2] == question.tokens
    return max(extra, 0) + mask_bytes


def serve() -> None:
    """Answer questions from stdin on stdout until stdin ends."""
    torch.set_num_threads(1)
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            sys.stdout.write(f"{measure(Question(*json.loads(line)))}\n")
            sys.stdout.flush()
            os._exit(0)
        _, status = os.waitpid(child, 0)
        if status:
            raise SystemExit(1)


def _prepare(question: Question, tokens: int) -> Call:
    query, key, value = torch.randn(3, 1, question.heads, tokens, question.head_dim).unbind(0)
    pattern = parse(question.pattern)
    return CONTENDERS[question.contender](query, key, value, pattern)


def _resident(field: str) -> int:
    """A memory figure of this process in bytes; the kernel gives it in kB."""
    for line in STATUS.read_text(encoding="ascii").splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise OSError(f"{STATUS} has no {field}")


if __name__ == "__main__":
    serve()
