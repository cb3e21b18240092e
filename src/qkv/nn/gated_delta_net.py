"""Gated DeltaNet: the linear layer of Qwen3-Next, Qwen3.5 and Olmo-Hybrid."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from qkv.cache.arguments import read_size
from qkv.linear.delta_rule import gated_delta_rule
from qkv.linear.norms import l2_norm
from qkv.nn.layer import Memory, RecurrentLayer
from qkv.nn.names import renamed, stacked
from qkv.nn.norm import GatedRMSNorm
from qkv.nn.parts import divided, head_width, log_of_uniform, log_uniform_time_step, short_taps, wide
from qkv.nn.passage import Passage

# Flash-linear-attention's and Olmo-Hybrid's names for the same tensors.
ELSEWHERE = {
    "a_proj.weight": "in_proj_a.weight",
    "b_proj.weight": "in_proj_b.weight",
    "g_proj.weight": "in_proj_z.weight",
    "o_norm.weight": "norm.weight",
    "o_proj.weight": "out_proj.weight",
}


class GatedDeltaNet(RecurrentLayer):
    """The gated delta rule behind a short convolution, with a gated norm.

        q, k, v = silu(conv(W_qkv x)),  q and k scaled to length 1 in each head
        g = -exp(A_log) · softplus(W_a x + dt_bias),  in float32
        beta = sigmoid(W_b x),  twice that with allow_neg_eigval
        y = W_out (norm(o) · weight · silu(W_z x)),  o the gated delta rule of q, k, v, g, beta, scale 1/√D

    dim: of x. heads: value heads, H. key_heads: heads of q and k, by default H; value head h reads key head h // (H /
    K). head_k_dim, head_v_dim: D and V, the widths of a head; by default dim / heads and head_k_dim. conv_size: taps
    of the convolution, at most 8. eps: of the norm. backend: of the rule, as in `qkv.gated_delta_rule`.

    Parameters have the names and shapes of transformers' Qwen3_5GatedDeltaNet, whose `state_dict` loads as it is;
    `from_checkpoint` also takes Qwen3-Next's (in_proj_qkvz and in_proj_ba, interleaved by key head) and
    flash-linear-attention's and Olmo-Hybrid's (q_proj, k_proj, v_proj and so on).

    First values, as the authors' code: A uniform over 0.01 .. 16, dt_bias such that softplus(dt_bias) spreads evenly in
    its logarithm over 0.001 .. 0.1, the norm's weight 1, projections and convolution as torch makes them.

    Source: Yang, Kautz, Hatamizadeh, "Gated Delta Networks: Improving Mamba2 with Delta Rule" (2024).
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        *,
        key_heads: int | None = None,
        head_k_dim: int | None = None,
        head_v_dim: int | None = None,
        conv_size: int = 4,
        allow_neg_eigval: bool = False,
        eps: float = 1e-6,
        backend: str = "auto",
    ) -> None:
        super().__init__(dim, heads, backend)
        self.key_heads = heads if key_heads is None else read_size("key_heads", key_heads, 1)
        self.group = divided("heads", heads, "key_heads", self.key_heads)
        self.head_k_dim = head_width("head_k_dim", head_k_dim, dim, heads)
        self.head_v_dim = self.head_k_dim if head_v_dim is None else read_size("head_v_dim", head_v_dim, 1)
        self.allow_neg_eigval = allow_neg_eigval
        key_dim, value_dim = self.key_heads * self.head_k_dim, heads * self.head_v_dim
        self.widths = (key_dim, key_dim, value_dim)
        self.in_proj_qkv = nn.Linear(dim, sum(self.widths), bias=False)
        self.in_proj_z = nn.Linear(dim, value_dim, bias=False)
        self.in_proj_b = nn.Linear(dim, heads, bias=False)
        self.in_proj_a = nn.Linear(dim, heads, bias=False)
        self.conv1d = short_taps(sum(self.widths), conv_size)
        self.dt_bias = nn.Parameter(log_uniform_time_step(heads))
        self.A_log = nn.Parameter(log_of_uniform(heads, 0.01, 16))
        self.norm = GatedRMSNorm(self.head_v_dim, eps=eps)
        self.out_proj = nn.Linear(value_dim, dim, bias=False)

    def mix(self, x: Tensor, passage: Passage) -> Tensor:
        q, k, v = passage.convolve(self.in_proj_qkv(x), self.conv1d).split(self.widths, dim=-1)
        q, k = (l2_norm(part.unflatten(-1, (self.key_heads, self.head_k_dim))) for part in (q, k))
        v, z = (part.unflatten(-1, (self.heads, self.head_v_dim)) for part in (v, self.in_proj_z(x)))
        g = -wide(self.A_log).exp() * F.softplus(wide(self.in_proj_a(x)) + wide(self.dt_bias))
        beta = self.in_proj_b(x).sigmoid() * (2 if self.allow_neg_eigval else 1)
        out = passage.recur(gated_delta_rule, q, k, v, g, beta, backend=self.backend)
        return self.out_proj(self.norm(out, z).flatten(-2))

    def memory(self) -> Memory:
        return Memory(
            rule="gated_delta",
            heads=self.heads,
            key_heads=self.key_heads,
            key_dim=self.head_k_dim,
            value_dim=self.head_v_dim,
            taps=(self.conv1d.kernel_size[0] - 1, self.conv1d.in_channels),
        )

    def own_names(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        tensors = renamed(tensors, ELSEWHERE)
        for kind in ("_proj.weight", "_conv1d.weight"):
            whole = "in_proj_qkv.weight" if kind == "_proj.weight" else "conv1d.weight"
            tensors = stacked(tensors, tuple(part + kind for part in "qkv"), whole)
        return self._sorted_by_part(tensors)

    def _sorted_by_part(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Qwen3-Next's rows, which stand key head by key head (q, k, v, z of one, then the next), part by part."""
        tensors = dict(tensors)
        if "in_proj_qkvz.weight" in tensors:
            values = self.group * self.head_v_dim
            rows = tensors.pop("in_proj_qkvz.weight").unflatten(0, (self.key_heads, -1))
            *qkv, z = (
                part.flatten(0, 1) for part in rows.split([self.head_k_dim, self.head_k_dim, values, values], dim=1)
            )
            tensors |= {"in_proj_qkv.weight": torch.cat(qkv), "in_proj_z.weight": z}
        if "in_proj_ba.weight" in tensors:
            rows = tensors.pop("in_proj_ba.weight").unflatten(0, (self.key_heads, -1))
            b, a = (part.flatten(0, 1) for part in rows.split(self.group, dim=1))
            tensors |= {"in_proj_b.weight": b, "in_proj_a.weight": a}
        return tensors
