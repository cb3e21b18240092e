"""Every environment variable that qkv reads: one table, checked whenever a value is read. Knows nothing of torch."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Generic, TypeVar

from qkv.errors import ValueOutOfRange, message, unknown_name

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting(Generic[T_co]):
    """One variable: its name, its default as text, what is valid in words, what it means, and how its text is read."""

    name: str
    default: str
    valid: str
    meaning: str
    parse: Callable[[str], T_co | None]  # None for a text that is not valid


def _one_of(*names: str) -> Callable[[str], str | None]:
    return lambda text: text if text in names else None


def _whole_number(text: str) -> int | None:
    return int(text) if text.isascii() and text.isdigit() else None


BACKEND = Setting(
    name="QKV_BACKEND",
    default="auto",
    valid="auto, reference, blockwise, cpu, sdpa, flex, triton",
    meaning="the backend of calls that leave `backend` at auto",
    parse=_one_of("auto", "reference", "blockwise", "cpu", "sdpa", "flex", "triton"),
)
PLAN_CACHE_MB = Setting(
    name="QKV_PLAN_CACHE_MB",
    default="64",
    valid="a whole number of megabytes, 0 to keep none",
    meaning="how much memory compiled block schedules may take before the oldest are dropped",
    parse=_whole_number,
)
ISA = Setting(
    name="QKV_ISA",
    default="auto",
    valid="auto, amx, avx512bf16, avx512, avx2, v2, neon, tiles",
    meaning="the instruction set of the native core, read when it is loaded",
    parse=_one_of("auto", "amx", "avx512bf16", "avx512", "avx2", "v2", "neon", "tiles"),
)
SETTINGS: tuple[Setting[object], ...] = (BACKEND, PLAN_CACHE_MB, ISA)

_overrides: ContextVar[Mapping[str, str]] = ContextVar("qkv_settings")


def read(setting: Setting[T]) -> T:
    """The value now: of the innermost `override`, else of the environment, else the default.

    Raises ValueOutOfRange for a text that is not valid.
    """
    overridden = _overrides.get({}).get(setting.name)
    text = os.environ.get(setting.name, setting.default) if overridden is None else overridden
    return _checked(setting, text)


@contextmanager
def override(name: str, value: object) -> Iterator[None]:
    """Set one variable for the calls inside the block, in this thread or task only. Meant for tests.

    Raises UnknownName for a variable that does not exist, ValueOutOfRange for a value that is not valid.
    """
    table = {setting.name: setting for setting in SETTINGS}
    if name not in table:
        raise unknown_name("name", name, table)
    _checked(table[name], str(value))
    token = _overrides.set({**_overrides.get({}), name: str(value)})
    try:
        yield
    finally:
        _overrides.reset(token)


def _checked(setting: Setting[T], text: str) -> T:
    value = setting.parse(text)
    if value is None:
        holds = f"`{setting.name}` must be {setting.valid}"
        raise ValueOutOfRange(message(holds, f"got {text!r}", f"unset it for {setting.default!r}"))
    return value
