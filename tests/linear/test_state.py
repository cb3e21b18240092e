"""A recurrent state: it decodes what the whole pass gives, and every way back is exact."""

from __future__ import annotations

import copy
import math
import pickle
import resource

import pytest
import torch

import qkv
from qkv import settings
from qkv.errors import QkvError
from qkv.linear import native
from qkv.linear.engine import ENGINES
from qkv.linear.state import RecurrentState
from qkv.linear.state_held import Snapshot
from qkv.linear.state_rules import RULES
from qkv.linear.state_tokens import FEW, at_once

FUNCTIONS = {
    "linear": qkv.linear_attention,
    "retention": qkv.retention,
    "gated_linear": qkv.gated_linear_attention,
    "delta": qkv.delta_rule,
    "gated_delta": qkv.gated_delta_rule,
    "kimi_delta": qkv.kimi_delta_attention,
    "ssd": qkv.ssd,
}
VECTOR, SCALAR = {"gated_linear", "kimi_delta"}, {"gated_delta", "ssd"}
DELTA = {"delta", "gated_delta", "kimi_delta"}
B, H, K, L, D, V = 3, 4, 2, 23, 8, 5
EACH = pytest.mark.parametrize("rule", RULES)
BOUND = 5e-6  # of the greatest number
CORE = not native.reasons_against(
    RecurrentState(1, 1, D, V)._setting.recurrence(1, 1, torch.float32), torch.device("cpu")
)


@pytest.fixture(params=["auto", "chunked", "reference"])
def engine(request, monkeypatch):
    """Each way in which a step can be answered."""
    if request.param == "reference":
        with settings.override("QKV_BACKEND", "reference"):
            yield request.param
        return
    if request.param == "chunked":
        monkeypatch.setattr(native, "reasons_against", lambda *_: ["it is not to be used"])
    yield request.param


