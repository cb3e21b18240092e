"""How Llama and its relatives stand in published files: the fields of config.json, and names of tensors.

transformers has a model of its own for each relative that differs by a bias or a window; a config is written as the
first of them that computes the same. What none of them computes is written as `qkv_llama`, which transformers refuses.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor

from qkv.models.files.config_file import Fields
from qkv.models.files.copies import UNTIE, without_copies
from qkv.models.files.spelling import respelled
from qkv.models.published.rope import read_rope, turns_a_part, write_rope
from qkv.patterns.text import parse

if TYPE_CHECKING:
    from qkv.models.llama import LlamaConfig

OWN = "qkv_llama"
CLASSES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    OWN: "Llama",
}
CAUSAL = "causal()"
WINDOW = re.compile(r"sliding_window\((\d+)\)")
SILENT_WINDOW = 4096  # of Mistral and Qwen, where config.json is silent
QWEN_WINDOW_LAYERS = 28  # likewise, how many layers come before those with a window
FULL, SLIDING = "full_attention", "sliding_attention"

# What transformers has no field for, under our own names; absent where it is 0.
DROPOUTS = ("embedding_dropout", "feedforward_dropout", "residual_dropout")

NAMES = (
    ("embed_tokens.", "embedding."),
    (".self_attn.", ".attention."),
    (".mlp.", ".feedforward."),
    (".input_layernorm.", ".attention_norm."),
    (".post_attention_layernorm.", ".feedforward_norm."),
    ("lm_head.", "head."),
)


def read_fields(fields: Fields) -> dict[str, Any]:
    """What LlamaConfig takes, from a config.json. Raises CheckpointError naming the field that does not fit."""
    kind = fields.one_of("model_type", *CLASSES)
    fields.one_of("hidden_act", "silu", default="silu")
    heads, width = fields.integer("num_attention_heads"), fields.integer("hidden_size")
    layers = fields.integer("num_hidden_layers")
    bias = kind == "qwen2" or fields.flag("attention_bias", False)
    return {
        "vocabulary": fields.integer("vocab_size"),
        "positions": fields.integer("max_position_embeddings"),
        "layers": layers,
        "heads": heads,
        "kv_heads": fields.integer("num_key_value_heads", heads) if kind == "llama" else _needed(fields),
        "head_dim": fields.integer("head_dim")
        if kind == "qwen3"
        else fields.integer("head_dim", width // max(heads, 1)),
        "width": width,
        "feedforward": fields.integer("intermediate_size"),
        "norm_epsilon": fields.number("rms_norm_eps", 1e-6),
        "rope": _rope(fields, kind),
        "pattern": _patterns(fields, kind, layers),
        "sinks": kind == OWN and fields.flag("attention_sinks", False),
        "qk_norm": "head" if kind == "qwen3" else fields.one_of("qk_norm", "head", "model", default=None),
        "attention_bias": bias,
        "output_bias": kind != "qwen2" and fields.flag("output_bias", bias),
        "feedforward_bias": fields.flag("mlp_bias", False),
        "tied": fields.flag("tie_word_embeddings", False),
        "spread": fields.number("initializer_range", 0.02),
        "attention_dropout": fields.number("attention_dropout", 0.0),
        **{name: fields.number(name, 0.0) for name in DROPOUTS},
        "begin_id": fields.integer("bos_token_id", None),
        "end_ids": fields.integers("eos_token_id", ()),
        "pad_id": fields.integer("pad_token_id", None),
    }


def write_fields(config: LlamaConfig) -> dict[str, Any]:
    """The fields of config.json."""
    patterns = [str(parse(text)) for text in config.patterns]
    windows = {int(found[1]) for found in map(WINDOW.fullmatch, patterns) if found}
    kind = _kind(config, patterns, windows)
    ends = list(config.end_ids)
    made = {
        "architectures": [CLASSES[kind]],
        "model_type": kind,
        "vocab_size": config.vocabulary,
        "max_position_embeddings": config.positions,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "hidden_size": config.width,
        "intermediate_size": config.feedforward,
        "hidden_act": "silu",
        "rms_norm_eps": config.norm_epsilon,
        "rope_parameters": write_rope(config.rope),
        "attention_bias": config.attention_bias,
        "mlp_bias": config.feedforward_bias,
        "tie_word_embeddings": config.tied,
        "initializer_range": config.spread,
        "attention_dropout": config.attention_dropout,
        **{name: getattr(config, name) for name in DROPOUTS if getattr(config, name)},
        "bos_token_id": config.begin_id,
        "eos_token_id": ends[0] if len(ends) == 1 else ends or None,
        "pad_token_id": config.pad_id,
    }
    if kind == OWN:
        made["pattern"] = list(config.patterns)
        made["attention_sinks"] = config.sinks
        made["qk_norm"] = config.qk_norm
        made["output_bias"] = config.output_bias
    elif kind != "llama":
        made["sliding_window"] = min(windows, default=None)
    if kind in ("qwen2", "qwen3"):
        made["use_sliding_window"] = bool(windows)
        made["layer_types"] = [FULL if pattern == CAUSAL else SLIDING for pattern in patterns]
    return made


def own_names(config: LlamaConfig, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Our names for those of transformers; a copy of the embedding as a head, and old tables of angles, are left."""
    kept = {name: tensor for name, tensor in tensors.items() if not name.endswith("rotary_emb.inv_freq")}
    if config.tied:
        kept = without_copies(kept, "model.embed_tokens.weight", "lm_head.weight", remedy=UNTIE)
    return respelled({name.removeprefix("model."): tensor for name, tensor in kept.items()}, NAMES)


