"""Hybrids: Olmo-Hybrid as transformers runs it, other shapes, states, padding, files, refusals."""

from __future__ import annotations

import json

import pytest
import torch
from torch.nn import functional as F

from probes import check
from qkv.cache import KVCache, RollingKVCache
from qkv.errors import CheckpointError, ShapeError, UnknownName, UnsupportedError, ValueOutOfRange
from qkv.models.hybrid import Hybrid, HybridConfig
from qkv.nn.layer_state import LayerState
from qkv.nn.mixer import VARIANTS
from qkv.patterns import sliding_window
from qkv.types import AuxRequest
from subjects import Subject, numbers

UNIT = 2.0**-24
TINY = {
    "vocabulary": 30, "layers": 4, "heads": 2, "width": 16, "feedforward": 24, "linear_options": {"head_k_dim": 4},
}  # fmt: skip
ROPE = {"rope_type": "default", "rope_theta": 10000.0}


def hybrid(dtype=torch.float64, **changes):
    torch.manual_seed(0)
    made = Hybrid(HybridConfig(**{**TINY, **changes})).to(dtype).eval()
    for name, weight in made.named_parameters():  # larger than the first values, so that every layer counts
        if weight.ndim == 2 and "conv" not in name:
            torch.nn.init.normal_(weight, std=0.3)
    return made


def some_ids(rows=2, tokens=11, vocabulary=30):
    return torch.randint(0, vocabulary, (rows, tokens), generator=torch.Generator().manual_seed(1))


def close(got, wanted, bound=1e-10):
    torch.testing.assert_close(got, wanted, atol=bound * max(1.0, float(wanted.detach().abs().max())), rtol=0)


def test_a_batch_of_nothing_gives_nothing():
    model = hybrid(rope=ROPE)
    assert model(torch.zeros(0, 5).long(), state=model.initial_state(0, 8)).logits.shape == (0, 5, 30)


def test_the_ratio_says_the_kinds():
    assert HybridConfig(**TINY).kinds == ("linear",) * 3 + ("softmax",)
    assert HybridConfig(**TINY, ratio=1).kinds == ("linear", "softmax") * 2
    assert HybridConfig(**{**TINY, "layers": 2}).kinds == ("linear", "softmax")
    assert HybridConfig(**TINY, softmax_layers=(0, 3)).kinds == ("softmax", "linear", "linear", "softmax")
    assert HybridConfig().kinds.count("softmax") == 8


def test_layers_add_as_said_at_the_top():
    """Norms before a linear layer and what follows it, and after a softmax layer's two parts."""
    model = hybrid(ratio=1, layers=2, rope=ROPE, kv_heads=1)
    ids = some_ids()
    linear, softmax = model.layers
    x = model.embedding(ids)
    x = x + linear.attention(linear.attention_norm(x))
    x = x + linear.feedforward(linear.feedforward_norm(x))
    x = x + softmax.attention_norm(softmax.attention.attend(x)[0])
    x = x + softmax.feedforward_norm(softmax.feedforward(x))
    out = model(ids, labels=ids)
    close(out.hidden, model.norm(x))
    close(out.logits, model.norm(x) @ model.head.weight.T)
    close(out.loss, F.cross_entropy(out.logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()))


SHAPES = {
    "gated_delta": {},
    "rope": {"rope": ROPE, "kv_heads": 1, "ratio": 1},
    "window": {"pattern": "sliding_window(3)", "rope": ROPE, "ratio": 1},
    "tied": {"tied": True, "projection_bias": True, "head_dim": 6},
    "linear": {"linear": "linear", "linear_options": None},
    "retention": {"linear": "retention", "linear_options": None},
    "gated_linear": {"linear": "gated_linear", "linear_options": {"head_k_dim": 6}},
    "kimi_delta": {"linear": "kimi_delta", "linear_options": None, "linear_heads": 4},
    "mamba2": {"linear": "mamba2", "linear_options": {"state_size": 8}},
}


