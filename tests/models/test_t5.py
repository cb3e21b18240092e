"""T5 against transformers in float64 and float32: outputs, losses, gradients, padding, decoding, files; dropouts, first
weights, refusals.
"""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn import functional as F

from probes import check
from qkv.errors import CheckpointError, DTypeError, PatternSyntaxError, ShapeError, UnknownName, ValueOutOfRange
from qkv.models.files.config_file import Fields
from qkv.models.t5 import T5, T5Config
from qkv.nn.stack_state import StackState
from qkv.patterns import window
from qkv.types import AuxRequest
from subjects import Subject, numbers

transformers = pytest.importorskip("transformers")
modeling = pytest.importorskip("transformers.models.t5.modeling_t5")

DOUBLE = 1e-12  # parts of the largest number: float64 results of the same products in another order
VOCABULARY, START = 53, 3
SIZES = {
    "vocab_size": VOCABULARY,
    "d_model": 20,
    "d_kv": 6,
    "d_ff": 28,
    "num_layers": 3,
    "num_decoder_layers": 2,
    "num_heads": 4,
    "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 12,
    "decoder_start_token_id": START,
    "eos_token_id": 1,
    "pad_token_id": 0,
    "attn_implementation": "eager",
}
V1_1 = {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}
MODELS = {
    "1.0": {},
    "1.1": V1_1,
    "1.1, the embedding as head": V1_1,
    "gated silu, wide norms": {"feed_forward_proj": "gated-silu", "layer_norm_epsilon": 0.1, "num_heads": 1},
}
DROPOUTS = ("embedding_dropout", "attention_dropout", "feedforward_dropout", "residual_dropout")
SMALL = T5Config(
    vocabulary=VOCABULARY, layers=2, heads=2, head_dim=5, width=12, feedforward=16, buckets=8, max_distance=12,
    start_id=START, **dict.fromkeys(DROPOUTS, 0.0),
)  # fmt: skip


class Doubles:
    """torch, in which float32 means float64: transformers takes the mean squares of its norms in float32 by name."""

    float32 = torch.float64

    def __getattr__(self, name):
        return getattr(torch, name)


@pytest.fixture(autouse=True)
def _doubles(monkeypatch):
    monkeypatch.setattr(modeling, "torch", Doubles())


def random_weights(model):
    for name, weight in model.named_parameters():
        torch.nn.init.normal_(weight, mean=float("norm" in name), std=0.3)
    return model


def theirs_of(name, changes=None, seed=0):
    torch.manual_seed(seed)
    config = transformers.T5Config(**SIZES | MODELS[name] | (changes or {}))
    model = transformers.T5ForConditionalGeneration(config)
    if name == "1.1":  # transformers ties a new one, but not one whose file has two matrices
        model.lm_head.weight = torch.nn.Parameter(torch.zeros(VOCABULARY, SIZES["d_model"]))
    return random_weights(model.double().eval())


@pytest.fixture(params=MODELS)
def pair(request, tmp_path):
    """A random model of transformers, and ours as its files give it."""
    theirs = theirs_of(request.param, seed=len(request.param))
    theirs.save_pretrained(tmp_path / "theirs")
    return theirs, T5.from_pretrained(tmp_path / "theirs")


@pytest.fixture
def small():
    torch.manual_seed(1)
    return random_weights(T5(SMALL).double().eval())


def some_ids(rows=3, tokens=19, seed=3):
    return torch.randint(2, VOCABULARY, (rows, tokens), generator=torch.Generator().manual_seed(seed))


def padded(tokens=19, seed=3):
    """Four rows: whole, padded on the left, on the right, and with holes."""
    keep = torch.ones(4, tokens, dtype=torch.int64)
    keep[1, :4] = keep[2, 6:] = keep[3, [0, 4, 5, tokens - 1]] = 0
    return some_ids(4, tokens, seed), keep


