"""Packed documents: each as if it were alone, on every engine, whatever lies beside it; and what is refused."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck

import engines
import qkv
from packs import CU, KINDS, D, G, H, Pack, V, inputs, normal, pack_of, sit
from qkv.backends.autograd import Wanted
from qkv.backends.base import Gradients, Incoming, Outcome, Work
from qkv.backends.blockwise import Blockwise
from qkv.backends.cpu import Cpu
from qkv.errors import (
    InvertedMaskWarning,
    QkvError,
)
from qkv.packing import Packed, sizes_of
from qkv.patterns.schedule import PatternPlan
from qkv.problem import Tensors
from qkv.varlen import varlen_attention

LONG = [slice(a, b) for a, b in itertools.pairwise(CU) if b - a > 16]  # shorter ones alone go another way on "cpu"


# An engine that answers packed work by looping over the plan that it is given: it holds the joining code.


class Looping:
    """Document after document by another engine, each with its members of the plan and its rows of the tensors."""

    engine = Blockwise()

    def works(self, work: Work) -> list[tuple[Work, slice, slice]]:
        problem, (q, k, v, bias, sinks), plan, seed, packing, _ = work
        assert packing is not None
        assert (problem.batch, problem.queries, problem.keys) == (
            len(packing.queries) - 1,
            *(max(lengths) for lengths in zip(*sizes_of(packing), strict=True)),
        )
        assert q.shape[0] == k.shape[0] == v.shape[0] == 1
        assert plan.index.shape in {(problem.batch, 1), (problem.batch, problem.heads)}
        # Wide, as the core adds them: gradients of what documents share are summed before they are rounded.
        bias, sinks = (None if x is None else x.to(problem.compute_dtype) for x in (bias, sinks))
        found = []
        packed = Packed(problem, work.tensors, packing)
        for n in range(problem.batch):
            rows, keys = (slice(*edges[n : n + 2]) for edges in packing)
            alone, _ = packed.document(n)
            part = bias[n : n + 1] if problem.bias == "tensor" and bias is not None and len(bias) > 1 else bias
            tensors = Tensors(q[:, :, rows], k[:, :, keys], v[:, :, keys], part, sinks)
            members = PatternPlan(plan.members, plan.index[n : n + 1], 1, plan.heads)
            found.append((Work(alone, tensors, members, seed), rows, keys))
        return found

    def answer(self, work: Work) -> tuple[Outcome, bool]:
        made = [self.engine.answer(one) for one, _, _ in self.works(work)]
        fields = zip(*(outcome for outcome, _ in made), strict=True)
        joined = (None if parts[0] is None else torch.cat(parts, dim=2) for parts in fields)
        return Outcome(*joined), any(careful for _, careful in made)

    def gradients(
        self, work: Work, outcome: Outcome, incoming: Incoming, wanted: Wanted, *, careful: bool
    ) -> Gradients:
        pairs = zip(work.tensors, wanted, strict=True)
        totals = [torch.zeros_like(t, dtype=torch.float64) if want and t is not None else None for t, want in pairs]
        for n, (one, rows, keys) in enumerate(self.works(work)):
            left = Outcome(*(None if x is None else x[:, :, rows] for x in outcome))
            given = Incoming(*(None if x is None else x[:, :, rows] for x in incoming))
            found = self.engine.gradients(one, left, given, wanted, careful=careful)
            for total, place, part in zip(totals[:3], (rows, keys, keys), found[:3], strict=True):
                if total is not None:
                    total[:, :, place] += part
            for total, part in zip(totals[3:], found[3:], strict=True):
                if total is not None:
                    (total if total.shape == part.shape else total[n : n + 1]).add_(part)
        return Gradients(*(g if g is None else g.to(t.dtype) for g, t in zip(totals, work.tensors, strict=True)))


@pytest.fixture
def packed_engine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The name of what answers; "looping" stands in for the native core."""
    if request.param == "looping":
        for name in ("answer", "gradients"):
            monkeypatch.setattr(Cpu, name, getattr(Looping, name))
        for name, value in (("works", Looping.works), ("engine", Looping.engine), ("unavailable", None)):
            monkeypatch.setattr(Cpu, name, value, raising=False)
        yield "cpu"
        return
    with engines.using(request.param) as name:
        yield name


