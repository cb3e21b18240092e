"""The asking side of `qkv.demo.probe`: one helper process for a whole table. Without /proc every answer is None."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import IO

from qkv.demo.probe import RESET, STATUS, Question

# One thread; and glibc gives what is freed back at once, so that a call cannot hide in memory that its inputs left.
STEADY = {"OMP_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}


class MemoryProbe:
    """The helper process, started at once; `ask` waits for one figure, `close` ends it."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None
        if STATUS.exists() and os.access(RESET, os.W_OK):
            self._process = subprocess.Popen(
                [sys.executable, "-m", "qkv.demo.probe"],
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


def _pipe(stream: IO[str] | None) -> IO[str]:
    assert stream is not None
    return stream
