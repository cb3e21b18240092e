"""Peak memory of a call in a process of its own: `python benchmarks/memory.py` answers one JSON question a line.

The figure is the high-water mark of resident memory (VmHWM) during the call, less what was resident once the library
was warm and the inputs, and the dense mask of a contender that needs one, were there; the mask's own size is added.
Every answer comes from a fresh fork of an idle process, so that no call inherits what another left behind.
Without /proc there is none.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import IO, NamedTuple

import torch
from registry import BY_NAME, CONTENDERS, Direction, make_data

STATUS = Path("/proc/self/status")
RESET = Path("/proc/self/clear_refs")
TINY = 64  # tokens of the call that sets up what libraries set up once
# One thread; and glibc gives what is freed back at once, so that a call cannot hide in memory that its inputs left.
STEADY = {"OMP_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}


class Question(NamedTuple):
    """Whose call: one of the registry's contenders, cases, lengths and directions."""

    contender: str
    case: str
    tokens: int
    direction: Direction


class MemoryProbe:
    """The helper process, started at once; `ask` waits for one figure, `close` ends it."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None
        if STATUS.exists() and os.access(RESET, os.W_OK):
            self._process = subprocess.Popen(
                [sys.executable, __file__],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env={**os.environ, **STEADY},
            )

    def ask(self, question: Question) -> int | None:
        """Bytes that the call adds at its peak; None where it cannot be measured."""
        if self._process is None or self._process.poll() is not None:
            return None
        _pipe(self._process.stdin).write(json.dumps(question) + "\n")
        _pipe(self._process.stdin).flush()
        answer = _pipe(self._process.stdout).readline()
        return int(answer) if answer else None

    def close(self) -> None:
        """End the helper: its questions have ended."""
        if self._process is not None:
            _pipe(self._process.stdin).close()
            _pipe(self._process.stdout).close()
            self._process.wait()


def measure(question: Question) -> int:
    """Bytes that the call adds at its peak, its results included, in this process."""
    case, contender = BY_NAME[question.case], CONTENDERS[question.contender]
    contender(case, make_data(TINY)).run(question.direction)
    call = contender(case, make_data(question.tokens))
    before = _resident("VmRSS")
    RESET.write_text("5", encoding="ascii")  # sets the high-water mark to what is resident now
    result = call.run(question.direction)
    extra = _resident("VmHWM") - before
    assert result["output"].shape[2] == question.tokens
    return max(extra, 0) + call.mask_bytes


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


def _resident(field: str) -> int:
    """A memory figure of this process in bytes; the kernel gives it in kB."""
    for line in STATUS.read_text(encoding="ascii").splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise OSError(f"{STATUS} has no {field}")


def _pipe(stream: IO[str] | None) -> IO[str]:
    assert stream is not None
    return stream


if __name__ == "__main__":
    serve()
