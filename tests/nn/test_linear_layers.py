"""Layers of the linear family against float64 oracles written out here; steps and segments; names; refusals."""

from __future__ import annotations

import copy
import math
import pickle
from itertools import pairwise

import pytest
import torch
from torch.nn import functional as F

from qkv.errors import (
    CheckpointError,
    DeviceError,
    DTypeError,
    ShapeError,
    UnknownName,
    UnsupportedError,
    ValueOutOfRange,
)
from qkv.linear.engine import ENGINES
from qkv.nn import (
    GatedDeltaNet,
    GatedLinearAttention,
    KimiDeltaAttention,
    LayerState,
    LinearAttention,
    Mamba2Mixer,
    Retention,
)
from qkv.nn.passage import Passage

DIM, LENGTH = 24, 21
ROUNDOFF = {torch.float64: 2.0**-53, torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8}


def close(got, want, dtype, times=1000):
    """Within so many roundoffs of the greatest number: a chain of six products of 24 terms and a norm."""
    error = (got.double() - want.double()).abs().max().item()
    assert error <= times * ROUNDOFF[dtype] * want.abs().max().item(), error


def recurrence(q, k, v, g=None, beta=None, scale=None):
    """o (B, L, H, V) token by token; q and k (B, L, K, D), v (B, L, H, V), g (B, L, H[, D]), beta (B, L, H)."""
    q, k = (x.repeat_interleave(v.shape[2] // x.shape[2], dim=2) for x in (q, k))
    state = v.new_zeros(v.shape[0], v.shape[2], q.shape[-1], v.shape[-1])
    out = []
    for t in range(v.shape[1]):
        if g is not None:
            decay = g[:, t].exp()
            state = state * (decay[..., None, None] if decay.ndim == 2 else decay[..., None])
        write = v[:, t]
        if beta is not None:
            write = beta[:, t, :, None] * (write - torch.einsum("bhd,bhdv->bhv", k[:, t], state))
        state = state + torch.einsum("bhd,bhv->bhdv", k[:, t], write)
        out.append(torch.einsum("bhd,bhdv->bhv", q[:, t], state))
    return torch.stack(out, dim=1) * (q.shape[-1] ** -0.5 if scale is None else scale)


def convolved(x, weight, bias=None):
    padded = F.pad(x.transpose(1, 2), (weight.shape[-1] - 1, 0))
    return F.silu(F.conv1d(padded, weight, bias, groups=weight.shape[0])).transpose(1, 2)


def unit(x):
    return x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt()


def rms(x, eps):
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt()


def of_linear(layer, p, x):
    q, k, v = ((x @ p[f"{part}_proj.weight"].T).unflatten(-1, (layer.heads, -1)) for part in "qkv")
    if "feature_map.weight" in p:
        q, k = (
            torch.cat([y, -y], -1).softmax(-1)
            for part in (q, k)
            for y in [2 * (torch.einsum("blhd,hed->blhe", part, p["feature_map.weight"]) + p["feature_map.bias"])]
        )
    else:
        q, k = F.elu(q) + 1, F.elu(k) + 1
    weights = torch.einsum("blhd,bmhd->bhlm", q, k)
    weights = weights.tril() if layer.is_causal else weights
    if layer.normalize:
        weights = weights / weights.sum(-1, keepdim=True)
    return torch.einsum("bhlm,bmhv->blhv", weights, v).flatten(-2) @ p["o_proj.weight"].T


def of_retention(layer, p, x):
    q, k, v = ((x @ p[f"{part}_proj.weight"].T) for part in "qkv")
    if layer.activation:
        q, k, v = F.silu(q), F.silu(k), F.silu(v)
    q, k, v = (part.unflatten(-1, (layer.heads, -1)) for part in (q, k, v))
    if layer.rotary:
        half = q.shape[-1] // 2
        angle = torch.arange(x.shape[1])[:, None] / 10000 ** (torch.arange(half).double() / (half - 1))
        turn = torch.polar(torch.ones_like(angle), angle)[:, None]
        q, k = (
            torch.view_as_real(torch.view_as_complex(part.unflatten(-1, (-1, 2))) * turn).flatten(-2) for part in (q, k)
        )
    decay = torch.tensor(layer.decay, dtype=torch.float64).expand(*x.shape[:2], -1)
    o = recurrence(q, k, v, decay, scale=layer.scale)
    gate = (x @ p["g_proj.weight"].T).unflatten(-1, (layer.heads, -1))
    gate = gate.sigmoid() if layer.gate == "sigmoid" else F.silu(gate)
    if layer.normalisation == "group":
        o = o - o.mean(-1, keepdim=True)
    if layer.normalisation == "whole":
        o = (rms(o.flatten(-2), layer.eps) * p["norm.weight"]).unflatten(-1, (layer.heads, -1))
    else:
        o = rms(o, layer.eps)
    return (o * gate).flatten(-2) @ p["out_proj.weight"].T


def of_gated_linear(layer, p, x):
    q, k, v, gate = ((x @ p[f"{part}_proj.weight"].T).unflatten(-1, (layer.heads, -1)) for part in "qkvg")
    logits = x @ p["gk_proj.0.weight"].T @ p["gk_proj.1.weight"].T + p["gk_proj.1.bias"]
    g = F.logsigmoid(logits).unflatten(-1, (layer.heads, -1)) / 16
    o = rms(recurrence(q, k, v, g), 1e-5) * p["g_norm_swish_gate.weight"]
    return (o * F.silu(gate)).flatten(-2) @ p["o_proj.weight"].T


def of_gated_delta(layer, p, x):
    mixed = convolved(x @ p["in_proj_qkv.weight"].T, p["conv1d.weight"])
    q, k, v = mixed.split([layer.key_heads * layer.head_k_dim] * 2 + [layer.heads * layer.head_v_dim], -1)
    q, k = (unit(part.unflatten(-1, (layer.key_heads, -1))) for part in (q, k))
    v, z = (part.unflatten(-1, (layer.heads, -1)) for part in (v, x @ p["in_proj_z.weight"].T))
    g = -p["A_log"].exp() * F.softplus(x @ p["in_proj_a.weight"].T + p["dt_bias"])
    beta = (x @ p["in_proj_b.weight"].T).sigmoid() * (1 + layer.allow_neg_eigval)
    o = rms(recurrence(q, k, v, g, beta), 1e-6) * p["norm.weight"] * F.silu(z)
    return o.flatten(-2) @ p["out_proj.weight"].T


def of_kimi(layer, p, x):
    qkv = torch.cat([x @ p[f"{part}_proj.weight"].T for part in "qkv"], -1)
    q, k, v = (part.unflatten(-1, (layer.heads, -1)) for part in convolved(qkv, p["conv1d.weight"]).chunk(3, -1))
    f = x @ p["forget_gate.f_a_proj.weight"].T @ p["forget_gate.f_b_proj.weight"].T + p["forget_gate.dt_bias"]
    f, rate = f.unflatten(-1, (layer.heads, -1)), p["forget_gate.A_log"].exp()
    bound = layer.forget_gate.bound
    g = -rate * F.softplus(f) if bound is None else bound * (rate * f).sigmoid()
    o = recurrence(unit(q), unit(k), v, g, (x @ p["b_proj.weight"].T).sigmoid())
    gate = (x @ p["g_a_proj.weight"].T @ p["g_b_proj.weight"].T).unflatten(-1, (layer.heads, -1))
    return (rms(o, 1e-5) * p["o_norm.weight"] * gate.sigmoid()).flatten(-2) @ p["o_proj.weight"].T


def of_mamba2(layer, p, x):
    inner, shared = layer.heads * layer.head_dim, layer.n_groups * layer.state_size
    z, mixed, dt = (x @ p["in_proj.weight"].T).split([inner, inner + 2 * shared, layer.heads], -1)
    u, b, c = convolved(mixed, p["conv1d.weight"], p["conv1d.bias"]).split([inner, shared, shared], -1)
    u = u.unflatten(-1, (layer.heads, -1))
    b, c = (part.unflatten(-1, (layer.n_groups, -1)) for part in (b, c))
    dt = F.softplus(dt + p["dt_bias"]).clamp(*layer.time_step_limit)
    o = recurrence(c, b, dt[..., None] * u, -dt * p["A_log"].exp(), scale=1) + p["D"][:, None] * u
    o = (o.flatten(-2) * F.silu(z)).unflatten(-1, (layer.n_groups, -1))
    return (rms(o, 1e-5).flatten(-2) * p["norm.weight"]) @ p["out_proj.weight"].T


# name: how it is made, and its oracle.
LAYERS = {
    "linear": (lambda: LinearAttention(DIM, 3), of_linear),
    "linear-bare": (lambda: LinearAttention(DIM, 3, head_v_dim=5, normalize=False), of_linear),
    "linear-hedgehog": (lambda: LinearAttention(DIM, 3, feature_map="hedgehog"), of_linear),
    "retention": (lambda: Retention(DIM, 3), of_retention),
    "retention-group": (lambda: Retention(DIM, 3, norm="group"), of_retention),
    "lightning": (lambda: Retention.lightning(DIM, 4, layer=1, layers=6), of_retention),
    "gated-linear": (lambda: GatedLinearAttention(DIM, 3), of_gated_linear),
    "gated-delta": (lambda: GatedDeltaNet(DIM, 4, key_heads=2, head_k_dim=6, head_v_dim=10), of_gated_delta),
    "gated-delta-negative": (lambda: GatedDeltaNet(DIM, 3, allow_neg_eigval=True, conv_size=2), of_gated_delta),
    "kimi": (lambda: KimiDeltaAttention(DIM, 3), of_kimi),
    "kimi-bounded": (lambda: KimiDeltaAttention(DIM, 2, head_dim=10, gate_lower_bound=-5.0), of_kimi),
    "mamba2": (lambda: Mamba2Mixer(DIM, 6, state_size=7), of_mamba2),
    "mamba2-groups": (
        lambda: Mamba2Mixer(DIM, 6, state_size=7, n_groups=2, time_step_limit=(0.4, 0.9)),
        of_mamba2,
    ),
}
every = pytest.mark.parametrize("name", LAYERS)
types = pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])


