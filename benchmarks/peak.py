"""What one core could do at most: the loops of peak.c, compiled for this processor, and torch's sgemm.

Arithmetic: fused multiply-adds in float32, and products of bfloat16 in registers and in tiles, where the processor has
such units. Memory: a loop that reads and does nothing else, and one that reads and writes back.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor

SOURCE = Path(__file__).with_name("peak.c")
FLAGS = ("-O3", "-ffp-contract=fast", "-fPIC", "-shared")
NATIVE = ("-march=native", "-mcpu=native")  # the first that the compiler knows
Unit: TypeAlias = Literal["fma", "dot", "tile"]
ROUNDS: dict[Unit, int] = {"fma": 1_000_000, "dot": 1_000_000, "tile": 200_000}  # some milliseconds
NAMES: dict[Unit, str] = {"fma": "FMA loop", "dot": "bf16 dot-product loop", "tile": "bf16 tile loop"}


class Peak(NamedTuple):
    """A loop by its name, and its operations a second."""

    name: str
    rate: float


@cache
def loop() -> ctypes.CDLL | None:
    """The compiled loops; None without a compiler."""
    compiler = shutil.which(os.environ.get("CC", "cc"))
    if compiler is None:
        return None
    with TemporaryDirectory() as folder:
        library = Path(folder, "peak.so")
        for native in NATIVE:
            command = [compiler, *FLAGS, native, str(SOURCE), "-o", str(library)]
            if subprocess.run(command, check=False, capture_output=True).returncode == 0:
                return _typed(ctypes.CDLL(str(library)))
    return None


def _typed(library: ctypes.CDLL) -> ctypes.CDLL:
    for unit in ROUNDS:
        flops, run = getattr(library, f"{unit}_flops"), getattr(library, f"{unit}_run")
        flops.restype, run.restype = ctypes.c_double, ctypes.c_float
        run.argtypes = ctypes.c_long, ctypes.c_float, ctypes.c_float
    library.read_run.restype = ctypes.c_longlong
    library.read_run.argtypes = ctypes.c_void_p, ctypes.c_void_p, ctypes.c_long
    library.update_run.restype = None
    library.update_run.argtypes = ctypes.c_void_p, ctypes.c_void_p, ctypes.c_long, ctypes.c_longlong
    return library


def products(unit: Unit, threads: int = 1) -> float | None:
    """Floating-point operations a second: by thread CPU time, or by the clock where there are more threads.

    None, "not measured", without a compiler or such a unit. The loop runs outside Python's lock, so that threads do not
    wait.
    """
    library = loop()
    flops = 0.0 if library is None else getattr(library, f"{unit}_flops")()
    if not flops:
        return None
    rounds = ROUNDS[unit]

    def run() -> None:
        getattr(library, f"{unit}_run")(rounds, 0.999, 0.001)

    return max(_rate(run, flops * rounds, threads) for _ in range(5))


def most(dtype: torch.dtype, threads: int = 1) -> Peak | None:
    """The fastest way that the processor has to multiply such numbers and add in float32."""
    units: tuple[Unit, ...] = ("fma", "dot", "tile") if dtype == torch.bfloat16 else ("fma",)
    found = [(NAMES[unit], products(unit, threads)) for unit in units]
    return max((Peak(name, rate) for name, rate in found if rate), key=lambda peak: peak.rate, default=None)


def reader(pieces: Sequence[Tensor]) -> Callable[[], object] | None:
    """A call that reads contiguous pieces of memory, one after another; None without a compiler."""
    library = loop()
    if library is None:
        return None
    starts, sizes, held = _places(pieces)
    return lambda: library.read_run(starts, sizes, len(held))


def updater(pieces: Sequence[Tensor], flip: int = 1) -> Callable[[], object] | None:
    """A call that reads and writes contiguous pieces of memory, flipping bits of each; None without a compiler."""
    library = loop()
    if library is None:
        return None
    starts, sizes, held = _places(pieces)
    return lambda: library.update_run(starts, sizes, len(held), flip)


def _places(pieces: Sequence[Tensor]) -> tuple[object, object, list[Tensor]]:
    """Where they begin, their bytes, and the tensors themselves, which must stay while a loop runs over them."""
    assert all(piece.is_contiguous() for piece in pieces)
    starts = (ctypes.c_void_p * len(pieces))(*(piece.data_ptr() for piece in pieces))
    sizes = (ctypes.c_long * len(pieces))(*(piece.nbytes for piece in pieces))
    return starts, sizes, list(pieces)


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
