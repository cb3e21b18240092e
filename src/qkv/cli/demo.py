"""`qkv demo`: two real models on real texts. Prints what `qkv.demo` yields, the progress on stderr."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from qkv.demo.run import Settings, demo

LENGTHS, QUICK = (512, 2048, 8192), (512, 1024)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare `--out` and `--quick`."""
    parser.add_argument(
        "--out", type=Path, default=Path("demo-output"), metavar="DIR", help="where the files go (default: %(default)s)"
    )
    parser.add_argument("--quick", action="store_true", help="measure short lengths only, for a first look or a test")


def run(args: argparse.Namespace) -> int:
    """Show every part as it comes; 0 when all checks held, 1 when one did not."""
    lengths = QUICK if args.quick else LENGTHS
    settings = Settings(out=args.out, lengths=lengths, plain=not _writes_mathematics())
    passed = True
    for part in demo(settings, _tell):
        print(part.text, flush=True)
        passed = passed and part.passed
    return 0 if passed else 1


def _writes_mathematics() -> bool:
    """Whether stdout's encoding has the signs that the worked example uses."""
    try:
        "\u221a\u2212\u1d40\u2713".encode(sys.stdout.encoding or "ascii")
    except UnicodeEncodeError:
        return False
    return True


def _tell(text: str) -> None:
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()