def test_every_linear_variant_is_here():
    assert {shape.get("linear", "gated_delta") for shape in SHAPES.values()} == set(VARIANTS)


@pytest.mark.parametrize("shape", SHAPES)
def test_tokens_one_by_one_agree_with_the_whole(shape):
    model, ids = hybrid(**SHAPES[shape]), some_ids()
    whole = model(ids).logits
    state = model.initial_state(2, 11)
    with torch.no_grad():
        parts = [model(ids[:, :4], state=state).logits]
        parts += [model(ids[:, t : t + 1], state=state).logits for t in range(4, 9)]
        parts += [model(ids[:, 9:], state=state, last_only=True).logits]
    close(torch.cat(parts[:-1], 1), whole[:, :9])
    close(parts[-1], whole[:, -1:])
    assert state.lengths == (11, 11)


@pytest.mark.parametrize("shape", SHAPES)
def test_a_padded_row_is_what_it_is_alone(shape):
    """With padding on either side and in between; whole, and going on from a state."""
    model, ids = hybrid(**SHAPES[shape]), some_ids(rows=4)
    keep = torch.ones(4, 11, dtype=torch.bool)
    keep[1, :5] = False
    keep[2, 8:] = False
    keep[3, [0, 4, 5, 10]] = False
    out, state = model(ids, keep, labels=ids), model.initial_state(4, 20)
    more = some_ids(rows=4, tokens=3).flip(0)
    with torch.no_grad():
        last = model(ids, keep.long(), state=state, last_only=True).logits
        after = model(more, state=state).logits
    losses = []
    for row in range(4):
        words = ids[row, keep[row]][None]
        alone = model(words, labels=words)
        close(out.logits[row, keep[row]], alone.logits[0])
        close(last[row], alone.logits[0, -1:])
        close(after[row], model(torch.cat([words, more[row : row + 1]], 1)).logits[0, -3:])
        losses += [alone.loss.detach()] * (words.shape[1] - 1)
    close(out.loss, torch.stack(losses).mean())
    assert state.lengths == (14, 9, 11, 10)


@pytest.mark.parametrize("shape", ["gated_delta", "window", "mamba2"])
def test_no_classical_mistake(shape):
    model = hybrid(**SHAPES[shape])

    def decode(module, ids):
        state = module.initial_state(*ids.shape)
        with torch.no_grad():
            return torch.cat([module(ids[:, t : t + 1], state=state).logits for t in range(ids.shape[1])], 1)

    def call(module, ids, keep=None):
        return module(ids, keep).logits

    told = {"causal": True, "ordered": True, "pads": True, "decode": decode, "softmax_axis": False}
    check(Subject(module=model, call=call, draw=numbers(30), **told))


def test_states_are_of_the_kind_of_their_layer():
    model = hybrid(ratio=1, pattern="sliding_window(8)", dtype=torch.float32)
    state = model.initial_state(1, 4000)
    assert [type(layer) for layer in state.layers] == [LayerState, RollingKVCache] * 2
    assert [type(layer) for layer in hybrid().initial_state(1, 40).layers] == [LayerState] * 3 + [KVCache]
    ids = some_ids(rows=1, tokens=600)
    held = []
    with torch.no_grad():
        for start in range(0, 600, 200):
            model(ids[:, start : start + 200], state=state)
            held.append(state.nbytes)
    assert held[2] < 1.01 * held[1], "windows and recurrences hold as much after 600 tokens as after 400"


def test_aux_tells_of_softmax_layers_alone():
    model, ids = hybrid(), some_ids()
    aux = model(ids, return_aux=AuxRequest(weights=True)).aux
    assert [of_layer.weights is None for of_layer in aux] == [True] * 3 + [False]
    close(aux[3].weights.sum(-1), torch.ones(2, 2, 11, dtype=torch.float64))
    assert model(ids).aux is None