ALL = pytest.mark.parametrize("packed_engine", ["looping", *engines.OURS], indirect=True)
ONE_EACH = pytest.mark.parametrize("packed_engine", ["looping", *engines.TORCH, *engines.NATIVE[:1]], indirect=True)
BEST = pytest.mark.parametrize("packed_engine", engines.NATIVE[:1], indirect=True)


# Against the oracle


@pytest.mark.filterwarnings("ignore:.*inverted")
@pytest.mark.parametrize("start", range(0, 2 * len(KINDS), 8))
@pytest.mark.parametrize("packed_engine", ["looping", "reference", *engines.NATIVE[:1]], indirect=True)
def test_each_document_is_alone(packed_engine: str, start: int) -> None:
    """Output, aux and gradients of every kind of pattern, within the bounds of each document."""
    for number in range(start, min(start + 8, 2 * len(KINDS))):
        pack = pack_of(number)
        try:
            sit(pack, packed_engine)
        except (AssertionError, RuntimeError, QkvError) as error:
            raise AssertionError(f"pack_of({number}), {pack.kind}, {pack.bias}, {pack.options}: {error}") from error


@pytest.mark.filterwarnings("ignore:.*inverted")
@pytest.mark.parametrize("packed_engine", engines.NATIVE[1:], indirect=True)
def test_other_instruction_sets(packed_engine: str) -> None:
    for number in range(0, 2 * len(KINDS), 5):
        sit(pack_of(number), packed_engine)


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:.*inverted")
@pytest.mark.parametrize("start", range(10**6, 10**6 + 2000, 50))
@ALL
def test_many_packs(packed_engine: str, start: int) -> None:
    for number in range(start, start + 50):
        sit(pack_of(number), packed_engine)


# Against the call for one document


def one_by_one(tensors: list[Tensor], **options: Any) -> list[Tensor]:
    """The output of every document by `attention`."""
    parts = ([x[a:b].transpose(0, 1)[None] for x in tensors] for a, b in itertools.pairwise(CU))
    return [qkv.attention(*part, **options)[0].transpose(0, 1) for part in parts]


@ONE_EACH
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_the_result_is_that_of_a_loop(packed_engine: str, dtype: torch.dtype) -> None:
    if packed_engine == "cpu" and Cpu.answer is Looping.answer:
        pytest.skip("the loop would be answered by something else")
    pattern = qkv.causal() & (qkv.window(40) | qkv.global_tokens(2))
    tensors = [x.requires_grad_() for x in inputs(dtype)]
    found = varlen_attention(*tensors, CU, pattern=pattern, softcap=3.0, backend=packed_engine)
    want = torch.cat(one_by_one(tensors, pattern=pattern, softcap=3.0, backend=packed_engine))
    grad = normal(*found.shape, seed=9, dtype=dtype)
    grads = (torch.autograd.grad(x, tensors, grad) for x in (found, want))
    for a, b in ((found, want), *zip(*grads, strict=True)):
        if packed_engine != "reference":  # whose products are torch's
            assert all(torch.equal(a[rows], b[rows]) for rows in LONG)
        limit = 8 * torch.finfo(dtype).eps
        torch.testing.assert_close(a, b, rtol=limit, atol=limit)


@ONE_EACH
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_gradients_of_what_documents_share_are_rounded_once(packed_engine: str, dtype: torch.dtype) -> None:
    """Bit for bit those of the same numbers in float32, rounded, however many documents add to them."""
    query, key, value = inputs(dtype)
    leaves = {
        "sinks": (normal(H), lambda x: {"sinks": x}),
        "slopes": (normal(H), lambda x: {"bias": qkv.alibi(x)}),
        "table": (normal(H, 7), lambda x: {"bias": qkv.relative(x)}),
        "tensor": (normal(1, H, 1, 1), lambda x: {"bias": x, "sinks": torch.zeros(H)}),
    }
    for name, (numbers, given) in leaves.items():
        grads = []
        for leaf in (numbers.to(dtype).requires_grad_(), numbers.to(dtype).float().requires_grad_()):
            out = varlen_attention(query, key, value, CU, pattern=qkv.causal(), backend=packed_engine, **given(leaf))
            grads += torch.autograd.grad(out, leaf, normal(*out.shape, seed=7, dtype=dtype))
        assert torch.equal(grads[0], grads[1].to(dtype)), name