def made(name, dtype=torch.float64, length=LENGTH, batch=2):
    """A layer with lively weights, so that no part of it hides, and an input."""
    torch.manual_seed(0)
    layer = LAYERS[name][0]()
    for parameter in layer.parameters():
        if parameter.ndim > 1 and parameter.shape[-1] > 1:
            torch.nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5)
        else:
            torch.nn.init.normal_(parameter, std=0.3).data.add_(0.2)
    return layer.to(dtype), torch.randn(batch, length, DIM, dtype=dtype)


@types
@every
def test_layer_is_its_formula(name, dtype):
    layer, x = made(name, dtype)
    parameters = {key: value.detach().double() for key, value in layer.state_dict().items()}
    close(layer(x), LAYERS[name][1](layer, parameters, x.double()), dtype)


@every
def test_gradients_are_those_of_the_formula_and_reach_every_parameter(name):
    layer, x = made(name)
    x.requires_grad_()
    names, parameters = zip(*layer.named_parameters(), strict=True)
    seed = torch.randn(2, LENGTH, DIM, dtype=torch.float64)
    got = torch.autograd.grad((layer(x) * seed).sum(), (x, *parameters))
    oracle = LAYERS[name][1](layer, dict(zip(names, parameters, strict=True)), x)
    want = torch.autograd.grad((oracle * seed).sum(), (x, *parameters))
    for key, ours, theirs in zip(("x", *names), got, want, strict=True):
        assert theirs.abs().max() > 0, key
        close(ours, theirs, torch.float64, times=20000)


