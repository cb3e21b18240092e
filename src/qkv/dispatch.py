"""Which backend answers a problem: an ordered tuple, the first without a reason against it;
a named one is used or refused.
"""

from __future__ import annotations

from dataclasses import dataclass

from qkv.backends.absent import Absent
from qkv.backends.base import Backend
from qkv.backends.blockwise import Blockwise
from qkv.backends.cpu import Cpu
from qkv.backends.extension import check_isa
from qkv.backends.reference import Reference
from qkv.backends.sdpa import Sdpa
from qkv.errors import UnsupportedError, message, unknown_name
from qkv.problem import Problem
from qkv.settings import BACKEND, read

BACKENDS: tuple[Backend, ...] = (
    Cpu(),
    Absent("triton", "the GPU kernels are not part of this version"),
    Absent("flex", "running through torch's flex_attention is not part of this version"),
    Blockwise(),
    Sdpa(),
    Reference(),
)
# What "auto" tries, in this order: never by speed, so that bits do not depend on sizes.
AUTOMATIC = ("cpu", "triton", "blockwise")


@dataclass(frozen=True, slots=True)
class Choice:
    """The backend taken, and for every other one why it was not."""

    backend: Backend
    refusals: dict[str, tuple[str, ...]]


def choose(problem: Problem, name: str) -> Choice:
    """The named backend, or for "auto" the first that has no reason against the problem.

    Raises UnknownName, and UnsupportedError with every reason when a named backend cannot answer.
    """
    check_isa()
    names = [backend.name for backend in BACKENDS]
    if not isinstance(name, str):
        raise unknown_name("backend", name, ["auto", *names])
    from_setting = name == "auto" and read(BACKEND) != "auto"
    if from_setting:
        name = read(BACKEND)
    if name != "auto" and name not in names:
        raise unknown_name("backend", name, ["auto", *names])
    refusals = {backend.name: tuple(reasons_against(backend, problem)) for backend in BACKENDS}
    if name == "auto":
        taken = next(candidate for candidate in AUTOMATIC if not refusals[candidate])
    elif refusals[name]:
        raise UnsupportedError(
            message(
                f"`{BACKEND.name if from_setting else 'backend'}` {name!r} must be able to answer the call",
                ", ".join(refusals[name]),
                f'use "auto", or {_able(refusals)}',
            )
        )
    else:
        taken = name
    for other, reasons in refusals.items():
        if other != taken and not reasons:
            refusals[other] = (_not_taken(other, name),)
    del refusals[taken]
    return Choice(next(backend for backend in BACKENDS if backend.name == taken), refusals)


def reasons_against(backend: Backend, problem: Problem) -> list[str]:
    """Why a backend cannot answer: not on this machine, or its own reasons."""
    return [backend.unavailable] if backend.unavailable else backend.reasons_against(problem)


def _able(refusals: dict[str, tuple[str, ...]]) -> str:
    return "one of " + ", ".join(name for name, reasons in refusals.items() if not reasons)


def _not_taken(other: str, asked: str) -> str:
    if asked != "auto":
        return f"another was named: {asked!r}"
    return "a backend before it in the order can" if other in AUTOMATIC else "runs only when named"
