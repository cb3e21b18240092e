"""What makes a function a constructor of patterns: its name can be read, and while a graph is captured its calls are
only written down, for neither the tensors nor the arithmetic of a pattern belong into a graph.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import wraps
from typing import ParamSpec

import torch
from torch import Tensor

from qkv.patterns.pattern import Pattern
from qkv.patterns.text import CONSTRUCTORS
from qkv.shapes import ORDINARY

P = ParamSpec("P")


def constructor(function: Callable[P, Pattern]) -> Callable[P, Pattern]:
    """A constructor of literals and tensors; one of patterns, or with an `align`, is only `registered`."""
    name, parameters = function.__name__, tuple(inspect.signature(function).parameters)
    registered(function)

    @wraps(function)
    def construct(*args: P.args, **kwargs: P.kwargs) -> Pattern:
        if torch.compiler.is_dynamo_compiling() or _any_unseen(*args, *kwargs.values()):
            return _written(name, parameters, args, kwargs)
        return function(*args, **kwargs)

    return construct


def registered(function: Callable[P, Pattern]) -> Callable[P, Pattern]:
    """The function itself, whose name can now be read in a text."""
    CONSTRUCTORS[function.__name__] = function
    return function


def _any_unseen(*values: object) -> bool:
    """Whether some tensor stands for numbers that are not known yet."""
    return any(isinstance(value, Tensor) and type(value) not in ORDINARY for value in values)


def _written(name: str, parameters: tuple[str, ...], args: tuple[object, ...], kwargs: dict[str, object]) -> Pattern:
    """The call as a form."""
    given = list(zip(parameters, args, strict=False))
    parts = [*(_form(parameter, value) for parameter, value in given)]
    parts += [f"{parameter}={_form(parameter, value)}" for parameter, value in kwargs.items()]
    tensors = tuple(value for value in (*args, *kwargs.values()) if isinstance(value, Tensor))
    return Pattern(None, f"{name}({', '.join(parts)})", tensors=tensors)


def _form(parameter: str, value: object) -> str:
    """One argument as a form says it."""
    if isinstance(value, Tensor):
        return f"{{{parameter}}}"
    if isinstance(value, list | tuple):
        items = "".join(f"{_form(parameter, item)}, " for item in value)
        return f"[{items}]" if isinstance(value, list) else f"({items})"
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{int(value)}"  # one that is symbolic becomes the number that it is
    return repr(value)
