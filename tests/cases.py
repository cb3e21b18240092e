"""The shared case table: one record for each real report of attention users that a plain attention call can express.

A record is (number, kind, name, check). The name says what the record shows; `check(ask)` builds the input, asks, and
compares with the right value. `ask(q, k, v, **options)` is `qkv.attention` on the backend under test. Rows that only
modules, other devices or other families can express are in OTHERS, with where they belong.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import budgets
import engines
import oracles
import qkv

Ask = Callable[..., Any]
INF = float("inf")

OTHERS = {
    3: "modules: the fast path of an encoder in eval",
    21: "modules: MultiheadAttention's flags",
    69: "modules: batch_first",
    70: "modules: heads split by a layer",
    71: "modules: an encoder's trailing padding",
    96: "linear attention: feature maps",
    98: "linear attention: its normaliser",
    101: "modules: train and eval; the function drops when told, which 104 and 105 show",
    123: "torch.compile: a pattern matcher",
}


class Case(NamedTuple):
    """One row of the table."""

    number: int
    kind: str
    name: str
    check: Callable[[Ask], None]
    long: bool = False


CASES: list[Case] = []


def case(
    number: int, kind: str, name: str, long: bool = False
) -> Callable[[Callable[[Ask], None]], Callable[[Ask], None]]:
    """Put a check into the table."""

    def add(check: Callable[[Ask], None]) -> Callable[[Ask], None]:
        CASES.append(Case(number, kind, name, check, long))
        return check

    return add


def uniform(
    queries: int, keys: int, dtype: torch.dtype = torch.float64, batch: int = 1
) -> tuple[Tensor, Tensor, Tensor]:
    """The uniform probe: q = 0, so a row of the output is the mean of the key indices that it sees; 0 if none."""
    v = torch.arange(float(keys), dtype=dtype).reshape(1, 1, keys, 1).expand(batch, 1, keys, 4)
    return torch.zeros(batch, 1, queries, 4, dtype=dtype), normal(batch, 1, keys, 4, dtype=dtype), v


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def qkv_of(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """Three independent tensors of one shape."""
    return [normal(*shape, seed=3 * seed + n, dtype=dtype) for n in range(3)]


def rows(out: Tensor) -> Tensor:
    """The first column of the first head: what a probe reads."""
    return out[0, 0, :, 0]


def close(got: Tensor, want: Tensor | Sequence[float] | float) -> None:
    """Equal but for a few roundings of float64."""
    torch.testing.assert_close(got, torch.as_tensor(want, dtype=got.dtype), rtol=1e-13, atol=1e-13)


class Largest(TorchDispatchMode):
    """Remembers the size of the largest tensor that any operation made."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for item in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(item, Tensor):
                self.elements = max(self.elements, item.untyped_storage().nbytes() // max(item.element_size(), 1))
        return result


# Probes: a call on U(L, S) and the value of every row.

Probe = tuple[int, str, str, tuple[int, int], Callable[[], dict[str, Any]], list[float]]
PROBES: list[Probe] = [
    (20, "mask", "key padding and causal hold together", (5, 5),
     lambda: {"pattern": qkv.causal() & qkv.key_lengths([3])}, [0, 0.5, 1, 1, 1]),
    (25, "mask", "packed sequences are causal each for itself", (4, 4),
     lambda: {"pattern": qkv.causal() & qkv.documents(cu_seqlens=[0, 2, 4])}, [0, 0.5, 2, 2.5]),
    (26, "mask", "packed queries and keys of other lengths are causal inside each sequence", (4, 5),
     lambda: {"pattern": qkv.mask(keep=torch.tensor(
         [[1, 1, 0, 0, 0], [1, 1, 1, 0, 0], [0, 0, 0, 1, 0], [0, 0, 0, 1, 1]]).bool())}, [0.5, 1, 3, 3.5]),
    (28, "mask", "key padding never hides queries", (8, 4), lambda: {"pattern": qkv.key_lengths([3])}, [1.0] * 8),
    (28, "mask", "key padding as a tensor says the same as lengths", (8, 4),
     lambda: {"pattern": qkv.key_padding(keep=torch.tensor([[True, True, True, False]]))}, [1.0] * 8),
    (29, "mask", "documents keep sequences apart", (5, 5),
     lambda: {"pattern": qkv.documents(cu_seqlens=[0, 2, 5])}, [0.5, 0.5, 3, 3, 3]),
    (125, "shape", "a ragged batch is causal inside each sequence", (5, 5),
     lambda: {"pattern": qkv.documents([0, 0, 1, 1, 1]) & qkv.causal()}, [0, 0.5, 2, 2.5, 3]),
    (35, "decode", "one new token sees the whole past", (1, 5), lambda: {"pattern": qkv.causal()}, [2.0]),
    (35, "decode", "top-left alignment is there by name", (1, 5),
     lambda: {"pattern": qkv.causal(align="top_left")}, [0.0]),
    (36, "decode", "several new tokens on a cache align with its end", (2, 5),
     lambda: {"pattern": qkv.causal()}, [1.5, 2.0]),
    (36, "decode", "several new tokens can be aligned with its start", (2, 5),
     lambda: {"pattern": qkv.causal(align="top_left")}, [0.0, 0.5]),
    (38, "decode", "the alignment can be said outright", (2, 5),
     lambda: {"pattern": qkv.causal(align="bottom_right")}, [1.5, 2.0]),
    (38, "decode", "the position of query 0 can be said outright", (2, 5),
     lambda: {"pattern": qkv.causal(), "query_offset": 1}, [0.5, 1.0]),
    (38, "decode", "more queries than keys: the first ones see nothing", (5, 2),
     lambda: {"pattern": qkv.causal()}, [0, 0, 0, 0, 0.5]),
    (39, "mask", "sliding_window(3) is three keys, the query included", (6, 6),
     lambda: {"pattern": qkv.sliding_window(3)}, [0, 0.5, 1, 2, 3, 4]),
    (40, "mask", "window(2) is the query and two keys before it", (6, 6),
     lambda: {"pattern": qkv.window(2)}, [0, 0.5, 1, 2, 3, 4]),
    (40, "mask", "window counts both sides inclusively", (5, 5),
     lambda: {"pattern": qkv.window(1, 2)}, [1, 1.5, 2.5, 3, 3.5]),
    (43, "mask", "window(0) is the diagonal", (4, 4), lambda: {"pattern": qkv.window(0)}, [0, 1, 2, 3]),
    (44, "mask", "a window with an open side is causal", (4, 4),
     lambda: {"pattern": qkv.window(None)}, [0, 0.5, 1, 1.5]),
    (45, "decode", "one new token keeps to the window", (1, 6), lambda: {"pattern": qkv.sliding_window(3)}, [4.0]),
    (48, "mask", "blocks smaller than a tile keep their borders", (8, 8),
     lambda: {"pattern": qkv.blocks(keep=torch.eye(4).bool(), block_size=2)},
     [0.5, 0.5, 2.5, 2.5, 4.5, 4.5, 6.5, 6.5]),
    (50, "shape", "a length that is no multiple of the window", (10, 10),
     lambda: {"pattern": qkv.sliding_window(4)}, [0, 0.5, 1, 1.5, 2.5, 3.5, 4.5, 5.5, 6.5, 7.5]),
    (50, "shape", "a window longer than the sequence", (3, 3), lambda: {"pattern": qkv.window(99)}, [0, 0.5, 1]),
    (91, "numerics", "scale 0 gives the running mean", (3, 3),
     lambda: {"pattern": qkv.causal(), "scale": 0.0}, [0, 0.5, 1]),
    (93, "numerics", "a sink takes its share of the weight", (1, 3),
     lambda: {"sinks": torch.zeros(1).double()}, [0.75]),
    (94, "numerics", "alibi falls with the distance, causal", (3, 3),
     lambda: {"pattern": qkv.causal(), "bias": qkv.alibi(torch.ones(1).double())},
     [0, 1 / (1 + math.exp(-1)), (2 + math.exp(-1)) / (1 + math.exp(-1) + math.exp(-2))]),
    (94, "numerics", "alibi falls to both sides without a pattern", (3, 3),
     lambda: {"bias": qkv.alibi(torch.ones(1).double())},
     [(math.exp(-1) + 2 * math.exp(-2)) / (1 + math.exp(-1) + math.exp(-2)), 1.0,
      (2 + math.exp(-1)) / (1 + math.exp(-1) + math.exp(-2))]),
    (94, "numerics", "alibi knows the position of a decoded token", (1, 3),
     lambda: {"bias": qkv.alibi(torch.ones(1).double())},
     [(2 + math.exp(-1)) / (1 + math.exp(-1) + math.exp(-2))]),
    (1, "mask", "rows of a mask, one of them empty", (3, 3),
     lambda: {"pattern": qkv.mask(keep=torch.tensor([[1, 1, 0], [0, 0, 0], [1, 0, 0]]).bool())}, [0.5, 0, 0]),
]  # fmt: skip


def probe(size: tuple[int, int], options: Callable[[], dict[str, Any]], want: list[float]) -> Callable[[Ask], None]:
    def check(ask: Ask) -> None:
        close(rows(ask(*uniform(*size), **options())), want)

    return check


for _number, _kind, _name, _size, _options, _want in PROBES:
    case(_number, _kind, _name)(probe(_size, _options, _want))


# Fully masked rows, NaN and poison


@case(1, "mask", "an empty row is zero, its gradients too, for a bool and for a -inf mask")
def empty_row(ask: Ask) -> None:
    keep = torch.tensor([[1, 1, 0], [0, 0, 0], [1, 0, 0]]).bool()
    for options in ({"pattern": qkv.mask(keep=keep)}, {"bias": torch.where(keep, 0.0, -INF).double()}):
        q, k, v = (x.requires_grad_() for x in qkv_of(1, 2, 3, 4))
        out = ask(q, k, v, **options)
        assert not out[:, :, 1].any()
        dq, dk, dv = torch.autograd.grad(out.sum(), (q, k, v))
        assert dq.isfinite().all() and dk.isfinite().all() and dv.isfinite().all()
        assert not dq[:, :, 1].any() and not dv[:, :, 2].any()


@case(4, "numerics", "float16 with a head width of 6 stays finite")
def odd_half(ask: Ask) -> None:
    q, k, v = qkv_of(2, 16, 5, 6, dtype=torch.float16)
    out = ask(q, k, v, bias=torch.full((5, 5), 0.5))
    inside(out, budgets.Call(q, k, v, torch.tensor(True), 6**-0.5, bias=torch.full((5, 5), 0.5)))


@case(5, "mask", "a row of the lowest finite number is a bias: the plain mean of v")
def finite_fill(ask: Ask) -> None:
    q, k, v = qkv_of(1, 1, 3, 4, dtype=torch.float32)
    bias = torch.zeros(3, 3)
    bias[1] = torch.finfo(torch.float32).min
    torch.testing.assert_close(ask(q, k, v, bias=bias)[0, 0, 1], v[0, 0].mean(0))


@case(6, "mask", "whole blocks of -inf before the first visible key")
def band_of_inf(ask: Ask) -> None:
    x = torch.ones(1, 1, 640, 4, dtype=torch.float64)
    bias = torch.full((640, 640), -INF).triu(1) + torch.full((640, 640), -INF).tril(-10)
    bias = torch.where(bias == -INF, -INF, 0.0).double()
    close(ask(x, x, x, bias=bias), x)
    v = torch.arange(640.0).double().reshape(1, 1, 640, 1)
    close(ask(x, x, v, bias=bias)[0, 0, 20:, 0], torch.arange(20.0, 640).double() - 4.5)


@case(8, "mask", "NaN in the last key reaches no earlier row under causal")
def causal_poison(ask: Ask) -> None:
    q, k, v = qkv_of(1, 1, 5, 4)
    clean = ask(q, k, v, pattern=qkv.causal())
    k[0, 0, 4], v[0, 0, 4] = math.nan, math.nan
    out = ask(q, k, v, pattern=qkv.causal())
    assert torch.equal(out[:, :, :4], clean[:, :, :4])
    assert not out[:, :, 4].isfinite().any()


@case(9, "numerics", "NaN in a query comes out, in that row only")
def query_poison(ask: Ask) -> None:
    q, k, v = qkv_of(1, 1, 4, 8)
    clean = ask(q, k, v)
    q[0, 0, 0, 0] = math.nan
    out = ask(q, k, v)
    assert not out[0, 0, 0].isfinite().any()
    assert torch.equal(out[:, :, 1:], clean[:, :, 1:])


@case(10, "grad", "an empty row that the loss skips leaves finite gradients")
def skipped_empty_row(ask: Ask) -> None:
    q, k, v = (x.requires_grad_() for x in qkv_of(1, 1, 3, 4))
    out = ask(q, k, v, pattern=qkv.mask(keep=torch.tensor([[1, 1, 1], [0, 0, 0], [1, 1, 0]]).bool()))
    for grad in torch.autograd.grad(out[:, :, [0, 2]].square().sum(), (q, k, v)):
        assert grad.isfinite().all() and grad.any()


@case(11, "grad", "an empty row inside the loss leaves finite gradients")
def used_empty_row(ask: Ask) -> None:
    q, k, v = (x.requires_grad_() for x in qkv_of(1, 1, 3, 4))
    pattern = qkv.causal() - qkv.window(0)
    dq, dk, dv = torch.autograd.grad(ask(q, k, v, pattern=pattern).sum(), (q, k, v))
    assert dq.isfinite().all() and dk.isfinite().all() and dv.isfinite().all() and not dq[0, 0, 0].any()
    close(dv[0, 0, 2], [0.0] * 4)


# Mask meaning, shape, combination


@case(13, "mask", "a float triangle of 0 and 1 is added, and warns")
def added_triangle(ask: Ask) -> None:
    x = normal(1, 1, 6, 4)
    with pytest.warns(UserWarning, match="added"):
        out = ask(x, x, x, bias=torch.ones(6, 6).double().tril())
    truth = oracles.attend(x, x, x, torch.tensor(True), bias=torch.ones(6, 6).tril())
    close(out, truth.out)


@case(14, "shape", "a mask with three axes is refused and the axes are named")
def three_axes(ask: Ask) -> None:
    q, k, v = normal(2, 3, 5, 8), normal(2, 3, 6, 8), normal(2, 3, 6, 8)
    with pytest.raises(ValueError, match="axes"):
        ask(q, k, v, pattern=qkv.mask(keep=torch.ones(2, 5, 6).bool()))


@case(15, "mask", "a batch mask is never read as a head mask")
def batch_or_head(ask: Ask) -> None:
    q, k, v = qkv_of(2, 2, 3, 4)
    keep = torch.ones(2, 3, 3).bool()
    keep[1, :, 2] = False
    with pytest.raises(ValueError, match="axes"):
        ask(q, k, v, pattern=qkv.mask(keep=keep))
    by_batch = ask(q, k, v, pattern=qkv.mask(keep=keep, axes="BLS"))
    close(by_batch, oracles.attend(q, k, v, keep[:, None]).out)
    close(ask(q, k, v, pattern=qkv.mask(keep=keep, axes="HLS")), oracles.attend(q, k, v, keep[None]).out)
    assert not torch.allclose(by_batch, oracles.attend(q, k, v, keep[None]).out)


@case(16, "mask", "key padding has its own argument, also when the batch is as large as the length")
def padding_is_no_mask(ask: Ask) -> None:
    q, k, v = qkv_of(6, 1, 6, 4)
    keep = torch.arange(6) < torch.arange(1, 7)[:, None]
    close(ask(q, k, v, pattern=qkv.key_padding(keep=keep)), oracles.attend(q, k, v, keep[:, None, None]).out)
    with pytest.raises(ValueError):
        ask(*qkv_of(6, 1, 5, 4), pattern=qkv.mask(keep=keep))


@case(18, "mask", "the padding of one sample does not touch another")
def sample_independence(ask: Ask) -> None:
    q, k, v = qkv_of(2, 2, 5, 4)
    before = ask(q, k, v, pattern=qkv.key_lengths([5, 3]))
    close(before, oracles.attend(q, k, v, (torch.arange(5) < torch.tensor([[5], [3]]))[:, None, None]).out)
    q, k, v = (torch.cat([x[:1], x[1:] * 7 + 1]) for x in (q, k, v))
    assert torch.equal(ask(q, k, v, pattern=qkv.key_lengths([5, 3]))[0], before[0])


@case(19, "mask", "a mask and causal hold together")
def mask_and_causal(ask: Ask) -> None:
    keep = torch.tensor([[1, 1, 1, 1], [0, 1, 1, 1], [1, 0, 1, 1], [0, 1, 0, 1]]).bool()
    close(rows(ask(*uniform(4, 4), pattern=qkv.mask(keep=keep) & qkv.causal())), [0, 1, 1, 2])
    out = qkv.scaled_dot_product_attention(*uniform(4, 4), attn_mask=keep & torch.ones(4, 4).bool().tril())
    close(rows(out), [0, 1, 1, 2])


@case(23, "mask", "causal holds with dropout, with weights and for every number of axes")
def causal_whatever_else(ask: Ask) -> None:
    eye = torch.eye(6).double()
    q, k = normal(6, 6), normal(6, 6, seed=1)
    for lead in ((), (2,), (2, 3), (2, 2, 3)):
        tensors = [x.expand(*lead, 6, 6) for x in (q, k, eye)]
        for options in ({}, {"dropout_p": 0.1, "generator": torch.Generator().manual_seed(0)}):
            out, aux = ask(*tensors, pattern=qkv.causal(), return_aux=qkv.AuxRequest(weights=True), **options)
            assert not out.triu(1).any() and not aux.weights.triu(1).any() and out.tril().any()


@case(24, "mask", "causal alone is causal at every length")
def causal_lengths(ask: Ask) -> None:
    for length in (4, 1, 3, 9, 2):
        close(rows(ask(*uniform(length, length), pattern=qkv.causal())), torch.arange(length).double() / 2)


@case(30, "mask", "padding tokens with a document of their own leave real rows alone")
def pad_documents(ask: Ask) -> None:
    out = rows(ask(*uniform(5, 5), pattern=qkv.documents([0, 0, 0, 1, 1]) & qkv.key_lengths([3])))
    close(out, [1, 1, 1, 0, 0])


@case(31, "mask", "the content of a padding token changes no real row")
def pad_content(ask: Ask) -> None:
    q, k, v = qkv_of(1, 2, 4, 4)
    pattern = qkv.key_padding(keep=torch.tensor([[True, True, False, True]]))
    before = ask(q, k, v, pattern=pattern)
    k[:, :, 2], v[:, :, 2] = 1e30, -1e30
    assert torch.equal(ask(q, k, v, pattern=pattern), before)


@case(33, "mask", "a block layout takes key padding, with gradients")
def blocks_and_padding(ask: Ask) -> None:
    layout = torch.tensor([[1, 0, 0], [1, 1, 0], [0, 1, 1]]).bool()
    allowed = layout.repeat_interleave(2, 0).repeat_interleave(2, 1)
    allowed = allowed & (torch.arange(6) < torch.tensor([[6], [3]]))[:, None, None]
    pattern = qkv.blocks(keep=layout, block_size=2) & qkv.key_lengths([6, 3])
    same_gradients(ask, qkv_of(2, 1, 6, 4), allowed, pattern=pattern)


@case(34, "mask", "a hidden key weighs exactly nothing, however low the visible logit")
def no_weak_fill(ask: Ask) -> None:
    q, k = torch.tensor([[[[-15258.0]]]]), torch.tensor([[[[1.0], [0.0]]]])
    v = torch.tensor([[[[3.0], [5.0]]]])
    keep = torch.tensor([[True, False]])
    out, aux = ask(q, k, v, scale=1.0, pattern=qkv.mask(keep=keep), return_aux=qkv.AuxRequest(weights=True))
    assert out.item() == 3 and aux.weights.flatten().tolist() == [1, 0]


# Windows and lengths


@case(41, "mask", "a window is by token, also across the borders of tiles")
def window_borders(ask: Ask) -> None:
    q, k, v = uniform(200, 200)
    first = (torch.arange(200) - 3).clamp_min(0)
    close(rows(ask(q, k, v, pattern=qkv.sliding_window(4))), (first + torch.arange(200)).double() / 2)


@case(43, "mask", "sliding_window(0) is refused")
def no_zero_window(ask: Ask) -> None:
    with pytest.raises(qkv.errors.ValueOutOfRange, match="size"):
        ask(*uniform(4, 4), pattern=qkv.sliding_window(0))


@case(46, "memory", "a window never makes anything of size L x L")
def window_memory(ask: Ask) -> None:
    for size in (16, 256):
        q, k, v = qkv_of(1, 1, 2048, 16, dtype=torch.float32)
        options = {"pattern": qkv.sliding_window(size)}
        assert 0 < largest(ask, q, k, v, **options) < 2048 * 2048 // 4
    out = ask(q, k, v, **options)
    allowed = oracles.dense(oracles.sliding_window(256), (1, 1, 2048, 2048))
    inside(out, budgets.Call(q, k, v, allowed, 16**-0.5))


@case(49, "shape", "one pattern object serves every length")
def any_length(ask: Ask) -> None:
    pattern = qkv.causal() & qkv.block_local(4)
    for length in (8, 6, 13):
        index = torch.arange(length)
        close(rows(ask(*uniform(length, length), pattern=pattern)), (index // 4 * 4 + index).double() / 2)


@case(50, "shape", "lengths around the window and primes")
def lengths_around_window(ask: Ask) -> None:
    for length in (1, 3, 4, 5, 7, 31, 67):
        first = (torch.arange(length) - 3).clamp_min(0)
        want = (first + torch.arange(length)).double() / 2
        close(rows(ask(*uniform(length, length), pattern=qkv.sliding_window(4))), want)


@case(51, "shape", "lengths and head widths that no tile divides")
def odd_lengths(ask: Ask) -> None:
    for length, width in ((127, 31), (129, 33), (257, 3)):
        q, k, v = qkv_of(1, 1, length, width)
        allowed = torch.ones(length, length).bool().tril()
        inside(ask(q, k, v, pattern=qkv.causal()), budgets.Call(q, k, v, allowed, width**-0.5))
    index = torch.arange(4250)
    want = ((index - 31).clamp_min(0) + index).double() / 2
    close(rows(ask(*uniform(4250, 4250), pattern=qkv.sliding_window(32))), want)


@case(53, "decode", "left padding gives what each prompt gives alone")
def left_padding(ask: Ask) -> None:
    q, k, v = qkv_of(2, 2, 5, 4)
    keep = torch.tensor([[False, False, True, True, True], [True] * 5])
    out = ask(q, k, v, pattern=qkv.causal() & qkv.key_padding(keep=keep))
    close(out[:1, :, 2:], ask(q[:1, :, 2:], k[:1, :, 2:], v[:1, :, 2:], pattern=qkv.causal()))
    close(out[1:], ask(q[1:], k[1:], v[1:], pattern=qkv.causal()))
    step = ask(q[:, :, 4:], k, v, pattern=qkv.causal() & qkv.key_padding(keep=keep))
    close(step, out[:, :, 4:])


@case(54, "mask", "a bool mask and a -inf bias of the same meaning agree")
def bool_or_bias(ask: Ask) -> None:
    q, k, v = qkv_of(1, 2, 5, 4)
    keep = normal(5, 5, seed=9) > 0
    close(ask(q, k, v, pattern=qkv.mask(keep=keep)), ask(q, k, v, bias=torch.where(keep, 0.0, -INF).double()))


# Shapes, heads, layouts, errors


@case(55, "shape", "unequal heads are refused with both numbers")
def unequal_heads(ask: Ask) -> None:
    with pytest.raises(qkv.errors.ShapeError, match=r"(?s)heads.*3.*4|3.*heads.*4"):
        ask(normal(2, 3, 5, 7), normal(2, 4, 6, 7), normal(2, 4, 6, 8))


@case(56, "shape", "key heads that do not divide the query heads are refused")
def indivisible_groups(ask: Ask) -> None:
    for heads in (3, 33):
        with pytest.raises(qkv.errors.ShapeError, match=f"{heads}"):
            ask(normal(1, heads, 2, 4), normal(1, 2, 2, 4), normal(1, 2, 2, 4))


@case(58, "shape", "keys repeated along the wrong axis are refused")
def wrong_repeat(ask: Ask) -> None:
    q, v = normal(2, 5, 4, 8), normal(2, 5, 2, 8)
    k = normal(2, 5, 2, 8).repeat_interleave(2, 1)
    with pytest.raises(qkv.errors.ShapeError, match="10"):
        ask(q, k, v, layout="BLHD")


@case(59, "shape", "keys and values of other lengths are refused, whichever is longer")
def unequal_lengths(ask: Ask) -> None:
    for keys, values in ((6, 7), (7, 6)):
        with pytest.raises(qkv.errors.ShapeError, match=rf"(?s){keys}.*{values}"):
            ask(normal(1, 1, 5, 8), normal(1, 1, keys, 8), normal(1, 1, values, 8))


@case(60, "shape", "sizes of zero work; a head width of zero is refused")
def zero_sizes(ask: Ask) -> None:
    for batch, queries, keys in ((2, 0, 3), (0, 2, 3), (2, 3, 0), (0, 0, 0)):
        q, k, v = normal(batch, 2, queries, 4), normal(batch, 2, keys, 4), normal(batch, 2, keys, 5)
        for x in (q, k, v):
            x.requires_grad_()
        out, aux = ask(q, k, v, return_aux=qkv.AuxRequest(lse=True))
        assert out.shape == (batch, 2, queries, 5) and not out.any()
        assert aux.lse.shape == (batch, 2, queries) and (aux.lse == -INF).all()
        for x, grad in zip((q, k, v), torch.autograd.grad(out.sum(), (q, k, v)), strict=True):
            assert grad.shape == x.shape and not grad.any()
    with pytest.raises(qkv.errors.ShapeError):
        ask(normal(1, 1, 2, 0), normal(1, 1, 2, 0), normal(1, 1, 2, 4))


@case(61, "grad", "a packed sequence without queries: its keys get no gradient")
def sequence_without_queries(ask: Ask) -> None:
    keep = torch.tensor([[False, False, True, True, True]]).expand(3, 5)
    q, k, v = normal(1, 1, 3, 4), normal(1, 1, 5, 4), normal(1, 1, 5, 4)
    same_gradients(ask, [q, k, v], keep, pattern=qkv.mask(keep=keep))
    k.requires_grad_()
    assert not torch.autograd.grad(ask(q, k, v, pattern=qkv.mask(keep=keep)).sum(), k)[0][0, 0, :2].any()


@case(63, "shape", "the output's last axis is that of v")
def value_width(ask: Ask) -> None:
    assert ask(normal(2, 3, 16, 32), normal(2, 3, 16, 32), normal(2, 3, 16, 24)).shape == (2, 3, 16, 24)


@case(64, "grad", "the gradient of v has the shape of v")
def value_gradient(ask: Ask) -> None:
    same_gradients(ask, [normal(1, 2, 5, 8), normal(1, 2, 5, 8), normal(1, 2, 5, 16)], tril(5), pattern=qkv.causal())


@case(65, "shape", "a head width of 31 keeps its own scale")
def odd_width(ask: Ask) -> None:
    q, k, v = qkv_of(1, 2, 9, 31)
    close(ask(q, k, v), oracles.attend(q, k, v, torch.tensor(True)).out)


@case(66, "shape", "a bias of odd length works")
def odd_bias(ask: Ask) -> None:
    q, k, v = qkv_of(2, 2, 43, 8)
    bias = normal(2, 2, 43, 43, seed=5)
    close(ask(q, k, v, bias=bias), oracles.attend(q, k, v, torch.tensor(True), bias=bias).out)


@case(68, "shape", "the order of axes is said, and both orders agree")
def layouts(ask: Ask) -> None:
    q, k, v = qkv_of(2, 3, 7, 4)
    swapped = ask(*(x.transpose(1, 2) for x in (q, k, v)), pattern=qkv.causal(), layout="BLHD")
    close(swapped.transpose(1, 2), ask(q, k, v, pattern=qkv.causal()))
    with pytest.raises(ValueError, match="layout"):
        ask(q, k, v, layout="BLDH")


@case(73, "shape", "strides of axes of size 1 do not matter")
def size_one_strides(ask: Ask) -> None:
    x = torch.tensor([[0.0, 1.0]]).double().t().contiguous().reshape(1, 1, 2, 1)
    odd = x.as_strided((1, 1, 2, 1), (7, 3, 1, 5))
    close(ask(odd, odd, odd), oracles.attend(x, x, x, torch.tensor(True)).out)


# Strides


@case(74, "numerics", "a last axis that is not dense")
def strided_last_axis(ask: Ask) -> None:
    transposed = [x.transpose(-1, -2) for x in qkv_of(1, 2, 64, 40)]
    assert torch.equal(ask(*transposed), ask(*(x.contiguous() for x in transposed)))


@case(75, "numerics", "permuted inputs")
def permuted(ask: Ask) -> None:
    views = [x.permute(0, 2, 1, 3) for x in qkv_of(84, 3, 3, 64)]
    assert torch.equal(ask(*views), ask(*(x.contiguous() for x in views)))


@case(76, "numerics", "expanded keys in bfloat16 at lengths around 32")
def expanded_keys(ask: Ask) -> None:
    for keys in (31, 32, 33):
        q = normal(1, 8, 5, 64, dtype=torch.bfloat16)
        k, v = (normal(1, 1, keys, 64, seed=n, dtype=torch.bfloat16).expand(1, 8, keys, 64) for n in (1, 2))
        pattern = qkv.mask(keep=normal(5, keys, seed=3) > -1)
        assert torch.equal(ask(q, k, v, pattern=pattern), ask(q, k.contiguous(), v.contiguous(), pattern=pattern))


@case(78, "grad", "a gradient of the output that is not contiguous")
def strided_gradient(ask: Ask) -> None:
    q, k, v = (x.requires_grad_() for x in qkv_of(2, 3, 5, 4))
    g = normal(2, 5, 3, 4, seed=8).transpose(1, 2)
    grads = [torch.autograd.grad(ask(q, k, v, pattern=qkv.causal()), (q, k, v), x) for x in (g, g.contiguous())]
    for strided, dense in zip(*grads, strict=True):
        close(strided, dense)


@case(79, "shape", "slices of one fused projection")
def fused_slices(ask: Ask) -> None:
    fused = normal(2, 5, 3, 2, 4)
    views = [x.transpose(1, 2) for x in fused.unbind(2)]
    close(ask(*views), oracles.attend(*views, torch.tensor(True)).out)


# Numerics, types, sizes


@case(80, "numerics", "float16 scores beyond 65504 stay finite")
def half_overflow(ask: Ask) -> None:
    q = torch.full((1, 1, 2, 64), 200.0).half()
    v = torch.tensor([1.0, 3.0]).half().reshape(1, 1, 2, 1)
    assert ask(q, q, v).flatten().tolist() == [2, 2]


@case(81, "dtype", "a mask in float16 needs no fill value from the user")
def half_mask(ask: Ask) -> None:
    q, k, v = uniform(4, 4, torch.float16)
    assert rows(ask(q, k, v, pattern=qkv.causal())).tolist() == [0, 0.5, 1, 1.5]


@case(83, "dtype", "under autocast a float32 bias stays legal and the result has the autocast type")
def autocast_bias(ask: Ask) -> None:
    q, k, v = qkv_of(1, 2, 6, 4, dtype=torch.float32)
    bias = normal(6, 6, seed=4, dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = ask(q, k, v, bias=bias)
    assert out.dtype == torch.bfloat16
    call = budgets.Call(q.bfloat16(), k.bfloat16(), v.bfloat16(), torch.tensor(True), 0.5, bias=bias)
    inside(out, call, cast=casts(ask, out.dtype))


@case(84, "dtype", "mixed types are refused with their names")
def mixed_types(ask: Ask) -> None:
    q, k, v = qkv_of(1, 1, 3, 4, dtype=torch.float32)
    with pytest.raises(qkv.errors.DTypeError, match=r"(?s)float32.*float16"):
        ask(q, k.half(), v.half())


@case(85, "numerics", "more than 2^32 pairs: a late row is right", long=True)
def many_pairs(ask: Ask) -> None:
    length = 65537
    q, k, v = qkv_of(1, 1, length, 8, dtype=torch.float32)
    pattern = qkv.sliding_window(64) | qkv.prefix(1)
    out = ask(q, k, v, pattern=pattern)
    late = slice(length - 3, length)
    allowed = oracles.dense(oracles.either(oracles.sliding_window(64), oracles.prefix(1)), (1, 1, 3, length))
    inside(out[:, :, late], budgets.Call(q[:, :, late], k, v, allowed, 8**-0.5))


@case(86, "grad", "50 000 tokens with a window have finite gradients", long=True)
def long_gradient(ask: Ask) -> None:
    q, k, v = (x.requires_grad_() for x in qkv_of(1, 1, 49999, 8, dtype=torch.float32))
    for grad in torch.autograd.grad(ask(q, k, v, pattern=qkv.sliding_window(64)).sum(), (q, k, v)):
        assert grad.isfinite().all()


@case(88, "decode", "one query against key counts that no tile divides")
def decode_lengths(ask: Ask) -> None:
    for keys in (38, 39, 70):
        q, k, v = normal(1, 2, 1, 8), normal(1, 2, keys, 8, seed=1), normal(1, 2, keys, 8, seed=2)
        close(ask(q, k, v, pattern=qkv.causal()), oracles.attend(q, k, v, torch.tensor(True)).out)


@case(89, "grad", "strongly negative scores leave finite gradients at every residue of the length")
def negative_scores(ask: Ask) -> None:
    for length in (64, 65, 127, 129, 192, 321):
        q = torch.full((1, 1, length, 4), 10.0)
        k, v = (
            -q + normal(1, 1, length, 4, seed=1, dtype=torch.float32),
            normal(1, 1, length, 4, seed=2, dtype=torch.float32),
        )
        pattern = qkv.mask(keep=torch.ones(length, length).bool())
        same_gradients(ask, [q, k, v], torch.ones(length, length).bool(), pattern=pattern)


@case(90, "numerics", "the plan names the backend that runs, and naming it changes no bit")
def pinned_backend(ask: Ask) -> None:
    q, k, v = normal(1, 8, 3, 8), normal(1, 2, 9, 8, seed=1), normal(1, 2, 9, 8, seed=2)
    chosen = qkv.plan(q, k, v, pattern=qkv.causal()).backend
    out = qkv.attention(q, k, v, pattern=qkv.causal())
    assert torch.equal(out, qkv.attention(q, k, v, pattern=qkv.causal(), backend=chosen))
    close(out, ask(q, k, v, pattern=qkv.causal()))


@case(91, "numerics", "a negative scale is legal under causal")
def negative_scale(ask: Ask) -> None:
    q, k, v = qkv_of(1, 2, 6, 4)
    close(ask(q, k, v, pattern=qkv.causal(), scale=-1.0), oracles.attend(q, k, v, tril(6), scale=-1.0).out)


@case(93, "numerics", "sinks without a visible key: output 0, log-sum-exp the sink")
def sink_alone(ask: Ask) -> None:
    sinks = torch.tensor([1.5, -2.0]).double()
    q, k, v = qkv_of(1, 2, 3, 4)
    keep = torch.tensor([[True, True, True], [False] * 3, [True, False, False]])
    out, aux = ask(q, k, v, sinks=sinks, pattern=qkv.mask(keep=keep), return_aux=qkv.AuxRequest(lse=True))
    assert not out[:, :, 1].any()
    close(aux.lse[0, :, 1], sinks)
    close(out, oracles.attend(q, k, v, keep, sinks=sinks).out)


@case(93, "numerics", "a sink above every score takes part in the running maximum")
def high_sink(ask: Ask) -> None:
    q, k, v = uniform(1, 3, torch.float32)
    out, aux = ask(q, k, v, sinks=torch.tensor([200.0]), return_aux=qkv.AuxRequest(lse=True))
    assert not out.any() and aux.lse.item() == 200


@case(95, "numerics", "the log-sum-exp of five equal keys is ln 5, and halves merge to the whole")
def log_sum_exp(ask: Ask) -> None:
    request = qkv.AuxRequest(lse=True)
    q, k, v = uniform(1, 5)
    whole, aux = ask(q, k, v, return_aux=request)
    close(aux.lse.flatten(), [math.log(5)])
    parts = [ask(q, k[:, :, s], v[:, :, s], return_aux=request) for s in (slice(0, 2), slice(2, 5))]
    out, lse = qkv.merge([out for out, _ in parts], [aux.lse for _, aux in parts])
    close(out, whole)
    close(lse, aux.lse)


@case(99, "mask", "left padding holds for a batch of one")
def one_padded_row(ask: Ask) -> None:
    q, k, v = qkv_of(1, 1, 5, 4)
    out = ask(q, k, v, pattern=qkv.key_padding(keep=torch.tensor([[False, False, True, True, True]])))
    close(out[:, :, 2:], ask(q[:, :, 2:], k[:, :, 2:], v[:, :, 2:]))


@case(100, "numerics", "16-bit inputs lose the rounding of the output, and on units of 16 bits that of the weights")
def narrow_types(ask: Ask) -> None:
    for dtype in (torch.bfloat16, torch.float16):
        q, k, v = qkv_of(1, 1, 257, 64, dtype=dtype)
        out = ask(q, k, v)
        inside(out, budgets.Call(q, k, v, torch.tensor(True), 0.125), cast=casts(ask, dtype))


# Dropout and weights


@case(103, "dropout", "a probability outside [0, 1) is refused")
def bad_probability(ask: Ask) -> None:
    for p in (-1.0, 1.0, 1.5, math.nan, 1 - 2.0**-20):
        with pytest.raises(qkv.errors.ValueOutOfRange, match="dropout_p"):
            ask(*uniform(2, 2), dropout_p=p)


@case(104, "dropout", "dropout works with every pattern and keeps the mean")
def dropout_mean(ask: Ask) -> None:
    q, k, v = qkv_of(400, 1, 8, 4)
    q, k, v = (x[:1].expand(400, 1, 8, 4) for x in (q, k, v))
    out = ask(q, k, v, pattern=qkv.sliding_window(3), dropout_p=0.25, generator=torch.Generator().manual_seed(0))
    truth = oracles.attend(q[:1], k[:1], v[:1], oracles.dense(oracles.sliding_window(3), (1, 1, 8, 8)))
    variance = (1 / 0.75 - 1) * truth.weights.square() @ v[:1].square()  # independent weights, 400 samples
    assert ((out.mean(0) - truth.out[0]).abs() <= 5 * (variance[0] / 400).sqrt() + 1e-12).all()
    assert not torch.equal(out[0], out[1])


@case(105, "grad", "the backward pass scales as the forward pass does")
def dropout_gradient(ask: Ask) -> None:
    inputs = [x.requires_grad_() for x in qkv_of(1, 1, 3, 2)]

    def call(*tensors: Tensor) -> Tensor:
        return ask(*tensors, dropout_p=0.4, generator=torch.Generator().manual_seed(3))

    assert torch.autograd.gradcheck(call, inputs)


@case(106, "weights", "weights come by head, their mean only when asked")
def weights_by_head(ask: Ask) -> None:
    q = torch.zeros(1, 2, 1, 2).double()
    keep = torch.tensor([[[[True, False]], [[False, True]]]])
    options = {"pattern": qkv.mask(keep=keep)}
    weights = [ask(q, torch.ones(1, 2, 2, 2).double(), torch.ones(1, 2, 2, 2).double(), **options,
                   return_aux=qkv.AuxRequest(weights=which))[1].weights for which in (True, "mean")]  # fmt: skip
    assert weights[0].tolist() == [[[[1, 0]], [[0, 1]]]]
    assert weights[1].tolist() == [[[0.5, 0.5]]]


@case(106, "weights", "among equal weights the smaller key comes first")
def equal_weights(ask: Ask) -> None:
    _, aux = ask(*uniform(2, 9), return_aux=qkv.AuxRequest(top_k=3))
    assert aux.top_k.indices.tolist() == [[[[0, 1, 2], [0, 1, 2]]]]
    close(aux.top_k.values, [[[[1 / 9] * 3] * 2]])


@case(108, "memory", "weights are neither returned nor built unless asked for")
def no_weights(ask: Ask) -> None:
    q, k, v = qkv_of(1, 1, 1024, 8, dtype=torch.float32)
    assert isinstance(ask(q, k, v), Tensor)
    assert 0 < largest(ask, q, k, v) < 1024 * 1024
    _, aux = ask(q, k, v, return_aux=qkv.AuxRequest(lse=True))
    assert aux.weights is None and aux.entropy is None and aux.max_scores is None and aux.top_k is None
    assert largest(ask, q, k, v, return_aux=qkv.AuxRequest(weights=[3])) < 1024 * 1024


# Gradients and determinism


@case(109, "grad", "second derivatives exist")
def second_derivative(ask: Ask) -> None:
    inputs = [x.requires_grad_() for x in qkv_of(1, 1, 3, 2)]
    assert torch.autograd.gradgradcheck(lambda *x: ask(*x, pattern=qkv.causal()), inputs)


@case(110, "grad", "forward-mode derivatives agree with differences")
def forward_mode(ask: Ask) -> None:
    q, k, v = qkv_of(1, 2, 4, 3)
    t = normal(1, 2, 4, 3, seed=7)
    _, tangent = torch.func.jvp(lambda x: ask(x, k, v, pattern=qkv.causal()), (q,), (t,))
    step = 1e-5
    difference = (ask(q + step * t, k, v, pattern=qkv.causal()) - ask(q - step * t, k, v, pattern=qkv.causal())) / (
        2 * step
    )
    torch.testing.assert_close(tangent, difference, rtol=1e-8, atol=1e-8)


@case(111, "grad", "a bias alone can want a gradient")
def only_bias(ask: Ask) -> None:
    q, k, v = qkv_of(1, 2, 3, 4)
    bias = normal(1, 1, 3, 3, seed=6).requires_grad_()
    (got,) = torch.autograd.grad(ask(q, k, v, bias=bias).square().sum(), bias)
    (want,) = torch.autograd.grad(oracles.attend(q, k, v, torch.tensor(True), bias=bias).out.square().sum(), bias)
    close(got, want)


@case(113, "grad", "a table of relative biases learns")
def table_gradient(ask: Ask) -> None:
    q, k, v = qkv_of(2, 2, 5, 4)
    table = normal(2, 5, seed=6).requires_grad_()
    (got,) = torch.autograd.grad(ask(q, k, v, bias=qkv.relative(table)).square().sum(), table)
    dense = oracles.relative(table, (2, 2, 5, 5))
    (want,) = torch.autograd.grad(oracles.attend(q, k, v, torch.tensor(True), bias=dense).out.square().sum(), table)
    close(got, want)


@case(114, "grad", "257 tokens, causal, a distance bias and a gradient of the log-sum-exp")
def lse_gradient(ask: Ask) -> None:
    slopes = torch.tensor([0.1]).double()
    sizes = (1, 1, 257, 257)
    tensors = [x.requires_grad_() for x in qkv_of(1, 1, 257, 8)]
    out, aux = ask(*tensors, pattern=qkv.causal(), bias=qkv.alibi(slopes), return_aux=qkv.AuxRequest(lse=True))
    truth = oracles.attend(*tensors, tril(257), bias=oracles.alibi(slopes, sizes))
    grads = [torch.autograd.grad(a.sum() + (b * b).sum(), tensors) for a, b in ((out, aux.lse), (truth.out, truth.lse))]
    for got, want in zip(*grads, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-11, atol=1e-11)


@case(115, "grad", "the same call gives the same bits, backward too")
def repeatable(ask: Ask) -> None:
    tensors = [x.requires_grad_() for x in qkv_of(2, 2, 130, 16, dtype=torch.float32)]
    runs = []
    for _ in range(2):
        out = ask(*tensors, pattern=qkv.causal())
        runs.append((out, *torch.autograd.grad(out.square().sum(), tensors)))
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


@case(116, "grad", "vmap works, and gives gradients by sample")
def by_sample(ask: Ask) -> None:
    q, k, v = qkv_of(3, 2, 4, 5)

    def loss(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return ask(q[None], k[None], v[None], pattern=qkv.causal()).square().sum()

    got = torch.func.vmap(torch.func.grad(loss))(q, k, v)
    for n in range(3):
        close(got[n], torch.func.grad(loss)(q[n], k[n], v[n]))
    close(torch.func.vmap(lambda *x: ask(*(y[None] for y in x)))(q, k, v)[:, 0], ask(q, k, v))


@case(124, "grad", "training works on a CPU")
def cpu_training(ask: Ask) -> None:
    same_gradients(ask, qkv_of(1, 1, 9, 4), tril(9), pattern=qkv.causal())


# Memory: what a plan says, and what is made


@case(118, "memory", "96 000 tokens are planned without building anything of their square")
def planned_length(ask: Ask) -> None:
    q = torch.empty(1, 1, 96000, 64, device="meta")
    with Largest() as seen:
        plan = qkv.plan(q, q, q, pattern=qkv.causal() & qkv.window(255))
    assert plan.pairs == 256 * 96000 - 256 * 255 // 2
    assert seen.elements < 96000 * 1000 and plan.peak_bytes < 96000 * 96000


@case(119, "memory", "a wide grouped head is planned aloud, and never in quadratic memory")
def planned_wide_head(ask: Ask) -> None:
    q, k = torch.empty(1, 8, 8192, 512, device="meta"), torch.empty(1, 2, 8192, 512, device="meta")
    plan = qkv.plan(q, k, k, pattern=qkv.causal())
    assert plan.backend in str(plan) and plan.peak_bytes < 8 * 8192 * 8192
    for name, reasons in plan.refusals.items():
        assert name in str(plan) and reasons


@case(120, "memory", "a mask that all heads share is not copied for each")
def shared_mask(ask: Ask) -> None:
    q, k, v = qkv_of(1, 16, 512, 4, dtype=torch.float32)
    bias = normal(1, 1, 512, 512, seed=4, dtype=torch.float32)
    assert 0 < largest(ask, q, k, v, bias=bias) < 16 * 512 * 512 // 2


@case(121, "memory", "causal with padding makes no mask tensor")
def no_mask_tensor(ask: Ask) -> None:
    q, k, v = qkv_of(2, 1, 2048, 4, dtype=torch.float32)
    assert 0 < largest(ask, q, k, v, pattern=qkv.causal() & qkv.key_lengths([2048, 1500])) < 2048 * 2048 // 2


# What checks share


def tril(length: int) -> Tensor:
    return torch.ones(length, length, dtype=torch.bool).tril()


def largest(ask: Ask, *tensors: Tensor, **options: Any) -> int:
    """The elements of the largest tensor that a call makes; skips where the backend is dense by design."""
    if getattr(ask, "name", "") not in {"blockwise", "cpu"}:
        pytest.skip("only blockwise and cpu promise memory in proportion to the pattern")
    with Largest() as seen:
        ask(*tensors, **options)
    return seen.elements


def casts(ask: Ask, dtype: torch.dtype) -> bool:
    """Whether who answers rounds the weights to this type before they meet the values."""
    return getattr(ask, "name", "") == "cpu" and engines.casts(dtype)


def inside(out: Tensor, call: budgets.Call, *, cast: bool = False) -> None:
    """The output is within the rounding bound of the truth."""
    truth = call.truth()
    bound = budgets.forward(call, truth, out.dtype, cast=cast)
    error = (out.double() - truth.out).abs()
    assert bound.small and (error <= bound.out).all(), f"largest error / bound {(error / bound.out).max():.3g}"


def same_gradients(ask: Ask, tensors: list[Tensor], allowed: Tensor, **options: Any) -> None:
    """Output and gradients of q, k and v are within the rounding bounds of the truth."""
    leaves = [x.detach().clone().requires_grad_() for x in tensors]
    out = ask(*leaves, **options)
    cast = casts(ask, out.dtype)
    inside(out.detach(), budgets.Call(*tensors, allowed, tensors[0].shape[-1] ** -0.5), cast=cast)
    g = normal(*out.shape, seed=11, dtype=out.dtype)
    got = torch.autograd.grad(out, leaves, g)
    exact = [x.detach().double().requires_grad_() for x in tensors]
    call = budgets.Call(*exact, allowed, tensors[0].shape[-1] ** -0.5)
    truth = call.truth()
    want = torch.autograd.grad(truth.out, exact, g.double())
    bounds, _ = budgets.backward(call, truth, out.dtype, g, cast=cast)
    for name, a, b in zip("qkv", got, want, strict=True):
        assert a.shape == b.shape and ((a.double() - b).abs() <= bounds[name]).all(), f"gradient of {name}"
