"""float16 and bfloat16 beside float32 in the native core, as torch converts them: every pattern of 16 bits, and every
border of rounding; by a program of the conversions alone, compiled here, and through the core itself.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from torch import Tensor

import engines
import qkv
from exams import same_bits

ROOT = Path(__file__).resolve().parents[2]
COMPILER = os.environ.get("CXX", "c++")
TYPES = {"half": torch.float16, "bfloat": torch.bfloat16}
EACH_TYPE = pytest.mark.parametrize("kind", TYPES)
LSE = qkv.AuxRequest(lse=True)
FLOATS = 1 << 20  # random patterns of 32 bits

needs_compiler = pytest.mark.skipif(shutil.which(COMPILER) is None, reason="no C++ compiler")


def flags_of(isa: str) -> list[str]:
    """What the build compiles a target with, and the width of its vectors."""
    build = (ROOT / "CMakeLists.txt").read_text(encoding="utf-8")
    listed = dict(re.findall(r"set\((FLAGS_\w+)([^)]*)\)", build))[f"FLAGS_{isa}"]
    while "${" in listed:
        listed = re.sub(r"\$\{(\w+)\}", lambda name: re.search(rf"set\({name[1]}\b([^)]*)\)", build)[1], listed)
    folder = ROOT / "csrc" / "targets"
    target = (folder / f"{isa}.cpp").read_text(encoding="utf-8")
    if "vectors512.h" in target:
        target = (folder / "vectors512.h").read_text(encoding="utf-8")
    return [*listed.split(), "-DQKV_BYTES=" + re.search(r"#define QKV_BYTES (\d+)", target)[1]]


@pytest.fixture(scope="module", params=engines.ISAS)
def program(request, tmp_path_factory) -> Path:
    made = tmp_path_factory.mktemp("narrow") / "narrow_driver"
    flags = ["-std=c++17", "-O2", "-ffp-contract=fast", "-fno-math-errno", *flags_of(request.param)]
    source = ROOT / "tests" / "native" / "narrow_driver.cpp"
    subprocess.run([COMPILER, *flags, f"-I{ROOT / 'csrc'}", source, "-o", made], check=True, timeout=100)
    return made


def through(program: Path, kind: str, way: str, numbers: Tensor, dtype: torch.dtype) -> Tensor:
    done = subprocess.run(
        [program, kind, way],
        input=numbers.view(torch.uint8).numpy().tobytes(),
        capture_output=True,
        check=True,
        timeout=60,
    )
    return torch.frombuffer(bytearray(done.stdout), dtype=dtype)


def every(kind: str) -> Tensor:
    """All patterns of 16 bits."""
    return torch.arange(1 << 16).to(torch.uint16).view(TYPES[kind])


def borders(kind: str) -> Tensor:
    """Each number, what lies half way to the next one, and their neighbours in float32; all at random beside them."""
    finite = every(kind).float()
    finite = finite[finite.isfinite()].unique()
    beyond = 2 * finite[-1:] - finite[-2:-1]  # where the next number would be, if float32 reaches it
    line = torch.cat([-beyond, finite, beyond]).double()
    middle = (line[1:] + line[:-1]).div(2).float()
    near = torch.cat([finite, middle[middle.isfinite()]])
    found = [near, near.nextafter(torch.tensor(torch.inf)), near.nextafter(torch.tensor(-torch.inf))]
    generator = torch.Generator().manual_seed(0)
    patterns = torch.randint(-(1 << 31), 1 << 31, (FLOATS,), generator=generator).to(torch.int32).view(torch.float32)
    odd = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan, 3.4028235e38, -3.4028235e38, 1e-45, -1e-45])
    return torch.cat([*found, patterns, odd])


@needs_compiler
@EACH_TYPE
@pytest.mark.parametrize("way", ["widen", "widen_one"])
def test_every_pattern_becomes_its_float(program, kind, way):
    assert same_bits(through(program, kind, way, every(kind), torch.float32), every(kind).float())


@needs_compiler
@EACH_TYPE
@pytest.mark.parametrize("way", ["narrow", "narrow_one"])
def test_floats_round_to_the_nearest_and_ties_to_even(program, kind, way):
    numbers = borders(kind)
    found, want = through(program, kind, way, numbers, TYPES[kind]), numbers.to(TYPES[kind])
    wrong = (found.view(torch.int16) != want.view(torch.int16)) & ~(found.isnan() & want.isnan())
    assert not wrong.any(), f"{numbers[wrong][:5].tolist()} become {found[wrong][:5].tolist()}"


def test_the_borders_hold_each_kind_of_number():
    for kind, dtype in TYPES.items():
        numbers = borders(kind)
        rounded, tiny = numbers.to(dtype), torch.finfo(dtype).tiny
        subnormal = (rounded != 0) & (rounded.abs() < tiny)
        assert subnormal.sum() > 500 and numbers.isnan().any()
        assert (numbers.isfinite() & rounded.isinf()).any() and ((numbers != 0) & (rounded == 0)).any()


@EACH_TYPE
@engines.EACH_NATIVE
@pytest.mark.parametrize("form", ["rows", "columns", "narrow"])
def test_every_value_comes_through_the_core(kind, form, backend):
    """With one key the output is its value. Whole vectors, numbers one by one, and rows shorter than a vector."""
    dtype, width = TYPES[kind], 3 if form == "narrow" else 256
    numbers = every(kind)
    numbers = numbers[numbers.isfinite()]
    numbers = numbers[: len(numbers) // width * width].reshape(-1, 1, 1, width)
    if engines.casts(dtype):
        numbers = numbers[(numbers.abs() >= torch.finfo(dtype).tiny).flatten(1).all(1)]  # units lose subnormal ones
    value = torch.stack([numbers, numbers], -1)[..., 0] if form == "columns" else numbers
    query, key = (torch.ones(len(value), 1, 1, 1, dtype=dtype) for _ in "qk")
    with engines.widened():
        wide, _ = qkv.attention(query, key, value, backend=backend, return_aux=LSE)
    assert wide.dtype == torch.float32 and torch.equal(wide, value.float())
    assert torch.equal(qkv.attention(query, key, value, backend=backend), value)


@EACH_TYPE
@engines.EACH_NATIVE
@pytest.mark.parametrize("width", [1, 256])
def test_outputs_of_the_core_round_to_the_nearest(kind, width, backend):
    """Means of two and of four keys lie on the half and the quarters between neighbours; dropout doubles some."""
    dtype = TYPES[kind]
    finite = every(kind).float()
    finite = finite[finite.isfinite()].unique().to(dtype)
    finite = finite[finite.abs() >= torch.finfo(dtype).tiny] if engines.casts(dtype) else finite
    low, high = finite[:-1], finite[1:]
    for mixed in ((low, high), (low, low, low, high), (low, high, high, high)):
        rows = torch.stack(mixed, -1)
        rows = rows[: len(rows) // width * width].reshape(-1, 1, width, len(mixed)).mT
        query, key = (torch.ones(len(rows), 1, n, 1, dtype=dtype) for n in (1, len(mixed)))
        for dropout in (0.0, 0.5):
            found = []
            for block in (nullcontext(), engines.widened()):
                options = {"dropout_p": dropout, "generator": torch.Generator().manual_seed(1)} if dropout else {}
                with block:
                    out, _ = qkv.attention(query, key, rows, backend=backend, return_aux=LSE, **options)
                found.append(out)
            assert same_bits(found[0], found[1].to(dtype))
            if not dropout and not engines.casts(dtype):
                mean = rows.double().mean(2, keepdim=True)
                exact = (mean != 0) & (rows.double().abs().sum(2, keepdim=True) < torch.finfo(torch.float32).max)
                assert torch.equal(found[1].double()[exact], mean[exact])
