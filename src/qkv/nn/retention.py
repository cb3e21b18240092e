"""Retention, the layer of RetNet, and with other settings the lightning attention of MiniMax-01."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from qkv.cache.arguments import read_size
from qkv.errors import ShapeError, ValueOutOfRange, message, unknown_name
from qkv.linear.norms import gated_rms_norm
from qkv.linear.retention import retention
from qkv.nn.layer import Memory, RecurrentLayer
from qkv.nn.names import renamed
from qkv.nn.norm import GateActivation
from qkv.nn.parts import head_width, wide, xavier_
from qkv.nn.passage import Passage

if TYPE_CHECKING:
    from typing_extensions import Self

OutputNorm = Literal["rms", "group", "whole"]
# What transformers' MiniMaxLightningAttention keeps beside its weights: all follows from the slopes.
TABLES = ("slope_rate", "query_decay", "key_decay", "diagonal_decay")


class Retention(RecurrentLayer):
    """Linear attention with a constant decay for each head, rotated queries and keys, a norm of each head, and a gate.

        q, k, v = W x, q and k rotated by their position
        S_t = exp(decay_h) S_{t-1} + k_t v_tᵀ;  o_t = scale · S_tᵀ q_t
        y = W_out (norm(o) · silu(W_g x))

    dim: of x. heads: H. head_k_dim, head_v_dim: D and V, the widths of a head; by default dim / heads and twice D.
    decay: the log of each head's constant, at most 0; by default that of RetNet, log(1 - 2^(-5 - h)) for h = 0 .. H -
    1. rotary: entries 2i and 2i + 1 of q and k turn by the angle position · 10000^(-i / (D/2 - 1)), as in RetNet,
    where the decay takes the place of xPos's own. activation: of q, k and v, none or "silu". scale: by default 1/√D.
    gate: "silu" or "sigmoid". norm: "rms", over each head and without a weight, as the authors' code; "group", the
    paper's GroupNorm, which subtracts each head's mean too; "whole", RMS over all heads together with a weight. eps:
    of the norm. backend: as in `qkv.retention`.

    Parameters have the names and shapes of torchscale's MultiScaleRetention, which divides scores by sums that the norm
    takes out again; results differ from it as far as its eps shows. `Retention.lightning` makes MiniMax-01's layer.

    First values, as torchscale: Glorot uniform with gain 2^-2.5, W_out with gain 1.

    Source: Sun et al., "Retentive Network: A Successor to Transformer for Large Language Models" (2023), section 2.
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        *,
        head_k_dim: int | None = None,
        head_v_dim: int | None = None,
        decay: Sequence[float] | Tensor | None = None,
        rotary: bool = True,
        activation: Literal["silu"] | None = None,
        scale: float | None = None,
        gate: GateActivation = "silu",
        norm: OutputNorm = "rms",
        eps: float = 1e-6,
        backend: str = "auto",
    ) -> None:
        super().__init__(dim, heads, backend)
        self.head_k_dim = head_width("head_k_dim", head_k_dim, dim, heads)
        self.head_v_dim = 2 * self.head_k_dim if head_v_dim is None else read_size("head_v_dim", head_v_dim, 1)
        # Numbers, not a buffer: a layer in bfloat16 must not round them.
        self.decay = _retnet_decay(heads) if decay is None else _read_decay(decay, heads)
        self.rotary = rotary
        if rotary and self.head_k_dim % 2:
            holds = "`head_k_dim` must be even where `rotary` is True, which turns entries in pairs"
            raise ShapeError(message(holds, f"got {self.head_k_dim}", "give an even head_k_dim, or say rotary=False"))
        for name, value, valid in (("gate", gate, ("silu", "sigmoid")), ("norm", norm, ("rms", "group", "whole"))):
            if value not in valid:
                raise unknown_name(name, value, valid)
        if activation not in {None, "silu"}:
            raise unknown_name("activation", activation, ("silu",))
        self.activation = activation
        self.scale = scale
        self.gate: GateActivation = gate
        self.normalisation: OutputNorm = norm
        self.eps = eps
        key_dim, value_dim = heads * self.head_k_dim, heads * self.head_v_dim
        self.q_proj = nn.Linear(dim, key_dim, bias=False)
        self.k_proj = nn.Linear(dim, key_dim, bias=False)
        self.v_proj = nn.Linear(dim, value_dim, bias=False)
        self.g_proj = nn.Linear(dim, value_dim, bias=False)
        if norm == "whole":
            self.norm = nn.ParameterDict({"weight": torch.ones(value_dim)})
        self.out_proj = nn.Linear(value_dim, dim, bias=False)
        xavier_(2**-2.5, self.q_proj, self.k_proj, self.v_proj, self.g_proj)
        xavier_(1, self.out_proj)

    @classmethod
    def lightning(
        cls, dim: int, heads: int, *, layer: int, layers: int, head_dim: int | None = None, backend: str = "auto"
    ) -> Self:
        """MiniMax-01's lightning attention: the layer number `layer`, from 0, of a model of `layers`.

        silu on q, k and v, no rotation, no scale, the decay of `lightning_decay`, one RMS norm over all heads, a
        sigmoid gate. `from_checkpoint` takes transformers' MiniMaxLightningAttention and the published checkpoints.

        Source: MiniMax, "MiniMax-01: Scaling Foundation Models with Lightning Attention" (2025).
        """
        width = head_width("head_dim", head_dim, dim, heads)
        return cls(
            dim,
            heads,
            head_k_dim=width,
            head_v_dim=width,
            decay=lightning_decay(heads, layer, layers),
            rotary=False,
            activation="silu",
            scale=1.0,
            gate="sigmoid",
            norm="whole",
            backend=backend,
        )

    def mix(self, x: Tensor, passage: Passage) -> Tensor:
        q, k, v = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        if self.activation is not None:
            q, k, v = F.silu(q), F.silu(k), F.silu(v)
        # From here to the norm in float32, as Mamba-2's: what is cubic in x before it leaves the range of float16.
        q, k = (wide(part).unflatten(-1, (self.heads, self.head_k_dim)) for part in (q, k))
        if self.rotary:
            q, k = _rotated(passage.positions(x.device), q, k)
        v = wide(v).unflatten(-1, (self.heads, self.head_v_dim))
        decay = torch.tensor(self.decay, dtype=v.dtype, device=x.device)
        out = passage.recur(retention, q, k, v, decay=decay, scale=self.scale, backend=self.backend)
        gate = self.g_proj(x)
        return self.out_proj(self._gated(out, wide(gate)).to(gate.dtype))

    def _gated(self, out: Tensor, gate: Tensor) -> Tensor:
        """The norm of (B, L, H, V), times the activation of the gate (B, L, H V)."""
        if self.normalisation == "whole":
            weight = self.norm["weight"]
            return gated_rms_norm(out.flatten(-2), gate, weight, eps=self.eps, activation=self.gate)
        gate = gate.unflatten(-1, (self.heads, self.head_v_dim))
        if self.normalisation == "rms":
            return gated_rms_norm(out, gate, eps=self.eps, activation=self.gate).flatten(-2)
        gate = F.silu(gate) if self.gate == "silu" else gate.sigmoid()
        return (F.layer_norm(out, (self.head_v_dim,), eps=self.eps) * gate).flatten(-2)

    def memory(self) -> Memory:
        return Memory(
            rule="retention",
            heads=self.heads,
            key_heads=self.heads,
            key_dim=self.head_k_dim,
            value_dim=self.head_v_dim,
            scale=self.scale,
            decay=self.decay,
        )

    def own_names(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        tensors = {name: tensor for name, tensor in tensors.items() if name not in TABLES}
        if "qkv_proj.weight" in tensors:
            rows = tensors.pop("qkv_proj.weight").unflatten(0, (self.heads, 3, self.head_k_dim))
            tensors |= {f"{part}_proj.weight": rows[:, n].flatten(0, 1) for n, part in enumerate("qkv")}
        return renamed(tensors, {"output_gate.weight": "g_proj.weight"})


def lightning_decay(heads: int, layer: int, layers: int) -> tuple[float, ...]:
    """The logs of MiniMax-01's constants: -2^(-8 (h + 1) / H) · (1 - layer / (layers - 1 + 1e-5) + 1e-5)."""
    factor = 1 - layer / (layers - 1 + 1e-5) + 1e-5
    return tuple(-(2 ** (-8 * (head + 1) / heads)) * factor for head in range(heads))


def _retnet_decay(heads: int) -> tuple[float, ...]:
    return tuple(math.log1p(-(2.0 ** (-5 - head))) for head in range(heads))


def _read_decay(decay: Sequence[float] | Tensor, heads: int) -> tuple[float, ...]:
    """One log of a constant for each head."""
    logs = tuple(float(log) for log in (decay.tolist() if isinstance(decay, Tensor) else decay))
    if len(logs) != heads:
        seen = f"got {len(logs)} for {heads} heads"
        raise ShapeError(message("`decay` must have one number for each head", seen, "pass (H,) logs, each at most 0"))
    wrong = [log for log in logs if not log <= 0]
    if wrong:
        seen = f"got {wrong[0]}"
        raise ValueOutOfRange(
            message("`decay` is the log of a constant and must be at most 0", seen, "pass log(constant)")
        )
    return logs


def _rotated(positions: Tensor, *parts: Tensor) -> tuple[Tensor, ...]:
    """Parts (B, L, H, D) whose entries 2i and 2i + 1 are turned by the angle of their position (1 or B, L)."""
    half = parts[0].shape[-1] // 2
    exponents = torch.linspace(0, 1, half, dtype=torch.float64, device=positions.device)
    angles = (positions[..., None] * 10000.0**-exponents)[..., None, :]  # (1 or B, L, 1, D / 2)
    cos, sin = (wave.to(parts[0].dtype) for wave in (angles.cos(), angles.sin()))
    return tuple(_turned(part, cos, sin) for part in parts)


def _turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    even, odd = x[..., 0::2], x[..., 1::2]
    return torch.stack([even * cos - odd * sin, odd * cos + even * sin], dim=-1).flatten(-2)
