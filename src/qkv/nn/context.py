"""What one pass through a stack of layers says to each of them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from qkv.cache.within import looks_back, within
from qkv.patterns.given import key_lengths
from qkv.patterns.pattern import Pattern
from qkv.scores import Alibi, Relative
from qkv.types import AuxRequest

if TYPE_CHECKING:
    from qkv.nn.rotary import Rotation

MOSTLY_REAL = 0.5  # the share of pairs that are of real tokens, from which on padding is left in


@dataclass(frozen=True, slots=True, eq=False)
class Context:
    """One pass: how long its sequences are, and what is asked of every layer alike.

    The rows of a batch are padded on the right, as `Rows.front` leaves them.
    """

    lengths: tuple[int, ...] | None = None  # how many rows of each sequence are real; None: all
    rotation: Rotation | None = None  # rotary angles of these rows; None: a layer that needs them makes its own
    pattern: Pattern | None = None  # & to each layer's own
    bias: Tensor | Alibi | Relative | None = None  # added to the scores in layers that have none of their own
    aux: AuxRequest | None = None  # what to return beside the output of each attention
    backend: str | None = None  # in place of each layer's own
    _joined: dict[object, tuple[Pattern | None, Pattern | None]] = field(default_factory=dict, init=False, repr=False)

    def visible(self, own: Pattern | None) -> Pattern | None:
        """A layer's own pattern and that of the pass: both must hold. Layers of one pattern share the joined one."""
        if self.pattern is None or own is None:
            return self.pattern if own is None else own
        return self._remembered(("both", None), own)

    def within(self, own: Pattern | None, rows: int) -> Pattern | None:
        """`visible`, without padding up to `rows`: what self-attention sees that keeps no keys."""
        return self.visible(own) if self.lengths is None else self._remembered(("within", rows), own)

    def over(self, own: Pattern | None, lengths: tuple[int, ...] | None) -> Pattern | None:
        """`visible` over keys of another sequence, `lengths` of which are real."""
        return self.visible(own) if lengths is None else self._remembered(("over", lengths), own)

    def _remembered(self, kind: tuple[str, Any], own: Pattern | None) -> Pattern | None:
        if torch.compiler.is_compiling():
            return self._join(kind, own)
        place = kind, id(own)
        found = self._joined.get(place)
        if found is None:
            found = self._joined[place] = own, self._join(kind, own)  # `own` is kept, so that its id stays its own
        return found[1]

    def _join(self, kind: tuple[str, Any], own: Pattern | None) -> Pattern | None:
        visible = own if self.pattern is None else self.pattern if own is None else own & self.pattern
        match kind:
            case ("within", rows):
                real = _real_pairs(visible, self.lengths or (), rows)
            case ("over", lengths):
                real = key_lengths(lengths)
            case _:
                real = None
        return visible if real is None else real if visible is None else visible & real


def _real_pairs(visible: Pattern | None, lengths: tuple[int, ...], rows: int) -> Pattern | None:
    """What hides padding on the right; None where that is not worth a schedule for each length.

    A real query that looks back sees no padding, so that little of it may stay: its own rows have no meaning. A graph
    carries patterns as text alone, which has a word for lengths of keys.
    """
    if torch.compiler.is_compiling():
        return key_lengths(lengths)
    few = sum(n * n for n in lengths) >= MOSTLY_REAL * len(lengths) * rows * rows
    if few and visible is not None and looks_back(visible.expr):
        return None
    return within(lengths)
