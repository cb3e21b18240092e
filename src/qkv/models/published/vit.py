"""How the vision transformer stands in published files: the fields of config.json, and the names of its tensors.

With local attention it is a model that only qkv has, under a model_type that transformers refuses.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor

from qkv.models.files.config_file import Fields
from qkv.models.files.spelling import respelled

if TYPE_CHECKING:
    from qkv.models.vit import ViTConfig

REACHES = ("full", "neighborhood", "windows")
THEIRS, OURS = "vit", "qkv_vit"
UNREAD = ("embeddings.mask_token",)  # of pretraining by masked patches
# Parts of the names in published files, and of ours. The first two are of models in memory.
NAMES = (
    (".mlp.fc1.", ".feedforward.up_proj."),
    (".mlp.fc2.", ".feedforward.down_proj."),
    ("embeddings.patch_embeddings.projection.", "embeddings.projection."),
    ("encoder.layer.", "layers."),
    (".attention.attention.query.", ".attention.q_proj."),
    (".attention.attention.key.", ".attention.k_proj."),
    (".attention.attention.value.", ".attention.v_proj."),
    (".attention.output.dense.", ".attention.o_proj."),
    (".intermediate.dense.", ".feedforward.up_proj."),
    (".output.dense.", ".feedforward.down_proj."),
    (".layernorm_before.", ".attention_norm."),
    (".layernorm_after.", ".feedforward_norm."),
    ("layernorm.", "final_norm."),
    ("pooler.dense.", "pooler."),
)


def read_fields(fields: Fields) -> dict[str, Any]:
    """What ViTConfig takes, from a config.json. Raises CheckpointError when it describes another model."""
    kind = fields.one_of("model_type", THEIRS, OURS)
    fields.one_of("hidden_act", "gelu", default="gelu")
    fields.one_of("pooler_act", "tanh", default="tanh")
    fields.one_of("problem_type", "single_label_classification", default=None)
    width = fields.integer("hidden_size")
    fields.one_of("pooler_output_size", width, default=width)
    hidden_dropout = fields.number("hidden_dropout_prob", 0.0)
    return {
        "image": _pair(fields, "image_size"),
        "patch": _pair(fields, "patch_size"),
        "channels": fields.integer("num_channels", 3),
        "layers": fields.integer("num_hidden_layers"),
        "heads": fields.integer("num_attention_heads"),
        "width": width,
        "feedforward": fields.integer("intermediate_size"),
        "norm_epsilon": fields.number("layer_norm_eps", 1e-12),
        "projection_bias": fields.flag("qkv_bias", True),
        "attention": fields.one_of("attention", *REACHES) if kind == OURS else "full",
        "kernel": fields.integer("kernel", 7),
        "window": fields.integer("window", 7),
        "embedding_dropout": fields.number("embedding_dropout", hidden_dropout),
        "attention_dropout": fields.number("attention_probs_dropout_prob", 0.0),
        "feedforward_dropout": fields.number("feedforward_dropout", 0.0),
        "residual_dropout": hidden_dropout,
        "spread": fields.number("initializer_range", 0.02),
        "classes": _classes(fields),
    }


def write_fields(config: ViTConfig) -> dict[str, Any]:
    """The fields of config.json: transformers' ViT, or for local attention a model that only qkv has."""
    named = {str(n): name for n, name in enumerate(config.classes)}
    return {
        "architectures": [config.architecture],
        "model_type": THEIRS if config.attention == "full" else OURS,
        "image_size": config.image[0] if config.image[0] == config.image[1] else list(config.image),
        "patch_size": config.patch[0] if config.patch[0] == config.patch[1] else list(config.patch),
        "num_channels": config.channels,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "hidden_size": config.width,
        "intermediate_size": config.feedforward,
        "hidden_act": "gelu",
        "layer_norm_eps": config.norm_epsilon,
        "qkv_bias": config.projection_bias,
        "attention": config.attention,
        "kernel": config.kernel,
        "window": config.window,
        "embedding_dropout": config.embedding_dropout,
        "attention_probs_dropout_prob": config.attention_dropout,
        "feedforward_dropout": config.feedforward_dropout,
        "hidden_dropout_prob": config.residual_dropout,
        "initializer_range": config.spread,
        "id2label": named,
        "label2id": {name: int(n) for n, name in named.items()},
    }


def own_names(config: ViTConfig, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The encoder of a published file, which may hold a head beside it."""
    encoder = tensors
    if any(name.startswith("vit.") for name in tensors):
        encoder = {name[4:]: tensor for name, tensor in tensors.items() if name.startswith("vit.")}
    unread = UNREAD if config.pooling else (*UNREAD, "pooler.")
    return respelled({name: encoder[name] for name in encoder if not name.startswith(unread)}, NAMES)


def own_classifier_names(config: ViTConfig, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The encoder and the head of a published file."""
    head = {name: tensor for name, tensor in tensors.items() if not name.startswith("vit.")}
    return {f"vit.{name}": one for name, one in own_names(config, tensors).items()} | head


def file_names(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The names of published files."""
    return respelled(tensors, NAMES[2:], back=True)


def _pair(fields: Fields, name: str) -> tuple[int, int]:
    """A height and a width, which files say as one number where they agree."""
    sizes = fields.integers(name)
    if len(sizes) not in {1, 2}:
        fields.refuse(name, "one integer or two")
    return sizes[0], sizes[-1]


def _classes(fields: Fields) -> tuple[str, ...]:
    """The names of the classes, by their numbers."""
    table = fields.part("id2label").table
    if not table:
        return "LABEL_0", "LABEL_1"
    if set(table) != {str(n) for n in range(len(table))}:
        fields.refuse("id2label", "an object with the names of the classes 0, 1, 2, ...")
    return tuple(str(table[str(n)]) for n in range(len(table)))
