"""torch.compile and torch.export over the calls: one graph without a break, the bits and gradients of eager mode."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.exc import TorchRuntimeError, Unsupported
from torch._dynamo.testing import CompileCounter, CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint

import qkv
from qkv.errors import MaskError, ShapeError

B, H, G, L, D, V = 2, 4, 2, 70, 8, 6
WINDOW = qkv.causal() & qkv.window(30)
INDUCTOR = pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")


@pytest.fixture(autouse=True)
def _fresh() -> None:
    torch._dynamo.reset()


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def kept(*shape: int) -> Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(9)) > 0.3


def inputs(length: int = L, batch: int = B, width: int = D) -> tuple[Tensor, Tensor, Tensor]:
    shapes = (batch, H, length, width), (batch, G, length, width), (batch, G, length, V)
    return tuple(normal(*shape, seed=n) for n, shape in enumerate(shapes))


PADDED = qkv.key_padding(kept(B, L)) & qkv.causal() - qkv.documents([0] * 30 + [1] * 40)


def constructors(q: Tensor, k: Tensor, v: Tensor) -> list[Tensor]:
    """Every constructor of literals, called inside of the graph."""
    patterns = [
        qkv.full(),
        qkv.causal(align="top_left") & qkv.window(9, right=2),
        qkv.window(None, 5) - qkv.sliding_window(size=4),
        qkv.dilated(3, 1, dilation=2) | qkv.prefix(4),
        qkv.strided(9),
        qkv.sparse_transformer(stride=9),
        qkv.fixed(8, 2),
        qkv.global_tokens([7, 0]) | qkv.block_local(16),
        qkv.random_blocks(2, 16, 5, ahead=True),
        qkv.neighborhood((7, 10), 3) | qkv.axial((7, 10), along="height"),
        qkv.windows2d((7, 10), 2, shift=1),
        qkv.longformer(16, [0, 5]),
        qkv.bigbird(3, 2, 3, 0, block_size=16),
        qkv.per_head([qkv.causal(), qkv.full() - qkv.window(3), WINDOW, PADDED]),
        WINDOW | PADDED,
        qkv.per_head([PADDED, WINDOW] * 2),
        qkv.key_lengths([30, 40]),
    ]
    return [qkv.attention(q, k, v, pattern=pattern) for pattern in patterns]


def with_aux(q: Tensor, k: Tensor, v: Tensor) -> list[Tensor]:
    request = qkv.AuxRequest(lse=True, max_scores=True, entropy=True)
    out, aux = qkv.attention(q, k, v, pattern=WINDOW, return_aux=request)
    return [out, aux.lse, aux.max_scores, aux.entropy]


def merged(q: Tensor, k: Tensor, v: Tensor) -> list[Tensor]:
    parts = [slice(0, 30), slice(30, L)]
    found = [qkv.attention(q, k[:, :, part], v[:, :, part], return_aux=qkv.AuxRequest(lse=True)) for part in parts]
    return [*qkv.merge([out for out, _ in found], [aux.lse for _, aux in found])]


def twice_dropped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return qkv.attention(q, k, v, dropout_p=0.4) + 2 * qkv.attention(q, k, v, dropout_p=0.4)


CALLS: dict[str, tuple[Callable[..., Any], tuple[Tensor, ...]]] = {
    "a pattern from outside": (lambda q, k, v: qkv.attention(q, k, v, pattern=WINDOW), ()),
    "no pattern": (qkv.attention, ()),
    "constructors": (constructors, ()),
    "content from outside": (lambda q, k, v: qkv.attention(q, k, v, pattern=PADDED), ()),
    "content of the graph": (
        lambda q, k, v, keep, ids: qkv.attention(q, k, v, pattern=qkv.key_padding(keep) & qkv.documents(ids=ids // 40)),
        (kept(B, L), torch.arange(L)),
    ),
    "a mask of the graph": (
        lambda q, k, v, keep: qkv.attention(q, k, v, pattern=qkv.mask(keep, axes="BLS") | qkv.blocks(keep[0], 16)),
        (kept(B, L, L),),
    ),
    "lengths of the graph": (
        lambda q, k, v, n: qkv.attention(q, k, v, pattern=qkv.key_lengths(n) & qkv.global_tokens(n - 25)),
        (torch.tensor([40, 30]),),
    ),
    "bias": (lambda q, k, v, b: qkv.attention(q, k, v, bias=b, softcap=2.0, scale=0.3), (normal(L, L),)),
    "bias per head": (lambda q, k, v, b: qkv.attention(q, k, v, bias=b, pattern=WINDOW), (normal(1, H, 1, L),)),
    "slopes": (lambda q, k, v, s: qkv.attention(q, k, v, bias=qkv.alibi(s), pattern=WINDOW), (normal(H),)),
    "slopes of the paper": (lambda q, k, v: qkv.attention(q, k, v, bias=qkv.alibi(qkv.alibi_slopes(H))), ()),
    "table": (lambda q, k, v, t: qkv.attention(q, k, v, bias=qkv.relative(t)), (normal(H, 9),)),
    "sinks": (lambda q, k, v, s: qkv.attention(q, k, v, sinks=s, pattern=WINDOW), (normal(H),)),
    "dropout twice": (twice_dropped, ()),
    "dropout in a checkpoint": (lambda q, k, v: checkpoint(twice_dropped, q, k, v, use_reentrant=False), ()),
    "offsets": (lambda q, k, v: qkv.attention(q[:, :, :5], k, v, pattern=WINDOW, query_offset=[3, 4]), ()),
    "aux": (with_aux, ()),
    "merge": (merged, ()),
    "two axes": (lambda q, k, v: qkv.attention(q[0, 0], k[0, 0], v[0, 0], pattern=WINDOW), ()),
    "three axes": (lambda q, k, v: qkv.attention(q[:, 0], k[:, 0], v[:, 0], pattern=WINDOW), ()),
    "five axes": (lambda q, k, v: qkv.attention(*(x.unflatten(0, (2, 1)) for x in (q, k, v)), pattern=WINDOW), ()),
    "BLHD": (lambda *qkv_: qkv.attention(*(x.transpose(1, 2) for x in qkv_), pattern=WINDOW, layout="BLHD"), ()),
    "16 bits": (lambda *qkv_: qkv.attention(*(x.bfloat16() for x in qkv_), pattern=WINDOW), ()),
    "autocast": (torch.autocast("cpu")(lambda q, k, v: qkv.attention(q, k, v, pattern=WINDOW)), ()),
    "torch's signature, bool": (
        lambda q, k, v, m: qkv.scaled_dot_product_attention(q, k, v, m, is_causal=True, enable_gqa=True),
        (kept(B, 1, L, L),),
    ),
    "torch's signature, float": (
        lambda q, k, v, m: qkv.scaled_dot_product_attention(q, k, v, m, enable_gqa=True, dropout_p=0.1),
        (normal(L, L),),
    ),
    "reference": (lambda q, k, v: qkv.attention(q, k, v, pattern=WINDOW, backend="reference"), ()),
    "blockwise": (lambda q, k, v: qkv.attention(q, k, v, pattern=WINDOW, backend="blockwise"), ()),
}


def outcome(function: Callable[..., Any], extra: tuple[Tensor, ...], grad: bool) -> tuple[list[Tensor], list[Any]]:
    """Results and gradients of fresh inputs, from one seed."""
    given = [x.clone().requires_grad_(grad and x.is_floating_point()) for x in (*inputs(), *extra)]
    torch.manual_seed(3)
    found = function(*given)
    found = [found] if isinstance(found, Tensor) else list(found)
    if grad:
        sum((out.float() * normal(*out.shape, seed=5)).sum() for out in found if out.requires_grad).backward()
    return [out.detach() for out in found], [x.grad for x in given]


@pytest.mark.parametrize("name", CALLS)
def test_compiled_is_eager(name: str) -> None:
    function, extra = CALLS[name]
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    got, got_grads = outcome(compiled, extra, grad=True)
    want, want_grads = outcome(function, extra, grad=True)
    assert all(torch.equal(one, other) for one, other in zip(got, want, strict=True))
    for one, other in zip(got_grads, want_grads, strict=True):
        assert (one is None and other is None) or torch.equal(one, other)
    assert sum(grad is not None for grad in got_grads) >= 3


def test_without_gradients_too() -> None:
    compiled = torch.compile(twice_dropped, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        assert torch.equal(outcome(compiled, (), grad=False)[0][0], outcome(twice_dropped, (), grad=False)[0][0])


@INDUCTOR
def test_inductor() -> None:
    """No arithmetic around the calls, so that nothing has to be compiled by a compiler of C++."""

    def function(q: Tensor, k: Tensor, v: Tensor) -> list[Tensor]:
        return [qkv.attention(q, k, v, pattern=PADDED, dropout_p=0.3) for _ in range(2)]

    with torch.no_grad():
        got, _ = outcome(torch.compile(function, fullgraph=True), (), grad=False)
        want, _ = outcome(function, (), grad=False)
    assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])
    assert not torch.equal(got[0], got[1])


@INDUCTOR
@pytest.mark.long
def test_inductor_trains() -> None:
    for function, extra in (CALLS["dropout twice"], CALLS["bias"], CALLS["aux"]):
        torch._dynamo.reset()
        got, got_grads = outcome(torch.compile(function, fullgraph=True), extra, grad=True)
        want, want_grads = outcome(function, extra, grad=True)
        assert all(torch.equal(one, other) for one, other in zip([*got, *got_grads], [*want, *want_grads], strict=True))


def test_lazily_negated_inputs() -> None:
    def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return qkv.attention(q, torch.complex(k, k).conj().imag, v)

    q, k, v = inputs()
    assert torch.equal(torch.compile(function, fullgraph=True, backend="aot_eager")(q, k, v), qkv.attention(q, -k, v))


# One graph for many calls.


def test_one_graph_for_all_sizes() -> None:
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(lambda q, k, v: qkv.attention(q, k, v, pattern=WINDOW), backend=counter, dynamic=True)
    counts = []
    for length, batch, width in ((L, 5, 8), (33, 3, 16), (130, 2, 9)):
        given = inputs(length, batch, width)
        assert torch.equal(compiled(*given), qkv.attention(*given, pattern=WINDOW))
        counts.append(counter.frame_count)
    assert len(set(counts)) == 1  # torch itself starts the first one twice, for floats that turn out to be constants


def test_one_graph_for_all_positions_of_a_decoder() -> None:
    counter = CompileCounterWithBackend("aot_eager")

    def step(q: Tensor, k: Tensor, v: Tensor, at: int) -> Tensor:
        return qkv.attention(q, k, v, pattern=WINDOW, query_offset=at)

    compiled = torch.compile(step, backend=counter, dynamic=True, fullgraph=True)
    q, k, v = inputs()
    counts = []
    for at in (40, 41, 57):
        assert torch.equal(compiled(q[:, :, :2], k, v, at), step(q[:, :, :2], k, v, at))
        counts.append(counter.frame_count)
    assert len(set(counts)) == 1


def test_one_graph_for_all_contents() -> None:
    """The pattern is an argument: other content of the same sizes does not compile again, another rule does."""
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(lambda q, k, v, p: qkv.attention(q, k, v, pattern=p), backend=counter, fullgraph=True)
    given = inputs()
    for ids in ([0] * L, [0] * 30 + [1] * 40, list(range(L))):
        pattern = qkv.documents(ids) & qkv.causal()
        assert torch.equal(compiled(*given, pattern), qkv.attention(*given, pattern=pattern))
    assert counter.frame_count == 1
    assert torch.equal(compiled(*given, WINDOW), qkv.attention(*given, pattern=WINDOW))
    assert counter.frame_count == 2


def test_content_that_changes_in_its_place_is_seen() -> None:
    keep, given = kept(B, L), inputs()
    compiled = torch.compile(
        lambda q, k, v, m: qkv.attention(q, k, v, pattern=qkv.key_padding(m)), backend="aot_eager", fullgraph=True
    )
    for _ in range(3):
        assert torch.equal(compiled(*given, keep), qkv.attention(*given, pattern=qkv.key_padding(keep)))
        keep.logical_not_()


def test_a_number_of_the_graph_in_a_pattern() -> None:
    """It becomes a constant, and another number another graph."""

    def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return qkv.attention(q, k, v, pattern=qkv.window(q.shape[2] // 7, right=q.shape[0] - 2))

    compiled = torch.compile(function, backend="aot_eager", fullgraph=True, dynamic=True)
    for length in (L, 33):
        assert torch.equal(compiled(*inputs(length)), function(*inputs(length)))


# Patterns that are made in a graph and leave it.


def test_a_pattern_made_in_a_graph_is_a_pattern() -> None:
    def make(keep: Tensor, n: int) -> tuple[Tensor, qkv.Pattern]:
        first, hidden = qkv.global_tokens(torch.arange(3)), qkv.full() - qkv.key_padding(keep)
        return keep.sum(), (qkv.causal("top_left") & (qkv.window(n, right=1) | first)) - hidden

    keep = kept(B, L)
    made = torch.compile(make, backend="eager", fullgraph=True)(keep, 5)[1]
    want = make(keep, 5)[1]
    assert made == want
    assert made.align == "top_left"
    assert str(made) == str(want).replace("window(5, 1)", "window(5, right=1)")
    assert made.count(L, batch=B) == want.count(L, batch=B)
    assert torch.equal(qkv.attention(*inputs(), pattern=made), qkv.attention(*inputs(), pattern=want))


def test_a_break_between_pattern_and_call() -> None:
    counter = CompileCounter()

    def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        pattern = qkv.causal() & qkv.bigbird(3, 2, 3, 0, block_size=16)
        torch._dynamo.graph_break()
        return qkv.attention(q, k, v, pattern=pattern | qkv.window(3))

    assert torch.equal(torch.compile(function, backend=counter)(*inputs()), function(*inputs()))
    assert counter.frame_count >= 1


# What is refused.

REFUSED: dict[str, tuple[Callable[..., Any], str]] = {
    "a function": (
        lambda q, k, v: qkv.attention(q, k, v, pattern=qkv.where(lambda b, h, i, j: j <= i)),
        "a pattern in a compiled or exported graph must be given by rules and tensors; got where(fn); build mask",
    ),
    "a generator": (
        lambda q, k, v: qkv.attention(q, k, v, dropout_p=0.1, generator=torch.default_generator),
        "a compiled or exported graph must draw from torch's default generator; got `generator`; leave it out",
    ),
    "weights": (
        lambda q, k, v: qkv.attention(q, k, v, return_aux=qkv.AuxRequest(weights=[1, 2]))[0],
        "a compiled or exported graph must not ask for weights; got `weights` or `top_k` of AuxRequest; ask for them",
    ),
    "the k largest": (
        lambda q, k, v: qkv.attention(q, k, v, return_aux=qkv.AuxRequest(top_k=3))[0],
        "a compiled or exported graph must not ask for weights",
    ),
    "offsets in a tensor": (
        lambda q, k, v: qkv.attention(q, k, v, query_offset=torch.tensor([3, 4])),
        "got a tensor whose numbers cannot be read here",
    ),
    "widths that differ": (
        lambda q, k, v: qkv.attention(q, k[..., :4], v, pattern=PADDED),
        "`query` and `key` must have the same width D; got D = 8 in query and D = 4 in key; only V may differ from D",
    ),
    "heads that do not divide": (lambda q, k, v: qkv.attention(q[:, :3], k, v), "must be a multiple of"),
    "a bias that does not fit": (
        lambda q, k, v: qkv.attention(q, k, v, bias=q.new_zeros(3, L)),
        "`bias` must broadcast",
    ),
    "a rule out of range": (
        lambda q, k, v: qkv.attention(q, k, v, pattern=qkv.sliding_window(0)),
        "`size` must be at least 1; got 0; it counts tokens or blocks",
    ),
    "torch.func within": (
        torch.func.grad(lambda q, k, v: qkv.attention(q, k, v).sum()),
        "torch.func and forward mode must meet qkv.attention itself",
    ),
    "vmap within": (
        torch.vmap(lambda *qkv_: qkv.attention(*(x[None] for x in qkv_))),
        "torch.func and forward mode must meet qkv.attention itself",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_while_it_is_traced(name: str) -> None:
    function, said = REFUSED[name]
    with pytest.raises((Unsupported, TorchRuntimeError)) as caught:
        torch.compile(function, fullgraph=True, backend="aot_eager")(*inputs())
    assert said in str(caught.value)


@pytest.mark.parametrize(
    "pattern, error",
    [
        (qkv.per_head([qkv.causal(), qkv.full()]), ShapeError),
        (qkv.key_padding(kept(3, L)), ShapeError),
        (qkv.mask(kept(L, 3)), MaskError),
    ],
    ids=["per_head", "key_padding", "mask"],
)
def test_refused_when_it_runs(pattern: qkv.Pattern, error: type[Exception]) -> None:
    """Sizes of a pattern are those of tensors, which are known then."""
    compiled = torch.compile(
        lambda q, k, v: qkv.attention(q, k, v, pattern=pattern), fullgraph=True, backend="aot_eager"
    )
    with pytest.raises(error):
        compiled(*inputs())


def test_without_fullgraph_the_error_is_the_own() -> None:
    with pytest.raises(ShapeError, match="must have the same width D"):
        torch.compile(lambda q, k, v: qkv.attention(q, k[..., :4], v), backend="eager")(*inputs())