@ONE_EACH
def test_dropout_counts_documents_as_batch_rows(packed_engine: str) -> None:
    """Document n drops what row n of a batch drops."""
    if packed_engine == "cpu" and Cpu.answer is Looping.answer:
        pytest.skip("the loop would be answered by something else")
    tensors = inputs()
    options = {"pattern": qkv.causal(), "dropout_p": 0.4, "backend": packed_engine}
    found = varlen_attention(*tensors, CU, generator=torch.Generator().manual_seed(4), **options)
    for n, (a, b) in enumerate(itertools.pairwise(CU)):
        row = [x[a:b].transpose(0, 1).expand(n + 1, -1, -1, -1) for x in tensors]
        want = qkv.attention(*row, generator=torch.Generator().manual_seed(4), **options)[n].transpose(0, 1)
        if packed_engine == "cpu" and slice(a, b) in LONG:
            assert torch.equal(found[a:b], want)
        torch.testing.assert_close(found[a:b], want, rtol=0, atol=1e-12)


def test_dropout_draws_from_the_default_generator() -> None:
    found = []
    for _ in range(2):
        torch.manual_seed(3)
        found.append([varlen_attention(*inputs(), CU, dropout_p=0.3) for _ in range(2)])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    assert not torch.equal(*found[0])


@ONE_EACH
def test_what_depends_on_the_batch_row_takes_the_document(packed_engine: str) -> None:
    lengths = torch.tensor([3, 0, 70, 0, 9, 64])
    pattern = qkv.key_lengths(lengths) & qkv.where(lambda b, h, i, j: (i + j + b + h) % 3 > 0)
    found = varlen_attention(*inputs(), CU, pattern=pattern, backend=packed_engine)
    for n, (a, b) in enumerate(itertools.pairwise(CU)):
        keep = torch.tensor(
            [
                [[(i + j + n + h) % 3 > 0 and j < int(lengths[n]) for j in range(b - a)] for i in range(b - a)]
                for h in range(H)
            ]
        ).reshape(1, H, b - a, b - a)
        part = [x[a:b].transpose(0, 1)[None] for x in inputs()]
        if b > a:
            want = dense(*part, keep)
            torch.testing.assert_close(found[a:b], want[0].transpose(0, 1), rtol=0, atol=1e-12)


