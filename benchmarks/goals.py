"""What the suites `cpu` and `production` measure, and the goal of each figure: this table is all there is to edit."""

from __future__ import annotations

from fnmatch import fnmatch
from typing import Literal, NamedTuple, TypeAlias

import torch
from registry import DIRECTIONS, HEAD_DIM, PACKED_TOKENS, Direction

LONG = 65_536
LENGTHS = (2_048, 4_096, 8_192, 16_384, 32_768, LONG)  # over which growth is fitted
MANY = 200  # calls in one sample, where a call is microseconds
QUICK_LONGEST = 2_048
Through: TypeAlias = Literal["attention", "cache", "rolling", "varlen"]
SHORT_NAMES = {torch.float32: "", torch.bfloat16: "bf16/", torch.float16: "fp16/"}


class Goal(NamedTuple):
    """What a figure is to reach at least, and what it aims at; with "at most" smaller is better.

    `aim_of`: whether the aim is for the value, or for the share of the machine's peak.
    """

    least: float
    aim: float
    side: Literal["at least", "at most"] = "at least"
    aim_of: Literal["value", "peak"] = "value"

    def verdict(self, value: float, of_peak: float | None = None) -> Literal["aim", "met", "SHORT"]:
        sign = 1 if self.side == "at least" else -1
        if sign * value < sign * self.least:
            return "SHORT"
        reached = (of_peak or 0) >= self.aim if self.aim_of == "peak" else sign * value >= sign * self.aim
        return "aim" if reached else "met"


class Race(NamedTuple):
    """A ratio of speed: ours over another contender's on the same case, or over our own on a `baseline` case."""

    direction: Direction
    case: str
    tokens: int
    head_dim: int = HEAD_DIM
    goal: Goal | None = None
    against: str = "sdpa"
    baseline: str | None = None
    by_pairs: bool = False  # speed in visible pairs a second, not in calls a second
    calls: int = 1  # in one sample
    dtype: torch.dtype = torch.float32
    through: Through = "attention"  # which of our functions answers

    @property
    def name(self) -> str:
        other = self.against if self.baseline is None else f"ours-{self.baseline}"
        front, through = SHORT_NAMES[self.dtype], "" if self.through == "attention" else f"{self.through}/"
        return f"{front}{self.direction}/{self.case}/{self.tokens}/D{self.head_dim}/{through}{other}"

    @property
    def is_of_speed(self) -> bool:
        """Whether the machine's speed limits it: not what a call costs, nor our own calls against one another."""
        return self.calls == 1 and self.baseline is None

    @property
    def is_quick(self) -> bool:
        known = self.against.startswith(("sdpa", "torch", "transformers"))
        return self.tokens <= QUICK_LONGEST and (known or self.baseline is not None)


class Weight(NamedTuple):
    """Our peak memory beyond inputs and outputs, in inputs."""

    direction: Direction
    case: str
    tokens: int
    goal: Goal

    @property
    def name(self) -> str:
        return f"memory/{self.direction}/{self.case}/{self.tokens}"

    is_quick = False


class Held(NamedTuple):
    """Inputs and what our call adds to them at its peak, over what it must hold: inputs, results and checkpoints."""

    direction: Direction
    case: str
    tokens: int
    goal: Goal

    @property
    def name(self) -> str:
        return f"held/{self.direction}/{self.case}/{self.tokens}"

    is_quick = False


class Growth(NamedTuple):
    """The exponent in L of our time over LENGTHS, or LINEAR_LENGTHS in the suite `linear`."""

    direction: Direction
    case: str
    goal: Goal

    @property
    def name(self) -> str:
        return f"growth/{self.direction}/{self.case}"

    is_quick = False


class Writing(NamedTuple):
    """A ratio of speed: a whole model that reads a prompt of so many tokens, or writes on after it token by token."""

    kind: Literal["prefill", "decode"]
    tokens: int
    goal: Goal

    @property
    def name(self) -> str:
        return f"{self.kind}/smollm2/{self.tokens}/transformers"

    @property
    def is_quick(self) -> bool:
        return self.tokens <= 64 or (self.kind == "prefill" and self.tokens <= 512)


Figure: TypeAlias = Race | Weight | Held | Growth | Writing
Suite: TypeAlias = Literal["cpu", "production", "linear", "models"]


def _at_most(value: float, aim: float | None = None) -> Goal:
    return Goal(value, value if aim is None else aim, "at most")


SCORES = Goal(0.85, 0.95)  # softcap, sinks and ALiBi against the plain call
RATE = Goal(0.65, 0.8)  # of a window against dense
# L·block scores are as much as an input where D is the block's 64 rows: a few of them at most, or less than one.
MEMORY = _at_most(4, 1)

