"""Small files beside the weights: which tokens end what a model writes; tokenizers that stay, go or cannot be read."""

from __future__ import annotations

import json

import pytest
import torch

from ggufs import gguf
from qkv import models
from qkv.errors import CheckpointError
from qkv.models.files import checkpoint
from tinymodel import tiny

LLAMA = {
    "vocabulary": 11, "positions": 8, "layers": 1, "heads": 2, "kv_heads": 1, "head_dim": 4, "width": 8,
    "feedforward": 12,
}  # fmt: skip
FILE = "generation_config.json"


def llama(**changed):
    return models.Llama(models.LlamaConfig(**(LLAMA | changed)))


def said(folder, name=FILE):
    return json.loads((folder / name).read_text())


def strip_checksums(folder):
    """The weights as another program writes them, so that the small files may change."""
    from safetensors.torch import load_file, save_file

    tensors = {name: one.clone() for name, one in load_file(folder / "model.safetensors").items()}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def test_the_file_says_which_tokens_end_and_fill(tmp_path):
    llama(end_ids=(2,), pad_id=None, begin_id=1).save_pretrained(tmp_path)
    assert said(tmp_path) == {"bos_token_id": 1, "eos_token_id": 2}
    strip_checksums(tmp_path)
    (tmp_path / FILE).write_text(
        json.dumps({"eos_token_id": [2, 5], "pad_token_id": 3, "bos_token_id": 4, "temperature": 0.6})
    )
    config = models.from_pretrained(tmp_path).config
    assert (config.end_ids, config.pad_id, config.begin_id) == ((2, 5), 3, 4)
    (tmp_path / FILE).write_text('{"eos_token_id": 7}')
    config = models.from_pretrained(tmp_path).config
    assert (config.end_ids, config.pad_id, config.begin_id) == ((7,), None, 1)
    (tmp_path / FILE).write_text('{"eos_token_id": "x"}')
    with pytest.raises(CheckpointError, match=f"`eos_token_id` in '{FILE}' must be an integer or a list of integers"):
        models.from_pretrained(tmp_path)


def test_the_file_is_written_by_models_that_write_and_verified(tmp_path):
    t5 = models.T5(
        models.T5Config(vocabulary=11, layers=1, heads=2, head_dim=4, width=8, feedforward=12, end_ids=(1, 2))
    )
    t5.save_pretrained(tmp_path / "t5")
    assert said(tmp_path / "t5") == {"pad_token_id": 0, "decoder_start_token_id": 0, "eos_token_id": [1, 2]}
    assert models.from_pretrained(tmp_path / "t5").config.end_ids == (1, 2)
    bert = models.BertConfig(vocabulary=11, positions=8, layers=1, heads=2, width=8, feedforward=12)
    models.Bert(bert).save_pretrained(tmp_path / "bert")
    assert not (tmp_path / "bert" / FILE).exists()
    (tmp_path / "t5" / FILE).write_text("{}")
    with pytest.raises(CheckpointError, match=f"'{FILE}' must be as it was saved with the weights"):
        models.from_pretrained(tmp_path / "t5")
    (tmp_path / "t5" / FILE).write_text('{"decoder_start_token_id": 99}')
    with pytest.raises(CheckpointError, match=f"'{FILE}' must describe a model; got: `start_id` must lie in 0 .. 10"):
        models.from_pretrained(tmp_path / "t5", verify=False)


def test_transformers_ends_where_the_model_does(tmp_path):
    transformers = pytest.importorskip("transformers")
    llama(end_ids=(2, 5), pad_id=3).save_pretrained(tmp_path)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).generation_config
    assert (theirs.eos_token_id, theirs.pad_token_id) == ([2, 5], 3)


@pytest.mark.parametrize("eot, ends", [(None, (2,)), (2, (2,)), (5, (2, 5))])
def test_the_end_of_a_turn_ends_too(eot, ends):
    fields = checkpoint.Fields(None, {"tokenizer.ggml.eot_token_id": eot})
    assert checkpoint._with_end_of_turn(llama(end_ids=(2,)).config, fields).end_ids == ends


def test_a_save_leaves_no_tokenizer_and_no_ends_of_the_model_before(tmp_path):
    before = llama()
    before.tokenizer = tiny().tokenizer
    before.save_pretrained(tmp_path)
    models.Bert(
        models.BertConfig(vocabulary=11, positions=8, layers=1, heads=2, width=8, feedforward=12)
    ).save_pretrained(tmp_path)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["config.json", "model.safetensors"]
    assert models.from_pretrained(tmp_path).tokenizer is None


def test_weights_are_read_without_a_tokenizer_that_cannot_be(tmp_path):
    model = llama()
    model.save_pretrained(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(
        CheckpointError, match=r"must hold a tokenizer; got: .*, or pass tokenizer=False to leave it out"
    ):
        models.from_pretrained(tmp_path)
    read = models.from_pretrained(tmp_path, tokenizer=False)
    assert read.tokenizer is None and torch.equal(read.norm.weight, model.norm.weight)


def test_a_gguf_without_a_known_tokenizer_is_read_without_it(tmp_path, monkeypatch):
    pytest.importorskip("gguf")
    file = tmp_path / "model.gguf"
    file.write_bytes(gguf({"tokenizer.ggml.model": "llama"}, dict.fromkeys("abcdef", ((2,), 0, bytes(8)))))
    tiny_type = type(tiny())
    monkeypatch.setattr(
        tiny_type, "gguf_config", classmethod(lambda cls, metadata, shapes: tiny().config), raising=False
    )
    monkeypatch.setattr(
        tiny_type, "gguf_names", staticmethod(lambda config, tensors: tiny().state_dict()), raising=False
    )
    with pytest.raises(CheckpointError, match=r"`tokenizer.ggml.model`, .*, or pass tokenizer=False"):
        tiny_type.from_gguf(file)
    assert tiny_type.from_pretrained(tmp_path, tokenizer=False).tokenizer is None


def test_fields_of_the_tokenizer_that_nobody_knows_are_carried_along(tmp_path):
    tiny().save_pretrained(tmp_path / "a")
    strip_checksums(tmp_path / "a")
    told = {"eos_token": "b", "model_max_length": 64, "padding_side": "left", "odd": "\ud800", "auto_map": {"x": "y"}}
    several = [{"name": "default", "template": "t"}]
    (tmp_path / "a" / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "LlamaTokenizer", "chat_template": several, **told})
    )
    type(tiny()).from_pretrained(tmp_path / "a").save_pretrained(tmp_path / "b")
    del told["auto_map"]
    kept = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": several, **told}
    assert said(tmp_path / "b", "tokenizer_config.json") == kept
