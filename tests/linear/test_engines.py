"""Every engine of the linear family against the oracle: outputs, last states and all gradients."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck

from linear.linear_engines import EACH, FAST, FAST_EACH_ISA, FAST_LONG, using
from linear.recurrences import (
    DELTA,
    GATED,
    MODES,
    PLAIN,
    SHARE,
    Question,
    asked,
    hold,
    incoming,
    known,
    made,
    oracle,
    truth,
)
from qkv.linear import chunked, reference
from qkv.linear.recurrence import Outcome, Recurrence, Streams
from qkv.linear.sequences import decay, lowest

LENGTHS = (0, 1, 3, 4, 5, 37, 63, 64, 65, 130)
WIDE = [torch.float64, torch.float32]
NARROW = [torch.bfloat16, torch.float16]
EACH_MODE = pytest.mark.parametrize("mode", MODES)
EACH_PLAIN = pytest.mark.parametrize("mode", PLAIN)


def check(engine: str, question: Question) -> None:
    r, streams = made(question)
    with using(engine) as answer:
        hold(asked(answer, r, streams), r, known(question), str(question))


# The reference against numpy, before anything is held against it


@EACH_MODE
@pytest.mark.parametrize("starts", [None, (0, 0, 4, 9, 9)])
def test_reference_is_the_oracle(mode: str, starts: tuple[int, ...] | None):
    for gates in ("mild", "mixed", "-100", "line"):
        batch = 2 if starts is None else 1
        question = Question(mode=mode, length=9, group=2, dtype=torch.float64, gates=gates, starts=starts, batch=batch)
        r, streams = made(question)
        outcome = reference.answer(r, streams)
        for mine, theirs in zip(outcome, oracle(r, streams), strict=True):
            np.testing.assert_allclose(mine.numpy(), theirs, rtol=1e-12, atol=1e-12)


# Sizes, types, groups


@FAST_EACH_ISA
@EACH_MODE
def test_every_length(engine: str, mode: str):
    for length in LENGTHS:
        check(engine, Question(mode=mode, length=length, batch=1, state=length % 2 == 1, seed=length))


@FAST_LONG
@EACH_MODE
@pytest.mark.parametrize("dtype", [torch.float64, *NARROW], ids=str)
def test_every_type(engine: str, mode: str, dtype: torch.dtype):
    check(engine, Question(mode=mode, dtype=dtype, length=70, batch=1))


@FAST
@EACH_MODE
@pytest.mark.parametrize("sizes", [(1, 1), (1, 5), (3, 1), (16, 16), (17, 64), (64, 33), (130, 7)], ids=str)
def test_widths(engine: str, mode: str, sizes: tuple[int, int]):
    check(engine, Question(mode=mode, length=19, batch=1, key_heads=1, key_dim=sizes[0], value_dim=sizes[1]))


@FAST
@EACH_MODE
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_groups_of_heads(engine: str, mode: str, dtype: torch.dtype):
    """Gradients of q and k are sums over their group, rounded once."""
    for group in (2, 3):
        check(
            engine,
            Question(mode=mode, length=67, batch=2, group=group, key_heads=2, key_dim=8, value_dim=9, dtype=dtype),
        )


# Packed sequences


@FAST_LONG
@EACH_MODE
def test_packed_sequences_are_alone(engine: str, mode: str):
    for starts in ((0, 0, 5, 69, 70, 130, 130), (0, 37), (0, 64, 128, 129)):
        for state in (True, False):
            size = starts[-1]
            check(engine, Question(mode=mode, batch=1, group=2, length=size, starts=starts, state=state, value_dim=9))


@EACH
def test_only_empty_sequences(engine: str):
    r, streams = made(Question(mode="delta-scalar", batch=1, length=0, starts=(0, 0, 0)))
    with using(engine) as answer:
        outcome = answer(r, streams)
    assert outcome.output.shape == (1, 2, 0, 40)
    torch.testing.assert_close(outcome.state, streams.state, rtol=0, atol=0)


@FAST
@EACH_PLAIN
def test_no_number_crosses_between_sequences(engine: str, mode: str):
    """NaN everywhere in the middle one of three leaves the two others as they were, to the bit, and their gradients."""
    question = Question(mode=mode, batch=1, length=90, starts=(0, 20, 70, 90), value_dim=9)
    r, streams = made(question)
    spoiled = Streams(*(None if x is None else x.clone() for x in streams))
    for x in spoiled[:5]:
        if x is not None:
            x[:, :, 20:70] = math.nan
    spoiled.state[1] = math.nan  # type: ignore[index]
    with using(engine) as answer:
        clean, dirty = asked(answer, r, streams), asked(answer, r, spoiled)
    tokens = [t for t in range(90) if not 20 <= t < 70]
    for a, b in zip((clean.state, clean.gradients["state"]), (dirty.state, dirty.gradients["state"]), strict=True):
        torch.testing.assert_close(a[[0, 2]], b[[0, 2]], rtol=0, atol=0)
    for name in ("query", "key", "value"):
        torch.testing.assert_close(
            clean.gradients[name][:, :, tokens], dirty.gradients[name][:, :, tokens], rtol=0, atol=0
        )
    torch.testing.assert_close(clean.output[:, :, tokens], dirty.output[:, :, tokens], rtol=0, atol=0)


# Gates


@FAST_LONG
@pytest.mark.parametrize("mode", [*GATED, "normalized-scalar"])
@pytest.mark.parametrize("gates", ["0", "-5", "-100", "-inf", "constant", "mixed", "line"])
def test_gates(engine: str, mode: str, gates: str):
    check(engine, Question(mode=mode, gates=gates, length=130, batch=1, group=2, value_dim=9))


@EACH
@pytest.mark.parametrize("mode", GATED)
def test_a_gate_of_minus_infinity_starts_anew(engine: str, mode: str):
    """What came before is gone, to the bit, even what was infinite on the way; no gradient goes back."""
    question = Question(mode=mode, length=80, batch=1, gates="mild")
    r, streams = made(question)
    streams.gate[:, :, 45] = -math.inf  # type: ignore[index]
    other = Streams(*(None if x is None else x.clone() for x in streams))
    for x, sign in zip(other[:3], (1, 1, 1e6), strict=True):
        x[:, :, :45] *= sign  # type: ignore[index]
    other.value[:, :, :45] *= 1e6
    with using(engine) as answer:
        leaves = Streams(*(None if x is None else x.detach().requires_grad_() for x in streams))
        outcome, there = answer(r, leaves), answer(r, other)
        after = outcome.output[:, :, 45:].sum() + outcome.state.sum()
        grads = torch.autograd.grad(after, [x for x in leaves if x is not None])
    torch.testing.assert_close(outcome.output[:, :, 45:], there.output[:, :, 45:], rtol=0, atol=0)
    torch.testing.assert_close(outcome.state, there.state, rtol=0, atol=0)
    for grad in grads[:-1]:
        assert not grad[:, :, :45].any()
        assert grad.isfinite().all()
    assert not grads[-1].any()
    assert not grads[3][:, :, 45].any()


@EACH
@pytest.mark.parametrize("mode", GATED)
@pytest.mark.parametrize("gate", [-1.31, -1.5, -2.9, -29.5, -88.0])
def test_below_the_smallest_normal_number_is_nothing(engine: str, mode: str, gate: float):
    """A state of ones that only decays: right as long as it is a normal number, then 0."""
    question = Question(mode=mode, length=130, batch=1, key_heads=1, gates=str(gate), keys="zero")
    r, streams = made(question)
    streams.state.fill_(1)  # type: ignore[union-attr]
    streams.query.zero_()
    streams.query[..., 0] = 1 / r.scale
    with using(engine) as answer:
        output, state = answer(r, streams)
    sums = torch.arange(1, 131, dtype=torch.float64) * torch.tensor(gate).double()
    line = lowest(torch.float32)
    true = sums.exp()[:, None].expand(130, r.value_dim)
    normal = (sums > line + 0.01)[:, None].expand_as(true)
    torch.testing.assert_close(output[0, 0].double()[normal], true[normal], rtol=3e-5, atol=0)
    assert not output[0, 0][(sums < line - 17)].any()
    assert not state.any()
    if engine.startswith("cpu"):
        tiny = torch.finfo(torch.float32).tiny
        assert ((output == 0) | (output.abs() >= tiny)).all()


def test_decay_is_nothing_below_the_smallest_normal_number():
    for dtype in (torch.float32, torch.float64):
        line, tiny = lowest(dtype), torch.finfo(dtype).tiny
        sums = torch.tensor(
            [0, line * (1 - 1e-6), line * (1 + 1e-6), 2 * line, -math.inf], dtype=dtype
        ).requires_grad_()
        found = decay(sums)
        found.sum().backward()
        assert found[0] == 1 and found[1] >= tiny and not found[2:].any()
        assert sums.grad is not None and sums.grad[0] == 1 and not sums.grad[2:].any()


# Keys and write strengths of the delta rules


@FAST_LONG
@pytest.mark.parametrize("mode", DELTA)
@pytest.mark.parametrize("keys", ["unit", "identical", "alternating", "zero"])
@pytest.mark.parametrize("betas", ["free", "0", "1", "2"])
def test_keys_and_betas(engine: str, mode: str, keys: str, betas: str):
    """With beta 2 and one key the state is mirrored for ever: the one rounding of k·k comes in at each token anew."""
    question = Question(mode=mode, keys=keys, betas=betas, length=130, batch=1, value_dim=9)
    mirrored = betas == "2" and keys in {"identical", "alternating"}
    r, streams = made(question)
    with using(engine) as answer:
        hold(asked(answer, r, streams), r, known(question), str(question), share=8 * SHARE if mirrored else SHARE)


@FAST
@pytest.mark.parametrize("mode", [m for m in MODES if m not in DELTA])
@pytest.mark.parametrize("keys", ["identical", "alternating", "zero"])
def test_keys_of_sums(engine: str, mode: str, keys: str):
    check(engine, Question(mode=mode, keys=keys, length=65, batch=1))


# The normaliser


@EACH
def test_no_weight_at_all_gives_nothing(engine: str):
    """Denominators that are 0: output 0, and no gradient, not one of 1e7 or NaN."""
    r, streams = made(Question(mode="normalized-relu", length=70, batch=1, state=False, key_dim=4, value_dim=5))
    streams.key[:, :, :3] = -1
    streams.query[:, :, 50] = -2
    with using(engine) as answer:
        found = asked(answer, r, streams)
    hold(found, r, truth(r, streams))
    rows = [0, 1, 2, 50]
    assert not found.output[:, :, rows].any()
    assert not found.gradients["query"][:, :, rows].any()
    assert all(g.isfinite().all() for g in found.gradients.values())


# Memory


@FAST
@EACH_PLAIN
@pytest.mark.parametrize("strides", ["swapped", "steps", "shared", "channels"])
def test_any_strides(engine: str, mode: str, strides: str):
    check(engine, Question(mode=mode, strides=strides, length=67, group=2, key_dim=8, value_dim=9))


@EACH
@pytest.mark.parametrize("length", [0, 5, 70])
def test_inputs_stay_as_they_are(engine: str, length: int):
    r, streams = made(Question(mode="delta-scalar", length=length))
    before = [None if x is None else x.clone() for x in streams]
    with using(engine) as answer:
        outcome = answer(r, streams)
        outcome.output.fill_(7)
        outcome.state.fill_(7)  # memory of its own
    for x, y in zip(streams, before, strict=True):
        assert x is None or torch.equal(x, y)


@FAST
@EACH_MODE
@pytest.mark.parametrize("through", ["output", "state", "both"])
def test_gradients_of_some(engine: str, mode: str, through: str):
    """Whichever streams want one, through whichever result: each gradient is what it is among all."""
    question = Question(mode=mode, length=67, batch=1, key_dim=3, value_dim=4, dtype=torch.float64)
    r, streams = made(question)
    given = [
        grad if through in {name, "both"} else None for name, grad in zip(Outcome._fields, incoming(r), strict=True)
    ]
    names = [name for name, x in streams._asdict().items() if x is not None]

    def gradients(answer, wanted: tuple[str, ...]) -> list[Tensor]:
        leaves = {name: getattr(streams, name).detach().requires_grad_() for name in wanted}
        outcome = answer(r, streams._replace(**leaves))
        pairs = [(x, g) for x, g in zip(outcome, given, strict=True) if x.requires_grad and g is not None]
        if not pairs:
            return [torch.zeros_like(x) for x in leaves.values()]
        outputs, grads = zip(*pairs, strict=True)
        return list(torch.autograd.grad(outputs, leaves.values(), grads, materialize_grads=True, allow_unused=True))

    true = dict(zip(names, gradients(reference.answer, tuple(names)), strict=True))
    assert through != "state" or not true["query"].any()
    with using(engine) as answer:
        for count in range(1, len(names) + 1):
            for wanted in itertools.combinations(names, count):
                for name, mine in zip(wanted, gradients(answer, wanted), strict=True):
                    torch.testing.assert_close(mine, true[name], rtol=1e-9, atol=1e-9, msg=f"{name} of {wanted}")


# Derivatives of derivatives


TINY = [
    Question(mode=mode, batch=1, key_heads=1, group=2, length=4, key_dim=2, value_dim=2, dtype=torch.float64)
    for mode in (*PLAIN, "normalized", "normalized-scalar")
]


@FAST
@pytest.mark.parametrize("question", TINY, ids=lambda q: q.mode)
def test_gradcheck_twice(engine: str, question: Question):
    r, streams = made(question.but(starts=(0, 0, 4)) if question.mode == "delta-scalar" else question)
    inputs = [x.requires_grad_() for x in streams if x is not None]

    def function(*given: Tensor) -> tuple[Tensor, ...]:
        left = iter(given)
        return tuple(answer(r, Streams(*(None if x is None else next(left) for x in streams))))

    with using(engine) as answer:
        assert gradcheck(function, inputs)
        assert gradgradcheck(function, inputs)


@pytest.mark.parametrize("mode", PLAIN)
def test_chunked_twice_over_several_chunks(mode: str):
    """The second derivatives of a sum of squares, at chunks of 4, against those of the reference."""
    r, streams = made(Question(mode=mode, batch=1, length=11, key_dim=3, value_dim=4, dtype=torch.float64))

    def second(answer) -> list[Tensor]:
        leaves = Streams(*(None if x is None else x.detach().requires_grad_() for x in streams))
        inputs = [x for x in leaves if x is not None]
        outcome = answer(r, leaves)
        first = torch.autograd.grad(
            outcome.output.square().sum() + outcome.state.square().sum(), inputs, create_graph=True
        )
        return list(torch.autograd.grad(sum(g.square().sum() for g in first), inputs))

    for mine, theirs in zip(second(lambda *x: chunked.answer(*x, chunk=4)), second(reference.answer), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-9)


# Parts of a whole


@FAST
@EACH_MODE
def test_any_split_is_the_whole(engine: str, mode: str):
    """The state carried from segment to segment: outputs, last state and gradients through all of them."""
    question = Question(mode=mode, length=130, batch=1, group=2, value_dim=9)
    r, streams = made(question)

    def segments(answer, cuts: tuple[int, ...]):
        def run(_: Recurrence, whole: Streams) -> Outcome:
            lengths = [b - a for a, b in zip((0, *cuts), (*cuts, 130), strict=True)]
            parts = [[None] * len(lengths) if x is None else x.split(lengths, 2) for x in whole[:5]]
            outputs, state = [], whole.state
            for length, *five in zip(lengths, *parts, strict=True):
                output, state = answer(question.but(length=length).recurrence, Streams(*five, state))
                outputs.append(output)
            return Outcome(torch.cat(outputs, 2), state)

        return run

    with using(engine) as answer:
        for cuts in ((64,), (1,), (37, 37, 101, 129)):
            hold(asked(segments(answer, cuts), r, streams), r, known(question), f"{cuts}")


@EACH_PLAIN
@pytest.mark.parametrize("chunk", [1, 2, 16, 32, 128, 256])
def test_any_chunk_is_the_same(mode: str, chunk: int):
    question = Question(mode=mode, length=130, batch=1, gates="mixed")
    r, streams = made(question)
    hold(asked(lambda *x: chunked.answer(*x, chunk=chunk), r, streams), r, known(question))


@EACH_PLAIN
@pytest.mark.parametrize("slab", [1, 2**30])
def test_any_slab_is_the_same(monkeypatch: pytest.MonkeyPatch, mode: str, slab: int):
    monkeypatch.setattr(chunked, "SLAB", slab)
    question = Question(mode=mode, length=200, batch=1, gates="mixed")
    r, streams = made(question)
    hold(asked(lambda *x: chunked.answer(*x, chunk=16), r, streams), r, known(question))


# Torch's machinery, for the form that is made of its operations


@EACH_PLAIN
def test_chunked_under_vmap(mode: str):
    """A batch more around it, and its gradients by torch.func."""
    r, streams = made(Question(mode=mode, batch=1, length=70, value_dim=9, starts=(0, 30, 70)))
    inputs = [x for x in streams if x is not None]

    def function(*given: Tensor) -> Outcome:
        left = iter(given)
        return chunked.answer(r, Streams(*(None if x is None else next(left) for x in streams)))

    def total(*given: Tensor) -> Tensor:
        return sum(x.square().sum() for x in function(*given))

    batches = [torch.stack([x, x * 0.5, x * 0.9]) for x in inputs]
    numbers = tuple(range(len(inputs)))
    together = torch.func.vmap(function)(*batches)
    slopes = torch.func.vmap(torch.func.grad(total, argnums=numbers))(*batches)
    for n in range(3):
        leaves = [x[n].requires_grad_() for x in batches]
        alone = function(*leaves)
        grads = torch.autograd.grad(total(*leaves), leaves)
        for mine, theirs in zip((*together, *slopes), (*alone, *grads), strict=True):
            torch.testing.assert_close(mine[n], theirs, rtol=1e-4, atol=1e-4)


def test_chunked_is_one_graph():
    r, streams = made(Question(mode="delta-scalar", batch=1, length=70, value_dim=9))
    graph = torch.compile(chunked.answer, fullgraph=True, backend="aot_eager")
    for mine, theirs in zip(graph(r, streams), chunked.answer(r, streams), strict=True):
        torch.testing.assert_close(mine, theirs)


@pytest.mark.parametrize("mode", ["add", "delta-scalar", "delta-vector"])
def test_chunked_backward_takes_time_that_follows_the_length(mode: str):
    """Counted in numbers that the backward pass makes: slices of whole tensors would make them grow with the square."""

    class Counted(torch.utils._python_dispatch.TorchDispatchMode):
        numbers = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            found = func(*args, **(kwargs or {}))
            for x in found if isinstance(found, tuple | list) else [found]:
                if isinstance(x, Tensor):
                    self.numbers += x.numel()
            return found

    def cost(length: int) -> int:
        r, streams = made(Question(mode=mode, batch=1, length=length, key_dim=8, value_dim=8))
        leaves = Streams(*(None if x is None else x.requires_grad_() for x in streams))
        total = chunked.answer(r, leaves, chunk=16).output.sum()
        with Counted() as counted:
            total.backward()
        return counted.numbers

    assert cost(2048) < 2.2 * cost(1024)
