"""Small attention calls for tests of argument checks, made on concrete, meta and fake tensors."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from qkv.errors import QkvError
from qkv.question import ask

PLACES = ("cpu", "meta", "fake")
NAN, INF = float("nan"), float("inf")
Q, K, V = (2, 4, 5, 8), (2, 2, 6, 8), (2, 2, 6, 3)  # B = 2, H = 4, G = 2, L = 5, S = 6, D = 8, V = 3


@contextmanager
def tensors_on(place: str) -> Iterator[None]:
    """Where tensors are made: "cpu" with numbers, "meta" without, "fake" as torch.compile sees them."""
    fake = FakeTensorMode() if place == "fake" else nullcontext()
    with fake, torch.device("meta" if place == "meta" else "cpu"):
        yield


def call(q=Q, k=K, v=V, dtype=torch.float32, **options):
    """One call of the sizes above, on the default device, with what is given changed."""
    made = [t if not isinstance(t, tuple) else torch.zeros(t, dtype=dtype) for t in (q, k, v)]
    return ask(*made, **options)


def refused(error, *parts, **options):
    """The text of the one error that a call gives: of that class exactly, in three parts, with all `parts` in it."""
    with pytest.raises(QkvError) as caught:
        call(**options)
    assert type(caught.value) is error, caught.value
    text = str(caught.value)
    assert text.count("; ") == 2, text
    for part in parts:
        assert part in text, f"{part!r} is not in {text!r}"
    return text
