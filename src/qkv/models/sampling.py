"""How the next token is chosen from logits: the most probable one, or one drawn after what changes the distribution.

B rows, V tokens of the vocabulary. Knows no models: logits in, token numbers out.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from qkv.cache.arguments import read_size
from qkv.errors import DTypeError, ValueOutOfRange, message

COLDEST = 1e-6  # the least temperature: float32 holds logits divided by it
MILDEST, HARSHEST = 1e-6, 1e6  # the penalty: float32 holds logits divided and multiplied by it
FEW, WIDER = 64, 16  # how many tokens top_p looks at first, and how many times as many next, before it takes all


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampling:
    """What changes the distribution of the next token, in this order.

    repetition_penalty: logits of tokens that a row has seen are divided by it where positive and multiplied where
    negative (Keskar et al. 2019, arXiv:1909.05858, section 4.1, as it is used: with both signs); 1 changes nothing.
    temperature: all logits are divided by it; 0 takes the most probable token, of equals the one of lowest number.
    top_k: only the k most probable tokens stay, and those as probable as the k-th (Fan et al. 2018, arXiv:1805.04833).
    top_p: only the smallest set of most probable tokens stays whose probabilities sum to at least p, of equals those of
    lower number (Holtzman et al. 2019, arXiv:1904.09751).

    Raises DTypeError and ValueOutOfRange for what cannot be, and for a top_k or top_p that temperature 0 would ignore.
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    repetition_penalty: float = 1.0

    def __post_init__(self) -> None:
        _check_number("temperature", self.temperature)
        _check_number("repetition_penalty", self.repetition_penalty)
        if self.temperature != 0 and self.temperature < COLDEST:
            holds = f"`temperature` must be 0 or at least {COLDEST:g}"
            raise _refused(holds, self.temperature, "0 takes the most probable token")
        if not MILDEST <= self.repetition_penalty <= HARSHEST:
            holds = f"`repetition_penalty` must lie in {MILDEST:g} .. {HARSHEST:g}"
            raise _refused(holds, self.repetition_penalty, "1 changes nothing, 1.2 is usual")
        if self.top_k is not None:
            read_size("top_k", self.top_k, 1)
        if self.top_p is not None:
            _check_number("top_p", self.top_p)
            if not 0 < self.top_p <= 1:
                raise _refused("`top_p` must lie in (0, 1]", self.top_p, "None keeps all tokens")
        for name in ("top_k", "top_p"):
            if self.temperature == 0 and getattr(self, name) is not None:
                holds = f"`{name}` needs a temperature above 0, since 0 takes the most probable token anyway"
                raise _refused(holds, 0, "set temperature=1.0, or leave it out")

    @property
    def penalises(self) -> bool:
        """Whether it must be known which tokens a row has seen."""
        return self.repetition_penalty != 1

    def scores(self, logits: Tensor, seen: Tensor | None = None) -> Tensor:
        """Logits (B, V) of the distribution that tokens are drawn from, -inf for none; float32, or float64 of such.

        seen: bool (B, V), which tokens each row holds already; needed where there is a penalty.
        """
        scores = logits if logits.dtype == torch.float64 else logits.float()
        if self.penalises:
            assert seen is not None
            penalty = self.repetition_penalty
            scores = torch.where(seen, torch.where(scores < 0, scores * penalty, scores / penalty), scores)
        if self.temperature == 0:
            return scores
        scores = (scores - scores.amax(-1, keepdim=True)) / self.temperature  # the shift: nothing grows beyond range
        if self.top_k is not None and self.top_k < scores.shape[-1]:
            least = scores.topk(self.top_k).values[..., -1:]
            scores = scores.masked_fill(scores < least, -math.inf)
        if self.top_p is not None and self.top_p < 1:
            scores = scores.masked_fill(~_nucleus(scores, self.top_p), -math.inf)
        return scores

    def choose(self, logits: Tensor, seen: Tensor | None = None, draws: Tensor | None = None) -> Tensor:
        """A token of each row, int64 (B,). logits: (B, V). draws: uniform numbers in [0, 1), float64 (B,).

        Raises ValueOutOfRange where logits are not finite, since no token follows from them.
        """
        best, tokens = logits.max(-1)
        if not bool(best.isfinite().all()):
            row = int(best.isfinite().logical_not().nonzero()[0])
            seen_value = f"the largest of row {row} is {best[row].item()}"
            remedy = "look for weights that are not finite, or compute in float32"
            raise ValueOutOfRange(message("logits must be finite numbers", seen_value, remedy))
        if self.temperature == 0:
            return self.scores(logits, seen).argmax(-1) if self.penalises else tokens
        assert draws is not None
        return drawn(self.scores(logits, seen), draws)


def drawn(scores: Tensor, draws: Tensor) -> Tensor:
    """The token of each row of scores (B, V) at which the summed probabilities first exceed its draw: int64 (B,).

    In float64, so that no probability is lost in the sum. A token of score -inf is never drawn.
    """
    summed = scores.double().softmax(-1).cumsum(-1)
    total = summed[:, -1:]
    below = torch.nextafter(total, torch.zeros_like(total))  # a draw just below 1 may round to the total
    target = torch.minimum(draws.to(scores.device)[:, None] * total, below)
    return torch.searchsorted(summed, target, right=True).squeeze(1)


def _nucleus(scores: Tensor, p: float) -> Tensor:
    """Which tokens of scores (B, V) stay, bool: those before which, the most probable first, there is less than p.

    Only as many are sorted as it takes to reach p; a whole vocabulary would take longer than a small model's pass.
    """
    probabilities = scores.double().softmax(-1)
    size, vocabulary = FEW, scores.shape[-1]
    while True:
        top = probabilities.topk(min(size, vocabulary)).values
        within = top.cumsum(-1)[:, :-1] < p  # whether the token after each of these stays
        if size >= vocabulary or not bool(within[:, -1].any()):
            break
        size = size * WIDER if size * WIDER * WIDER <= vocabulary else vocabulary
    others = within.sum(-1, keepdim=True)  # how many stay beside the first
    least = top.gather(-1, others)
    above, equal = probabilities > least, probabilities == least
    room = others + 1 - above.sum(-1, keepdim=True)  # for how many of those equal to the least
    if bool((equal.sum(-1, keepdim=True) == room).all()):
        return above | equal
    return above | (equal & (equal.cumsum(-1) <= room))


def _check_number(name: str, value: float) -> None:
    if isinstance(value, bool) or not isinstance(value, float | int):
        raise DTypeError(message(f"`{name}` must be a number", f"got {type(value).__name__}", "pass a float"))
    if not math.isfinite(value):
        raise _refused(f"`{name}` must be a finite number", value, "see `Sampling` for what it does")


def _refused(holds: str, value: float, remedy: str) -> ValueOutOfRange:
    return ValueOutOfRange(message(holds, f"got {value}", remedy))
