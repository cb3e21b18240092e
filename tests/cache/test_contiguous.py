"""What all caches do beside attending, shown on the plain one too: views, lengths, truncation, order, gradients."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch.autograd import forward_ad

import qkv

CAUSAL = qkv.causal()
B, H, G, L, D, V = 3, 4, 2, 150, 8, 5
ROOM = 200
EACH = pytest.mark.parametrize("kind", ["contiguous", "paged", "rolling"])
IN_ALL = pytest.mark.filterwarnings("ignore:a rolling cache")


@pytest.fixture
def tensors():
    generator = torch.Generator().manual_seed(0)
    shapes = (B, H, L, D), (B, G, L, D), (B, G, L, V)
    return tuple(torch.randn(*shape, generator=generator, dtype=torch.float64) for shape in shapes)


def make(kind, batch=B, pattern=CAUSAL, dtype=torch.float64):
    if kind == "contiguous":
        return qkv.KVCache(batch, G, ROOM, D, V, dtype=dtype)
    if kind == "paged":
        return qkv.PagedKVCache(batch, G, 4 * B, D, V, dtype=dtype)
    return qkv.RollingKVCache.for_pattern(pattern, batch, G, D, V, dtype=dtype)


def rows(tensors, start, stop):
    return [tensor[:, :, start:stop] for tensor in tensors]


@IN_ALL
@EACH
def test_what_is_kept_and_where(kind, tensors):
    cache = make(kind)
    _, k, v = tensors
    assert (cache.batch, cache.heads, cache.head_dim, cache.value_dim) == (B, G, D, V)
    assert cache.dtype == torch.float64 and cache.device == torch.device("cpu")
    assert cache.keys.shape == (B, G, 0, D) and cache.key_positions.shape == (B, 0)
    cache.append(k[:, :, :70], v[:, :, :70], lengths=torch.tensor([70, 0, 13]))
    assert cache.lengths == (70, 0, 13) and cache.length == 70
    assert cache.keys.shape == (B, G, 70, D) and cache.values.shape == (B, G, 70, V)
    for b, n in enumerate(cache.lengths):
        assert cache.key_positions[b].tolist() == [*range(n), *[-1] * (70 - n)]
        assert torch.equal(cache.keys[b, :, :n], k[b, :, :n]) and torch.equal(cache.values[b, :, :n], v[b, :, :n])


@IN_ALL
@EACH
def test_decoding_is_the_whole_pass(kind, tensors):
    whole = qkv.attention(*tensors, pattern=CAUSAL)
    cache = make(kind)
    cuts = [0, 60, 61, 62, 63, 64, 65, 66, 90, 149, 150]
    steps = [cache.attend(*rows(tensors, a, b), pattern=CAUSAL) for a, b in pairwise(cuts)]
    assert torch.allclose(torch.cat(steps, dim=2), whole, rtol=0, atol=1e-12)


@IN_ALL
@EACH
def test_truncate_and_go_on(kind, tensors):
    """Speculation: what was taken back leaves no trace."""
    cache, straight = make(kind), make(kind)
    for one in (cache, straight):
        one.append(*rows(tensors[1:], 0, 60))
    wrong = [tensor + 9 for tensor in rows(tensors, 60, 72)]
    cache.attend(*wrong, pattern=CAUSAL)
    cache.truncate([60, 60, 60])
    assert cache.lengths == (60, 60, 60)
    for start in range(60, 70):
        step = rows(tensors, start, start + 1)
        assert torch.equal(cache.attend(*step, pattern=CAUSAL), straight.attend(*step, pattern=CAUSAL))
    cache.truncate(0)
    assert cache.length == 0
    assert torch.equal(
        cache.attend(*rows(tensors, 0, 9), pattern=CAUSAL), qkv.attention(*rows(tensors, 0, 9), pattern=CAUSAL)
    )


@IN_ALL
@EACH
@pytest.mark.parametrize("index", [[2, 0, 1], [1, 1, 1], [0], [2, 2, 0, 1, 0], []])
def test_reorder(kind, index, tensors):
    """Beam search: sequences change places, die, and part ways."""
    cache = make(kind)
    q, k, v = tensors
    cache.append(k[:, :, :70], v[:, :, :70], lengths=[70, 65, 3])
    cache.attend(q[:, :, 70:71], k[:, :, 70:71], v[:, :, 70:71], pattern=CAUSAL)
    cache.reorder(torch.tensor(index, dtype=torch.int64))
    assert cache.batch == len(index) and cache.lengths == tuple([71, 66, 4][b] for b in index)
    if not index:
        return
    fresh = (
        torch.randn(len(index), G, 80, D, dtype=torch.float64),
        torch.randn(len(index), G, 80, V, dtype=torch.float64),
    )
    queries = torch.randn(len(index), H, 80, D, dtype=torch.float64)
    for a, b in ((0, 1), (1, 2), (2, 80)):
        found = cache.attend(queries[:, :, a:b], *(x[:, :, a:b] for x in fresh), pattern=CAUSAL)
        for place, old in enumerate(index):
            n = [70, 65, 3][old]
            keys, values = (
                torch.cat([x[old : old + 1, :, :n], x[old : old + 1, :, 70:71], y[place : place + 1, :, :b]], dim=2)
                for x, y in zip((k, v), fresh, strict=True)
            )
            want = qkv.attention(queries[place : place + 1, :, a:b], keys, values, pattern=CAUSAL)
            assert torch.allclose(found[place : place + 1], want, rtol=0, atol=1e-12)


@IN_ALL
@EACH
def test_the_gradient_reaches_the_query_and_no_key(kind, tensors):
    q, k, v = (tensor.clone().requires_grad_() for tensor in tensors)
    cache = make(kind)
    sinks = torch.zeros(H, dtype=torch.float64, requires_grad=True)
    cache.append(k[:, :, :100], v[:, :, :100])
    out = cache.attend(q[:, :, 100:], k[:, :, 100:], v[:, :, 100:], pattern=CAUSAL, sinks=sinks)
    assert not cache.keys.requires_grad
    out.square().sum().backward()
    assert k.grad is None and v.grad is None
    plain, sunk = q.detach().clone().requires_grad_(), sinks.detach().clone().requires_grad_()
    qkv.attention(plain[:, :, 100:], k.detach(), v.detach(), pattern=CAUSAL, sinks=sunk).square().sum().backward()
    assert torch.allclose(q.grad, plain.grad, rtol=0, atol=1e-12)
    assert torch.allclose(sinks.grad, sunk.grad, rtol=0, atol=1e-12)


@IN_ALL
@EACH
def test_aux_is_that_of_the_call(kind, tensors):
    cache = make(kind)
    cache.append(*rows(tensors[1:], 0, 100))
    asked = qkv.AuxRequest(lse=True, max_scores=True, entropy=True, weights=True)
    found = cache.attend(*rows(tensors, 100, 150), pattern=CAUSAL, return_aux=asked)
    q, k, v = tensors
    want = qkv.attention(q[:, :, 100:], k, v, pattern=CAUSAL, return_aux=asked)
    for name in ("lse", "max_scores", "entropy", "weights"):
        assert torch.allclose(getattr(found[1], name), getattr(want[1], name), rtol=0, atol=1e-12), name
    top = cache.attend(*rows(tensors, 149, 150), pattern=CAUSAL, return_aux=qkv.AuxRequest(top_k=3))[1].top_k
    assert top.indices.shape == (B, H, 1, 3)


@IN_ALL
@EACH
def test_made_in_inference_mode_used_outside_and_back(kind, tensors):
    with torch.inference_mode():
        cache = make(kind)
        first = cache.attend(*rows(tensors, 0, 70), pattern=CAUSAL)
    second = cache.attend(*rows(tensors, 70, 71), pattern=CAUSAL)
    with torch.inference_mode():
        third = cache.attend(*rows(tensors, 71, 72), pattern=CAUSAL)
        cache.reorder([0, 1, 2])
    fourth = cache.attend(*rows(tensors, 72, 150), pattern=CAUSAL)
    whole = qkv.attention(*tensors, pattern=CAUSAL)
    assert torch.allclose(torch.cat([first, second, third, fourth], dim=2), whole, rtol=0, atol=1e-12)


@IN_ALL
@EACH
def test_autocast_meets_a_cache_of_its_type(kind, tensors):
    tensors = [tensor.float() for tensor in tensors]
    cache = make(kind, dtype=torch.bfloat16)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for start in range(5):
            assert cache.attend(*rows(tensors, start, start + 1), pattern=CAUSAL).dtype == torch.bfloat16
        with pytest.raises(qkv.errors.DTypeError, match="the cache's dtype, float32; got bfloat16"):
            make(kind, dtype=torch.float32).attend(*rows(tensors, 0, 1), pattern=CAUSAL)


@IN_ALL
@EACH
def test_other_layout_and_strides(kind, tensors):
    cache = make(kind)
    whole = qkv.attention(*tensors, pattern=CAUSAL)
    for start, stop in ((0, 64), (64, 65), (65, 66), (66, 150)):
        turned = [tensor[:, :, start:stop].transpose(1, 2) for tensor in tensors]
        out = cache.attend(*turned, pattern=CAUSAL, layout="BLHD")
        assert torch.allclose(out.transpose(1, 2), whole[:, :, start:stop], rtol=0, atol=1e-12)


@IN_ALL
@EACH
def test_a_call_that_hides_everything_warns_as_any_other(kind, tensors):
    nothing = qkv.causal() - qkv.full()
    cache = make(kind)
    cache.append(*rows(tensors[1:], 0, 5))
    for start in (5, 6, 7):
        with pytest.warns(qkv.errors.InvertedMaskWarning, match="every query of this call is hidden") as seen:
            out = cache.attend(*rows(tensors, start, start + 1), pattern=nothing)
        assert not out.any() and seen[0].filename == __file__


@IN_ALL
@EACH
def test_nothing_to_append(kind, tensors):
    cache = make(kind)
    cache.append(*rows(tensors[1:], 0, 7))
    assert cache.attend(*rows(tensors, 7, 7), pattern=CAUSAL).shape == (B, H, 0, V)
    assert not cache.attend(*rows(tensors, 7, 8), pattern=CAUSAL, lengths=[0, 0, 0]).any()
    assert cache.lengths == (7, 7, 7)


@IN_ALL
@EACH
def test_forward_mode_reaches_the_query(kind, tensors):
    cache = make(kind)
    cache.append(*rows(tensors[1:], 0, 70))
    q, k, v = rows(tensors, 70, 72)

    def answer(query):
        out = cache.attend(query, k, v, pattern=CAUSAL)
        cache.truncate(70)
        return out

    with forward_ad.dual_level():
        tangent = forward_ad.unpack_dual(answer(forward_ad.make_dual(q, torch.ones_like(q)))).tangent
    step = 1e-6
    assert torch.allclose(tangent, (answer(q + step) - answer(q - step)) / (2 * step), atol=1e-7)


@IN_ALL
@EACH
def test_transforms_are_refused(kind, tensors):
    cache = make(kind)
    with pytest.raises(qkv.errors.UnsupportedError, match=r"outside of torch.func; got .*; use torch.autograd"):
        torch.func.vmap(lambda x: cache.attend(x, x, x))(tensors[1][None])
    assert cache.length == 0


@IN_ALL
@EACH
def test_compiled_code_runs_around_it(kind, tensors):
    cache = make(kind)

    def step(q, k, v):
        return cache.attend(q * 1.0, k, v, pattern=CAUSAL) + 1.0

    compiled = torch.compile(step, backend="eager")
    found = [compiled(*rows(tensors, a, b)) for a, b in pairwise([0, 66, 67, 68, 69])]
    whole = qkv.attention(*rows(tensors, 0, 69), pattern=CAUSAL)
    assert torch.allclose(torch.cat(found, 2), whole + 1.0, rtol=0, atol=1e-12)
    with pytest.raises(torch._dynamo.exc.Unsupported, match="a cache keeps its state outside of the graph"):
        torch.compile(lambda x: cache.truncate(1) or x, backend="eager", fullgraph=True)(tensors[0])


@IN_ALL
@EACH
def test_steps_of_another_batch_size_are_forgotten(kind, tensors):
    cache = make(kind)
    for start in range(3):
        cache.attend(*rows(tensors, start, start + 1), pattern=CAUSAL)
    cache.reorder([0])
    with pytest.raises(qkv.errors.ShapeError, match="B = 3, not 1"):
        cache.attend(*rows(tensors, 3, 4), pattern=CAUSAL)


def test_padding_may_reach_beyond_the_room(tensors):
    _, k, v = tensors
    cache = qkv.KVCache(B, G, 70, D, V, dtype=torch.float64)
    cache.append(k[:, :, :60], v[:, :, :60])
    found = cache.attend(*rows(tensors, 60, 80), pattern=CAUSAL, lengths=[10, 10, 10])
    assert torch.allclose(found[:, :, :10], qkv.attention(*rows(tensors, 0, 70), pattern=CAUSAL)[:, :, 60:], atol=1e-12)
    assert cache.lengths == (70, 70, 70)


def test_keys_are_read_where_they_lie():
    cache = qkv.KVCache(2, 1, 10, 4)
    cache.append(torch.ones(2, 1, 3, 4), torch.ones(2, 1, 3, 4))
    assert cache.keys.data_ptr() == cache._keys.data_ptr()
    assert cache.nbytes == 2 * 10 * (4 + 4) * 4


def test_another_pattern_a_step_and_bias_by_rule(tensors):
    """Remembered steps are told apart by all that they were asked with."""
    cache, start = make("contiguous"), 60
    cache.append(*rows(tensors[1:], 0, start))
    q, k, v = tensors
    asks = [
        {"pattern": CAUSAL},
        {"pattern": qkv.window(5)},
        {"pattern": qkv.window(5), "scale": 0.3},
        {"pattern": CAUSAL, "softcap": 2.0},
        {"pattern": CAUSAL, "bias": qkv.alibi([0.1, 0.2, 0.3, 0.4])},
        {"pattern": CAUSAL, "backend": "reference"},
        {},
    ]
    for options in asks * 3:
        found = cache.attend(*rows(tensors, start, start + 1), **options)
        start += 1
        want = qkv.attention(q[:, :, start - 1 : start], k[:, :, :start], v[:, :, :start], **options)
        assert torch.allclose(found, want, rtol=0, atol=1e-12), options
