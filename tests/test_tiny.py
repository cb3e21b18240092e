"""The whole library in tiny examples: read this first, it runs first."""

from __future__ import annotations

import torch
from torch.nn.functional import scaled_dot_product_attention

import qkv

QUERY = [[1.0, 0.0]]
KEYS = [[1.0, 2.0], [0.0, 1.0], [1.0, 0.0], [2.0, 1.0], [0.0, 2.0], [1.0, 1.0]]


def uniform(queries: int, keys: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q = 0, so every visible key weighs the same: row i of the output is the mean of the indices that it may see."""
    return torch.zeros(1, 1, queries, 4), torch.ones(1, 1, keys, 4), torch.arange(float(keys)).reshape(1, 1, keys, 1)


def test_scores_of_the_article_come_out():
    """q = [1, 0] against six keys gives the score row 1, 0, 1, 2, 0, 1; the weights are its softmax."""
    q, k = torch.tensor(QUERY), torch.tensor(KEYS)
    assert (q @ k.T).tolist() == [[1, 0, 1, 2, 0, 1]]
    out, aux = qkv.attention(
        q, k, torch.eye(6), scale=1.0, return_aux=qkv.AuxRequest(weights=True, lse=True, max_scores=True)
    )
    row = torch.tensor([1.0, 0, 1, 2, 0, 1])
    torch.testing.assert_close(aux.weights.reshape(-1), row.softmax(0))
    torch.testing.assert_close(out.reshape(-1), row.softmax(0))
    torch.testing.assert_close(aux.lse.reshape(()), row.logsumexp(0))
    assert aux.max_scores.item() == 2


def test_attention_agrees_with_torch():
    torch.manual_seed(0)
    q, k, v = torch.randn(2, 4, 9, 8), torch.randn(2, 2, 9, 8), torch.randn(2, 2, 9, 8)
    want = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    torch.testing.assert_close(qkv.attention(q, k, v, pattern=qkv.causal()), want)
    torch.testing.assert_close(qkv.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True), want)


def test_a_window_averages_the_last_three_keys():
    out = qkv.attention(*uniform(6, 6), pattern=qkv.sliding_window(3))
    torch.testing.assert_close(out[0, 0, :, 0], torch.tensor([0, 0.5, 1, 2, 3, 4]))


def test_patterns_compose_and_print():
    pattern = qkv.causal() & (qkv.window(1) | qkv.prefix(1))
    assert qkv.parse(str(pattern)) == pattern
    assert pattern.to_dense(4).int().tolist() == [[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0], [1, 0, 1, 1]]
    torch.testing.assert_close(
        qkv.attention(*uniform(4, 4), pattern=pattern)[0, 0, :, 0], torch.tensor([0, 0.5, 1, 5 / 3])
    )


def test_one_step_of_decoding_sees_the_whole_past():
    assert qkv.attention(*uniform(1, 5), pattern=qkv.causal()).item() == 2


def test_a_query_that_sees_nothing_gives_zero():
    keep = torch.tensor([[True, False], [False, False]])
    out, aux = qkv.attention(*uniform(2, 2), pattern=qkv.mask(keep=keep), return_aux=qkv.AuxRequest(lse=True))
    assert out.flatten().tolist() == [0, 0]
    assert aux.lse[0, 0, 1].item() == float("-inf")


def test_dropout_repeats_with_the_seed_of_torch():
    q, k, v = (torch.randn(1, 2, 16, 8, generator=torch.Generator().manual_seed(n)) for n in range(3))
    outs = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        outs.append(qkv.attention(q, k, v, dropout_p=0.5))
    assert torch.equal(outs[0], outs[1])
    assert not torch.equal(outs[0], outs[2])
    assert not torch.equal(outs[0], qkv.attention(q, k, v))


def test_gradients_flow_to_all_three():
    q, k, v = (x.requires_grad_() for x in uniform(3, 3))
    qkv.attention(q, k, v, pattern=qkv.causal()).sum().backward()
    torch.testing.assert_close(v.grad.flatten(), torch.tensor([1 + 1 / 2 + 1 / 3, 1 / 2 + 1 / 3, 1 / 3]))
    assert q.grad.shape == q.shape and k.grad.shape == k.shape


def test_plan_says_what_would_run_and_why():
    plan = qkv.plan(*uniform(6, 6), pattern=qkv.causal())
    assert plan.backend == "cpu"
    assert plan.pairs == 21
    assert "blockwise" in str(plan) and "sdpa" in str(plan)


def test_parts_merge_to_the_whole():
    q, k, v = (
        torch.randn(1, 1, 5, 4, generator=torch.Generator().manual_seed(n), dtype=torch.float64) for n in range(3)
    )
    halves = [
        qkv.attention(q, k[:, :, s], v[:, :, s], return_aux=qkv.AuxRequest(lse=True)) for s in (slice(2), slice(2, 5))
    ]
    out, lse = qkv.merge([out for out, _ in halves], [aux.lse for _, aux in halves])
    whole, aux = qkv.attention(q, k, v, return_aux=qkv.AuxRequest(lse=True))
    torch.testing.assert_close(out, whole)
    torch.testing.assert_close(lse, aux.lse)
