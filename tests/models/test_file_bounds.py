"""Files of a few bytes that ask for any amount of time or memory: each is refused at once, naming file and field."""

from __future__ import annotations

import json
import time

import pytest
import tokenizers
import torch
from safetensors.torch import save_file
from tokenizers import Regex, decoders, normalizers, pre_tokenizers, processors

from qkv import models
from qkv.errors import CheckpointError
from qkv.models.files import checkpoint, shards
from qkv.models.files.tokenizer import Tokenizer
from qkv.tensorfile import read_object

LLAMA = {
    "model_type": "llama", "vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip
GPT_2 = {"model_type": "gpt2", "vocab_size": 97, "n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 64}
T5 = {"model_type": "t5", "vocab_size": 97, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}
WINDOWS = {
    "model_type": "qkv_vit", "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "intermediate_size": 48, "image_size": 32, "patch_size": 8, "attention": "windows", "window": 4,
}  # fmt: skip
COSTLY = [
    (LLAMA, "num_hidden_layers", 10**8, "10,000"),
    (LLAMA, "head_dim", 2 * 10**9, "65,536"),
    (LLAMA, "vocab_size", 2**24 + 1, "16,777,216"),
    (GPT_2, "n_layer", 10**8, "10,000"),
    (T5, "relative_attention_num_buckets", 2 * 10**9, "1,024"),
    (T5, "relative_attention_max_distance", 4 * 10**9, "131,072"),
    (WINDOWS, "image_size", 32 * 10**9, "8,192"),
]


@pytest.mark.parametrize(
    "config, field, value, limit", COSTLY, ids=[f"{row[0]['model_type']} {row[1]}" for row in COSTLY]
)
def test_a_config_cannot_ask_for_more_than_any_model_has(config, field, value, limit, tmp_path):
    save_file({"a": torch.zeros(1)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({**config, field: value}))
    begin = time.perf_counter()
    with pytest.raises(CheckpointError) as caught:
        models.from_pretrained(tmp_path)
    assert f"`{field}` in 'config.json' must be at most {limit}; got {value}" in str(caught.value)
    assert time.perf_counter() - begin < 1


def test_an_error_without_a_text_is_named():
    assert checkpoint._first_line(MemoryError()) == "MemoryError"


def test_a_name_that_stands_twice_is_found_in_one_walk(tmp_path):
    file = tmp_path / "names.json"
    file.write_text("{" + ",".join(f'"{n}":0' for n in range(60_000)) + ',"59999":0}')
    begin = time.perf_counter()
    with pytest.raises(CheckpointError, match="'59999' stands there twice"):
        read_object(file)
    assert time.perf_counter() - begin < 2


def test_an_index_is_walked_once_whatever_the_number_of_shards(tmp_path):
    """Each shard asks only for its own names: the index's table is not gone through again for each."""

    class Counting(dict):
        walks = 0

        def items(self):
            Counting.walks += 1
            return super().items()

    places = {}
    for n in range(20):
        save_file({f"t{n}": torch.zeros(1)}, tmp_path / f"s{n}.safetensors")
        places[f"t{n}"] = f"s{n}.safetensors"
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shards, "_places", lambda index: Counting(places))
        assert len(shards.read_weights(tmp_path).tensors) == 20
    assert Counting.walks == 1


def tokenizer_file(folder, **parts):
    core = tokenizers.Tokenizer(tokenizers.models.BPE({"a": 0, "b": 1}, []))
    for name, part in parts.items():
        setattr(core, name, part)
    core.save(str(folder / "tokenizer.json"))
    return folder / "tokenizer.json"


DOUBLE = normalizers.Replace("a", "aa")
TWICE = processors.TemplateProcessing(single="$A $A", pair="$A $B", special_tokens=[])
BOMBS = {
    "replaced forty times": ("normalizer", normalizers.Sequence([DOUBLE] * 40)),
    "in sequences within": ("normalizer", normalizers.Sequence([normalizers.Sequence([DOUBLE] * 4)] * 2)),
    "one long text": ("normalizer", normalizers.Replace("a", "a" * 65)),
    "before every character": ("normalizer", normalizers.Sequence([normalizers.Replace(Regex("(?=.)"), "a")] * 7)),
    "decomposed again": (
        "normalizer",
        normalizers.Sequence([normalizers.Replace("a", "\ufdfa"), normalizers.NFKD()] * 3),
    ),
    "bytes as characters": ("pre_tokenizer", pre_tokenizers.Sequence([pre_tokenizers.ByteLevel()] * 5)),
    "decoded": ("decoder", decoders.Sequence([decoders.Replace("a", "aa")] * 22)),
    "a template that repeats": ("post_processor", processors.Sequence([TWICE] * 7)),
}


@pytest.mark.parametrize("bomb", BOMBS)
def test_a_tokenizer_whose_steps_explode_is_refused(bomb, tmp_path):
    part, steps = BOMBS[bomb]
    expected = f"'tokenizer.json' must not make a text more than 64 times as long in its '{part}'; its steps together"
    with pytest.raises(CheckpointError, match=expected):
        Tokenizer.read(tokenizer_file(tmp_path, **{part: steps}))


def test_the_steps_of_usual_tokenizers_are_read(tmp_path):
    albert = normalizers.Sequence([
        normalizers.Replace("``", '"'), normalizers.Replace("''", '"'), normalizers.NFKD(), normalizers.StripAccents(),
        normalizers.Lowercase(), normalizers.Replace(Regex(" {2,}"), " "),
    ])  # fmt: skip
    back = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
    pieces = pre_tokenizers.Sequence([pre_tokenizers.Digits(), pre_tokenizers.ByteLevel(add_prefix_space=False)])
    pair = processors.TemplateProcessing(single="$A", pair="$A $B", special_tokens=[])
    read = Tokenizer.read(
        tokenizer_file(tmp_path, normalizer=albert, decoder=back, pre_tokenizer=pieces, post_processor=pair)
    )
    assert read.encode("Ab") == [0, 1]
