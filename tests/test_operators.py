"""The operators behind captured calls: torch's own checks of them, the bits of the eager call, and what they refuse."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad, gradcheck, gradgradcheck
from torch.fx.experimental.proxy_tensor import make_fx

import qkv
from qkv.dropout import draw_seed
from qkv.errors import QkvError, ShapeError, UnsupportedError
from qkv.operators import ATTENTION, BACKWARD, DRAW_SEED, Options
from qkv.patterns import recall as memory
from qkv.patterns.recall import recall
from qkv.settings import override

# One case sees nothing.
pytestmark = pytest.mark.filterwarnings("ignore::qkv.errors.InvertedMaskWarning")

B, H, G, L, S, D, V = 2, 4, 2, 70, 75, 8, 6


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def kept(*shape: int) -> Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(9)) > 0.3


IDS = torch.tensor([0] * 30 + [1] * 40 + [2] * 5)
NONE_SEEN = qkv.causal() - qkv.window(None)
# name: what attention is asked besides q, k, v, and what is unusual of these
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}),
    "causal window": ({"pattern": qkv.causal() & qkv.window(20)}, {}),
    "strided": ({"pattern": qkv.strided(8)}, {"dtype": torch.float64}),
    "nothing is seen": ({"pattern": NONE_SEEN}, {}),
    "per head": ({"pattern": qkv.per_head([qkv.causal(), qkv.full(), qkv.bigbird(3, 2, 1, 5), qkv.fixed(9)])}, {}),
    "padding and documents": ({"pattern": qkv.key_padding(kept(B, S)) & qkv.documents(IDS) & qkv.causal()}, {}),
    "a mask per batch row": ({"pattern": ~qkv.mask(kept(B, L, S), axes="BLS")}, {}),
    "key lengths": ({"pattern": qkv.key_lengths([40, 3])}, {}),
    "offset a batch row": ({"pattern": qkv.causal(), "query_offset": [3, 70]}, {}),
    "bias of keys": ({"bias": normal(1, H, 1, S, seed=4), "softcap": 2.0}, {}),
    "bias in 16 bits": ({"bias": normal(L, S, seed=4, dtype=torch.bfloat16), "scale": -0.3}, {}),
    "slopes": ({"bias": qkv.alibi(normal(H, seed=5)), "pattern": qkv.causal()}, {}),
    "table": ({"bias": qkv.relative(normal(H, 9, seed=6))}, {"dtype": torch.float64}),
    "sinks": ({"sinks": normal(H, seed=7), "pattern": qkv.causal()}, {}),
    "dropout": ({"dropout_p": 0.4, "pattern": qkv.fixed(16), "sinks": normal(H, seed=7)}, {}),
    "16 bits": ({"pattern": qkv.causal()}, {"dtype": torch.bfloat16}),
    "no rows": ({}, {"queries": 0}),
    "no keys": ({}, {"keys": 0}),
    "aux": ({"pattern": qkv.causal(), "return_aux": qkv.AuxRequest(lse=True, max_scores=True, entropy=True)}, {}),
    "strides": ({"pattern": qkv.window(9, 9)}, {"layout": "BLHD"}),
    "hidden NaN": ({"pattern": qkv.key_lengths([40, 3]), "backend": "blockwise"}, {"poison": True}),
    "reference": ({"pattern": qkv.causal(), "backend": "reference"}, {"dtype": torch.float64}),
    "sdpa": ({"pattern": qkv.causal(), "backend": "sdpa"}, {}),
}
CASE = pytest.mark.parametrize("name", CASES)


def inputs(
    dtype: torch.dtype = torch.float32, queries: int = L, keys: int = S, layout: str = "BHLD", poison: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    shapes = (B, H, queries, D), (B, G, keys, D), (B, G, keys, V)
    q, k, v = (normal(*shape, seed=n, dtype=dtype) for n, shape in enumerate(shapes))
    if layout == "BLHD":
        q, k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v))
    if poison:
        k[1, :, 50:], v[1, :, 60:] = float("nan"), float("inf")
    return q, k, v


def arguments(name: str, grad: bool = False) -> tuple[Any, ...]:
    """The operator's arguments for a case."""
    asked, unusual = CASES[name]
    pattern, bias, aux = asked.get("pattern", qkv.full()), asked.get("bias"), asked.get("return_aux", qkv.AuxRequest())
    q, k, v = inputs(**unusual)
    rule = "" if bias is None else "tensor" if isinstance(bias, Tensor) else type(bias).__name__.lower()
    numbers = {"": lambda: None, "tensor": lambda: bias, "alibi": lambda: bias.slopes, "relative": lambda: bias.table}
    added = numbers[rule]()
    if rule == "tensor":
        added = added.reshape((1,) * (4 - added.ndim) + tuple(added.shape))
    tensors = [q, k, v, added, asked.get("sinks")]
    tensors = [
        x if x is None else x.detach().clone().as_strided(x.shape, x.stride()).requires_grad_(grad) for x in tensors
    ]
    options = Options(
        pattern=pattern.form,
        rule=rule,
        scale=asked.get("scale"),
        softcap=asked.get("softcap"),
        dropout_p=asked.get("dropout_p", 0.0),
        query_offset=tuple(asked.get("query_offset", [k.shape[2] - q.shape[2]])),
        backend=asked.get("backend", "auto"),
        want_lse=aux.lse,
        want_max_scores=aux.max_scores,
        want_entropy=aux.entropy,
    )
    torch.manual_seed(7)
    seed = DRAW_SEED(torch.empty(0)) if options.dropout_p else None
    return *tensors, seed, list(pattern.tensors), *options


