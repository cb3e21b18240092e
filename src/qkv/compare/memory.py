"""Peak memory of calls, each in a fresh fork of an idle helper process, so that no call inherits what another left.

The helper runs a module that passes its own measurement to `serve`; a question is a line of JSON, an answer a number.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, TypeVar

import torch

STATUS = Path("/proc/self/status")
RESET = Path("/proc/self/clear_refs")
# One thread; and glibc gives what is freed back at once, so that a call cannot hide in memory that its inputs left.
STEADY = {"OMP_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
T = TypeVar("T")


class MemoryProbe:
    """The helper process, started at once; `ask` waits for one figure, `close` ends it. Without /proc all are None."""

    def __init__(self, *arguments: str) -> None:
        self._process: subprocess.Popen[str] | None = None
        if STATUS.exists() and os.access(RESET, os.W_OK):
            self._process = subprocess.Popen(  # noqa: S603 - the arguments are written by the importing module
                [sys.executable, *arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env={**os.environ, **STEADY},
            )

    def ask(self, question: Sequence[object]) -> int | None:
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


def serve(measure: Callable[[Sequence[object]], int]) -> None:
    """Answer questions from stdin on stdout until stdin ends, each in a fork of this process."""
    torch.set_num_threads(1)
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            sys.stdout.write(f"{measure(json.loads(line))}\n")
            sys.stdout.flush()
            os._exit(0)
        _, status = os.waitpid(child, 0)
        if status:
            raise SystemExit(1)


def added_peak(call: Callable[[], T]) -> tuple[int, T]:
    """The high-water mark of resident memory during a call less what was resident before it, and its result."""
    before = _resident("VmRSS")
    RESET.write_text("5", encoding="ascii")  # sets the high-water mark to what is resident now
    result = call()
    return max(_resident("VmHWM") - before, 0), result


def _resident(field: str) -> int:
    """A memory figure of this process in bytes; the kernel gives it in kB."""
    for line in STATUS.read_text(encoding="ascii").splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise OSError(f"{STATUS} has no {field}")


def _pipe(stream: IO[str] | None) -> IO[str]:
    assert stream is not None
    return stream