@types
@every
def test_steps_are_the_whole(name, dtype):
    layer, x = made(name, dtype)
    state = layer.initial_state(2)
    steps = [layer.step(x[:, t], state)[0] for t in range(LENGTH)]
    close(torch.stack(steps, dim=1), layer(x), dtype)
    assert state.length == LENGTH
    assert state.lengths == (LENGTH, LENGTH)


@types
@every
def test_segments_and_steps_are_the_whole(name, dtype):
    layer, x = made(name, dtype)
    state = layer.initial_state(2)
    parts = []
    for start, stop in ((0, 1), (1, 3), (3, 3), (3, 12), (12, 13)):
        y, again = layer(x[:, start:stop], state)
        assert again is state
        parts.append(y)
    parts += [layer.step(x[:, 13], state)[0][:, None], layer(x[:, 14:], state)[0]]
    close(torch.cat(parts, dim=1), layer(x), dtype)


@every
def test_packed_sequences_are_each_their_own(name):
    layer, x = made(name, batch=1)
    bounds = [0, 9, 9, 10, LENGTH]
    each = [layer(x[:, start:stop]) for start, stop in pairwise(bounds)]
    close(layer(x, cu_seqlens=torch.tensor(bounds)), torch.cat(each, dim=1), torch.float64)

    state = layer.initial_state(4)
    y, _ = layer(x, state, cu_seqlens=bounds)
    close(y, torch.cat(each, dim=1), torch.float64)
    assert state.lengths == (9, 0, 1, 11)
    more = torch.randn(4, 2, DIM, dtype=torch.float64)
    first, _ = layer.step(more[:, 0], state)
    second, _ = layer(more[:, 1:], state)
    for n, (start, stop) in enumerate(pairwise(bounds)):
        whole = layer(torch.cat([x[:, start:stop], more[n : n + 1]], dim=1))[0, -2:]
        close(torch.stack([first[n], second[n, 0]]), whole, torch.float64)


@every
def test_packed_sequences_go_on_packed(name):
    layer, x = made(name, batch=1)
    state = layer.initial_state(2)
    first, _ = layer(x[:, :9], state, cu_seqlens=[0, 7, 9])
    second, _ = layer(x[:, 9:], state, cu_seqlens=[0, 5, 12])
    one = layer(torch.cat([x[:, :7], x[:, 9:14]], dim=1))
    other = layer(torch.cat([x[:, 7:9], x[:, 14:]], dim=1))
    close(first, torch.cat([one[:, :7], other[:, :2]], dim=1), torch.float64)
    close(second, torch.cat([one[:, 7:], other[:, 2:]], dim=1), torch.float64)


@every
def test_no_gradient_flows_through_a_state(name):
    layer, x = made(name)
    before, after = x[:, :9].clone().requires_grad_(), x[:, 9:].clone().requires_grad_()
    state = layer.initial_state(2)
    layer(before, state)
    y, _ = layer(after, state)
    assert not state.recurrent.state.requires_grad
    past, now = torch.autograd.grad(y.square().sum(), (before, after), allow_unused=True)
    assert past is None
    assert now.abs().max() > 0
    y, _ = layer.step(after[:, 0], state)
    assert not y.requires_grad


@every
def test_snapshot_restore_and_fork(name):
    layer, x = made(name)
    state = layer.initial_state(2)
    layer(x[:, :8], state)
    snapshot = state.snapshot()
    first, _ = layer(x[:, 8:12], state)
    other = state.fork()
    ahead, _ = layer(x[:, 12:], other)
    assert (state.length, other.length) == (12, LENGTH)
    assert state.nbytes == other.nbytes > 0
    again, _ = layer(x[:, 12:], state)
    assert torch.equal(again, ahead)
    for _ in "12":
        state.restore(snapshot)
        assert state.length == 8
        assert torch.equal(layer(x[:, 8:12], state)[0], first)


def test_a_state_has_a_constant_size():
    layer, x = made("gated-delta", torch.float32)
    state = layer.initial_state(2)
    size = state.nbytes
    layer(x, state)
    assert state.nbytes == size == 4 * 2 * (4 * 6 * 10 + 3 * (2 * 12 + 40))


