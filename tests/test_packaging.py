"""The package as pip makes it: with the native core from an environment of its own, and without a compiler."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
NO_COMPILER = {"CC": "/bin/false", "CXX": "/bin/false"}


# What came with a Python, for those after the oldest that could be asked for.
BROUGHT = {
    (3, 11): {
        *("tomllib", "enum.StrEnum", "enum.verify", "datetime.UTC", "contextlib.chdir", "operator.call", "math.cbrt"),
        *("math.exp2", "hashlib.file_digest", "asyncio.TaskGroup", "asyncio.timeout", "ExceptionGroup"),
        *(f"typing.{name}" for name in ("Self", "Never", "LiteralString", "Unpack", "TypeVarTuple", "Required")),
        *(f"typing.{name}" for name in ("NotRequired", "assert_never", "assert_type", "dataclass_transform")),
    },
    (3, 12): {"typing.override", "typing.TypeAliasType", "itertools.batched", "math.sumprod", "collections.abc.Buffer"},
    (3, 13): {"warnings.deprecated", "copy.replace", "typing.TypeIs", "typing.ReadOnly", "math.fma", "queue.ShutDown"},
    (3, 14): {"annotationlib", "compression", "string.templatelib"},
}


def oldest() -> tuple[int, int]:
    """The oldest Python that pyproject.toml admits."""
    found = re.search(r'requires-python = ">=(\d+)\.(\d+)"', (ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert found is not None
    return int(found[1]), int(found[2])


def newer(text: str, python: tuple[int, int]) -> Iterator[str]:
    """What a source names that a Python does not have; its syntax is a SyntaxError."""
    absent = set().union(*(names for brought, names in BROUGHT.items() if brought > python))
    for node in ast.walk(ast.parse(text, feature_version=python)):
        if isinstance(node, ast.ImportFrom):
            named = [str(node.module), *(f"{node.module}.{alias.name}" for alias in node.names)]
        elif isinstance(node, ast.Import):
            named = [alias.name for alias in node.names]
        elif isinstance(node, ast.Attribute | ast.Name):
            named = [ast.unparse(node)]
        else:
            continue
        yield from (name for name in named if name in absent)


def test_sources_need_no_newer_python_than_is_asked_for():
    found = [
        f"{file.relative_to(ROOT)}: {name}"
        for folder in ("src", "tools")
        for file in sorted((ROOT / folder).rglob("*.py"))
        for name in newer(file.read_text(encoding="utf-8"), oldest())
    ]
    assert not found


def test_newer_names_are_found():
    text = "import enum, tomllib\nfrom typing import Any, Self\nclass A(enum.StrEnum): ...\n"
    assert sorted(newer(text, (3, 10))) == ["enum.StrEnum", "tomllib", "typing.Self"]
    assert not list(newer(text, (3, 11)))
    with pytest.raises(SyntaxError):
        list(newer("type A = int", (3, 10)))


def run(*words: object, add: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """Python with these words, at the root of the sources, without settings of ours but those added."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("QKV_", "PYTHONPATH"))}
    command = [sys.executable, *map(str, words)]
    return subprocess.run(command, check=False, capture_output=True, text=True, cwd=ROOT, env=environment | (add or {}))


def pip(*words: object, **add: str) -> subprocess.CompletedProcess[str]:
    return run("-m", "pip", "--disable-pip-version-check", *words, add=add)


def wheel(folder: Path, **add: str) -> zipfile.ZipFile:
    done = pip("wheel", "--no-deps", "--no-cache-dir", "--wheel-dir", folder, ".", **add)
    assert done.returncode == 0, done.stdout + done.stderr
    (file,) = folder.glob("qkv-*.whl")
    return zipfile.ZipFile(file)


def native_files(archive: zipfile.ZipFile) -> list[str]:
    return [name for name in archive.namelist() if name.startswith("qkv/_native.") and not name.endswith(".pyi")]


def report(packages: Path) -> str:
    """What `qkv info` prints for a package in a folder."""
    done = run("-c", "from qkv.cli.main import main; main(['info'])", add={"PYTHONPATH": str(packages)})
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.long
def test_wheel_from_an_environment_of_its_own(tmp_path):
    built = wheel(tmp_path)  # isolated: what pyproject.toml names is all there is, and torch is not in it
    assert len(native_files(built)) == 1
    assert Path(built.filename).stat().st_size < 5_000_000
    assert sum(entry.file_size for entry in built.infolist()) < 5_000_000
    assert not any("native-build.log" in name for name in built.namelist())
    built.extractall(tmp_path / "packages")
    assert "available         yes" in report(tmp_path / "packages")


@pytest.mark.long
def test_without_a_compiler_the_package_works_and_names_the_log(tmp_path):
    built = wheel(tmp_path, **NO_COMPILER)
    assert native_files(built) == []
    assert built.filename.endswith("-py3-none-any.whl")
    packages = tmp_path / "packages"
    assert pip("install", "--no-deps", "--target", packages, built.filename).returncode == 0
    log = packages / "qkv" / "native-build.log"
    assert f"no: the native CPU core could not be built: the log is {log}" in report(packages)
    assert "/bin/false" in log.read_text()


@pytest.mark.long
def test_a_failed_build_is_an_error_where_the_core_is_required(tmp_path):
    done = pip("wheel", "--no-deps", "--wheel-dir", tmp_path, ".", QKV_REQUIRE_NATIVE="1", **NO_COMPILER)
    assert done.returncode != 0
    assert "/bin/false" in done.stdout + done.stderr
    assert not list(tmp_path.glob("*.whl"))


@pytest.mark.long
def test_source_archive_holds_all_that_a_build_needs(tmp_path):
    program = f"import build_qkv; build_qkv.build_sdist({str(tmp_path)!r})"
    done = run("-c", program, add={"PYTHONPATH": str(ROOT / "tools")})
    assert done.returncode == 0, done.stderr
    (file,) = tmp_path.glob("qkv-*.tar.gz")
    with tarfile.open(file) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    sources = {str(path.relative_to(ROOT)) for path in (ROOT / "csrc").rglob("*") if path.suffix in {".h", ".cpp"}}
    assert sources | {"CMakeLists.txt", "pyproject.toml", "tools/build_qkv.py", "src/qkv/_native.pyi"} <= names
    assert not any(name.endswith((".so", ".log", ".pyc")) for name in names)
