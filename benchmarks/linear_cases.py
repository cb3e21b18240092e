"""The cases of suite `linear`: what is asked, the tensors of a call, and how far rounding may move its results."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

HEADS, STEP_HEADS = 8, 32
FADES = 0.1  # the most that the logarithm of a state loses in a token
STEPS = 1_000  # how much less where one token is repeated thousands of times: no number may fade until it is denormal
# What rounding may move a number by, as a share of its row's length. Gradients are longer sums, of gates differences.
ROUNDING = {torch.float32: 2e-6, torch.bfloat16: 5e-3}
LOOSER = {"output": 1, "query": 2, "key": 2, "value": 2, "gate": 4, "beta": 4}


class Case(NamedTuple):
    """One setting of the recurrence, and the operations of a token for each element of a head's state."""

    name: str
    function: str  # of qkv
    work: int
    feature: str = "none"
    normalize: bool = False
    gate: str = "none"
    delta: bool = False
    steps: bool = False  # one token follows a state
    scale: float | None = None  # None: 1/sqrt(D)

    @property
    def heads(self) -> int:
        return STEP_HEADS if self.steps else HEADS


GATED_DELTA = Case("gated-delta", "gated_delta_rule", 7, gate="scalar", delta=True)
CASES = (
    Case("linear", "linear_attention", 4, feature="elu", normalize=True, scale=1.0),
    Case("decay", "ssd", 5, gate="scalar", scale=1.0),
    GATED_DELTA,
    Case("kimi-delta", "kimi_delta_attention", 7, gate="vector", delta=True),
    GATED_DELTA._replace(name="step", steps=True),
)
BY_NAME = {case.name: case for case in CASES}


class Data(NamedTuple):
    """The tensors of a call and the gradient that its output receives."""

    query: Tensor  # (1, H, L, D)
    key: Tensor  # as query
    value: Tensor  # (1, H, L, D)
    grad_output: Tensor  # as value
    gate: Tensor | None  # (1, H, L), or (1, H, L, D)
    beta: Tensor | None  # (1, H, L)
    state: Tensor | None  # (1, H, D, D), where one token follows it

    @property
    def tokens(self) -> int:
        return self.query.shape[2]

    @property
    def trained(self) -> dict[str, Tensor]:
        """What gradients are asked of, by name, in the order of the functions' arguments."""
        given = {"query": self.query, "key": self.key, "value": self.value, "gate": self.gate, "beta": self.beta}
        return {name: tensor for name, tensor in given.items() if tensor is not None}

    def first(self, tokens: int) -> Data:
        """The same for the first tokens only, in memory of their own."""
        parts = (None if x is None else x[:, :, :tokens].contiguous() for x in self[:-1])
        return Data(*parts, self.state)  # type: ignore[arg-type]


@lru_cache(maxsize=2)
def make_data(tokens: int, case: Case, head_dim: int = 64, dtype: torch.dtype = torch.float32, seed: int = 0) -> Data:
    """Normal numbers, q and k of length 1 for a delta rule; g in -FADES .. 0 and beta in 0 .. 1, float32."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*sizes: int) -> Tensor:
        return torch.randn(1, case.heads, *sizes, generator=generator)

    query, key, value, grad_output = (normal(tokens, head_dim) for _ in range(4))
    if case.delta:
        query, key = F.normalize(query, dim=-1), F.normalize(key, dim=-1)
    gate = beta = state = None
    if case.gate != "none":
        sizes = (tokens, head_dim) if case.gate == "vector" else (tokens,)
        gate = torch.rand(1, case.heads, *sizes, generator=generator).mul_(-FADES / (STEPS if case.steps else 1))
    if case.delta:
        beta = torch.rand(1, case.heads, tokens, generator=generator)
    if case.steps:
        state = normal(head_dim, head_dim)
    return Data(query.to(dtype), key.to(dtype), value.to(dtype), grad_output.to(dtype), gate, beta, state)