def test_a_pattern_of_the_call_narrows_softmax_layers():
    model, ids = hybrid(rope=ROPE), some_ids()
    close(model(ids, pattern=sliding_window(3)).logits, hybrid(rope=ROPE, pattern="sliding_window(3)")(ids).logits)


@pytest.mark.parametrize("place", ["embedding_dropout", "attention_dropout", "feedforward_dropout", "residual_dropout"])
def test_dropout_works_in_training_only(place):
    model, ids = hybrid(**{place: 0.5}), some_ids()
    assert torch.equal(model(ids).logits, model(ids).logits)
    model.train()
    assert not torch.equal(model(ids).logits, model(ids).logits)


@pytest.mark.parametrize("softmax_layers", [(), (0,)], ids=["linear", "softmax"])
@pytest.mark.parametrize("silent", ["attention", "down_proj"])
def test_residual_dropout_acts_on_what_each_sublayer_adds(silent, softmax_layers):
    model, ids = hybrid(layers=1, softmax_layers=softmax_layers, residual_dropout=0.5).train(), some_ids()
    for name, weight in model.named_parameters():
        if silent in name and name.endswith(("o_proj.weight", "out_proj.weight", "down_proj.weight")):
            torch.nn.init.zeros_(weight)
    assert not torch.equal(model(ids).logits, model(ids).logits)


def test_first_values():
    model = Hybrid(HybridConfig(**{**TINY, "vocabulary": 3000, "spread": 0.03}))
    assert abs(float(model.embedding.weight.detach().std()) - 0.03) < 1e-3
    assert abs(float(model.layers[0].feedforward.up_proj.weight.detach().std()) - 0.03) < 5e-3
    assert float(model.layers[0].attention.in_proj_qkv.weight.detach().std()) > 0.1, (
        "a linear layer keeps its own first values"
    )


def test_generation_ends_rows_by_themselves():
    model, ids = hybrid(end_ids=(5, 7), pad_id=0, dtype=torch.float32), some_ids(rows=3, tokens=6)
    keep = torch.arange(6) >= torch.tensor([0, 2, 4])[:, None]
    together = model.generate(ids, 12, attention_mask=keep)
    for row in range(3):
        alone = model.generate(ids[row : row + 1, keep[row]], 12)[0, int(keep[row].sum()) :]
        assert together[row, 6 : 6 + len(alone)].tolist() == alone.tolist()


@pytest.mark.parametrize("shape", SHAPES)
def test_what_is_saved_comes_back_whole(shape, tmp_path):
    model = hybrid(**{**SHAPES[shape], "residual_dropout": 0.1, "end_ids": (3, 4), "pad_id": 2})
    model.save_pretrained(tmp_path)
    again = Hybrid.from_pretrained(tmp_path)
    ids = some_ids()
    close(again(ids).logits, model(ids).logits)
    assert again.config.kinds == model.config.kinds
    assert (again.config.end_ids, again.config.pad_id, again.config.residual_dropout) == ((3, 4), 2, 0.1)
    again.save_pretrained(tmp_path / "twice")
    assert Hybrid.from_pretrained(tmp_path / "twice").config == again.config
    told = json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))
    assert told["model_type"] == "qkv_hybrid", "no shape here has the eps of Olmo-Hybrid's linear layers"


@pytest.mark.parametrize(
    "changes, error, text",
    [
        ({"ratio": 0}, ValueOutOfRange, "`ratio` must be at least 1; got 0"),
        ({"heads": 3}, ValueOutOfRange, "`width` must be a multiple of `heads` = 3; got 16"),
        ({"kv_heads": 3}, ValueOutOfRange, "`heads` must be a multiple of `kv_heads` = 3; got 2"),
        ({"linear": "delta"}, UnknownName, "`linear` must be one of .*gated_delta.*; got 'delta'"),
        (
            {"linear_options": {"head_dim": 3}},
            UnknownName,
            "`linear_options of gated_delta` must be one of .*got 'head_dim'",
        ),
        ({"softmax_layers": (4,)}, ValueOutOfRange, r"`softmax_layers` must name layers in 0 .. 3; got \(4,\)"),
        (
            {"pattern": "window(3, 3)"},
            ValueOutOfRange,
            "no token sees a later one; .* write 'causal.. & .window.3, 3..'",
        ),
        ({"pattern": "windoe(3)"}, UnknownName, "got 'windoe'; did you mean 'window'"),
        ({"norm_epsilon": 0.0}, ValueOutOfRange, "`norm_epsilon` must be a positive number"),
    ],
)
def test_config_refuses_what_cannot_be(changes, error, text):
    with pytest.raises(error, match=text):
        HybridConfig(**{**TINY, **changes})


