"""How a hybrid stands in files: the fields of its config.json, and the names of its tensors.

The shape of Olmo-Hybrid is written as transformers writes it; every other under our own model_type and names.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from qkv.models.files.config_file import Fields
from qkv.models.files.copies import UNTIE, without_copies
from qkv.models.files.spelling import respelled
from qkv.models.published.rope import DEFAULT, read_rope, turns_a_part, write_rope
from qkv.nn.gated_delta_net import ELSEWHERE, GatedDeltaNet

if TYPE_CHECKING:
    from qkv.models.hybrid import HybridConfig

OLMO, OURS = "olmo_hybrid", "qkv_hybrid"
KINDS = {"linear_attention": "linear", "full_attention": "softmax"}
DROPOUTS = ("embedding_dropout", "attention_dropout", "feedforward_dropout", "residual_dropout")
# Fields of both kinds of file, by ours: what is a number, and what may be absent.
SIZES = {
    "vocabulary": "vocab_size",
    "positions": "max_position_embeddings",
    "layers": "num_hidden_layers",
    "heads": "num_attention_heads",
    "width": "hidden_size",
    "feedforward": "intermediate_size",
}
OPTIONAL = {"kv_heads": "num_key_value_heads", "head_dim": "head_dim", "pad_id": "pad_token_id"}
OLMO_EPS = 1e-5  # of the norm in its linear layers, whatever the config says of the others


def read_fields(fields: Fields) -> dict[str, Any]:
    """The arguments of HybridConfig in a config.json. Raises CheckpointError when it describes another model."""
    kind = fields.one_of("model_type", OLMO, OURS)
    fields.one_of("hidden_act", "silu", default="silu")
    read = {
        **{name: fields.integer(stored) for name, stored in SIZES.items()},
        **{name: fields.integer(stored, None) for name, stored in OPTIONAL.items()},
        **{name: fields.number(name, 0.0) for name in DROPOUTS},
        "spread": fields.number("initializer_range", 0.02),
        "norm_epsilon": fields.number("rms_norm_eps", 1e-6),
        "projection_bias": fields.flag("attention_bias", False),
        "tied": fields.flag("tie_word_embeddings", False),
        "end_ids": fields.integers("eos_token_id", ()),
    }
    return read | (_read_olmo(fields, read) if kind == OLMO else _read_ours(fields))


def write_fields(config: HybridConfig) -> dict[str, Any]:
    """The fields of a config.json, as `read_fields` reads them."""
    written = {
        **{stored: getattr(config, name) for name, stored in SIZES.items()},
        **{stored: getattr(config, name) for name, stored in OPTIONAL.items() if getattr(config, name) is not None},
        **{name: getattr(config, name) for name in DROPOUTS},
        "initializer_range": config.spread,
        "hidden_act": "silu",
        "rms_norm_eps": config.norm_epsilon,
        "attention_bias": config.projection_bias,
        "tie_word_embeddings": config.tied,
        "eos_token_id": list(config.end_ids) or None,
        "pad_token_id": config.pad_id,
    }
    return written | (_write_olmo(config) if is_olmo(config) else _write_ours(config))


def is_olmo(config: HybridConfig) -> bool:
    """Whether transformers' OlmoHybridForCausalLM is this model."""
    settings = {"eps": 1e-6, **config.linear_settings}
    same = config.linear == "gated_delta" and config.pattern == "causal()" and len(set(config.kinds)) == 2
    return same and settings["eps"] == OLMO_EPS and not turns_a_part(config.rope or {})


