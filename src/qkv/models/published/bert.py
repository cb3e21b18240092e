"""How BERT stands in published files: the fields of config.json, and the names of its tensors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor

from qkv.models.files.config_file import Fields
from qkv.models.files.copies import without_copies
from qkv.models.files.spelling import respelled

if TYPE_CHECKING:
    from qkv.models.bert import BertConfig

FIXED = {
    "model_type": "bert",
    "hidden_act": "gelu",
    "position_embedding_type": "absolute",
    "is_decoder": False,
    "tie_word_embeddings": True,
}
POSITION_NUMBERS = "embeddings.position_ids"  # 0, 1, 2, ...: older files carry it, it is no weight
OTHER_HEAD = "cls.seq_relationship."
# What the masked-word head holds once more, by what it is.
COPIES = {
    "bert.embeddings.word_embeddings.weight": "cls.predictions.decoder.weight",
    "cls.predictions.bias": "cls.predictions.decoder.bias",
}
# Parts of the names in published files, and of ours. The first two are of the oldest files.
NAMES = (
    ("LayerNorm.gamma", "LayerNorm.weight"),
    ("LayerNorm.beta", "LayerNorm.bias"),
    ("encoder.layer.", "layers."),
    (".attention.self.query.", ".attention.q_proj."),
    (".attention.self.key.", ".attention.k_proj."),
    (".attention.self.value.", ".attention.v_proj."),
    (".attention.output.dense.", ".attention.o_proj."),
    (".attention.output.LayerNorm.", ".attention_norm."),
    (".intermediate.dense.", ".feedforward.up_proj."),
    (".output.dense.", ".feedforward.down_proj."),
    (".output.LayerNorm.", ".feedforward_norm."),
    ("pooler.dense.", "pooler."),
    ("cls.predictions.transform.", "head."),
    ("cls.predictions.bias", "head.bias"),
)


def read_fields(fields: Fields) -> dict[str, Any]:
    """What BertConfig takes, from a config.json. Raises CheckpointError when it describes another model."""
    for name, wanted in FIXED.items():
        fields.one_of(name, wanted, default=wanted)
    hidden_dropout = fields.number("hidden_dropout_prob")
    return {
        "vocabulary": fields.integer("vocab_size"),
        "positions": fields.integer("max_position_embeddings"),
        "token_types": fields.integer("type_vocab_size"),
        "layers": fields.integer("num_hidden_layers"),
        "heads": fields.integer("num_attention_heads"),
        "width": fields.integer("hidden_size"),
        "feedforward": fields.integer("intermediate_size"),
        "norm_epsilon": fields.number("layer_norm_eps"),
        "embedding_dropout": fields.number("embedding_dropout", hidden_dropout),
        "attention_dropout": fields.number("attention_probs_dropout_prob"),
        "feedforward_dropout": fields.number("feedforward_dropout", 0.0),
        "residual_dropout": hidden_dropout,
        "spread": fields.number("initializer_range", 0.02),
        "pad_id": fields.integer("pad_token_id", 0),
    }


def write_fields(config: BertConfig) -> dict[str, Any]:
    """The fields of config.json; the two dropouts that transformers does not tell apart stand under own names."""
    return {
        "architectures": [config.architecture],
        **FIXED,
        "vocab_size": config.vocabulary,
        "max_position_embeddings": config.positions,
        "type_vocab_size": config.token_types,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "hidden_size": config.width,
        "intermediate_size": config.feedforward,
        "layer_norm_eps": config.norm_epsilon,
        "embedding_dropout": config.embedding_dropout,
        "attention_probs_dropout_prob": config.attention_dropout,
        "feedforward_dropout": config.feedforward_dropout,
        "hidden_dropout_prob": config.residual_dropout,
        "initializer_range": config.spread,
        "pad_token_id": config.pad_id,
    }


def own_names(config: BertConfig, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The encoder of a published file, which may hold heads beside it."""
    encoder = tensors
    if any(name.startswith("bert.") for name in tensors):
        encoder = {name[5:]: tensor for name, tensor in tensors.items() if name.startswith("bert.")}
    unread = (POSITION_NUMBERS,) if config.pooling else (POSITION_NUMBERS, "pooler.")
    return respelled({name: encoder[name] for name in encoder if not name.startswith(unread)}, NAMES)


def own_masked_names(config: BertConfig, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The encoder and the masked-word head of a file, which may hold another head and the shared matrix once more."""
    kept = dict(tensors)
    for name, copy in COPIES.items():
        kept = without_copies(kept, name, copy)
    head = {name: tensor for name, tensor in kept.items() if not name.startswith(("bert.", OTHER_HEAD))}
    return {f"bert.{name}": one for name, one in own_names(config, kept).items()} | respelled(head, NAMES)


def file_names(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The names of published files, of the encoder and of the masked-word head."""
    return respelled(tensors, NAMES[2:], back=True)
