"""The parameters of softmax attention: from a stream to queries, keys and values in heads, and back."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple, TypeAlias

from torch import Tensor, nn

from qkv.cache.arguments import read_size
from qkv.errors import ShapeError, message, unknown_name
from qkv.nn.norm import RMSNorm
from qkv.nn.parts import head_width, xavier_
from qkv.nn.products import product, products
from qkv.nn.torch_names import from_torch

QKNorm: TypeAlias = Literal["head", "model"]


class Sizes(NamedTuple):
    """Those of one layer."""

    dim: int  # of the stream
    heads: int  # H
    kv_heads: int  # G
    head_dim: int  # D
    key_dim: int  # of what keys are made from
    value_dim: int  # of what values are made from

    @classmethod
    def read(
        cls,
        dim: int,
        heads: int,
        kv_heads: int | None,
        head_dim: int | None,
        key_dim: int | None,
        value_dim: int | None,
    ) -> Sizes:
        """Checked, with what follows from others where it is None."""
        dim, heads = read_size("dim", dim, 1), read_size("heads", heads, 1)
        groups = heads if kv_heads is None else read_size("kv_heads", kv_heads, 1)
        if heads % groups:
            holds, seen = "`heads` must be a multiple of `kv_heads`", f"got heads={heads} and kv_heads={groups}"
            raise ShapeError(message(holds, seen, "each key head serves heads / kv_heads query heads"))
        return cls(
            dim,
            heads,
            groups,
            head_width("head_dim", head_dim, dim, heads),
            dim if key_dim is None else read_size("key_dim", key_dim, 1),
            dim if value_dim is None else read_size("value_dim", value_dim, 1),
        )


class Projections(nn.Module):
    """Linear maps q_proj, k_proj and v_proj into heads, o_proj out of them, and the norms q_norm and k_norm."""

    def __init__(
        self, sizes: Sizes, qk_norm: QKNorm | None, norm_eps: float, *, projection_bias: bool, output_bias: bool
    ) -> None:
        super().__init__()
        if qk_norm not in (None, "head", "model"):
            raise unknown_name("qk_norm", qk_norm, ("head", "model"))
        self.dim, self.heads, self.kv_heads, self.head_dim, self.key_dim, self.value_dim = sizes
        self.qk_norm = qk_norm
        width, kv_width = self.heads * self.head_dim, self.kv_heads * self.head_dim
        self.q_proj = nn.Linear(self.dim, width, bias=projection_bias)
        self.k_proj = nn.Linear(self.key_dim, kv_width, bias=projection_bias)
        self.v_proj = nn.Linear(self.value_dim, kv_width, bias=projection_bias)
        self.o_proj = nn.Linear(width, self.dim, bias=output_bias)
        xavier_(1, self.q_proj, self.k_proj, self.v_proj, self.o_proj)
        self.q_norm = self.k_norm = None
        if qk_norm is not None:
            self.q_norm = RMSNorm(self.head_dim if qk_norm == "head" else width, eps=norm_eps)
            self.k_norm = RMSNorm(self.head_dim if qk_norm == "head" else kv_width, eps=norm_eps)

    def projected(self, x: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries (B, L, H, D), keys and values (B, S, G, D), q and k normalised."""
        if not x is key is value:
            return self.queries(x), self.keys(key), self.values(value)
        q, k, v = products(x, self.q_proj, self.k_proj, self.v_proj)
        return (
            self._in_heads(q, self.heads, self.q_norm),
            self._in_heads(k, self.kv_heads, self.k_norm),
            self._in_heads(v, self.kv_heads, None),
        )

    def queries(self, x: Tensor) -> Tensor:
        """x (B, L, dim) as (B, L, H, D), normalised."""
        return self._in_heads(product(x, self.q_proj), self.heads, self.q_norm)

    def keys(self, x: Tensor) -> Tensor:
        """x (B, S, key_dim) as (B, S, G, D), normalised."""
        return self._in_heads(product(x, self.k_proj), self.kv_heads, self.k_norm)

    def values(self, x: Tensor) -> Tensor:
        """x (B, S, value_dim) as (B, S, G, D)."""
        return self._in_heads(product(x, self.v_proj), self.kv_heads, None)

    def merged(self, heads: Tensor) -> Tensor:
        """Heads (B, L, H, D) as y (B, L, dim)."""
        return product(heads.flatten(2), self.o_proj)

    def _in_heads(self, x: Tensor, heads: int, norm: nn.Module | None) -> Tensor:
        if norm is not None and self.qk_norm == "model":
            x = norm(x)
        x = x.reshape(*x.shape[:2], heads, self.head_dim)
        return norm(x) if norm is not None and self.qk_norm == "head" else x

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        """Torch's own hook of `load_state_dict`, which takes the names of torch.nn.MultiheadAttention here as well."""
        widths = self.heads * self.head_dim, self.kv_heads * self.head_dim, self.kv_heads * self.head_dim
        sinks = getattr(self, "sinks", None)
        from_torch(state_dict, prefix, widths, 0 if sinks is None else len(sinks))
        super()._load_from_state_dict(state_dict, prefix, *args)
