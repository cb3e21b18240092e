"""Calls whose bits must not change: patterns, shapes, biases and options taken together in turn, and what each answers.

As a script it prints one digest a call and instruction set: `python tests/configurations.py 3 40` takes three threads
and forty configurations.
"""

from __future__ import annotations

import functools
import hashlib
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

import engines
import qkv

BATCH = 3
LONGEST = 1300  # keys; several groups of four tiles, and two chunks of those that few queries see
Rows = slice | list[int]


def normal(*shape: int, seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


LENGTHS = torch.tensor([LONGEST, 65, 190])
IDS = torch.arange(LONGEST) // 47 % 5
IDS_OF_ROWS = torch.stack([torch.arange(LONGEST) // n % 4 for n in (31, 64, 100)])
KEEP = normal(BATCH, LONGEST, seed=1) > -1
TILES = normal(BATCH, 1, 82, 82, seed=2) > 0
MASK = normal(LONGEST, LONGEST, seed=3) > 0
MASKS = normal(BATCH, 1, LONGEST, LONGEST, seed=4) > 0.5

# Each takes the batch rows and the query rows of a call, as indices into all there are, and how many keys it has.
PATTERNS: dict[str, Callable[[Rows, range, int], Any]] = {
    **{
        text: (lambda rows, queries, keys, text=text: qkv.parse(text))
        for text in (
            "full()",
            "causal()",
            "causal() & window(100)",
            "window(70, 30)",
            "strided(16)",
            "strided(7)",
            "fixed(32)",
            "fixed(50, 3)",
            "dilated(9, 9, dilation=5)",
            "bigbird(3, 16, 2, 7, block_size=32)",
            "longformer(64, [0, 5, 200])",
            "random_blocks(2, 64, 3)",
            "random_blocks(3, 20, 9, ahead=True)",
            "block_local(96)",
            "causal() | prefix(70)",
            "causal() - window(20)",
            "~window(30, 60)",
        )
    },
    "documents": lambda rows, queries, keys: qkv.documents(IDS[:keys]) & qkv.causal(),
    "documents of rows": lambda rows, queries, keys: qkv.documents(IDS_OF_ROWS[rows, :keys]),
    "key_lengths": lambda rows, queries, keys: qkv.key_lengths(LENGTHS[rows].clamp_max(keys)) & qkv.causal(),
    "key_padding": lambda rows, queries, keys: qkv.key_padding(keep=KEEP[rows, :keys]),
    "mask": lambda rows, queries, keys: qkv.mask(keep=MASK[queries][:, :keys]),
    "mask of rows": lambda rows, queries, keys: qkv.mask(keep=MASKS[rows][:, :, queries][..., :keys]),
    "blocks": lambda rows, queries, keys: qkv.blocks(keep=TILES[rows], block_size=16),
    "per_head": lambda rows, queries, keys: qkv.per_head([qkv.causal(), qkv.strided(9), qkv.window(40), qkv.full()]),
}
SHAPES = [  # H, G, L, S, D, V
    (1, 1, 257, 257, 40, 40),
    (4, 2, 130, 130, 17, 17),
    (6, 3, 65, 129, 8, 8),
    (1, 1, 200, 330, 64, 32),
    (2, 1, 192, 193, 33, 5),
    (3, 1, 64, 200, 16, 24),
    (2, 2, 129, 128, 1, 3),
    (1, 1, 320, 320, 3, 64),
    (1, 1, 590, 600, 8, 8),
    (4, 4, 31, 96, 128, 80),
    (8, 2, 1, 1300, 16, 24),
    (4, 4, 5, 1200, 40, 8),
    (6, 2, 8, 333, 17, 64),
]
TYPES = (
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.float32,
    torch.float16,
    torch.float32,
    torch.bfloat16,
)
BIASES: dict[str, tuple[int, ...] | None] = {  # axes that are 1
    "none": None,
    "full": (),
    "heads and keys": (0, 2),
    "alibi": None,
    "batch rows": (1, 3),
    "queries and keys": (0, 1),
    "relative": None,
    "one": (0, 1, 2, 3),
    "keys": (1, 2),
    "heads": (0, 2, 3),
    "queries": (0, 1, 3),
}


@dataclass(frozen=True, eq=False)
class Configuration:
    number: int
    pattern: str
    shape: tuple[int, int, int, int, int, int]
    bias: str
    dtype: torch.dtype
    options: dict[str, Any] = field(default_factory=dict)
    sinks: bool = False

    def __str__(self) -> str:
        return f"{self.number} {self.pattern} {self.shape} {self.bias} {self.dtype} {self.options or ''}"

    @property
    def offset(self) -> int:
        return max(self.shape[3] - self.shape[2], 0)


def configurations(count: int) -> list[Configuration]:
    """The axes in turn, with periods that have no common factor; the same ones each time."""
    made = []
    for n in range(count):
        pattern = list(PATTERNS)[n % len(PATTERNS)]
        shape = (4, 2, 130, 130, 17, 17) if pattern == "per_head" else SHAPES[n * 3 % len(SHAPES)]
        options = ({}, {"dropout_p": 0.2}, {}, {"softcap": 2.0})[n % 4]
        dtype = TYPES[n % len(TYPES)]
        made.append(Configuration(n, pattern, shape, list(BIASES)[n % len(BIASES)], dtype, options, n % 5 == 1))
    return made


@dataclass
class Call:
    """Numbers for a configuration; all, or some batch rows and a run of query rows."""

    of: Configuration
    tensors: dict[str, Tensor]  # "q", "k", "v", perhaps "bias" and "sinks"
    grad_output: Tensor
    grad_lse: Tensor
    rows: Rows = field(default_factory=lambda: slice(None))
    queries: slice = field(default_factory=lambda: slice(None))

    def taking(self, rows: Rows, queries: slice) -> Call:
        """The call that computes those rows alone."""
        taken = dict(self.tensors)
        taken["q"] = taken["q"][rows][:, :, queries]
        taken |= {name: taken[name][rows] for name in "kv"}
        bias = taken.get("bias")
        if bias is not None and bias.ndim == 4:
            bias = bias[rows] if bias.shape[0] > 1 else bias
            taken["bias"] = bias[:, :, queries] if bias.shape[2] > 1 else bias
        grads = self.grad_output[rows][:, :, queries], self.grad_lse[rows][:, :, queries]
        return Call(self.of, taken, *grads, rows, queries)

    def answer(self, backend: str) -> dict[str, Tensor]:
        """Output, lse and what else a call gives, and the gradient of every tensor."""
        made, keys = self.of, self.of.shape[3]
        leaves = {name: x.detach().requires_grad_() for name, x in self.tensors.items()}
        options = dict(made.options)
        if "dropout_p" in options:
            options["generator"] = torch.Generator().manual_seed(made.number)
        if "bias" in leaves:
            wrap = {"alibi": qkv.alibi, "relative": qkv.relative}.get(made.bias, lambda x: x)
            options["bias"] = wrap(leaves["bias"])
        out, aux = qkv.attention(
            *(leaves[name] for name in "qkv"),
            pattern=PATTERNS[made.pattern](self.rows, range(made.shape[2])[self.queries], keys),
            sinks=leaves.get("sinks"),
            query_offset=made.offset + (self.queries.start or 0),
            backend=backend,
            return_aux=qkv.AuxRequest(lse=True, max_scores=True, entropy=True),
            **options,
        )
        live = torch.where(aux.lse.detach().isfinite(), self.grad_lse, 0.0)
        grads = torch.autograd.grad([out, aux.lse], list(leaves.values()), [self.grad_output, live])
        found = {"output": out.detach(), "lse": aux.lse.detach()}
        found |= {"max_scores": aux.max_scores, "entropy": aux.entropy}
        return found | {f"gradient of {name}": g for name, g in zip(leaves, grads, strict=True)}


@functools.cache
def call_of(made: Configuration, batch: int = BATCH) -> Call:
    heads, groups, queries, keys, width, value = made.shape
    shapes = {"q": (batch, heads, queries, width), "k": (batch, groups, keys, width), "v": (batch, groups, keys, value)}
    axes = BIASES[made.bias]
    if axes is not None:
        shapes["bias"] = tuple(1 if n in axes else size for n, size in enumerate((batch, heads, queries, keys)))
    shapes |= {"bias": (heads,)} if made.bias == "alibi" else {}
    shapes |= {"bias": (heads, 2 * 50 + 1)} if made.bias == "relative" else {}
    shapes |= {"sinks": (heads,)} if made.sinks else {}
    tensors = {
        name: normal(*shape, seed=10 * made.number + n, dtype=made.dtype)
        for n, (name, shape) in enumerate(shapes.items())
    }
    wide = torch.float64 if made.dtype == torch.float64 else torch.float32
    grads = [
        normal(batch, heads, queries, *more, seed=10 * made.number + 7 + len(more), dtype=dtype)
        for more, dtype in (((value,), made.dtype), ((), wide))
    ]
    return Call(made, tensors, *grads, slice(batch))


def differing(a: dict[str, Tensor], b: dict[str, Tensor]) -> list[str]:
    """The results whose bits differ."""
    assert a.keys() == b.keys()
    return [name for name in a if not torch.equal(a[name], b[name])]


def digest(answer: dict[str, Tensor]) -> str:
    """The bits of an answer as text."""
    found = hashlib.sha256()
    for name, x in answer.items():
        found.update(f"{name}{x.dtype}{list(x.shape)}".encode() + x.contiguous().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def digests(count: int) -> dict[str, list[str]]:
    """Of the first configurations, by engine."""
    found = {}
    for engine in engines.NATIVE:
        with engines.using(engine) as backend:
            found[engine] = [digest(call_of(made).answer(backend)) for made in configurations(count)]
    return found


if __name__ == "__main__":
    torch.set_num_threads(int(sys.argv[1]))
    print(json.dumps({"isa": engines.isa(), "digests": digests(int(sys.argv[2]))}))