def tokens_of(rule, n=L, seed=0, dtype=torch.float32, batch=B, heads=H, key_heads=K):
    """q, k, v, g and beta of n tokens; keys of length 1, as delta rules want them."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    q, k, v = normal(batch, key_heads, n, D), normal(batch, key_heads, n, D), normal(batch, heads, n, V)
    k = k / k.norm(dim=-1, keepdim=True)
    g = -normal(batch, heads, n, D).exp() / 4
    g = g if rule in VECTOR else g[..., 0] if rule in SCALAR else None
    beta = 2 * normal(batch, heads, n).sigmoid() if rule in DELTA else None
    return [x if x is None else x.to(dtype) for x in (q, k, v, g, beta)]


def decay_of(rule, heads=H):
    return {"decay": torch.log1p(-(2.0 ** (-2 - torch.arange(heads))))} if rule == "retention" else {}


def make(rule, batch=B, **options):
    return RecurrentState(batch, H, D, V, rule, key_heads=K, **decay_of(rule), **options)


def rows(tokens, chosen):
    """One token, for a number, or those of a slice."""
    return [x if x is None else x[:, :, chosen] for x in tokens]


def oracle(rule, tokens, *, scale=None):
    """The recurrence of the docs in float64: output (B, H, n, V) and the last state."""
    q, k, v, g, beta = (x if x is None else x.double() for x in tokens)
    if rule == "linear":
        q, k = (torch.where(x > 0, x + 1, x.clamp(max=0).exp()) for x in (q, k))
        v = torch.cat([v, torch.ones_like(v[..., :1])], dim=-1)
    q, k = (x.repeat_interleave(v.shape[1] // x.shape[1], dim=1) for x in (q, k))
    scale = scale if scale is not None else 1.0 if rule in {"linear", "ssd"} else 1 / math.sqrt(q.shape[-1])
    if rule == "retention":
        g = decay_of(rule, v.shape[1])["decay"].double()[None, :, None].expand(v.shape[:3])
    state, outputs = torch.zeros(*v.shape[:2], q.shape[-1], v.shape[-1], dtype=torch.float64), []
    for t in range(v.shape[2]):
        if g is not None:
            decay = g[:, :, t].exp()
            state = (decay[..., None] if decay.ndim == 3 else decay[..., None, None]) * state
        write = v[:, :, t]
        if beta is not None:
            write = beta[:, :, t, None] * (write - torch.einsum("bhdv,bhd->bhv", state, k[:, :, t]))
        state = state + k[:, :, t, :, None] * write[..., None, :]
        outputs.append(scale * torch.einsum("bhdv,bhd->bhv", state, q[:, :, t]))
    out = torch.stack(outputs, dim=2)
    return (out[..., :-1] / out[..., -1:] if rule == "linear" else out), state


def close(got, want, bound=BOUND):
    return (got.double() - want.double()).abs().max() <= bound * want.abs().max()


def same(one, other):
    return torch.equal(one.state, other.state) and one.length == other.length


# What a step gives.


@EACH
@pytest.mark.parametrize("cuts", [[1] * L, [5] * 4 + [3], [1, 1, 7, 1, 10, 3], [L], [0, 16, 0, 7]])
def test_any_cut_into_steps_equals_the_recurrence(rule, cuts, engine):
    tokens, state, at, outputs = tokens_of(rule), make(rule), 0, []
    for n in cuts:
        if n == 1:
            outputs.append(state.step(*rows(tokens, at)).unsqueeze(2))
        else:
            outputs.append(state.step(*rows(tokens, slice(at, at + n))))
        at += n
    want, last = oracle(rule, tokens)
    assert close(torch.cat(outputs, dim=2), want)
    assert close(state.state, last)
    assert state.length == L and state.state.dtype == torch.float32


@pytest.mark.skipif(not CORE, reason="no native core")
@EACH
@pytest.mark.parametrize("cuts", [[8, 4, 11], [16, 7], [4] * 4 + [7]])
def test_cuts_at_multiples_of_four_have_the_bits_of_the_whole(rule, cuts):
    tokens, state, at, outputs = tokens_of(rule), make(rule), 0, []
    for n in cuts:
        outputs.append(state.step(*rows(tokens, slice(at, at + n))))
        at += n
    given = [x for x in tokens if x is not None]
    whole, last = FUNCTIONS[rule](*given, **decay_of(rule), return_state=True)
    assert torch.equal(torch.cat(outputs, dim=2), whole) and torch.equal(state.state, last)


@EACH
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("wide", [False, True])
def test_types(rule, dtype, wide, engine):
    tokens, state = tokens_of(rule, dtype=dtype), make(rule, dtype=dtype)
    if wide:
        tokens[3:] = [x if x is None else x.to(state.dtype) for x in tokens[3:]]
    outputs = [state.step(*rows(tokens, t)) for t in range(L)]
    want, last = oracle(rule, tokens)
    assert state.dtype == state.state.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert {out.dtype for out in outputs} == {dtype}
    bound = {torch.float16: 2e-3, torch.bfloat16: 1.6e-2, torch.float64: 1e-13}[dtype]
    assert close(torch.stack(outputs, dim=2), want, bound)
    assert close(state.state, last, 1e-13 if dtype == torch.float64 else BOUND)


@EACH
def test_equals_the_function_and_goes_on_from_its_state(rule):
    tokens, options = tokens_of(rule), decay_of(rule)
    given = [x for x in tokens if x is not None]
    whole, last = FUNCTIONS[rule](*given, **options, return_state=True)
    prompt, after = FUNCTIONS[rule](*(x[:, :, :14] for x in given), **options, return_state=True)
    state = RecurrentState.from_state(after, rule, key_heads=K, length=14, **options)
    assert state.length == 14 and state.state is not after
    rest = [state.step(*rows(tokens, t)) for t in range(14, L)]
    assert close(torch.cat([prompt, torch.stack(rest, dim=2)], dim=2), whole)
    assert close(state.state, last)
    other = make(rule)
    other.load(after, length=14)
    other.step(*rows(tokens, slice(14, None)))
    assert close(other.state, last) and other.length == L
    assert torch.equal(after, FUNCTIONS[rule](*(x[:, :, :14] for x in given), **options, return_state=True)[1])


@EACH
def test_the_other_layout(rule, engine):
    tokens, one, other = tokens_of(rule), make(rule), make(rule)
    swapped = [x if x is None else x.transpose(1, 2).contiguous() for x in tokens]
    out = other.step(*swapped, layout="BLHD")
    assert out.shape == (B, L, H, V)
    assert close(out.transpose(1, 2), one.step(*tokens)) and close(one.state, other.state)
    twin, single = other.fork(), rows(tokens, 0)
    assert torch.equal(other.step(*single, layout="BLHD"), twin.step(*single)), "one token has no axis to move"


@pytest.mark.parametrize("rule", ["linear", "gated_linear", "gated_delta"])
@pytest.mark.parametrize("feature_map", ["relu", "taylor", "softmax", torch.exp])
@pytest.mark.parametrize("normalize", [False, True])
def test_feature_maps_normaliser_and_scale(rule, feature_map, normalize):
    if rule == "gated_linear" and feature_map in {"taylor", "softmax"}:
        pytest.skip("its gate is one a feature")
    state = make(rule, feature_map=feature_map, normalize=normalize, scale=0.3)
    tokens = tokens_of(rule)
    outputs = torch.stack([state.step(*rows(tokens, t)) for t in range(L)], dim=2)
    rows_of_state = {"taylor": 1 + D + D * (D + 1) // 2, "softmax": 2 * D}.get(feature_map, D)
    assert state.state.shape == (B, H, rows_of_state, V + normalize)
    if rule == "linear":
        want = qkv.linear_attention(*tokens[:3], feature_map=feature_map, normalize=normalize, scale=0.3)
        assert close(outputs, want, 2e-5)
    assert outputs.isfinite().all() and state.length == L


def test_features_wider_than_the_tokens():
    tokens = tokens_of("linear", dtype=torch.bfloat16)
    state = make("linear", feature_map="taylor", dtype=torch.bfloat16)
    outputs = torch.stack([state.step(*rows(tokens, t)) for t in range(L)], dim=2)
    assert outputs.dtype == torch.bfloat16
    assert close(outputs, qkv.linear_attention(*tokens[:3], feature_map="taylor"), 1e-2)
    first = state.state
    twin = RecurrentState.from_state(first, "linear", key_dim=D, key_heads=K, feature_map="taylor")
    assert twin.step(*[x if x is None else x.float() for x in rows(tokens, 0)]).shape == (B, H, V)


def test_gates_of_minus_infinity_reset_and_a_denominator_of_zero_gives_zero(engine):
    state, tokens = make("gated_delta"), tokens_of("gated_delta")
    state.step(*tokens)
    q, k, v, g, beta = rows(tokens, 0)
    after, fresh = state.step(q, k, v, torch.full_like(g, -torch.inf), beta), make("gated_delta")
    assert close(after, fresh.step(q, k, v, g, beta)) and close(state.state, fresh.state)
    state, (q, k, v, _, _) = make("linear", feature_map="relu"), rows(tokens_of("linear"), 0)
    assert not state.step(-q.abs(), k, v).any()


@pytest.mark.parametrize("name", ["g", "beta", "decay"])
def test_numbers_that_are_none_spread_as_in_the_functions(name, engine):
    rule = "retention" if name == "decay" else "gated_delta"
    tokens, options = tokens_of(rule), decay_of(rule)
    where = options["decay"][1:2] if name == "decay" else tokens[3 if name == "g" else 4][:, 1, 4]
    where.fill_(torch.nan)
    state = RecurrentState(B, H, D, V, rule, key_heads=K, **options)
    out = torch.stack([state.step(*rows(tokens, t)) for t in range(L)], dim=2)
    want, last = FUNCTIONS[rule](*(x for x in tokens if x is not None), **options, return_state=True)
    assert torch.equal(state.state.isnan(), last.isnan()) and want[out.isnan()].isnan().all()
    assert out[:, 1, 5:].isnan().all() and not out[:, 0].isnan().any()


def test_many_numbers_are_checked_as_few_are():
    """Write strengths whose sum is none or infinite, and more numbers than torch looks at by one thread."""
    n = FEW // (B * H) + 2
    tokens, state = tokens_of("gated_delta", n=n, dtype=torch.float16), make("gated_delta", dtype=torch.float16)
    tokens[4].fill_(60000)
    tokens[1].zero_()
    assert state.step(*rows(tokens, slice(0, 3))).isfinite().all()
    tokens[4][2, 3, -1] = torch.inf
    refused(lambda: state.step(*tokens), "`beta` must be finite; its numbers go from 60000 to inf", "ValueOutOfRange")
    tokens[4].fill_(1)
    tokens[3][2, 3, -1] = 2
    refused(lambda: state.step(*tokens), "`g` must be at most 0: it is the log", "ValueOutOfRange")
    assert state.length == 3


def test_checks_ask_torch_for_no_threads(monkeypatch):
    """A forked child has none, and would wait for them."""
    tokens, few = tokens_of("gated_delta", n=FEW // (B * H) + 2), []
    for name in ("max", "sum"):
        real = getattr(torch.Tensor, name)
        monkeypatch.setattr(torch.Tensor, name, lambda x, *_, real=real: few.append(x.numel()) or real(x))
    state = make("gated_delta", backend="cpu" if CORE else "auto")
    state.step(*tokens)
    assert not few
    state.step(*rows(tokens, slice(0, 100)))
    assert few == [B * H * 100] * 2


# Which engine answers.


@pytest.mark.parametrize("backend", ["cpu", "chunked", "reference"])
def test_a_named_engine_answers_or_refuses(backend, monkeypatch):
    if backend == "cpu" and not CORE:
        pytest.skip("no native core")
    tokens, seen = tokens_of("gated_delta"), []
    for name, engine in ENGINES.items():
        monkeypatch.setitem(ENGINES, name, lambda *given, name=name, engine=engine: seen.append(name) or engine(*given))
    for place, module in (("at_once", "qkv.linear.state"), ("advance", "qkv.linear.native")):
        real = at_once if place == "at_once" else native.advance
        monkeypatch.setattr(f"{module}.{place}", lambda *given, real=real: seen.append("cpu") or real(*given))
    with settings.override("QKV_BACKEND", "cpu" if backend == "reference" else "reference"):
        after = make("gated_delta").state
        state = RecurrentState.from_state(after, "gated_delta", key_heads=K, backend=backend)
        for one in (state, state.fork(), pickle.loads(pickle.dumps(state))):
            assert one.backend == backend
            one.step(*rows(tokens, 0))
            one.step(*rows(tokens, slice(1, 6)), draft=True)
            one.accept(3)
    assert seen == [backend] * 9
    other = "chunked" if backend == "reference" else "reference"
    for state.backend in (backend, other):
        state.step(*rows(tokens, 0))
    assert seen[-2:] == [backend, other]
    state.backend = "auto"
    state.step(*rows(tokens, 0))
    assert seen.pop() == ("cpu" if CORE else "chunked")
    with pytest.raises(qkv.errors.UnknownName):
        state.backend = "core"
    assert state.backend == "auto"


def test_a_named_engine_that_cannot_answer_is_refused_by_the_step():
    state = RecurrentState(1, 1, 300, 4, "delta", backend="cpu")
    one = torch.ones(1, 1, 300), torch.ones(1, 1, 300), torch.ones(1, 1, 4), None, torch.ones(1, 1)
    told = "`backend` 'cpu' must be able to answer the call; "
    refused(lambda: state.step(*one), told, "UnsupportedError")
    assert state.length == 0 and not state.state.any()


def test_no_token_and_no_sequence_change_nothing():
    state, tokens = make("gated_delta"), tokens_of("gated_delta")
    state.step(*tokens)
    before = state.snapshot()
    out = state.step(*rows(tokens, slice(0, 0)))
    assert out.shape == (B, H, 0, V) and torch.equal(state.state, before.state) and state.length == L
    none = make("gated_delta", batch=0)
    assert none.step(*(x[:0] for x in tokens)).shape == (0, H, L, V)
    assert none.step(*(x[:0, :, 0] for x in tokens)).shape == (0, H, V)


def test_few_calls_are_remembered():
    state, tokens = make("gated_delta"), tokens_of("gated_delta")
    for n in range(1, L):
        state.step(*rows(tokens, slice(0, n)))
    assert 0 < len(state._calls) <= 16


def test_default_scale_of_sums():
    tokens, state = tokens_of("linear"), make("linear", normalize=False)
    want = qkv.linear_attention(*tokens[:3], normalize=False)
    assert close(state.step(*tokens), want)


def test_ten_thousand_tokens_in_constant_memory():
    state, tokens = make("gated_delta", batch=1), tokens_of("gated_delta", 100, batch=1)
    place, held = state.state.data_ptr(), state.nbytes
    steps = [rows(tokens, t) for t in range(100)]
    peaks = []
    for _ in range(100):
        for step in steps:
            state.step(*step)
        peaks.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
    assert peaks[-1] - peaks[9] < 1024, "KiB"
    assert state.length == 10_000 and state.state.data_ptr() == place
    assert state.nbytes == held == 4 * H * D * V and len(state._calls) == 1
    assert state.state.isfinite().all()


def test_no_gradient_flows_in(engine):
    tokens, state, plain = tokens_of("gated_delta"), make("gated_delta"), make("gated_delta")
    graded = [x.clone().requires_grad_() for x in rows(tokens, 0)]
    out = state.step(*graded)
    assert not out.requires_grad and not state.state.requires_grad
    assert torch.equal(out, plain.step(*rows(tokens, 0))) and same(state, plain)
    with torch.no_grad():
        assert torch.equal(state.step(*graded), plain.step(*rows(tokens, 0)))


@pytest.mark.skipif(not CORE, reason="no native core")
@EACH
def test_tokens_that_lie_otherwise_give_the_same_bits(rule):
    tokens, state, plain = tokens_of(rule), make(rule), make(rule)
    for t in range(3):
        dense = [x if x is None else x.contiguous() for x in rows(tokens, t)]
        apart = [x if x is None else torch.stack([x, x], dim=-1)[..., 0] for x in dense]
        for given in (dense, apart):
            assert torch.equal(state.step(*given), plain.step(*dense))
    dense = [x if x is None else x.contiguous() for x in rows(tokens, slice(3, 9))]
    for layout in ("BHLD", "BLHD"):
        swapped = [x if x is None or layout == "BHLD" else x.transpose(1, 2) for x in dense]
        out, want = state.step(*swapped, layout=layout), plain.step(*dense)
        assert torch.equal(out if layout == "BHLD" else out.transpose(1, 2), want) and same(state, plain)


@pytest.mark.parametrize("place", range(5))
def test_numbers_that_are_meant_negative(place, engine):
    tokens, state, plain = tokens_of("gated_delta"), make("gated_delta"), make("gated_delta")
    dense = [x.contiguous() for x in rows(tokens, 0)]
    lazy = [torch._neg_view(-x) if i == place else x for i, x in enumerate(dense)]
    assert lazy[place].is_neg() and lazy[place].stride() == dense[place].stride()
    for given in (dense, lazy):
        assert torch.equal(state.step(*given), plain.step(*dense)) and same(state, plain)


@pytest.mark.parametrize("made", [False, True])
@pytest.mark.parametrize("stepped", [False, True])
def test_inference_mode_inside_and_outside(made, stepped, engine):
    tokens, plain = tokens_of("gated_delta"), make("gated_delta")
    with torch.inference_mode(made):
        state = make("gated_delta")
        drafted = state.fork()
    for t in range(3):
        with torch.inference_mode(stepped):
            state.step(*rows(tokens, t))
            drafted.step(*rows(tokens, t), draft=True)
        plain.step(*rows(tokens, t))
    assert same(state, plain) and same(drafted, plain)
    with torch.inference_mode(made):
        state.restore(state.snapshot())
        twin = pickle.loads(pickle.dumps(state))
        state.reorder([2, 1])
        drafted.accept(2)
    state.step(*(x[:2] for x in rows(tokens, 3)))
    twin.step(*rows(tokens, 3))
    drafted.step(*rows(tokens, 2))
    assert same(drafted, plain)


def test_autocast_casts_q_k_and_v_only(engine):
    tokens = rows(tokens_of("gated_delta"), 0)
    state, plain = make("gated_delta"), make("gated_delta")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = state.step(*tokens)
    assert out.dtype == torch.bfloat16
    assert torch.equal(out, plain.step(*(x.bfloat16() for x in tokens[:3]), *tokens[3:])) and same(state, plain)


def test_compiled_code_breaks_its_graph_there():
    state, plain = make("gated_delta"), make("gated_delta")
    tokens = rows(tokens_of("gated_delta"), 0)
    compiled = torch.compile(lambda *given: state.step(*given) * 2, backend="eager")
    assert torch.equal(compiled(*tokens), 2 * plain.step(*tokens)) and same(state, plain)
    whole = torch.compile(lambda *given: state.step(*given) * 3, backend="eager", fullgraph=True)
    with pytest.raises(Exception, match="kept outside of the graph"):
        whole(*tokens)


# The ways back.


@EACH
def test_snapshots_restore_the_bits_as_often_as_one_likes(rule, engine):
    tokens, state = tokens_of(rule), make(rule)
    state.step(*rows(tokens, slice(0, 9)))
    held = state.state.clone()
    snapshot = state.snapshot()
    assert snapshot.length == 9 and snapshot.nbytes == state.nbytes
    first = state.step(*rows(tokens, slice(9, None)))
    snapshot.state.zero_()  # a copy
    for _ in range(3):
        state.restore(snapshot)
        assert torch.equal(state.state, held) and state.length == 9
        assert torch.equal(state.step(*rows(tokens, slice(9, None))), first)
    other = make(rule)
    other.restore(pickle.loads(pickle.dumps(snapshot)))
    assert torch.equal(other.step(*rows(tokens, slice(9, None))), first)
    with pytest.raises(AttributeError):
        snapshot.length = 3


@pytest.mark.parametrize(
    "how", [RecurrentState.fork, copy.copy, copy.deepcopy, lambda state: pickle.loads(pickle.dumps(state))]
)
@EACH
@pytest.mark.parametrize("drafted", [False, True])
def test_a_copy_goes_on_by_itself(rule, how, drafted):
    tokens, state, straight = tokens_of(rule), make(rule), make(rule)
    for one in (state, straight):
        one.step(*rows(tokens, slice(0, 6)))
        one.step(*rows(tokens, slice(6, 9)), draft=drafted)
    twin = how(state)
    assert same(twin, state) and twin.drafted == state.drafted == 3 * drafted and twin.nbytes == state.nbytes
    if drafted:
        twin.step(*rows(tokens, 9), draft=True)
        assert twin.drafted == 4 and state.drafted == 3
        twin.accept(1)
        twin.step(*rows(tokens, 7))
        assert state.drafted == 3 and same(state, straight)
        state.reject()
        straight.reject()
        assert same(state, straight)
    else:
        twin.step(*rows(tokens, slice(9, None)))
        assert same(state, straight) and not torch.equal(twin.state, state.state)
    outs = [one.step(*rows(tokens, slice(9, 12))) for one in (state, straight)]
    assert torch.equal(*outs) and same(state, straight)


@EACH
@pytest.mark.parametrize("calls", [[6], [1] * 6, [2, 1, 3]])
@pytest.mark.parametrize("kept", range(7))
def test_accepting_leaves_what_these_tokens_alone_leave(rule, calls, kept, engine):
    tokens, state, straight = tokens_of(rule), make(rule), make(rule)
    for one in (state, straight):
        one.step(*rows(tokens, slice(0, 8)))
    at = 8
    for n in calls:
        given = rows(tokens, slice(at, at + n)) if n > 1 else rows(tokens, at)
        mine = [x if x is None else x.clone() for x in given]
        state.step(*mine, draft=True)
        for x in mine:
            if x is not None:
                x.fill_(torch.nan)  # the draft holds copies
        cut = min(n, max(0, 8 + kept - at))
        if cut:
            straight.step(*([x if x is None else x[:, :, :cut] for x in given] if n > 1 else given))
        at += n
    assert state.drafted == 6 and state.length == 14
    state.accept(kept)
    assert same(state, straight) and state.length == 8 + kept and state.drafted == 0
    assert torch.equal(state.step(*rows(tokens, 15)), straight.step(*rows(tokens, 15)))


def test_memory_of_a_draft():
    tokens, state = tokens_of("gated_delta"), make("gated_delta")
    plain = state.nbytes
    assert plain == 4 * B * H * D * V
    for n in (1, 2):
        state.step(*rows(tokens, slice(0, 3)), draft=True)
        assert state.nbytes == 2 * plain + n * 4 * 3 * B * (2 * K * D + H * V + 2 * H)
    place = state.state.data_ptr()
    state.accept(4)
    assert state.nbytes == plain and state.state.data_ptr() == place


@EACH
def test_beams(rule):
    tokens, state = tokens_of(rule), make(rule)
    state.step(*rows(tokens, slice(0, 5)))
    before, index = state.state.clone(), [2, 0, 0, 1]
    state.reorder(index)
    assert state.batch == 4 and torch.equal(state.state, before[index]) and state.length == 5
    beams = [x if x is None else x[index] for x in rows(tokens, 5)]
    alone = make(rule, batch=1)
    alone.step(*(x if x is None else x[2:] for x in rows(tokens, slice(0, 5))))
    one = alone.step(*(x if x is None else x[2:] for x in rows(tokens, 5)))
    assert close(state.step(*beams)[:1], one, 1e-6)
    with pytest.raises(qkv.errors.ShapeError, match="got B = 3, not 4"):
        state.step(*rows(tokens, 5))
    state.reorder(torch.tensor([3]))
    assert state.batch == 1
    with pytest.raises(qkv.errors.ShapeError, match="got B = 4, not 1"):
        state.step(*beams)


def test_forgetting():
    tokens, state = tokens_of("gated_delta"), make("gated_delta")
    first = state.step(*tokens)
    state.step(*tokens, draft=True)
    state.reset()
    assert state.length == state.drafted == 0 and not state.state.any()
    assert torch.equal(state.step(*tokens), first)


def test_tensors_for_a_file():
    tokens, state, other = tokens_of("gated_delta"), make("gated_delta"), make("gated_delta")
    state.step(*tokens)
    held = state.state_dict()
    assert {name: x.dtype for name, x in held.items()} == {"state": torch.float32, "length": torch.int64}
    other.load_state_dict(held)
    held["state"].zero_()
    assert same(state, other)


def test_what_it_shows():
    state = make("linear")
    assert repr(state) == "RecurrentState('linear', (3, 4, 8, 6) float32, length=0)"
    assert (state.batch, state.rule, state.device.type) == (3, "linear", "cpu")
    assert repr(state.snapshot()) == "Snapshot(length=0)"


# What fails leaves no trace.


def fails(error, real=None, after=False):
    def raising(*arguments):
        if after:
            real(*arguments)
        raise error

    return raising


@pytest.mark.parametrize("draft", [False, True])
@pytest.mark.parametrize("error", [MemoryError("made up"), RuntimeError("made up")])
def test_a_step_that_fails_within_is_told_and_can_be_taken_back(draft, error, engine, monkeypatch):
    tokens, state, straight = tokens_of("gated_delta"), make("gated_delta"), make("gated_delta")
    for one in (state, straight):
        one.step(*rows(tokens, 0))
    snapshot = state.snapshot()
    if draft:
        state.step(*rows(tokens, 1), draft=True)
    for place in ("qkv.linear.native.advance", "qkv.linear.state.compute", "qkv.linear.state.at_once"):
        monkeypatch.setattr(place, fails(error))
    with pytest.raises(type(error), match="made up"):
        state.step(*rows(tokens, 2), draft=draft)
    monkeypatch.undo()
    if draft:
        state.reject()
    elif engine == "auto" and CORE:  # the others compute first, then write
        remedy = "restore a snapshot, load, or reset()"
        told = f"a state must be whole; a step ended early while it was written; {remedy}"
        refused(lambda: state.step(*rows(tokens, 2)), told, "UnsupportedError")
        state.restore(snapshot)
    assert same(state, straight)
    assert torch.equal(state.step(*rows(tokens, 3)), straight.step(*rows(tokens, 3))) and same(state, straight)


@pytest.mark.skipif(not CORE, reason="no native core")
def test_a_step_that_is_interrupted_while_it_writes_is_told(monkeypatch):
    tokens, state = tokens_of("gated_delta"), make("gated_delta")
    state.step(*rows(tokens, 0))
    snapshot = state.snapshot()
    monkeypatch.setattr("qkv.linear.state.at_once", fails(KeyboardInterrupt(), at_once, after=True))
    with pytest.raises(KeyboardInterrupt):
        state.step(*rows(tokens, 1))
    monkeypatch.undo()
    told = "a state must be whole; a step ended early while it was written; restore a snapshot, load, or reset()"
    for use in (
        lambda: state.step(*rows(tokens, 1)),
        state.snapshot,
        state.fork,
        state.state_dict,
        lambda: state.reorder([0]),
        lambda: pickle.dumps(state),
    ):
        refused(use, told, "UnsupportedError")
    state.restore(snapshot)
    assert torch.equal(state.step(*rows(tokens, 1)), make_after(tokens, 1).step(*rows(tokens, 1)))


def make_after(tokens, count, rule="gated_delta"):
    state = make(rule)
    for t in range(count):
        state.step(*rows(tokens, t))
    return state


@pytest.mark.skipif(not CORE, reason="no native core")
@pytest.mark.parametrize("kept", [0, 1, 2, 3])
def test_a_draft_that_is_interrupted_can_be_taken_back(kept, monkeypatch):
    tokens, state = tokens_of("gated_delta"), make_after(tokens_of("gated_delta"), 2)
    state.step(*rows(tokens, 2), draft=True)
    monkeypatch.setattr(native, "advance", fails(KeyboardInterrupt(), native.advance, after=True))
    with pytest.raises(KeyboardInterrupt):
        state.step(*rows(tokens, slice(3, 5)), draft=True)
    with pytest.raises(KeyboardInterrupt):
        state.accept(1)
    monkeypatch.undo()
    told = "a state must be whole; a step ended early while it was written; call reject() of its draft"
    refused(lambda: state.step(*rows(tokens, 5), draft=True), told, "UnsupportedError")
    state.accept(kept)
    straight = make_after(tokens, 2 + min(kept, 1))
    if kept > 1:
        straight.step(*rows(tokens, slice(3, 2 + kept)))
    assert same(state, straight) and state.length == 2 + kept


def test_an_interrupt_before_anything_is_written_leaves_no_trace(monkeypatch):
    monkeypatch.setattr(native, "reasons_against", lambda *_: ["it is not to be used"])
    tokens, state = tokens_of("gated_delta"), make_after(tokens_of("gated_delta"), 2)
    before = state.snapshot()
    for draft in (False, True):
        monkeypatch.setattr("qkv.linear.state.compute", fails(KeyboardInterrupt()))
        with pytest.raises(KeyboardInterrupt):
            state.step(*rows(tokens, 2), draft=draft)
        assert torch.equal(state.state, before.state) and (state.length, state.drafted) == (2, 0)
    monkeypatch.undo()
    state.step(*rows(tokens, 2))


@pytest.mark.parametrize("method", ["restore", "load", "reset"])
def test_an_interrupt_while_all_is_written_is_told_and_mended(method, monkeypatch):
    tokens, state = tokens_of("gated_delta"), make_after(tokens_of("gated_delta"), 2)
    snapshot = state.snapshot()
    again = {"restore": lambda: state.restore(snapshot), "load": lambda: state.load(snapshot.state)}.get(
        method, state.reset
    )

    class Interrupted:
        shape, dtype = state.state.shape, state.dtype

        def copy_(self, _):
            raise KeyboardInterrupt

        zero_ = lambda self: self.copy_(self)  # noqa: E731

    real, state._state = state._state, Interrupted()
    with pytest.raises(KeyboardInterrupt):
        again()
    state._state = real
    refused(lambda: state.step(*rows(tokens, 2)), "a state must be whole; a step ended early", "UnsupportedError")
    again()
    state.step(*rows(tokens, 2))


# What is refused, before anything changes.


def refused(call, text, kind):
    with pytest.raises(QkvError) as caught:
        call()
    assert type(caught.value).__name__ == kind
    assert text in str(caught.value), str(caught.value)
    assert str(caught.value).count("; ") == 2, str(caught.value)


@pytest.mark.parametrize(
    "options, text, kind",
    [
        ({"rule": "gated"}, "`rule` must be one of delta, gated_delta, ", "UnknownName"),
        ({"rule": ["delta"]}, "got ['delta']", "UnknownName"),
        ({"heads": 0}, "`heads` must be at least 1; got 0", "ValueOutOfRange"),
        ({"batch": 1.5}, "`batch` must be an int; got 1.5", "DTypeError"),
        ({"value_dim": None}, "`value_dim` must be an int; got None", "DTypeError"),
        (
            {"key_heads": 3},
            "the value heads H must be a multiple of the key heads K; got H = 4, K = 3; give a divisor of `heads`",
            "ShapeError",
        ),
        (
            {"dtype": torch.int64},
            "`dtype` must be float16, bfloat16, float32 or float64; got torch.int64",
            "DTypeError",
        ),
        ({"dtype": "float32"}, "got 'float32'; give the type of q, k and v", "DTypeError"),
        ({"normalize": 1}, "`normalize` must be a bool; got 1; leave it out for the rule's own", "DTypeError"),
        ({"scale": math.nan}, "`scale` must be finite; got nan", "ValueOutOfRange"),
        ({"feature_map": "elu2"}, "`feature_map` must be one of", "UnknownName"),
        ({"backend": "triton"}, "`backend` must be one of auto, chunked, cpu, reference; got 'triton'", "UnknownName"),
        ({"backend": None}, "got None", "UnknownName"),
        ({"feature_map": 3}, "`feature_map` must be a name, or a module or function", "DTypeError"),
        (
            {"decay": torch.zeros(4)},
            "`decay` must be left out for rule 'gated_delta'; got [4] float32 cpu; pass g to step",
            "ValueOutOfRange",
        ),
        ({"rule": "retention"}, "a tensor (H,), the log of each head's constant; got None; say decay=", "DTypeError"),
        (
            {"rule": "retention", "decay": torch.zeros(3)},
            "got [3] float32 cpu for H = 4; give one number a head",
            "ShapeError",
        ),
        (
            {"rule": "retention", "decay": torch.tensor([0, 0, 0, 0.5])},
            "`decay` must be at most 0: it is the logarithm of a decay; its greatest number is 0.5; pass log(gamma)",
            "ValueOutOfRange",
        ),
        ({"rule": "retention", "decay": torch.zeros(4, device="meta")}, "on the state's device, cpu; got meta", None),
    ],
)
def test_what_no_state_can_be_made_of(options, text, kind):
    sizes = {"batch": B, "heads": H, "key_dim": D, "value_dim": V}
    if kind is None:
        with pytest.raises(QkvError) as caught:
            RecurrentState(**{**sizes, **options})
        assert text in str(caught.value)
    else:
        refused(lambda: RecurrentState(**{**sizes, **options}), text, kind)


def given(**changed):
    """One token of a gated delta rule, with some of it changed."""
    tokens = dict(zip(("query", "key", "value", "g", "beta"), rows(tokens_of("gated_delta"), 0), strict=True))
    return {
        name: change(tokens[name]) if callable(change) else change for name, change in {**tokens, **changed}.items()
    }


STEPS = [
    ({"g": None}, "`g` must be given for rule 'gated_delta'; got None; pass the log decay, (B, H)", "DTypeError"),
    ({"beta": None}, "`beta` must be given for rule 'gated_delta'; got None; pass the write strength", "DTypeError"),
    ({"query": 3}, "`query` must be a torch.Tensor; got a builtins.int; convert it with torch.as_tensor", "DTypeError"),
    ({"value": lambda x: x.numpy()}, "`value` must be a torch.Tensor; got a numpy.ndarray", "DTypeError"),
    ({"key": lambda x: x.to_sparse()}, "`key` must be a dense tensor; got a sparse tensor", None),
    ({"key": lambda x: x.long()}, "`key` must be float16, bfloat16, float32 or float64; got int64", "DTypeError"),
    (
        {"key": lambda x: x.half()},
        "`query`, `key` and `value` must have one dtype; got float32, float16, float32; cast them to one",
        "DTypeError",
    ),
    (
        {"g": lambda x: x.half()},
        "`g` must have the dtype of `query` or of the state, float32; got float16; cast it with g.to(torch.float32)",
        "DTypeError",
    ),
    (
        dict.fromkeys(("query", "key", "value", "g", "beta"), torch.Tensor.double),
        "`query` must suit a float32 state; got float64; make the state with dtype=torch.float64, or cast the inputs",
        "DTypeError",
    ),
    (
        {"beta": lambda x: x.to("meta")},
        "`beta` must be on the state's device, cpu; got meta; move it with beta.to('cpu')",
        "DeviceError",
    ),
    (
        {"query": lambda x: x[0]},
        "`query` must have 3 axes, (B, K, D), or 4 for n tokens; got [2, 8] float32 cpu; add the missing axes",
        "ShapeError",
    ),
    (
        {"key": lambda x: x[:, :1]},
        "`key` must have the sizes of the state; got K = 1, not 2; make the state for the sizes of its tokens",
        "ShapeError",
    ),
    ({"value": lambda x: x[:2, :, :4]}, "got B = 2, not 3, V = 4, not 5; make the state", "ShapeError"),
    (
        {"g": lambda x: x[..., None]},
        "`g` must have 2 axes, (B, H); got [3, 4, 1] float32 cpu; n tokens have an axis n in every tensor",
        "ShapeError",
    ),
    (
        {"g": lambda x: x.neg()},
        "`g` must be at most 0: it is the logarithm of a decay; its greatest number is ",
        "ValueOutOfRange",
    ),
    (
        {"beta": lambda x: torch.full_like(x, torch.inf)},
        "`beta` must be finite; its numbers go from inf to inf; 0 writes nothing, 1 replaces what k names",
        "ValueOutOfRange",
    ),
    ({"beta": lambda x: x.index_fill(1, torch.tensor([2]), -torch.inf)}, "go from -inf to 1.", "ValueOutOfRange"),
    ({"layout": "BHDL"}, "`layout` must be one of BHLD, BLHD; got 'BHDL'", "UnknownName"),
    ({"layout": []}, "`layout` must be one of BHLD, BLHD; got []", "UnknownName"),
]


@pytest.mark.parametrize("changed, text, kind", STEPS)
@pytest.mark.parametrize("draft", [False, True])
def test_what_no_step_takes(changed, text, kind, draft):
    state = make("gated_delta")
    for _ in range(2):
        state.step(**given())
    before, held = state.snapshot(), state.nbytes
    if kind is None:
        with pytest.raises(QkvError) as caught:
            state.step(**given(**changed), draft=draft)
        assert text in str(caught.value)
    else:
        refused(lambda: state.step(**given(**changed), draft=draft), text, kind)
    assert torch.equal(state.state, before.state) and (state.length, state.drafted, state.nbytes) == (2, 0, held)


def test_what_no_step_of_several_tokens_takes():
    state, tokens = make("gated_delta"), tokens_of("gated_delta")
    swapped = [x.transpose(1, 2) for x in tokens]
    with pytest.raises(qkv.errors.ShapeError, match="say layout='BLHD'"):
        state.step(*swapped)
    with pytest.raises(qkv.errors.ShapeError, match="`value` must have the sizes of the state; got n = 22, not 23"):
        state.step(*tokens[:2], tokens[2][:, :, 1:], *tokens[3:])
    with pytest.raises(qkv.errors.DTypeError, match="`beta` must be left out for rule 'ssd'"):
        make("ssd").step(*tokens)
    with pytest.raises(qkv.errors.DTypeError, match="`g` must be left out for rule 'retention'"):
        make("retention").step(*tokens[:4])
    with pytest.raises(qkv.errors.DTypeError, match=r"pass the log decay, \(B, H, D\)"):
        make("kimi_delta").step(*tokens[:3], None, tokens[4])
    one = [x.contiguous() for x in rows(tokens, 0)]
    state.step(*one)
    state.reset()
    with pytest.raises(qkv.errors.UnsupportedError, match=r"a state must be used outside of torch\.func"):
        torch.func.vmap(lambda x: state.step(x, *one[1:]))(torch.stack([one[0], one[0]]))
    odd = RecurrentState(1, 1, 4, 4, "linear", feature_map=lambda x: x if x.any() else x[..., :2])
    with pytest.raises(qkv.errors.ShapeError, match="their number must not change"):
        odd.step(*torch.ones(3, 1, 1, 4).unbind())
    assert state.length == 0 and not state.state.any()


def test_what_an_open_draft_allows():
    tokens, state = tokens_of("gated_delta"), make("gated_delta")
    no_draft = "`accept` and `reject` must follow a draft; no draft is open; say step(..., draft=True)"
    refused(lambda: state.accept(0), no_draft, "UnsupportedError")
    refused(state.reject, no_draft, "UnsupportedError")
    snapshot = state.snapshot()
    state.step(*rows(tokens, slice(0, 3)), draft=True)
    held = state.state.clone()
    for name, use in (
        ("step", lambda: state.step(*rows(tokens, 0))),
        ("snapshot", state.snapshot),
        ("state_dict", state.state_dict),
        ("reorder", lambda: state.reorder([0])),
    ):
        told = (
            f"`{name}` must not meet an open draft; 3 tokens are drafted; call accept(n) or reject() first, or "
            "step(..., draft=True) for more of them"
        )
        refused(use, told, "UnsupportedError")
    refused(lambda: state.accept(4), "`n` must lie in 0..3, the tokens of the draft; got 4", "ValueOutOfRange")
    refused(lambda: state.accept(-1), "`n` must lie in 0..3, the tokens of the draft; got -1", "ValueOutOfRange")
    refused(lambda: state.accept(True), "`n` must be an int; got True; give how many tokens to keep", "DTypeError")
    assert torch.equal(state.state, held) and state.drafted == 3
    state.restore(snapshot)
    assert state.drafted == state.length == 0 and not state.state.any()


@pytest.mark.parametrize(
    "other",
    [
        lambda: RecurrentState(B, H, D, V, "delta"),
        lambda: RecurrentState(2, H, D, V),
        lambda: RecurrentState(B, H, D, V, normalize=True),
        lambda: RecurrentState(B, H, D, V, feature_map="relu"),
        lambda: RecurrentState(B, H, D, V, dtype=torch.float64),
        lambda: RecurrentState(B, H, D, V, feature_map=torch.exp),
        lambda: RecurrentState(B, H, D, V, scale=0.3),
    ],
)
def test_no_snapshot_of_another_kind(other):
    state = RecurrentState(B, H, D, V)
    told = "`snapshot` must be of a state like this one, [3, 4, 8, 5] with rule 'gated_delta', features none, "
    refused(lambda: state.restore(other().snapshot()), told, "ShapeError")


def test_no_snapshot_of_another_decay():
    one, other = (RecurrentState(1, 2, D, V, "retention", decay=torch.tensor([a, -0.5])) for a in (-1.0, -1.25))
    refused(lambda: one.restore(other.snapshot()), "scale 0.35", "ShapeError")
    refused(lambda: one.restore(other.snapshot()), "decay [-1.25, -0.5], float32; restore", "ShapeError")
    none = RecurrentState(1, 2, D, V, "retention", decay=torch.tensor([math.nan, -0.5]))
    none.restore(pickle.loads(pickle.dumps(none)).snapshot())


class Powers(torch.nn.Module):
    def __init__(self, power=2, training=True):
        super().__init__()
        self.power = power
        self.inner = torch.nn.Linear(D, D, bias=False)
        self.register_buffer("offset", torch.ones(D))
        self.train(training)

    def forward(self, x):
        return self.inner(x) ** self.power + self.offset


def test_snapshots_know_a_feature_map_by_its_contents():
    phi = Powers()
    state = make("linear", feature_map=phi)
    state.step(*tokens_of("linear"))
    for twin in (pickle.loads(pickle.dumps(state)), make("linear", feature_map=copy.deepcopy(phi).eval())):
        assert twin._setting.feature_map is not phi
        twin.restore(state.snapshot())
        assert same(twin, state)
    told = "with the same `feature_map`; its Powers is another, or holds other numbers; restore it into"
    cubed, moved, learned = (copy.deepcopy(phi) for _ in range(3))
    cubed.power = 3
    moved.offset += 1
    learned.inner.weight.data[0, 0] += 1
    for other in (cubed, moved, learned):
        refused(
            lambda other=other: make("linear", feature_map=other).restore(state.snapshot()), told, "ValueOutOfRange"
        )
    refused(
        lambda: make("linear", feature_map=lambda x: x).restore(make("linear", feature_map=lambda x: x).snapshot()),
        "its function is another",
        "ValueOutOfRange",
    )


def test_no_tensor_of_another_kind():
    state = make("linear")
    told = "`state` must be [3, 4, 8, 6] float32; got [3, 4, 8, 5] float32 cpu; give what a function returned"
    refused(lambda: state.load(torch.zeros(B, H, D, V)), told, "ShapeError")
    refused(lambda: state.load(state.state.double()), "got [3, 4, 8, 6] float64 cpu", "ShapeError")
    refused(lambda: state.load(state.state, length=-1), "`length` must be at least 0; got -1", "ValueOutOfRange")
    refused(lambda: state.restore(state.state), "`snapshot` must come from snapshot(); got [3, 4, 8, 6]", "DTypeError")
    refused(lambda: state.load_state_dict({"state": state.state}), "must hold state and length", "ValueOutOfRange")
    refused(
        lambda: state.reorder([0, 3]), "`index` must name sequences in 0..B - 1 = 2; entry 1 is 3", "ValueOutOfRange"
    )
    refused(
        lambda: RecurrentState.from_state(torch.zeros(3, 4)), "`state` must have 4 axes, (B, H, D, W)", "ShapeError"
    )
    assert isinstance(state.snapshot(), Snapshot)
