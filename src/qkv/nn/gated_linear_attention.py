"""Gated linear attention (GLA): a decay for each key channel, from a gate of low rank."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F

from qkv.cache.arguments import read_size
from qkv.linear.gated_linear_attention import gated_linear_attention
from qkv.nn.layer import Memory, RecurrentLayer
from qkv.nn.norm import GatedRMSNorm
from qkv.nn.parts import head_width, wide, xavier_
from qkv.nn.passage import Passage


class GatedLinearAttention(RecurrentLayer):
    """Linear attention whose state decays by channel, with a gated norm.

        q, k, v = W x;  g = log sigmoid(W_2 W_1 x + b) / 16,  in float32
        S_t = Diag(exp g_t) S_{t-1} + k_t v_tᵀ;  o_t = S_tᵀ q_t / √D
        y = W_o (norm(o) · weight · silu(W_g x))

    dim: of x. heads: H. head_k_dim, head_v_dim: D and V, the widths of a head; by default half of dim / heads, and
    dim / heads, as in the paper. gate_low_rank_dim: between W_1 and W_2. gate_logit_normalizer: the 16 above; the
    greater, the slower a state forgets. eps: of the norm. backend: as in `qkv.gated_linear_attention`.

    Parameters have the names and shapes of flash-linear-attention's layer and of the checkpoints made with it.

    First values, as the authors' code: projections Glorot uniform with gain 2^-2.5 (W_o with gain 1), biases 0, the
    norm's weight 1.

    Source: Yang, Wang, Shen, Panda, Kim, "Gated Linear Attention Transformers with Hardware-Efficient Training" (2023),
    section 4.4.
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        *,
        head_k_dim: int | None = None,
        head_v_dim: int | None = None,
        gate_low_rank_dim: int = 16,
        gate_logit_normalizer: float = 16.0,
        eps: float = 1e-5,
        backend: str = "auto",
    ) -> None:
        super().__init__(dim, heads, backend)
        self.head_k_dim = head_width("head_k_dim", head_k_dim, dim, 2 * heads)
        self.head_v_dim = head_width("head_v_dim", head_v_dim, dim, heads)
        self.gate_logit_normalizer = gate_logit_normalizer
        rank = read_size("gate_low_rank_dim", gate_low_rank_dim, 1)
        key_dim, value_dim = heads * self.head_k_dim, heads * self.head_v_dim
        self.q_proj = nn.Linear(dim, key_dim, bias=False)
        self.k_proj = nn.Linear(dim, key_dim, bias=False)
        self.v_proj = nn.Linear(dim, value_dim, bias=False)
        self.g_proj = nn.Linear(dim, value_dim, bias=False)
        down, up = nn.Linear(dim, rank, bias=False), nn.Linear(rank, key_dim)
        self.gk_proj = nn.Sequential(down, up)
        self.g_norm_swish_gate = GatedRMSNorm(self.head_v_dim, eps=eps)
        self.o_proj = nn.Linear(value_dim, dim, bias=False)
        xavier_(2**-2.5, self.q_proj, self.k_proj, self.v_proj, self.g_proj, down, up)
        xavier_(1, self.o_proj)

    def mix(self, x: Tensor, passage: Passage) -> Tensor:
        g = F.logsigmoid(wide(self.gk_proj(x))) / self.gate_logit_normalizer
        q, k, v, gate = self.q_proj(x), self.k_proj(x), self.v_proj(x), self.g_proj(x)
        # From here to the norm in float32, as Mamba-2's: what is cubic in x before it leaves the range of float16.
        q, k, g = (wide(part).unflatten(-1, (self.heads, self.head_k_dim)) for part in (q, k, g))
        v, z = (wide(part).unflatten(-1, (self.heads, self.head_v_dim)) for part in (v, gate))
        out = passage.recur(gated_linear_attention, q, k, v, g, backend=self.backend)
        return self.o_proj(self.g_norm_swish_gate(out, z).flatten(-2).to(gate.dtype))

    def memory(self) -> Memory:
        return Memory(
            rule="gated_linear",
            heads=self.heads,
            key_heads=self.heads,
            key_dim=self.head_k_dim,
            value_dim=self.head_v_dim,
        )