def apart(ours, theirs):
    ours, theirs = ours.detach(), theirs.detach()
    return float((ours.double() - theirs.double()).abs().max()) / max(1.0, float(theirs.abs().max()))


def close(ours, theirs, bound=DOUBLE):
    assert ours.shape == theirs.shape
    assert apart(ours, theirs) <= bound


def test_outputs_loss_and_gradients(pair):
    theirs, ours = pair
    ids, labels = some_ids(), some_ids(tokens=15, seed=4)
    labels[0, 9] = labels[2, 5:] = -100
    expected = theirs(ids, labels=labels, output_hidden_states=True)
    found = ours(ids, labels=labels)
    close(found.encoder_hidden, expected.encoder_last_hidden_state)
    close(found.hidden, expected.decoder_hidden_states[-1])
    close(found.logits, expected.logits)
    close(found.loss, expected.loss)
    expected.loss.backward()
    found.loss.backward()
    grads = ours.file_names(ours.config, {name: weight.grad for name, weight in ours.named_parameters()})
    by_name = {name: weight.grad for name, weight in theirs.named_parameters()}
    assert grads.keys() == by_name.keys()
    for name, grad in grads.items():
        close(grad, by_name[name])


def test_float32_is_as_near_to_float64_as_transformers_is(pair, monkeypatch):
    """Both round each product once in another order: the one error bounds the other up to a small factor."""
    theirs, ours = pair
    ids, target = some_ids(8, 40), some_ids(8, 30, seed=4)
    exact = theirs(ids, decoder_input_ids=target).logits
    monkeypatch.setattr(modeling, "torch", torch)
    rounded = apart(theirs.float()(ids, decoder_input_ids=target).logits, exact)
    bound = 4 * max(rounded, torch.finfo(torch.float32).eps)
    close(ours.float()(ids, decoder_ids=target).logits, exact, bound)


def test_padding_of_the_source_changes_nothing(pair):
    theirs, ours = pair
    ids, keep = padded()
    labels = some_ids(4, 15, seed=4)
    found = ours(ids, keep, labels=labels)
    for row, real in enumerate(keep.bool()):
        alone = theirs(ids[row : row + 1, real], labels=labels[row : row + 1])
        close(found.logits[row], alone.logits[0])
        close(found.encoder_hidden[row, real], alone.encoder_last_hidden_state[0])
        assert not found.encoder_hidden[row, ~real].any()


def test_padding_of_the_target_changes_nothing(pair):
    """Wherever it stands: the first real token is predicted from `start_id`."""
    theirs, ours = pair
    ids = some_ids(4)
    labels, keep = padded(15, seed=4)
    found = ours(ids, labels=labels, decoder_mask=keep)
    total = 0.0
    for row, real in enumerate(keep.bool()):
        alone = theirs(ids[row : row + 1], labels=labels[row : row + 1, real])
        close(found.logits[row, real], alone.logits[0])
        total += alone.loss * real.sum()
    close(found.loss, total / keep.sum())
    hidden = ours(ids, labels=labels.masked_fill(keep == 0, -100), decoder_mask=keep)
    assert torch.equal(hidden.loss, found.loss)


def test_weights_are_those_of_transformers(pair):
    theirs, ours = pair
    ids, labels = some_ids(), some_ids(tokens=15, seed=4)
    expected = theirs(ids, labels=labels, output_attentions=True)
    found = ours(ids, labels=labels, return_aux=AuxRequest(weights=True))
    for aux, attentions in (
        (found.encoder_aux, expected.encoder_attentions),
        (found.aux, expected.decoder_attentions),
        (found.cross_aux, expected.cross_attentions),
    ):
        assert len(aux) == len(attentions)
        for of_layer, weights in zip(aux, attentions, strict=True):
            close(of_layer.weights, weights)