RACES = (
    Race("forward", "dense", 2_048, 64, Goal(1.15, 1.35)),
    Race("forward", "dense", 2_048, 128, Goal(1.05, 1.2)),
    Race("forward", "causal", 512, 64, Goal(1.8, 2.2)),
    Race("forward", "causal", 2_048, 64, Goal(1.3, 1.5)),
    Race("forward", "causal", 8_192, 64, Goal(1.25, 1.4)),
    Race("forward", "causal", 2_048, 128),
    Race("forward", "window", 2_048, 64, Goal(7, 9)),
    Race("forward", "window", 8_192, 64, Goal(30, 45)),
    Race("backward", "dense", 2_048, 64, Goal(1.2, 1.3)),
    Race("backward", "causal", 2_048, 64, Goal(1.35, 1.6)),
    Race("forward+backward", "dense", 2_048, 64),
    Race("forward+backward", "causal", 2_048, 64),
    Race("forward+backward", "causal-dropout", 2_048, 64, Goal(8, 12)),
    Race("forward+backward", "causal-dropout", 2_048, 128, Goal(4.5, 7)),
    Race("forward+backward", "dense-bias", 2_048, 64, Goal(4, 8)),
    *(
        Race("forward", f"{plain}-{extra}", 2_048, 64, SCORES, "ours", plain)
        for plain in ("dense", "causal")
        for extra in ("softcap", "sinks", "alibi")
    ),
    *(Race("forward", "window", tokens, 64, RATE, "ours", "dense", by_pairs=True) for tokens in (2_048, 8_192)),
    *(
        Race(direction, case, 16, 64, goal, calls=MANY)
        for case in ("dense", "causal")
        for direction, goal in (("forward", Goal(0.8, 1.2)), ("recorded", Goal(0.6, 0.9)))
    ),
    Race("forward", "window", 4_096, 64, Goal(4, 8), "flex"),
    *(
        Race(direction, "window-257", tokens, 64, None, "local-attention")
        for tokens in (2_048, 8_192)
        for direction in DIRECTIONS
    ),
    *(
        Race(direction, case, 2_048, 64, None, against)
        for against in ("x-transformers", "x-transformers-flash")
        for case in ("dense", "causal")
        for direction in DIRECTIONS
    ),
    Race("forward", "causal-softcap", 2_048, 64, None, "x-transformers"),
)
GROWTHS = tuple(
    Growth(direction, case, _at_most(most))
    for case, most in (
        *(("strided", 1.6), ("fixed", 1.6), ("dilated", 1.1)),
        *(("bigbird", 1.1), ("longformer", 1.1), ("documents", 1.1)),
    )
    for direction in DIRECTIONS
)
WEIGHTS = (
    *(Weight(direction, "causal", 16_384, MEMORY) for direction in DIRECTIONS),
    *(
        Weight(direction, case, LONG, MEMORY)
        for case in ("window", "strided", "fixed", "longformer", "bigbird", "documents")
        for direction in DIRECTIONS
    ),
)
CPU: tuple[Figure, ...] = (*RACES, *GROWTHS, *WEIGHTS)

BF16, FP16 = torch.bfloat16, torch.float16
SIXTEEN = (
    Race("forward", "dense", 2_048, 64, Goal(1.7, 2.2)),
    Race("forward", "dense", 2_048, 128, Goal(1.45, 1.8)),
    Race("forward", "causal", 512, 64, Goal(2.4, 3)),
    Race("forward", "causal", 2_048, 64, Goal(2, 2.4)),
    Race("forward", "window", 2_048, 64, Goal(9, 12)),
    Race("forward", "window", 8_192, 64, Goal(45, 70)),
    Race("backward", "causal", 2_048, 64, Goal(1.2, 2)),
    Race("forward+backward", "causal-dropout", 2_048, 64, Goal(8, 12)),
)
READING = Goal(3, 0.9, aim_of="peak")  # three times the speed of SDPA; 90 % of a loop that only reads the cache
CACHES = (8_192, 32_768, LONG)
BOTH: tuple[torch.dtype, ...] = (torch.float32, BF16)
DECODING = (
    *(
        Race("forward", "decode", tokens, 128, goal, dtype=dtype, through=through)
        for tokens, goal in ((QUICK_LONGEST, None), *((tokens, READING) for tokens in CACHES))
        for dtype in BOTH
        for through in ("attention", "cache")
    ),
    *(
        Race("forward", "decode-window", LONG, 128, goal, against, dtype=dtype, through=through)
        for against, goal in (("sdpa", Goal(150, 250)), ("sdpa-sliced", Goal(2, 3)))
        for dtype in BOTH
        for through in ("attention", "rolling")
    ),
    *(
        Race("forward", "decode-batch", CACHES[0], 128, None, against, dtype=dtype, through="cache")
        for against in ("sdpa", "sdpa-apart")
        for dtype in BOTH
    ),
)
PACKING = tuple(
    Race(direction, "packed", tokens, 64, goal, against, dtype=dtype, through="varlen")
    for direction, tokens, against, goal in (
        ("forward", QUICK_LONGEST, "sdpa-apart", None),
        ("forward", PACKED_TOKENS, "sdpa-apart", Goal(1.3, 2)),
        ("forward", PACKED_TOKENS, "sdpa-padded", Goal(3, 6)),
        ("forward", PACKED_TOKENS, "sdpa-padded-causal", None),
        ("forward+backward", PACKED_TOKENS, "sdpa-apart", None),
    )
    for dtype in BOTH
)
PRODUCTION: tuple[Figure, ...] = (
    *(race._replace(dtype=BF16) for race in SIXTEEN),
    *(race._replace(dtype=FP16, goal=None) for race in SIXTEEN if race.tokens <= QUICK_LONGEST),
    *DECODING,
    *PACKING,
)

