"""The vision transformer against a dense model written here, local attention included, and against transformers."""

from __future__ import annotations

import json
import math

import pytest
import torch
from torch.nn import functional as F

from qkv.errors import CheckpointError, DTypeError, ShapeError, UnknownName, ValueOutOfRange
from qkv.models.vit import ViT, ViTConfig, ViTForImageClassification
from qkv.types import AuxRequest

DOUBLE = 1e-11  # float64, gradients that pass through three layers included
SMALL = {
    "image": (16, 24), "patch": (4, 4), "channels": 2, "layers": 3, "heads": 2, "width": 8, "feedforward": 12,
    "kernel": 3, "window": 2,
}  # fmt: skip
REACHES = ("full", "neighborhood", "windows")


def model(kind=ViT, **changes):
    torch.manual_seed(0)
    made = kind(ViTConfig(**{**SMALL, **changes})).double().eval()
    for weight in made.parameters():  # larger than the trained spread, so that no layer is close to the identity
        torch.nn.init.normal_(weight, std=0.4)
    return made


def images(rows=2, sizes=(16, 24), channels=2):
    return torch.randn(rows, channels, *sizes, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def close(got, wanted, bound=DOUBLE):
    torch.testing.assert_close(got, wanted, atol=bound * max(1.0, float(wanted.detach().abs().max())), rtol=0)


def seen(config, layer, h, w):
    """Who sees whom, (1 + h·w, 1 + h·w) bool, pair by pair and from the definitions."""
    keep = torch.ones(1 + h * w, 1 + h * w, dtype=torch.bool)
    for i in range(h * w):
        for j in range(h * w):
            keep[1 + i, 1 + j] = together(config, layer, (i // w, i % w), (j // w, j % w), (h, w))
    return keep


def together(config, layer, one, other, grid):
    if config.attention == "full":
        return True
    if config.attention == "neighborhood":  # kernel rows and columns around one's own, moved inward at the borders
        first = [min(max(at - config.kernel // 2, 0), size - config.kernel) for at, size in zip(one, grid, strict=True)]
        return all(start <= at < start + config.kernel for start, at in zip(first, other, strict=True))
    shift = config.window // 2 if layer % 2 else 0
    tiles = [[(at - shift) // config.window for at in place] for place in (one, other)]  # what borders cut stays apart
    return tiles[0] == tiles[1]


def plain(w, config, pixels):
    """The encoder in the fewest words: dense masked softmax, the class token first."""

    def linear(name, x):
        return x @ w[f"{name}.weight"].T + w[f"{name}.bias"]

    def norm(name, x):
        return F.layer_norm(x, (config.width,), w[f"{name}.weight"], w[f"{name}.bias"], config.norm_epsilon)

    B, C, (p, q) = pixels.shape[0], config.channels, config.patch
    h, wide = config.grid(*pixels.shape[2:])
    cut = pixels.reshape(B, C, h, p, wide, q).permute(0, 2, 4, 1, 3, 5).reshape(B, h * wide, C * p * q)
    kernel = w["embeddings.patch_embeddings.projection.weight"].reshape(config.width, -1)
    patches = cut @ kernel.T + w["embeddings.patch_embeddings.projection.bias"]
    x = torch.cat([w["embeddings.cls_token"].expand(B, 1, -1), patches], 1) + w["embeddings.position_embeddings"]
    D = config.width // config.heads
    for n in range(config.layers):
        at, keep = f"encoder.layer.{n}", seen(config, n, h, wide)
        read = norm(f"{at}.layernorm_before", x)
        parts = (linear(f"{at}.attention.attention.{name}", read) for name in ("query", "key", "value"))
        query, key, value = (part.unflatten(-1, (config.heads, D)).transpose(1, 2) for part in parts)
        scores = (query @ key.mT / math.sqrt(D)).masked_fill(~keep, -math.inf)
        x = x + linear(f"{at}.attention.output.dense", (scores.softmax(-1) @ value).transpose(1, 2).flatten(2))
        wider = F.gelu(linear(f"{at}.intermediate.dense", norm(f"{at}.layernorm_after", x)))
        x = x + linear(f"{at}.output.dense", wider)
    return norm("layernorm", x)


@pytest.mark.parametrize("reach", REACHES)
def test_each_reach_agrees_with_a_dense_model(reach):
    ours = model(attention=reach)
    published = {
        name: weight.detach().requires_grad_() for name, weight in ViT.file_names(None, ours.state_dict()).items()
    }
    pixels = images().requires_grad_()
    got, wanted = ours(pixels), plain(published, ours.config, pixels)
    close(got.hidden, wanted)
    close(got.pooled, torch.tanh(wanted[:, 0] @ published["pooler.dense.weight"].T + published["pooler.dense.bias"]))
    pull = torch.randn(got.hidden.shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    learnt = {name: weight for name, weight in published.items() if not name.startswith("pooler.")}
    slopes = torch.autograd.grad((wanted * pull).sum(), [pixels, *learnt.values()])
    (got.hidden * pull).sum().backward()
    close(pixels.grad, slopes[0])
    ours.pooler.zero_grad()
    named = ViT.file_names(None, {name: weight.grad for name, weight in ours.named_parameters()})
    for name, slope in zip(learnt, slopes[1:], strict=True):
        close(named[name], slope)


@pytest.mark.parametrize("reach", ["neighborhood", "windows"])
def test_looking_at_weights_changes_nothing(reach):
    ours = model(attention=reach)
    out = ours(images(), return_aux=AuxRequest(weights=True, lse=True))
    close(out.hidden, ours(images()).hidden)
    assert ours(images()).aux is None
    for n, of_layer in enumerate(out.aux):
        keep = seen(ours.config, n, 4, 6)
        assert torch.equal(of_layer.weights > 0, keep.expand_as(of_layer.weights))
        close(of_layer.weights.sum(-1), torch.ones(2, 2, 25, dtype=torch.float64))


def test_windows_of_every_second_layer_are_shifted():
    ours = model(attention="windows")
    grids = [ours.config.reach((4, 6), n) for n in range(3)]
    assert grids[0] == grids[2] != grids[1]
    assert "shift=1" in str(grids[1])
    assert "shift" not in str(ours.config.reach((2, 4), 1)), "one window is as high as the grid"


def test_images_of_another_size_take_positions_between():
    ours = model(attention="neighborhood")
    larger = images(sizes=(20, 32))
    table = ours.embeddings.position_embeddings.detach()
    between = F.interpolate(table[:, 1:].mT.unflatten(2, (4, 6)), size=(5, 8), mode="bicubic").flatten(2).mT
    published = dict(ViT.file_names(None, ours.state_dict()))
    published["embeddings.position_embeddings"] = torch.cat([table[:, :1], between], 1)
    close(ours(larger, interpolate=True).hidden, plain(published, ours.config, larger))
    close(ours(images(), interpolate=True).hidden, ours(images()).hidden)


@pytest.mark.parametrize("place", ["embedding_dropout", "attention_dropout", "feedforward_dropout", "residual_dropout"])
@pytest.mark.parametrize("reach", ["full", "windows"])
def test_dropout_works_in_training_only(place, reach):
    ours = model(attention=reach, **{place: 0.5})
    assert torch.equal(ours(images()).hidden, ours(images()).hidden)
    ours.train()
    assert not torch.equal(ours(images()).hidden, ours(images()).hidden)


@pytest.mark.parametrize("silent", ["o_proj", "down_proj"])
def test_residual_dropout_acts_on_what_each_sublayer_adds(silent):
    ours = model(layers=1, residual_dropout=0.5).train()
    for name, weight in ours.named_parameters():
        if silent in name:
            torch.nn.init.zeros_(weight)
    assert not torch.equal(ours(images()).hidden, ours(images()).hidden)


def test_classes_are_scored_from_the_class_token():
    ours = model(ViTForImageClassification, classes=("cat", "dog", "tree"), attention="windows")
    labels = torch.tensor([2, 0])
    out = ours(images(), labels=labels)
    close(out.logits, ours.classifier(ours.vit(images()).hidden[:, 0]))
    close(out.loss, F.cross_entropy(out.logits, labels))
    with pytest.raises(ValueOutOfRange, match=r"`labels` must lie in 0 .. 2"):
        ours(images(), labels=labels + 1)


@pytest.mark.parametrize("reach", REACHES)
@pytest.mark.parametrize("kind", [ViT, ViTForImageClassification], ids=["encoder", "classes"])
def test_what_is_saved_comes_back_whole(kind, reach, tmp_path):
    ours = model(kind, attention=reach, classes=("cat", "dog", "tree"), residual_dropout=0.1, embedding_dropout=0.2)
    ours.save_pretrained(tmp_path)
    again = kind.from_pretrained(tmp_path)
    assert again.config == ours.config
    close(again(images())[0], ours(images())[0])
    told = json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))
    assert told["model_type"] == ("vit" if reach == "full" else "qkv_vit")
    assert told["id2label"]["1"] == "dog"


def test_an_encoder_is_read_out_of_a_file_with_classes(tmp_path):
    ours = model(ViTForImageClassification)
    ours.save_pretrained(tmp_path)
    close(ViT.from_pretrained(tmp_path)(images()).hidden, ours(images()).hidden)


@pytest.mark.parametrize(
    "changes, error, text",
    [
        ({"heads": 3}, ValueOutOfRange, "`width` must be a multiple of `heads` = 3; got 8"),
        ({"image": (16, 0)}, ValueOutOfRange, r"`image` must be a height and a width of at least 1; got \(16, 0\)"),
        ({"image": (16, 22)}, ShapeError, "whole patches of 4 by 4; got 16 by 22; crop, pad or resize"),
        ({"attention": "local"}, UnknownName, "`attention` must be one of full, neighborhood, windows; got 'local'"),
        ({"attention": "windows", "window": 4}, ShapeError, "whole windows of 4 by 4; got 4 by 6; choose a window"),
        ({"attention": "neighborhood", "kernel": 5}, ValueOutOfRange, "`kernel` must fit into the image; got 5"),
        ({"residual_dropout": 1.0}, ValueOutOfRange, r"`residual_dropout` must lie in \[0, 1\)"),
    ],
)
def test_config_refuses_what_cannot_be(changes, error, text):
    with pytest.raises(error, match=text):
        ViTConfig(**{**SMALL, **changes})


@pytest.mark.parametrize(
    "pixels, options, error, text",
    [
        ([[1.0]], {}, DTypeError, "`pixels` must be a floating-point tensor; got list"),
        (torch.zeros(1, 2, 16, 24).long(), {}, DTypeError, "got torch.int64; scale the image to floats"),
        (torch.zeros(2, 16, 24), {}, ShapeError, r"must be \(B, C, height, width\) with C = 2; got \(2, 16, 24\)"),
        (torch.zeros(1, 3, 16, 24), {}, ShapeError, r"with C = 2; got \(1, 3, 16, 24\)"),
        (
            torch.zeros(1, 2, 16, 16),
            {},
            ShapeError,
            "images of 16 by 24; got 16 by 16; resize them, or say interpolate",
        ),
        (torch.zeros(1, 2, 16, 18), {"interpolate": True}, ShapeError, "whole patches of 4 by 4; got 16 by 18"),
        (torch.zeros(1, 2, 16, 20), {"interpolate": True}, ShapeError, "whole windows of 2 by 2; got 4 by 5"),
    ],
)
def test_forward_refuses_what_are_no_images(pixels, options, error, text):
    with pytest.raises(error, match=text):
        model(attention="windows")(pixels, **options)


FIELDS = {
    "model_type": "vit", "image_size": 8, "patch_size": 4, "num_channels": 2, "num_hidden_layers": 1,
    "num_attention_heads": 2, "hidden_size": 8, "intermediate_size": 12,
}  # fmt: skip


@pytest.mark.parametrize(
    "change, text",
    [
        ({"model_type": "bert"}, "`model_type` in 'config.json' must be 'vit' or 'qkv_vit'; got 'bert'"),
        ({"image_size": [8, 8, 8]}, "`image_size` in 'config.json' must be one integer or two"),
        ({"patch_size": 3}, "whole patches of 3 by 3; got 8 by 8"),
        ({"id2label": {"1": "cat"}}, "`id2label` in 'config.json' must be an object with the names of the classes"),
        ({"pooler_output_size": 4}, "`pooler_output_size` in 'config.json' must be 8; got 4"),
        ({"model_type": "qkv_vit"}, "`attention` in 'config.json' must be given"),
    ],
)
def test_a_config_of_something_else_is_refused(change, text, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(FIELDS | change), encoding="utf-8")
    with pytest.raises(CheckpointError, match=text):
        ViT.from_pretrained(tmp_path)


def their_pair(name, folder):
    transformers = pytest.importorskip("transformers", reason="needs transformers, which is not installed")
    torch.manual_seed(0)
    config = transformers.ViTConfig(
        hidden_size=12, num_hidden_layers=3, num_attention_heads=3, intermediate_size=20, image_size=16, patch_size=4,
        num_channels=2, num_labels=5, attn_implementation="sdpa",  # eager takes its softmax in float32
    )  # fmt: skip
    their = getattr(transformers, name)(config).double().eval()
    for weight in their.parameters():
        torch.nn.init.normal_(weight, std=0.3)
    their.save_pretrained(folder)
    return their, {"ViTModel": ViT, "ViTForImageClassification": ViTForImageClassification}[name].from_pretrained(
        folder
    )


@pytest.mark.parametrize("name", ["ViTModel", "ViTForImageClassification"])
def test_transformers_agrees(name, tmp_path):
    their, ours = their_pair(name, tmp_path / "theirs")
    pixels = images(sizes=(16, 16))
    if name == "ViTModel":
        wanted, got = their(pixels), ours(pixels)
        close(got.hidden, wanted.last_hidden_state)
        close(got.pooled, wanted.pooler_output)
        loss, want = got.hidden.square().sum() + got.pooled.sum(), wanted[0].square().sum() + wanted[1].sum()
    else:
        labels = torch.tensor([4, 1])
        wanted, got = their(pixels, labels=labels), ours(pixels, labels=labels)
        close(got.logits, wanted.logits)
        loss, want = got.loss, wanted.loss
    close(loss, want)
    loss.backward()
    want.backward()
    published = type(ours).own_names(ours.config, {place: weight.grad for place, weight in their.named_parameters()})
    for place, weight in ours.named_parameters():
        close(weight.grad, published[place])


@pytest.mark.parametrize("name", ["ViTModel", "ViTForImageClassification"])
def test_transformers_reads_what_we_save(name, tmp_path):
    their, ours = their_pair(name, tmp_path / "theirs")
    ours.save_pretrained(tmp_path / "ours")
    again, told = type(their).from_pretrained(tmp_path / "ours", output_loading_info=True)
    assert not any(told.values()), told
    assert again.config.architectures == [name]
    pixels = images(sizes=(24, 16))
    wanted, got = again(pixels, interpolate_pos_encoding=True), ours(pixels, interpolate=True)
    close(got[0] if name == "ViTModel" else got.logits, wanted[0])