def test_weights_of_padded_rows_stand_where_the_tokens_do(small):
    ids, keep = padded()
    labels, kept = padded(15, seed=4)
    everything = AuxRequest(weights=True)
    found = small(ids, keep, labels=labels, decoder_mask=kept, return_aux=everything)
    for row, (real, here) in enumerate(zip(keep.bool(), kept.bool(), strict=True)):
        alone = small(ids[row : row + 1, real], labels=labels[row : row + 1, here], return_aux=everything)
        for name, queries, keys in (("encoder_aux", real, real), ("aux", here, here), ("cross_aux", here, real)):
            for aux, expected in zip(getattr(found, name), getattr(alone, name), strict=True):
                close(aux.weights[row][:, queries][:, :, keys], expected.weights[0])
                assert not aux.weights[row][:, ~queries].any()
                assert not aux.weights[row][:, :, ~keys].any()


@torch.no_grad()
def test_decoding_with_a_state_is_the_whole_pass(pair):
    _, ours = pair
    ids, keep = padded()
    target = some_ids(4, 33, seed=5)  # farther than the distances that have a bucket of their own
    everything = AuxRequest(weights=True)
    memory = ours.encode(ids, keep)
    expected = ours.decode(target, memory=memory, return_aux=everything)
    state = ours.initial_state(4, 40, memory)
    found = [ours.decode(target[:, :20], state=state).logits]
    found += [ours.decode(target[:, n : n + 1], state=state).logits for n in range(20, 31)]
    last = ours.decode(target[:, 31:], state=state, return_aux=everything)
    close(torch.cat([*found, last.logits], 1), expected.logits)
    for name in ("aux", "cross_aux"):
        for aux, wanted in zip(getattr(last, name), getattr(expected, name), strict=True):
            close(aux.weights, wanted.weights[:, :, 31:])
    assert state.lengths == (33,) * 4
    state.reorder([2, 0])
    state.truncate(20)
    close(ours.decode(target[[2, 0], 20:], state=state).logits, expected.logits[[2, 0], 20:])


@torch.no_grad()
def test_the_source_is_read_once(small, monkeypatch):
    passes, projected = [], []
    encode, keys_of = T5.encode, type(small.decoder.layers[0].cross).keys_of
    monkeypatch.setattr(T5, "encode", lambda *args, **options: (passes.append(1), encode(*args, **options))[1])
    monkeypatch.setattr(
        type(small.decoder.layers[0].cross),
        "keys_of",
        lambda *args, **options: (projected.append(1), keys_of(*args, **options))[1],
    )
    assert small.generate(some_ids(2), 12, stop=()).shape == (2, 12)
    assert (len(passes), len(projected)) == (1, SMALL.layers)


def test_greedy_tokens_are_those_of_transformers(pair):
    theirs, ours = pair
    ids, keep = padded()
    ids, keep = ids[:3], keep[:3]
    expected = theirs.generate(ids, attention_mask=keep, max_new_tokens=25, do_sample=False)
    found = ours.generate(ids, 25, attention_mask=keep)
    assert torch.equal(found, expected[:, 1:])
    streamed = ours.stream(ids, 25, attention_mask=keep)
    assert torch.equal(torch.stack(list(streamed), 1), found)
    alone = ours.generate(ids[1:2, 4:], 25)
    assert torch.equal(found[1:2, : alone.shape[1]], alone)


def test_rows_end_where_they_end_alone(small):
    """A token that some rows say early ends them; the others go on over their own source."""
    ids, keep = padded()
    free = small.generate(ids, 25, attention_mask=keep, stop=())
    stop = int(free[0, 3])
    found = small.generate(ids, 25, attention_mask=keep, stop=stop)
    for row, tokens in zip(free.tolist(), found.tolist(), strict=True):
        end = row.index(stop) + 1 if stop in row else len(row)
        assert tokens == row[:end] + [SMALL.pad_id] * (len(tokens) - end)