def test_forward_refuses_what_does_not_fit():
    model, ids = hybrid(), some_ids()
    with pytest.raises(ValueOutOfRange, match=r"`ids` must lie in 0 .. 29"):
        model(ids + 30)
    with pytest.raises(ShapeError, match="`last_only` leaves no logits for `labels`"):
        model(ids, labels=ids, last_only=True)
    with pytest.raises(ShapeError, match="`state` must be of 4 layers and 2 sequences"):
        model(ids, state=model.initial_state(3, 11))
    with pytest.raises(UnsupportedError, match="3 of 4 layers are recurrent"):
        model.initial_state(2, 11).truncate(0)


FIELDS = {
    "model_type": "olmo_hybrid", "vocab_size": 30, "max_position_embeddings": 64, "num_hidden_layers": 4,
    "num_attention_heads": 2, "hidden_size": 16, "intermediate_size": 24,
}  # fmt: skip


@pytest.mark.parametrize(
    "change, text",
    [
        ({"model_type": "llama"}, "`model_type` in 'config.json' must be 'olmo_hybrid' or 'qkv_hybrid'; got 'llama'"),
        ({"hidden_act": "gelu"}, "`hidden_act` in 'config.json' must be 'silu'; got 'gelu'"),
        ({"layer_types": ["full_attention"]}, "`layer_types` in 'config.json' must be 4 of linear_attention"),
        ({"layer_types": ["mamba"] * 4}, "`layer_types` in 'config.json' must be 4 of linear_attention"),
        ({"linear_num_key_heads": 0}, "describe a model"),
        ({"model_type": "qkv_hybrid"}, "`linear` in 'config.json' must be given"),
    ],
)
def test_a_config_of_something_else_is_refused(change, text, tmp_path):
    model = hybrid()
    model.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(FIELDS | change), encoding="utf-8")
    with pytest.raises(CheckpointError, match=text):
        Hybrid.from_pretrained(tmp_path, verify=False)


def their_config(transformers, **changes):
    sizes = {
        "hidden_size": 32, "num_hidden_layers": 5, "num_attention_heads": 4, "num_key_value_heads": 2,
        "intermediate_size": 48, "vocab_size": 50, "pad_token_id": 0, "eos_token_id": 1,
        "attn_implementation": "eager", "rope_parameters": {"rope_type": "default", "rope_theta": None},
    }  # fmt: skip
    return transformers.OlmoHybridConfig(**{**sizes, **changes})


OLMOS = {
    "as published": {},
    "rope": {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}},
    "grouped": {"linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_allow_neg_eigval": False},
    "irregular": {
        "layer_types": ["full_attention", "linear_attention", "linear_attention", "full_attention", "linear_attention"],
        "attention_bias": True,
        "linear_conv_kernel_dim": 3,
    },
    "tied": {"tie_word_embeddings": True},
}


@pytest.fixture(params=OLMOS)
def olmo(request, tmp_path):
    """A model of theirs with random weights, and ours read from what it saved; float32, in which their rule runs."""
    transformers = pytest.importorskip("transformers", reason="needs transformers, which is not installed")
    torch.manual_seed(2)
    their = transformers.OlmoHybridForCausalLM(their_config(transformers, **OLMOS[request.param])).eval()
    for weight in their.parameters():
        if weight.ndim == 2:
            torch.nn.init.normal_(weight, std=0.12)
    their.save_pretrained(tmp_path / "theirs")
    return their, Hybrid.from_pretrained(tmp_path / "theirs")


