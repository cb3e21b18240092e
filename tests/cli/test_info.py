"""`qkv info`: the data is that of this machine, and both forms print all of it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict
from types import SimpleNamespace

import pytest
import torch

import engines
import qkv.info as module
from qkv.backends import extension
from qkv.cli.info import render
from qkv.cli.main import main
from qkv.dispatch import BACKENDS
from qkv.errors import ValueOutOfRange
from qkv.info import NativeCore, info
from qkv.settings import SETTINGS, override


def test_versions_and_machine_are_the_running_ones():
    found = info()
    assert found.versions["torch"] == torch.__version__
    assert list(found.versions) == ["qkv", "torch", "numpy", "python"]
    assert found.machine.threads == torch.get_num_threads()
    assert found.machine.torch_capability == torch.backends.cpu.get_cpu_capability()
    assert found.devices[0] == "cpu"


def test_backends_are_all_there_in_order_with_their_reason():
    found = info()
    assert [(row.name, row.unavailable) for row in found.backends] == [(b.name, b.unavailable) for b in BACKENDS]
    assert {"reference", "blockwise", "sdpa"} <= {row.name for row in found.backends if row.unavailable is None}
    assert all(row.unavailable for row in found.backends if row.name in {"flex", "triton"})


@pytest.mark.parametrize(
    "text, expected",
    [
        (
            "processor : 0\nmodel name\t: Some CPU\nflags\t\t: fpu avx2 amx_bf16 avx512f\n",
            ("avx2", "avx512f", "amx_bf16"),
        ),
        ("processor : 0\nFeatures : fp asimd sve bf16\n", ("asimd", "bf16", "sve")),
        ("processor : 0\nflags : fpu\n", ()),
        ("processor : 0\n", None),
    ],
)
def test_instruction_sets_come_from_the_list_of_processors(monkeypatch, tmp_path, text, expected):
    (tmp_path / "cpuinfo").write_text(text)
    monkeypatch.setattr(module, "Path", lambda _: tmp_path / "cpuinfo")
    assert info().machine.instruction_sets == expected


def test_a_system_without_a_list_of_processors_says_so(monkeypatch, tmp_path):
    monkeypatch.setattr(module, "Path", lambda _: tmp_path / "absent")
    found = info()
    assert found.machine.instruction_sets is None
    assert "instruction sets    not listed by this system" in render(found)


def stand_in(available=("avx2", "v2"), in_use="v2"):
    return SimpleNamespace(ABI=7, available_isas=lambda: list(available), isa=lambda: in_use)


@pytest.mark.parametrize("threads, said", [(1, "v2, 1 thread"), (3, "v2, 3 threads")])
def test_the_native_core_tells_what_it_can_do(monkeypatch, threads, said):
    monkeypatch.setattr(extension, "MISSING", None)
    monkeypatch.setattr(extension, "native", stand_in())
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    found = info()
    assert found.native == NativeCore(missing=None, abi=7, instruction_sets=("avx2", "v2"), in_use="v2")
    block = [
        "native core",
        "  available         yes, ABI 7",
        "  instruction sets  avx2 v2",
        f"  in use            {said}",
    ]
    assert "\n".join(["", *block, ""]) in render(found)


def test_a_native_core_that_is_missing_says_why(monkeypatch):
    monkeypatch.setattr(extension, "MISSING", "no compiler came near it")
    found = info()
    assert found.native == NativeCore(missing="no compiler came near it")
    assert "\nnative core\n  available  no: no compiler came near it\n" in render(found)


def test_optional_packages_tell_version_or_absence(monkeypatch):
    monkeypatch.setattr(module, "OPTIONAL", {"numpy": "sums", "no-such-distribution": "nothing"})
    found = info()
    assert [(row.name, row.version is None) for row in found.optional] == [
        ("numpy", False),
        ("no-such-distribution", True),
    ]
    assert "no-such-distribution  absent, for nothing" in render(found)


def test_text_names_every_backend_and_why_not(capsys, monkeypatch):
    monkeypatch.setattr(
        module,
        "BACKENDS",
        (SimpleNamespace(name="good", unavailable=None), SimpleNamespace(name="cpu", unavailable="no compiler")),
    )
    assert main(["info"]) == 0
    printed = capsys.readouterr().out
    assert "\nbackends\n  good  available\n  cpu   not available: no compiler\n" in printed


def test_json_is_the_whole_report(capsys):
    assert main(["info", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == json.loads(json.dumps(asdict(info())))


def test_settings_show_their_value_now(capsys):
    with override("QKV_BACKEND", "reference"):
        assert main(["info"]) == 0
    printed = capsys.readouterr().out
    assert "QKV_BACKEND        reference, " in printed
    assert all(setting.name in printed for setting in SETTINGS)


@pytest.mark.skipif(extension.native is None, reason=str(extension.MISSING))
@pytest.mark.parametrize("name", ["sse9", "neon" if "v2" in engines.ISAS else "avx2"])
def test_a_bad_instruction_set_is_an_error_in_one_line(name):
    """In a process of its own: the variable is read once. A call asks for it too."""

    def qkv(*words):
        command = [sys.executable, *words]
        return subprocess.run(
            command, env=os.environ | {"QKV_ISA": name}, capture_output=True, text=True, check=False, timeout=60
        )

    told = qkv("-m", "qkv", "info")
    assert (told.returncode, told.stdout) == (2, "")
    assert told.stderr.startswith("qkv: error: `QKV_ISA` must ") and told.stderr.count("\n") == 1
    called = qkv("-c", "import torch, qkv; x = torch.ones(2, 3); qkv.attention(x, x, x, backend='blockwise')")
    assert called.returncode == 1 and "ValueOutOfRange: `QKV_ISA` must " in called.stderr


def test_a_bad_setting_is_an_error_in_one_line(capsys, monkeypatch):
    monkeypatch.setenv("QKV_BACKEND", "best")
    assert main(["info"]) == 2
    assert capsys.readouterr().err.startswith("qkv: error: `QKV_BACKEND` must be auto, ")
    with pytest.raises(ValueOutOfRange):
        info()