# The linear family. "torch" is the fastest of three chunked forms in torch, "transformers" its functions for a CPU.
LINEAR_LENGTHS = (4_096, 16_384, LONG, 262_144)
LINEAR_RACES = (
    Race("forward", "linear", 4_096, 64, Goal(2.5, 5), "torch"),
    Race("forward", "linear", 4_096, 128, Goal(1.6, 3), "torch"),
    Race("forward", "decay", 4_096, 64, Goal(3, 5), "torch"),
    Race("forward", "decay", 4_096, 128, Goal(2, 3), "torch"),
    Race("forward", "gated-delta", 4_096, 64, Goal(3.5, 6), "torch"),
    Race("forward", "gated-delta", 4_096, 128, Goal(2.2, 4), "torch"),
    Race("forward", "gated-delta", 4_096, 64, Goal(7, 15), "transformers"),
    Race("forward", "gated-delta", 4_096, 128, Goal(4.4, 8), "transformers"),
    Race("forward", "kimi-delta", 1_024, 64, Goal(120, 250), "transformers"),
    Race("forward", "kimi-delta", 1_024, 128, Goal(90, 250), "transformers"),
    Race("forward", "kimi-delta", 4_096, 64, None, "torch"),
    Race("forward", "kimi-delta", 4_096, 128, None, "torch"),
    Race("forward+backward", "gated-delta", 4_096, 64, Goal(2.5, 4), "torch"),
    Race("forward+backward", "gated-delta", 4_096, 64, Goal(10, 20), "transformers"),
    Race("forward+backward", "gated-delta", 4_096, 128, None, "torch"),
    *(Race("forward+backward", case, 4_096, 64, None, "torch") for case in ("linear", "decay", "kimi-delta")),
    Race("forward", "step", 1, 128, Goal(8, 0.7, aim_of="peak"), "transformers", calls=50),
    Race("forward", "step", 1, 128, None, "torch", calls=50),
)
LINEAR_CASES = ("linear", "decay", "gated-delta", "kimi-delta")
LINEAR: tuple[Figure, ...] = (
    *LINEAR_RACES,
    *(Race("forward", case, 1_024, 64, None, "torch") for case in LINEAR_CASES),  # what --quick has
    *(Race("forward", case, 4_096, 64, None, "torch", dtype=BF16) for case in LINEAR_CASES),
    Race("forward", "gated-delta", 4_096, 64, None, "transformers", dtype=BF16),
    *(Growth("forward", case, _at_most(1.05)) for case in LINEAR_CASES),
    Growth("forward+backward", "gated-delta", _at_most(1.05)),
    *(Held("forward", case, 16_384, _at_most(1.05, 1)) for case in LINEAR_CASES),
    *(Held("forward+backward", case, 16_384, _at_most(1.05, 1)) for case in LINEAR_CASES),
)

# Whole models. A decoder reads its weights once a token: the share of a loop that reads them alone says the rest.
MODELS: tuple[Figure, ...] = (
    *(Writing("decode", tokens, Goal(1, 1.5)) for tokens in (64, 512)),
    *(Writing("prefill", tokens, Goal(1, 1.3)) for tokens in (512, 2_048)),
)
FIGURES: dict[Suite, tuple[Figure, ...]] = {
    "cpu": CPU,
    "production": PRODUCTION,
    "linear": LINEAR,
    "models": MODELS,
}


def chosen(words: list[str], *, quick: bool, threads: int, suite: Suite = "cpu") -> tuple[Figure, ...]:
    """The figures whose name holds one of the words, in which * stands for anything; all of them without a word."""
    figures = [figure for figure in FIGURES[suite] if not quick or figure.is_quick]
    figures = [figure for figure in figures if threads == 1 or isinstance(figure, Race | Writing)]
    return tuple(one for one in figures if not words or any(fnmatch(one.name, f"*{word}*") for word in words))