def dense(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
    """Softmax of what is kept, 0 where nothing is."""
    k, v = (x.repeat_interleave(H // G, 1) for x in (k, v))
    scores = (q @ k.mT * D**-0.5).masked_fill(~keep, -torch.inf)
    return scores.softmax(-1).nan_to_num(0.0) @ v


# What lies beside a document


@ONE_EACH
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_what_other_documents_hold_never_matters(packed_engine: str, bad: float) -> None:
    """NaN and infinity in one document, in all its tensors, leave the bits of the others as they are."""
    clean = [x.requires_grad_() for x in inputs()]
    for n, (a, b) in enumerate(itertools.pairwise(CU)):
        if n not in (0, 2, 5):
            continue
        poisoned = [x.detach().clone() for x in clean]
        for x in poisoned:
            x[a:b] = bad
            x.requires_grad_()
        rest = torch.cat([torch.arange(a), torch.arange(b, CU[-1])])
        found = []
        for tensors in (clean, poisoned):
            out = varlen_attention(*tensors, CU, pattern=qkv.window(9, 9), backend=packed_engine)
            found.append([out, *torch.autograd.grad(out[rest].sum(), tensors)])
        for x, y in zip(*found, strict=True):
            torch.testing.assert_close(x[rest], y[rest], rtol=0, atol=0 if packed_engine == "cpu" else 1e-13)
        assert not found[1][0][a:b].isfinite().any()


def strided(kind: str, dtype: torch.dtype) -> list[Tensor]:
    """The inputs in memory of other orders."""
    if kind == "fused":
        return list(normal(CU[-1], 3, H, D, dtype=dtype).unbind(1))
    tensors = inputs(dtype)
    ways: dict[str, Callable[[Tensor], Tensor]] = {
        "heads first": lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
        "width first": lambda x: x.permute(2, 0, 1).contiguous().permute(1, 2, 0),
        "every second row": lambda x: x.repeat_interleave(2, 0)[::2],
        "within a larger one": lambda x: torch.nn.functional.pad(x, (3, 2, 1, 1, 4, 0))[4:, 1:-1, 3:-2],
        "one head for all": lambda x: x[:, :1].expand(-1, x.shape[1], -1),
    }
    return [ways[kind](x) for x in tensors]


@ONE_EACH
@pytest.mark.parametrize(
    "kind", ["fused", "heads first", "width first", "every second row", "within a larger one", "one head for all"]
)
def test_memory_in_any_order(packed_engine: str, kind: str) -> None:
    tensors = [x.detach().requires_grad_() for x in strided(kind, torch.float32)]
    dense = [x.detach().contiguous().requires_grad_() for x in tensors]
    options = {"pattern": qkv.causal(), "backend": packed_engine}
    out, want = (varlen_attention(*given, CU, **options) for given in (tensors, dense))
    grad = normal(*out.shape, seed=7, dtype=torch.float32)
    found = [out, *torch.autograd.grad(out, tensors, grad.mT.contiguous().mT)]
    for x, y in zip(found, [want, *torch.autograd.grad(want, dense, grad)], strict=True):
        if packed_engine == "cpu" and Cpu.answer is not Looping.answer:
            assert torch.equal(x, y)
        torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-5)


# Boundaries


@pytest.mark.parametrize(
    "as_given",
    [list, tuple, np.array, torch.tensor, lambda edges: torch.tensor(edges, dtype=torch.int32)],
    ids=["list", "tuple", "array", "int64", "int32"],
)
def test_boundaries_as_they_come(as_given: Callable[[list[int]], Any]) -> None:
    want = varlen_attention(*inputs(), CU, CU)
    assert torch.equal(varlen_attention(*inputs(), as_given(CU)), want)
    assert torch.equal(varlen_attention(*inputs(), as_given(CU), as_given(CU)), want)


@ONE_EACH
@pytest.mark.parametrize("edges", [[0], [0, 0], [0, 0, 0, 0]])
def test_nothing_at_all(packed_engine: str, edges: list[int]) -> None:
    tensors = [x.requires_grad_() for x in inputs(total=0)]
    options = {"pattern": qkv.causal(), "bias": qkv.alibi(normal(H)), "backend": packed_engine}
    out, aux = varlen_attention(*tensors, edges, return_aux=qkv.AuxRequest(lse=True), **options)
    assert out.shape == (0, H, V) and aux.lse.shape == (H, 0)
    assert [x.shape for x in torch.autograd.grad(out.sum(), tensors)] == [x.shape for x in tensors]


@ONE_EACH
def test_queries_without_keys_and_keys_without_queries(packed_engine: str) -> None:
    q, k, v = (x.requires_grad_() for x in inputs(total=7))
    out, aux = varlen_attention(
        q, k, v, [0, 4, 4, 7], [0, 0, 5, 7], return_aux=qkv.AuxRequest(lse=True), backend=packed_engine
    )
    assert not out[:4].any() and bool((aux.lse[:, :4] == -torch.inf).all()) and bool(aux.lse[:, 4:].isfinite().all())
    grads = torch.autograd.grad(out.sum(), (q, k, v))
    assert not grads[0][:4].any() and not grads[1][:5].any() and not grads[2][:5].any() and bool(grads[2][5:].all())


# Differentiation of other kinds


@pytest.mark.parametrize("packed_engine", ["reference", *engines.NATIVE[:1]], indirect=True)
def test_second_derivatives_and_forward_mode(packed_engine: str) -> None:
    edges = [0, 2, 2, 5]
    tensors = [normal(5, 2, 3, seed=n).requires_grad_() for n in range(3)]
    table = normal(2, 5, seed=4).requires_grad_()

    def call(q: Tensor, k: Tensor, v: Tensor, t: Tensor) -> Tensor:
        options = {"bias": qkv.relative(t), "pattern": qkv.causal(), "backend": packed_engine}
        return varlen_attention(q, k, v, edges, **options)

    assert gradcheck(call, (*tensors, table), check_forward_ad=True, fast_mode=True)
    assert gradgradcheck(call, (*tensors, table), fast_mode=True)
    out = call(*tensors, table)
    once, again = (
        torch.autograd.grad(out, (*tensors, table), normal(*out.shape), create_graph=graph, retain_graph=True)
        for graph in (False, True)
    )
    torch.testing.assert_close(once, again)


@ONE_EACH
def test_vmap_and_functional_gradients(packed_engine: str) -> None:
    batch = [torch.stack([x, 2 * x, -x]) for x in inputs()]

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return varlen_attention(q, k, v, CU, pattern=qkv.causal(), backend=packed_engine)

    want = torch.stack([call(*(x[n] for x in batch)) for n in range(3)])
    torch.testing.assert_close(torch.vmap(call)(*batch), want)
    tensors = [x.requires_grad_() for x in inputs()]
    want = torch.autograd.grad(call(*tensors).pow(2).sum(), tensors)
    found = torch.func.grad(lambda *given: call(*given).pow(2).sum(), argnums=(0, 1, 2))(*inputs())
    torch.testing.assert_close(found, want)


def test_boundaries_may_be_a_tensor_inside_of_a_transform() -> None:
    edges = torch.tensor(CU, dtype=torch.int32)
    q, k, v = inputs()
    found = torch.vmap(lambda x: varlen_attention(x, k, v, edges))(q[None])
    torch.testing.assert_close(found[0], varlen_attention(q, k, v, edges))


def test_a_bias_of_positions_where_all_documents_are_alike() -> None:
    """One row for all documents, or one each."""
    tensors, edges = inputs(total=60), [0, 20, 40, 60]
    for shape in ((20, 20), (3, 1, 1, 20), (1, H, 20, 1), (3, H, 20, 20)):
        bias = normal(*shape).requires_grad_()
        found = varlen_attention(*tensors, edges, bias=bias)
        batch = [x.unflatten(0, (3, 20)).transpose(1, 2) for x in tensors]
        want = qkv.attention(*batch, bias=bias).transpose(1, 2).flatten(0, 1)
        torch.testing.assert_close(found, want)
        grads = [torch.autograd.grad(x.pow(2).sum(), bias)[0] for x in (found, want)]
        torch.testing.assert_close(*grads)


@ONE_EACH
def test_a_call_in_which_nothing_is_seen_warns(packed_engine: str) -> None:
    with pytest.warns(InvertedMaskWarning, match="every query of this call is hidden") as caught:
        varlen_attention(*inputs(), CU, pattern=~qkv.full(), backend=packed_engine)
    assert caught[0].filename == __file__
    with pytest.warns(InvertedMaskWarning):
        varlen_attention(*inputs(), CU, pattern=~qkv.full(), sinks=torch.zeros(H), backend=packed_engine)
    varlen_attention(*inputs(total=5), [0, 5, 5], [0, 0, 5], backend=packed_engine)  # there is nothing to see


def test_autocast_takes_its_type() -> None:
    tensors = inputs(torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        out = varlen_attention(*tensors, CU)
    want = varlen_attention(*(x.bfloat16() for x in tensors), CU)
    assert out.dtype == torch.bfloat16 and torch.equal(out, want)


def test_packs_have_every_form() -> None:
    """What the sweep draws: types, biases, options."""
    packs: list[Pack] = [pack_of(number) for number in range(2 * len(KINDS))]
    assert {pack.kind for pack in packs} == set(KINDS)
    assert {pack.leaves["q"].dtype for pack in packs} == {torch.float64, torch.float32, torch.bfloat16, torch.float16}
    assert {pack.bias for pack in packs} == {"none", "alibi", "relative", "heads", "rows"}
    assert {tuple(pack.options) for pack in packs} == {(), ("softcap",), ("scale",), ("dropout_p",)}
    assert sum("sinks" in pack.leaves for pack in packs) > 9
