"""Loading the native core: taken, absent, broken, of another version, asked for what is not there."""

from __future__ import annotations

import os
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

import qkv
from qkv.backends import extension
from qkv.errors import ValueOutOfRange

NAME = "qkv._native"


def core(abi=extension.ABI, sets=("avx2", "v2")):
    """A stand-in for the compiled module, which keeps what was chosen."""
    chosen = []
    return SimpleNamespace(
        ABI=abi,
        available_isas=lambda: list(sets),
        choose_isa=lambda name: chosen.append(name) or name in {"auto", *sets},
        chosen=chosen,
    )


class Unloadable:
    """Finds the compiled module and cannot load it."""

    @staticmethod
    def find_spec(name, *_):
        if name == NAME:
            raise ImportError("undefined symbol: f")


@pytest.fixture
def load(monkeypatch):
    """extension.py anew, with another compiled module; None: there is none."""
    monkeypatch.delenv("QKV_ISA", raising=False)
    monkeypatch.delattr(qkv, "_native", raising=False)

    def loaded(module=None) -> ModuleType:
        if module is Unloadable:
            monkeypatch.delitem(sys.modules, NAME, raising=False)
            monkeypatch.setattr(sys, "meta_path", [Unloadable, *sys.meta_path])
        else:
            monkeypatch.setitem(sys.modules, NAME, module)
        spec = spec_from_file_location("extension_anew", extension.__file__)
        fresh = module_from_spec(spec)
        spec.loader.exec_module(fresh)
        return fresh

    return loaded


def test_the_native_core_is_here_where_it_must_be():
    if os.environ.get("QKV_REQUIRE_NATIVE") == "1":
        assert extension.MISSING is None


def test_a_core_of_this_version_is_taken(load):
    module = core()
    fresh = load(module)
    assert (fresh.native, fresh.MISSING, module.chosen) == (module, None, ["auto"])


@pytest.mark.parametrize(
    "module, reason",
    [
        (None, "was not built"),
        (Unloadable, "cannot be loaded: undefined symbol: f"),
        (core(abi=99), f"is of another version: its ABI is 99, not {extension.ABI}; install qkv again"),
        (core(sets=()), "is built for none of this processor's instruction sets"),
    ],
    ids=["absent", "broken", "old", "no instruction set"],
)
def test_a_core_that_cannot_be_used_says_why(load, module, reason):
    fresh = load(module)
    assert (fresh.native, fresh.MISSING) == (None, f"the native CPU core {reason}")


def test_a_core_that_could_not_be_built_names_the_log(load, monkeypatch):
    log = Path(qkv.__file__).parent / "native-build.log"
    monkeypatch.setattr(Path, "is_file", lambda path: path == log)
    fresh = load()
    assert (fresh.native, fresh.MISSING) == (None, f"the native CPU core could not be built: the log is {log}")


def test_an_instruction_set_may_be_named(load, monkeypatch):
    monkeypatch.setenv("QKV_ISA", "v2")
    module = core()
    fresh = load(module)
    assert fresh.MISSING is None
    fresh.check_isa()
    assert module.chosen == ["v2"]


@pytest.mark.parametrize(
    "name, holds, seen",
    [
        ("sse", "be auto, amx, avx512bf16, avx512, avx2, v2, neon, tiles", "got 'sse'"),
        (
            "neon",
            "name an instruction set that this build and this processor have",
            "got 'neon', there are avx2, v2",
        ),
    ],
)
def test_an_instruction_set_that_is_not_there_is_an_error(load, monkeypatch, name, holds, seen):
    monkeypatch.setenv("QKV_ISA", name)
    fresh = load(core())
    assert fresh.MISSING is None
    for _ in range(2):  # every time
        with pytest.raises(ValueOutOfRange) as caught:
            fresh.check_isa()
    assert str(caught.value) == f"`QKV_ISA` must {holds}; {seen}; unset it for 'auto'"


@pytest.mark.skipif(extension.native is None, reason=str(extension.MISSING))
def test_the_real_one_changes_its_instruction_set_by_name():
    native = extension.native
    before, available = native.isa(), native.available_isas()
    try:
        for name in available:
            assert native.choose_isa(name) and native.isa() == name
        assert not native.choose_isa("mmx") and native.isa() == available[-1]
        assert native.choose_isa("auto") and native.isa() == available[0]
    finally:
        native.choose_isa(before)