def test_sharded_files_of_transformers(tmp_path):
    theirs = theirs_of("1.1")
    theirs.save_pretrained(tmp_path, max_shard_size="9KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 3
    ids, labels = some_ids(), some_ids(tokens=15, seed=4)
    close(T5.from_pretrained(tmp_path)(ids, labels=labels).logits, theirs(ids, labels=labels).logits)


@pytest.mark.parametrize("most", [None, 9000])
def test_files_of_ours_are_read_by_transformers(pair, tmp_path, most):
    theirs, ours = pair
    ours.save_pretrained(tmp_path / "ours", max_shard_bytes=most)
    assert (len(list((tmp_path / "ours").glob("*.safetensors"))) > 3) == (most is not None)
    again, told = transformers.T5ForConditionalGeneration.from_pretrained(
        tmp_path / "ours", dtype=torch.float64, attn_implementation="eager", output_loading_info=True
    )
    assert not any(told[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    ids, labels = some_ids(), some_ids(tokens=15, seed=4)
    assert torch.equal(again(ids, labels=labels).logits, theirs(ids, labels=labels).logits)
    for name in ("decoder_start_token_id", "eos_token_id", "pad_token_id", "dropout_rate", "scale_decoder_outputs"):
        assert getattr(again.config, name) == getattr(theirs.config, name)
    assert T5.from_pretrained(tmp_path / "ours").config == ours.config


def rewritten(folder, change):
    file = folder / "model.safetensors"
    tensors = change(load_file(file))
    save_file({name: tensor.clone() for name, tensor in tensors.items()}, file)


def first_files(tensors):
    """The embeddings three times, and a table of distances that no model reads."""
    copies = dict.fromkeys(
        ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight", "lm_head.weight"), tensors["shared.weight"]
    )
    unread = "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight"
    return tensors | copies | {unread: torch.ones(8, 4).double()}


def one_copy(tensors):
    tensors = first_files(tensors)
    for name in ("shared.weight", "encoder.embed_tokens.weight"):
        del tensors[name]
    return tensors


@pytest.mark.parametrize("change", [first_files, one_copy])
def test_files_of_other_writers(tmp_path, change):
    theirs = theirs_of("1.0")
    theirs.save_pretrained(tmp_path)
    rewritten(tmp_path, change)
    ids, labels = some_ids(), some_ids(tokens=15, seed=4)
    close(T5.from_pretrained(tmp_path)(ids, labels=labels).logits, theirs(ids, labels=labels).logits)


def other_head(tensors):
    return tensors | {"lm_head.weight": 2 * tensors["shared.weight"]}


def other_embedding(tensors):
    return tensors | {"decoder.embed_tokens.weight": 2 * tensors["shared.weight"]}


def cut(tensors):
    name = "decoder.block.1.layer.1.EncDecAttention.k.weight"
    return tensors | {name: tensors[name][:-1]}


def gone(tensors):
    del tensors["encoder.block.2.layer.1.DenseReluDense.wi.weight"]
    return tensors


@pytest.mark.parametrize(
    "change, text",
    [
        (other_head, r"model\.safetensors.*`lm_head.weight` must equal `shared.weight`, which it is by the config"),
        (other_embedding, r"model\.safetensors.*`decoder.embed_tokens.weight` must equal `shared.weight`"),
        (
            cut,
            r"model\.safetensors.*decoder\.block\.1\.layer\.1\.EncDecAttention\.k\.weight.*\(24, 20\).*got \(23, 20\)",
        ),
        (gone, r"model\.safetensors.*missing: .encoder\.block\.2\.layer\.1\.DenseReluDense\.wi\.weight"),
    ],
)
def test_files_that_are_none_are_refused_by_name(tmp_path, change, text):
    theirs_of("1.0").save_pretrained(tmp_path)
    rewritten(tmp_path, change)
    with pytest.raises(CheckpointError, match=text):
        T5.from_pretrained(tmp_path)


@pytest.mark.parametrize(
    "changes, text",
    [
        ({"model_type": "longt5"}, "`model_type` in .*config.json.* must be 't5' or 'qkv_t5'"),
        ({"feed_forward_proj": "gated-mish"}, "`feed_forward_proj` in .*config.json.* must be 'relu' or 'gated-relu'"),
        ({"d_kv": 0}, "config.json.*`head_dim` must be at least 1; got 0"),
        ({"relative_attention_num_buckets": 9}, "config.json.*`buckets` must be even"),
    ],
)
def test_configs_of_something_else_are_refused(tmp_path, changes, text):
    theirs_of("1.0").save_pretrained(tmp_path)
    config = tmp_path / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | changes))
    with pytest.raises(CheckpointError, match=text):
        T5.from_pretrained(tmp_path)


def test_config_takes_what_transformers_takes_where_a_file_is_silent(tmp_path):
    needed = {name: SIZES[name] for name in ("vocab_size", "d_model", "d_kv", "d_ff", "num_layers", "num_heads")}
    fields = {"model_type": "t5", **needed}
    read = T5Config.from_fields(Fields(tmp_path / "config.json", fields))
    sizes = {"vocabulary": VOCABULARY, "width": 20, "head_dim": 6, "feedforward": 28, "layers": 3, "heads": 4}
    assert read == T5Config(**sizes, end_ids=())
    read = T5Config.from_fields(Fields(tmp_path / "config.json", fields | {"tie_word_embeddings": False}))
    assert not read.scaled_head


def test_the_one_rate_of_dropout_acts_in_all_places(tmp_path):
    theirs_of("1.0", {"dropout_rate": 0.25}).save_pretrained(tmp_path)
    config = T5.from_pretrained(tmp_path).config
    assert [getattr(config, name) for name in DROPOUTS] == [0.25] * 4
    assert not {*DROPOUTS} & config.to_fields().keys()
    fields = replace(config, attention_dropout=0.0).to_fields()
    assert (fields["dropout_rate"], fields["attention_dropout"]) == (0.25, 0.0)
    assert T5Config.from_fields(Fields(tmp_path, fields)).attention_dropout == 0.0


@pytest.mark.parametrize("name", ["1.0", "1.1"])
def test_dropouts_act_where_those_of_transformers_do(tmp_path, name):
    """The same numbers are drawn in the same order, but for those of attention weights: what is dropped is the same."""
    theirs = theirs_of(name, {"dropout_rate": 0.5})
    theirs.save_pretrained(tmp_path)
    ours = T5.from_pretrained(tmp_path)
    for module in theirs.modules():
        if isinstance(module, modeling.T5Attention):
            module.dropout = 0.0
    other = T5(replace(ours.config, attention_dropout=0.0)).double()
    other.load_state_dict(ours.state_dict())
    ids, labels = some_ids(), some_ids(tokens=15, seed=4)
    torch.manual_seed(5)
    expected = theirs.train()(ids, labels=labels).logits
    torch.manual_seed(5)
    close(other.train()(ids, labels=labels).logits, expected)
    assert apart(other.eval()(ids, labels=labels).logits, expected) > 0.1


@pytest.mark.parametrize("name", DROPOUTS)
def test_each_dropout_acts_in_training_only(small, name):
    other = T5(replace(SMALL, **{name: 0.5})).double()
    other.load_state_dict(small.state_dict())
    ids, labels = some_ids(), some_ids(tokens=15, seed=4)
    expected = small(ids, labels=labels)
    assert torch.equal(other.eval()(ids, labels=labels).hidden, expected.hidden)
    trained = other.train()(ids, labels=labels)
    assert apart(trained.hidden, expected.hidden) > 0.01
    assert apart(trained.encoder_hidden, expected.encoder_hidden) > 0.01


@pytest.mark.parametrize("by", ["config", "call"])
def test_a_window_in_the_encoder(tmp_path, monkeypatch, by):
    """LongT5's, held against transformers with the scores of far keys hidden by hand."""
    theirs = theirs_of("1.0")
    theirs.save_pretrained(tmp_path)
    ours = T5.from_pretrained(tmp_path)
    pattern = None
    if by == "config":
        local = T5(replace(ours.config, pattern="window(4, 4)")).double().eval()
        local.load_state_dict(ours.state_dict())
        local.save_pretrained(tmp_path / "local")
        with pytest.raises(ValueError, match="qkv_t5"):
            transformers.AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "local")
        ours = T5.from_pretrained(tmp_path / "local")
    else:
        pattern = window(4, 4)
    bias = modeling.T5Attention.compute_bias

    def near(self, *args, **options):
        made = bias(self, *args, **options)
        i, j = torch.arange(made.shape[-2])[:, None], torch.arange(made.shape[-1])
        return made if self.is_decoder else made.masked_fill((i - j).abs() > 4, -math.inf)

    monkeypatch.setattr(modeling.T5Attention, "compute_bias", near)
    ids, labels = some_ids(), some_ids(tokens=15, seed=4)
    close(ours(ids, labels=labels, pattern=pattern).logits, theirs(ids, labels=labels).logits)


