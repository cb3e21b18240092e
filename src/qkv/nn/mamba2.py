"""Mamba-2's mixer: the state space layer of Mamba-2, Nemotron-H, Granite 4 and their relatives."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from qkv.cache.arguments import read_size
from qkv.errors import ValueOutOfRange, message
from qkv.linear.ssd import ssd
from qkv.nn.layer import Memory, RecurrentLayer
from qkv.nn.norm import GroupedGatedRMSNorm
from qkv.nn.parts import divided, head_width, log_of_uniform, log_uniform_time_step, short_taps, wide
from qkv.nn.passage import Passage


class Mamba2Mixer(RecurrentLayer):
    """State space duality behind a short convolution, with a gate before the norm.

        z, xBC, dt = W_in x;  x, B, C = silu(conv(xBC));  dt = clamp(softplus(dt + dt_bias)),  in float32
        S_t = exp(-dt · exp(A_log)) S_{t-1} + B_t (dt · x_t)ᵀ;  o_t = S_tᵀ C_t + D · x_t
        y = W_out (norm(o · silu(z)) · weight),  the norm over each group's share of the width

    dim: of x. heads: H. head_dim: V, the width of x in a head; by default expand · dim / heads. expand: how much
    wider the layer is inside. state_size: D, the width of B and C. n_groups: how many B and C there are; H / n_groups
    heads share one. conv_size: taps of the convolution, at most 8. time_step_limit: what dt is clamped to.
    time_step_min, time_step_max, time_step_floor: where dt begins. use_bias, use_conv_bias: of the two projections,
    of the convolution. eps: of the norm. backend: of the recurrence, as in `qkv.ssd`.

    Parameters have the names and shapes of transformers' Mamba2Mixer and of the published mamba2 checkpoints: both
    load as they are.

    First values, as the authors' code: A uniform over 1 .. 16, dt_bias such that softplus(dt_bias) spreads evenly in
    its logarithm over time_step_min .. time_step_max, D and the norm's weight 1, all else as torch makes it.

    Source: Dao and Gu, "Transformers are SSMs" (2024), section 7.
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        *,
        head_dim: int | None = None,
        expand: int = 2,
        state_size: int = 128,
        n_groups: int = 1,
        conv_size: int = 4,
        time_step_limit: tuple[float, float] = (0.0, math.inf),
        time_step_min: float = 1e-3,
        time_step_max: float = 1e-1,
        time_step_floor: float = 1e-4,
        use_bias: bool = False,
        use_conv_bias: bool = True,
        eps: float = 1e-5,
        backend: str = "auto",
    ) -> None:
        super().__init__(dim, heads, backend)
        self.head_dim = head_width("head_dim", head_dim, expand * dim, heads)
        self.state_size = read_size("state_size", state_size, 1)
        self.n_groups = read_size("n_groups", n_groups, 1)
        divided("heads", heads, "n_groups", n_groups)
        self.time_step_limit = _read_limit(time_step_limit)
        inner, shared = heads * self.head_dim, n_groups * state_size
        self.widths = (inner, shared, shared)
        self.in_proj = nn.Linear(dim, inner + sum(self.widths) + heads, bias=use_bias)
        self.conv1d = short_taps(sum(self.widths), conv_size, bias=use_conv_bias)
        self.dt_bias = nn.Parameter(log_uniform_time_step(heads, time_step_min, time_step_max, time_step_floor))
        self.A_log = nn.Parameter(log_of_uniform(heads, 1, 16))
        self.D = nn.Parameter(torch.ones(heads))
        self.norm = GroupedGatedRMSNorm(inner, n_groups, eps=eps)
        self.out_proj = nn.Linear(inner, dim, bias=use_bias)

    def mix(self, x: Tensor, passage: Passage) -> Tensor:
        z, mixed, dt = self.in_proj(x).split([self.widths[0], sum(self.widths), self.heads], dim=-1)
        # From here to the norm in float32, as the reference code: dt · x is an input of the recurrence.
        inner, b, c = wide(passage.convolve(mixed, self.conv1d)).split(self.widths, dim=-1)
        inner = inner.unflatten(-1, (self.heads, self.head_dim))
        b, c = (part.unflatten(-1, (self.n_groups, self.state_size)) for part in (b, c))
        dt = F.softplus(wide(dt) + wide(self.dt_bias)).clamp(*self.time_step_limit)
        decay = -dt * wide(self.A_log).exp()
        out = passage.recur(ssd, c, b, inner * dt[..., None], decay, backend=self.backend)
        out = out + inner * wide(self.D)[:, None]
        return self.out_proj(self.norm(out.flatten(-2), wide(z)).to(z.dtype))

    def memory(self) -> Memory:
        return Memory(
            rule="ssd",
            heads=self.heads,
            key_heads=self.n_groups,
            key_dim=self.state_size,
            value_dim=self.head_dim,
            taps=(self.conv1d.kernel_size[0] - 1, self.conv1d.in_channels),
        )


def _read_limit(limit: object) -> tuple[float, float]:
    """The least and the greatest dt."""
    pair = tuple(limit) if isinstance(limit, (tuple, list)) else ()
    if len(pair) != 2 or not all(isinstance(end, (int, float)) for end in pair) or not pair[0] <= pair[1]:
        holds = "`time_step_limit` must be two numbers, the least dt and the greatest"
        raise ValueOutOfRange(message(holds, f"got {limit!r}", "say (0.0, math.inf) for none"))
    return float(pair[0]), float(pair[1])
