"""The one table of benchmark cases, and the contenders that answer them: ours, torch's SDPA, compiled flex_attention.

A case names its pattern twice: as the library's object, and as the rule of the independent oracle that the gate uses.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.nn import functional as F

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

import oracles
from qkv import attention, bigbird, causal, dilated, fixed, full, longformer, random_blocks, strided, window
from qkv.patterns.pattern import Pattern

BATCH, HEADS, HEAD_DIM = 1, 8, 64
LENGTHS = (1_024, 2_048, 4_096, 8_192, 16_384)
SHARPNESS = 3
HEADLINE = ("window", 8_192)  # the case and length of the figure that the summary ends with
FIT_FROM = 4_096  # the exponent in L is fitted from here on

Direction: TypeAlias = Literal["forward", "forward+backward"]
DIRECTIONS: tuple[Direction, ...] = ("forward", "forward+backward")
Result: TypeAlias = dict[str, Tensor]  # "output", and "query", "key", "value" for their gradients


class Case(NamedTuple):
    """One family of patterns, growing with the length."""

    name: str
    pattern: Callable[[int], Pattern]
    rule: Callable[[int], oracles.Rule]  # the same pairs, from the definition
    torch_form: Literal["no mask", "is_causal", "bool mask"]  # the best that SDPA has for it
    flex: bool = True  # whether the rule can be traced


CASES = (
    Case("dense", lambda _: full(), lambda _: oracles.full(), "no mask"),
    Case("causal", lambda _: causal(), lambda _: oracles.causal(), "is_causal"),
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
BY_NAME = {case.name: case for case in CASES}


class Data(NamedTuple):
    """The tensors of a call, (B, H, L, D) each, and the gradient that its output receives."""

    query: Tensor
    key: Tensor
    value: Tensor
    grad_output: Tensor

    @property
    def tokens(self) -> int:
        return self.query.shape[2]

    @property
    def input_bytes(self) -> int:
        """The size of q, k and v: what memory is compared with."""
        return self.query.nbytes + self.key.nbytes + self.value.nbytes


def make_data(tokens: int, seed: int = 0) -> Data:
    """Normal numbers in float32, the same for every case of a length.

    The queries are SHARPNESS times as large as usual: were each weight about 1/L, a wrong scale would hide in rounding.
    """
    generator = torch.Generator().manual_seed(seed)
    query, *others = torch.randn(4, BATCH, HEADS, tokens, HEAD_DIM, generator=generator).unbind(0)
    return Data(query.mul_(SHARPNESS), *others)


class Contender(NamedTuple):
    """A call ready to run in either direction, and the bytes of the mask that was made for it."""

    run: Callable[[Direction], Result]
    mask_bytes: int = 0


def ours(case: Case, data: Data) -> Contender:
    """qkv on the backend that is measured; the schedule is built beforehand, what that costs is `build.py`'s figure."""
    pattern = case.pattern(data.tokens)
    pattern.plan(data.tokens, batch=BATCH, heads=HEADS)

    def forward(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        output = attention(query, key, value, pattern=pattern, backend="blockwise")
        assert isinstance(output, Tensor)  # no pair, because no aux is asked for
        return output

    return Contender(lambda direction: _run(forward, data, direction))


def sdpa(case: Case, data: Data) -> Contender:
    """torch's own attention in the best form that it has for the pattern: no mask, its causal flag, or a dense bool."""
    keep = case.pattern(data.tokens).to_dense(data.tokens) if case.torch_form == "bool mask" else None
    is_causal = case.torch_form == "is_causal"

    def forward(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(query, key, value, attn_mask=keep, is_causal=is_causal)

    return Contender(lambda direction: _run(forward, data, direction), 0 if keep is None else keep.nbytes)


def flex(case: Case, data: Data) -> Contender:
    """torch's compiled flex_attention with the rule as its mask_mod; the first run compiles."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention  # loads the compiler: seconds

    rule, tokens = case.rule(data.tokens), data.tokens

    def mask_mod(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return rule(oracles.Pairs(b, h, i, j, i, tokens))

    blocks = create_block_mask(mask_mod, None, None, tokens, tokens, device="cpu")
    compiled = torch.compile(flex_attention)

    def forward(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return compiled(query, key, value, block_mask=blocks)

    return Contender(lambda direction: _run(forward, data, direction))


CONTENDERS = {"ours": ours, "sdpa": sdpa, "flex": flex}


def _run(forward: Callable[[Tensor, Tensor, Tensor], Tensor], data: Data, direction: Direction) -> Result:
    if direction == "forward":
        with torch.no_grad():
            return {"output": forward(data.query, data.key, data.value)}
    inputs = [tensor.detach().requires_grad_() for tensor in data[:3]]
    output = forward(*inputs)
    gradients = torch.autograd.grad(output, inputs, data.grad_output)
    return {"output": output.detach(), **dict(zip(("query", "key", "value"), gradients, strict=True))}
