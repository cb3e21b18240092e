"""What an explained attention call consists of: the question, its steps, their checks. Prints and computes nothing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor

from qkv.patterns.pattern import Pattern

STEP_KEYS = ("scores", "scale", "softcap", "bias", "mask", "softmax", "dropout", "output")


@dataclass(frozen=True, kw_only=True)
class Check:
    """One comparison: with what, the greatest absolute difference, and the bound that it must not pass.

    A comparison that cannot be made has a reason in place of numbers, and counts as neither passed nor failed.
    """

    against: str
    error: float = 0.0
    bound: float = 0.0
    reason: str = ""

    @property
    def passed(self) -> bool:
        """Whether the difference lies within the bound; a difference that is NaN does not."""
        return bool(self.reason) or self.error <= self.bound


@dataclass(frozen=True, kw_only=True, eq=False)
class Setting:
    """The question as asked: tensors in float64 in the order (B, H, L, D), labels, and what shapes the weights."""

    title: str
    query: Tensor  # (B, H, L, D)
    key: Tensor  # (B, G, S, D)
    value: Tensor  # (B, G, S, V)
    query_tokens: tuple[str, ...]
    key_tokens: tuple[str, ...]
    pattern: Pattern | None
    allowed: Tensor  # bool (B, H, L, S)
    scale: float
    scale_given: bool
    softcap: float | None
    bias: Tensor | None  # (B, H, L, S)
    dropout_p: float
    seed: int
    query_offset: tuple[int, ...]  # the absolute position of query 0: one for all batch rows, or one each
    batch: int
    head: int
    row: int

    @property
    def sizes(self) -> dict[str, int]:
        """Axis sizes by letter."""
        B, H, L, D = self.query.shape
        G, S, V = self.value.shape[1:]
        return {"B": B, "H": H, "G": G, "L": L, "S": S, "D": D, "V": V}

    @property
    def key_head(self) -> int:
        """The key head that the chosen query head reads."""
        return self.head * self.key.shape[1] // self.query.shape[1]

    @property
    def queries(self) -> Tensor:
        """Q of the chosen batch row and head, (L, D)."""
        return self.query[self.batch, self.head]

    @property
    def keys(self) -> Tensor:
        """K of the chosen batch row and head, (S, D)."""
        return self.key[self.batch, self.key_head]

    @property
    def values(self) -> Tensor:
        """V of the chosen batch row and head, (S, V)."""
        return self.value[self.batch, self.key_head]

    @property
    def visible(self) -> Tensor:
        """What the chosen batch row and head may see, bool (L, S)."""
        return self.allowed[self.batch, self.head]

    def pick(self, tensor: Tensor) -> Tensor:
        """The chosen batch row and head of any (B, H, ...) tensor."""
        return tensor[self.batch, self.head]


@dataclass(frozen=True, kw_only=True, eq=False)
class Step:
    """One step: its formula, the shapes that go in and come out, its numbers for all of (B, H), and what to know.

    `parts` are tensors on the way: `bias` of bias; `allowed` of mask; `max`, `shifted`, `exp`, `sum` and `entropy` of
    softmax; `keep` of dropout.
    `words` say what the numbers of the chosen batch row and head mean, `pitfalls` what goes wrong in practice.
    """

    key: str
    title: str
    formula: str
    einsum: str = ""
    shapes: tuple[tuple[str, tuple[int, ...]], ...]
    value: Tensor
    parts: Mapping[str, Tensor] = field(default_factory=dict)
    words: tuple[str, ...] = ()
    pitfalls: tuple[str, ...] = ()
    checks: tuple[Check, ...] = ()


@dataclass(frozen=True, kw_only=True, eq=False)
class Mistake:
    """A classic mistake's weights, (B, H, L, S), a row in which it shows, and what its numbers say."""

    name: str
    title: str
    value: Tensor
    row: int
    words: tuple[str, ...]
