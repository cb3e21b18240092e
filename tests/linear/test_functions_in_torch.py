"""The linear family in torch's machinery: autocast, graphs, transforms, and which engine answers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.exc import Unsupported
from torch._dynamo.testing import CompileCounter
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad

import qkv
from linear.named import (
    CU,
    EACH,
    B,
    Given,
    H,
    L,
    V,
    ask,
    first_state,
    given,
    near,
    normal,
)
from qkv.errors import UnsupportedError
from qkv.settings import override

# Torch's machinery


@EACH
def test_autocast_gives_the_autocast_type(name: str) -> None:
    one, state = given(name).to(torch.float32), first_state(name).float()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out, last = ask(name, one, initial_state=state, return_state=True)
        double = ask(name, given(name))
    narrow = Given([x.bfloat16() for x in one.tensors], one.beside)
    wanted, end = ask(name, narrow, initial_state=state, return_state=True)
    assert out.dtype == torch.bfloat16 and torch.equal(out, wanted) and torch.equal(last, end)
    assert torch.equal(double, ask(name, given(name)))


def test_autocast_and_both_ways() -> None:
    one = given("linear_attention").to(torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = ask("linear_attention", one, is_causal=False)
    assert torch.equal(out, ask("linear_attention", one.to(torch.bfloat16), is_causal=False))


@pytest.mark.parametrize("name", ["gated_delta_rule", "linear_attention", "retention"])
def test_compiled_in_one_graph(name: str) -> None:
    torch._dynamo.reset()
    counter, one = CompileCounter(), given(name).to(torch.float32)

    def function(*tensors: Tensor) -> Any:
        beside = dict(zip(one.beside, tensors[3:], strict=True))
        return ask(name, Given([x * 2 for x in tensors[:3]], beside), return_state=True)

    tensors = (*one.tensors, *one.beside.values())
    out, last = torch.compile(function, backend=counter, fullgraph=True)(*tensors)
    wanted, end = function(*tensors)
    near(out, wanted, 1e-5)
    near(last, end, 1e-5)
    assert counter.frame_count == 1


@pytest.mark.timeout(60)  # symbolic lengths took a compiler longer than anyone waited
@pytest.mark.parametrize(
    "name, dynamic",
    [
        ("gated_linear_attention", None),
        pytest.param("gated_linear_attention", True, marks=pytest.mark.long),
        pytest.param("kimi_delta_attention", None, marks=pytest.mark.long),
        pytest.param("ssd", True, marks=pytest.mark.long),
    ],
)
def test_compiled_at_a_second_length(name: str, dynamic: bool | None) -> None:
    torch._dynamo.reset()
    names = tuple(given(name).beside)

    def function(*tensors: Tensor) -> Any:
        return ask(name, Given(list(tensors[:3]), dict(zip(names, tensors[3:], strict=True))))

    compiled = torch.compile(function, backend="aot_eager", fullgraph=True, dynamic=dynamic)
    for length in (37, 70):
        one = given(name, length=length).to(torch.float32)
        near(compiled(*one.tensors, *one.beside.values()), ask(name, one), 1e-5)


def test_compiled_for_any_batch() -> None:
    torch._dynamo.reset()
    counter = CompileCounter()
    compiled = torch.compile(qkv.ssd, backend=counter, fullgraph=True)
    for batch in (2, 3, 5, 9):
        one = given("ssd", batch=batch).to(torch.float32)
        near(compiled(*one.tensors, one.beside["g"]), ask("ssd", one), 1e-5)
    assert counter.frame_count == 2, "one for B = 2, one for every other"


def test_a_compiled_graph_breaks_at_packed_sequences() -> None:
    torch._dynamo.reset()
    one, edges = given("ssd", batch=1), torch.tensor(CU)

    def function(q: Tensor, k: Tensor, v: Tensor, g: Tensor, edges: Tensor) -> Tensor:
        return qkv.ssd(q * 2, k, v, g, cu_seqlens=edges).sin()

    tensors = (*one.tensors, one.beside["g"], edges)
    counter = CompileCounter()
    assert torch.equal(torch.compile(function, backend=counter)(*tensors), function(*tensors))
    assert counter.frame_count == 2, "one graph before the call and one behind it"
    with pytest.raises(Unsupported, match="must not depend on values; got cu_seqlens"):
        torch.compile(lambda *x: function(*x) + 1, backend="eager", fullgraph=True)(*tensors)


class Layer(torch.nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> Tensor:
        return qkv.ssd(q, k, v, g, cu_seqlens=CU)


@pytest.mark.parametrize("strict", [False, True])
def test_no_export_of_packed_sequences(strict: bool) -> None:
    one = given("ssd", batch=1)
    with pytest.raises(Exception, match="must not depend on values; got cu_seqlens"):
        torch.export.export(Layer(), (*one.tensors, one.beside["g"]), strict=strict)


@EACH
def test_tensors_without_numbers(name: str) -> None:
    one = given(name)
    meta = Given([x.to("meta") for x in one.tensors], {key: x.to("meta") for key, x in one.beside.items()})
    out, last = ask(name, meta, return_state=True)
    assert out.shape == (B, H, L, V) and last.shape == first_state(name).shape and out.is_meta
    with FakeTensorMode(allow_non_fake_inputs=True):
        fake = Given([torch.empty_like(x) for x in one.tensors], {k: torch.ones_like(x) for k, x in one.beside.items()})
        assert ask(name, fake).shape == (B, H, L, V)


@EACH
def test_transforms_and_forward_mode(name: str) -> None:
    one = given(name).to(torch.float32)

    def single(*tensors: Tensor) -> Tensor:
        return ask(name, Given([x[None] for x in tensors[:3]], beside_of(tensors[3:])))[0]

    def beside_of(tensors: tuple[Tensor, ...]) -> dict[str, Tensor]:
        pairs = zip(one.beside, tensors, strict=True)
        return {key: x if key == "decay" else x[None] for key, x in pairs}

    tensors = (*one.tensors, *one.beside.values())
    axes = (0, 0, 0, *(None if key == "decay" else 0 for key in one.beside))
    near(torch.func.vmap(single, axes)(*tensors), ask(name, one), 1e-5)
    direction = normal(*one.tensors[0].shape, dtype=torch.float32)
    with forward_ad.dual_level():
        dual = Given([forward_ad.make_dual(one.tensors[0], direction), *one.tensors[1:]], one.beside)
        tangent = forward_ad.unpack_dual(ask(name, dual)).tangent
    step = 1e-3
    wide = one.to(torch.float64)
    ahead, behind = (
        ask(name, Given([wide.tensors[0] + s * direction.double(), *wide.tensors[1:]], wide.beside))
        for s in (step, -step)
    )
    near(tangent, (ahead - behind) / (2 * step), 1e-3)


# Which engine


def test_the_setting_names_an_engine_where_it_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    one = given("ssd")
    for engine in ("chunked", "reference"):
        kept = qkv.linear.engine.ENGINES[engine]
        monkeypatch.setitem(
            qkv.linear.engine.ENGINES, engine, lambda *x, kept=kept, name=engine: (asked.append(name), kept(*x))[1]
        )
    with override("QKV_BACKEND", "reference"):
        ask("ssd", one)
        ask("ssd", one, backend="chunked")
    with override("QKV_BACKEND", "blockwise"):  # an engine of softmax attention says nothing here
        ask("ssd", one)
        ask("ssd", one, backend="reference")
    assert asked[:2] == ["reference", "chunked"] and asked[2:] in (["reference"], ["chunked", "reference"])


def test_a_named_engine_is_used_or_refused() -> None:
    one = given("ssd")
    meta = Given([x.to("meta") for x in one.tensors], {"g": one.beside["g"].to("meta")})
    with pytest.raises(UnsupportedError) as caught:
        ask("ssd", meta, backend="cpu")
    assert str(caught.value).startswith(
        "`backend` 'cpu' must be able to answer the call; "
        "the native core needs numbers in memory, in no graph and no transform; "
        'use "auto", or one of chunked, reference (in a call of ssd with query [2, 2, 37, 5] float64 meta, '
    )
