"""Corners of autograd, transforms and odd inputs where blockwise once differed from the reference."""

from __future__ import annotations

import gc
import math
import weakref

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import engines
import qkv
from qkv.errors import MaskError, PatternSyntaxError, ShapeError, UnsupportedError, ValueOutOfRange
from qkv.settings import override

OURS = engines.ONE_NATIVE


def inputs(length=12, heads=2, width=4, dtype=torch.float64):
    g = torch.Generator().manual_seed(3)
    return [torch.randn(1, heads, length, width, generator=g, dtype=torch.float64).to(dtype) for _ in range(3)]


@OURS
def test_activation_checkpoints_that_recompute_work(backend):
    x = inputs()[0].requires_grad_()

    def layer(a):
        return qkv.attention(a, a, a, pattern=qkv.strided(3), backend=backend)

    plain = torch.autograd.grad(layer(x).sum(), x)[0]
    saved = torch.autograd.grad(checkpoint(layer, x, use_reentrant=False).sum(), x)[0]
    assert torch.equal(plain, saved)


@OURS
def test_create_graph_where_only_the_value_has_a_gradient(backend):
    q, k, v = inputs()
    v.requires_grad_()
    out = qkv.attention(q, k, v, pattern=qkv.causal(), backend=backend)
    (grad,) = torch.autograd.grad(out.square().sum(), v, create_graph=True)
    (second,) = torch.autograd.grad(grad.sum(), v)
    assert second.isfinite().all() and second.any()


@OURS
def test_create_graph_where_inputs_were_made_of_one_another(backend):
    x = inputs()[0].requires_grad_()
    for key in (x, 2 * x):
        loss = qkv.attention(x, key, x.detach(), backend=backend).square().sum()
        (once,) = torch.autograd.grad(loss, x, retain_graph=True)
        (again,) = torch.autograd.grad(loss, x, create_graph=True)
        torch.testing.assert_close(again, once)


@OURS
def test_create_graph_where_nothing_is_seen(backend):
    q, k, v = (x.requires_grad_() for x in inputs())
    with pytest.warns(qkv.errors.InvertedMaskWarning):
        out = qkv.attention(q, k, v, pattern=~qkv.full(), backend=backend)
    grads = torch.autograd.grad(out.sum(), (q, k, v), create_graph=True, allow_unused=True)
    assert not any(g is not None and g.any() for g in grads)


@OURS
@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("options", [{}, {"softcap": 2.0}], ids=str)
def test_hidden_content_stays_hidden_where_gradients_are_differentiated(options, bad, backend):
    clean = [x.abs() for x in inputs()]
    dirty = [x.clone() for x in clean]
    dirty[1][..., 4, :] = bad
    dirty[2][..., 4, :] = bad
    got = []
    for tensors in (clean, dirty):
        leaves = [x.requires_grad_() for x in tensors]
        out = qkv.attention(*leaves, pattern=qkv.prefix(4), backend=backend, **options)
        got.append(torch.autograd.grad(out.square().sum(), leaves, create_graph=True))
    for a, b in zip(*got, strict=True):
        torch.testing.assert_close(a, b)


@OURS
def test_a_sink_of_minus_infinity_is_no_sink(backend):
    q, k, v = inputs()
    pattern = qkv.causal() & ~qkv.prefix(5)
    got = qkv.attention(q, k, v, pattern=pattern, sinks=torch.full((2,), -math.inf), backend=backend)
    torch.testing.assert_close(got, qkv.attention(q, k, v, pattern=pattern, backend="reference"))
    with pytest.raises(ValueOutOfRange, match="`sinks` must hold no NaN"):
        qkv.attention(q, k, v, sinks=torch.tensor([0.0, math.nan]), backend=backend)


def test_backward_inside_autocast_computes_in_float32():
    leaves = [x.requires_grad_() for x in inputs(64, dtype=torch.float32)]
    grads = []
    for inside in (True, False):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = qkv.attention(*leaves, pattern=qkv.causal(), backend="blockwise")
            if inside:
                grads.append(torch.autograd.grad(out.float().sum(), leaves))
        if not inside:
            grads.append(torch.autograd.grad(out.float().sum(), leaves))
    for a, b in zip(*grads, strict=True):
        assert torch.equal(a, b)


