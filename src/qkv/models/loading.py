"""Reads a model of any kind: config.json's model_type picks the class, a GGUF file is a Llama."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from qkv.models.bert import Bert, BertForMaskedLM
from qkv.models.files.checkpoint import PretrainedModel
from qkv.models.files.config_file import Fields
from qkv.models.files.shards import find_gguf
from qkv.models.gpt import GPT
from qkv.models.hybrid import Hybrid
from qkv.models.llama import Llama
from qkv.models.published import gpt, hybrid, llama, t5, vit
from qkv.models.t5 import T5
from qkv.models.vit import ViT, ViTForImageClassification

# The class by model_type, and by `architectures` where the same sizes carry a head too.
KINDS: dict[str, type[PretrainedModel]] = {
    "bert": Bert,
    **dict.fromkeys(gpt.CLASSES, GPT),
    **dict.fromkeys(llama.CLASSES, Llama),
    **dict.fromkeys(t5.CLASSES, T5),
    **dict.fromkeys((vit.THEIRS, vit.OURS), ViT),
    **dict.fromkeys((hybrid.OLMO, hybrid.OURS), Hybrid),
}
WITH_HEADS: dict[str, type[PretrainedModel]] = {
    "BertForMaskedLM": BertForMaskedLM,
    "ViTForImageClassification": ViTForImageClassification,
}


def from_pretrained(
    path: str | os.PathLike[str],
    *,
    dtype: torch.dtype | None = None,
    verify: bool = True,
    tokenizer: bool = True,
) -> PretrainedModel:
    """The model in a folder or a GGUF file, of the class that its config.json names, in eval mode.

    As `PretrainedModel.from_pretrained`; raises CheckpointError with the list of known kinds for another one.
    """
    gguf = find_gguf(Path(path))
    if gguf is not None:
        return Llama.from_gguf(gguf, dtype=dtype, tokenizer=tokenizer)
    fields = Fields.read(Path(path) / "config.json")
    kind = fields.text("model_type")
    if kind not in KINDS:
        fields.refuse("model_type", f"one of {', '.join(sorted(KINDS))}", "choose a model of one of these kinds")
    heads = [WITH_HEADS[name] for name in fields.texts("architectures", ()) if name in WITH_HEADS]
    fitting = [one for one in heads if one.Config is KINDS[kind].Config]
    chosen = (fitting or [KINDS[kind]])[0]
    return chosen.from_pretrained(path, dtype=dtype, verify=verify, tokenizer=tokenizer)