@every
def test_sixteen_bits_follow_float32(name):
    layer, x = made(name, torch.float32)
    narrow = copy.deepcopy(layer).to(torch.bfloat16)
    layer.load_state_dict({key: value.float() for key, value in narrow.state_dict().items()})
    x = x.to(torch.bfloat16)
    want = layer(x.float())
    got = narrow(x)
    assert got.dtype == torch.bfloat16
    close(got, want, torch.bfloat16, times=16)
    state = narrow.initial_state(2)
    assert state.recurrent.state.dtype == torch.float32
    steps = torch.stack([narrow.step(x[:, t], state)[0] for t in range(LENGTH)], dim=1)
    assert steps.dtype == torch.bfloat16
    close(steps, want, torch.bfloat16, times=16)


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("name", [name for name in LAYERS if name != "linear-bare"])  # which no norm bounds
def test_large_inputs_stay_in_the_range_of_float16(name, autocast):
    layer, x = made(name, torch.float32)
    narrow, x = copy.deepcopy(layer).half(), (1e3 * x).half()
    layer.load_state_dict({key: value.float() for key, value in narrow.state_dict().items()})
    want = layer(x.float())
    called, given = (layer, x.float()) if autocast else (narrow, x)
    with torch.autocast("cpu", torch.float16, enabled=autocast):
        got = called(given)
        state = called.initial_state(2, dtype=torch.float16)
        steps = torch.stack([called.step(given[:, t], state)[0] for t in range(LENGTH)], dim=1)
    for y in (got, steps):
        assert y.dtype == torch.float16
        assert (y.float() - want).abs().max() <= 2e-2 * want.abs().max()


@pytest.mark.parametrize(
    "name", ["gated-delta", "kimi", "kimi-bounded", "mamba2", "gated-linear", "retention", "lightning"]
)
def test_gates_of_sixteen_bit_layers_are_those_of_float32(name, monkeypatch):
    seen = []
    recur = Passage.recur

    def watched(*args, **options):
        seen.append(options["decay"] if "decay" in options else args[5])
        return recur(*args, **options)

    monkeypatch.setattr(Passage, "recur", watched)
    layer, x = made(name, torch.bfloat16)
    layer(0 * x)  # what is projected is exact
    layer.float()(0 * x.float())
    assert seen[0].dtype == seen[1].dtype == torch.float32
    assert (seen[0] < 0).all()
    assert torch.equal(*seen)
    if isinstance(layer, Retention):
        assert torch.equal(seen[0], torch.tensor(layer.decay))
        assert torch.equal(copy.deepcopy(layer).bfloat16().initial_state(1).recurrent._setting.decay, seen[0])


@every
def test_states_made_and_used_in_inference_mode_or_not(name):
    layer, x = made(name)
    with torch.no_grad():
        want = layer(x)
    for inside in (True, False):
        with torch.inference_mode(inside):
            state = layer.initial_state(2)
            state = state.fork()
            state.reorder([0, 1])
            assert state.tail is None or not state.tail.is_inference()
            state = pickle.loads(pickle.dumps(state))
        layer(x[:, :3], state)
        with torch.inference_mode(inside):
            snapshot = state.snapshot()
            state.restore(snapshot)
        parts = [layer.step(x[:, t], state)[0] for t in (3, 4)]
        with torch.inference_mode(not inside):
            parts += [layer.step(x[:, t], state)[0] for t in (5, 6)]
            layer(x[:, 7:9], state)
        parts += layer(x[:, 9:], state)[0].unbind(1)
        close(torch.stack(parts, dim=1), torch.cat([want[:, 3:7], want[:, 9:]], dim=1), torch.float64)
        state.restore(snapshot)
        close(layer.step(x[:, 3], state)[0], want[:, 3], torch.float64)
        assert not any(tensor.is_inference() for tensor in (state.recurrent.state, state.tail) if tensor is not None)


@every
@pytest.mark.parametrize("how", [copy.copy, copy.deepcopy, lambda state: pickle.loads(pickle.dumps(state))])
def test_a_copy_of_a_state_goes_on_by_itself(name, how):
    layer, x = made(name)
    state = layer.initial_state(2)
    layer(x[:, :8], state)
    twin = how(state)
    layer(x[:, 8:], twin)
    assert (state.length, twin.length) == (8, LENGTH)
    close(layer(x[:, 8:], state)[0], layer(x)[:, 8:], torch.float64)


@every
@pytest.mark.parametrize("backend", ["chunked", "reference"])
def test_the_layer_s_backend_answers_its_steps(name, backend, monkeypatch):
    layer, x = made(name)
    state = layer.initial_state(2)
    layer(x[:, :8], state)
    for engine in {"cpu", "chunked", "reference"} - {backend}:
        monkeypatch.setitem(ENGINES, engine, None)
    monkeypatch.setattr("qkv.linear.state.at_once", None)
    monkeypatch.setattr("qkv.linear.native.advance", None)
    layer.backend = backend
    assert layer.initial_state(2).recurrent.backend == backend
    for one in (state, layer.initial_state(2)):  # also that of a layer with another
        layer.step(x[:, 8], one)
        assert one.recurrent.backend == backend
    close(layer.step(x[:, 9], state)[0], layer(x[:, :10])[:, 9], torch.float64)


@every
def test_a_backend_that_is_none_is_refused_at_once(name, monkeypatch):
    kind = type(LAYERS[name][0]())
    with pytest.raises(UnknownName, match="`backend` must be one of auto, chunked, cpu, reference; got 'triton'"):
        kind(DIM, 3 if kind is not Mamba2Mixer else 6, backend="triton")


