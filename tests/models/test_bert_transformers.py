"""BERT as transformers runs it: the same weights give the same outputs, losses, gradients and attention weights."""

from __future__ import annotations

import pytest
import torch

from qkv.models.bert import Bert, BertForMaskedLM
from qkv.types import AuxRequest

transformers = pytest.importorskip("transformers", reason="needs transformers, which is not installed")

DOUBLE = 1e-11  # float64, gradients that pass through three layers included


def their_config(**changes):
    sizes = {
        "vocab_size": 40, "max_position_embeddings": 20, "hidden_size": 12, "num_hidden_layers": 3,
        "num_attention_heads": 3, "intermediate_size": 20, "attn_implementation": "eager",
    }  # fmt: skip
    return transformers.BertConfig(**{**sizes, **changes})


def pair(kind, ours, folder, **changes):
    """A model of theirs with random weights, and ours read from what it saved; float64, without dropout."""
    torch.manual_seed(1)
    their = kind(their_config(**changes)).double().eval()
    for weight in their.parameters():
        torch.nn.init.normal_(weight, std=0.4)
    their.save_pretrained(folder)
    return their, ours.from_pretrained(folder)


def batch(rows=3, tokens=11):
    generator = torch.Generator().manual_seed(2)
    ids = torch.randint(1, 40, (rows, tokens), generator=generator)  # 0 is padding, which learns nothing there
    types = torch.randint(0, 2, (rows, tokens), generator=generator)
    keep = torch.arange(tokens) < torch.tensor([tokens, 7, 1])[:rows, None]
    return ids, types, keep


def close(got, wanted, bound=DOUBLE):
    torch.testing.assert_close(got, wanted, atol=bound * max(1.0, float(wanted.detach().abs().max())), rtol=0)


def same_gradients(their, ours):
    published = type(ours).file_names(ours.config, {name: weight.grad for name, weight in ours.named_parameters()})
    wanted = {
        name.replace("decoder.bias", "bias"): weight.grad  # two names of theirs for one
        for name, weight in their.named_parameters()
        if weight.grad is not None
    }
    assert set(published) == set(wanted)
    for name, grad in wanted.items():
        close(published[name], grad)


def test_bert_model(tmp_path):
    their, ours = pair(transformers.BertModel, Bert, tmp_path)
    ids, types, keep = batch()
    wanted = their(ids, attention_mask=keep.long(), token_type_ids=types, output_attentions=True)
    got = ours(ids, keep, token_types=types, return_aux=AuxRequest(weights=True))
    close(got.hidden[keep], wanted.last_hidden_state[keep])
    close(got.pooled, wanted.pooler_output)
    for seen, weights in zip(got.aux, wanted.attentions, strict=True):
        rows = keep[:, None, :, None].expand_as(weights)
        close(seen.weights[rows], weights[rows])
    pull = torch.randn_like(got.hidden) * keep[..., None]
    ((wanted.last_hidden_state * pull).sum() + wanted.pooler_output.sum()).backward()
    ((got.hidden * pull).sum() + got.pooled.sum()).backward()
    same_gradients(their, ours)


def test_bert_for_masked_lm(tmp_path):
    their, ours = pair(transformers.BertForMaskedLM, BertForMaskedLM, tmp_path)
    ids, types, keep = batch()
    labels = ids.masked_fill(~keep | (torch.arange(11) % 3 > 0), -100)
    wanted = their(ids, attention_mask=keep.long(), token_type_ids=types, labels=labels)
    got = ours(ids, keep, token_types=types, labels=labels)
    close(got.logits[keep], wanted.logits[keep])
    close(got.loss, wanted.loss)
    wanted.loss.backward()
    got.loss.backward()
    same_gradients(their, ours)


@pytest.mark.parametrize(
    "kind, own", [("BertModel", Bert), ("BertForMaskedLM", BertForMaskedLM)], ids=["encoder", "masked"]
)
def test_transformers_reads_what_we_save(kind, own, tmp_path):
    their, ours = pair(getattr(transformers, kind), own, tmp_path / "theirs")
    ours.save_pretrained(tmp_path / "ours")
    again, told = getattr(transformers, kind).from_pretrained(tmp_path / "ours", output_loading_info=True)
    assert not any(told.values()), told
    assert again.config.hidden_dropout_prob == 0.1
    assert again.config.architectures == [kind]
    ids, _, _ = batch()
    close(again(ids)[0], their(ids)[0])


def test_a_file_with_other_heads_gives_its_encoder(tmp_path):
    their, ours = pair(transformers.BertForPreTraining, Bert, tmp_path)
    masked = BertForMaskedLM.from_pretrained(tmp_path)
    ids, _, _ = batch()
    wanted = their(ids)
    close(ours(ids).hidden, their.bert(ids).last_hidden_state)
    close(masked(ids).logits, wanted.prediction_logits)
