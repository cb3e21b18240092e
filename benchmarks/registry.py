"""The one table of benchmark cases, and the first contenders that answer them: ours and torch's SDPA.

A case names its pattern twice: as the library's object, and as the rule of the independent oracle that the gate uses.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.nn import functional as F

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

import oracles
from qkv import (
    alibi,
    alibi_slopes,
    attention,
    bigbird,
    causal,
    dilated,
    documents,
    fixed,
    full,
    key_lengths,
    longformer,
    random_blocks,
    strided,
    window,
)
from qkv.patterns.pattern import Pattern

BATCH, HEADS, HEAD_DIM = 1, 8, 64
SHARPNESS = 3
DROPOUT_STATE = 7  # what every dropping call of ours seeds its generator with
DOCUMENTS = (300, 700, 500, 548)  # tokens of documents that follow one another, again and again
SHORTEST, LONGEST, PACKED = 100, 4_000, 24  # tokens of the documents that are packed, from even steps; how many
PACKED_TOKENS = PACKED * (SHORTEST + LONGEST) // 2

# "recorded": forward of inputs that require gradients; "backward": alone, the graph is built outside the clock
Direction: TypeAlias = Literal["forward", "recorded", "backward", "forward+backward"]
DIRECTIONS: tuple[Direction, ...] = ("forward", "forward+backward")
Result: TypeAlias = dict[str, Tensor]  # "output", and "query", "key", "value", "bias" for their gradients


class Extras(NamedTuple):
    """What a call has beside its pattern."""

    softcap: float | None = None
    sinks: bool = False
    bias: Literal["none", "alibi", "trained"] = "none"  # trained: a tensor (1, H, L, S) that wants its gradient
    dropout_p: float = 0.0


class Axes(NamedTuple):
    """B, H, G and L of a case."""

    batch: int
    heads: int
    kv_heads: int
    queries: int


class Case(NamedTuple):
    """One family of patterns, growing with the length, and what is asked beside it."""

    name: str
    pattern: Callable[[int], Pattern]
    rule: Callable[[int], oracles.Rule]  # the same pairs, from the definition
    torch_form: Literal["no mask", "is_causal", "bool mask"]  # the best that SDPA has for it
    flex: bool = True  # whether the rule can be traced
    extras: Extras = Extras()
    axes: Axes | None = None  # None: BATCH, HEADS, and as many queries as keys
    lengths: Callable[[int], list[int]] | None = None  # of the documents in a row, or of the sequences of a batch

    def shape(self, tokens: int) -> Axes:
        return self.axes or Axes(BATCH, HEADS, HEADS, tokens)

    @property
    def decodes(self) -> bool:
        """Whether one query reads many keys, so that memory is what limits it."""
        return self.axes is not None and self.axes.queries == 1


def _document_ids(tokens: int) -> Tensor:
    return _ids(DOCUMENTS * (tokens // min(DOCUMENTS) + 1))[:tokens]


def _ids(sizes: Sequence[int]) -> Tensor:
    return torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))


def packed_lengths(tokens: int) -> list[int]:
    """PACKED documents in mixed order whose tokens add up; of SHORTEST to LONGEST tokens at PACKED_TOKENS."""
    steps = [SHORTEST + (LONGEST - SHORTEST) * (7 * n % PACKED) / (PACKED - 1) for n in range(PACKED)]
    ends = [round(sum(steps[: n + 1]) * tokens / PACKED_TOKENS) for n in range(PACKED)]
    return [end - begin for begin, end in zip([0, *ends], ends, strict=False)]


def batch_lengths(tokens: int) -> list[int]:
    """Of eight sequences, the longest of them of all tokens."""
    return [max(1, tokens * part // 16) for part in (16, 1, 12, 2, 8, 3, 6, 4)]


DENSE = Case("dense", lambda _: full(), lambda _: oracles.full(), "no mask")
CAUSAL = Case("causal", lambda _: causal(), lambda _: oracles.causal(), "is_causal")
FAMILIES = (
    DENSE,
    CAUSAL,
    Case(
        "window",
        lambda _: causal() & window(255),
        lambda _: oracles.both(oracles.causal(), oracles.window(255)),
        "bool mask",
    ),
    Case("strided", lambda n: strided(math.isqrt(n)), lambda n: oracles.strided(math.isqrt(n)), "bool mask"),
    Case("fixed", lambda n: fixed(math.isqrt(n)), lambda n: oracles.fixed(math.isqrt(n)), "bool mask"),
    Case(
        "random-blocks",
        lambda _: random_blocks(4, 64, 0),
        lambda _: oracles.random_blocks(4, 64, 0),
        "bool mask",
        False,
    ),
    Case("bigbird", lambda _: bigbird(3, 64, 2, 0), lambda _: oracles.bigbird(3, 64, 2, 0), "bool mask", flex=False),
    Case("longformer", lambda _: longformer(256, 4), lambda _: oracles.longformer(256, 4), "bool mask"),
    Case("dilated", lambda _: dilated(255, dilation=4), lambda _: oracles.dilated(255, dilation=4), "bool mask"),
)
OTHERS = (
    Case(
        "documents",
        lambda n: causal() & documents(_document_ids(n)),
        lambda n: oracles.both(oracles.causal(), oracles.documents(_document_ids(n))),
        "bool mask",
    ),
    Case(  # what local-attention computes: blocks of 256 that look back one block, cut to the exact window
        "window-257",
        lambda _: causal() & window(256),
        lambda _: oracles.both(oracles.causal(), oracles.window(256)),
        "bool mask",
    ),
    *(
        case._replace(name=f"{case.name}-{name}", extras=extras)
        for case in (DENSE, CAUSAL)
        for name, extras in (
            ("softcap", Extras(softcap=10.0)),
            ("sinks", Extras(sinks=True)),
            ("alibi", Extras(bias="alibi")),
            ("bias", Extras(bias="trained")),
            ("dropout", Extras(dropout_p=0.1)),
        )
    ),
)
DECODE = Case(
    "decode", lambda _: full(), lambda _: oracles.full(), "no mask", flex=False, axes=Axes(BATCH, 32, 8, queries=1)
)
PRODUCTION = (
    DECODE,
    DECODE._replace(
        name="decode-window",
        pattern=lambda _: causal() & window(1_023),
        rule=lambda _: oracles.both(oracles.causal(), oracles.window(1_023)),
        torch_form="bool mask",
    ),
    DECODE._replace(
        name="decode-batch",
        pattern=lambda n: key_lengths(torch.tensor(batch_lengths(n))),
        rule=lambda n: oracles.key_lengths(torch.tensor(batch_lengths(n))),
        torch_form="bool mask",
        axes=Axes(8, 32, 8, queries=1),
        lengths=batch_lengths,
    ),
    Case(
        "packed",
        lambda n: causal() & documents(_ids(packed_lengths(n))),
        lambda n: oracles.both(oracles.causal(), oracles.documents(_ids(packed_lengths(n)))),
        "bool mask",
        flex=False,
        lengths=packed_lengths,
    ),
)
CASES = (*FAMILIES, *OTHERS, *PRODUCTION)
BY_NAME = {case.name: case for case in CASES}


class Data(NamedTuple):
    """The tensors of a call and the gradient that its output receives."""

    query: Tensor  # (B, H, L, D)
    key: Tensor  # (B, G, S, D)
    value: Tensor  # as key
    grad_output: Tensor  # as query
    bias: Tensor | None = None  # (1, H, L, S), where the case trains one
    sinks: Tensor | None = None  # (H,)

    @property
    def tokens(self) -> int:
        """S, the keys."""
        return self.key.shape[2]

    @property
    def input_bytes(self) -> int:
        """The size of q, k and v: what memory is compared with."""
        return self.query.nbytes + self.key.nbytes + self.value.nbytes

    @property
    def trained(self) -> dict[str, Tensor]:
        """What gradients are asked of, by name."""
        tensors = {"query": self.query, "key": self.key, "value": self.value}
        return tensors if self.bias is None else {**tensors, "bias": self.bias}


def make_data(
    tokens: int, case: Case = DENSE, head_dim: int = HEAD_DIM, seed: int = 0, dtype: torch.dtype = torch.float32
) -> Data:
    """Normal numbers; q, k, v are the same for every case of the same sizes, and the same tensors where asked again.

    The queries are SHARPNESS times as large as usual: were each weight about 1/L, a wrong scale would hide in rounding.
    """
    return _drawn(tokens, case.shape(tokens), case.extras.bias == "trained", case.extras.sinks, head_dim, seed, dtype)


@lru_cache(maxsize=2)
def _drawn(
    tokens: int, axes: Axes, is_trained: bool, has_sinks: bool, head_dim: int, seed: int, dtype: torch.dtype
) -> Data:
    generator = torch.Generator().manual_seed(seed)

    def normal(heads: int, rows: int) -> Tensor:
        return torch.randn(axes.batch, heads, rows, head_dim, generator=generator)

    query = normal(axes.heads, axes.queries).mul_(SHARPNESS)
    key, value = (normal(axes.kv_heads, tokens).to(dtype) for _ in range(2))
    grad_output = normal(axes.heads, axes.queries)
    bias = torch.randn(1, axes.heads, axes.queries, tokens, generator=generator) if is_trained else None
    sinks = torch.randn(axes.heads, generator=generator) if has_sinks else None
    return Data(query.to(dtype), key, value, grad_output.to(dtype), bias, sinks)


class Call(NamedTuple):
    """One call, ready: `run` is what the clock sees, `read` makes a result of what it returns."""

    run: Callable[[], Any]
    read: Callable[[Any], Result]


class Contender(NamedTuple):
    """Prepares a call in each direction; the bytes of the mask that was made for it."""

    prepare: Callable[[Direction], Call]
    mask_bytes: int = 0

    def run(self, direction: Direction) -> Result:
        """One call from its preparation to its result."""
        with recording(direction):
            call = self.prepare(direction)
            return call.read(call.run())


def recording(direction: Direction) -> torch.set_grad_enabled:
    """Gradients are off for "forward" alone."""
    return torch.set_grad_enabled(direction != "forward")


def ours(case: Case, data: Data, backend: str) -> Contender:
    """qkv on a backend; the schedule is built beforehand, what that costs is `build.py`'s figure."""
    pattern, extras, axes = case.pattern(data.tokens), case.extras, case.shape(data.tokens)
    pattern.plan(axes.queries, data.tokens, batch=axes.batch, heads=axes.heads)
    given: dict[str, Any] = {} if extras.softcap is None else {"softcap": extras.softcap}
    given |= {"sinks": data.sinks} if extras.sinks else {}
    given |= {"bias": alibi(alibi_slopes(HEADS))} if extras.bias == "alibi" else {}

    def forward(query: Tensor, key: Tensor, value: Tensor, *bias: Tensor) -> Tensor:
        if extras.dropout_p:
            given.update(dropout_p=extras.dropout_p, generator=torch.Generator().manual_seed(DROPOUT_STATE))
        if bias:
            given.update(bias=bias[0])
        return attention(query, key, value, pattern=pattern, backend=backend, **given)

    return Contender(lambda direction: prepare(forward, data, direction))


