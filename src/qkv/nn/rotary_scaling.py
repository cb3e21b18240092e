"""How rotary frequencies are stretched for more tokens than a model was trained on: plain numbers, no tensors.

A scaling makes the frequencies of a rotated width W, in radians a token, from those of the base, f_m = base^(-2m/W)
for m = 0 .. W/2 - 1, and says by how much cosines and sines are multiplied.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass

import numpy as np

from qkv.errors import ValueOutOfRange, message
from qkv.inputs import read_number
from qkv.patterns.arguments import one_flag

_REMEDY = "give the numbers of the model's config"


def plain_frequencies(base: float, width: int) -> np.ndarray:
    """base^(-2m/W), float64 (W/2,). Source: Su et al., RoFormer, arXiv:2104.09864, section 3.2.2."""
    return np.float64(base) ** (-np.arange(0, width, 2, dtype=np.float64) / width)


def check_positive(**numbers: object) -> None:
    """Each of these is a finite number above 0."""
    for name, number in numbers.items():
        if not 0.0 < read_number(name, number, _REMEDY) < math.inf:
            raise ValueOutOfRange(message(f"`{name}` must be finite and above 0", f"got {number}", _REMEDY))


class Scaling(ABC):
    """A way to stretch positions."""

    @abstractmethod
    def frequencies(self, base: float, width: int) -> np.ndarray:
        """Radians a token, float64 (W/2,)."""

    @abstractmethod
    def amplitude(self) -> float:
        """What cosines and sines are multiplied by; scores grow by its square."""


@dataclass(frozen=True)
class LinearScaling(Scaling):
    """Position interpolation: every frequency is divided by `factor`.

    Source: Chen et al., arXiv:2306.15595, equation 4.
    """

    factor: float

    def __post_init__(self) -> None:
        check_positive(factor=self.factor)

    def frequencies(self, base: float, width: int) -> np.ndarray:
        return plain_frequencies(base, width) / self.factor

    def amplitude(self) -> float:
        return 1.0


@dataclass(frozen=True)
class NtkScaling(Scaling):
    """NTK-aware: the base grows by factor^(W/(W-2)), so that the slowest frequency is divided by `factor` and the
    fastest by nothing. Source: Peng et al., YaRN, arXiv:2309.00071, definition 1.
    """

    factor: float

    def __post_init__(self) -> None:
        check_positive(factor=self.factor)

    def frequencies(self, base: float, width: int) -> np.ndarray:
        if width < 4:
            holds = "NtkScaling must have a rotated width of at least 4"
            raise ValueOutOfRange(message(holds, f"got {width}", "say LinearScaling"))
        return plain_frequencies(base * self.factor ** (width / (width - 2)), width)

    def amplitude(self) -> float:
        return 1.0


@dataclass(frozen=True)
class Llama3Scaling(Scaling):
    """Llama 3.1's: slow frequencies are divided by `factor`, fast ones stay, those between are mixed.

    A frequency f turns r = original_length·f / 2π times over the trained length. It is divided where r < low_factor,
    stays where r > high_factor, and between them becomes (1 - s)·f/factor + s·f with s = (r - low_factor) /
    (high_factor - low_factor). Source: Grattafiori et al., The Llama 3 Herd of Models, arXiv:2407.21783, and the code
    released with it.
    """

    factor: float
    low_factor: float
    high_factor: float
    original_length: float

    def __post_init__(self) -> None:
        check_positive(factor=self.factor, original_length=self.original_length)
        check_positive(low_factor=self.low_factor, high_factor=self.high_factor)
        if self.high_factor <= self.low_factor:
            seen = f"got {self.low_factor} and {self.high_factor}"
            raise ValueOutOfRange(message("`low_factor` must be below `high_factor`", seen, "Llama 3.1 has 1 and 4"))

    def frequencies(self, base: float, width: int) -> np.ndarray:
        plain = plain_frequencies(base, width)
        turns = self.original_length * plain / (2 * math.pi)
        kept = np.clip((turns - self.low_factor) / (self.high_factor - self.low_factor), 0.0, 1.0)
        return (1 - kept) * plain / self.factor + kept * plain

    def amplitude(self) -> float:
        return 1.0


@dataclass(frozen=True)
class YarnScaling(Scaling):
    """YaRN: fast frequencies stay, slow ones are divided by `factor`, and cosines and sines grow a little.

    The index whose frequency turns r times over the trained length is m(r) = W·ln(original_length / 2πr) / (2·ln base).
    Frequencies up to m(beta_fast) stay, those from m(beta_slow) on are divided, and a straight line in m mixes the two
    between them; with `truncate` its ends are rounded outwards to whole numbers.

    attention_factor: None is 0.1·ln(factor) + 1; where `mscale` and `mscale_all_dim` are given, as DeepSeek-V2 does,
    (0.1·mscale·ln(factor) + 1) / (0.1·mscale_all_dim·ln(factor) + 1).

    Source: Peng et al., YaRN, arXiv:2309.00071, definition 2 and equation 22.
    """

    factor: float
    original_length: float
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True

    def __post_init__(self) -> None:
        check_positive(factor=self.factor, original_length=self.original_length)
        check_positive(beta_fast=self.beta_fast, beta_slow=self.beta_slow)
        given = {name: getattr(self, name) for name in ("attention_factor", "mscale", "mscale_all_dim")}
        check_positive(**{name: number for name, number in given.items() if number is not None})
        one_flag("truncate", self.truncate)
        if self.beta_fast <= self.beta_slow:
            seen = f"got {self.beta_fast} and {self.beta_slow}"
            raise ValueOutOfRange(message("`beta_slow` must be below `beta_fast`", seen, "the paper has 1 and 32"))

    def frequencies(self, base: float, width: int) -> np.ndarray:
        low, high = (self._index_of(turns, base, width) for turns in (self.beta_fast, self.beta_slow))
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, width - 1)
        span = high - low if high != low else _SMALL_SPAN
        divided = np.clip((np.arange(width // 2) - low) / span, 0.0, 1.0)
        plain = plain_frequencies(base, width)
        return plain / self.factor * divided + plain * (1 - divided)

    def amplitude(self) -> float:
        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale is not None and self.mscale_all_dim is not None:
            return self._growth(self.mscale) / self._growth(self.mscale_all_dim)
        return self._growth(1.0)

    def _growth(self, share: float) -> float:
        return 1.0 if self.factor <= 1 else 0.1 * share * math.log(self.factor) + 1.0

    def _index_of(self, turns: float, base: float, width: int) -> float:
        return width * math.log(self.original_length / (turns * 2 * math.pi)) / (2 * math.log(base))


_SMALL_SPAN = 0.001  # of a line whose ends fall together: a step