def eager(name: str, tensors: tuple[Any, ...]) -> tuple[Tensor, Tensor]:
    """What the call itself gives for the same tensors: output and log-sum-exp, the latter empty where not to be had."""
    asked = dict(CASES[name][0])
    query, key, value, added, sinks = tensors
    if isinstance(asked.get("bias"), Tensor):
        asked["bias"] = added
    elif "bias" in asked:
        asked["bias"] = (qkv.alibi if asked["bias"].__class__.__name__ == "Alibi" else qkv.relative)(added)
    if sinks is not None:
        asked["sinks"] = sinks
    asked.setdefault("return_aux", qkv.AuxRequest(lse=asked.get("backend") != "sdpa"))
    torch.manual_seed(7)
    out, aux = qkv.attention(query, key, value, **asked)
    return out, out.new_empty(0) if aux.lse is None else aux.lse


@CASE
def test_torchs_own_checks_pass(name: str) -> None:
    report = torch.library.opcheck(ATTENTION, arguments(name, grad=True))
    assert set(report.values()) == {"SUCCESS"}


@pytest.mark.parametrize(
    "name", ["causal window", "bias of keys", "table", "dropout", "padding and documents", "reference"]
)
@pytest.mark.parametrize("grads", ["both", "output", "lse"])
def test_torchs_own_checks_pass_for_the_backward_operator(name: str, grads: str) -> None:
    report = torch.library.opcheck(BACKWARD, backward_arguments(name, grads))
    assert set(report.values()) == {"SUCCESS"}


def backward_arguments(name: str, grads: str = "both", wanted: tuple[bool, ...] = (True,) * 5) -> tuple[Any, ...]:
    asked = arguments(name)
    output, lse, shift, total, _, _, made = ATTENTION(*asked)
    given = normal(*output.shape, seed=30, dtype=output.dtype), normal(*lse.shape, seed=31, dtype=lse.dtype)
    grad_output, grad_lse = (
        g if grads in ("both", which) else None for g, which in zip(given, ("output", "lse"), strict=True)
    )
    return *asked, output, lse, shift, total, made, grad_output, grad_lse, wanted


@CASE
def test_the_operator_gives_the_bits_of_the_call(name: str) -> None:
    ours, theirs = arguments(name, grad=True), arguments(name, grad=True)
    output, lse, _, _, max_scores, entropy, _ = ATTENTION(*ours)
    want, want_lse = eager(name, theirs[:5])
    assert torch.equal(output, want)
    assert torch.equal(lse, want_lse) or not want_lse.numel()
    assert (max_scores.numel() > 0, entropy.numel() > 0) == (name == "aux",) * 2
    weight, weight_lse = normal(*output.shape, seed=30, dtype=output.dtype), normal(*lse.shape, seed=31)
    loss = [
        (out * weight).sum() + (l.masked_fill(l == -torch.inf, 0.0) * weight_lse).sum()
        for out, l in ((output, lse), (want, want_lse if want_lse.numel() else lse.detach()))
    ]
    for one in loss:
        one.backward()
    for mine, yours in zip(ours[:5], theirs[:5], strict=True):
        if mine is not None:
            assert torch.equal(mine.grad, yours.grad)


