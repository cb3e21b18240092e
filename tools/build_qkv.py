"""The build back end: scikit-build-core, and a package without the native core where that cannot be built.

QKV_REQUIRE_NATIVE=1 makes a failed build an error instead. What a failed build printed goes into the package, where
`qkv info` finds it.
"""

from __future__ import annotations

import os
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from scikit_build_core import build as skbuild

LOG = "native-build.log"
Settings = dict[str, "str | list[str]"]
Build = Callable[[str, "Settings | None", "str | None"], str]


# No hooks for metadata alone: front ends then take them from the wheel, whose tags are known after the build.
build_sdist = skbuild.build_sdist
get_requires_for_build_sdist = skbuild.get_requires_for_build_sdist
get_requires_for_build_wheel = skbuild.get_requires_for_build_wheel
get_requires_for_build_editable = skbuild.get_requires_for_build_editable


def build_wheel(directory: str, config_settings: Settings | None = None, metadata_directory: str | None = None) -> str:
    return _build(skbuild.build_wheel, directory, config_settings)


def build_editable(
    directory: str, config_settings: Settings | None = None, metadata_directory: str | None = None
) -> str:
    return _build(skbuild.build_editable, directory, config_settings)


def _build(build: Build, directory: str, settings: Settings | None) -> str:
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder, LOG)
        try:
            with _recorded(log):
                return build(directory, settings, None)
        except (Exception, SystemExit):
            if os.environ.get("QKV_REQUIRE_NATIVE") == "1":
                raise
        sys.stderr.write("qkv: the native core could not be built; going on without it\n")
        pure = {"wheel.cmake": "false", f"wheel.force-include.{log}": f"qkv/{LOG}"}
        return build(directory, {**(settings or {}), **pure}, None)


@contextmanager
def _recorded(log: Path) -> Iterator[None]:
    """Keep in a file what this process and its children print, and print it at the end."""
    kept = {stream: os.dup(stream.fileno()) for stream in (sys.__stdout__, sys.__stderr__)}
    try:
        with log.open("wb") as file:
            for stream in kept:
                stream.flush()
                os.dup2(file.fileno(), stream.fileno())
        try:
            yield
        except Exception:
            traceback.print_exc()
            raise
    finally:
        for stream, before in kept.items():
            stream.flush()
            os.dup2(before, stream.fileno())
            os.close(before)
        sys.stdout.write(log.read_text(encoding="utf-8", errors="replace"))
