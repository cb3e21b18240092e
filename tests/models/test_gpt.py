"""GPT-2 against transformers in float64 and float32: outputs, losses, gradients, padding, decoding, files; patterns
against a plain model; dropouts, first weights, refusals.
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
from qkv.cache import RollingKVCache
from qkv.errors import CheckpointError, PatternSyntaxError, ShapeError, UnknownName, ValueOutOfRange
from qkv.models.files.config_file import Fields
from qkv.models.gpt import GPT, GPTConfig
from qkv.nn.rows import Rows
from qkv.patterns import causal, window
from qkv.types import AuxRequest
from subjects import Subject, numbers

transformers = pytest.importorskip("transformers")

DOUBLE = 1e-12  # parts of the largest number: float64 results of the same products in another order
VOCABULARY = 61
SIZES = {
    "vocab_size": VOCABULARY,
    "n_positions": 40,
    "n_embd": 24,
    "n_layer": 3,
    "n_head": 4,
    "bos_token_id": None,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "attn_implementation": "eager",
}
MODELS = {
    "plain": {},
    "scaled by layer": {"scale_attn_by_inverse_layer_idx": True},
    "scaled by layer alone": {"scale_attn_weights": False, "scale_attn_by_inverse_layer_idx": True, "n_inner": 31},
    "exact gelu, a head of its own": {"activation_function": "gelu", "tie_word_embeddings": False},
    "not scaled, relu, wide norms": {
        "scale_attn_weights": False,
        "activation_function": "relu",
        "layer_norm_epsilon": 0.1,
        "n_head": 1,
    },
}
NONE = {"resid_pdrop": 0.0, "attn_pdrop": 0.0, "embd_pdrop": 0.0}
SMALL = GPTConfig(
    vocabulary=VOCABULARY, positions=200, layers=2, heads=2, width=16, feedforward=24, residual_dropout=0.0,
    embedding_dropout=0.0, attention_dropout=0.0,
)  # fmt: skip


def random_weights(model):
    """Larger than the first values, so that no layer is close to the identity."""
    for name, weight in model.named_parameters():
        torch.nn.init.normal_(weight, mean=float("ln_" in name or "norm" in name), std=0.3)
    return model


def theirs_of(changes, seed=0):
    torch.manual_seed(seed)
    config = transformers.GPT2Config(**SIZES | changes)
    return random_weights(transformers.GPT2LMHeadModel(config).double().eval())


@pytest.fixture(params=MODELS)
def pair(request, tmp_path):
    """A random model of transformers, and ours as its files give it."""
    theirs = theirs_of(MODELS[request.param], len(request.param))
    theirs.save_pretrained(tmp_path / "theirs")
    return theirs, GPT.from_pretrained(tmp_path / "theirs")


@pytest.fixture
def small():
    torch.manual_seed(1)
    return random_weights(GPT(SMALL).double().eval())


def some_ids(rows=3, tokens=11, seed=3):
    return torch.randint(VOCABULARY, (rows, tokens), generator=torch.Generator().manual_seed(seed))


def padded():
    """Four rows of 11 tokens: whole, padded on the left, on the right, and with holes."""
    keep = torch.ones(4, 11, dtype=torch.int64)
    keep[1, :4] = keep[2, 6:] = keep[3, [0, 4, 5, 9]] = 0
    return some_ids(4), keep


def apart(ours, theirs):
    ours, theirs = ours.detach(), theirs.detach()
    return float((ours.double() - theirs.double()).abs().max()) / max(1.0, float(theirs.abs().max()))


def close(ours, theirs, bound=DOUBLE):
    assert ours.shape == theirs.shape
    assert apart(ours, theirs) <= bound


def their_loss(logits, labels):
    """As transformers computes it, but in float64."""
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100)


def test_outputs_loss_and_gradients(pair):
    theirs, ours = pair
    ids = some_ids()
    labels = ids.clone()
    labels[0, 4] = labels[2, :7] = -100
    expected = theirs(ids, labels=labels, output_hidden_states=True)
    found = ours(ids, labels=labels)
    wanted = their_loss(expected.logits, labels)
    close(found.hidden, expected.hidden_states[-1])
    close(found.logits, expected.logits)
    close(found.loss, wanted)
    assert apart(found.loss, expected.loss) < 1e-6  # transformers' own, in float32
    wanted.backward()
    found.loss.backward()
    grads = ours.file_names(ours.config, {name: weight.grad for name, weight in ours.named_parameters()})
    by_name = {name: weight.grad for name, weight in theirs.named_parameters()}
    assert grads.keys() == by_name.keys()
    for name, grad in grads.items():
        close(grad, by_name[name])


def test_float32_is_as_near_to_float64_as_transformers_is(pair):
    """Both round each product once in another order: the one error bounds the other up to a small factor."""
    theirs, ours = pair
    ids = some_ids(8, 40)
    exact = theirs(ids).logits
    bound = 4 * max(apart(theirs.float()(ids).logits, exact), torch.finfo(torch.float32).eps)
    close(ours.float()(ids).logits, exact, bound)


def test_padded_rows_are_what_they_are_alone(pair):
    theirs, ours = pair
    ids, keep = padded()
    labels = ids.masked_fill(keep == 0, 7)  # what hidden tokens are labelled does not count
    found = ours(ids, keep, labels=labels)
    losses, counted = [], []
    for row, real in enumerate(keep.bool()):
        alone = theirs(ids[row : row + 1, real]).logits
        close(found.logits[row, real], alone[0])
        assert not found.hidden[row, ~real].any()
        losses.append(their_loss(alone, ids[row : row + 1, real]) * (real.sum() - 1))
        counted.append(int(real.sum()) - 1)
    close(found.loss, sum(losses) / sum(counted))
    same = theirs(ids[:2], attention_mask=keep[:2], position_ids=(keep[:2].cumsum(1) - 1).clamp(min=0)).logits
    close(found.logits[:2][keep[:2].bool()], same[keep[:2].bool()])
    last = ours(ids, keep, last_only=True)
    close(last.logits[2, 0], found.logits[2, 5])
    close(last.hidden[3, 0], found.hidden[3, 10])


def test_weights_are_those_of_transformers(pair):
    theirs, ours = pair
    ids = some_ids()
    expected = theirs(ids, output_attentions=True).attentions
    found = ours(ids, return_aux=AuxRequest(weights=True, lse=True)).aux
    assert len(found) == len(expected) == SIZES["n_layer"]
    for aux, weights in zip(found, expected, strict=True):
        close(aux.weights, weights)
        assert aux.lse.shape == weights.shape[:3]


def test_weights_of_padded_rows_stand_where_the_tokens_do(small):
    ids, keep = padded()
    found = small(ids, keep, return_aux=AuxRequest(weights=True)).aux
    for row, real in enumerate(keep.bool()):
        alone = small(ids[row : row + 1, real], return_aux=AuxRequest(weights=True)).aux
        for aux, expected in zip(found, alone, strict=True):
            close(aux.weights[row][:, real][:, :, real], expected.weights[0])
            assert not aux.weights[row][:, ~real].any()
            assert not aux.weights[row][:, :, ~real].any()


@torch.no_grad()
def test_decoding_with_a_state_is_the_whole_pass(pair):
    _, ours = pair
    ids, keep = padded()
    more = some_ids(4, 6, seed=5)
    state = ours.initial_state(4, 20)
    parts = [ours(ids, keep, state=state), ours(more[:, :1], state=state), ours(more[:, 1:4], state=state)]
    aux = ours(more[:, 4:], state=state, return_aux=AuxRequest(weights=True)).aux
    assert state.lengths == tuple((keep.sum(1) + 6).tolist())
    for row, real in enumerate(keep.bool()):
        whole = torch.cat([ids[row, real], more[row]])[None]
        expected = ours(whole, return_aux=AuxRequest(weights=True))
        found = torch.cat([parts[0].logits[row, real], parts[1].logits[row], parts[2].logits[row]])
        close(found, expected.logits[0, :-2])
        for of_layer, wanted in zip(aux, expected.aux, strict=True):
            close(of_layer.weights[row, :, :, : whole.shape[1]], wanted.weights[0, :, -2:])


@torch.no_grad()
def test_weights_of_a_padded_chunk_behind_a_state(small):
    ids, keep = padded()
    first = some_ids(4, 3, seed=8)
    state = small.initial_state(4, 20)
    small(first, state=state)
    found = small(ids, keep, state=state, return_aux=AuxRequest(weights=True)).aux
    for row, real in enumerate(keep.bool()):
        whole = torch.cat([first[row], ids[row, real]])[None]
        expected = small(whole, return_aux=AuxRequest(weights=True)).aux
        for aux, wanted in zip(found, expected, strict=True):
            close(aux.weights[row][:, real][:, :, : whole.shape[1]], wanted.weights[0, :, 3:])


def test_greedy_tokens_are_those_of_transformers(pair):
    theirs, ours = pair
    ids, keep = padded()
    ids, keep = ids[:2], keep[:2]
    ids[keep == 0] = 0
    expected = theirs.generate(ids, attention_mask=keep, max_new_tokens=20, do_sample=False)
    assert torch.equal(ours.generate(ids, 20, attention_mask=keep)[:, : expected.shape[1]], expected)
    alone = ours.generate(ids[1:, 4:], 20)
    assert torch.equal(ours.generate(ids, 20, attention_mask=keep)[1:, 11 : 11 + alone.shape[1] - 7], alone[:, 7:])


def test_sharded_files_of_transformers(tmp_path):
    theirs = theirs_of({})
    theirs.save_pretrained(tmp_path, max_shard_size="9KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 3
    ids = some_ids()
    close(GPT.from_pretrained(tmp_path)(ids).logits, theirs(ids).logits)


@pytest.mark.parametrize("most", [None, 9000])
def test_files_of_ours_are_read_by_transformers(pair, tmp_path, most):
    theirs, ours = pair
    ours.save_pretrained(tmp_path / "ours", max_shard_bytes=most)
    assert (len(list((tmp_path / "ours").glob("*.safetensors"))) > 3) == (most is not None)
    again, told = transformers.GPT2LMHeadModel.from_pretrained(
        tmp_path / "ours", dtype=torch.float64, attn_implementation="eager", output_loading_info=True
    )
    assert not any(told[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert torch.equal(again(some_ids()).logits, theirs(some_ids()).logits)
    names = ("n_inner", "eos_token_id", "pad_token_id", *NONE)
    for name in names:
        wanted = getattr(theirs.config, name)
        assert getattr(again.config, name) == (4 * 24 if wanted is None and name == "n_inner" else wanted)
    assert GPT.from_pretrained(tmp_path / "ours").config == ours.config


def rewritten(folder, change):
    file = folder / "model.safetensors"
    tensors = change(load_file(file))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, file)


def older(tensors):
    """Names as in the first files: no prefix, and the causal mask in every layer."""
    masks = {f"h.{n}.attn.bias": torch.ones(1, 1, 40, 40, dtype=torch.bool).tril() for n in range(3)}
    masks |= {f"h.{n}.attn.masked_bias": torch.tensor(-1e4) for n in range(3)}
    return masks | {name.removeprefix("transformer."): tensor for name, tensor in tensors.items()}


def with_head(tensors):
    return tensors | {"lm_head.weight": tensors["transformer.wte.weight"].clone()}


def head_alone(tensors):
    tensors = with_head(tensors)
    del tensors["transformer.wte.weight"]
    return tensors


@pytest.mark.parametrize("change", [older, with_head, head_alone])
def test_files_of_other_writers(tmp_path, change):
    theirs = theirs_of({})
    theirs.save_pretrained(tmp_path)
    rewritten(tmp_path, change)
    close(GPT.from_pretrained(tmp_path)(some_ids()).logits, theirs(some_ids()).logits)


def other_head(tensors):
    return tensors | {"lm_head.weight": 2 * tensors["transformer.wte.weight"]}


def cut(tensors):
    return tensors | {"transformer.h.1.attn.c_attn.weight": torch.zeros(24, 71).double()}


def cut_older(tensors):
    return older(tensors) | {"h.1.attn.c_attn.weight": torch.zeros(24, 71).double()}


def gone(tensors):
    del tensors["transformer.h.2.mlp.c_fc.bias"]
    return tensors


@pytest.mark.parametrize(
    "change, text",
    [
        (other_head, r"model\.safetensors.*`lm_head.weight` must equal `wte.weight`, which it is by the config; they"),
        (cut, r"model\.safetensors.*transformer\.h\.1\.attn\.c_attn\.weight.*\(24, 72\).*got \(24, 71\)"),
        (cut_older, r"model\.safetensors.*layers\.1\.attention\.[qkv]_proj\.weight"),
        (gone, r"model\.safetensors.*missing: .transformer\.h\.2\.mlp\.c_fc\.bias"),
    ],
)
def test_files_that_are_none_are_refused_by_name(tmp_path, change, text):
    theirs_of({}).save_pretrained(tmp_path)
    rewritten(tmp_path, change)
    with pytest.raises(CheckpointError, match=text):
        GPT.from_pretrained(tmp_path)


@pytest.mark.parametrize(
    "changes, text",
    [
        ({"model_type": "gpt_neo"}, "`model_type` in .*config.json.* must be 'gpt2' or 'qkv_gpt'"),
        ({"add_cross_attention": True}, "`add_cross_attention` in .*config.json.* must be False"),
        ({"activation_function": "mish"}, "`activation_function` in .*config.json.* must be 'gelu_new'"),
        ({"n_head": 5}, "config.json.*`width` must be a multiple of `heads` = 5; got 24"),
        ({"n_positions": 0}, "config.json.*`positions` must be at least 1; got 0"),
    ],
)
def test_configs_of_something_else_are_refused(tmp_path, changes, text):
    theirs_of({}).save_pretrained(tmp_path)
    config = tmp_path / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | changes))
    with pytest.raises(CheckpointError, match=text):
        GPT.from_pretrained(tmp_path)


def test_config_takes_what_transformers_takes_where_a_file_is_silent(tmp_path):
    needed = {name: SIZES[name] for name in ("vocab_size", "n_positions", "n_embd", "n_layer", "n_head")}
    read = GPTConfig.from_fields(Fields(tmp_path / "config.json", {"model_type": "gpt2", **needed}))
    assert read == GPTConfig(vocabulary=VOCABULARY, positions=40, width=24, layers=3, heads=4, feedforward=96)


def test_dropouts_have_their_own_names(tmp_path):
    rates = {"embd_pdrop": 0.25, "attn_pdrop": 0.5, "resid_pdrop": 0.125}
    theirs_of(rates).save_pretrained(tmp_path)
    config = GPT.from_pretrained(tmp_path).config
    found = config.embedding_dropout, config.attention_dropout, config.residual_dropout, config.feedforward_dropout
    assert found == (0.25, 0.5, 0.125, 0.0)
    fields = replace(config, feedforward_dropout=0.2).to_fields()
    assert {name: fields[name] for name in rates} == rates
    assert GPTConfig.from_fields(Fields(tmp_path, fields)).feedforward_dropout == 0.2


@pytest.mark.parametrize("name", ["embd_pdrop", "resid_pdrop"])
def test_dropouts_act_where_those_of_transformers_do(tmp_path, name):
    """The same numbers are drawn in the same order, so what is dropped is the same."""
    theirs = theirs_of(NONE | {name: 0.5})
    theirs.save_pretrained(tmp_path)
    ours = GPT.from_pretrained(tmp_path)
    torch.manual_seed(5)
    expected = theirs.train()(some_ids()).logits
    torch.manual_seed(5)
    close(ours.train()(some_ids()).logits, expected)
    assert apart(ours.eval()(some_ids()).logits, expected) > 0.1


@pytest.mark.parametrize("name", ["embedding_dropout", "attention_dropout", "feedforward_dropout", "residual_dropout"])
def test_each_dropout_acts_in_training_only(small, name):
    other = GPT(replace(SMALL, **{name: 0.5})).double()
    other.load_state_dict(small.state_dict())
    assert torch.equal(other.eval()(some_ids()).hidden, small(some_ids()).hidden)
    assert apart(other.train()(some_ids()).hidden, small(some_ids()).hidden) > 0.01


def plain_gpt(model, ids, masks):
    """The model in the fewest words: a dense mask a layer, one head at a time."""
    w, config = model.state_dict(), model.config
    width = config.width // config.heads

    def norm(name, x):
        return F.layer_norm(x, x.shape[-1:], w[f"{name}.weight"], w[f"{name}.bias"], config.norm_epsilon)

    def linear(name, x):
        return x @ w[f"{name}.weight"].T + w[f"{name}.bias"]

    x = w["embedding.weight"][ids] + w["embedding.positions.weight"][: ids.shape[1]]
    for n, mask in enumerate(masks):
        at = f"layers.{n}"
        read = norm(f"{at}.attention_norm", x)
        q, k, v = (linear(f"{at}.attention.{part}_proj", read) for part in "qkv")
        heads = []
        for h in range(config.heads):
            part = slice(h * width, (h + 1) * width)
            scores = q[..., part] @ k[..., part].mT / math.sqrt(width)
            heads.append(scores.masked_fill(~mask, -math.inf).softmax(-1) @ v[..., part])
        x = x + linear(f"{at}.attention.o_proj", torch.cat(heads, -1))
        wide = F.gelu(linear(f"{at}.feedforward.up_proj", norm(f"{at}.feedforward_norm", x)), approximate="tanh")
        x = x + linear(f"{at}.feedforward.down_proj", wide)
    return norm("norm", x) @ w["embedding.weight"].T


i, j = torch.arange(150)[:, None], torch.arange(150)
DENSE = {
    "causal()": j <= i,
    "strided(8)": (j <= i) & ((i - j < 8) | ((i - j) % 8 == 0)),
    "fixed(8)": (j <= i) & ((i // 8 == j // 8) | (j % 8 == 7)),
    "sliding_window(9)": (j <= i) & (j > i - 9),
}


@pytest.mark.parametrize("texts", [*DENSE, ("causal()", "sliding_window(9)")])
def test_patterns_by_a_word_of_the_config(small, tmp_path, texts):
    sparse = GPT(replace(SMALL, pattern=texts)).double().eval()
    sparse.load_state_dict(small.state_dict())
    ids = some_ids(2, 150)
    masks = [DENSE[text] for text in ((texts,) * 2 if isinstance(texts, str) else texts)]
    expected = plain_gpt(sparse, ids, masks)
    close(sparse(ids).logits, expected)
    sparse.save_pretrained(tmp_path)
    again = GPT.from_pretrained(tmp_path)
    close(again(ids).logits, expected)
    assert again.config.patterns == sparse.config.patterns
    if texts == "causal()":
        transformers.GPT2LMHeadModel.from_pretrained(tmp_path)
    else:
        with pytest.raises(ValueError, match="qkv_gpt"):
            transformers.AutoModelForCausalLM.from_pretrained(tmp_path)


@pytest.mark.parametrize("texts", ["sliding_window(9)", "causal() & (window(8) | prefix(2))"])
@torch.no_grad()
def test_decoding_keeps_only_the_keys_that_the_pattern_needs(small, texts):
    sparse = GPT(replace(SMALL, pattern=texts)).double().eval()
    sparse.load_state_dict(small.state_dict())
    ids = some_ids(2, 150)
    state = sparse.initial_state(2, 200)
    assert all(isinstance(layer, RollingKVCache) for layer in state.layers)
    found = [sparse(ids[:, :20], state=state).logits]
    found += [sparse(ids[:, n : n + 1], state=state).logits for n in range(20, 150)]
    close(torch.cat(found, 1), sparse(ids).logits)
    assert state.nbytes < small.initial_state(2, 200).nbytes


def test_the_pattern_of_a_call_holds_beside_that_of_the_config(small):
    ids = some_ids(2, 150)
    close(small(ids, pattern=window(8)).logits, plain_gpt(small, ids, [DENSE["sliding_window(9)"]] * 2))


def test_backends_agree(small):
    ids, keep = padded()
    close(small(ids, keep, backend="reference").logits, small(ids, keep).logits)


def test_first_weights_are_those_of_the_paper():
    torch.manual_seed(0)
    model = GPT(GPTConfig(vocabulary=500, positions=300, layers=8, heads=2, width=64, feedforward=256, tied=False))
    for name, weight in model.named_parameters():
        if name.endswith("bias"):
            assert not weight.any()
        elif "norm" in name:
            assert torch.equal(weight, torch.ones_like(weight))
        else:
            narrow = {"o_proj.weight": 1 / 4, "down_proj.weight": 1 / 4, "positions.weight": 1 / 2}
            wanted = 0.02 * next((narrow[end] for end in narrow if name.endswith(end)), 1)
            # the deviation of n normal numbers has itself one of 1/sqrt(2n)
            assert abs(weight.std().item() / wanted - 1) < 5 / math.sqrt(2 * weight.numel()), name
    assert (
        sum(weight.numel() for weight in GPT(SMALL).parameters())
        == VOCABULARY * 16 + 200 * 16 + 2 * (4 * (16 * 16 + 16) + 2 * 16 * 24 + 24 + 16 + 4 * 16) + 2 * 16
    )


def test_the_default_is_the_smallest_gpt2():
    with torch.device("meta"):
        model = GPT(GPTConfig())
    assert sum(weight.numel() for weight in model.parameters()) == 124_439_808


@pytest.mark.parametrize(
    "changes, error, text",
    [
        ({"layers": 0}, ValueOutOfRange, "`layers` must be at least 1; got 0"),
        ({"heads": 3}, ValueOutOfRange, "`width` must be a multiple of `heads` = 3; got 16"),
        ({"norm_epsilon": math.nan}, ValueOutOfRange, "`norm_epsilon` must be a positive number; got nan"),
        ({"feedforward_dropout": 1.0}, ValueOutOfRange, r"`feedforward_dropout` must lie in \[0, 1\); got 1.0"),
        ({"activation": "gelu_new"}, UnknownName, "`activation` must be one of .*gelu_tanh.*; got 'gelu_new'"),
        ({"pattern": ("causal()",)}, ValueOutOfRange, "`pattern` must be one text, or one a layer, 2; got 1; repeat"),
        ({"pattern": "window(3, 3)"}, ValueOutOfRange, r"no token sees a later one; got .*; write 'causal\(\) & \("),
        ({"pattern": "casual()"}, (UnknownName, PatternSyntaxError), "casual"),
    ],
)
def test_config_refuses_what_cannot_be(changes, error, text):
    with pytest.raises(error, match=text):
        replace(SMALL, **changes)


def test_calls_are_refused_before_any_work(small):
    ids = some_ids()
    with pytest.raises(ShapeError, match="a sequence must be at most 200 tokens long; got 201; cut the text"):
        small(some_ids(1, 201))
    keep = torch.ones(1, 230)
    keep[:, :30] = 0
    assert small(some_ids(1, 230), keep).logits.shape == (1, 230, VOCABULARY)  # 200 real tokens
    with pytest.raises(ShapeError, match="`last_only` leaves no logits for `labels`; got both; ask for one"):
        small(ids, labels=ids, last_only=True)
    state = small.initial_state(3, 300)
    small(some_ids(3, 195), state=state)
    with pytest.raises(ShapeError, match="at most 200 tokens long; got 206"):
        small(ids, state=state)
    assert state.length == 195
    with pytest.raises(ShapeError, match="`state` must be of 2 layers and 2 sequences"):
        small(ids[:2], state=state)
    with pytest.raises(ValueOutOfRange, match=r"`ids` must lie in 0 .. 60; got 0 .. 61"):
        small(torch.tensor([[0, 61]]))


def stepwise(model, x):
    state = model.initial_state(x.shape[0], x.shape[1])
    with torch.no_grad():
        return torch.cat([model(x[:, n : n + 1], state=state).hidden for n in range(x.shape[1])], 1)


def subject(model, **expected):
    return Subject(
        module=model,
        call=lambda module, x, keep=None: module(x, keep).hidden,
        draw=numbers(VOCABULARY),
        causal=True,
        ordered=True,
        pads=True,
        decode=stepwise,
        idle=("k_proj.bias",),  # it moves all scores of a row alike
        softmax_axis=False,
        **expected,
    )


def test_no_classical_mistake(small):
    check(subject(small))


def test_no_classical_mistake_in_a_sparse_one(small):
    sparse = GPT(replace(SMALL, pattern="strided(4)", layers=1, residual_dropout=0.3)).double()
    random_weights(sparse)
    near = torch.arange(13)[:, None] - torch.arange(13)
    sees = (near >= 0) & ((near < 4) | (near % 4 == 0))
    check(subject(sparse, sees=sees, length=13, dropout=True))


def test_rows_of_no_token_give_nothing(small):
    keep = torch.ones(2, 11)
    keep[1] = 0
    out = small(some_ids(2), keep, labels=some_ids(2))
    assert not out.hidden[1].any()
    close(out.loss, small(some_ids(2)[:1], labels=some_ids(2)[:1]).loss)
    assert Rows.of(keep, 2, 11).lengths == (11, 0)
    assert causal() == small.config.patterns[0]
