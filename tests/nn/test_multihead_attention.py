"""The attention layer against torch.nn.MultiheadAttention: every mask, both kinds of output, gradients, names."""

from __future__ import annotations

import itertools

import pytest
import torch

from qkv.errors import CheckpointError
from qkv.nn.multihead_attention import MultiheadAttention

DIM, HEADS, B, L, S = 12, 3, 2, 5, 7
EXACT = 1e-12
SINGLE = 2e-6  # of outputs and gradients near 1, after sums of at most 12 · 7 products of float32
LAYERS = {
    "self": {},
    "self without biases": {"bias": False},
    "cross": {"cross": True},
    "cross of other widths": {"cross": True, "kdim": 8, "vdim": 9},
    "cross of other widths without biases": {"cross": True, "kdim": 8, "vdim": 9, "bias": False},
}


def twins(*, bias=True, kdim=None, vdim=None, dtype=torch.float64):
    """torch's layer, and ours with its weights."""
    theirs = torch.nn.MultiheadAttention(DIM, HEADS, bias=bias, kdim=kdim, vdim=vdim, batch_first=True, dtype=dtype)
    if bias:
        torch.nn.init.normal_(theirs.in_proj_bias)
        torch.nn.init.normal_(theirs.out_proj.bias)
    ours = MultiheadAttention(DIM, HEADS, key_dim=kdim, value_dim=vdim, projection_bias=bias).to(dtype)
    ours.load_state_dict(theirs.state_dict())
    return theirs, ours


def inputs(generator, *, cross=False, kdim=None, vdim=None, dtype=torch.float64):
    query = torch.randn(B, L, DIM, generator=generator, dtype=dtype)
    if not cross:
        return query, query, query
    sizes = (S, kdim or DIM), (S, vdim or DIM)
    return query, *(torch.randn(B, *size, generator=generator, dtype=dtype) for size in sizes)


def masks(keys, generator, dtype):
    """Each kind of each mask; key 0 is seen by all."""
    padding = torch.rand(B, keys, generator=generator) < 0.4
    pairs = torch.rand(L, keys, generator=generator) < 0.4
    heads = torch.rand(B * HEADS, L, keys, generator=generator) < 0.4
    for hides in (padding, pairs, heads):
        hides[..., 0] = False
    numbers = [torch.randn(hides.shape, generator=generator, dtype=dtype) for hides in (padding, pairs, heads)]
    numbers[0][:, 1] = -torch.inf
    return (None, padding, numbers[0]), (None, pairs, heads, numbers[1], numbers[2])


def as_added(mask, dtype):
    """A mask as torch takes it beside one of another kind."""
    if mask is None or mask.dtype != torch.bool:
        return mask
    return torch.zeros(mask.shape, dtype=dtype).masked_fill(mask, -torch.inf)


def gradients(outputs, leaves):
    loss = sum((out * torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)).sum() for out in outputs)
    return torch.autograd.grad(loss, leaves)


def ours_as_theirs(ours, theirs):
    """Pairs of parameters: torch's, and ours that it packs."""
    packed = {"in_proj_weight": "qkv", "in_proj_bias": "qkv"}
    for name, parameter in theirs.named_parameters():
        if name in packed:
            kind = name.rpartition("_")[2]
            yield parameter, [getattr(getattr(ours, f"{part}_proj"), kind) for part in "qkv"]
        elif name.endswith("_proj_weight"):
            yield parameter, [getattr(ours, name.removesuffix("_weight")).weight]
        else:
            yield parameter, [getattr(ours.o_proj, name.rpartition(".")[2])]


def compare(theirs, ours, query, key, value, padding, pairs, *, causal, bound, **asked):
    dtype = query.dtype
    leaves = [t.detach().clone().requires_grad_() for t in dict.fromkeys((query, key, value))]
    q, k, v = leaves if len(leaves) == 3 else leaves * 3
    hides = as_added(pairs, dtype)
    if causal:
        later = torch.ones(L, k.shape[1], dtype=torch.bool).triu(1)
        hides = torch.zeros(L, k.shape[1], dtype=dtype) if hides is None else hides
        hides = hides.masked_fill(later, -torch.inf)
    want = theirs(q, k, v, key_padding_mask=as_added(padding, dtype), attn_mask=hides, **asked)
    got = ours(q, k, v, key_padding_mask=padding, attn_mask=pairs, is_causal=causal, **asked)
    assert (got[1] is None) == (want[1] is None) == (not asked["need_weights"])
    pairs_of = list(ours_as_theirs(ours, theirs))
    parameters = [parameter for parameter, _ in pairs_of], [part for _, parts in pairs_of for part in parts]
    wanted = [out for out in want if out is not None]
    found = [out for out in got if out is not None]
    all_wanted = [*wanted, *gradients(wanted, [*leaves, *parameters[0]])]
    parts = iter(gradients(found, [*leaves, *parameters[1]]))
    all_found = [*found, *(next(parts) for _ in leaves)]
    all_found += [torch.cat([next(parts) for _ in ours_of]) for _, ours_of in pairs_of]
    for a, b in zip(all_found, all_wanted, strict=True):
        assert a.shape == b.shape
        assert (a - b).abs().max() <= bound * max(1.0, b.abs().max().item())