def near(got, wanted, times=400):
    """Within so many roundoffs of the greatest number."""
    error = float((got - wanted).detach().abs().max())
    assert error <= times * UNIT * float(wanted.detach().abs().max()), error / UNIT / float(wanted.detach().abs().max())


def test_transformers_agrees(olmo):
    their, ours = olmo
    ids = some_ids(rows=2, tokens=70, vocabulary=50).clamp(min=1)  # their chunk of 64, and more; 0 is their padding
    wanted, got = their(ids, labels=ids), ours(ids, labels=ids)
    near(got.logits, wanted.logits)
    near(got.loss, wanted.loss)
    wanted.loss.backward()
    got.loss.backward()
    named = Hybrid.own_names(ours.config, {name: weight.grad for name, weight in their.named_parameters()})
    for name, weight in ours.named_parameters():
        near(weight.grad, named[name], times=1500)


def test_transformers_agrees_with_padding_and_a_cache(olmo):
    their, ours = olmo
    ids = some_ids(rows=3, tokens=20, vocabulary=50).clamp(min=2)
    keep = torch.arange(20) >= torch.tensor([0, 6, 13])[:, None]  # their recurrences need it on the left
    positions = (keep.long().cumsum(1) - 1).clamp(min=0)
    with torch.no_grad():
        wanted = their(ids, attention_mask=keep.long(), position_ids=positions, use_cache=True)
        state = ours.initial_state(3, 30)
        got = ours(ids, keep, state=state)
        near(got.logits[keep], wanted.logits[keep])
        cache = wanted.cache
        for t in range(4):
            word = some_ids(rows=3, tokens=4, vocabulary=50)[:, t : t + 1]
            keep = torch.cat([keep, torch.ones(3, 1, dtype=torch.bool)], 1)
            wanted = their(
                word, attention_mask=keep.long(), position_ids=positions[:, -1:] + 1 + t, cache=cache, use_cache=True
            )
            near(ours(word, state=state).logits, wanted.logits)


def test_the_default_shape_is_that_of_transformers(tmp_path):
    transformers = pytest.importorskip("transformers", reason="needs transformers, which is not installed")
    model = hybrid(dtype=torch.float32, linear_options=None)
    model.save_pretrained(tmp_path)
    their, told = transformers.OlmoHybridForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(told.values()), told
    for name in ("linear_key_head_dim", "linear_value_head_dim", "linear_num_key_heads", "layer_types"):
        assert getattr(their.config, name) == getattr(their_config(transformers, **TINY_THERE), name)
    near(model(some_ids()).logits, their(some_ids()).logits)
    assert Hybrid.from_pretrained(tmp_path).config.kinds == model.config.kinds


TINY_THERE = {"hidden_size": 16, "num_hidden_layers": 4, "num_attention_heads": 2, "num_key_value_heads": 2}


def test_transformers_generates_the_same(olmo):
    their, ours = olmo
    ids = some_ids(rows=1, tokens=12, vocabulary=50).clamp(min=2)
    wanted = their.generate(ids, max_new_tokens=12, do_sample=False, pad_token_id=0)
    assert ours.generate(ids, 12).tolist() == wanted.tolist()


def test_transformers_reads_what_we_save(olmo, tmp_path):
    their, ours = olmo
    ours.save_pretrained(tmp_path / "ours")
    again, told = type(their).from_pretrained(tmp_path / "ours", output_loading_info=True)
    assert not any(told.values()), told
    assert again.config.layer_types == their.config.layer_types
    ids = some_ids(vocabulary=50)
    near(again(ids).logits, their(ids).logits)
    assert Hybrid.from_pretrained(tmp_path / "ours").config == ours.config
