"""The one table of benchmark cases, and the first contenders that answer them: ours and torch's SDPA.

A case names its pattern twice: as the library's object, and as the rule of the independent oracle that the gate uses.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
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


class Case(NamedTuple):
    """One family of patterns, growing with the length, and what is asked beside it."""

    name: str
    pattern: Callable[[int], Pattern]
    rule: Callable[[int], oracles.Rule]  # the same pairs, from the definition
    torch_form: Literal["no mask", "is_causal", "bool mask"]  # the best that SDPA has for it
    flex: bool = True  # whether the rule can be traced
    extras: Extras = Extras()


def _document_ids(tokens: int) -> Tensor:
    sizes = torch.tensor(DOCUMENTS).repeat(tokens // min(DOCUMENTS) + 1)
    return torch.arange(len(sizes)).repeat_interleave(sizes)[:tokens]


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
CASES = (*FAMILIES, *OTHERS)
BY_NAME = {case.name: case for case in CASES}


class Data(NamedTuple):
    """The tensors of a call, q, k and v (B, H, L, D) each, and the gradient that its output receives."""

    query: Tensor
    key: Tensor
    value: Tensor
    grad_output: Tensor
    bias: Tensor | None = None  # (1, H, L, S), where the case trains one
    sinks: Tensor | None = None  # (H,)

    @property
    def tokens(self) -> int:
        return self.query.shape[2]

    @property
    def input_bytes(self) -> int:
        """The size of q, k and v: what memory is compared with."""
        return self.query.nbytes + self.key.nbytes + self.value.nbytes

    @property
    def trained(self) -> dict[str, Tensor]:
        """What gradients are asked of, by name."""
        tensors = {"query": self.query, "key": self.key, "value": self.value}
        return tensors if self.bias is None else {**tensors, "bias": self.bias}


def make_data(tokens: int, case: Case = DENSE, head_dim: int = HEAD_DIM, seed: int = 0) -> Data:
    """Normal numbers in float32; q, k, v are the same for every case of a length.

    The queries are SHARPNESS times as large as usual: were each weight about 1/L, a wrong scale would hide in rounding.
    """
    generator = torch.Generator().manual_seed(seed)
    query, *others = torch.randn(4, BATCH, HEADS, tokens, head_dim, generator=generator).unbind(0)
    is_trained = case.extras.bias == "trained"
    bias = torch.randn(1, HEADS, tokens, tokens, generator=generator) if is_trained else None
    sinks = torch.randn(HEADS, generator=generator) if case.extras.sinks else None
    return Data(query.mul_(SHARPNESS), *others, bias, sinks)


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
    pattern, extras = case.pattern(data.tokens), case.extras
    pattern.plan(data.tokens, batch=BATCH, heads=HEADS)
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
    keep = case.pattern(data.tokens).to_dense(data.tokens) if case.torch_form == "bool mask" else None
    is_causal, dropout_p = case.torch_form == "is_causal", case.extras.dropout_p
    if data.bias is not None and case.torch_form != "no mask":
        return "takes a bias or a mask"

    def forward(query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None = keep) -> Tensor:
        options = {"attn_mask": bias, "dropout_p": dropout_p, "is_causal": is_causal}
        return F.scaled_dot_product_attention(query, key, value, **options)

    return Contender(lambda direction: prepare(forward, data, direction), 0 if keep is None else keep.nbytes)


def prepare(forward: Callable[..., Tensor], data: Data, direction: Direction) -> Call:
    """A direction of a function of the trained tensors; it is run under `recording`."""
    if direction == "forward":
        inputs = tuple(data.trained.values())
        return Call(lambda: forward(*inputs), lambda output: {"output": output})
    inputs = tuple(tensor.detach().requires_grad_() for tensor in data.trained.values())
    if direction == "recorded":
        return Call(lambda: forward(*inputs), lambda output: {"output": output.detach()})

    def both() -> tuple[Tensor, ...]:
        output = forward(*inputs)
        return output, *torch.autograd.grad(output, inputs, data.grad_output)

    def read(found: tuple[Tensor, ...]) -> Result:
        return dict(zip(("output", *data.trained), (tensor.detach() for tensor in found), strict=True))

    if direction == "forward+backward":
        return Call(both, read)
    output = forward(*inputs)
    return Call(lambda: (output, *torch.autograd.grad(output, inputs, data.grad_output, retain_graph=True)), read)
