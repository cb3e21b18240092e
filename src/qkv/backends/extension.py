"""The native core, or why there is none. The only importer of `qkv._native`."""

from __future__ import annotations

from pathlib import Path

from qkv.errors import ValueOutOfRange, message
from qkv.settings import ISA, read

try:
    import qkv._native as native
except ImportError as error:
    native = None  # type: ignore[assignment]
    _failure: ImportError | None = error
else:
    _failure = None

__all__ = ["BUILD_LOG", "MISSING", "check_isa", "native"]

ABI = 4  # of csrc/abi.h
BUILD_LOG = Path(__file__).resolve().parents[1] / "native-build.log"  # what a failed build printed; absent otherwise


def _missing() -> str | None:
    """Why the core cannot be used: not built, not loadable, of another version, not for this processor."""
    if isinstance(_failure, ModuleNotFoundError):
        why = f"could not be built: the log is {BUILD_LOG}" if BUILD_LOG.is_file() else "was not built"
        return f"the native CPU core {why}"
    if _failure is not None:
        return f"the native CPU core cannot be loaded: {_failure}"
    if native.ABI != ABI:
        return f"the native CPU core is of another version: its ABI is {native.ABI}, not {ABI}; install qkv again"
    if not native.available_isas():
        return "the native CPU core is built for none of this processor's instruction sets"
    return None


def _choose_isa() -> str | None:
    """Take the instruction set that QKV_ISA names; what is wrong where it names none that is there."""
    try:
        wanted = read(ISA)
    except ValueOutOfRange as error:
        return str(error)
    if native.choose_isa(wanted):
        return None
    holds = f"`{ISA.name}` must name an instruction set that this build and this processor have"
    seen = f"got {wanted!r}, there are {', '.join(native.available_isas())}"
    return message(holds, seen, f"unset it for {ISA.default!r}")


def check_isa() -> None:
    """Raise what was wrong with QKV_ISA when the core was loaded: at a call, so that an import always works."""
    if _WRONG_ISA is not None:
        raise ValueOutOfRange(_WRONG_ISA)


MISSING: str | None = _missing()
_WRONG_ISA: str | None = None
if MISSING is None:
    _WRONG_ISA = _choose_isa()
else:
    native = None  # type: ignore[assignment]
