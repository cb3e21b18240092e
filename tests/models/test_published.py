"""Config files that say things in odd ways: they are read as transformers 5.24 reads them, or refused by name."""

from __future__ import annotations

import json
from functools import cache

import pytest
import torch
from safetensors.torch import load_file, save_file

from qkv import models
from qkv.errors import CheckpointError, ValueOutOfRange
from qkv.models.llama import Llama, LlamaConfig
from qkv.models.published import llama_gguf

transformers = pytest.importorskip("transformers")

ABSENT = object()
BOUND = 1e-4  # of the largest logit, in float32; what was read otherwise was 1e-2 and more away
WORDS = 61
SIZES = {
    "vocab_size": WORDS,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "eos_token_id": 2,
}
GPT2 = {"vocab_size": WORDS, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 64}
T5 = {"vocab_size": WORDS, "d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 2, "num_heads": 2}
T5 |= {"decoder_start_token_id": 0}
OLMO = SIZES | {"linear_key_head_dim": 8, "linear_value_head_dim": 16}
BERT = {name: size for name, size in SIZES.items() if name != "num_key_value_heads"}
VIT = {name: BERT[name] for name in ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")}
VIT |= {"image_size": 8, "patch_size": 4, "num_labels": 3}
KINDS = {
    "llama": ("Llama", "LlamaForCausalLM", SIZES),
    "mistral": ("Mistral", "MistralForCausalLM", SIZES | {"sliding_window": 5}),
    "qwen2": ("Qwen2", "Qwen2ForCausalLM", SIZES),
    "qwen3": ("Qwen3", "Qwen3ForCausalLM", SIZES | {"head_dim": 8}),
    "olmo": ("OlmoHybrid", "OlmoHybridForCausalLM", OLMO),
    "gpt2": ("GPT2", "GPT2LMHeadModel", GPT2),
    "t5": ("T5", "T5ForConditionalGeneration", T5),
    "t5, gated": ("T5", "T5ForConditionalGeneration", T5 | {"feed_forward_proj": "gated-gelu"}),
    "bert": ("Bert", "BertForMaskedLM", BERT),
    "vit": ("ViT", "ViTForImageClassification", VIT),
}

# Scalings as older files say them, beside the base.
OLDER = {"rope_parameters": ABSENT, "rope_theta": 100.0}
LINEAR = {"type": "linear", "factor": 4.0}
LLAMA3 = {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"rope_type": "yarn", "factor": 4.0}
LENGTH = "original_max_position_embeddings"
PART = "partial_rotary_factor"
SLIDING = ["sliding_attention", "full_attention"]
WINDOW = {"use_sliding_window": True, "sliding_window": 5}


def rope(**fields):
    return {"rope_parameters": {"rope_type": "default", "rope_theta": 100.0, **fields}}


ROPES = {
    "base beside an empty table": {"rope_theta": 100.0, "rope_parameters": {}},
    "base beside a table without one": {"rope_theta": 100.0, "rope_parameters": {"rope_type": "default"}},
    "base in the table and beside it": {"rope_theta": 500.0, **rope()},
    "base alone": OLDER,
    "no word": {"rope_parameters": None},
    "older scaling": OLDER | {"rope_scaling": LINEAR},
    "both tables": {"rope_scaling": LINEAR, **rope()},
    "both tables, and a base": {"rope_scaling": LINEAR, "rope_theta": 50.0, **rope()},
    "both tables, the older empty": {"rope_scaling": {}, **rope()},
    "both names of the kind": rope(type="linear", factor=2.0),
    "plain, of a part": rope(partial_rotary_factor=0.5),
    "plain, a part beside it": {PART: 0.5, **rope()},
    "scaled, of all": rope(rope_type="linear", factor=4.0, partial_rotary_factor=1.0),
    "llama3, length beside": OLDER | {"rope_scaling": LLAMA3, LENGTH: 16},
    "llama3, length in it and beside": OLDER | {"rope_scaling": LLAMA3 | {LENGTH: 8}, LENGTH: 32},
    "llama3, no length": OLDER | {"rope_scaling": LLAMA3},
    "yarn, length beside": OLDER | {"rope_scaling": YARN, LENGTH: 16},
    "yarn, length in it": OLDER | {"rope_scaling": YARN | {LENGTH: 16}},
    "yarn, no factor": OLDER | {"rope_scaling": YARN | {"factor": None}, LENGTH: 16},
}
READ_ALIKE = [
    *(("llama", name, changes) for name, changes in ROPES.items()),
    *(("olmo", name, ROPES[name]) for name in ("no word", "older scaling", "plain, of a part", "yarn, length beside")),
    ("olmo", "null base", rope(rope_theta=None)),
    ("olmo", "null base beside", {"rope_theta": None, "rope_parameters": {}}),
    *(
        (kind, name, changes)
        for kind in ("qwen2", "qwen3")
        for name, changes in {
            "window": WINDOW | {"max_window_layers": 1, "layer_types": ABSENT},
            "window by layer": WINDOW | {"layer_types": SLIDING},
            "window not used": {"use_sliding_window": False, "sliding_window": 5},
            "null window": {"use_sliding_window": True, "sliding_window": None, "layer_types": ABSENT},
        }.items()
    ),
    ("mistral", "no window", {"sliding_window": ABSENT}),
    ("mistral", "null window", {"sliding_window": None}),
    ("gpt2", "aliases that agree", {"num_attention_heads": 2, "num_hidden_layers": 2, "hidden_size": 16}),
    ("gpt2", "aliases alone", {"n_head": ABSENT, "num_attention_heads": 2, "n_embd": ABSENT, "hidden_size": 16}),
    ("t5", "alias alone", {"d_model": ABSENT, "hidden_size": 16, "d_kv": ABSENT, "head_dim": 8}),
    ("t5", "another curve", {"dense_act_fn": "gelu_new"}),
    ("t5", "a curve, no projection", {"dense_act_fn": "silu", "feed_forward_proj": ABSENT}),
    ("t5", "ungated after all", {"feed_forward_proj": "gated-silu", "dense_act_fn": "relu", "is_gated_act": False}),
    ("t5, gated", "exact curve", {"dense_act_fn": "gelu"}),
    ("t5, gated", "gated after all", {"feed_forward_proj": "silu", "dense_act_fn": "silu", "is_gated_act": True}),
    ("t5, gated", "projection alone", {"dense_act_fn": ABSENT, "is_gated_act": ABSENT}),
    ("vit", "one label each", {"problem_type": "single_label_classification"}),
]
SCALED_PART = rope(rope_type="linear", factor=4.0, partial_rotary_factor=0.5)
REFUSED = [
    ("llama", rope(rope_theta=None), r"rope_parameters\.rope_theta"),
    ("llama", rope(rope_theta=None) | {"rope_theta": 100.0}, r"rope_parameters\.rope_theta"),
    ("llama", {"rope_theta": None, "rope_parameters": {}}, r"rope_parameters\.rope_theta"),
    ("llama", rope(rope_type=None), r"rope_parameters\.rope_type"),
    ("llama", rope(**YARN, original_max_position_embeddings=None), rf"rope_parameters\.{LENGTH}"),
    ("llama", rope(rope_theta="big"), r"rope_parameters\.rope_theta"),
    ("llama", {"rope_scaling": [4]}, "rope_scaling"),
    ("llama", {"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "full_attention"),
    ("llama", SCALED_PART, PART),
    ("llama", {PART: 0.5, **rope(**YARN, original_max_position_embeddings=16)}, PART),
    ("olmo", SCALED_PART, PART),
    *((kind, {"layer_types": SLIDING}, "layer_types") for kind in ("qwen2", "qwen3")),
    ("qwen2", {"layer_types": SLIDING, "sliding_window": 5}, "layer_types"),
    ("qwen3", {"layer_types": SLIDING, "use_sliding_window": True, "sliding_window": None}, "layer_types"),
    ("gpt2", {"num_attention_heads": 4}, "num_attention_heads"),
    ("gpt2", {"num_hidden_layers": 1}, "num_hidden_layers"),
    ("gpt2", {"hidden_size": 8}, "hidden_size"),
    ("gpt2", {"max_position_embeddings": 32}, "max_position_embeddings"),
    ("t5", {"num_hidden_layers": 1}, "num_hidden_layers"),
    ("t5", {"num_attention_heads": 4}, "num_attention_heads"),
    ("t5", {"hidden_size": 8}, "hidden_size"),
    ("t5", {"head_dim": 4}, "head_dim"),
    ("t5", {"dense_act_fn": "tanh"}, "dense_act_fn"),
    ("t5", {"is_gated_act": 1}, "is_gated_act"),
    ("t5", {"feed_forward_proj": "gated-"}, "feed_forward_proj"),
    ("vit", {"problem_type": "regression"}, "problem_type"),
    ("vit", {"problem_type": "multi_label_classification"}, "problem_type"),
]


@cache
def made(kind, **changes):
    """A model of transformers with weights so large that every part of it shows."""
    name, model, sizes = KINDS[kind]
    torch.manual_seed(3)
    theirs = getattr(transformers, model)(getattr(transformers, f"{name}Config")(**sizes | changes)).eval()
    for name, weight in theirs.named_parameters():
        torch.nn.init.normal_(weight, mean=float("norm" in name.lower() and "bias" not in name), std=0.3)
    return theirs


def saved(kind, folder, changes=(), rewrite=None, **sizes):
    """Its files, with these fields of config.json changed, and its tensors rewritten."""
    made(kind, **sizes).save_pretrained(folder)
    file = folder / "config.json"
    said = json.loads(file.read_text()) | dict(changes)
    file.write_text(json.dumps({name: value for name, value in said.items() if value is not ABSENT}))
    if rewrite is not None:
        tensors = load_file(folder / "model.safetensors")
        save_file(rewrite(tensors), folder / "model.safetensors", {"format": "pt"})


def logits(kind, model, *, ours):
    """What a model says of the same input."""
    generator = torch.Generator().manual_seed(5)
    ids = torch.randint(3, WORDS, (2, 24), generator=generator)
    with torch.no_grad():
        if kind == "vit":
            return model(torch.randn(2, 3, 8, 8, generator=generator)).logits
        if not kind.startswith("t5"):
            return model(ids).logits
        return model(ids, **{"decoder_ids" if ours else "decoder_input_ids": ids[:, :9]}).logits


def check_alike(kind, folder):
    theirs = getattr(transformers, KINDS[kind][1]).from_pretrained(folder).eval()
    expected = logits(kind, theirs, ours=False)
    found = logits(kind, models.from_pretrained(folder), ours=True)
    assert float((found - expected).abs().max()) < BOUND * float(expected.abs().max())


@pytest.mark.parametrize(
    "kind, changes", [pytest.param(kind, changes, id=f"{kind}, {name}") for kind, name, changes in READ_ALIKE]
)
def test_odd_configs_are_read_as_transformers_reads_them(kind, changes, tmp_path):
    saved(kind, tmp_path / "theirs", changes)
    check_alike(kind, tmp_path / "theirs")
    model = models.from_pretrained(tmp_path / "theirs")
    model.save_pretrained(tmp_path / "ours")
    assert models.from_pretrained(tmp_path / "ours").config == model.config
    check_alike(kind, tmp_path / "ours")


@pytest.mark.parametrize("kind, changes, named", REFUSED)
def test_what_cannot_be_read_alike_is_refused_by_name(kind, changes, named, tmp_path):
    saved(kind, tmp_path, changes)
    with pytest.raises(CheckpointError, match=rf"config\.json.*{named}|{named}.*config\.json"):
        models.from_pretrained(tmp_path)


@pytest.mark.parametrize("kind", ["qwen2", "qwen3"])
def test_a_window_that_is_used_and_not_said_is_4096(kind, tmp_path):
    saved(kind, tmp_path, {"use_sliding_window": True, "sliding_window": ABSENT, "layer_types": SLIDING})
    assert transformers.AutoConfig.from_pretrained(tmp_path).sliding_window == 4096
    assert models.from_pretrained(tmp_path).config.patterns == ("sliding_window(4096)", "causal()")


HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
DECODER = "cls.predictions.decoder"
COPIES = {
    "llama": (HEAD, EMBEDDING),
    "mistral": (HEAD, EMBEDDING),
    "qwen2": (HEAD, EMBEDDING),
    "qwen3": (HEAD, EMBEDDING),
    "olmo": (HEAD, EMBEDDING),
    "gpt2": (HEAD, "transformer.wte.weight"),
    "bert": (f"{DECODER}.weight", "bert.embeddings.word_embeddings.weight"),
    "bert, bias": (f"{DECODER}.bias", "cls.predictions.bias"),
}


@pytest.mark.parametrize("case", COPIES)
def test_a_tied_head_may_be_there_once_more_and_not_otherwise(case, tmp_path):
    kind, (copy, name) = case.split(",")[0], COPIES[case]
    saved(kind, tmp_path, rewrite=lambda kept: kept | {copy: kept[name].clone()}, tie_word_embeddings=True)
    check_alike(kind, tmp_path)
    saved(kind, tmp_path, rewrite=lambda kept: kept | {copy: kept[name] + 1}, tie_word_embeddings=True)
    with pytest.raises(CheckpointError, match=rf"model\.safetensors.*`{copy}` must equal.*they differ"):
        models.from_pretrained(tmp_path)


def test_a_tied_head_stands_in_for_the_embedding(tmp_path):
    saved("llama", tmp_path, rewrite=lambda kept: {HEAD: kept.pop(EMBEDDING), **kept}, tie_word_embeddings=True)
    assert torch.equal(
        models.from_pretrained(tmp_path).embedding.weight, made("llama", tie_word_embeddings=True).lm_head.weight
    )


LLAMA = LlamaConfig(vocabulary=WORDS, positions=64, layers=1, heads=2, kv_heads=1, head_dim=8, width=16, feedforward=24)


@pytest.mark.parametrize("part", [rope(**{PART: 0.5}), rope(rope_type="linear", factor=2.0, **{PART: 0.5})])
def test_a_part_of_a_head_that_turns_is_a_model_of_ours(part, tmp_path):
    small = {name: getattr(LLAMA, name) for name in ("vocabulary", "positions", "layers", "heads", "width")}
    configs = (
        LlamaConfig(**small, kv_heads=1, head_dim=8, feedforward=24, rope=part["rope_parameters"]),
        models.HybridConfig(**small | {"layers": 2}, ratio=1, feedforward=24, rope=part["rope_parameters"]),
    )
    for config, kind in zip(configs, (Llama, models.Hybrid), strict=True):
        kind(config).save_pretrained(tmp_path / kind.__name__)
        said = json.loads((tmp_path / kind.__name__ / "config.json").read_text())
        assert said["model_type"] == f"qkv_{kind.__name__.lower()}"
        assert models.from_pretrained(tmp_path / kind.__name__).config.rope == part["rope_parameters"]


def test_a_base_of_null_is_never_written():
    for said in ({"rope_theta": 100.0, PART: None}, {"rope_theta": 100.0, "type": "default"}, {"rope_theta": None}, {}):
        written = LlamaConfig(rope=said).to_fields()["rope_parameters"]
        assert written == {"rope_type": "default", "rope_theta": said.get("rope_theta") or 10000.0}


def test_yarn_without_a_factor_says_so():
    """transformers reads a factor of null as the longest row by the trained one, and fails where there is none."""
    written = LlamaConfig(rope={"rope_type": "yarn", "rope_theta": 100.0, LENGTH: 16}).to_fields()["rope_parameters"]
    assert written == {"rope_type": "yarn", "rope_theta": 100.0, LENGTH: 16, "factor": None}


def test_labels_choose_from_two_classes_at_least(tmp_path):
    saved("vit", tmp_path, num_labels=1)
    check_alike("vit", tmp_path)
    model, pixels = models.from_pretrained(tmp_path), torch.zeros(2, 3, 8, 8)
    with pytest.raises(ValueOutOfRange, match="at least two classes"):
        model(pixels, labels=torch.zeros(2, dtype=torch.int64))


METADATA = {
    "general.architecture": "llama",
    "llama.attention.head_count": 2,
    "llama.embedding_length": 16,
    "llama.block_count": 1,
    "llama.context_length": 64,
    "llama.feed_forward_length": 24,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
}
SHAPES = {"token_embd.weight": (WORDS, 16)}


@pytest.mark.parametrize(
    "name, value",
    [
        ("rope.scaling.type", "yarn"),
        ("rope.scaling.attn_factor", 1.5),
        ("attention.causal", False),
        ("attention.scale", 0.1),
        ("attention.clamp_kqv", 8.0),
        ("attention.max_alibi_bias", 8.0),
        ("attention.value_length", 4),
        ("attn_logit_softcapping", 50.0),
        ("final_logit_softcapping", 30.0),
        ("logit_scale", 0.5),
        ("embedding_scale", 12.0),
        ("residual_scale", 0.2),
        ("expert_count", 8),
        ("use_parallel_residual", True),
    ],
)
def test_gguf_files_of_more_than_a_llama_are_refused_by_name(name, value):
    with pytest.raises(CheckpointError, match=f"llama.{name}"):
        llama_gguf.read_fields(METADATA | {f"llama.{name}": value}, SHAPES)


def test_gguf_files_may_say_that_they_are_no_more_than_a_llama():
    plain = {f"llama.{name}": values[-1] for name, values in llama_gguf.FIXED.items()}
    assert llama_gguf.read_fields(METADATA | plain, SHAPES) == llama_gguf.read_fields(METADATA, SHAPES)


@pytest.mark.parametrize(
    "said, factor",
    [
        ({}, None),
        ({"rope.scaling.factor": 4.0}, 4.0),
        ({"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}, 4.0),
        ({"rope.scale_linear": 2.0}, 2.0),
        ({"rope.scale_linear": 2.0, "rope.scaling.factor": 4.0}, 4.0),
        ({"rope.scale_linear": 2.0, "rope.scaling.factor": 0.0}, None),
        ({"rope.scale_linear": 1.0}, None),
        ({"rope.scaling.type": "none", "rope.scaling.factor": 4.0}, None),
    ],
)
def test_gguf_files_say_by_what_positions_are_divided(said, factor):
    config = LlamaConfig(**llama_gguf.read_fields(METADATA | {f"llama.{n}": v for n, v in said.items()}, SHAPES))
    plain = 10000.0 ** (-torch.arange(0, 8, 2, dtype=torch.float64) / 8)
    assert torch.allclose(torch.tensor(config.rotary.frequencies), plain / (factor or 1.0), rtol=1e-14, atol=0)