def test_a_step_that_the_backend_cannot_answer_leaves_no_trace():
    layer = GatedDeltaNet(DIM, 1, head_k_dim=300, head_v_dim=4, backend="cpu")
    state, x = layer.initial_state(1), torch.randn(1, DIM)
    with pytest.raises(UnsupportedError, match="`backend` 'cpu' must be able to answer the call"):
        layer.step(x, state)
    assert not state.tail.any() and state.lengths == (0,)


@every
def test_states_for_inputs_of_another_type_are_told_so(name):
    layer, x = made(name, torch.float32)
    told = "`state` must be made for inputs of {}, in which the layer runs here; got one for {}; make it with "
    calls = (lambda state: layer(x, state), lambda state: layer.step(x[:, 0], state))
    state = layer.initial_state(2, dtype=torch.float64)
    for call in calls:
        with pytest.raises(
            DTypeError, match=told.format("float32", "float64") + r"initial_state\(batch, dtype=torch.fl"
        ):
            call(state)
    assert state.length == 0 and not state.recurrent.state.any()
    state = layer.initial_state(2)
    if state.tail is None:
        return
    remedy = r"initial_state\(batch, dtype=torch.bfloat16\)"
    for call in calls:
        with (
            torch.autocast("cpu", torch.bfloat16),
            pytest.raises(DTypeError, match=told.format("bfloat16", "float32") + remedy),
        ):
            call(state)
    assert state.length == 0 and not state.recurrent.state.any()


@every
def test_an_open_draft_or_an_interrupted_state_is_refused(name):
    layer, x = made(name)
    state = layer.initial_state(2)
    layer(x[:, :8], state)
    snapshot, memory = state.snapshot(), layer.memory()
    q = torch.randn(2, memory.key_heads, memory.key_dim, dtype=torch.float64).abs()
    v, g = (torch.zeros(2, memory.heads, n, dtype=torch.float64) for n in (memory.value_dim, memory.key_dim))
    gate = {"gated_linear": g, "kimi_delta": g, "gated_delta": g[..., 0], "ssd": g[..., 0]}.get(memory.rule)
    state.recurrent.step(q, q, v, gate, g[..., 0] if "delta" in memory.rule else None, draft=True)
    for call, method in ((lambda: layer(x, state), "forward"), (lambda: layer.step(x[:, 0], state), "step")):
        with pytest.raises(UnsupportedError, match=f"`{method}` must not meet an open draft; 1 tokens are drafted; "):
            call()
        assert state.recurrent.drafted == 1
    state.recurrent.reject()
    state.recurrent._tear()
    for call in (lambda: layer(x, state), lambda: layer.step(x[:, 0], state)):
        with pytest.raises(UnsupportedError, match="a state must be whole; a step ended early"):
            call()
    state.restore(snapshot)
    close(layer(x[:, 8:], state)[0], layer(x)[:, 8:], torch.float64)


@every
def test_without_numbers_shapes_come_out_as_everywhere(name):
    layer, x = made(name)
    layer, x = layer.to("meta"), x.to("meta")
    state = layer.initial_state(2)
    assert layer(x, state)[0].shape == x.shape
    assert layer.step(x[:, 0], state)[0].shape == (2, DIM)
    assert state.recurrent.state.is_meta and state.length == LENGTH + 1
    state.restore(state.snapshot())


def test_bidirectional_reads_all_and_has_no_state():
    torch.manual_seed(0)
    layer, x = LinearAttention(DIM, 3, is_causal=False).double(), torch.randn(2, LENGTH, DIM, dtype=torch.float64)
    close(layer(x), of_linear(layer, layer.state_dict(), x), torch.float64)
    with pytest.raises(UnsupportedError, match="must be causal; got is_causal=False"):
        layer.initial_state(1)


@pytest.mark.parametrize("feature_map", ["relu", "softmax", "favor", "taylor", torch.nn.Softplus(), torch.exp])
def test_feature_maps_decode(feature_map):
    torch.manual_seed(0)
    layer, x = LinearAttention(DIM, 6, feature_map=feature_map).double(), torch.randn(2, 9, DIM, dtype=torch.float64)
    state = layer.initial_state(2)
    y, _ = layer(x[:, :5], state)
    steps = [layer.step(x[:, t], state)[0][:, None] for t in range(5, 9)]
    close(torch.cat([y, *steps], dim=1), layer(x), torch.float64)


def test_a_module_as_feature_map_is_trained_with_the_layer():
    layer = LinearAttention(DIM, 3, feature_map=torch.nn.Sequential(torch.nn.Linear(8, 11), torch.nn.Softplus()))
    assert {"feature_map.0.weight", "feature_map.0.bias"} < set(dict(layer.named_parameters()))
    layer, x = layer.double(), torch.randn(1, 5, DIM, dtype=torch.float64)
    q, k, v = ((x @ layer.get_parameter(f"{part}_proj.weight").T).unflatten(-1, (3, 8)) for part in "qkv")
    weights = torch.einsum("blhm,bnhm->bhln", layer.feature_map(q), layer.feature_map(k)).tril()
    want = torch.einsum("bhln,bnhv->blhv", weights / weights.sum(-1, keepdim=True), v).flatten(-2)
    seed, learned = torch.randn_like(x), tuple(layer.feature_map.parameters())
    got = torch.autograd.grad((layer(x) * seed).sum(), learned)
    for ours, theirs in zip(got, torch.autograd.grad((layer.o_proj(want) * seed).sum(), learned), strict=True):
        assert theirs.abs().max() > 0
        close(ours, theirs, torch.float64)
    assert layer.initial_state(1).recurrent.state.shape[2] == 11


