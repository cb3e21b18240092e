"""The NEON target, which no machine here can run, compiles without a warning where a cross-compiler is to be had."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

CSRC = Path(__file__).resolve().parents[2] / "csrc"
COMPILER = shutil.which("aarch64-linux-gnu-g++")


@pytest.mark.long
@pytest.mark.skipif(COMPILER is None, reason="there is no aarch64-linux-gnu-g++")
@pytest.mark.parametrize(
    "source",
    ["targets/neon.cpp", "targets/linear_neon.cpp", "base/threads.cpp", "base/pages.cpp", "isa.cpp", "core.cpp"],
)
def test_compiles_without_warnings(source, tmp_path):
    flags = ["-std=c++17", "-O2", "-Wall", "-Wextra", "-Werror", "-ffp-contract=fast", "-DQKV_HAS_NEON"]
    command = [COMPILER, *flags, "-c", str(CSRC / source), "-o", str(tmp_path / "out.o")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
