"""The core under AddressSanitizer, UndefinedBehaviorSanitizer and ThreadSanitizer, driven by a program without Python.

`driver/main.cpp` tells what it does and how to replay a failure; the programs stay in build/sanitizers.
"""

from __future__ import annotations

import fcntl
import os
import platform
import shutil
import subprocess
from pathlib import Path
from typing import NamedTuple

import pytest

import engines
from qkv.backends import extension

ROOT = Path(__file__).resolve().parents[2]
COMPILER = os.environ.get("CXX", "c++")
REQUIRED = os.environ.get("QKV_REQUIRE_NATIVE") == "1"
FLAGS = {
    "address": "-fsanitize=address,undefined -fno-sanitize-recover=all",
    "thread": "-fsanitize=thread",
}
OPTIONS = {"UBSAN_OPTIONS": "print_stacktrace=1", "TSAN_OPTIONS": "halt_on_error=1"}
SOUND = "int main() {}"
FAULTY = {  # what each sanitizer must report
    "address": "int main(int n, char**) { int* at = new int[1]; int read = at[n]; delete[] at; return read & 0; }",
    "undefined": "int main(int n, char**) { int most = 2147483647; return most + n == 5; }",
    "leak": "int* held; int main() { for (int n = 0; n < 9; ++n) held = new int[7]; }",
    "thread": """#include <thread>
int count;
int main() { std::thread other([] { ++count; }); ++count; other.join(); }""",
}

HAS_TOOLS = None not in map(shutil.which, (COMPILER, "make"))

pytestmark = [
    pytest.mark.skipif(not HAS_TOOLS and not REQUIRED, reason="no C++ compiler, or no make"),
    pytest.mark.timeout(900),  # of shared cores
]


def run(command: list[str | Path], environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """Output and errors in one text."""
    return subprocess.run(
        command,
        check=False,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=800,
    )


class Way(NamedTuple):
    """How programs of a sanitizer are run here."""

    prefix: tuple[str, ...] = ()
    options: tuple[tuple[str, str], ...] = ()

    def run(self, program: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
        return run([*self.prefix, program, *arguments], os.environ | OPTIONS | dict(self.options))


WAYS = (  # the second and third for machines that give addresses, or forbid to look for leaks, in their own way
    Way(),
    Way(prefix=("setarch", platform.machine(), "-R")),
    Way(options=(("ASAN_OPTIONS", "detect_leaks=0"),)),
)


def compiled(folder: Path, source: str, flags: str) -> Path:
    text, program = folder / "probe.cpp", folder / "probe"
    text.write_text(source, encoding="utf-8")
    made = run([COMPILER, "-std=c++17", "-pthread", *flags.split(), text, "-o", program], dict(os.environ))
    if made.returncode:
        pytest.skip(f"{COMPILER} has no {flags}: {made.stdout[-500:]}")
    return program


def way_for(folder: Path, sanitizer: str) -> Way:
    """The first way in which a sound program runs."""
    program = compiled(folder, SOUND, FLAGS[sanitizer])
    outcomes = []
    for way in WAYS:
        if way.prefix and shutil.which(way.prefix[0]) is None:
            continue
        outcomes.append(way.run(program))
        if outcomes[-1].returncode == 0:
            return way
    pytest.skip(f"no program runs under {FLAGS[sanitizer]} here: {outcomes[0].stdout[-500:]}")


def driver(sanitizer: str, isas: str) -> Path:
    """The driver, made anew where something changed."""
    folder = ROOT / "build" / "sanitizers" / sanitizer
    folder.mkdir(parents=True, exist_ok=True)
    words = [f"OUT={folder}", f"ISAS={isas}", f"FLAGS=-O1 -g1 {FLAGS[sanitizer]}", f"CXX={COMPILER}"]
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        made = run(["make", "-j2", "-C", ROOT / "tests" / "native" / "driver", *words], environment)
    assert made.returncode == 0, made.stdout[-4000:]
    return folder / "driver"


def baseline() -> str:
    return "v2" if platform.machine() in {"x86_64", "AMD64"} else "neon"


def best() -> str:
    """The instruction set of the widest vectors here, with those that pass calls to one another, and the baseline."""
    there = [] if extension.native is None else extension.native.available_isas()
    pairs = [name for name in there if name in engines.CASTING]
    plain = [name for name in there if name not in engines.CASTING][:1]
    return " ".join(dict.fromkeys((*pairs, *plain, baseline())))


def drive(way: Way, program: Path, mode: str, count: int, seed: int = 0) -> None:
    outcome = way.run(program, mode, str(count), str(seed))
    assert outcome.returncode == 0, f"{program.parent}:\n{outcome.stdout[-8000:]}"
    assert f"{count} {mode} from seed {seed}" in outcome.stdout


@pytest.mark.parametrize("fault", FAULTY)
def test_a_planted_fault_is_reported(tmp_path, fault):
    sanitizer = "thread" if fault == "thread" else "address"
    way = way_for(tmp_path, sanitizer)
    if fault == "leak" and way.options:
        pytest.skip("leaks cannot be looked for here")
    outcome = way.run(compiled(tmp_path, FAULTY[fault], FLAGS[sanitizer]))
    assert outcome.returncode != 0 and ("Sanitizer" in outcome.stdout or "runtime error" in outcome.stdout)


def test_no_report_on_memory_or_undefined_behaviour(tmp_path):
    way = way_for(tmp_path, "address")
    program = driver("address", best())
    for mode, count in (("calls", 300), ("at_once", 20), ("no_memory", 20), ("interrupt", 1)):
        drive(way, program, mode, count)
    for mode, count in (("linear", 120), ("beside", 450)):
        drive(way, program, mode, count)


def test_no_report_on_threads(tmp_path):
    way = way_for(tmp_path, "thread")
    program = driver("thread", baseline())
    for mode, count in (("calls", 100), ("at_once", 20), ("no_memory", 5), ("interrupt", 1)):
        drive(way, program, mode, count)
    for mode, count in (("linear", 60), ("beside", 225)):
        drive(way, program, mode, count)


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_no_report_on_20_000_random_schedules(tmp_path):
    way = way_for(tmp_path, "address")
    program = driver("address", best())
    for seed in range(0, 20_000, 2_000):
        drive(way, program, "schedules", 2_000, seed)


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("mode", ["linear", "beside"])
def test_no_report_on_2_000_random_calls_of_the_linear_family(tmp_path, mode):
    drive(way_for(tmp_path, "address"), driver("address", best()), mode, 2_000, seed=1_000)