@pytest.mark.parametrize("kind", LAYERS)
def test_agrees_with_torch_whatever_is_asked(kind):
    options = dict(LAYERS[kind])
    cross = options.pop("cross", False)
    generator = torch.Generator().manual_seed(1)
    widths = {name: options.get(name) for name in ("kdim", "vdim")}
    for dtype, bound in ((torch.float64, EXACT), (torch.float32, SINGLE)):
        theirs, ours = twins(dtype=dtype, **options)
        tensors = inputs(generator, cross=cross, dtype=dtype, **widths)
        every = itertools.product(
            *masks(tensors[1].shape[1], generator, dtype), (False, True), ((False, True), (True, True), (True, False))
        )
        for n, (padding, pairs, causal, (need, average)) in enumerate(every):
            if dtype == torch.float32 and n % 3:
                continue
            compare(
                theirs,
                ours,
                *tensors,
                padding,
                pairs,
                causal=causal,
                bound=bound,
                need_weights=need,
                average_attn_weights=average,
            )


def test_same_call_as_torch_with_masks_that_hide():
    theirs, ours = twins()
    generator = torch.Generator().manual_seed(2)
    query, key, value = inputs(generator, cross=True)
    (_, padding, _), (_, pairs, *_) = masks(S, generator, torch.float64)
    for mask in (pairs, torch.ones(L, S, dtype=torch.bool).triu(1)):
        want, _ = theirs(query, key, value, key_padding_mask=padding, attn_mask=mask, need_weights=False)
        got, _ = ours(query, key, value, key_padding_mask=padding, attn_mask=mask)
        torch.testing.assert_close(got, want, atol=EXACT, rtol=0)


def test_is_causal_with_the_mask_that_torch_wants_beside_it():
    theirs, ours = twins()
    x = inputs(torch.Generator().manual_seed(3))[0]
    hides = torch.nn.Transformer.generate_square_subsequent_mask(L, dtype=torch.float64)
    want, _ = theirs(x, x, x, attn_mask=hides, is_causal=True, need_weights=False)
    for mask in (hides, hides.isinf(), None):
        torch.testing.assert_close(ours(x, attn_mask=mask, is_causal=True)[0], want, atol=EXACT, rtol=0)


def test_weights_come_from_the_same_call(recwarn):
    _, ours = twins(dtype=torch.float32)
    generator = torch.Generator().manual_seed(4)
    x = torch.randn(B, 150, DIM, generator=generator)
    hides = torch.rand(150, 150, generator=generator) < 0.5
    plain, none = ours(x, attn_mask=hides)
    assert none is None
    for average in (True, False):
        y, weights = ours(x, attn_mask=hides, need_weights=True, average_attn_weights=average)
        assert torch.equal(y, plain)
        assert weights.shape == ((B, 150, 150) if average else (B, HEADS, 150, 150))


def test_a_hidden_query_gets_the_bias_of_the_output_and_no_gradient():
    theirs, ours = twins()
    x = inputs(torch.Generator().manual_seed(5))[0].requires_grad_()
    hides = torch.zeros(L, L, dtype=torch.bool)
    hides[2] = True
    assert theirs(x, x, x, attn_mask=hides)[0][:, 2].isnan().all()  # as it returns weights
    want, _ = theirs(x, x, x, attn_mask=hides, need_weights=False)
    got, weights = ours(x, attn_mask=hides, need_weights=True)
    assert torch.equal(got[:, 2], ours.o_proj.bias.expand(B, DIM))
    assert torch.equal(weights[:, 2], torch.zeros(B, L, dtype=torch.float64))
    torch.testing.assert_close(got, want, atol=EXACT, rtol=0)
    assert all(grad.isfinite().all() for grad in torch.autograd.grad(got.sum(), [x, *ours.parameters()]))


