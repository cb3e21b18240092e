"""Dropout is one documented rule of (seed, b, h, i, j): the same mask on every backend, whatever the tiles, chunks or
batch.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import engines
import oracles
import qkv

OURS = engines.EACH


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def kept(sizes: tuple[int, int, int, int], p: float, backend: str, seed: int = 0, **options: Any) -> Tensor:
    """The weights that stay, (B, H, L, S): with v the identity, the output is the row of dropped weights."""
    batch, heads, queries, keys = sizes
    q = torch.zeros(batch, heads, queries, 2, dtype=torch.float64)
    k = torch.ones(batch, heads, keys, 2, dtype=torch.float64)
    v = torch.eye(keys, dtype=torch.float64).expand(batch, heads, keys, keys)
    return qkv.attention(q, k, v, dropout_p=p, generator=generator(seed), backend=backend, **options) != 0


@OURS
@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
@pytest.mark.parametrize("sizes", [(2, 3, 5, 19), (1, 2, 130, 67), (1, 1, 1, 250)])
def test_mask_is_the_documented_rule(sizes: tuple[int, int, int, int], p: float, backend: str) -> None:
    want = oracles.dropout_keep(oracles.drawn_seed(3), p, sizes)
    assert torch.equal(kept(sizes, p, backend, seed=3), want)
    assert 0 < want.double().mean() < 1


@OURS
def test_kept_weights_are_scaled_by_the_rounded_probability(backend: str) -> None:
    q, k = torch.zeros(1, 1, 4, 2).double(), torch.ones(1, 1, 50, 2).double()
    out = qkv.attention(
        q, k, torch.eye(50).double()[None, None], dropout_p=0.3, generator=generator(0), backend=backend
    )
    threshold = 19661  # floor(65536 · 0.3 + 1/2)
    torch.testing.assert_close(
        out[out != 0], torch.full_like(out[out != 0], 65536 / (65536 - threshold) / 50), rtol=1e-14, atol=0
    )


@OURS
def test_probability_is_rounded_to_65536ths(backend: str) -> None:
    sizes = (1, 1, 64, 64)
    assert kept(sizes, 0.49 / 65536, backend).all()
    assert torch.equal(kept(sizes, 0.5, backend), kept(sizes, 0.5 + 0.4 / 65536, backend))
    assert kept(sizes, 65535 / 65536, backend).double().mean() < 0.01
    with pytest.raises(qkv.errors.ValueOutOfRange, match="dropout_p"):
        kept(sizes, 65535.5 / 65536, backend)


@pytest.mark.parametrize(
    "pattern",
    [
        "causal() & window(20)",
        "strided(8)",
        "fixed(16)",
        "dilated(5, dilation=3)",
        "window(9) | global_tokens([0, 50])",
        "block_local(7)",
        "axial((13, 10), along='height')",
    ],
)
def test_backends_drop_the_same_weights_under_every_pattern(pattern: str) -> None:
    """Permuted and gathered parts too: positions are absolute in every order."""
    sizes = (2, 2, 130, 130)
    masks = [kept(sizes, 0.4, backend, seed=9, pattern=qkv.parse(pattern)) for backend in (*engines.TORCH, "cpu")]
    visible = qkv.parse(pattern).to_dense(130)
    assert all(torch.equal(masks[0], mask) for mask in masks)
    assert torch.equal(masks[0], oracles.dropout_keep(oracles.drawn_seed(9), 0.4, sizes) & visible)


@OURS
def test_mean_over_seeds_is_the_output_without_dropout(backend: str) -> None:
    g = generator(0)
    q, k, v = (torch.randn(1, 2, 6, 4, generator=g, dtype=torch.float64) for _ in range(3))
    p, count = 0.3, 500
    runs = torch.stack([qkv.attention(q, k, v, dropout_p=p, generator=g, backend=backend) for _ in range(count)])
    truth = oracles.attend(q, k, v, torch.tensor(True))
    deviation = ((p / (1 - p)) * truth.weights.square() @ v.square() / count).sqrt()
    assert ((runs.mean(0) - truth.out).abs() <= 4.5 * deviation).all()  # 48 numbers: one in 3000 runs of a random seed
    spread = runs.var(0) / (deviation.square() * count)
    assert (spread.mean() - 1).abs() < 0.15


@OURS
def test_generator_alone_decides(backend: str) -> None:
    sizes = (1, 2, 20, 20)
    assert torch.equal(kept(sizes, 0.5, backend, seed=1), kept(sizes, 0.5, backend, seed=1))
    assert not torch.equal(kept(sizes, 0.5, backend, seed=1), kept(sizes, 0.5, backend, seed=2))
    g = generator(1)
    q = torch.ones(1, 1, 8, 2)
    first, second = (qkv.attention(q, q, q, dropout_p=0.5, generator=g, backend=backend) for _ in range(2))
    assert not torch.equal(first, second)
    torch.manual_seed(5)
    default = qkv.attention(q, q, q, dropout_p=0.5, backend=backend)
    assert torch.equal(default, qkv.attention(q, q, q, dropout_p=0.5, generator=generator(5), backend=backend))


@OURS
def test_no_dropout_draws_no_seed(backend: str) -> None:
    g = generator(1)
    state = g.get_state()
    q = torch.ones(1, 1, 8, 2)
    qkv.attention(q, q, q, dropout_p=0.0, generator=g, backend=backend)
    assert torch.equal(g.get_state(), state)


@OURS
def test_mask_knows_the_batch_row_and_the_head_but_not_their_number(backend: str) -> None:
    large = kept((3, 4, 9, 33), 0.5, backend)
    assert torch.equal(kept((2, 4, 9, 33), 0.5, backend), large[:2])
    assert torch.equal(kept((1, 2, 9, 33), 0.5, backend), large[:1, :2])
    assert not torch.equal(large[0], large[1]) and not torch.equal(large[:, 0], large[:, 1])


@OURS
def test_mask_does_not_depend_on_how_queries_are_split(backend: str) -> None:
    whole = kept((1, 2, 150, 150), 0.5, backend)
    parts = [
        kept((1, 2, stop - start, 150), 0.5, backend, query_offset=start)
        for start, stop in ((0, 1), (1, 64), (64, 67), (67, 150))
    ]
    assert torch.equal(torch.cat(parts, 2), whole)


@OURS
def test_mask_follows_the_offset_of_each_batch_row(backend: str) -> None:
    got = kept((2, 1, 3, 20), 0.5, backend, query_offset=[4, 11])
    assert torch.equal(got, oracles.dropout_keep(oracles.drawn_seed(0), 0.5, (2, 1, 3, 20), [4, 11]))


@OURS
@pytest.mark.parametrize("start", [2**31 - 2, 2**32 - 2, 2**33 + 5])
def test_positions_count_modulo_32_bits(start: int, backend: str) -> None:
    got = kept((1, 2, 5, 20), 0.5, backend, query_offset=start)
    assert torch.equal(got, oracles.dropout_keep(oracles.drawn_seed(0), 0.5, (1, 2, 5, 20), start))


@OURS
def test_leading_axes_are_flattened_into_the_batch(backend: str) -> None:
    flat = torch.zeros(6, 2, 5, 3).double()
    v = torch.eye(9).double().expand(6, 2, 9, 9)
    k = torch.zeros(6, 2, 9, 3).double()
    want = qkv.attention(flat, k, v, dropout_p=0.5, generator=generator(0), backend=backend)
    got = qkv.attention(
        *(x.reshape(2, 3, *x.shape[1:]) for x in (flat, k, v)), dropout_p=0.5, generator=generator(0), backend=backend
    )
    assert torch.equal(got.reshape(want.shape), want)


@OURS
def test_weights_are_those_before_dropout(backend: str) -> None:
    q, k, v = torch.zeros(1, 1, 3, 2), torch.ones(1, 1, 8, 2), torch.ones(1, 1, 8, 2)
    request = qkv.AuxRequest(weights=True, lse=True, entropy=True)
    out, aux = qkv.attention(q, k, v, dropout_p=0.5, generator=generator(0), backend=backend, return_aux=request)
    torch.testing.assert_close(aux.weights, torch.full((1, 1, 3, 8), 1 / 8))
    torch.testing.assert_close(aux.lse, torch.full((1, 1, 3), math.log(8)))
    torch.testing.assert_close(aux.entropy, torch.full((1, 1, 3), math.log(8)))
    assert out.unique().numel() > 1


@OURS
def test_backward_uses_the_mask_of_the_forward(backend: str) -> None:
    sizes = (2, 2, 9, 17)
    g = generator(0)
    q, k, v = (torch.randn(2, 2, n, 4, generator=g, dtype=torch.float64).requires_grad_() for n in (9, 17, 17))
    out = qkv.attention(q, k, v, dropout_p=0.25, generator=generator(4), backend=backend)
    keep = oracles.dropout_keep(oracles.drawn_seed(4), 0.25, sizes)
    truth = oracles.attend(q, k, v, torch.tensor(True), keep=keep, drop_scale=4 / 3)
    torch.manual_seed(99)  # whatever happens between forward and backward
    for a, b in zip(
        torch.autograd.grad(out.square().sum(), (q, k, v)),
        torch.autograd.grad(truth.out.square().sum(), (q, k, v)),
        strict=True,
    ):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
