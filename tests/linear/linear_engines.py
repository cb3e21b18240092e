"""The engines of the linear family by name, for tests that ask each of them: `-k cpu` asks the native core alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

import engines
from qkv.backends import extension
from qkv.linear import chunked, native, reference
from qkv.linear.recurrence import Outcome, Recurrence, Streams

Answer = Callable[[Recurrence, Streams], Outcome]

TORCH = ("reference", "chunked")
NATIVE = tuple(f"cpu-{isa}" for isa in engines.ISAS) or ("cpu",)  # best instruction set first


@contextmanager
def using(name: str) -> Iterator[Answer]:
    """The engine of a name, for forward and backward passes inside the block; skips the test where there is none."""
    if name in TORCH:
        yield {"reference": reference.answer, "chunked": chunked.answer}[name]
        return
    if extension.MISSING is not None:
        pytest.skip(extension.MISSING)
    with engines.using(name):
        yield _native


def _native(recurrence: Recurrence, streams: Streams) -> Outcome:
    against = native.reasons_against(recurrence, streams.query.device)
    if against:
        pytest.skip("; ".join(against))
    return native.answer(recurrence, streams)


def each(*names: Any) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("engine", names)


EACH = each(*TORCH, NATIVE[0])
FAST = each("chunked", NATIVE[0])
FAST_EACH_ISA = each("chunked", *NATIVE)
# What other tests ask the best instruction set.
FAST_LONG = each("chunked", NATIVE[0], *(pytest.param(isa, marks=pytest.mark.long) for isa in NATIVE[1:]))