def test_aux_of_the_operator() -> None:
    _, lse, _, _, max_scores, entropy, _ = ATTENTION(*arguments("aux"))
    _, aux = qkv.attention(*inputs(), **CASES["aux"][0])
    assert torch.equal(lse, aux.lse)
    assert torch.equal(max_scores, aux.max_scores)
    assert torch.equal(entropy, aux.entropy)


def test_care_is_remembered_from_forward_to_backward() -> None:
    assert int(ATTENTION(*arguments("hidden NaN"))[6]) == 1
    assert int(ATTENTION(*arguments("plain"))[6]) == 0
    assert int(ATTENTION(*arguments("reference"))[6]) == 2


def test_lazily_negated_inputs() -> None:
    q, k, v, *rest = arguments("plain")
    negated = torch.complex(k, k).conj().imag
    assert negated.is_neg()
    assert torch.equal(ATTENTION(q, negated, v, *rest)[0], ATTENTION(q, -k, v, *rest)[0])


@pytest.mark.parametrize("backend", ["blockwise", "auto", "reference"])
def test_only_what_is_wanted_is_made(backend: str) -> None:
    options = list(backward_arguments("slopes"))
    options[13] = backend
    whole = BACKWARD(*options)
    for n in range(4):
        options[-1] = [m == n for m in range(5)]
        found = BACKWARD(*options)
        assert torch.equal(found[n], whole[n]), n
        assert [m for m in range(5) if found[m].numel()] == [n]


# Derivatives of other kinds.


def in_double(grad: bool = True) -> tuple[Any, ...]:
    q, k, v = (normal(1, 2, n, 3, seed=n, dtype=torch.float64).requires_grad_(grad) for n in (4, 5, 5))
    return q, k, v, None, normal(2, seed=3, dtype=torch.float64).requires_grad_(grad)


def in_form(*tensors: Tensor | None, pattern: str = "causal()") -> tuple[Tensor, Tensor]:
    return ATTENTION(*tensors, None, [], pattern, "", 0.5, 1.5, 0.0, [1], "auto", False, False, False)[:2]


def test_first_and_second_derivatives() -> None:
    q, k, v, _, sinks = in_double()
    assert gradcheck(lambda q, k, v, sinks: in_form(q, k, v, None, sinks), (q, k, v, sinks))
    assert gradgradcheck(lambda q, k, v, sinks: in_form(q, k, v, None, sinks), (q, k, v, sinks))


def test_tangents_are_those_of_the_call() -> None:
    q, k, v, _, sinks = in_double(grad=False)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(q, torch.ones_like(q))
        found = forward_ad.unpack_dual(in_form(dual, k, v, None, sinks)[0]).tangent
        call = qkv.attention(dual, k, v, pattern=qkv.causal(), scale=0.5, softcap=1.5, sinks=sinks)
        assert found is not None and torch.equal(found, forward_ad.unpack_dual(call).tangent)


def test_transforms_are_refused_and_never_wrong() -> None:
    q, k, v, _, sinks = in_double(grad=False)

    def out(q: Tensor) -> Tensor:
        return in_form(q, k, v, None, sinks)[0].sum()

    for transformed in (torch.func.grad(out), torch.vmap(out), lambda q: torch.func.jvp(out, (q,), (q,))):
        with pytest.raises(UnsupportedError, match=r"must meet qkv.attention itself; got its operator"):
            transformed(q)


def test_the_backward_operator_is_not_differentiated_silently() -> None:
    asked = list(backward_arguments("plain"))
    asked[0] = asked[0].requires_grad_()
    with pytest.raises(UnsupportedError, match="must ask for first derivatives only"):
        BACKWARD(*asked)


# Seeds.


def test_a_seed_is_drawn_as_the_call_draws_it() -> None:
    for start in range(20):
        torch.manual_seed(start)
        ours = [int(DRAW_SEED(torch.empty(0))) for _ in range(2)]
        torch.manual_seed(start)
        theirs = [draw_seed(None) for _ in range(2)]
        assert [seed % 2**64 for seed in ours] == theirs


# Who goes through them.


def operators_in(function: Any) -> list[str]:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as seen:
        function()
    return [event.key for event in seen.key_averages() if event.key.startswith("qkv::")]


def test_no_eager_call_does() -> None:
    q, k, v = (x.requires_grad_() for x in inputs())

    def call() -> None:
        qkv.attention(q, k, v, pattern=qkv.causal(), dropout_p=0.1).sum().backward()

    assert operators_in(call) == []
    assert operators_in(lambda: ATTENTION(*arguments("plain"))) == ["qkv::attention"]