def test_backends_agree(small):
    ids, keep = padded()
    labels = some_ids(4, 15, seed=4)
    found = small(ids, keep, labels=labels, backend="reference")
    close(found.logits, small(ids, keep, labels=labels).logits)


def test_first_weights_are_those_of_mesh_tensorflow():
    torch.manual_seed(0)
    config = replace(
        SMALL, vocabulary=500, width=64, heads=8, head_dim=16, feedforward=200, tied=False, scaled_head=False,
        activation="geglu_tanh",
    )  # fmt: skip
    spreads = {
        "embedding.weight": 1.0,
        "relative.weight": 64**-0.5,
        "q_proj.weight": (64 * 16) ** -0.5,
        "k_proj.weight": 64**-0.5,
        "v_proj.weight": 64**-0.5,
        "o_proj.weight": (8 * 16) ** -0.5,
        "gate_proj.weight": 64**-0.5,
        "up_proj.weight": 64**-0.5,
        "down_proj.weight": 200**-0.5,
        "head.weight": 64**-0.5,
    }
    for name, weight in T5(config).named_parameters():
        if "norm" in name:
            assert torch.equal(weight, torch.ones_like(weight))
        else:
            wanted = next(spreads[end] for end in spreads if name.endswith(end))
            # the deviation of n normal numbers has itself one of 1/sqrt(2n)
            assert abs(weight.std().item() / wanted - 1) < 5 / math.sqrt(2 * weight.numel()), name