def test_first_values_are_those_of_the_sources():
    torch.manual_seed(0)
    for parameters in (GatedDeltaNet(64, 64), KimiDeltaAttention(64, 64).forget_gate, Mamba2Mixer(64, 64)):
        step = F.softplus(parameters.dt_bias)
        assert 0.99e-3 <= step.min() <= 2e-3
        assert 5e-2 <= step.max() <= 1.01e-1
    assert 0 <= Mamba2Mixer(64, 64).A_log.min() <= Mamba2Mixer(64, 64).A_log.max() <= math.log(16)
    assert KimiDeltaAttention(64, 64).forget_gate.A_log.min() >= 0
    assert (KimiDeltaAttention(64, 64, gate_lower_bound=-5.0).forget_gate.A_log == 0).all()
    assert (Mamba2Mixer(64, 64).D == 1).all()
    assert Retention(8, 2).decay == pytest.approx((math.log(1 - 2**-5), math.log(1 - 2**-6)), rel=1e-15)
    factor = 1 - 1 / (5 + 1e-5) + 1e-5
    slopes = [2**-2 * factor, 2**-4 * factor, 2**-6 * factor, 2**-8 * factor]
    assert Retention.lightning(DIM, 4, layer=1, layers=6).decay == pytest.approx(
        [-slope for slope in slopes], rel=1e-15
    )
    bound = 2**-2.5 * math.sqrt(6 / 128)
    assert 0.9 * bound < Retention(64, 4).q_proj.weight.abs().max() <= bound


def test_reorder_is_what_beam_search_needs():
    layer, x = made("gated-delta")
    state = layer.initial_state(2)
    layer(x[:, :8], state)
    state.reorder([1, 1, 0])
    assert state.batch == 3
    ahead, _ = layer(x[[1, 1, 0], 8:], state)
    close(ahead, layer(x)[[1, 1, 0], 8:], torch.float64)


def test_sequences_of_one_batch_may_stand_at_different_places():
    layer, x = made("retention", batch=1)
    state = layer.initial_state(2)
    layer(x[:, :12], state, cu_seqlens=[0, 9, 12])
    got, _ = layer(x[:, 12:15].expand(2, -1, -1), state)
    for n, (start, stop) in enumerate(((0, 9), (9, 12))):
        whole = layer(torch.cat([x[:, start:stop], x[:, 12:15]], dim=1))
        close(got[n], whole[0, -3:], torch.float64)


def test_an_empty_batch_and_no_tokens():
    for name in LAYERS:
        layer, x = made(name)
        assert layer(x[:0]).shape == (0, LENGTH, DIM)
        assert layer(x[:, :0]).shape == (2, 0, DIM)


def test_a_call_that_fails_leaves_the_state_as_it_was():
    layer, x = made("gated-delta")
    state = layer.initial_state(2)
    layer(x[:, :5], state)
    kept, tail = state.recurrent.state.clone(), state.tail.clone()
    layer.norm.weight = torch.nn.Parameter(torch.ones(3, dtype=torch.float64))
    with pytest.raises(ShapeError):
        layer(x[:, 5:], state)
    assert torch.equal(state.recurrent.state, kept)
    assert torch.equal(state.tail, tail)
    assert state.lengths == (5, 5)


def test_a_step_that_fails_after_the_recurrence_has_read_its_token():
    layer, x = made("gated-delta")
    state = layer.initial_state(2)
    layer(x[:, :5], state)
    weight, layer.norm.weight = layer.norm.weight, torch.nn.Parameter(torch.ones(3, dtype=torch.float64))
    with pytest.raises(ShapeError):
        layer.step(x[:, 5], state)
    layer.norm.weight = weight
    assert state.lengths == (6, 6)
    close(layer(x[:, 6:], state)[0], layer(x)[:, 6:], torch.float64)


