"""Sinusoidal and learned positions; T5's buckets and ALiBi's slopes as biases of attention."""

from __future__ import annotations

import copy
import inspect
import math

import pytest
import torch

import qkv
from qkv.errors import DTypeError, ValueOutOfRange
from qkv.nn import AlibiBias, LearnedPositions, SinusoidalPositions, T5RelativeBias, sinusoidal


def vaswani(position, dim, base=10000.0):
    """Section 3.5, one number at a time."""
    return [
        math.sin(position / base ** (2 * (c // 2) / dim))
        if c % 2 == 0
        else math.cos(position / base ** (2 * (c // 2) / dim))
        for c in range(dim)
    ]


@pytest.mark.parametrize("dim, base", [(2, 10000.0), (6, 10000.0), (64, 10000.0), (16, 50.0)])
def test_sines_are_those_of_the_paper(dim, base):
    where = [0, 1, 2, 511, 100_000, 10**6]
    want = torch.tensor([vaswani(position, dim, base) for position in where], dtype=torch.float64)
    got = sinusoidal(torch.tensor(where), dim, base=base, dtype=torch.float64)
    assert torch.allclose(got, want, rtol=0, atol=1e-9)
    assert torch.equal(sinusoidal(torch.tensor(where), dim, base=base), got.float())
    assert torch.equal(sinusoidal(torch.tensor(where, dtype=torch.int32), dim, base=base), got.float())


def test_a_length_counts_from_zero_and_rows_may_stand_elsewhere():
    assert torch.equal(sinusoidal(7, 8), sinusoidal(torch.arange(7), 8))
    assert sinusoidal(0, 8).shape == (0, 8)
    rows = torch.stack((torch.arange(5), torch.arange(5) + 9))
    module = SinusoidalPositions(8, base=100.0)
    assert torch.equal(module(rows)[1], sinusoidal(rows[1], 8, base=100.0))
    assert module(rows, torch.bfloat16).dtype == torch.bfloat16
    assert sinusoidal(3, 4, device="meta").is_meta
    assert not module.state_dict() and str(module) == "SinusoidalPositions(8, base=100.0)"


def test_the_default_type_is_that_of_torch():
    torch.set_default_dtype(torch.float64)
    try:
        assert sinusoidal(3, 4).dtype == torch.float64
    finally:
        torch.set_default_dtype(torch.float32)


def test_learned_positions():
    torch.manual_seed(0)
    learned = LearnedPositions(600, 64)
    assert torch.equal(learned(torch.tensor([[3, 599]])), learned.weight[[3, 599]][None])
    assert abs(learned.weight.std().item() - 0.02) < 5e-4 and abs(learned.weight.mean().item()) < 5e-4
    learned(torch.tensor([1, 1, 2], dtype=torch.int32)).sum().backward()
    assert learned.weight.grad[:3, 0].tolist() == [0, 2, 1]
    assert str(learned) == "LearnedPositions(600, 64)"


# T5


def bias_of(module, i, j):
    """By the text of section 2.1, one pair at a time: logarithms in float64, ties settled upwards."""
    buckets = module.weight.shape[0]
    distance, first = j - i, 0
    if module.bidirectional:
        buckets //= 2
        first = buckets if distance > 0 else 0
        distance = abs(distance)
    else:
        distance = max(-distance, 0)
    half = buckets // 2
    if distance < half:
        return first + distance
    share = math.log(distance / half) / math.log(module.max_distance / half)
    return first + min(half + math.floor(share * (buckets - half) + 1e-9), buckets - 1)


SHAPES = pytest.mark.parametrize(
    "options",
    [
        {},
        {"bidirectional": False},
        {"buckets": 8, "max_distance": 20},
        {"buckets": 7, "max_distance": 9, "bidirectional": False},
    ],
    ids=["encoder", "decoder", "small", "odd"],
)


def dense(module, queries, keys, start=0):
    """(H, L, S)."""
    rows = [[bias_of(module, i + start, j) for j in range(keys)] for i in range(queries)]
    return module.weight[torch.tensor(rows)].permute(2, 0, 1)


@SHAPES
def test_buckets_of_t5(options):
    module = T5RelativeBias(3, **options)
    table = module().table
    radius = table.shape[1] // 2
    for distance in range(-300, 301):
        entry = table[:, max(-radius, min(radius, distance)) + radius]
        assert torch.equal(entry, module.weight[bias_of(module, 0, distance)])


@pytest.mark.parametrize("bidirectional", [True, False])
@pytest.mark.parametrize("buckets, max_distance", [(32, 128), (32, 64), (16, 100), (64, 300), (12, 256), (8, 20)])
def test_buckets_of_transformers(bidirectional, buckets, max_distance):
    t5 = pytest.importorskip("transformers.models.t5.modeling_t5")
    theirs = [one for _, one in inspect.getmembers(t5, inspect.isclass) if hasattr(one, "_relative_position_bucket")]
    distances = torch.arange(-300, 301)
    want = theirs[0]._relative_position_bucket(
        distances, bidirectional=bidirectional, num_buckets=buckets, max_distance=max_distance
    )
    module = T5RelativeBias(1, buckets=buckets, max_distance=max_distance, bidirectional=bidirectional)
    with torch.no_grad():
        module.weight.copy_(torch.arange(buckets)[:, None])
    table, radius = module().table[0], module().radius
    assert torch.equal(table[distances.clamp(-radius, radius) + radius], want.float())


def pieces(queries, keys, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(2, 3, n, 8, generator=generator, dtype=torch.float64) for n in (queries, keys, keys)]


@SHAPES
@pytest.mark.parametrize("pattern", [None, qkv.causal()], ids=["all", "causal"])
@pytest.mark.parametrize("queries, keys", [(40, 40), (1, 200), (5, 33)])
def test_attention_adds_what_the_dense_bias_says(options, pattern, queries, keys):
    """Queries stand at the end of the keys, as in decoding."""
    torch.manual_seed(0)
    module = T5RelativeBias(3, **options).double()
    q, k, v = pieces(queries, keys)
    bias = dense(module, queries, keys, keys - queries)
    scores = q @ k.transpose(-1, -2) + bias
    if pattern is not None:
        scores = scores.masked_fill(~pattern.to_dense(queries, keys), -math.inf)
    want = scores.softmax(-1) @ v
    got = qkv.attention(q, k, v, bias=module(), pattern=pattern, scale=1.0)
    assert torch.allclose(got, want, atol=1e-12)
    grad = torch.randn_like(got)
    (found,) = torch.autograd.grad(got, module.weight, grad)
    (wanted,) = torch.autograd.grad(want, module.weight, grad)
    assert found.abs().max() > 0
    assert torch.allclose(found, wanted, atol=1e-10)


@SHAPES
def test_a_cache_decodes_as_the_whole_pass(options):
    module = T5RelativeBias(3, **options).double()
    q, k, v = pieces(30, 30)
    with torch.no_grad():
        whole = qkv.attention(q, k, v, bias=module(), pattern=qkv.causal(), scale=1.0)
        cache = qkv.KVCache(2, 3, 30, 8, dtype=torch.float64)
        for t in range(30):
            part = [x[:, :, t : t + 1] for x in (q, k, v)]
            got = cache.attend(*part, pattern=qkv.causal(), bias=module(), scale=1.0)
            assert torch.allclose(got, whole[:, :, t : t + 1], atol=1e-12)


def test_t5_bias_follows_its_weight():
    with torch.device("meta"):
        module = T5RelativeBias(2)
    assert module().table.is_meta
    module.load_state_dict({"weight": torch.ones(32, 2)}, assign=True)
    assert bool((module().table == 1).all())
    assert copy.deepcopy(module).bfloat16()().table.dtype == torch.bfloat16
    assert str(module) == "T5RelativeBias(2, buckets=32, max_distance=128, bidirectional=True)"


# ALiBi


def test_slopes_of_alibi():
    """Those that the paper prints for 8 and 16 heads; between powers of two, every second of the next."""
    assert AlibiBias(8)().slopes == tuple(2.0**-h for h in range(1, 9))
    assert AlibiBias(16)().slopes == tuple(2.0 ** (-h / 2) for h in range(1, 17))
    assert AlibiBias(12)().slopes == (*(2.0**-h for h in range(1, 9)), *(2.0 ** (-h / 2) for h in (1, 3, 5, 7)))
    assert not AlibiBias(8).state_dict() and str(AlibiBias(8)) == "AlibiBias(8)"


def test_attention_with_alibi():
    q, k, v = pieces(9, 9)
    distance = (torch.arange(9)[:, None] - torch.arange(9)).abs()
    bias = -torch.tensor(qkv.alibi_slopes(3), dtype=torch.float64)[:, None, None] * distance
    want = ((q @ k.transpose(-1, -2)) / math.sqrt(8) + bias).softmax(-1) @ v
    assert torch.allclose(qkv.attention(q, k, v, bias=AlibiBias(3)()), want, atol=1e-12)


@pytest.mark.parametrize(
    "make, error, text",
    [
        (lambda: sinusoidal(3, 5), ValueOutOfRange, "`dim` must be even; got 5"),
        (lambda: sinusoidal(-1, 4), ValueOutOfRange, "`positions` must be at least 0"),
        (lambda: sinusoidal(torch.zeros(3), 4), DTypeError, "`positions` must be int64 or int32, (L,) or (B, L)"),
        (lambda: sinusoidal(3, 4, base=-1.0), ValueOutOfRange, "`base`"),
        (lambda: SinusoidalPositions(0), ValueOutOfRange, "`dim` must be at least 2"),
        (lambda: SinusoidalPositions(4, base=math.nan), ValueOutOfRange, "`base`"),
        (
            lambda: LearnedPositions(4, 2)(torch.tensor([0, 4])),
            ValueOutOfRange,
            "must lie in 0 .. 3; got 0 .. 4; cut the text",
        ),
        (lambda: LearnedPositions(4, 2)(torch.tensor([-1])), ValueOutOfRange, "got -1 .. -1"),
        (lambda: LearnedPositions(4, 2)(torch.tensor(1)), DTypeError, "got [] int64"),
        (lambda: LearnedPositions(4, 0), ValueOutOfRange, "`dim`"),
        (lambda: T5RelativeBias(2, buckets=31), ValueOutOfRange, "`buckets` must be even and at least 4"),
        (lambda: T5RelativeBias(2, buckets=1, bidirectional=False), ValueOutOfRange, "must be at least 2"),
        (lambda: T5RelativeBias(2, max_distance=8), ValueOutOfRange, "got 32 and 8; T5 has 32 and 128"),
        (lambda: T5RelativeBias(2, bidirectional=1), DTypeError, "`bidirectional`"),
        (lambda: T5RelativeBias(0), ValueOutOfRange, "`heads`"),
        (lambda: AlibiBias(0), ValueOutOfRange, "`heads`"),
    ],
)
def test_refusals(make, error, text):
    with pytest.raises(error) as caught:
        make()
    assert text in str(caught.value) and str(caught.value).count(";") == 2
