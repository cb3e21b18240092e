"""What answers a call in a test: a backend, and for the native one also the instruction set in use.

`EACH` and `ONE_NATIVE` parametrise a test by `backend`: it takes the name, and the fixture of that name in conftest.py
puts the instruction set in use.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from qkv.backends import extension
from qkv.backends.cpu import Cpu, Prepared

ISAS: tuple[str, ...] = tuple(extension.native.available_isas()) if extension.native else ()  # best first
NATIVE = tuple(f"cpu-{isa}" for isa in ISAS)
CASTING = {"avx512bf16", "amx", "tiles"}  # multiply bfloat16 numbers as they are
FEW = 8  # calls of so many queries are computed in another order than others: docs/decoding.md
TORCH = ("reference", "blockwise")
OURS = (*TORCH, *NATIVE)

EACH = pytest.mark.parametrize("backend", OURS, indirect=True)
# For what does not reach the kernels, or reaches them as other tests do: the best instruction set speaks for all.
ONE_NATIVE = pytest.mark.parametrize("backend", [*TORCH, *NATIVE[:1]], indirect=True)
EACH_NATIVE = pytest.mark.parametrize("backend", NATIVE, indirect=True)
BEST = pytest.mark.parametrize("backend", NATIVE[:1], indirect=True)


def each_with(*types: torch.dtype) -> pytest.MarkDecorator:
    """Every engine with every `dtype` of these that it takes."""
    pairs = [(name, dtype) for name in OURS for dtype in types]
    return pytest.mark.parametrize("backend, dtype", pairs, indirect=["backend"])


def isa() -> str:
    """The instruction set in use."""
    assert extension.native is not None, extension.MISSING
    return extension.native.isa()


@contextmanager
def using(engine: str) -> Iterator[str]:
    """The name of the backend of an engine, whose instruction set is in use inside the block."""
    name, _, wanted = engine.partition("-")
    if not wanted:
        yield name
        return
    native = extension.native
    assert native is not None, extension.MISSING
    before = native.isa()
    assert native.choose_isa(wanted), f"{wanted} is not one of {native.available_isas()}"
    try:
        yield name
    finally:
        native.choose_isa(before)


def casts(dtype: torch.dtype) -> bool:
    """Whether the instruction set in use multiplies weights of calls of this type as numbers of it: `budgets.Cast`."""
    return dtype == torch.bfloat16 and isa() in CASTING


@contextmanager
def widened() -> Iterator[None]:
    """Inside the block the native core gives its output as it is before it is rounded, in the compute type.

    Only for calls that ask for more than the output: others may be remembered from before.
    """
    answer, gradients = Cpu.answer, Cpu.gradients

    def wide_answer(self, work):
        wide = work.problem.compute_dtype
        return Prepared.of(work, wide).answer(work, wide)

    def wide_gradients(self, work, *args, **options):
        return Prepared.of(work, work.problem.compute_dtype).gradients(work, *args, **options)

    Cpu.answer, Cpu.gradients = wide_answer, wide_gradients
    try:
        yield
    finally:
        Cpu.answer, Cpu.gradients = answer, gradients