@every
def test_autocast_is_the_layer_in_its_type(name):
    layer, x = made(name, torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        got = layer(x)
        state = layer.initial_state(2, dtype=torch.bfloat16)
        steps = torch.stack([layer.step(x[:, t], state)[0] for t in range(LENGTH)], dim=1)
    assert got.dtype == torch.bfloat16
    close(got, layer(x), torch.bfloat16, times=16)
    close(steps, layer(x), torch.bfloat16, times=16)


@pytest.mark.parametrize("name", ["gated-delta", *(pytest.param(name, marks=pytest.mark.long) for name in LAYERS)])
def test_layers_compile_into_one_graph(name):
    layer, x = made(name)
    torch._dynamo.reset()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    close(compiled(x), layer(x), torch.float64)


def test_a_state_of_another_layer_is_refused():
    layer, x = made("gated-delta")
    other = GatedDeltaNet(DIM, 4, key_heads=2, head_k_dim=6, head_v_dim=12).double().initial_state(2)
    with pytest.raises(
        ValueOutOfRange, match=r"GatedDeltaNet \(4, 2, 6, 10\) .* got one of GatedDeltaNet \(4, 2, 6, 12\)"
    ):
        layer(x, other)
    with pytest.raises(ValueOutOfRange, match="got one of KimiDeltaAttention"):
        layer.step(x[:, 0], KimiDeltaAttention(DIM, 3).initial_state(2))
    with pytest.raises(DTypeError, match="`state` must be a state of this layer; got Tensor; make one with initial"):
        layer(x, x)
    with pytest.raises(ShapeError, match="got a state of 3 and a call of 2"):
        layer(x, layer.initial_state(3))
    with pytest.raises(ShapeError, match="got a state of 3 and a call of 2"):
        layer(x[:1], layer.initial_state(3), cu_seqlens=[0, 4, LENGTH])
    with pytest.raises(DTypeError, match="float32"):
        layer(x, layer.initial_state(2, dtype=torch.float32))
    with pytest.raises(ValueOutOfRange, match=r"a snapshot must come from .*KimiDelta.*GatedDeltaNet"):
        layer.initial_state(2).restore(KimiDeltaAttention(DIM, 3).initial_state(2).snapshot())
    with pytest.raises(ValueOutOfRange, match=r"batch 1; restore one of .* batch 2"):
        layer.initial_state(2).restore(layer.initial_state(1).snapshot())
    assert isinstance(other, LayerState)
    assert repr(other).startswith("LayerState(GatedDeltaNet (4, 2, 6, 12) (3, 72), batch 2, length=0, nbytes=")


@pytest.mark.parametrize(
    "make, error, text",
    [
        (lambda: GatedDeltaNet(25, 3), ShapeError, "`dim` must be divisible by `heads`; got dim 25 and heads 3"),
        (lambda: GatedDeltaNet(24, 0), ValueOutOfRange, "`heads` must be at least 1; got 0"),
        (
            lambda: GatedDeltaNet(24, 3, key_heads=2),
            ShapeError,
            "`heads` must be divisible by `key_heads`; got heads 3",
        ),
        (lambda: GatedDeltaNet(24, 3, head_k_dim=0), ValueOutOfRange, "`head_k_dim` must be at least 1"),
        (lambda: GatedDeltaNet(24, 3, head_v_dim=2.5), DTypeError, "`head_v_dim` must be an int; got 2.5"),
        (lambda: GatedDeltaNet(24, 3, conv_size=9), ValueOutOfRange, "`conv_size` must be at most 8; got 9"),
        (lambda: KimiDeltaAttention(24, 3, gate_lower_bound=5), ValueOutOfRange, "must be negative; got 5; pass -5.0"),
        (lambda: Mamba2Mixer(24, 6, n_groups=4), ShapeError, "`heads` must be divisible by `n_groups`"),
        (lambda: Mamba2Mixer(24, 7), ShapeError, "must be divisible by `heads`; got dim 48 and heads 7"),
        (
            lambda: Mamba2Mixer(24, 6, time_step_limit=None),
            ValueOutOfRange,
            r"`time_step_limit` must be two numbers, the least dt and the greatest; got None; say \(0.0, math.inf\)",
        ),
        (lambda: Mamba2Mixer(24, 6, time_step_limit=(0.1,)), ValueOutOfRange, r"got \(0.1,\)"),
        (lambda: Mamba2Mixer(24, 6, time_step_limit=(0.2, 0.1)), ValueOutOfRange, r"got \(0.2, 0.1\)"),
        (lambda: Mamba2Mixer(24, 6, time_step_limit=(0.2, "1")), ValueOutOfRange, "got .0.2, '1'."),
        (lambda: GatedLinearAttention(24, 3, gate_low_rank_dim=0), ValueOutOfRange, "`gate_low_rank_dim`"),
        (
            lambda: Retention(9, 3),
            ShapeError,
            "`head_k_dim` must be even where `rotary` is True, which turns entries in pairs; got 3; ",
        ),
        (lambda: Retention(24, 3, decay=[-1.0]), ShapeError, "one number for each head; got 1 for 3 heads"),
        (lambda: Retention(24, 3, decay=[-1.0, 0.5, 0]), ValueOutOfRange, "must be at most 0; got 0.5"),
        (lambda: Retention(24, 3, decay=[-1.0, -0.5, math.nan]), ValueOutOfRange, "must be at most 0; got nan"),
        (lambda: Retention(24, 3, norm="layer"), UnknownName, "`norm` must be one of group, rms, whole; got 'layer'"),
        (lambda: Retention(24, 3, gate="swish"), UnknownName, "`gate` must be one of sigmoid, silu"),
        (lambda: Retention(24, 3, activation="gelu"), UnknownName, "`activation` must be one of silu"),
        (lambda: LinearAttention(24, 3, feature_map="exp"), UnknownName, "`feature_map` must be one of"),
        (lambda: LinearAttention(24, 3)(torch.ones(2, 24)), ShapeError, r"\(B, L, dim\) with dim = 24; got \(2, 24\)"),
        (lambda: LinearAttention(24, 3)(torch.ones(2, 5, 20)), ShapeError, "dim = 24; got .2, 5, 20.; `step` takes"),
        (lambda: LinearAttention(24, 3)([1.0]), DTypeError, "`x` must be a tensor; got list"),
        (lambda: Retention(24, 3)(torch.ones(2, 5, 24), cu_seqlens=[0, 5]), ShapeError, "B must be 1 where"),
        (lambda: Retention(24, 3)(torch.ones(1, 5, 24), cu_seqlens=[0, 4]), ValueOutOfRange, "must end at the 5 rows"),
        (lambda: Retention(24, 3).initial_state(-1), ValueOutOfRange, "`batch` must be at least"),
    ],
)
def test_refusals(make, error, text):
    with pytest.raises(error, match=text):
        make()


def test_a_state_on_another_device_is_refused():
    layer, x = made("kimi")
    with pytest.raises(DeviceError, match="`x` and `state` must be on one device; got cpu and meta; make the state"):
        layer(x, layer.initial_state(2, device="meta"))


@pytest.mark.parametrize(
    "name, text",
    [
        ("kimi-bounded", "ForgetGate(\n    heads=2, bound=-5.0"),
        ("kimi", "GatedRMSNorm(8, eps=1e-05, activation='sigmoid')"),
        ("mamba2-groups", "GroupedGatedRMSNorm(48, groups=2, eps=1e-05)"),
    ],
)
def test_parts_print_what_they_are(name, text):
    assert text in repr(LAYERS[name][0]())


def test_the_step_takes_one_token_of_each_sequence():
    layer, x = made("kimi")
    with pytest.raises(ShapeError, match=r"`x` must have the shape \(B, dim\) with dim = 24; got \(2, 21, 24\)"):
        layer.step(x, layer.initial_state(2))


def test_names_of_checkpoints():
    layer, x = made("gated-delta")
    own = layer.state_dict()
    q, k, v = own["in_proj_qkv.weight"].split(layer.widths)
    by_head = [part.unflatten(0, (2, -1)) for part in (q, k, v, own["in_proj_z.weight"])]
    next_ = {name: tensor for name, tensor in own.items() if not name.startswith("in_proj")}
    next_["in_proj_qkvz.weight"] = torch.cat(by_head, dim=1).flatten(0, 1)
    both = [own[f"in_proj_{part}.weight"].unflatten(0, (2, -1)) for part in "ba"]
    next_["in_proj_ba.weight"] = torch.cat(both, dim=1).flatten(0, 1)
    other = {name: tensor for name, tensor in next_.items() if name in {"A_log", "dt_bias"}}
    other |= {f"{part}_proj.weight": tensor for part, tensor in zip("qkv", (q, k, v), strict=True)}
    taps = own["conv1d.weight"].split(layer.widths)
    other |= {f"{part}_conv1d.weight": tensor for part, tensor in zip("qkv", taps, strict=True)}
    pairs = (("a_proj", "in_proj_a"), ("b_proj", "in_proj_b"), ("g_proj", "in_proj_z"))
    pairs += (("o_norm", "norm"), ("o_proj", "out_proj"))
    other |= {f"{theirs}.weight": own[f"{ours}.weight"] for theirs, ours in pairs}
    for spelling in (own, next_, other):
        fresh = LAYERS["gated-delta"][0]().double()
        prefixed = {f"layers.0.{name}": tensor for name, tensor in spelling.items()} | {"layers.1.x": x}
        fresh.load_state_dict(fresh.from_checkpoint(prefixed, "layers.0."))
        assert torch.equal(fresh(x), layer(x))
    with pytest.raises(
        CheckpointError, match=r"`prefix` must begin .*'layer.', which begins none of .* such as 'layers.0"
    ):
        layer.from_checkpoint(prefixed, "layer.")
    with pytest.raises(RuntimeError, match=r"Unexpected key.*layers.1.x"):
        layer.load_state_dict(layer.from_checkpoint(prefixed))


def test_kimi_s_published_names():
    """Three convolutions, and the gate's tensors beside the others; flash-linear-attention numbers its gates."""
    layer, x = made("kimi")
    own = layer.state_dict()
    published = {name.removeprefix("forget_gate."): tensor for name, tensor in own.items()}
    parts = published.pop("conv1d.weight").chunk(3)
    published |= {f"{part}_conv1d.weight": tensor for part, tensor in zip("qkv", parts, strict=True)}
    numbered = dict(published)
    for gate in "fg":
        for n, half in enumerate("ab"):
            numbered[f"{gate}_proj.{n}.weight"] = numbered.pop(f"{gate}_{half}_proj.weight")
    numbered["A_log"] = numbered["A_log"].flatten()
    for spelling in (own, published, numbered):
        fresh = LAYERS["kimi"][0]().double()
        fresh.load_state_dict(fresh.from_checkpoint(spelling))
        assert torch.equal(fresh(x), layer(x))


def test_names_of_lightning_and_fast_transformers():
    layer, x = made("lightning")
    own = layer.state_dict()
    stacked = torch.stack([own.pop(f"{part}_proj.weight").unflatten(0, (4, 6)) for part in "qkv"], dim=1)
    own |= {"qkv_proj.weight": stacked.flatten(0, 2), "output_gate.weight": own.pop("g_proj.weight")}
    fresh = LAYERS["lightning"][0]().double()
    fresh.load_state_dict(fresh.from_checkpoint(own | {"slope_rate": torch.ones(4)}))
    assert torch.equal(fresh(x), layer(x))

    torch.manual_seed(0)
    layer = LinearAttention(DIM, 3, bias=True).double()
    long = {"q": "query", "k": "key", "v": "value", "o": "out"}
    theirs = {f"{long[name[0]]}_projection.{name.split('.')[1]}": tensor for name, tensor in layer.state_dict().items()}
    fresh = LinearAttention(DIM, 3, bias=True).double()
    fresh.load_state_dict(fresh.from_checkpoint(theirs))
    assert torch.equal(fresh(x), layer(x))
