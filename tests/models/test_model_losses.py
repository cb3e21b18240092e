"""What counts in the loss of a model: real labels, each alike, however a row is padded."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from probes import loss_ignores_pads
from qkv.models.bert import BertForMaskedLM
from qkv.models.gpt import GPT
from qkv.models.hybrid import Hybrid
from qkv.models.llama import Llama
from qkv.models.output import IGNORED, next_token_loss, token_loss
from qkv.models.t5 import T5
from qkv.models.vit import ViTForImageClassification
from small_models import BERT, GPT_2, HYBRID, LLAMA, T5_SMALL, VIT, WORDS, lively
from subjects import apart, seeded


def of_target(model, ids, keep, labels):
    """The loss of a T5 whose source stays the same."""
    source = torch.arange(9).expand(len(ids), -1)
    return model(source, labels=labels, decoder_ids=ids, decoder_mask=keep).loss


def of_source(model, ids, keep, labels):
    """The loss of a T5 over one target, by what the source says; it does not count the labels given."""
    return model(ids, keep, labels=torch.arange(1, 6).expand(len(ids), -1)).loss


def of_own(model, ids, keep, labels):
    return model(ids, keep, labels=labels).loss


# model, config, its loss, and how many labels count in a row of n tokens.
LOSSES = {
    "masked words": (BertForMaskedLM, BERT, of_own, lambda n: n),
    "gpt": (GPT, GPT_2, of_own, lambda n: n - 1),
    "llama": (Llama, LLAMA, of_own, lambda n: n - 1),
    "hybrid": (Hybrid, HYBRID, of_own, lambda n: n - 1),
    "t5, target": (T5, T5_SMALL, of_target, lambda n: n),
    "t5, source": (T5, T5_SMALL, of_source, lambda n: 5),
}
KEEPS = {
    "right": torch.arange(8) < torch.tensor([[8], [5], [3]]),
    "left": torch.arange(8) >= torch.tensor([[0], [3], [5]]),
    "holes": torch.tensor([[1, 0, 1, 1, 1, 0, 1, 1], [0, 1, 1, 0, 0, 1, 1, 0], [1, 1, 1, 1, 1, 1, 0, 1]]) == 1,
}


def loss_and_gradients(model, loss, *given) -> list[Tensor]:
    found = loss(model, *given)
    asked = [weight for weight in model.parameters() if weight.requires_grad]
    return [found.detach()[None], *torch.autograd.grad(found, asked, materialize_grads=True, allow_unused=True)]


def assert_same(got: list[Tensor], want: list[Tensor], told: str) -> None:
    for one, other in zip(got, want, strict=True):
        assert apart(one, other) < 1e-9, told


@pytest.mark.parametrize("side", KEEPS)
@pytest.mark.parametrize("name", LOSSES)
def test_padding_does_not_count_in_the_loss(name, side):
    """Not by its tokens or labels, not by how much there is: the loss is the mean over the real labels, rows alone."""
    kind, config, loss, counted = LOSSES[name]
    model = lively(kind, config)
    keep = KEEPS[side]
    with seeded(1):
        ids, others = torch.randint(WORDS, (3, 8)), torch.randint(WORDS, (3, 8))
    want = loss_and_gradients(model, loss, ids, keep, ids)
    changed, marked = torch.where(keep, ids, others), ids.masked_fill(~keep, IGNORED)
    assert_same(loss_and_gradients(model, loss, ids, keep, changed), want, "labels of padding must not count")
    assert_same(loss_and_gradients(model, loss, changed, keep, ids), want, "tokens of padding must not count")
    assert_same(loss_and_gradients(model, loss, ids, keep, marked), want, "what padding is labelled must not count")
    for before, after in ((0, 4), (4, 0), (1, 2)):
        longer = [nn.functional.pad(t, (before, after), value=value) for t, value in ((ids, 7), (keep, False))]
        told = f"{before} more places before and {after} behind must not count"
        assert_same(loss_and_gradients(model, loss, *longer, longer[0]), want, told)
    alone = []
    for row, kept in zip(ids, keep, strict=True):
        words = row[kept][None]
        alone += [loss(model, words, None, words).detach()] * counted(words.shape[1])
    assert_same([torch.stack(alone).mean()[None]], want[:1], "each real label must count alike")


def test_padding_does_not_count_in_losses_of_tokens():
    loss_ignores_pads(next_token_loss)
    loss_ignores_pads(lambda logits, labels, keep: token_loss(logits, labels.masked_fill(~keep, IGNORED)))


def test_an_image_without_a_class_does_not_count():
    model = lively(ViTForImageClassification, VIT)
    with seeded(1):
        pixels = torch.randn(3, 3, 8, 12, dtype=torch.float64)
    want = model(pixels[[0, 2]], labels=torch.tensor([4, 1])).loss
    torch.testing.assert_close(model(pixels, labels=torch.tensor([4, IGNORED, 1])).loss, want, rtol=1e-12, atol=0)
