"""`qkv.models.from_pretrained`: every kind of model comes back as its own class, a GGUF file is a Llama."""

from __future__ import annotations

import json

import pytest
import torch

from qkv import models
from qkv.errors import CheckpointError
from qkv.models import loading

SIZES = {"layers": 2, "heads": 2, "width": 8, "feedforward": 12}
WORDS = {"vocabulary": 11, "positions": 8}
KINDS = {
    "bert": lambda: models.Bert(models.BertConfig(**WORDS, **SIZES)),
    "masked bert": lambda: models.BertForMaskedLM(models.BertConfig(**WORDS, **SIZES)),
    "gpt": lambda: models.GPT(models.GPTConfig(**WORDS, **SIZES)),
    "llama": lambda: models.Llama(models.LlamaConfig(**WORDS, **SIZES, kv_heads=1, head_dim=4)),
    "windowed llama": lambda: models.Llama(
        models.LlamaConfig(**WORDS, **SIZES, kv_heads=1, head_dim=4, pattern="sliding_window(4)", sinks=True)
    ),
    "t5": lambda: models.T5(models.T5Config(vocabulary=11, head_dim=4, **SIZES)),
    "vit": lambda: models.ViT(models.ViTConfig(**SIZES)),
    "classifying vit": lambda: models.ViTForImageClassification(models.ViTConfig(**SIZES)),
    "hybrid": lambda: models.Hybrid(models.HybridConfig(**WORDS, **SIZES, ratio=1)),
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_comes_back_as_its_own_class(kind, tmp_path):
    model = KINDS[kind]()
    model.save_pretrained(tmp_path, max_shard_bytes=500)
    back = models.from_pretrained(tmp_path)
    assert type(back) is type(model) and back.config.to_fields() == model.config.to_fields() and not back.training
    found, wanted = back.state_dict(), model.state_dict()
    assert found.keys() == wanted.keys() and all(torch.equal(found[name], wanted[name]) for name in wanted)
    half = models.from_pretrained(tmp_path, dtype=torch.float16)
    assert {weight.dtype for weight in half.parameters()} == {torch.float16}
    assert not any(one.is_meta for one in [*half.parameters(), *half.buffers()])


def test_a_head_of_another_kind_does_not_count(tmp_path):
    KINDS["bert"]().save_pretrained(tmp_path)
    said = json.loads((tmp_path / "config.json").read_text()) | {"architectures": ["ViTForImageClassification"]}
    (tmp_path / "config.json").write_text(json.dumps(said))
    assert type(models.from_pretrained(tmp_path, verify=False)) is models.Bert


def test_an_unknown_kind_is_told_those_that_are_known(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "mamba9"}')
    with pytest.raises(CheckpointError) as caught:
        models.from_pretrained(tmp_path)
    assert all(kind in str(caught.value) for kind in loading.KINDS) and "got 'mamba9'" in str(caught.value)


def test_a_gguf_file_is_a_llama(tmp_path, monkeypatch):
    monkeypatch.setattr(
        models.Llama, "from_gguf", classmethod(lambda cls, path, dtype, tokenizer: (cls, path, dtype, tokenizer))
    )
    file = tmp_path / "some.gguf"
    file.write_bytes(b"")
    for path in (file, tmp_path):
        assert models.from_pretrained(path, dtype=torch.float16) == (models.Llama, file, torch.float16, True)
        assert models.from_pretrained(path, tokenizer=False) == (models.Llama, file, None, False)
