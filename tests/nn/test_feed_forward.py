"""The feed-forward sublayer against float64 formulas; where it drops; its first values; refusals."""

from __future__ import annotations

import math

import pytest
import torch

from qkv.errors import DTypeError, UnknownName, ValueOutOfRange
from qkv.nn import FeedForward

DIM, HIDDEN = 5, 12


def each(function, z):
    return torch.tensor([function(number) for number in z.flatten().tolist()], dtype=torch.float64).view(z.shape)


BENDS = {
    "relu": lambda z: max(z, 0.0),
    "gelu": lambda z: z * 0.5 * (1 + math.erf(z / math.sqrt(2))),
    "gelu_tanh": lambda z: 0.5 * z * (1 + math.tanh(math.sqrt(2 / math.pi) * (z + 0.044715 * z**3))),
    "silu": lambda z: z / (1 + math.exp(-z)),
}
GATES = {"reglu": "relu", "geglu": "gelu", "geglu_tanh": "gelu_tanh", "swiglu": "silu"}
ALL = pytest.mark.parametrize("activation", [*BENDS, *GATES])


def linear(layer, x):
    y = x @ layer.weight.double().T
    return y if layer.bias is None else y + layer.bias.double()


def exact(layer, x):
    x = x.double()
    bend = BENDS[GATES.get(layer.activation, layer.activation)]
    up = linear(layer.up_proj, x)
    inner = each(bend, linear(layer.gate_proj, x)) * up if layer.activation in GATES else each(bend, up)
    return linear(layer.down_proj, inner)


@ALL
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(
    "dtype, bound", [(torch.float64, 1e-13), (torch.float32, 1e-5), (torch.bfloat16, 0.05)], ids=str
)
def test_is_its_formula(activation, bias, dtype, bound):
    torch.manual_seed(0)
    layer = FeedForward(DIM, HIDDEN, activation=activation, bias=bias).to(dtype)
    if bias:
        for part in layer.children():
            torch.nn.init.normal_(part.bias)
    x = (2 * torch.randn(2, 3, DIM)).to(dtype)
    got = layer(x)
    want = exact(layer, x).detach()
    assert got.dtype == dtype and got.shape == x.shape
    with torch.no_grad():
        free = layer(x)
    for y in (got, free):
        assert (y.double() - want).abs().max() <= bound * want.abs().max()


@ALL
def test_gradients(activation):
    torch.manual_seed(0)
    layer = FeedForward(3, 4, activation=activation).double()
    x = torch.randn(2, 3, dtype=torch.float64, requires_grad=True)
    names = list(dict(layer.named_parameters()))

    def call(x, *weights):
        return torch.func.functional_call(layer, dict(zip(names, weights, strict=True)), (x,))

    assert torch.autograd.gradcheck(call, (x, *layer.parameters()))
    layer(x).sum().backward()
    assert all(p.grad.abs().max() > 0 for p in layer.parameters())


@pytest.mark.parametrize("activation", ["relu", "swiglu"])
def test_drops_between_activation_and_the_way_back_in_training_only(activation):
    """With down_proj the identity the output is what the activation gives: whole numbers of it are 0, others grow."""
    torch.manual_seed(0)
    layer = FeedForward(400, 400, activation=activation, feedforward_dropout=0.25, bias=False)
    torch.nn.init.eye_(layer.down_proj.weight)
    x = torch.randn(8, 400)
    kept = layer.eval()(x)
    assert torch.equal(kept, layer(x)) and torch.allclose(kept.double(), exact(layer, x).detach(), atol=1e-4)
    dropped = layer.train()(x)
    nonzero = kept != 0
    gone = (dropped == 0) & nonzero
    share = gone.sum() / nonzero.sum()
    assert abs(share.item() - 0.25) < 0.03
    assert torch.allclose(dropped[~gone], kept[~gone] / 0.75, atol=1e-5)
    assert not torch.equal(dropped, layer(x))
    mean = torch.stack([layer(x) for _ in range(400)]).mean(0)
    assert (mean - kept).norm() < 0.06 * kept.norm()


