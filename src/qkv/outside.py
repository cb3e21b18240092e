"""Functions that torch.compile must not look into."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch

F = TypeVar("F", bound=Callable[..., Any])


def outside_of_graphs(reason: str) -> Callable[[F], F]:
    """A decorator: torch.compile runs the function by itself, between two graphs; with fullgraph=True it says why.

    As torch.compiler.disable, which loads the whole compiler: here that waits until somebody else has loaded it.
    """

    def decorate(function: F) -> F:
        disabled: list[Any] = []

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            if "torch._dynamo" not in sys.modules:
                return function(*args, **kwargs)
            if not disabled:
                disabled.append(torch.compiler.disable(function, reason=reason))
            return disabled[0](*args, **kwargs)

        marks = {"_torchdynamo_disable": True, "_torchdynamo_disable_msg": reason}  # by which the compiler knows them
        vars(call).update(marks)
        return cast("F", call)

    return decorate
