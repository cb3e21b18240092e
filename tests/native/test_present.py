"""The native core is there with every instruction set of this machine: a missing one fails, so that no other test of it
goes missing in silence.
"""

from __future__ import annotations

import os
import platform
from pathlib import Path

import pytest
import torch

import engines
import qkv
from configurations import call_of, configurations, digest
from qkv.backends import extension

AVX512 = {"avx512f", "avx512bw", "avx512dq", "avx512vl"}
NEEDS = {
    "amx": AVX512 | {"avx512_bf16", "amx_tile", "amx_bf16"},
    "avx512bf16": AVX512 | {"avx512_bf16"},
    "avx512": AVX512,
    "avx2": {"avx2", "fma", "bmi2"},
    "v2": {"sse4_2"},
}


def test_the_core_is_built() -> None:
    assert extension.native is not None, extension.MISSING
    assert engines.NATIVE


def test_every_instruction_set_of_this_machine_is_there() -> None:
    if platform.machine() in {"aarch64", "arm64"}:
        assert engines.ISAS == ("neon",)
        return
    lines = Path("/proc/cpuinfo").read_text(encoding="ascii", errors="replace").splitlines()
    flags = set(next(line for line in lines if line.startswith("flags")).split())
    wanted = [name for name, needed in NEEDS.items() if needed <= flags]
    if "tiles" in engines.ISAS or (os.environ.get("QKV_REQUIRE_NATIVE") == "1" and flags >= AVX512):
        wanted.append("tiles")  # what amx does, in software
    assert wanted == list(engines.ISAS)


def test_a_chosen_instruction_set_is_in_use() -> None:
    """They round differently: a dot product in chains of other lengths, or of bfloat16 numbers as they are. Those that
    do the latter may agree.
    """
    before, made = engines.isa(), configurations(7)
    answers = {}
    for engine in engines.NATIVE:
        with engines.using(engine) as backend:
            assert f"{backend}-{engines.isa()}" == engine
            kind = "casting" if engines.casts(torch.bfloat16) else engine
            answers[kind] = [digest(call_of(made[n]).answer(backend)) for n in (0, 6)]
    assert [made[n].dtype for n in (0, 6)] == [torch.float32, torch.bfloat16]
    assert engines.isa() == before
    assert len(set(map(tuple, answers.values()))) == len(answers)


def test_an_unknown_instruction_set_changes_nothing() -> None:
    before = engines.isa()
    assert not extension.native.choose_isa("avx1024")
    assert engines.isa() == before


@pytest.mark.parametrize("width", [256, 257])
def test_auto_takes_the_core_for_what_it_can(width: int) -> None:
    x = torch.zeros(1, 1, 2, width)
    found = qkv.plan(x, x, x)
    assert found.backend == ("cpu" if width <= 256 else "blockwise")
    assert width <= 256 or "widths up to 256" in " ".join(found.refusals["cpu"])
    assert qkv.plan(x.bfloat16(), x.bfloat16(), x.bfloat16()).backend == found.backend
