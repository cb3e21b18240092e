"""The thread pool on its own, by a program of a few scenarios that is compiled here."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DRIVER = ROOT / "tests" / "native" / "pool_driver.cpp"
SOURCES = [DRIVER, ROOT / "csrc" / "base" / "threads.cpp"]
COMPILER = os.environ.get("CXX", "c++")
SCENARIOS = [
    "all_have_ended",
    "callers",
    "caller_waits_for_nobody_absent",
    "failure",
    "few_threads",
    "forks",
    "idle",
    "leave",
    "nested",
    "no_threads_to_be_had",
    "once",
    "poll",
    "poll_while_waiting",
    "rounding",
    "scratch",
    "signals",
]
# What a sanitizer disturbs: it has threads and memory of its own, and does not follow a fork.
BESIDE_SANITIZERS = {"few_threads", "forks", "no_threads_to_be_had", "scratch"}

needs_compiler = pytest.mark.skipif(shutil.which(COMPILER) is None, reason="no C++ compiler")


def compiled(folder: Path, *flags: str) -> Path:
    program = folder / "pool_driver"
    command = [COMPILER, "-std=c++17", "-O1", "-pthread", *flags, f"-I{ROOT / 'csrc'}", *SOURCES, "-o", program]
    subprocess.run(command, check=True)
    return program


@pytest.fixture(scope="module")
def program(tmp_path_factory) -> Path:
    return compiled(tmp_path_factory.mktemp("pool"), "-Wall", "-Wextra", "-Werror")


@needs_compiler
def test_every_scenario_is_run(program):
    listed = subprocess.run([program], check=True, capture_output=True, text=True).stdout.split()
    assert sorted(listed) == sorted(SCENARIOS)


@needs_compiler
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_pool(program, scenario):
    subprocess.run([program, scenario], check=True, timeout=60)


@needs_compiler
@pytest.mark.long
@pytest.mark.parametrize("sanitizer", ["thread", "address,undefined"])
def test_pool_under_a_sanitizer(tmp_path, sanitizer):
    program = compiled(tmp_path, "-g", f"-fsanitize={sanitizer}", "-fno-sanitize-recover=all")
    for scenario in set(SCENARIOS) - BESIDE_SANITIZERS:
        subprocess.run([program, scenario], check=True, timeout=300)
