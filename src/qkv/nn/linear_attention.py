"""Multi-head linear attention with a feature map of one's choice."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from qkv.cache.arguments import read_size
from qkv.errors import UnsupportedError, message
from qkv.linear.features import FeatureMap, read_feature_map
from qkv.linear.features_fixed import FavorFeatures
from qkv.linear.features_learned import HedgehogFeatures
from qkv.linear.linear_attention import linear_attention
from qkv.nn.layer import Memory, RecurrentLayer
from qkv.nn.names import renamed
from qkv.nn.parts import head_width, xavier_
from qkv.nn.passage import Passage

# The names of idiap's fast-transformers.
ELSEWHERE = {
    f"{theirs}_projection.{kind}": f"{ours}_proj.{kind}"
    for theirs, ours in (("query", "q"), ("key", "k"), ("value", "v"), ("out", "o"))
    for kind in ("weight", "bias")
}


class LinearAttention(RecurrentLayer):
    """Attention with the weights phi(q)·phi(k) in place of exp(q·k).

        q, k, v = W x;  o_i = Σ_j (phi(q_i)·phi(k_j)) v_j / Σ_j phi(q_i)·phi(k_j),  over j ≤ i where causal
        y = W_o o

    dim: of x. heads: H. head_k_dim, head_v_dim: D and V, the widths of a head, by default dim / heads and head_k_dim.
    feature_map: phi, by name ("elu", "relu", "squared_relu", "softmax", "favor", "hedgehog", "taylor", "none") or a
    module or function from (B, H, L, D) to (B, H, L, M); the parameters of a module are the layer's. "hedgehog" is
    one map a head. is_causal: without it every token reads all, and the layer has no state. normalize: the division
    above; off, o is the bare sum. bias: of the projections. backend: as in `qkv.linear_attention`.

    Parameters have the names of flash-linear-attention's layer without its norm; `from_checkpoint` also takes those of
    fast-transformers' AttentionLayer, the authors' code.

    First values: Glorot uniform, biases 0.

    Source: Katharopoulos, Vyas, Pappas, Fleuret, "Transformers are RNNs" (2020).
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        *,
        head_k_dim: int | None = None,
        head_v_dim: int | None = None,
        feature_map: str | FeatureMap | None = "elu",
        is_causal: bool = True,
        normalize: bool = True,
        bias: bool = False,
        backend: str = "auto",
    ) -> None:
        super().__init__(dim, heads, backend)
        self.head_k_dim = head_width("head_k_dim", head_k_dim, dim, heads)
        self.head_v_dim = self.head_k_dim if head_v_dim is None else read_size("head_v_dim", head_v_dim, 1)
        self.is_causal = is_causal
        self.normalize = normalize
        # A whole map is applied here, an elementwise one by the recurrence.
        if feature_map == "favor":
            feature_map = FavorFeatures(self.head_k_dim)
        elif feature_map == "hedgehog":
            feature_map = HedgehogFeatures(heads, self.head_k_dim)
        self.elementwise, self.feature_map = read_feature_map(feature_map, self.head_k_dim)
        self._width: int | None = None  # M, once it was asked for
        key_dim, value_dim = heads * self.head_k_dim, heads * self.head_v_dim
        self.q_proj = nn.Linear(dim, key_dim, bias=bias)
        self.k_proj = nn.Linear(dim, key_dim, bias=bias)
        self.v_proj = nn.Linear(dim, value_dim, bias=bias)
        self.o_proj = nn.Linear(value_dim, dim, bias=bias)
        xavier_(1, self.q_proj, self.k_proj, self.v_proj, self.o_proj)

    def mix(self, x: Tensor, passage: Passage) -> Tensor:
        q, k = (part.unflatten(-1, (self.heads, self.head_k_dim)) for part in (self.q_proj(x), self.k_proj(x)))
        v = self.v_proj(x).unflatten(-1, (self.heads, self.head_v_dim))
        q, k = self._features(q), self._features(k)
        options = {} if passage.state is not None else {"is_causal": self.is_causal}
        out = passage.recur(
            linear_attention,
            q,
            k,
            v.to(q.dtype),
            feature_map=self.elementwise,
            normalize=self.normalize,
            backend=self.backend,
            **options,
        )
        return self.o_proj(out.to(v.dtype).flatten(-2))

    def _features(self, x: Tensor) -> Tensor:
        """phi of (B, L, H, D) where it is a map of whole vectors: (B, L, H, M)."""
        return x if self.feature_map is None else self.feature_map(x.transpose(1, 2)).transpose(1, 2)

    def memory(self) -> Memory:
        if not self.is_causal:
            raise UnsupportedError(
                message(
                    "a layer with a state must be causal",
                    "got is_causal=False, where each token reads those after it",
                    "call forward without a state",
                )
            )
        if self._width is None:
            with torch.no_grad():
                probe = self.q_proj.weight.new_zeros(1, 1, self.heads, self.head_k_dim)
                self._width = self._features(probe).shape[-1]
        return Memory(
            rule="linear",
            heads=self.heads,
            key_heads=self.heads,
            key_dim=self._width,
            value_dim=self.head_v_dim,
            feature_map=self.elementwise,
            normalize=self.normalize,
        )

    def own_names(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        return renamed(tensors, ELSEWHERE)