def sdpa(case: Case, data: Data) -> Contender | str:
    """torch's own attention in the best form that it has for the pattern: no mask, its causal flag, or a dense bool."""
    if case.extras.softcap is not None or case.extras.sinks or case.extras.bias == "alibi":
        return "has no softcap, sinks or ALiBi"
    axes, keep = case.shape(data.tokens), None
    if case.torch_form == "bool mask":
        keep = case.pattern(data.tokens).to_dense(axes.queries, data.tokens, batch=axes.batch)
    if data.bias is not None and case.torch_form != "no mask":
        return "takes a bias or a mask"
    options = {"is_causal": case.torch_form == "is_causal", "dropout_p": case.extras.dropout_p}
    options |= {"enable_gqa": True} if axes.heads != axes.kv_heads else {}

    def forward(query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None = keep) -> Tensor:
        return F.scaled_dot_product_attention(query, key, value, attn_mask=bias, **options)

    return Contender(lambda direction: prepare(forward, data, direction), 0 if keep is None else keep.nbytes)


class Form(NamedTuple):
    """The tensors that a contender takes for one of (B, H, L, D), made before the clock, and the way back after it."""

    split: Callable[[Tensor], Sequence[Tensor]] = lambda tensor: (tensor,)
    join: Callable[[Sequence[Tensor]], Tensor] = lambda parts: parts[0]


