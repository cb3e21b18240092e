"""`qkv info`: prints what `qkv.info` found, as text or JSON."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict

from qkv.info import Info, NativeCore, info


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `qkv info`."""
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")


def run(args: argparse.Namespace) -> int:
    """Print the report."""
    found = info()
    print(json.dumps(asdict(found), indent=2) if args.json else render(found))
    return 0


def render(found: Info) -> str:
    """Lay the report out as text, one block a subject, names in one column."""
    machine = found.machine
    sets = "not listed by this system" if machine.instruction_sets is None else " ".join(machine.instruction_sets)
    blocks = {
        "versions": found.versions,
        "machine": {
            "system": machine.system,
            "processor": machine.processor,
            "instruction sets": sets or "none of those that matter here",
            "torch compiles for": machine.torch_capability,
            "threads": str(machine.threads),
        },
        "native core": _native_rows(found.native, machine.threads),
        "devices": dict.fromkeys(found.devices, "seen by torch"),
        "backends": {
            row.name: "available" if row.unavailable is None else f"not available: {row.unavailable}"
            for row in found.backends
        },
        "optional packages": {row.name: f"{row.version or 'absent'}, for {row.purpose}" for row in found.optional},
        "settings": {row.name: f"{row.value}, {row.meaning}" for row in found.settings},
    }
    return "\n\n".join(_block(title, rows) for title, rows in blocks.items())


def _native_rows(native: NativeCore, threads: int) -> dict[str, str]:
    if native.missing is not None:
        return {"available": f"no: {native.missing}"}
    return {
        "available": f"yes, ABI {native.abi}",
        "instruction sets": " ".join(native.instruction_sets),
        "in use": f"{native.in_use}, {threads} threads" if threads > 1 else f"{native.in_use}, 1 thread",
    }


def _block(title: str, rows: dict[str, str]) -> str:
    width = max(map(len, rows))
    return "\n".join([title, *(f"  {name:<{width}}  {value}" for name, value in rows.items())])
