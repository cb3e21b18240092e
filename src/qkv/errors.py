"""Every error that qkv raises, and the one form of its text. Knows nothing of tensors.

A message has three parts: what must hold, what was seen, what to do.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class QkvError(Exception):
    """The root of all errors of this package."""


class ShapeError(QkvError, ValueError):
    """Sizes of axes do not fit together."""


class MaskError(QkvError, ValueError):
    """A mask, a block layout or a pattern has the wrong form for this call."""


class ValueOutOfRange(QkvError, ValueError):
    """A number lies outside what its argument allows."""


class LayoutError(QkvError, ValueError):
    """The order of axes or of positions is not a legal one."""


class DTypeError(QkvError, TypeError):
    """An argument has the wrong type, or tensors have types that do not go together."""


class DeviceError(QkvError, ValueError):
    """Tensors of one call live on different devices."""


class UnsupportedError(QkvError, NotImplementedError):
    """The question is legal, but the backend that was named cannot answer it."""


class SizeLimit(QkvError, ValueError):
    """A size is beyond what an index can count."""


class UnknownName(QkvError, ValueError):
    """A name is not one of those that exist."""


class PatternSyntaxError(QkvError, ValueError):
    """A pattern's text cannot be read."""


class CheckpointError(QkvError, ValueError):
    """A file of tensors is not what it says it is."""


class InvertedMaskWarning(UserWarning):
    """A mask hides every key from every query."""


class AddedMaskWarning(UserWarning):
    """A float bias looks like a mask of zeros and ones, which would be added, not applied."""


def message(holds: str, seen: str, remedy: str) -> str:
    """Join the three parts of an error's text.

    >>> message("`scale` must be a finite number", "got nan", "leave it out for 1/sqrt(D)")
    '`scale` must be a finite number; got nan; leave it out for 1/sqrt(D)'
    """
    return f"{holds}; {seen}; {remedy}"


def unknown_name(kind: str, name: object, valid: Iterable[str]) -> UnknownName:
    """An error for a name that does not exist, with the nearest one that does."""
    names = sorted(valid)
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.4) if isinstance(name, str) else []
    remedy = f"did you mean {near[0]!r}?" if near else "choose one of these"
    return UnknownName(message(f"`{kind}` must be one of {', '.join(names)}", f"got {name!r}", remedy))
