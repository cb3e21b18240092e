"""What one core could do at most: a loop of fused multiply-adds, compiled for this processor, and torch's sgemm."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

# Twelve sums that do not wait for one another keep every unit busy; `lanes` is the width of a register in floats.
SOURCE = r"""
#if defined(__AVX512F__)
enum { bytes = 64 };
#elif defined(__AVX__)
enum { bytes = 32 };
#else
enum { bytes = 16 };
#endif
enum { lanes = bytes / 4, sums = 12 };
typedef float vector __attribute__((vector_size(bytes)));

double flops(void) { return 2.0 * lanes * sums; }

float run(long rounds, float factor, float term) {
    vector sum[sums], by = factor - (vector){0}, add = term - (vector){0};
    for (int i = 0; i < sums; ++i) sum[i] = add * (float)i;
    for (long n = 0; n < rounds; ++n) {
#pragma GCC unroll 12
        for (int i = 0; i < sums; ++i) sum[i] = sum[i] * by + add;
    }
    for (int i = 1; i < sums; ++i) sum[0] += sum[i];
    return sum[0][0];
}
"""
FLAGS = ("-O3", "-ffp-contract=fast", "-fPIC", "-shared")
NATIVE = ("-march=native", "-mcpu=native")  # the first that the compiler knows
ROUNDS = 1_000_000  # some milliseconds


@cache
def loop() -> ctypes.CDLL | None:
    """The compiled loop; None without a compiler."""
    compiler = shutil.which(os.environ.get("CC", "cc"))
    if compiler is None:
        return None
    with TemporaryDirectory() as folder:
        source, library = Path(folder, "peak.c"), Path(folder, "peak.so")
        source.write_text(SOURCE, encoding="ascii")
        for native in NATIVE:
            command = [compiler, *FLAGS, native, str(source), "-o", str(library)]
            if subprocess.run(command, check=False, capture_output=True).returncode == 0:
                return _typed(ctypes.CDLL(str(library)))
    return None


def _typed(library: ctypes.CDLL) -> ctypes.CDLL:
    library.flops.restype, library.run.restype = ctypes.c_double, ctypes.c_float
    library.run.argtypes = ctypes.c_long, ctypes.c_float, ctypes.c_float
    return library


def fma(threads: int = 1) -> float | None:
    """Floating-point operations a second in float32: by thread CPU time, or by the clock where there are more threads.

    None, "not measured", without a compiler. The loop runs outside Python's lock, so that threads do not wait.
    """
    library = loop()
    if library is None:
        return None

    def run() -> None:
        library.run(ROUNDS, 0.999, 0.001)

    return max(_rate(run, library.flops() * ROUNDS, threads) for _ in range(5))


def sgemm(threads: int = 1) -> float:
    """torch's product of two 1,024 by 1,024 matrices, on as many threads as torch is set to."""
    left, right = torch.rand(2, 1024, 1024).unbind(0)
    out = left @ right
    clock = time.thread_time if threads == 1 else time.perf_counter
    return max(_per_second(lambda: torch.mm(left, right, out=out), clock, 2.0 * 1024**3) for _ in range(5))


def _rate(run: Callable[[], None], flops: float, threads: int) -> float:
    if threads == 1:
        return _per_second(run, time.thread_time, flops)
    with ThreadPoolExecutor(threads) as pool:

        def together() -> None:
            for future in [pool.submit(run) for _ in range(threads)]:
                future.result()

        return _per_second(together, time.perf_counter, flops * threads)


def _per_second(run: Callable[[], object], clock: Callable[[], float], flops: float) -> float:
    """Operations a second of one run."""
    begin = clock()
    run()
    return flops / (clock() - begin)