@CASE
def test_fake_tensors_have_the_form_of_real_ones(name: str) -> None:
    asked = dict(CASES[name][0])
    q, k, v = inputs(**CASES[name][1])
    real = qkv.attention(q, k, v, **asked)
    pattern = asked.get("pattern")
    if asked.get("dropout_p") and pattern is not None and pattern.tensors:
        pytest.skip("content of a pattern is no fake tensor")
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fakes = [mode.from_tensor(x) for x in (q, k, v)]
        fake = qkv.attention(*fakes, **asked)
    for one, other in zip(leaves(real), leaves(fake), strict=True):
        assert (one.shape, one.dtype, one.device) == (other.shape, other.dtype, other.device)


def leaves(result: Any) -> Iterator[Tensor]:
    if isinstance(result, Tensor):
        yield result
    for part in () if isinstance(result, Tensor) or result is None else result:
        yield from leaves(part)


def test_a_trace_with_symbols_holds_one_operator() -> None:
    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return qkv.attention(q, k, v, pattern=qkv.causal(), dropout_p=0.2)

    graph = make_fx(call, tracing_mode="symbolic")(*inputs())
    assert [n.target for n in graph.graph.nodes if "qkv" in str(n.target)] == [DRAW_SEED, ATTENTION]
    shorter = [x[:, :, :33] for x in inputs()]
    assert graph(*shorter).shape == (B, H, 33, V)


def test_a_trace_of_numbers_holds_what_was_done_even_where_the_call_is_remembered() -> None:
    def call(q: Tensor) -> Tensor:
        return qkv.attention(q, q, q, pattern=qkv.causal())

    q, other = normal(1, 2, 16, 8), normal(1, 2, 16, 8, seed=1)
    for _ in range(2):
        call(q)
    torch.testing.assert_close(make_fx(call)(q)(other), call(other))


# Patterns that come as text and tensors.


def test_a_pattern_is_read_once() -> None:
    keep = kept(B, S)
    first = recall("key_padding({keep}) & causal()", [keep])
    assert recall("key_padding({keep}) & causal()", [keep.clone()]) is first
    assert first.pattern == qkv.key_padding(keep) & qkv.causal()
    assert recall("causal()", ()) is recall("causal()", ())


def test_content_that_changes_in_its_place_is_another_pattern() -> None:
    keep = kept(3, 16)
    first = recall("key_padding({keep})", [keep]).pattern
    keep[2, 5] ^= True
    second = recall("key_padding({keep})", [keep]).pattern
    assert second == qkv.key_padding(keep) != first
    odd = kept(3, 5)
    first = recall("key_padding({keep})", [odd]).pattern
    odd[2, 4] ^= True
    assert recall("key_padding({keep})", [odd]).pattern == qkv.key_padding(odd) != first


def test_memory_is_bounded() -> None:
    mine = memory.Memory()
    with override("QKV_PLAN_CACHE_MB", 0):
        assert mine.sight("key_padding({keep})", [kept(2, 8)]) is not mine.sight("key_padding({keep})", [kept(2, 8)])
    for n in range(2 * memory.SIGHTS):
        mine.sight("documents({ids})", [torch.full((8,), n)])
    assert [len(sights) for sights in mine._seen.values()] == [memory.SIGHTS]
    for n in range(1, 2 * memory.FORMS):
        mine.sight("documents({ids})", [torch.zeros(n, dtype=torch.int64)])
    assert len(mine._seen) == memory.FORMS


@pytest.mark.parametrize("name", CASES)
def test_form_and_tensors_say_the_pattern(name: str) -> None:
    pattern = CASES[name][0].get("pattern", qkv.full())
    again = recall(pattern.form, pattern.tensors).pattern
    assert again == pattern
    assert again.expr.key == pattern.expr.key
    assert str(again) == str(pattern)


def test_errors_of_a_form_are_those_of_the_call() -> None:
    asked = list(arguments("plain"))
    asked[7] = "per_head([causal(), full()])"
    with pytest.raises(ShapeError, match="H=4 query heads"):
        ATTENTION(*asked)
    for form in ("where({fn})", "casual()", "documents(3)"):
        asked[7] = form
        with pytest.raises(QkvError):
            ATTENTION(*asked)
    asked[7], asked[13] = "causal()", "sdpa"
    asked[14] = True
    with pytest.raises(UnsupportedError, match="it returns no lse"):
        ATTENTION(*asked)
