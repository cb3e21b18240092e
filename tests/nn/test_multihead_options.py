"""What the attention layer can do beyond torch's, against an oracle in float64; types, copies, first values, graphs."""

from __future__ import annotations

import copy
import gc
import math
import pickle

import pytest
import torch

import qkv
from plain_multihead import attended
from qkv.nn.context import Context
from qkv.nn.multihead_attention import MultiheadAttention
from qkv.nn.relative import AlibiBias, T5RelativeBias
from qkv.nn.rotary import Rotary
from qkv.types import AuxRequest

DIM, HEADS, B, L = 24, 4, 3, 11
TABLE = torch.randn(HEADS, 7, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
HEADWISE = qkv.per_head([qkv.causal(), qkv.full(), qkv.window(2), qkv.sliding_window(3)])
OPTIONS = {
    "plain": {},
    "grouped": {"kv_heads": 2},
    "one key head": {"kv_heads": 1, "pattern": qkv.causal()},
    "wide heads": {"head_dim": 10, "kv_heads": 2},
    "window": {"pattern": qkv.sliding_window(4)},
    "both ways": {"pattern": qkv.window(2, 3)},
    "per head": {"pattern": HEADWISE},
    "rotary": {"rotary": Rotary(6), "pattern": qkv.causal()},
    "norm of heads": {"qk_norm": "head", "rotary": Rotary(6, base=100.0)},
    "norm of all": {"qk_norm": "model", "norm_eps": 1e-3, "kv_heads": 2},
    "sinks": {"sinks": True, "pattern": qkv.causal()},
    "softcap and scale": {"softcap": 1.5, "scale": 0.7},
    "negative scale": {"scale": -0.3, "projection_bias": False},
    "relative": {"bias": qkv.relative(TABLE)},
    "tensor": {"bias": TABLE[None, :, :1, None] * torch.arange(L)},
    "alibi": {"bias": AlibiBias(HEADS), "pattern": qkv.causal()},
    "t5": {"bias": T5RelativeBias(HEADS, buckets=8, max_distance=6), "scale": 1.0, "projection_bias": False},
    "output bias alone": {"projection_bias": False, "output_bias": True},
    "all": {
        "kv_heads": 2,
        "qk_norm": "head",
        "rotary": Rotary(6),
        "sinks": True,
        "softcap": 2.0,
        "pattern": qkv.sliding_window(5),
        "bias": qkv.alibi([0.5, 0.25, 0.1, 0.0]),
    },
}


def make(name, **more):
    torch.manual_seed(1)
    layer = MultiheadAttention(DIM, HEADS, **{**OPTIONS[name], **more}).double()
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return layer


def rows(batch=B, length=L, dtype=torch.float64):
    return torch.randn(batch, length, DIM, generator=torch.Generator().manual_seed(2), dtype=dtype)


def added_by(layer, length=L):
    """The layer's bias as a tensor."""
    bias = layer.bias() if isinstance(layer.bias, torch.nn.Module) else layer.bias
    distance = torch.arange(length)[None] - torch.arange(length)[:, None]
    if isinstance(bias, qkv.scores.Alibi):
        return -torch.as_tensor(bias.slopes, dtype=torch.float64)[:, None, None] * distance.abs()
    if isinstance(bias, qkv.scores.Relative):
        return bias.table[:, distance.clamp(-bias.radius, bias.radius) + bias.radius]
    return None if bias is None else bias[..., :length]


def keeps(pattern, length=L):
    return None if pattern is None else pattern.to_dense(length, heads=HEADS)


def agree(found, wanted, bound=1e-12):
    for a, b in zip(found, wanted, strict=True):
        assert (a - b).abs().max() <= bound * max(1.0, b.abs().max().item())


@pytest.mark.parametrize("name", OPTIONS)
def test_every_option_agrees_with_its_formula(name):
    layer, x = make(name), rows().requires_grad_()
    leaves = [x, *layer.parameters()]
    want, weights = attended(layer, x, keep=keeps(layer.pattern), added=added_by(layer))
    plain, none = layer.attend(x)
    y, aux = layer.attend(x, Context(aux=AuxRequest(weights=True)))
    assert none is None
    assert torch.equal(y, plain)
    agree([y, aux.weights], [want, weights])
    slope = torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view_as(y)
    agree(torch.autograd.grad(y, leaves, slope), torch.autograd.grad(want, leaves, slope), 1e-11)
    agree([layer(x)[0]], [want])


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("lengths", [(4, 11, 0), (10, 11, 11)])
def test_padding_on_the_right_changes_no_real_row(name, lengths):
    layer, x = make(name), rows()
    for b, n in enumerate(lengths):
        x[b, n:] = math.nan
    y, _ = layer.attend(x, Context(lengths=lengths))
    for b, n in enumerate(lengths):
        if n:
            want, _ = attended(layer, x[b : b + 1, :n], keep=keeps(layer.pattern, n), added=added_by(layer, n))
            agree([y[b : b + 1, :n]], [want])


def test_a_pass_says_a_pattern_a_bias_and_a_backend():
    layer, x, table = make("grouped"), rows(), TABLE
    context = Context(pattern=qkv.causal(), bias=qkv.relative(table), backend="reference")
    distance = torch.arange(L)[None] - torch.arange(L)[:, None]
    want, _ = attended(layer, x, keep=keeps(qkv.causal()), added=table[:, distance.clamp(-3, 3) + 3])
    agree([layer.attend(x, context)[0]], [want])
    own = make("window", bias=qkv.relative(0 * table))
    short = qkv.sliding_window(4).to_dense(L) & (torch.arange(L) < 9)
    want, _ = attended(own, x, keep=short)
    agree([own.attend(x, Context(pattern=qkv.key_lengths([9] * B), bias=qkv.relative(table)))[0]], [want])
    with pytest.raises(qkv.errors.UnsupportedError, match="flex"):
        layer.attend(x, Context(backend="flex"))


def test_layers_of_one_pass_share_what_it_joins():
    pattern = qkv.sliding_window(4)
    context = Context(lengths=(3, 5), pattern=qkv.causal())
    assert context.within(pattern, 9) is context.within(pattern, 9)
    assert context.over(pattern, (2, 2)) is context.over(pattern, (2, 2))
    assert context.over(pattern, (2, 2)) is not context.over(pattern, (2, 3))
    assert context.visible(pattern) is context.visible(pattern)
    assert Context().visible(pattern) is pattern
    assert Context(lengths=(9, 8)).within(pattern, 9) is pattern  # little padding, which no real row sees


def test_a_rotation_of_the_pass_is_taken():
    layer, x = make("rotary"), rows()
    positions = torch.tensor([[7], [0], [100]]) + torch.arange(L)
    context = Context(rotation=layer.rotary.angles(positions, x.dtype))
    want, _ = attended(layer, x, keep=keeps(qkv.causal()), positions=positions)
    agree([layer.attend(x, context)[0]], [want], 1e-11)
    agree([layer.attend(x, context)[0]], [layer.attend(x)[0]], 1e-11)  # only differences count


@pytest.mark.parametrize("lengths", [None, (4, 7, 0)])
def test_keys_of_another_sequence_are_projected_once(lengths):
    layer, x = make("norm of all", pattern=qkv.full()), rows()
    memory = torch.randn(B, 7, DIM, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    keys = layer.keys_of(memory, lengths=lengths)
    assert keys.key.shape == keys.value.shape == (B, 7, 2, 6)
    keep = torch.arange(7) < torch.tensor(lengths or (7,) * B)[:, None]
    want, weights = attended(layer, x, memory, keep=keep[:, None, None])
    y, aux = layer.attend(x, Context(lengths=(11, 2, 5), aux=AuxRequest(weights="mean")), keys=keys)
    agree([y, aux.weights], [want, weights.mean(1)])


def test_keys_and_values_of_other_widths():
    layer = MultiheadAttention(DIM, HEADS, key_dim=5, value_dim=7).double()
    key, value, x = torch.randn(B, 9, 5).double(), torch.randn(B, 9, 7).double(), rows()
    agree([layer.attend(x, keys=layer.keys_of(key, value))[0]], [layer(x, key, value)[0]])


def test_dropout_acts_in_training_alone_and_by_torchs_seed():
    layer, x = make("grouped", attention_dropout=0.4), rows()
    torch.manual_seed(3)
    first, _ = layer.attend(x)
    second, _ = layer.attend(x)
    torch.manual_seed(3)
    again, _ = layer(x)
    assert torch.equal(first, again)
    assert not torch.equal(first, second)
    torch.manual_seed(3)
    q, k, v = layer.projected(x, x, x)
    heads = qkv.attention(q, k, v, dropout_p=0.4, layout="BLHD")
    assert torch.equal(first, layer.o_proj(heads.flatten(2)))
    layer.eval()
    assert torch.equal(layer.attend(x)[0], layer.attend(x)[0])
    agree([layer(x)[0]], [attended(layer, x)[0]])


def test_first_values_have_glorots_spread_in_each_projection():
    torch.manual_seed(0)
    layer = MultiheadAttention(256, 8, kv_heads=2, sinks=True, qk_norm="head")
    for linear in (layer.q_proj, layer.k_proj, layer.v_proj, layer.o_proj):
        bound = math.sqrt(6 / sum(linear.weight.shape))
        assert linear.weight.abs().max() <= bound
        assert abs(linear.weight.std().item() / (bound / math.sqrt(3)) - 1) < 0.02
        assert not linear.bias.any()
    assert not layer.sinks.any()
    assert layer.q_norm.weight.eq(1).all()
    packed = torch.nn.MultiheadAttention(256, 8).in_proj_weight
    assert abs(layer.q_proj.weight.std().item() / packed.std().item() - math.sqrt(2)) < 0.02


def test_bfloat16_stays_near_its_own_weights_in_float64():
    layer = make("all").bfloat16()
    x = rows(dtype=torch.bfloat16)
    wide = copy.deepcopy(layer).double()
    want, _ = attended(wide, x.double(), keep=keeps(layer.pattern), added=added_by(layer))
    y, _ = layer.attend(x)
    assert y.dtype == torch.bfloat16
    assert (y.double() - want).abs().max() <= 3 * 2.0**-8 * want.abs().max()


@pytest.mark.parametrize("name", ["plain", "all"])
def test_autocast_computes_in_its_own_type(name):
    layer, x = (
        make(name, pattern=OPTIONS[name].get("pattern", qkv.causal())).float(),
        rows(dtype=torch.float32).requires_grad_(),
    )
    with torch.autocast("cpu", torch.bfloat16):
        y, _ = layer.attend(x)
        state = layer.initial_state(B, L, dtype=torch.bfloat16)
        stepped, _ = layer.attend(x, state=state)
    assert y.dtype == stepped.dtype == torch.bfloat16
    want, _ = layer.attend(x)
    assert (y.float() - want).abs().max() <= 4 * 2.0**-8 * want.abs().max()
    (grad,) = torch.autograd.grad(y.float().sum(), [x])
    assert grad.dtype == torch.float32
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(layer.attend(x.bfloat16())[0], y)


@pytest.mark.parametrize("name", OPTIONS)
def test_copies_and_pickles_are_layers_of_their_own(name):
    layer, x = make(name), rows()
    want = layer.attend(x)[0]
    copies = [copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))]
    with torch.no_grad():
        layer.q_proj.weight.zero_()
    for other in copies:
        assert torch.equal(other.attend(x)[0], want)


