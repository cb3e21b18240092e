"""How a GPT-2 stands in published files: the fields of its config.json, and the names of its tensors.

With another pattern than the causal one it is no model of transformers, and is written as `qkv_gpt`, which transformers
refuses to read.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from qkv.models.files.config_file import Fields
from qkv.models.files.copies import UNTIE, without_copies
from qkv.models.files.spelling import respelled
from qkv.models.published.aliases import read_size
from qkv.patterns import causal

if TYPE_CHECKING:
    from qkv.models.gpt import GPTConfig

GPT2, OWN = "gpt2", "qkv_gpt"
CLASSES = {GPT2: "GPT2LMHeadModel", OWN: "GPT"}
ACTIVATIONS = {  # by the file's names; of those that mean the same the first is written
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu": "gelu",
    "relu": "relu",
    "silu": "silu",
    "swish": "silu",
}
ALIASES = {
    "n_embd": "hidden_size",
    "n_positions": "max_position_embeddings",
    "n_layer": "num_hidden_layers",
    "n_head": "num_attention_heads",
}
DROPOUTS = {"embedding_dropout": "embd_pdrop", "attention_dropout": "attn_pdrop", "residual_dropout": "resid_pdrop"}

PREFIX = "transformer."
NAMES = (
    ("ln_f.", "norm."),  # before the other norms, whose names end like it
    ("wte.", "embedding."),
    ("wpe.", "embedding.positions."),
    ("h.", "layers."),
    (".ln_1.", ".attention_norm."),
    (".attn.c_proj.", ".attention.o_proj."),
    (".ln_2.", ".feedforward_norm."),
    (".mlp.c_fc.", ".feedforward.up_proj."),
    (".mlp.c_proj.", ".feedforward.down_proj."),
    ("lm_head.", "head."),
)
JOINED, PARTS = ".attn.c_attn.", ("q", "k", "v")  # one tensor of the file, and what it holds side by side
IN_OUT = (".attn.c_attn.weight", ".attn.c_proj.weight", ".mlp.c_fc.weight", ".mlp.c_proj.weight")
MASKS = (".attn.bias", ".attn.masked_bias")  # the causal mask, which older files carry; no weights


def read_fields(fields: Fields) -> dict[str, Any]:
    """What GPTConfig takes, from a config.json. Raises CheckpointError naming the field that does not fit.

    `reorder_and_upcast_attn` may say what it will: scores and softmax are never computed in less than float32 here.
    """
    kind = fields.one_of("model_type", *CLASSES)
    fields.one_of("add_cross_attention", False, default=False)
    width = read_size(fields, "n_embd", ALIASES)
    return {
        "vocabulary": fields.integer("vocab_size"),
        "positions": read_size(fields, "n_positions", ALIASES),
        "layers": read_size(fields, "n_layer", ALIASES),
        "heads": read_size(fields, "n_head", ALIASES),
        "width": width,
        "feedforward": fields.integer("n_inner", 4 * width),
        "activation": ACTIVATIONS[fields.one_of("activation_function", *ACTIVATIONS, default="gelu_new")],
        "norm_epsilon": fields.number("layer_norm_epsilon", 1e-5),
        "scaled": fields.flag("scale_attn_weights", True),
        "scaled_by_layer": fields.flag("scale_attn_by_inverse_layer_idx", False),
        "tied": fields.flag("tie_word_embeddings", True),
        "pattern": fields.texts("pattern") if kind == OWN else "causal()",
        "spread": fields.number("initializer_range", 0.02),
        **{name: fields.number(stored, 0.1) for name, stored in DROPOUTS.items()},
        "feedforward_dropout": fields.number("feedforward_dropout", 0.0),
        "begin_id": fields.integer("bos_token_id", None),
        "end_ids": fields.integers("eos_token_id", ()),
        "pad_id": fields.integer("pad_token_id", None),
    }


def write_fields(config: GPTConfig) -> dict[str, Any]:
    """The fields of config.json."""
    kind = GPT2 if all(pattern == causal() for pattern in config.patterns) else OWN
    ends = list(config.end_ids)
    made = {
        "model_type": kind,
        "architectures": [CLASSES[kind]],
        "vocab_size": config.vocabulary,
        "n_positions": config.positions,
        "n_layer": config.layers,
        "n_head": config.heads,
        "n_embd": config.width,
        "n_inner": config.feedforward,
        "activation_function": next(stored for stored, name in ACTIVATIONS.items() if name == config.activation),
        "layer_norm_epsilon": config.norm_epsilon,
        "scale_attn_weights": config.scaled,
        "scale_attn_by_inverse_layer_idx": config.scaled_by_layer,
        "tie_word_embeddings": config.tied,
        "initializer_range": config.spread,
        **{stored: getattr(config, name) for name, stored in DROPOUTS.items()},
        "bos_token_id": config.begin_id,
        "eos_token_id": ends[0] if len(ends) == 1 else ends or None,
        "pad_token_id": config.pad_id,
    }
    if config.feedforward_dropout:  # which transformers has no field for
        made["feedforward_dropout"] = config.feedforward_dropout
    if kind == OWN:
        made["pattern"] = [str(pattern) for pattern in config.patterns]
    return made


def own_names(config: GPTConfig, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Our names for those of transformers, whose matrices are (in, out); what is joined there is cut in three."""
    named = {name.removeprefix(PREFIX): tensor for name, tensor in tensors.items() if not name.endswith(MASKS)}
    if config.tied:
        named = without_copies(named, "wte.weight", "lm_head.weight", remedy=UNTIE)
    turned = {name: tensor.t().contiguous() if name.endswith(IN_OUT) else tensor for name, tensor in named.items()}
    own: dict[str, Tensor] = {}
    for name, tensor in turned.items():
        if JOINED in name:
            pieces = zip(PARTS, tensor.chunk(len(PARTS)), strict=True)
            own |= {name.replace(JOINED, f".attention.{part}_proj."): piece for part, piece in pieces}
        else:
            own[name] = tensor
    return respelled(own, NAMES)


def file_names(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The names that transformers knows; `own_names` undone."""
    named: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if ".q_proj." in name:
            parts = [tensors[name.replace(".q_proj.", f".{part}_proj.")] for part in PARTS]
            named[name.replace(".attention.q_proj.", JOINED)] = torch.cat(parts)
        elif ".k_proj." not in name and ".v_proj." not in name:
            named[name] = tensor
    spelled = respelled(named, NAMES, back=True)
    turned = {name: tensor.t().contiguous() if name.endswith(IN_OUT) else tensor for name, tensor in spelled.items()}
    return {name if name.startswith("lm_head.") else PREFIX + name: tensor for name, tensor in turned.items()}
