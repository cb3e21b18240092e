"""The oracle itself, against torch's SDPA in float64, published test vectors and values worked out by hand."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

import oracles

INF = float("inf")


def tensors(*shapes, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(*shape, generator=generator, dtype=torch.float64) for shape in shapes]


@pytest.mark.parametrize("heads, kv_heads", [(4, 4), (4, 2), (4, 1)])
def test_attend_agrees_with_sdpa_in_value_and_gradient(heads, kv_heads):
    q, k, v = (x.requires_grad_() for x in tensors((2, heads, 5, 8), (2, kv_heads, 7, 8), (2, kv_heads, 7, 3)))
    keep = tensors((2, heads, 5, 7), seed=1)[0] > -1
    keep[..., 0] = True
    truth = oracles.attend(q, k, v, keep, scale=0.3)
    torch_out = scaled_dot_product_attention(q, k, v, attn_mask=keep, scale=0.3, enable_gqa=True)
    torch.testing.assert_close(truth.out, torch_out, rtol=1e-13, atol=1e-13)
    ones = torch.ones_like(torch_out).cumsum(-1)
    for mine, theirs in zip(
        torch.autograd.grad(truth.out, (q, k, v), ones),
        torch.autograd.grad(torch_out, (q, k, v), ones),
        strict=True,
    ):
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)


def test_attend_bias_and_softcap_agree_with_written_out_softmax():
    q, k, v, bias = tensors((1, 2, 3, 4), (1, 2, 5, 4), (1, 2, 5, 4), (2, 1, 5))
    scores = 2.0 * torch.tanh(q @ k.mT / 2 / 2.0) + bias
    truth = oracles.attend(q, k, v, torch.ones(1, dtype=torch.bool), softcap=2.0, bias=bias)
    torch.testing.assert_close(truth.out, scores.softmax(-1) @ v)
    torch.testing.assert_close(truth.lse, scores.logsumexp(-1))
    torch.testing.assert_close(truth.max_scores, scores.amax(-1))
    p = scores.softmax(-1)
    torch.testing.assert_close(truth.entropy, -(p * p.log()).sum(-1))


def test_attend_of_a_row_without_keys_is_zero_and_has_zero_gradients():
    q, k, v = (x.requires_grad_() for x in tensors((1, 1, 2, 4), (1, 1, 3, 4), (1, 1, 3, 4)))
    truth = oracles.attend(q, k, v, torch.tensor([[True, True, False], [False] * 3]))
    assert truth.out[0, 0, 1].tolist() == [0.0] * 4
    assert truth.lse[0, 0, 1] == -INF and truth.max_scores[0, 0, 1] == -INF and truth.entropy[0, 0, 1] == 0
    dq, dk, dv = torch.autograd.grad(truth.out.sum() + truth.lse[0, 0, 0], (q, k, v))
    assert dq[0, 0, 1].tolist() == [0.0] * 4 and dk[0, 0, 2].tolist() == [0.0] * 4 and dv[0, 0, 2].tolist() == [0.0] * 4


def test_attend_sink_takes_weight_and_is_the_lse_of_an_empty_row():
    q, k = torch.zeros(1, 1, 1, 4), torch.ones(1, 1, 3, 4)
    v = torch.arange(3.0).reshape(1, 1, 3, 1)
    sinks = torch.zeros(1)
    assert oracles.attend(q, k, v, torch.tensor(True), sinks=sinks).out.item() == 0.75
    empty = oracles.attend(q, k, v, torch.tensor(False), sinks=sinks + 0.5)
    assert empty.out.item() == 0 and empty.lse.item() == 0.5


def test_attend_hidden_nan_reaches_neither_value_nor_gradient():
    q, k, v = tensors((1, 1, 3, 4), (1, 1, 3, 4), (1, 1, 3, 4))
    allowed = torch.tensor([[1, 0, 0], [1, 1, 0], [1, 1, 0]]).bool()
    clean = [x.clone().requires_grad_() for x in (q, k, v)]
    k[0, 0, 2], v[0, 0, 2] = math.nan, INF
    dirty = [x.clone().requires_grad_() for x in (q, k, v)]
    outs = [oracles.attend(*x, allowed).out for x in (clean, dirty)]
    torch.testing.assert_close(*outs)
    assert not oracles.attend(q, k, v, torch.ones(3, 3).tril().bool()).out[:, :, 2].isfinite().any()
    grads = [torch.autograd.grad(o.sum(), x) for o, x in zip(outs, (clean, dirty), strict=True)]
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b)


def test_attend_is_differentiable_in_every_tensor():
    shapes = [(1, 2, 3, 2), (1, 1, 4, 2), (1, 1, 4, 2), (2, 3, 4), (2,)]
    inputs = [x.requires_grad_() for x in tensors(*shapes)]
    keep = torch.tensor([[1, 1, 0, 1], [0, 0, 0, 0], [1, 1, 1, 0]]).bool()

    def call(q, k, v, bias, sinks):
        truth = oracles.attend(q, k, v, keep, softcap=3.0, bias=bias, sinks=sinks, keep=keep, drop_scale=2.0)
        return truth.out, truth.lse, truth.weights

    assert torch.autograd.gradcheck(call, inputs)


def test_philox_gives_the_published_vectors():
    ones = 0xFFFFFFFF
    known = [
        ((0, 0, 0, 0), 0, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((ones,) * 4, (ones << 32) | ones, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            0x299F31D0_A4093822,
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ]
    for counter, key, words in known:
        assert oracles.philox(counter, key) == words


def test_dropout_keep_reads_the_halves_in_order():
    keep = oracles.dropout_keep(7, 0.5, (2, 3, 4, 19), offset=5)
    for b, h, row, j in [(0, 0, 0, 0), (1, 2, 3, 18), (1, 1, 2, 9), (0, 2, 1, 7), (1, 0, 3, 12)]:
        word = oracles.philox((j // 8, 5 + row, h, b), 7)[j % 8 // 2]
        value = word & 0xFFFF if j % 2 == 0 else word >> 16
        assert keep[b, h, row, j].item() == (value >= 32768)


def test_dropout_threshold_rounds_half_up():
    assert [oracles.threshold(p) for p in (0.0, 0.1, 0.5, 0.5 / 65536, 0.49 / 65536)] == [0, 6554, 32768, 1, 0]


def drawn(rule, i, keys):
    """The keys that query i may see, element by element with plain numbers."""
    return [j for j in range(keys) if rule(SimpleNamespace(b=0, h=0, i=i, j=j, row=i, keys=keys))]


@pytest.mark.parametrize(
    "rule, i, keys, seen",
    [
        (oracles.causal(), 2, 5, [0, 1, 2]),
        (oracles.window(2, 1), 3, 6, [1, 2, 3, 4]),
        (oracles.window(None, 0), 2, 4, [0, 1, 2]),
        (oracles.window(1, None), 2, 5, [1, 2, 3, 4]),
        (oracles.sliding_window(3), 4, 6, [2, 3, 4]),
        (oracles.dilated(2, 1, dilation=3), 6, 12, [0, 3, 6, 9]),
        (oracles.strided(3), 7, 10, [1, 4, 5, 6, 7]),
        (oracles.fixed(4, 1), 9, 12, [3, 7, 8, 9]),
        (oracles.fixed(4, 2), 9, 12, [2, 3, 6, 7, 8, 9]),
        (oracles.global_tokens(1), 3, 4, [0]),
        (oracles.global_tokens([2]), 2, 4, [0, 1, 2, 3]),
        (oracles.prefix(2), 0, 4, [0, 1]),
        (oracles.block_local(3), 4, 9, [3, 4, 5]),
        (oracles.document_lengths([0, 2, 5]), 3, 5, [2, 3, 4]),
        (oracles.neighborhood((3, 4), 2), 5, 12, [0, 1, 4, 5]),
        (oracles.neighborhood((4, 4), 3), 0, 16, [0, 1, 2, 4, 5, 6, 8, 9, 10]),
        (oracles.neighborhood((4, 4), 3), 15, 16, [5, 6, 7, 9, 10, 11, 13, 14, 15]),
        (oracles.windows2d((4, 4), 2), 5, 16, [0, 1, 4, 5]),
        (oracles.windows2d((4, 4), 2, 1), 5, 16, [5, 6, 9, 10]),
        (oracles.windows2d((4, 4), 2, 1), 0, 16, [0]),
        (oracles.windows2d((4, 4), 2, 1), 15, 16, [15]),
        (oracles.axial((2, 3), "width"), 4, 6, [3, 4, 5]),
        (oracles.axial((2, 3), "height"), 4, 6, [1, 4]),
        (oracles.longformer(2, 1), 4, 8, [0, 3, 4, 5]),
        (oracles.both(oracles.causal(), oracles.opposite(oracles.window(0))), 2, 4, [0, 1]),
        (oracles.either(oracles.window(0), oracles.prefix(1)), 2, 4, [0, 2]),
    ],
)
def test_rules_by_hand(rule, i, keys, seen):
    assert drawn(rule, i, keys) == seen
    table = oracles.dense(rule, (1, 1, keys, keys), 0)[0, 0]
    assert table[i].nonzero()[:, 0].tolist() == seen


def test_random_blocks_draws_distinct_past_blocks():
    rule = oracles.random_blocks(3, 4, seed=11)
    table = oracles.dense(rule, (1, 1, 40, 40), 0)[0, 0]
    by_block = table[::4, ::4]
    assert by_block.sum(-1).tolist() == [1, 2, 3, 3, 3, 3, 3, 3, 3, 3]
    assert not by_block.triu(1).any()
    ahead = oracles.dense(oracles.random_blocks(3, 4, 11, ahead=True), (1, 1, 40, 38), 0)[0, 0][::4, ::4]
    assert ahead.sum(-1).tolist() == [3] * 10 and ahead.triu(1).any()


def test_positional_biases_by_hand():
    assert oracles.alibi(torch.tensor([2.0]), (1, 1, 2, 3))[0, 0].tolist() == [[-2, 0, -2], [-4, -2, 0]]
    table = torch.tensor([[10.0, 20, 30]])
    assert oracles.relative(table, (1, 1, 2, 3))[0, 0].tolist() == [[10, 20, 30], [10, 10, 20]]