def test_plan_sees_autocast():
    q, k, v = inputs(dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert qkv.plan(q, k.bfloat16(), v).problem.dtype == torch.bfloat16


def test_torch_signature_takes_mixed_types_under_autocast():
    q, k, v = inputs(dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        mixed = qkv.scaled_dot_product_attention(q, k.bfloat16(), v, attn_mask=torch.ones(12, 12).bool())
    cast = qkv.attention(q.bfloat16(), k.bfloat16(), v.bfloat16())
    assert torch.equal(mixed, cast)


@OURS
def test_a_wide_finite_bias_stays_finite(backend):
    q, k, v = inputs(dtype=torch.float32)
    bias = torch.zeros(12, 12, dtype=torch.float64)
    bias[0] = torch.finfo(torch.float64).min
    got = qkv.attention(q, k, v, bias=bias, backend=backend)
    torch.testing.assert_close(got[:, :, 0], v.mean(dim=2))


@OURS
def test_hidden_nan_is_seen_without_value_columns(backend):
    q, k, v = inputs()
    k[..., 4, :] = math.nan
    _, aux = qkv.attention(
        q, k, v[..., :0], pattern=qkv.prefix(4), backend=backend, return_aux=qkv.AuxRequest(lse=True)
    )
    assert aux.lse.isfinite().all()


@OURS
def test_meta_tensors_give_meta_results(backend):
    q, k, v = (x.to("meta").requires_grad_() for x in inputs())
    out = qkv.attention(q, k, v, pattern=qkv.strided(3), dropout_p=0.1, backend=backend)
    assert out.is_meta and out.shape == q.shape
    assert torch.autograd.grad(out.sum(), q)[0].shape == q.shape


def test_top_k_holds_no_graph_and_no_other_weights():
    q, k, v = (x.requires_grad_() for x in inputs())
    _, aux = qkv.attention(q, k, v, return_aux=qkv.AuxRequest(top_k=2))
    assert not aux.top_k.values.requires_grad
    assert aux.top_k.values.untyped_storage().nbytes() == aux.top_k.values.nbytes
    assert aux.top_k.indices.untyped_storage().nbytes() == aux.top_k.indices.nbytes


def test_a_mask_dies_with_its_pattern_when_no_plan_is_kept():
    with override("QKV_PLAN_CACHE_MB", "0"):
        pattern = qkv.mask(keep=torch.rand(130, 130) > 0.5)
        pattern.count(130)
        held = weakref.ref(next(pattern.expr.leaves()).keep)
        del pattern
        gc.collect()
        assert held() is None


def test_a_deep_per_head_beside_a_function():
    deep = (qkv.per_head([qkv.causal(), qkv.full()]) & qkv.window(3)) & qkv.where(lambda b, h, i, j: i >= j)
    assert deep.count(8, heads=2) == 2 * qkv.window(3).count(8)
    with pytest.raises(ShapeError, match="same heads; they list 2 and 3"):
        qkv.per_head([qkv.causal()] * 2) & qkv.per_head([qkv.causal()] * 3)


def test_texts_that_once_failed():
    pattern = qkv.per_head([~qkv.causal(), qkv.full()])
    assert qkv.parse(str(pattern)) == pattern
    with pytest.raises(PatternSyntaxError, match="stands for a tensor"):
        qkv.parse(str(qkv.mask(keep=torch.ones(2, 2, dtype=torch.bool))))
    for text in ("key_lengths([[1, 2], [3]])", "global_tokens({[1]})"):
        with pytest.raises(qkv.errors.QkvError):
            qkv.parse(text)


def test_a_function_of_the_wrong_shape_is_refused():
    with pytest.raises(MaskError, match="one boolean for each index"):
        qkv.where(lambda b, h, i, j: torch.ones(7, 9, dtype=torch.bool)).count(5)


def test_a_backend_from_the_environment_is_named_in_the_error():
    q, k, v = inputs()
    with override("QKV_BACKEND", "sdpa"), pytest.raises(UnsupportedError, match="`QKV_BACKEND` 'sdpa' must"):
        qkv.attention(q, k, v, softcap=1.0)


@pytest.mark.parametrize("dtype", [torch.bool, torch.float64])
def test_torch_signature_names_its_own_argument_in_errors(dtype):
    q, k, v = inputs(5)
    with pytest.raises(qkv.errors.QkvError, match="`attn_mask` must broadcast"):
        qkv.scaled_dot_product_attention(q, k, v, torch.ones(5, 7, dtype=dtype))
