"""Which engine answers a recurrence: the native core where it can, else torch operations by chunks; a named one is used
or refused.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import torch

from qkv.backends.base import without_autocast
from qkv.errors import UnsupportedError, message, unknown_name
from qkv.linear import chunked, native, reference
from qkv.linear.fused import has_tangents
from qkv.linear.recurrence import Outcome, Recurrence, Streams
from qkv.settings import BACKEND, read
from qkv.shapes import values_can_be_seen

Engine: TypeAlias = Callable[[Recurrence, Streams], Outcome]

ENGINES: dict[str, Engine] = {"cpu": native.answer, "chunked": chunked.answer, "reference": reference.answer}
# What "auto" tries, in this order: never by speed, so that bits do not depend on sizes.
AUTOMATIC = ("cpu", "chunked")
NAMES = ("auto", *ENGINES)


def answer(recurrence: Recurrence, streams: Streams, backend: str = "auto") -> Outcome:
    """Output and last state, differentiable in whatever way the streams are.

    "cpu" is the native core, "chunked" torch operations on any device, "reference" the recurrence token by token. In a
    graph of torch.compile, under transforms of torch.func, forward-mode differentiation and without numbers (meta and
    fake tensors) "auto" is "chunked".
    """
    return run(ENGINES[choose(recurrence, streams, backend)], recurrence, streams)


def run(engine: Engine, recurrence: Recurrence, streams: Streams) -> Outcome:
    """Answer by an engine; without any sequence there is nothing to ask it."""
    if not recurrence.sequences:
        return Outcome(
            streams.value.clone(), streams.value.new_zeros(recurrence.state_shape, dtype=recurrence.compute_dtype)
        )
    with without_autocast(streams.query.device):
        return engine(recurrence, streams)


def choose(recurrence: Recurrence, streams: Streams, backend: str) -> str:
    """The name of the engine that answers.

    Raises UnknownName, and UnsupportedError with every reason when a named engine cannot answer.
    """
    check_name(backend)
    by, name = _named(backend)
    if name == "auto":
        return next(one for one in AUTOMATIC if not reasons_against(one, recurrence, streams))
    reasons = reasons_against(name, recurrence, streams)
    if reasons:
        able = [one for one in ENGINES if not reasons_against(one, recurrence, streams)]
        holds = f"`{by}` {name!r} must be able to answer the call"
        raise UnsupportedError(message(holds, ", ".join(reasons), f'use "auto", or one of {", ".join(able)}'))
    return name


def check_name(backend: object) -> None:
    """Raise unless the name is one of those that exist."""
    if not isinstance(backend, str) or backend not in NAMES:
        raise unknown_name("backend", backend, NAMES)


def reasons_against(name: str, recurrence: Recurrence, streams: Streams) -> list[str]:
    """Why an engine cannot answer; empty when it can."""
    if name != "cpu":
        return []
    if not values_can_be_seen(streams.query):
        return ["the native core needs numbers in memory, in no graph and no transform"]
    if has_tangents(*streams):
        return ["the native core has no forward-mode derivatives"]
    return native.reasons_against(recurrence, streams.query.device)


def _named(backend: str) -> tuple[str, str]:
    """Who named an engine, and which. QKV_BACKEND speaks for calls at "auto", where its backend is one of these too."""
    if backend == "auto" and not torch.compiler.is_compiling():
        from_setting = read(BACKEND)
        if from_setting in ENGINES:
            return BACKEND.name, from_setting
    return "backend", backend
