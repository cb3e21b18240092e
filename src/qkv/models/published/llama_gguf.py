"""How Llama stands in GGUF files: the metadata, the names of tensors, and the order of rows."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from qkv.models.files.config_file import Fields
from qkv.models.files.spelling import respelled

if TYPE_CHECKING:
    from qkv.models.llama import LlamaConfig

# What the metadata may say of models that are more than a Llama, and with which values they are none the more.
FIXED = {
    "attention.causal": (True,),
    "attention.scale": (0,),  # 0 here and below: not given
    "attention.clamp_kqv": (0,),
    "attention.max_alibi_bias": (0,),
    "attn_logit_softcapping": (0,),
    "final_logit_softcapping": (0,),
    "embedding_scale": (0, 1),
    "residual_scale": (0, 1),
    "logit_scale": (0, 1),
    "expert_count": (0,),
    "rope.scaling.attn_factor": (0, 1),
    "use_parallel_residual": (False,),
}
NAMES = (
    ("token_embd.", "embedding."),
    ("output_norm.", "norm."),
    ("blk.", "layers."),
    (".attn_norm.", ".attention_norm."),
    (".attn_q.", ".attention.q_proj."),
    (".attn_k.", ".attention.k_proj."),
    (".attn_v.", ".attention.v_proj."),
    (".attn_output.", ".attention.o_proj."),
    (".ffn_norm.", ".feedforward_norm."),
    (".ffn_gate.", ".feedforward.gate_proj."),
    (".ffn_up.", ".feedforward.up_proj."),
    (".ffn_down.", ".feedforward.down_proj."),
    ("output.", "head."),  # after .attn_output., which ends in it
)


def read_fields(metadata: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Any]:
    """What LlamaConfig takes, from what a GGUF file says. Raises CheckpointError naming what does not fit."""
    fields = Fields(Path("metadata of the GGUF file"), metadata)
    fields.one_of("general.architecture", "llama")
    for name, wanted in FIXED.items():
        fields.one_of(f"llama.{name}", *wanted, default=wanted[0])
    if "rope_freqs.weight" in shapes:
        Fields(fields.path, {"rope_freqs.weight": shapes["rope_freqs.weight"]}).refuse(
            "rope_freqs.weight", "absent: scaled angles are read from config.json alone", "use the safetensors files"
        )
    heads, width = fields.integer("llama.attention.head_count"), fields.integer("llama.embedding_length")
    head_dim = fields.integer("llama.attention.key_length", width // max(heads, 1))
    for name in ("rope.dimension_count", "attention.value_length"):
        fields.one_of(f"llama.{name}", head_dim, default=head_dim)
    end, pad = (fields.integer(f"tokenizer.ggml.{kind}_token_id", None) for kind in ("eos", "padding"))
    return {
        "vocabulary": fields.integer("llama.vocab_size", shapes.get("token_embd.weight", (0,))[0]),
        "positions": fields.integer("llama.context_length"),
        "layers": fields.integer("llama.block_count"),
        "heads": heads,
        "kv_heads": fields.integer("llama.attention.head_count_kv", heads),
        "head_dim": head_dim,
        "width": width,
        "feedforward": fields.integer("llama.feed_forward_length"),
        "norm_epsilon": fields.number("llama.attention.layer_norm_rms_epsilon"),
        "rope": _rope(fields),
        "attention_bias": "blk.0.attn_q.bias" in shapes,
        "output_bias": "blk.0.attn_output.bias" in shapes,
        "tied": "output.weight" not in shapes,
        "begin_id": fields.integer("tokenizer.ggml.bos_token_id", None),
        "end_ids": () if end is None else (end,),
        "pad_id": pad,
    }


def own_names(config: LlamaConfig, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Our names for those of GGUF, rows of queries and keys in the order of half-split angles."""
    own = respelled(tensors, NAMES)
    for name, tensor in own.items():
        if ".q_proj." in name or ".k_proj." in name:
            own[name] = halves(tensor, config.heads if ".q_proj." in name else config.kv_heads)
    return own


def halves(rows: Tensor, heads: int) -> Tensor:
    """Rows (heads · D, ...) whose heads interleave the two halves of their channels, with one half after the other."""
    return rows.unflatten(0, (heads, -1, 2)).transpose(1, 2).flatten(0, 2).contiguous()


def _rope(fields: Fields) -> dict[str, Any]:
    """The base of the angles, and by what positions are divided: 0 counts as not given, as llama.cpp has it."""
    base = {"rope_theta": fields.number("llama.rope.freq_base", 10000.0)}
    older = fields.number("llama.rope.scale_linear", 0.0)
    factor = fields.number("llama.rope.scaling.factor", older)
    if fields.one_of("llama.rope.scaling.type", "none", "linear", default="linear") == "none" or factor in (0.0, 1.0):
        return {**base, "rope_type": "default"}
    return {**base, "rope_type": "linear", "factor": factor}
