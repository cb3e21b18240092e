"""Every record of the case table on every backend that accepts it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import cases
import engines
import qkv

# What torch's own kernels do not promise.
SDPA_EXCEPTIONS = {
    8: "leaks NaN of hidden keys",
    9: "turns a NaN query into zeros",
    31: "adds hidden content times zero",
    76: "its own kernels choose by stride",
    74: "its own kernels choose by stride",
    75: "its own kernels choose by stride",
    100: "rounds the weights to the type of the inputs",
    4: "rounds the weights to the type of the inputs",
    83: "rounds the weights to the type of the inputs",
    109: "has no second derivative",
    110: "has no forward derivative",
    116: "has no batching rule",
}


class Asker:
    """`qkv.attention` on one backend; skips what that backend refuses, with its reasons."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Any:
        try:
            return qkv.attention(q, k, v, backend=self.name, **options)
        except qkv.errors.UnsupportedError as error:
            pytest.skip(str(error))


def parameters() -> list[Any]:
    return [
        pytest.param(case, name, id=f"{case.number}-{name}-{case.name}", marks=[pytest.mark.long] if case.long else [])
        for case in sorted(cases.CASES, key=lambda case: case.number)
        for name in (*engines.OURS, "sdpa")
        if not (case.long and name not in {"blockwise", *engines.NATIVE[:1]})
    ]


@pytest.mark.parametrize("case, backend", parameters(), indirect=["backend"])
def test_case(case: cases.Case, backend: str) -> None:
    if backend == "sdpa" and case.number in SDPA_EXCEPTIONS:
        pytest.skip(f"sdpa {SDPA_EXCEPTIONS[case.number]}")
    torch.manual_seed(0)
    case.check(Asker(backend))


def test_every_row_of_the_table_is_a_test_or_has_its_place() -> None:
    shown = {case.number for case in cases.CASES}
    assert not shown & set(cases.OTHERS)
    missing = {
        1,
        3,
        4,
        5,
        6,
        8,
        9,
        10,
        11,
        13,
        14,
        15,
        16,
        18,
        19,
        20,
        21,
        23,
        24,
        25,
        26,
        28,
        29,
        30,
        31,
        33,
        34,
        35,
        36,
        38,
    }
    missing |= {
        39,
        40,
        41,
        43,
        44,
        45,
        46,
        48,
        49,
        50,
        51,
        53,
        54,
        55,
        56,
        58,
        59,
        60,
        61,
        63,
        64,
        65,
        66,
        68,
        69,
        70,
        71,
        73,
    }
    missing |= {
        74,
        75,
        76,
        78,
        79,
        80,
        81,
        83,
        84,
        85,
        86,
        88,
        89,
        90,
        91,
        93,
        94,
        95,
        96,
        98,
        99,
        100,
        101,
        103,
        104,
        105,
    }
    missing |= {106, 108, 109, 110, 111, 113, 114, 115, 116, 118, 119, 120, 121, 123, 124, 125}
    assert missing == shown | set(cases.OTHERS)
