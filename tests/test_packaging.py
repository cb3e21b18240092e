"""The package as pip makes it: with the native core from an environment of its own, and without a compiler."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
NO_COMPILER = {"CC": "/bin/false", "CXX": "/bin/false"}


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