def test_the_default_is_the_small_one_of_the_paper():
    with torch.device("meta"):
        model = T5(T5Config())
    assert sum(weight.numel() for weight in model.parameters()) == 60_506_624


@pytest.mark.parametrize(
    "changes, error, text",
    [
        ({"layers": 0}, ValueOutOfRange, "`layers` must be at least 1; got 0"),
        ({"decoder_layers": 0}, ValueOutOfRange, "`decoder_layers` must be at least 1; got 0"),
        ({"norm_epsilon": 0.0}, ValueOutOfRange, "`norm_epsilon` must be a positive number; got 0.0"),
        ({"residual_dropout": -0.1}, ValueOutOfRange, r"`residual_dropout` must lie in \[0, 1\); got -0.1"),
        ({"activation": "mish"}, UnknownName, "`activation` must be one of .*geglu_tanh.*; got 'mish'"),
        ({"tied": False}, ValueOutOfRange, "`scaled_head` goes with `tied`; got it with a head of its own; T5 1.1 has"),
        ({"start_id": 53}, ValueOutOfRange, "`start_id` must lie in 0 .. 52; got 53; name a token of the vocabulary"),
        ({"pattern": "windows(3)"}, (UnknownName, PatternSyntaxError), "windows"),
    ],
)
def test_config_refuses_what_cannot_be(changes, error, text):
    with pytest.raises(error, match=text):
        replace(SMALL, **changes)