@ALL
def test_one_row_without_a_graph(activation):
    torch.manual_seed(0)
    layer, x = FeedForward(DIM, HIDDEN, activation=activation, bias=False).double(), torch.randn(2, 3, DIM).double()
    want = exact(layer, x)
    with torch.no_grad():
        assert torch.allclose(layer(x), want, atol=1e-13) and torch.allclose(layer(x[:1, :1]), want[:1, :1], atol=1e-13)


def test_a_hook_sees_what_a_linear_map_gave():
    """Nothing is written over it, with a graph or without."""
    layer, x, seen = FeedForward(DIM, HIDDEN, activation="swiglu"), torch.randn(2, DIM), []
    for part in (layer.gate_proj, layer.up_proj):
        part.register_forward_hook(lambda module, given, got: seen.append((got, got.clone())))
    with torch.no_grad():
        layer(x)
    layer(x)
    assert len(seen) == 4 and all(torch.equal(now, then) for now, then in seen)


def test_many_layers_at_once():
    layer, x = FeedForward(DIM, HIDDEN, activation="swiglu"), torch.randn(2, DIM)
    ups = torch.randn(3, HIDDEN, DIM)
    with torch.no_grad():
        got = torch.vmap(lambda up: torch.func.functional_call(layer, {"up_proj.weight": up}, (x,)))(ups)
        want = [torch.func.functional_call(layer, {"up_proj.weight": up}, (x,)) for up in ups]
    assert torch.allclose(got, torch.stack(want), atol=1e-5)


def test_without_dropout_training_changes_nothing():
    layer, x = FeedForward(DIM, HIDDEN), torch.randn(2, DIM)
    assert torch.equal(layer.train()(x), layer.eval()(x))


@pytest.mark.parametrize("activation", ["gelu", "swiglu"])
def test_first_values_are_glorots(activation):
    torch.manual_seed(0)
    layer = FeedForward(300, 500, activation=activation)
    limit = math.sqrt(6 / 800)
    for part in layer.children():
        assert part.bias.abs().max() == 0
        assert part.weight.abs().max() <= limit
        assert abs(part.weight.std().item() - limit / math.sqrt(3)) < 2e-4


def test_names_are_those_of_published_files():
    assert set(FeedForward(4, 8).state_dict()) == {f"{n}_proj.{p}" for n in ("up", "down") for p in ("weight", "bias")}
    names = {"gate_proj.weight", "up_proj.weight", "down_proj.weight"}
    assert set(FeedForward(4, 8, activation="swiglu", bias=False).state_dict()) == names


def test_is_the_mlp_of_transformers():
    transformers = pytest.importorskip("transformers")
    llama = pytest.importorskip("transformers.models.llama.modeling_llama")
    config = transformers.LlamaConfig(hidden_size=16, intermediate_size=40, num_attention_heads=2, mlp_bias=True)
    theirs = llama.LlamaMLP(config)
    ours = FeedForward(16, 40, activation="swiglu")
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(2, 3, 16)
    assert torch.equal(ours(x), theirs(x))


def test_prints_what_it_is():
    assert "activation='gelu', feedforward_dropout=0.1" in str(FeedForward(4, 8, feedforward_dropout=0.1))
    assert "dropout" not in str(FeedForward(4, 8))


@pytest.mark.parametrize(
    "make, error, text",
    [
        (lambda: FeedForward(4, 8, activation="swigul"), UnknownName, "did you mean 'swiglu'"),
        (
            lambda: FeedForward(4, 8, feedforward_dropout=1.0),
            ValueOutOfRange,
            "`feedforward_dropout` must lie in [0, 1)",
        ),
        (lambda: FeedForward(4, 8, feedforward_dropout="0.1"), DTypeError, "`feedforward_dropout` must be a number"),
        (lambda: FeedForward(4, 0), ValueOutOfRange, "`hidden` must be at least 1"),
        (lambda: FeedForward(4.0, 8), DTypeError, "`dim` must be an int"),
        (lambda: FeedForward(4, 8, bias=None), DTypeError, "`bias` must be True or False"),
    ],
)
def test_refusals(make, error, text):
    with pytest.raises(error) as caught:
        make()
    assert text in str(caught.value) and str(caught.value).count(";") == 2
