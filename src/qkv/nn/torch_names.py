"""The tensors of torch.nn.MultiheadAttention under the names of ours."""

from __future__ import annotations

from collections.abc import MutableMapping

from torch import Tensor

from qkv.errors import CheckpointError, message
from qkv.shapes import describe

NAMES = {
    "q_proj_weight": "q_proj.weight",
    "k_proj_weight": "k_proj.weight",
    "v_proj_weight": "v_proj.weight",
    "out_proj.weight": "o_proj.weight",
    "out_proj.bias": "o_proj.bias",
}
OF_QUERIES = ("in_proj_weight", "q_proj_weight")
PACKED = {"in_proj_weight": "weight", "in_proj_bias": "bias"}


def from_torch(tensors: MutableMapping[str, Tensor], prefix: str, widths: tuple[int, int, int], sinks: int = 0) -> None:
    """Rename torch's tensors of the layer at `prefix` in place; all others stay.

    widths: how many rows of a packed tensor are those of q, of k and of v. sinks: how many logits of sinks the layer
    has: of add_zero_attn, which has no tensors, they are 0. Raises CheckpointError.
    """
    queries = next((tensors[prefix + name] for name in OF_QUERIES if prefix + name in tensors), None)
    if sinks and queries is not None:
        tensors.setdefault(prefix + "sinks", queries.new_zeros(sinks))
    for name in ("bias_k", "bias_v"):
        if prefix + name in tensors:
            holds = f"the layer {prefix.rstrip('.') or 'itself'!r} must come without an extra key and value"
            remedy = "append them as one more row of key and value to a call of qkv.attention, or train without them"
            raise CheckpointError(message(holds, f"got {name!r}, of add_bias_kv=True", remedy))
    for theirs, ours in NAMES.items():
        if prefix + theirs in tensors:
            tensors[prefix + ours] = tensors.pop(prefix + theirs)
    for theirs, ours in PACKED.items():
        if prefix + theirs in tensors:
            _unpack(tensors, prefix, theirs, ours, widths)


def _unpack(
    tensors: MutableMapping[str, Tensor], prefix: str, theirs: str, ours: str, widths: tuple[int, int, int]
) -> None:
    whole = tensors[prefix + theirs]
    if whole.shape[:1] != (sum(widths),):
        holds = f"`{prefix}{theirs}` must have the rows of q, k and v, {' + '.join(map(str, widths))}"
        remedy = "make the layer with the heads, kv_heads and head_dim of the file"
        raise CheckpointError(message(holds, f"got {describe(whole)}", remedy))
    del tensors[prefix + theirs]
    for part, rows in zip("qkv", whole.split(widths), strict=True):
        tensors[f"{prefix}{part}_proj.{ours}"] = rows.clone()  # assigned, they would keep the whole alive