def file_names(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The names that transformers knows."""
    spelled = respelled(tensors, NAMES, back=True)
    return {name if name.startswith("lm_head.") else f"model.{name}": tensor for name, tensor in spelled.items()}


def _kind(config: LlamaConfig, patterns: list[str], windows: set[int]) -> str:
    """The first model of transformers that computes the same."""
    only_windows = all(pattern == CAUSAL or WINDOW.fullmatch(pattern) for pattern in patterns)
    if config.sinks or not only_windows or len(windows) > 1 or turns_a_part(config.rope):
        return OWN
    alike = config.attention_bias == config.output_bias
    everywhere = bool(windows) and CAUSAL not in patterns
    if config.qk_norm is None and not windows and alike:
        return "llama"
    if config.feedforward_bias:
        return OWN
    if config.qk_norm is None and everywhere and alike and not config.attention_bias:
        return "mistral"
    if config.qk_norm is None and config.attention_bias and not config.output_bias:
        return "qwen2"
    return "qwen3" if config.qk_norm == "head" and alike else OWN


def _patterns(fields: Fields, kind: str, layers: int) -> str | tuple[str, ...]:
    """Who may see whom: one text, or one a layer where they differ."""
    if kind == OWN:
        found = fields.texts("pattern")
        return found[0] if len(set(found)) == 1 and len(found) == layers else found
    if kind == "llama":
        return CAUSAL
    window = fields.integer("sliding_window", None if "sliding_window" in fields.table else SILENT_WINDOW)
    if kind == "mistral":
        return CAUSAL if window is None else f"sliding_window({window})"
    window = window if fields.flag("use_sliding_window", False) else None
    first = layers if window is None else fields.integer("max_window_layers", QWEN_WINDOW_LAYERS)
    types = fields.texts("layer_types", tuple(SLIDING if n >= first else FULL for n in range(layers)))
    if len(types) != layers or {*types} - {FULL, SLIDING}:
        fields.refuse("layer_types", f"a list of {layers} words, {FULL} or {SLIDING}", "choose another checkpoint")
    if window is None and SLIDING in types:
        remedy = "say use_sliding_window true and how many tokens sliding_window is"
        fields.refuse("layer_types", f"{FULL} where there is no window", remedy)
    texts = tuple(CAUSAL if one == FULL else f"sliding_window({window})" for one in types)
    return texts[0] if len(set(texts)) == 1 else texts


def _rope(fields: Fields, kind: str) -> dict[str, Any]:
    """The base and scaling of the angles."""
    rope = read_rope(fields, whole=kind != OWN)
    if rope is None:
        Fields(fields.path, {"rope_theta": None}, "rope_parameters.").refuse("rope_theta", "a number")
    return rope


def _needed(fields: Fields) -> int:
    return fields.integer("num_key_value_heads")
