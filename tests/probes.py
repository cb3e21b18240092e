"""Questions to a module of attention that show the classical mistakes in its behaviour, whatever its code looks like.

A `Subject` is the module, how it is called, and what is expected of it: half of the probes have opposite verdicts for
opposite intents. Each probe is a function of a subject that raises AssertionError and tells what it saw.
`PROBES` names them all with the subjects that each applies to; `check(subject)` runs those that apply.

Inputs are embedded tokens (B, L, D) or token numbers (B, L), as `draw` gives them: lengths up to 67, so that a model
needs as many positions. Modules are best in float64, where rounding is far from every mistake; in float32 bounds follow
the type.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from op_spy import Spy
from subjects import Subject, apart, bound, differ, others, paddings, same, seeded, training

SCALES = (1.0, 30.0, 1e3, 1e5)


class Probe(NamedTuple):
    ask: Callable[[Subject], None]
    applies: Callable[[Subject], bool]


def p1_batch_independence(s: Subject) -> None:
    """A row of a batch is what it is alone, with other lengths beside it too."""
    with seeded(1), training(s.module, False):
        keep = s.paddings() if s.pads else None
        x = s.draw(3 if keep is None else len(keep), s.length)
        whole = s.run(x, keep=keep)
        for b in range(len(x)):
            alone = s.run(x[b : b + 1], keep=None if keep is None else keep[b : b + 1])
            rows = slice(None) if keep is None else keep[b]
            same(whole[b][rows], alone[0][rows], f"row {b} of a batch must not depend on the other rows")


def p2_repeatability(s: Subject) -> None:
    """Two calls agree in evaluation, and differ in training where there is dropout."""
    with seeded(2):
        x = s.draw(2, s.length)
        with training(s.module, False):
            first, second = s.run(x), s.run(x)
            same(second, first, "two calls of eval() must agree")
        if s.dropout:
            with training(s.module, True):
                first, second = s.run(x), s.run(x)
                differ(second, first, "two calls in training must differ where there is dropout")
        else:
            with training(s.module, True):
                same(s.run(x), s.run(x), "two calls in training must agree where there is no dropout")


def p3_causality(s: Subject) -> None:
    """Tokens after t do not reach rows up to t, whatever their size, in evaluation and in training."""
    for flag, sizes in ((False, SCALES), (True, (1.0, 1e5))):
        _no_future(s, s.length, flag, sizes if s.ladder else (1.0,))
        _no_future(s, 5 * s.length, flag, (1.0,))


def _no_future(s: Subject, length: int, flag: bool, scales: tuple[float, ...]) -> None:
    mode = "training" if flag else "evaluation"
    with seeded(3), training(s.module, flag):
        x = s.draw(1, length)
        for scale in scales if x.is_floating_point() else (1.0,):
            base = scale * x if x.is_floating_point() else x
            with seeded(33):
                want = s.run(base)
            for t in sorted({0, 1, length // 2, length - 2}):
                other = base.clone()
                other[:, t + 1 :] = s.changed(base, scale)[:, t + 1 :]
                with seeded(33):
                    got = s.run(other)
                told = f"tokens after {t} of {length} (inputs x {scale:g}, {mode}) must not reach the rows up to it"
                same(got[:, : t + 1], want[:, : t + 1], told)


def p4_permutation(s: Subject) -> None:
    """Without positions order does not matter; with them it must."""
    with seeded(4), training(s.module, False):
        x = s.draw(2, s.length)
        order = torch.randperm(s.length - 1)
        while (order == torch.arange(s.length - 1)).all():
            order = torch.randperm(s.length - 1)
        order = torch.cat([order, torch.tensor([s.length - 1])])  # the last one stays: it sees all, if causal
        got, want = s.run(x[:, order]), s.run(x)[:, order]
        if s.causal:
            got, want = got[:, -1], want[:, -1]
        if s.ordered:
            differ(got, want, "other tokens in another order must give another result: positions do not count")
        else:
            same(got, want, "permuted tokens must give permuted rows")


def p5_constant_sequence(s: Subject) -> None:
    """Equal tokens stay what one of them is: rows of weights sum to 1."""
    with seeded(5), training(s.module, False):
        token = s.draw(1, 1)
        memory = None if s.memory is None else s.some_memory(1, 1)
        one = s.run(token, memory=memory)
        for length in (2, s.length, 3 * s.length):
            x = token.repeat_interleave(length, 1)
            held = None if memory is None else memory.repeat_interleave(length + 2, 1)
            got = s.run(x, memory=held)
            for i in {0, 1, length // 2, length - 1}:
                same(got[:, i], one[:, 0], f"row {i} of {length} equal tokens must be what one token gives")


def p6_crowd(s: Subject) -> None:
    """One token among very many that are equal goes with the crowd: weights are normalised over keys."""
    crowd = s.crowd
    with seeded(6), training(s.module, False), torch.no_grad():
        lone, many = s.draw(1, 1), s.draw(1, 1)
        if s.memory is None:
            x = torch.cat([lone, many.repeat_interleave(crowd, 1)], 1)
            got, want = s.run(x)[:, 0], s.run(many)[:, 0]
        else:
            first, rest = s.memory(1, 1), s.memory(1, 1)
            memory = torch.cat([first, rest.repeat_interleave(crowd, 1)], 1)
            got, want = s.run(lone, memory=memory)[:, 0], s.run(lone, memory=rest)[:, 0]
        worst = apart(got, want)
        assert worst <= 100 / crowd, f"a token among {crowd} equal ones must follow them: it is {worst:.2e} away"


def p7_pad_content(s: Subject) -> None:
    """What stands where there is padding reaches no real row; what is real does."""
    with seeded(7), training(s.module, False):
        if s.pads:
            keep = s.paddings()
            x = s.draw(len(keep), s.length)
            want = s.run(x, keep=keep)
            for scale in SCALES[:3] if s.ladder else (1.0,):
                other = torch.where(_wide(keep, x), x, s.changed(x, scale))
                got = s.run(other, keep=keep)
                for b in range(len(x)):
                    told = f"padding (row {b}, keep {keep[b].int().tolist()}, x {scale:g}) must not reach real rows"
                    same(got[b][keep[b]], want[b][keep[b]], told)
            if s.mixes:
                _real_tokens_count(s, x, keep, want)
        if s.memory_pads:
            keep, x = paddings(6), s.draw(5, s.length)
            memory = s.memory(5, 6)
            changed = others(memory, s.memory, 100.0)
            want = s.run(x, memory=memory, memory_keep=keep)
            got = s.run(x, memory=torch.where(_wide(keep, memory), memory, changed), memory_keep=keep)
            same(got, want, "padding of the memory must not reach a row")
            got = s.run(x, memory=torch.where(_wide(keep, memory), changed, memory), memory_keep=keep)
            differ(got, want, "real tokens of the memory must reach the rows")


def _real_tokens_count(s: Subject, x: Tensor, keep: Tensor, want: Tensor) -> None:
    """The first real token of each row is changed: the last real row must move, if it sees it."""
    if s.sees is not None and not s.sees[-1].all():
        return
    for b in range(len(x)):
        real = keep[b].nonzero().flatten().tolist()
        other = x.clone()
        other[b, real[0]] = s.changed(x)[b, real[0]]
        got = s.run(other, keep=keep)
        told = f"real token {real[0]} must reach row {real[-1]} (keep {keep[b].int().tolist()})"
        worst = apart(got[b, real[-1]], want[b, real[-1]])
        assert worst > bound(got), f"{told}: the difference is {worst:.2e} of its size"


def p8_pad_removal(s: Subject) -> None:
    """A padded row gives what the row without its padding gives alone."""
    with seeded(8), training(s.module, False):
        if s.pads:
            keep = s.paddings()
            x = s.draw(len(keep), s.length)
            got = s.run(x, keep=keep)
            for b in range(len(x)):
                told = f"row {b} (keep {keep[b].int().tolist()}) must be what it is without its padding"
                same(got[b][keep[b]], s.run(x[b : b + 1, keep[b]])[0], told)
        if s.memory_pads:
            keep, x, memory = paddings(6), s.draw(5, s.length), s.memory(5, 6)
            got = s.run(x, memory=memory, memory_keep=keep)
            for b in range(5):
                want = s.run(x[b : b + 1], memory=memory[b : b + 1, keep[b]])
                same(got[b], want[0], f"row {b} must read its memory as without padding (keep {keep[b].tolist()})")


def p9_query_independence(s: Subject) -> None:
    """One query is not moved by another."""
    with seeded(9), training(s.module, False):
        x = s.draw(2, s.length)
        want, other = s.run(x), x.clone()
        other[:, 2] = s.changed(x)[:, 2]
        got = s.run(other)
        rest = [i for i in range(s.length) if i != 2]
        same(got[:, rest], want[:, rest], "query 2 must not reach the rows of other queries")


def p10_key_order(s: Subject) -> None:
    """The order of the memory does not count where it has no positions."""
    with seeded(10), training(s.module, False):
        x, memory = s.draw(2, s.length), s.memory(2, 6)
        got = s.run(x, memory=memory[:, [3, 0, 5, 1, 4, 2]])
        same(got, s.run(x, memory=memory), "the memory in another order must give the same")


def p11_constant_in_training(s: Subject, draws: int = 512) -> None:
    """Weights are dropped after softmax: equal tokens then vary, about what they are without dropout."""
    with seeded(11), torch.no_grad():
        x = s.draw(1, 1).repeat_interleave(s.length, 1)
        memory = None if s.memory is None else s.some_memory(1, 1).repeat_interleave(s.length, 1)
        many = None if memory is None else memory.repeat_interleave(draws, 0)
        with training(s.module, False):
            want = s.run(x, memory=memory)[0].double()
        with training(s.module, True):
            got = s.run(x.repeat_interleave(draws, 0), memory=many).double()
        spread = got.std(0)
        assert spread.max() > 1e-3 * want.abs().max(), (
            f"equal tokens must vary in training where weights are dropped: the spread is {spread.max():.2e}"
        )
        off = ((got.mean(0) - want).abs() / (spread + 1e-6)).max().item() * math.sqrt(draws)
        assert off < 6, f"the mean in training must be the value of evaluation: it is {off:.1f} deviations away"


def p12_receptive_field(s: Subject) -> None:
    """Which token reaches which row is what the pattern says, no more and no less."""
    sees = s.sees
    if sees is None:
        sees = torch.ones(s.length, s.length, dtype=torch.bool)
        sees = sees.tril() if s.causal else sees
    found = influence(s)
    extra, missing = (found & ~sees).nonzero().tolist(), (sees & ~found).nonzero().tolist()
    assert not extra, f"rows depend on tokens that they should not see: (row, token) {extra[:6]} of {len(extra)}"
    assert not missing, f"rows do not depend on tokens that they should see: (row, token) {missing[:6]}"


def influence(s: Subject) -> Tensor:
    """bool (L, L): whether row i moves, by more than rounding, when token j alone is another."""
    with seeded(12), training(s.module, False), torch.no_grad():
        x = s.draw(1, s.length)
        want, other = s.run(x), s.changed(x)
        found = torch.zeros(s.length, s.length, dtype=torch.bool)
        for j in range(s.length):
            moved = x.clone()
            moved[:, j] = other[:, j]
            got = s.run(moved)
            for i in range(s.length):
                found[i, j] = apart(got[:, i], want[:, i]) > bound(got) * 1e-2
        return found


def p13_decode(s: Subject) -> None:
    """Token by token with a state is the whole pass."""
    with seeded(13), training(s.module, False), torch.no_grad():
        x = s.draw(2, s.length)
        given = () if s.memory is None else (s.some_memory(2),)
        same(s.decode(s.module, x, *given), s.run(x), "decoding token by token must give the whole pass")


def p14_odd_sizes(s: Subject) -> None:
    """Short, prime and unlike lengths, and a row that is all padding: finite, with gradients."""
    with training(s.module, False):
        for length in (1, 2, 13, 67):
            for size in (1, length, length + 3) if s.memory is not None else (0,):
                with seeded(14):
                    memory = None if s.memory is None else s.memory(2, size)
                    _finite(s, s.draw(2, length), f"length {length}, memory of {size}", memory=memory)
        with seeded(15):
            if s.pads:
                keep = torch.ones(2, s.length, dtype=torch.bool)
                keep[0] = False
                _finite(s, s.draw(2, s.length), "a row that is all padding", keep=keep)
            if s.memory_pads:
                keep = torch.ones(2, 5, dtype=torch.bool)
                keep[0] = False
                _finite(s, s.draw(2, s.length), "a memory that is all padding", memory_keep=keep)


def _finite(s: Subject, x: Tensor, told: str, **given: Tensor | None) -> None:
    x = x.clone().requires_grad_() if x.is_floating_point() else x
    y = s.run(x, **given)
    assert y.shape[1] == x.shape[1], f"{told}: {x.shape[1]} tokens gave {y.shape[1]} rows"
    assert y.isfinite().all(), f"{told}: the output must be finite, {int((~y.isfinite()).sum())} numbers are not"
    asked = [(name, p) for name, p in s.module.named_parameters() if p.requires_grad]
    if x.requires_grad:
        asked.append(("x", x))
    if not (asked and y.requires_grad):
        return
    got = torch.autograd.grad(y.square().sum(), [p for _, p in asked], allow_unused=True)
    for (name, _), grad in zip(asked, got, strict=True):
        assert grad is None or grad.isfinite().all(), f"{told}: the gradient of {name} must be finite"


def p15_scale_ladder(s: Subject) -> None:
    """Large inputs and narrow types stay finite."""
    with seeded(16), training(s.module, False), torch.no_grad():
        x = s.draw(2, s.length)
        memory = None if s.memory is None else s.some_memory(2)
        plain = x.is_floating_point()
        for dtype in (torch.float32, torch.float16, torch.bfloat16) if s.half else (torch.float32,):
            module = copy.deepcopy(s.module).to(dtype)
            for scale in (1.0, s.most) if plain and s.ladder else (1.0,):
                given = memory
                if memory is not None and memory.is_floating_point():
                    given = (memory * scale).to(dtype)
                y = s.run((x * scale).to(dtype) if plain else x, module, memory=given)
                assert y.isfinite().all(), f"inputs x {scale:g} in {dtype} must give finite outputs"


def p16_op_spy(s: Subject) -> None:
    """Softmax runs over the keys, and its scores have the spread that the right scale gives them."""
    with seeded(17), training(s.module, False), torch.no_grad(), Spy() as spy:
        s.run(s.draw(4, 8 * s.length))
    assert spy.seen, "no softmax and no operator of attention was seen"
    for one in spy.seen:
        assert one.last_axis, f"{one.operator} must normalise over the keys, the last axis of the scores"
        if s.score_std is not None:
            ratio = one.std / s.score_std
            assert 0.8 < ratio < 1.25, f"scores must spread by {s.score_std:.2f}: {one.operator} has {one.std:.2f}"


def p17_parameters(s: Subject) -> None:
    """Every parameter learns, moves with its module, is its own, and begins with the spread it should."""
    with seeded(18), training(s.module, False):
        named = dict(s.module.named_parameters(remove_duplicate=False))
        y = s.run(s.draw(2, s.length))
        (y * torch.randn_like(y)).sum().backward()
        grads = {name: p.grad for name, p in named.items()}
        s.module.zero_grad()
        most = max((g.abs().max().item() for g in grads.values() if g is not None), default=0.0)
        for name, grad in grads.items():
            if not name.endswith(s.idle or ("\0",)):
                size = 0.0 if grad is None else grad.abs().max().item()
                assert size > 1e-9 * most, f"{name} must get a gradient: it got {size:.1e}"
        _own_memory(named, s.tied)
        _moves_with_its_module(s)
    for name, wanted in s.spread.items():
        ratio = named[name].std().item() / wanted
        assert 0.8 < ratio < 1.25, f"{name} must begin with a spread of {wanted:.3f}: it is {ratio:.2f} times that"


def _own_memory(named: dict[str, Tensor], tied: tuple[str, ...]) -> None:
    places: dict[int, str] = {}
    for name, p in named.items():
        if name.endswith(tied or ("\0",)):
            continue
        other = places.setdefault(p.data_ptr(), name)
        assert other == name, f"{other} and {name} must not share their memory"


def _moves_with_its_module(s: Subject) -> None:
    """A copy in the other width takes inputs of that width, so that no weight was left behind."""
    x = s.draw(2, s.length)
    memory = None if s.memory is None else s.some_memory(2)
    for dtype in (torch.float32, torch.float64):
        module = copy.deepcopy(s.module).to(dtype)
        cast = [t if t is None or not t.is_floating_point() else t.to(dtype) for t in (x, memory)]
        try:
            y = s.run(cast[0], module, memory=cast[1])
        except RuntimeError as error:
            raise AssertionError(f"the module must run in {dtype} after .to({dtype}): {error}") from error
        assert y.dtype == dtype, f"the module must give {dtype} after .to({dtype}), it gave {y.dtype}"


def loss_ignores_pads(loss: Callable[[Tensor, Tensor, Tensor], Tensor], vocabulary: int = 11) -> None:
    """loss(logits (B, L, V), labels (B, L), keep (B, L)) does not move with what stands where there is padding."""
    with seeded(20):
        logits = torch.randn(3, 8, vocabulary, dtype=torch.float64)
        labels = torch.randint(vocabulary, (3, 8))
        keep = torch.arange(8) < torch.tensor([[8], [5], [3]])
        want = loss(logits, labels, keep)
        other = torch.where(keep, labels, (labels + 1) % vocabulary)
        same(loss(logits, other, keep), want, "labels of padding must not count in the loss")
        other = torch.where(keep[..., None], logits, torch.randn_like(logits))
        same(loss(other, labels, keep), want, "logits of padding must not count in the loss")
        longer = [torch.cat([t, t[:, :4]], 1) for t in (logits, labels)]
        more = torch.cat([keep, torch.zeros(3, 4, dtype=torch.bool)], 1)
        same(loss(*longer, more), want, "longer padding must not count in the loss")
        logits.requires_grad_()
        (grad,) = torch.autograd.grad(loss(logits, labels, keep), logits)
        assert not grad[~keep].any(), f"logits of padding must get no gradient, they got {grad[~keep].abs().max():.1e}"


def _wide(keep: Tensor, x: Tensor) -> Tensor:
    return keep[..., None] if x.ndim == 3 else keep


PROBES: dict[str, Probe] = {
    "P1": Probe(p1_batch_independence, lambda s: True),
    "P2": Probe(p2_repeatability, lambda s: True),
    "P3": Probe(p3_causality, lambda s: s.causal),
    "P4": Probe(p4_permutation, lambda s: s.ordered is not None),
    "P5": Probe(p5_constant_sequence, lambda s: s.averages),
    "P6": Probe(p6_crowd, lambda s: s.bare and s.averages and not s.causal),
    "P7": Probe(p7_pad_content, lambda s: s.pads or s.memory_pads),
    "P8": Probe(p8_pad_removal, lambda s: s.pads or s.memory_pads),
    "P9": Probe(p9_query_independence, lambda s: s.memory is not None and not s.mixes),
    "P10": Probe(p10_key_order, lambda s: s.memory is not None),
    "P11": Probe(p11_constant_in_training, lambda s: s.bare and s.averages and s.dropout),
    "P12": Probe(p12_receptive_field, lambda s: s.mixes),
    "P13": Probe(p13_decode, lambda s: s.decode is not None),
    "P14": Probe(p14_odd_sizes, lambda s: True),
    "P15": Probe(p15_scale_ladder, lambda s: True),
    "P16": Probe(p16_op_spy, lambda s: s.softmax_axis),
    "P17": Probe(p17_parameters, lambda s: True),
}


def fitting(subject: Subject) -> list[str]:
    """The names of the probes that apply to a subject."""
    return [name for name, probe in PROBES.items() if probe.applies(subject)]


def check(subject: Subject, *names: str) -> None:
    """Run these probes, or all that apply; the first that fails raises AssertionError."""
    for name in names or fitting(subject):
        try:
            PROBES[name].ask(subject)
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from None
