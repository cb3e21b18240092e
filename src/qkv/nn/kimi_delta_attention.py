"""Kimi Delta Attention: the linear layer of Kimi Linear, and in its bounded form of GLM-5.3-Flash."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from qkv.errors import ValueOutOfRange, message
from qkv.linear.delta_rule import kimi_delta_attention
from qkv.linear.norms import l2_norm
from qkv.nn.layer import Memory, RecurrentLayer
from qkv.nn.names import renamed, stacked
from qkv.nn.norm import GatedRMSNorm
from qkv.nn.parts import head_width, log_of_uniform, log_uniform_time_step, short_taps, wide
from qkv.nn.passage import Passage

GATE = ("f_a_proj.weight", "f_b_proj.weight", "dt_bias", "A_log")
# The names of published checkpoints, and those of flash-linear-attention.
ELSEWHERE = {
    **{name: f"forget_gate.{name}" for name in GATE},
    "f_proj.0.weight": "forget_gate.f_a_proj.weight",
    "f_proj.1.weight": "forget_gate.f_b_proj.weight",
    "g_proj.0.weight": "g_a_proj.weight",
    "g_proj.1.weight": "g_b_proj.weight",
}


class ForgetGate(nn.Module):
    """The log decay of each key channel, (B, L, H, D) in float32, from x by a projection of low rank.

    f = W_b W_a x + dt_bias.  Unbounded: g = -exp(A_log) · softplus(f).  Bounded: g = bound · sigmoid(exp(A_log) · f).
    """

    def __init__(self, dim: int, heads: int, head_dim: int, bound: float | None) -> None:
        super().__init__()
        self.heads = heads
        self.bound = bound
        self.f_a_proj = nn.Linear(dim, head_dim, bias=False)
        self.f_b_proj = nn.Linear(head_dim, heads * head_dim, bias=False)
        self.dt_bias = nn.Parameter(log_uniform_time_step(heads * head_dim))
        first = log_of_uniform(heads, 1, 16) if bound is None else torch.zeros(heads)
        self.A_log = nn.Parameter(first.reshape(1, 1, heads, 1))

    def forward(self, x: Tensor) -> Tensor:
        f = wide(self.f_b_proj(self.f_a_proj(x))) + wide(self.dt_bias)
        f = f.unflatten(-1, (self.heads, -1))
        rate = wide(self.A_log).exp()
        return -rate * F.softplus(f) if self.bound is None else self.bound * (rate * f).sigmoid()

    def extra_repr(self) -> str:
        """The bound, for printing."""
        return f"heads={self.heads}, bound={self.bound}"


class KimiDeltaAttention(RecurrentLayer):
    """The delta rule with a decay for each key channel, behind a short convolution, with a gated norm.

        q, k, v = silu(conv(W x)),  q and k scaled to length 1 in each head
        g = the forget gate of x, in float32;  beta = sigmoid(W_beta x)
        y = W_o (norm(o) · weight · sigmoid(W_gb W_ga x)),  o the rule of q, k, v, g, beta, scale 1/√D

    dim: of x. heads: H. head_dim: the width of a head of q, k and v, and the rank of both gates, by default dim /
    heads. gate_lower_bound: None for the gate -exp(A_log) · softplus(f) of Kimi Linear; a negative number for the
    bounded one, bound · sigmoid(exp(A_log) · f), -5 in GLM-5.3-Flash. conv_size: taps of the convolution, at most 8.
    eps: of the norm. backend: of the rule, as in `qkv.kimi_delta_attention`.

    Parameters have the names and shapes of transformers' KimiLinearDeltaAttention, whose `state_dict` loads as it is;
    `from_checkpoint` also takes the published checkpoints (three convolutions, the gate's tensors beside the others),
    transformers' Glm5Next layer and flash-linear-attention's.

    First values, as flash-linear-attention: A uniform over 1 .. 16 (1 with a bound), dt_bias such that
    softplus(dt_bias) spreads evenly in its logarithm over 0.001 .. 0.1, the norm's weight 1, all else as torch makes
    it.

    Source: Kimi Team, "Kimi Linear: An Expressive, Efficient Attention Architecture" (2025).
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        *,
        head_dim: int | None = None,
        gate_lower_bound: float | None = None,
        conv_size: int = 4,
        eps: float = 1e-5,
        backend: str = "auto",
    ) -> None:
        super().__init__(dim, heads, backend)
        if gate_lower_bound is not None and not gate_lower_bound < 0:
            seen = f"got {gate_lower_bound!r}"
            remedy = "pass -5.0, or None for the gate without a bound"
            raise ValueOutOfRange(message("`gate_lower_bound` must be negative", seen, remedy))
        self.head_dim = head_width("head_dim", head_dim, dim, heads)
        width = heads * self.head_dim
        self.q_proj = nn.Linear(dim, width, bias=False)
        self.k_proj = nn.Linear(dim, width, bias=False)
        self.v_proj = nn.Linear(dim, width, bias=False)
        self.conv1d = short_taps(3 * width, conv_size)
        self.forget_gate = ForgetGate(dim, heads, self.head_dim, gate_lower_bound)
        self.b_proj = nn.Linear(dim, heads, bias=False)
        self.g_a_proj = nn.Linear(dim, self.head_dim, bias=False)
        self.g_b_proj = nn.Linear(self.head_dim, width, bias=False)
        self.o_norm = GatedRMSNorm(self.head_dim, eps=eps, activation="sigmoid")
        self.o_proj = nn.Linear(width, dim, bias=False)

    def mix(self, x: Tensor, passage: Passage) -> Tensor:
        projected = torch.cat([self.q_proj(x), self.k_proj(x), self.v_proj(x)], dim=-1)
        mixed = passage.convolve(projected, self.conv1d)
        q, k, v = mixed.unflatten(-1, (3, self.heads, self.head_dim)).unbind(-3)
        beta = self.b_proj(x).sigmoid()
        streams = (l2_norm(q), l2_norm(k), v, self.forget_gate(x), beta)
        out = passage.recur(kimi_delta_attention, *streams, backend=self.backend)
        gate = self.g_b_proj(self.g_a_proj(x)).unflatten(-1, (self.heads, self.head_dim))
        return self.o_proj(self.o_norm(out, gate).flatten(-2))

    def memory(self) -> Memory:
        return Memory(
            rule="kimi_delta",
            heads=self.heads,
            key_heads=self.heads,
            key_dim=self.head_dim,
            value_dim=self.head_dim,
            taps=(self.conv1d.kernel_size[0] - 1, self.conv1d.in_channels),
        )

    def own_names(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        tensors = stacked(tensors, tuple(f"{part}_conv1d.weight" for part in "qkv"), "conv1d.weight")
        tensors = renamed(tensors, ELSEWHERE)
        rate = tensors.get("forget_gate.A_log")
        return tensors if rate is None else {**tensors, "forget_gate.A_log": rate.reshape(1, 1, -1, 1)}
