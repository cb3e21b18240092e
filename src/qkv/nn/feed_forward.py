"""The feed-forward sublayer: each token by itself, into a wider space, through a bend, and back."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from qkv.cache.arguments import read_size
from qkv.errors import unknown_name
from qkv.nn.dropping import read_share
from qkv.nn.parts import xavier_
from qkv.nn.products import product, products
from qkv.patterns.arguments import one_flag
from qkv.shapes import values_can_be_seen

Activation: TypeAlias = Callable[[Tensor], Tensor]

PLAIN: dict[str, Activation] = {
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "silu": F.silu,
}
GATED: dict[str, Activation] = {"reglu": F.relu, "geglu": F.gelu, "geglu_tanh": PLAIN["gelu_tanh"], "swiglu": F.silu}


class FeedForward(nn.Module):
    """Two linear maps with an activation between, x (..., dim) -> (..., dim):

        y = down(dropout(act(up(x))))                plain
        y = down(dropout(act(gate(x)) · up(x)))      gated

    dim: of x. hidden: the width between. activation, plain: "relu", max(0, z); "gelu", z·Φ(z) with the exact normal
    distribution Φ (Hendrycks, Gimpel, arXiv:1606.08415); "gelu_tanh", its approximation of that paper by a tanh, which
    GPT-2 uses; "silu", z·σ(z). Gated: "reglu", "geglu", "geglu_tanh", "swiglu", with these in the same order (Shazeer,
    arXiv:2002.05202, equation 6); Llama's is "swiglu".
    feedforward_dropout: the share of what the activation gives that is set to 0 in training, the rest divided by 1 - p.
    bias: of all linear maps.

    First values: weights by Glorot and Bengio (2010), equation 16, uniform over ±√(6 / (inputs + outputs)), which the
    code published with the Transformer draws from too; biases 0.

    Source: Vaswani et al., arXiv:1706.03762, section 3.3.

    >>> FeedForward(64, 256, activation="swiglu", bias=False)(torch.randn(2, 10, 64)).shape
    torch.Size([2, 10, 64])
    """

    gate_proj: nn.Linear | None  # gated kinds have one

    def __init__(
        self,
        dim: int,
        hidden: int,
        *,
        activation: str = "gelu",
        feedforward_dropout: float = 0.0,
        bias: bool = True,
    ) -> None:
        super().__init__()
        dim, hidden, bias = read_size("dim", dim, 1), read_size("hidden", hidden, 1), one_flag("bias", bias)
        if activation not in PLAIN and activation not in GATED:
            raise unknown_name("activation", activation, (*PLAIN, *GATED))
        self.activation = activation
        self.feedforward_dropout = read_share("feedforward_dropout", feedforward_dropout)
        self.gate_proj = nn.Linear(dim, hidden, bias=bias) if activation in GATED else None
        self.up_proj = nn.Linear(dim, hidden, bias=bias)
        self.down_proj = nn.Linear(hidden, dim, bias=bias)
        self._act = GATED[activation] if activation in GATED else PLAIN[activation]
        xavier_(1.0, *(part for part in (self.gate_proj, self.up_proj, self.down_proj) if part is not None))

    def forward(self, x: Tensor) -> Tensor:
        bent = self._bent(x)
        if self.training and self.feedforward_dropout > 0.0:
            bent = F.dropout(bent, self.feedforward_dropout)
        return product(bent, self.down_proj)

    def _bent(self, x: Tensor) -> Tensor:
        """What comes between the linear maps, (..., hidden)."""
        if self.gate_proj is None:
            return self._act(product(x, self.up_proj))
        gate, up = products(x, self.gate_proj, self.up_proj)
        gate = self._act(gate)
        if torch.is_grad_enabled() or not values_can_be_seen(gate):
            return gate * up
        return gate.mul_(up)  # without a graph nobody else holds it

    def extra_repr(self) -> str:
        """What the linear maps do not tell, for printing."""
        said = f"activation={self.activation!r}"
        return f"{said}, feedforward_dropout={self.feedforward_dropout}" if self.feedforward_dropout else said