def test_a_given_tensor_moves_with_the_layer_and_a_parameter_trains_and_is_saved():
    plain = MultiheadAttention(DIM, HEADS, bias=torch.zeros(L, L))
    trained = MultiheadAttention(DIM, HEADS, bias=torch.nn.Parameter(torch.zeros(L, L)))
    assert plain.double().bias.dtype == torch.float64
    assert "bias" not in plain.state_dict()
    assert "bias" in trained.state_dict()
    trained(rows(dtype=torch.float32))[0].sum().backward()
    assert trained.bias.grad.abs().sum() > 0


def test_a_bias_and_a_mask_of_torch_that_is_added_add_up():
    layer, x = make("tensor"), rows()
    mask = torch.randn(L, L, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    agree([layer(x, attn_mask=mask)[0]], [attended(layer, x, added=added_by(layer) + mask)[0]])


@pytest.mark.parametrize("name", ["plain", "all", "t5"])
def test_a_layer_is_one_graph(name):
    layer, x = make(name).float(), rows(dtype=torch.float32)
    torch._dynamo.reset()
    compiled = torch.compile(layer.attend, backend="aot_eager", fullgraph=True)
    y, _ = compiled(x)
    torch.testing.assert_close(y, layer.attend(x)[0], atol=2e-6, rtol=0)
    y.sum().backward()
    assert layer.q_proj.weight.grad.isfinite().all()
    with torch.no_grad():
        torch.testing.assert_close(compiled(x)[0], y, atol=2e-6, rtol=0)


def test_masks_and_padding_run_compiled():
    layer, x = make("window").float().eval(), rows(dtype=torch.float32)
    torch._dynamo.reset()
    compiled = torch.compile(layer, backend="aot_eager")
    hides = torch.rand(L, L) < 0.3
    padding = torch.arange(L).expand(B, L) >= torch.tensor([[4], [11], [9]])
    for options in ({"attn_mask": hides}, {"key_padding_mask": padding}, {"attn_mask": hides, "is_causal": True}):
        torch.testing.assert_close(compiled(x, **options)[0], layer(x, **options)[0], atol=2e-6, rtol=0)
    attend = torch.compile(lambda x, lengths: layer.attend(x, Context(lengths=lengths))[0], backend="aot_eager")
    y = attend(x, (4, 11, 9))
    torch.testing.assert_close(y[0, :4], layer.attend(x[:1, :4])[0][0], atol=2e-6, rtol=0)


def test_biases_and_epsilon_are_those_asked_for():
    for asked, said, wanted in ((True, None, True), (False, None, False), (False, True, True), (True, False, False)):
        layer = MultiheadAttention(DIM, HEADS, projection_bias=asked, output_bias=said)
        assert all((part.bias is not None) == asked for part in (layer.q_proj, layer.k_proj, layer.v_proj))
        assert (layer.o_proj.bias is not None) == wanted
    layer = make("norm of all")
    assert layer.q_norm.eps == layer.k_norm.eps == 1e-3


def test_shows_its_sizes():
    text = repr(MultiheadAttention(DIM, HEADS, kv_heads=2, pattern=qkv.sliding_window(4)))
    assert "24, 4, kv_heads=2, head_dim=6, pattern=sliding_window(4), backend='auto'" in text


@pytest.mark.parametrize("name", ["attn_mask", "key_padding_mask"])
def test_a_mask_of_numbers_that_looks_like_one_that_hides_is_told_in_words_of_torch(name):
    layer, x = make("plain"), rows()
    mask = torch.ones(*((L, L) if name == "attn_mask" else (B, L)), dtype=torch.float64).tril()
    text = rf"`{name}` is added to the scores.*; say {name}\.bool\(\) where 1 hides, \({name} == 0\) where 1 keeps"
    with pytest.warns(qkv.errors.AddedMaskWarning, match=text) as told:
        y, _ = layer(x, **{name: mask})
    assert len(told) == 1
    assert told[0].filename == __file__
    added = mask if name == "attn_mask" else mask[:, None, None]
    agree([y], [attended(layer, x, added=added)[0]])
    layer(x, **{name: -mask})
    layer(x, **{name: torch.zeros_like(mask)})


def test_a_call_without_a_context_remembers_nothing():
    layer, x = make("plain"), rows()

    def remembered():
        gc.collect()
        return sum(len(made._joined) for made in gc.get_objects() if type(made) is Context)

    before = remembered()
    for n in range(1, L):
        layer.attend(x, keys=layer.keys_of(x, lengths=[n] * B))
    assert remembered() == before