def test_a_zero_key_of_torch_is_a_sink_of_zero():
    theirs = torch.nn.MultiheadAttention(DIM, HEADS, add_zero_attn=True, batch_first=True, dtype=torch.float64)
    ours = MultiheadAttention(DIM, HEADS, sinks=True).double()
    torch.nn.init.normal_(ours.sinks)
    ours.load_state_dict(theirs.state_dict())  # nothing is missing: zeros have no tensor there
    x = inputs(torch.Generator().manual_seed(6))[0]
    torch.testing.assert_close(ours(x)[0], theirs(x, x, x)[0], atol=EXACT, rtol=0)


def test_gradients_reach_a_mask_that_is_added():
    theirs, ours = twins()
    generator = torch.Generator().manual_seed(7)
    x = inputs(generator)[0]
    padding = torch.randn(B, L, generator=generator, dtype=torch.float64, requires_grad=True)
    pairs = torch.randn(B * HEADS, L, L, generator=generator, dtype=torch.float64, requires_grad=True)
    want, _ = theirs(x, x, x, key_padding_mask=padding, attn_mask=pairs, need_weights=False)
    got, _ = ours(x, key_padding_mask=padding, attn_mask=pairs)
    for a, b in zip(gradients([got], [padding, pairs]), gradients([want], [padding, pairs]), strict=True):
        torch.testing.assert_close(a, b, atol=EXACT, rtol=0)


@pytest.mark.parametrize("assign", [False, True])
def test_names_of_torch_are_read_below_other_modules_too(assign):
    theirs = torch.nn.ModuleDict({"attention": torch.nn.MultiheadAttention(DIM, HEADS, batch_first=True)})
    ours = torch.nn.ModuleDict({"attention": MultiheadAttention(DIM, HEADS)})
    given = theirs.state_dict()
    before = {name: tensor.clone() for name, tensor in given.items()}
    ours.load_state_dict(given, assign=assign)
    assert list(given) == list(before)
    x = torch.randn(B, L, DIM)
    want = theirs["attention"](x, x, x)[0]
    torch.testing.assert_close(ours["attention"](x)[0], want, atol=SINGLE, rtol=0)
    with torch.no_grad():
        ours["attention"].q_proj.weight.add_(1)
    assert all(torch.equal(given[name], tensor) for name, tensor in before.items())


def test_our_own_names_go_there_and_back():
    one, other = (MultiheadAttention(DIM, HEADS, kv_heads=1, qk_norm="head", sinks=True) for _ in range(2))
    assert set(one.state_dict()) == {
        *(f"{part}_proj.{kind}" for part in "qkvo" for kind in ("weight", "bias")),
        "q_norm.weight",
        "k_norm.weight",
        "sinks",
    }
    other.load_state_dict(one.state_dict())
    x = torch.randn(B, L, DIM)
    assert torch.equal(one(x)[0], other(x)[0])


@pytest.mark.parametrize("name", ["bias_k", "bias_v"])
def test_an_extra_key_is_refused(name):
    theirs = torch.nn.MultiheadAttention(DIM, HEADS, add_bias_kv=True)
    tensors = {key: tensor for key, tensor in theirs.state_dict().items() if key in (name, "in_proj_weight")}
    outer = torch.nn.ModuleDict({"mixer": MultiheadAttention(DIM, HEADS)})
    with pytest.raises(CheckpointError, match=rf"'mixer'.*got '{name}', of add_bias_kv=True; append") as caught:
        outer.load_state_dict({f"mixer.{key}": tensor for key, tensor in tensors.items()})
    assert str(caught.value).count("; ") == 2


def test_packed_weights_of_another_layer_are_refused():
    theirs = torch.nn.MultiheadAttention(DIM, HEADS)
    with pytest.raises(
        CheckpointError, match=r"`in_proj_weight` must have the rows of q, k and v, 12 \+ 4 \+ 4; got \[36, 12\]"
    ):
        MultiheadAttention(DIM, HEADS, kv_heads=1).load_state_dict(theirs.state_dict())


def test_unknown_and_missing_names_are_told_as_by_torch():
    theirs = torch.nn.MultiheadAttention(DIM, HEADS).state_dict()
    with pytest.raises(RuntimeError, match=r"Unexpected key.*q_proj\.bias"):
        MultiheadAttention(DIM, HEADS, projection_bias=False).load_state_dict(theirs)
    del theirs["out_proj.weight"]
    with pytest.raises(RuntimeError, match=r"Missing key.*o_proj\.weight"):
        MultiheadAttention(DIM, HEADS).load_state_dict(theirs)
