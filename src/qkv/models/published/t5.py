"""How a T5 stands in published files: the fields of its config.json, and the names of its tensors.

With another pattern of the encoder than the full one it is no model of transformers, and is written as `qkv_t5`, which
transformers refuses to read.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor

from qkv.models.files.config_file import Fields
from qkv.models.files.copies import without_copies
from qkv.models.files.spelling import respelled
from qkv.models.published.aliases import read_size
from qkv.nn.feed_forward import GATED
from qkv.patterns import full
from qkv.patterns.text import parse

if TYPE_CHECKING:
    from qkv.models.t5 import T5Config

T5_, OWN = "t5", "qkv_t5"
CLASSES = {T5_: "T5ForConditionalGeneration", OWN: "T5"}
ACTIVATIONS = {  # by the file's dense_act_fn and is_gated_act
    ("relu", False): "relu",
    ("relu", True): "reglu",
    ("gelu", False): "gelu",
    ("gelu", True): "geglu",
    ("gelu_new", False): "gelu_tanh",
    ("gelu_new", True): "geglu_tanh",
    ("silu", False): "silu",
    ("silu", True): "swiglu",
}
CURVES = tuple(dict.fromkeys(curve for curve, _ in ACTIVATIONS))
GATE = "gated-"
OF_1_1 = "gated-gelu"  # T5 1.1; the tanh form, whatever it is called
DROPOUTS = ("embedding_dropout", "attention_dropout", "feedforward_dropout", "residual_dropout")
SIZES = {
    "vocabulary": "vocab_size",
    "layers": "num_layers",
    "heads": "num_heads",
    "head_dim": "d_kv",
    "width": "d_model",
    "feedforward": "d_ff",
}
ALIASES = {
    "d_model": "hidden_size",
    "num_heads": "num_attention_heads",
    "num_layers": "num_hidden_layers",
    "d_kv": "head_dim",
}

HEAD, SHARED = "lm_head.weight", "shared.weight"
COPIES = ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight")
UNREAD = (
    "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight"  # of the first files; no model reads it
)
OUTER = ((SHARED, "embedding.weight"), (HEAD, "head.weight"))
INNER = (
    (".final_layer_norm.", ".norm."),  # before the other norms, whose names end like it
    (".block.0.layer.0.SelfAttention.relative_attention_bias.", ".relative."),
    (".block.", ".layers."),
    (".q.", ".q_proj."),
    (".k.", ".k_proj."),
    (".v.", ".v_proj."),
    (".o.", ".o_proj."),
    (".layer.0.SelfAttention.", ".attention."),
    (".layer.0.layer_norm.", ".attention_norm."),
)
CROSS = ((".layer.1.EncDecAttention.", ".cross."), (".layer.1.layer_norm.", ".cross_norm."))


def read_fields(fields: Fields) -> dict[str, Any]:
    """What T5Config takes, from a config.json. Raises CheckpointError naming the field that does not fit.

    The one `dropout_rate` of T5 acts in all four places. Whether the head is the embedding is told by the tensors.
    """
    kind = fields.one_of("model_type", *CLASSES)
    rate = fields.number("dropout_rate", 0.1)
    pad = fields.integer("pad_token_id", 0)
    return {
        **{name: read_size(fields, stored, ALIASES) for name, stored in SIZES.items()},
        "decoder_layers": fields.integer("num_decoder_layers", None),
        "activation": _activation(fields),
        "buckets": fields.integer("relative_attention_num_buckets", 32),
        "max_distance": fields.integer("relative_attention_max_distance", 128),
        "norm_epsilon": fields.number("layer_norm_epsilon", 1e-6),
        "scaled_head": fields.flag("scale_decoder_outputs", fields.flag("tie_word_embeddings", True)),
        "pattern": fields.text("pattern") if kind == OWN else "full()",
        **{name: fields.number(name, rate) for name in DROPOUTS},
        "start_id": fields.integer("decoder_start_token_id", pad),
        "end_ids": fields.integers("eos_token_id", ()),
        "pad_id": pad,
    }


def write_fields(config: T5Config) -> dict[str, Any]:
    """The fields of config.json. Where the four dropouts differ, those that transformers has no field for stand by
    themselves; it takes the one on what a sublayer adds for all.
    """
    kind = T5_ if parse(config.pattern) == full() else OWN
    ends = list(config.end_ids)
    rate = config.residual_dropout
    curve, gated = next(stored for stored, name in ACTIVATIONS.items() if name == config.activation)
    made = {
        "model_type": kind,
        "architectures": [CLASSES[kind]],
        "is_encoder_decoder": True,
        **{stored: getattr(config, name) for name, stored in SIZES.items()},
        "num_decoder_layers": config.of_decoder,
        "feed_forward_proj": OF_1_1 if (curve, gated) == ("gelu_new", True) else GATE * gated + curve,
        "dense_act_fn": curve,
        "is_gated_act": gated,
        "relative_attention_num_buckets": config.buckets,
        "relative_attention_max_distance": config.max_distance,
        "layer_norm_epsilon": config.norm_epsilon,
        "tie_word_embeddings": config.tied,
        "scale_decoder_outputs": config.scaled_head,
        "dropout_rate": rate,
        **{name: getattr(config, name) for name in DROPOUTS if getattr(config, name) != rate},
        "decoder_start_token_id": config.start_id,
        "eos_token_id": ends[0] if len(ends) == 1 else ends or None,
        "pad_token_id": config.pad_id,
    }
    if kind == OWN:
        made["pattern"] = config.pattern
    return made


def own_names(config: T5Config, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Our names for those of transformers; the embeddings are kept once."""
    copies = (*COPIES, HEAD) if config.tied else COPIES
    kept = without_copies(tensors, SHARED, *copies)
    kept.pop(UNREAD, None)
    return _by_stack(config, kept, back=False)


def file_names(config: T5Config, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The names that transformers knows."""
    return _by_stack(config, tensors, back=True)


def _activation(fields: Fields) -> str:
    """What feed_forward_proj means, in whose parts dense_act_fn and is_gated_act have the last word."""
    said = fields.one_of("feed_forward_proj", *(GATE * gated + curve for curve, gated in ACTIVATIONS), default="relu")
    curve = "gelu_new" if said == OF_1_1 else said.removeprefix(GATE)
    curve = fields.one_of("dense_act_fn", *CURVES, default=curve)
    return ACTIVATIONS[curve, fields.flag("is_gated_act", said.startswith(GATE))]


def _by_stack(config: T5Config, tensors: Mapping[str, Tensor], *, back: bool) -> dict[str, Tensor]:
    """The tensors of each stack renamed: its feed-forward is the last of its sublayers, which count from 0."""
    pairs = {
        "encoder.": (*INNER, *_feedforward(config, 1)),
        "decoder.": (*INNER, *CROSS, *_feedforward(config, 2)),
    }
    named: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        spelling = next((pairs[stack] for stack in pairs if name.startswith(stack)), OUTER)
        named |= respelled({name: tensor}, spelling, back=back)
    return named


def _feedforward(config: T5Config, place: int) -> tuple[tuple[str, str], ...]:
    at = f".layer.{place}.DenseReluDense."
    parts = {"wi_0": "gate_proj", "wi_1": "up_proj"} if config.activation in GATED else {"wi": "up_proj"}
    inner = tuple((f"{at}{name}.", f".feedforward.{own}.") for name, own in (parts | {"wo": "down_proj"}).items())
    return (*inner, (f".layer.{place}.layer_norm.", ".feedforward_norm."))
