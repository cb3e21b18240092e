"""Embeddings: what is looked up, scaled, added and dropped; first values; what is refused before any work."""

from __future__ import annotations

import math
import time

import pytest
import torch
from torch import nn

from qkv.errors import DTypeError, ShapeError, ValueOutOfRange
from qkv.nn import Embedding, LearnedPositions, SinusoidalPositions, sinusoidal
from qkv.nn.ids import check_ids

IDS = torch.tensor([[3, 1, 0, 9], [2, 2, 5, 7]])


def test_looks_up():
    embedding = Embedding(10, 6)
    assert torch.equal(embedding(IDS), embedding.weight[IDS])
    assert torch.equal(embedding(IDS.int()), embedding.weight[IDS])
    assert set(embedding.state_dict()) == {"weight"}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_adds_sines_to_scaled_vectors(dtype):
    embedding = Embedding(10, 6, positions=SinusoidalPositions(6), scale=math.sqrt(6)).to(dtype)
    want = embedding.weight[IDS].double() * math.sqrt(6) + sinusoidal(4, 6, dtype=torch.float64)
    got = embedding(IDS)
    assert got.dtype == dtype
    bound = {torch.float64: 1e-15, torch.float32: 3e-7, torch.bfloat16: 2e-2}[dtype]
    assert (got.double() - want).abs().max() <= bound * want.abs().max()


def test_positions_are_those_that_are_given():
    embedding = Embedding(10, 6, positions=LearnedPositions(20, 6))
    table = embedding.positions.weight
    assert torch.equal(embedding(IDS), embedding.weight[IDS] + table[:4])
    assert torch.equal(embedding(IDS, torch.arange(4) + 16), embedding.weight[IDS] + table[16:])
    rows = torch.tensor([[0, 1, 2, 3], [7, 8, 9, 10]])
    assert torch.equal(embedding(IDS, rows), embedding.weight[IDS] + table[rows])


def test_any_module_may_give_positions():
    embedding = Embedding(10, 6, positions=nn.Embedding(4, 6))
    assert torch.equal(embedding(IDS), embedding.weight[IDS] + embedding.positions.weight)


def test_gradients_reach_both_tables():
    embedding = Embedding(10, 6, positions=LearnedPositions(5, 6), scale=3.0)
    embedding(IDS).sum().backward()
    assert embedding.weight.grad[:, 0].tolist() == [3, 3, 6, 3, 0, 3, 0, 3, 0, 3]
    assert embedding.positions.weight.grad[:, 0].tolist() == [2, 2, 2, 2, 0]


def test_drops_in_training_only():
    torch.manual_seed(0)
    embedding = Embedding(50, 300, positions=SinusoidalPositions(300), scale=10.0, embedding_dropout=0.2)
    ids = torch.arange(50)[None]
    whole = embedding.eval()(ids)
    assert torch.equal(whole, Embedding.forward(embedding, ids)) and bool((whole != 0).float().mean() > 0.99)
    dropped = embedding.train()(ids)
    gone = (dropped == 0) & (whole != 0)
    assert abs(gone.float().mean().item() - 0.2) < 0.015
    assert torch.allclose(dropped[~gone], whole[~gone] / 0.8)
    assert not torch.equal(dropped, embedding(ids))
    mean = torch.stack([embedding(ids) for _ in range(400)]).mean(0)
    assert (mean - whole).norm() < 0.04 * whole.norm()
    embedding.embedding_dropout = 0.0
    assert torch.equal(embedding(ids), whole)


def test_first_values():
    torch.manual_seed(0)
    embedding = Embedding(2000, 64, scale=8.0)
    assert abs(embedding.weight.std().item() - 1 / 8) < 1e-3
    assert abs(embedding(torch.arange(2000)[None]).std().item() - 1) < 1e-2


def test_is_made_on_the_meta_device():
    with torch.device("meta"):
        embedding = Embedding(10, 6, positions=SinusoidalPositions(6))
        assert embedding(torch.zeros(2, 3, dtype=torch.int64)).shape == (2, 3, 6)
    embedding.load_state_dict({"weight": torch.ones(10, 6)}, assign=True)
    assert torch.equal(embedding(IDS), torch.ones(2, 4, 6) + sinusoidal(4, 6))


def test_compiles_without_a_break():
    embedding = Embedding(10, 6, positions=LearnedPositions(5, 6), scale=2.0)
    compiled = torch.compile(embedding, fullgraph=True, backend="eager")
    assert torch.equal(compiled(IDS), embedding(IDS))


def test_prints_what_it_is():
    assert str(Embedding(10, 6)) == "Embedding(10, 6)"
    assert "(10, 6, scale=2.0, embedding_dropout=0.1" in str(Embedding(10, 6, scale=2.0, embedding_dropout=0.1))


def test_the_look_at_the_numbers_costs_a_step_little():
    """Microseconds, least of several: 2.4 where this was written."""
    ids = torch.ones(1, 1, dtype=torch.int64)
    times = []
    for _ in range(20):
        start = time.perf_counter()
        for _ in range(100):
            check_ids("ids", ids, count=50000)
        times.append((time.perf_counter() - start) / 100)
    assert min(times) < 40e-6


@pytest.mark.parametrize(
    "make, error, text",
    [
        (
            lambda e: e(torch.tensor([[10]])),
            ValueOutOfRange,
            "`ids` must lie in 0 .. 9; got 10 .. 10; use",
        ),
        (lambda e: e(torch.tensor([[0, -1]])), ValueOutOfRange, "got -1 .. 0"),
        (lambda e: e(torch.tensor([[0.0]])), DTypeError, "`ids` must be an int64 or int32 tensor; got torch.float32"),
        (lambda e: e([[0]]), DTypeError, "got list"),
        (lambda e: e(torch.tensor([0, 1])), ShapeError, "`ids` must be (B, L) with at least one token; got (2,)"),
        (lambda e: e(torch.zeros(2, 0, dtype=torch.int64)), ShapeError, "got (2, 0)"),
        (
            lambda e: e(IDS, torch.arange(3)),
            ShapeError,
            "must be (L,) or (B, L) for ids of (2, 4); got (3,)",
        ),
        (lambda e: e(IDS, 3), DTypeError, "`positions` must be int64 or int32"),
        (lambda e: e(IDS, torch.zeros(4)), DTypeError, "`positions` must be int64 or int32"),
        (lambda e: e(IDS, torch.arange(4) + 3), ValueOutOfRange, "`positions` must lie in 0 .. 4"),
        (lambda _: check_ids("ids", IDS, count=10, longest=3), ShapeError, "at most 3 tokens long; got L = 4"),
        (lambda _: Embedding(0, 6), ValueOutOfRange, "`vocabulary` must be at least 1"),
        (lambda _: Embedding(10, 6, scale=math.inf), ValueOutOfRange, "`scale` must be finite"),
        (lambda _: Embedding(10, 6, scale="sqrt"), DTypeError, "`scale` must be a number"),
        (lambda _: Embedding(10, 6, positions=sinusoidal), DTypeError, "`positions` must be a module or None"),
        (lambda _: Embedding(10, 6, embedding_dropout=-0.1), ValueOutOfRange, "`embedding_dropout` must lie in [0, 1)"),
    ],
)
def test_refusals(make, error, text):
    with pytest.raises(error) as caught:
        make(Embedding(10, 6, positions=LearnedPositions(5, 6)))
    assert text in str(caught.value) and str(caught.value).count(";") >= 2
