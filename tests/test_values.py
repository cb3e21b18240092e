"""Values that checks ask for: what torch's own reductions say, without torch's threads."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from qkv import values
from qkv.values import all_equal, beyond, bounds, greatest

TYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
KINDS = {
    "normal": lambda n: torch.randn(n, generator=torch.Generator().manual_seed(n)),
    "positive": lambda n: torch.rand(n, generator=torch.Generator().manual_seed(n)) + 0.1,
    "negative": lambda n: -torch.rand(n, generator=torch.Generator().manual_seed(n)) - 0.1,
    "zeros and ones": lambda n: torch.arange(n) % 2 * 1.0,
    "zeros of both signs": lambda n: torch.tensor([0.0, -0.0]).repeat(n)[:n],
    "all hidden": lambda n: torch.full((n,), -math.inf),
}
ODD = (None, math.nan, -math.nan, math.inf, -math.inf, 1.0, -0.0)


def views(x: Tensor) -> list[Tensor]:
    found = [x, x[::2], x[None].expand(3, -1)]
    return [*found, x.reshape(-1, 5).mT, x.reshape(5, -1)[:, :-1]] if x.numel() % 5 == 0 and x.numel() > 5 else found


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("chunk", [3, 1 << 18])
def test_they_are_those_of_torch(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, kind: str, chunk: int) -> None:
    monkeypatch.setattr(values, "CHUNK", chunk)
    for size in (1, 2, 40):
        for odd in ODD:
            x = KINDS[kind](size).to(dtype)
            if odd is not None:
                x[size // 3] = torch.tensor(math.nan).copysign(torch.tensor(odd)) if odd != odd else odd
            for view in views(x):
                least, most = (bound.item() for bound in view.aminmax())
                found = bounds(view)
                assert greatest(view) == found[1] or math.isnan(greatest(view)) == math.isnan(found[1]) is True
                assert found == (least, most) or all(map(math.isnan, (*found, least, most)))
                assert all_equal(view, 0.0, 1.0) == bool(((view == 0) | (view == 1)).all())
                assert all_equal(view, -math.inf) == bool((view == -math.inf).all())
                if dtype.itemsize > 2:
                    assert beyond(view, 0.5) == bool(((view.abs() > 0.5) & view.isfinite()).any())


def test_nothing_is_all_of_it() -> None:
    empty = torch.zeros(0, 3)
    assert all_equal(empty, 1.0) and not beyond(empty, 0.0)


def test_a_graph_is_left_alone() -> None:
    x = torch.ones(3, requires_grad=True)
    assert bounds(x) == (1.0, 1.0) and all_equal(x, 1.0) and beyond(x, 0.5)


def test_broadcast_axes_are_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many there are."""
    seen = []
    pieces = values._pieces
    monkeypatch.setattr(values, "_pieces", lambda array: seen.append(array.size) or pieces(array))
    assert bounds(torch.arange(4.0)[:, None, None].expand(4, 10**9, 10**9)) == (0.0, 3.0)
    assert seen == [4]
