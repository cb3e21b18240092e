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

ISAS: tuple[str, ...] = tuple(extension.native.available_isas()) if extension.native else ()  # best first
NATIVE = tuple(f"cpu-{isa}" for isa in ISAS)
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