def test_calls_are_refused_before_any_work(small, monkeypatch):
    ids, labels = some_ids(), some_ids(tokens=15, seed=4)
    memory = small.encode(ids)
    bare = StackState([layer.attention.initial_state(3, 9) for layer in small.decoder.layers])
    monkeypatch.setattr(small.embedding, "forward", None)  # nothing is embedded
    with pytest.raises(ValueOutOfRange, match="`labels` or `decoder_ids` must say what is decoded; got neither; give"):
        small(ids)
    with pytest.raises(DTypeError, match="`labels` must be an int64 or int32 tensor; got list"):
        small(ids, labels=[[1, 2]])
    with pytest.raises(ValueOutOfRange, match=r"`labels` must lie in 0 .. 52; got -5 .. "):
        small(ids, labels=labels.masked_fill(labels == labels[0, 0], -5))
    with pytest.raises(ShapeError, match=r"`labels` must have the shape of `decoder_ids`; got \(3, 15\) and \(3, 14\)"):
        small(ids, labels=labels, decoder_ids=labels[:, 1:])
    with pytest.raises(ShapeError, match="target and source must have as many rows; got 2 and 3; give one target"):
        small(ids, labels=labels[:2])
    with pytest.raises(ValueOutOfRange, match=r"a source must be given as `memory` or in a `state`; got neither; call"):
        small.decode(labels)
    with pytest.raises(ValueOutOfRange, match="a source must be given as `memory` or in a `state`; got neither"):
        small.initial_state(3, 9)
    with pytest.raises(ValueOutOfRange, match="got both"):
        small.decode(labels, memory=memory, state=bare)
    with pytest.raises(ValueOutOfRange, match="`state` must be of this model; got one without keys of a source"):
        small.decode(labels, state=bare)
    with pytest.raises(ShapeError, match="target and source must have as many rows; got 2 and 3"):
        small.decode(labels[:2], memory=memory)


def test_labels_beside_what_the_decoder_reads(small):
    ids, labels = some_ids(), some_ids(tokens=15, seed=4)
    reads = torch.cat([torch.full((3, 1), START), labels[:, :-1]], 1)
    found = small(ids, labels=labels.int(), decoder_ids=reads.int())
    assert torch.equal(found.loss, small(ids, labels=labels).loss)
    close(found.loss, F.cross_entropy(found.logits.flatten(0, 1), labels.flatten()))


def of_target(model):
    """The decoder as a causal model over a source that stays the same."""
    source = some_ids(1, 9, seed=7)

    def stepwise(module, x):
        with torch.no_grad():
            state = module.initial_state(len(x), x.shape[1], module.encode(source.expand(len(x), -1)))
            return torch.cat([module.decode(x[:, n : n + 1], state=state).hidden for n in range(x.shape[1])], 1)

    return Subject(
        module=model,
        call=lambda module, x, keep=None: module(source.expand(len(x), -1), decoder_ids=x, decoder_mask=keep).hidden,
        draw=numbers(VOCABULARY),
        causal=True,
        ordered=True,
        pads=True,
        decode=stepwise,
        softmax_axis=False,
    )


def of_source(model):
    """The encoder."""

    def encoded(module, x, keep=None):
        memory = module.encode(x, keep)
        return memory.rows.back(memory.hidden)

    idle = tuple(name for name, _ in model.named_parameters() if name.startswith("decoder."))
    return Subject(
        module=model,
        call=encoded,
        draw=numbers(VOCABULARY),
        causal=False,
        ordered=True,
        pads=True,
        idle=idle,
        softmax_axis=False,
    )


@pytest.mark.parametrize("subject", [of_target, of_source])
def test_no_classical_mistake(small, subject):
    check(subject(small))
