"""The native recurrence in places that no other engine has: remainders of vectors, the state in place, odd strides."""

from __future__ import annotations

import pytest
import torch

import qkv
from linear.linear_engines import NATIVE, each, using
from qkv.backends import extension
from qkv.backends.cpu import LARGE, fresh
from qkv.linear import native, reference
from qkv.linear.recurrence import Recurrence, Streams

pytestmark = pytest.mark.skipif(extension.native is None, reason=str(extension.MISSING))


def question(length=70, *, heads=2, key_dim=8, value_dim=8, **kinds) -> Recurrence:
    sizes = {"batch": 1, "heads": heads, "key_heads": heads, "length": length}
    kinds = {"scale": 0.5, "dtype": torch.float64} | kinds
    return Recurrence(**sizes, key_dim=key_dim, value_dim=value_dim, **kinds)


def streams(r: Recurrence) -> Streams:
    """Keys of unit length, or positive features where there is a normaliser."""
    draw = torch.Generator().manual_seed(r.key_dim)

    def normal(*shape):
        return torch.randn(shape, generator=draw, dtype=torch.float64)

    query, key = (normal(1, r.key_heads, r.length, r.key_dim) for _ in range(2))
    key = key.abs() if r.normalize else key / key.norm(dim=-1, keepdim=True)
    rows = (1, r.heads, r.length)
    gate = None if r.gate == "none" else -normal(*rows, *([r.key_dim] if r.gate == "vector" else [])).abs()
    beta = torch.rand(rows, generator=draw, dtype=torch.float64) if r.delta else None
    values = Streams(query.abs() if r.normalize else query, key, normal(1, r.heads, r.length, r.value_dim), gate, beta)
    return Streams(*(None if x is None else x.to(r.dtype) for x in values))


def gradients(answer, r, given):
    leaves = [x if x is None else x.detach().clone().requires_grad_() for x in given]
    outcome = answer(r, Streams(*leaves))
    wanted = [x for x in leaves if x is not None]
    return outcome.output, *torch.autograd.grad(outcome.output.square().sum() + outcome.state.sum(), wanted)


@each(*NATIVE)
@pytest.mark.parametrize("delta", [False, True])
@pytest.mark.parametrize("key_dim", [1, 2, 3, 5, 6, 10, 33])
def test_remainders_of_key_channels(engine, key_dim, delta):
    r = question(key_dim=key_dim, gate="scalar", delta=delta)
    given = streams(r)
    with using(engine) as answer:
        for got, want in zip(gradients(answer, r, given), gradients(reference.answer, r, given), strict=True):
            torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-11)


@each(*NATIVE)
@pytest.mark.parametrize("length", [2, 9])
def test_the_normaliser_of_a_state_in_place_is_read_before_it_is_written(engine, length):
    r = question(length, heads=1, value_dim=200, normalize=True, scale=1.0)
    given, before = streams(r), torch.rand(1, 1, 8, 201, dtype=torch.float64)
    threads = torch.get_num_threads()
    want = reference.answer(r, given._replace(state=before))
    try:
        torch.set_num_threads(3)
        with using(engine):
            for _ in range(20):
                state = before.clone()
                output = native.advance(r, given, state)
                torch.testing.assert_close(output, want.output)
                torch.testing.assert_close(state, want.state)
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("count", [0, 1, 5_000, LARGE // 8 + 3, LARGE])
def test_a_wish_for_large_pages_changes_nothing(count):
    for first in (0, 1, 513):
        numbers = torch.arange(count + first, dtype=torch.float64)[first:]
        assert fresh(numbers) is numbers
        assert torch.equal(numbers, torch.arange(first, count + first, dtype=torch.float64))


def test_rows_that_overlap():
    r = question(40, key_dim=16, value_dim=16, gate="scalar")
    given = streams(r)
    flat = torch.randn(2, 60, dtype=torch.float64)
    sliding = flat.as_strided((1, 2, 40, 16), (120, 60, 1, 1))
    moved = given._replace(value=sliding, key=sliding / 4)
    for got, want in zip(gradients(native.answer, r, moved), gradients(reference.answer, r, moved), strict=True):
        torch.testing.assert_close(got, want)
    alike = native.answer(r, moved).output
    torch.testing.assert_close(alike, reference.answer(r, moved).output)


@each(*NATIVE)
@pytest.mark.parametrize("feature", ["relu", "squared_relu", "elu"])
def test_nan_goes_through_features(engine, feature):
    r = question(9, feature=feature, normalize=True, scale=1.0)
    given = streams(r)
    given.query[0, 0, 4, 2] = torch.nan
    with using(engine) as answer:
        got = answer(r, given).output.isnan().all(-1)
    assert got[0, 0].tolist() == [t == 4 for t in range(9)]
    assert not got[0, 1].any()


@each(*NATIVE)
@pytest.mark.parametrize("length", [2, 9])
def test_a_denominator_of_zero_is_zero_whatever_is_above_it(engine, length):
    r = question(length, normalize=True, scale=1.0)
    given = streams(r)
    given.query[0, 0, 1] = 0
    infinite = given.value.clone()
    infinite[0, 0, 0, 3] = torch.inf
    with using(engine) as answer:
        assert (answer(r, given._replace(value=infinite)).output[0, 0, 1] == 0).all()
        leaves = Streams(*(None if x is None else x.requires_grad_() for x in given))
        output = answer(r, leaves).output
        grad_output = torch.zeros_like(output)
        grad_output[0, 0, 1] = torch.inf
        grads = torch.autograd.grad(output, leaves[:3], grad_output)
    assert all((grad == 0).all() for grad in grads)


def test_a_normaliser_takes_no_scale_of_zero():
    r = question(normalize=True, scale=0.0)
    assert "scale" in " ".join(native.reasons_against(r, torch.device("cpu")))
    assert (reference.answer(r, streams(r)).output == 0).all()


def test_gradients_of_streams_that_were_made_of_one_another():
    x = torch.randn(1, 2, 9, 4, dtype=torch.float64, requires_grad=True)
    for key in (x, 2 * x):
        loss = qkv.ssd(x, key, x.detach(), -torch.rand(1, 2, 9, dtype=torch.float64)).square().sum()
        (once,) = torch.autograd.grad(loss, x, retain_graph=True)
        (again,) = torch.autograd.grad(loss, x, create_graph=True)
        torch.testing.assert_close(again, once)
