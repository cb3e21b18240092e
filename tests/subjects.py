"""What a probe asks: a module, how it is called and what is expected of it; and how a probe says what it saw."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn


@contextmanager
def seeded(seed: int):
    """torch's generator begins at `seed` within, and goes on afterwards as if nothing had been."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield


@contextmanager
def training(module: nn.Module, on: bool):
    was = [(part, part.training) for part in module.modules()]
    module.train(on)
    try:
        yield
    finally:
        for part, flag in was:
            part.training = flag


def apart(got: Tensor, want: Tensor) -> float:
    """The greatest difference, in parts of the greatest expected number; NaN counts as infinite."""
    if not got.numel():
        return 0.0
    got, want = got.detach().double(), want.detach().double()
    size = max(want.abs().max().item(), 1e-3)
    worst = (got - want).abs().max().item() / size
    return math.inf if math.isnan(worst) else worst


def bound(x: Tensor) -> float:
    return {torch.float64: 1e-9, torch.float32: 2e-5}.get(x.dtype, 2e-2)


def same(got: Tensor, want: Tensor, told: str) -> None:
    """`told` says what must not have happened."""
    worst = apart(got, want)
    assert worst <= bound(got), f"{told}: it moved by {worst:.2e} of its size"


def differ(got: Tensor, want: Tensor, told: str) -> None:
    worst = apart(got, want)
    assert worst > 1e3 * bound(got), f"{told}: the difference is {worst:.2e} of its size"


def paddings(length: int) -> Tensor:
    """Left, right and middle padding, a hole in each part, and none: bool (5, L)."""
    keep = torch.ones(5, length, dtype=torch.bool)
    keep[0, : length // 3] = False
    keep[1, -(length // 3) :] = False
    keep[2, length // 2 : length // 2 + 2] = False
    keep[3, [0, length // 2, length - 1]] = False
    return keep


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A module and what it should do. `call(module, x, keep=None, memory=None, memory_keep=None)` gives (B, L, ...);
    a call is handed only what the subject says that it takes.
    """

    module: nn.Module
    call: Callable[..., Tensor]
    draw: Callable[[int, int], Tensor]  # (B, L) -> x, from torch's generator
    causal: bool  # no row depends on a later token
    ordered: bool | None = None  # whether the order of tokens matters; None: not to be said of this one
    pads: bool = False  # `call` takes keep, bool (B, L)
    holes: bool = True  # padding between real tokens takes no position
    memory: Callable[[int, int], Tensor] | None = None  # draws what is attended to beside x, (B, S, ...)
    memory_pads: bool = False  # `call` takes memory_keep, bool (B, S)
    mixes: bool = True  # tokens of x read one another, not the memory alone
    averages: bool = False  # rows of weights sum to 1, and no position counts: equal tokens stay equal
    bare: bool = False  # nothing but attention: no residual, no norm, no feed-forward
    dropout: bool = False  # some dropout acts in training
    decode: Callable[..., Tensor] | None = None  # (module, x[, memory]) -> (B, L, ...), token by token
    sees: Tensor | None = None  # bool (L, L): which token of x each row depends on; None: all, up to itself if causal
    length: int = 7  # of most inputs; that of `sees` where it is given
    idle: tuple[str, ...] = ()  # ends of names of parameters whose gradient is 0 by their mathematics
    tied: tuple[str, ...] = ()  # ends of names of parameters that are meant to share memory
    spread: Mapping[str, float] = field(default_factory=dict)  # standard deviations of first weights, by name
    score_std: float | None = None  # of the scores before softmax for draw()'s inputs; None: not known
    softmax_axis: bool = True  # P16 must find the softmax, or an attention operator, among the operators
    crowd: int = 4000  # tokens of P6
    half: bool = True  # float16 and bfloat16 are worth a try
    ladder: bool = True  # inputs of any size are worth a try
    most: float = 1e3  # the greatest factor of inputs in narrow types

    def run(self, x: Tensor, module: nn.Module | None = None, **given: Tensor | None) -> Tensor:
        """The module on x; a memory is drawn anew, and alike for alike sizes, where none is given."""
        taken = {"keep": self.pads, "memory": self.memory is not None, "memory_keep": self.memory_pads}
        given = {name: value for name, value in given.items() if taken[name] and value is not None}
        if self.memory is not None and "memory" not in given:
            given["memory"] = self.some_memory(x.shape[0])
        return self.call(self.module if module is None else module, x, **given)

    def some_memory(self, batch: int, length: int = 5) -> Tensor:
        """The same rows at every call, whatever the batch."""
        with seeded(77):
            return self.memory(1, length).repeat_interleave(batch, 0)

    def paddings(self) -> Tensor:
        """Masks of padding, bool (n, L)."""
        keep = paddings(self.length)
        return keep if self.holes else keep[[0, 1, 4]]

    def changed(self, x: Tensor, scale: float = 1.0) -> Tensor:
        """Other tokens in place of all of x."""
        return others(x, self.draw, scale)


def others(x: Tensor, draw: Callable[[int, int], Tensor], scale: float = 1.0) -> Tensor:
    """Other tokens in place of all of x, and so many times as large where they are embedded."""
    other = draw(*x.shape[:2])
    if x.is_floating_point():
        return scale * other
    while (other == x).any():
        other = torch.where(other == x, draw(*x.shape), other)
    return other


def embedded(dim: int, dtype: torch.dtype = torch.float64) -> Callable[[int, int], Tensor]:
    """Draws embedded tokens (B, L, dim) of a normal distribution."""
    return lambda batch, length: torch.randn(batch, length, dim, dtype=dtype)


def numbers(vocabulary: int) -> Callable[[int, int], Tensor]:
    """Draws token numbers (B, L)."""
    return lambda batch, length: torch.randint(vocabulary, (batch, length))