AS_IT_IS = Form()


def prepare(forward: Callable[..., Any], data: Data, direction: Direction, form: Form = AS_IT_IS) -> Call:
    """A direction of a function of all parts of the trained tensors, to one output a part; run under `recording`."""
    split = [[part.detach() for part in form.split(tensor)] for tensor in data.trained.values()]
    inputs = tuple(part for parts in split for part in parts)
    if direction == "forward":
        return Call(lambda: forward(*inputs), lambda output: {"output": form.join(_parts(output))})
    inputs = tuple(part.requires_grad_() for part in inputs)
    if direction == "recorded":
        return Call(lambda: forward(*inputs), lambda output: {"output": form.join(_parts(output)).detach()})
    incoming = tuple(form.split(data.grad_output))

    def both() -> tuple[Sequence[Tensor], ...]:
        outputs = _parts(forward(*inputs))
        return outputs, torch.autograd.grad(outputs, inputs, incoming)

    def read(found: tuple[Sequence[Tensor], ...]) -> Result:
        outputs, gradients = found
        each = len(split[0])
        all_parts = [outputs, *(gradients[n : n + each] for n in range(0, len(gradients), each))]
        joined = [form.join(parts).detach() for parts in all_parts]
        return dict(zip(("output", *data.trained), joined, strict=True))

    if direction == "forward+backward":
        return Call(both, read)
    outputs = _parts(forward(*inputs))
    return Call(lambda: (outputs, torch.autograd.grad(outputs, inputs, incoming, retain_graph=True)), read)


def _parts(found: Any) -> Sequence[Tensor]:
    return found if isinstance(found, tuple) else (found,)