def own_names(config: HybridConfig, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A file's tensors under the model's names; the layer of the linear variant knows its own spellings."""
    with torch.device("meta"):
        mixer = config.make_linear()
    rest = dict(tensors)
    if config.tied:
        rest = without_copies(rest, "model.embed_tokens.weight", "lm_head.weight", remedy=UNTIE)
    made: dict[str, Tensor] = {}
    for n, kind in enumerate(config.kinds):
        stem = f"model.layers.{n}."
        layer = {name[len(stem) :]: rest.pop(name) for name in list(rest) if name.startswith(stem)}
        if kind == "linear":
            inner = {name[len(MIXER) :]: layer.pop(name) for name in list(layer) if name.startswith(MIXER)}
            layer |= {MIXER + name: tensor for name, tensor in mixer.own_names(inner).items()}
        made |= {f"layers.{n}.{name}": tensor for name, tensor in respelled(layer, IN_LAYER[kind]).items()}
    return respelled(rest, OUTSIDE) | made


def file_names(config: HybridConfig, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The names that files have. Olmo-Hybrid keeps queries, keys and values of its linear layers apart."""
    widths = _widths(config) if config.linear == "gated_delta" else None
    written: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if not name.startswith("layers."):
            written |= respelled({name: tensor}, OUTSIDE, back=True)
            continue
        _, n, inner = name.split(".", 2)
        kind = config.kinds[int(n)]
        spelled = respelled({inner: tensor}, IN_LAYER[kind], back=True)
        if kind == "linear" and widths is not None:
            spelled = _apart(spelled, widths)
        written |= {f"model.layers.{n}.{name}": tensor for name, tensor in spelled.items()}
    return written


def _read_olmo(fields: Fields, read: Mapping[str, Any]) -> dict[str, Any]:
    """What only Olmo-Hybrid's files say, with the defaults of transformers."""
    heads = fields.integer("linear_num_value_heads", read["heads"])
    key_heads = fields.integer("linear_num_key_heads", read["heads"])
    key_width = fields.integer("linear_key_head_dim", int(0.75 * read["width"] / max(key_heads, 1)))
    return {
        "linear": "gated_delta",
        "linear_heads": heads,
        "linear_options": {
            "key_heads": key_heads,
            "head_k_dim": key_width,
            "head_v_dim": fields.integer("linear_value_head_dim", 2 * key_width),
            "conv_size": fields.integer("linear_conv_kernel_dim", 4),
            "allow_neg_eigval": fields.flag("linear_allow_neg_eigval", True),
            "eps": OLMO_EPS,
        },
        **_read_kinds(fields, read["layers"]),
        "rope": read_rope(fields),  # a base of null, as Olmo-Hybrid's own, says that nothing is turned
    }


def _read_kinds(fields: Fields, layers: int) -> dict[str, Any]:
    """Which layers are softmax, as a ratio where one says it."""
    types = fields.texts("layer_types", None)
    if types is None:
        return {"ratio": 3}
    if len(types) != layers or not set(types) <= set(KINDS):
        fields.refuse("layer_types", f"{layers} of {', '.join(KINDS)}")
    chosen = tuple(n for n, kind in enumerate(types) if KINDS[kind] == "softmax")
    ratio = chosen[0] if chosen else 0
    regular = ratio > 0 and chosen == tuple(range(ratio, layers, ratio + 1))
    return {"ratio": ratio} if regular else {"softmax_layers": chosen}


def _write_olmo(config: HybridConfig) -> dict[str, Any]:
    settings = {"conv_size": 4, "allow_neg_eigval": False, **config.linear_settings}
    heads = config.linear_heads or config.heads
    key_width = settings.get("head_k_dim") or config.width // heads
    names = {kind: name for name, kind in KINDS.items()}
    return {
        "architectures": ["OlmoHybridForCausalLM"],
        "model_type": OLMO,
        "layer_types": [names[kind] for kind in config.kinds],
        "linear_num_value_heads": heads,
        "linear_num_key_heads": settings.get("key_heads") or heads,
        "linear_key_head_dim": key_width,
        "linear_value_head_dim": settings.get("head_v_dim") or key_width,
        "linear_conv_kernel_dim": settings["conv_size"],
        "linear_allow_neg_eigval": settings["allow_neg_eigval"],
        "rope_parameters": {**DEFAULT, "rope_theta": None} if config.rope is None else write_rope(config.rope),
    }


def _read_ours(fields: Fields) -> dict[str, Any]:
    """What only our own files say."""
    options = fields.table.get("linear_options")
    return {
        "linear": fields.text("linear"),
        "linear_heads": fields.integer("linear_heads", None),
        "linear_options": None if options is None else dict(fields.part("linear_options").table),
        "ratio": fields.integer("ratio"),
        "softmax_layers": fields.integers("softmax_layers", None),
        "pattern": fields.text("pattern"),
        "rope": read_rope(fields, whole=False) if fields.has("rope_parameters") else None,
    }


def _write_ours(config: HybridConfig) -> dict[str, Any]:
    return {
        "architectures": ["Hybrid"],
        "model_type": OURS,
        "linear": config.linear,
        "linear_heads": config.linear_heads,
        "linear_options": None if config.linear_options is None else dict(config.linear_options),
        "ratio": config.ratio,
        "softmax_layers": None if config.softmax_layers is None else list(config.softmax_layers),
        "pattern": config.pattern,
        "rope_parameters": None if config.rope is None else write_rope(config.rope),
    }


def _widths(config: HybridConfig) -> tuple[int, ...]:
    """How wide queries, keys and values of a gated delta net are together."""
    with torch.device("meta"):
        mixer = config.make_linear()
    assert isinstance(mixer, GatedDeltaNet)
    return tuple(mixer.widths)


def _apart(tensors: Mapping[str, Tensor], widths: tuple[int, ...]) -> dict[str, Tensor]:
    """Tensors of a gated delta net, by Olmo-Hybrid's names; its convolution whole, as transformers has it in memory:
    what transformers writes apart is cut in three equal parts, whatever the widths.
    """
    written: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        inner = name.removeprefix(MIXER)
        if inner == "in_proj_qkv.weight":
            parts = zip("qkv", tensor.split(widths), strict=True)
            written |= {f"{MIXER}{letter}_proj.weight": part for letter, part in parts}
        else:
            written[name if inner == name else MIXER + PUBLISHED.get(inner, inner)] = tensor
    return written


MIXER = "linear_attn."
PUBLISHED = {own: published for published, own in ELSEWHERE.items()}
OUTSIDE = (("model.embed_tokens.", "embedding."), ("model.norm.", "norm."), ("lm_head.", "head."))
# Parts of names in files, and of ours. Of two that are read as one of ours, the later is written.
IN_LAYER = {
    "linear": (
        ("input_layernorm.", "attention_norm."),
        ("post_attention_layernorm.", "feedforward_norm."),
        ("attention_layer_norm.", "attention_norm."),
        ("feedforward_layer_norm.", "feedforward_norm."),
        (MIXER, "attention."),
        ("mlp.", "feedforward."),
    ),
    "softmax": (
        ("feedforward_layer_norm.", "attention_norm."),  # so transformers writes what it reads as the next
        ("post_attention_layernorm.", "attention_norm."),
        ("post_feedforward_layernorm.", "feedforward_norm."),
        ("self_attn.", "attention."),
        ("mlp.", "feedforward."),
    ),
}
