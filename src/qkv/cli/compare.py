"""`qkv compare`: the cost of every family of attention on this machine, as a table and a picture."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from qkv.compare import FAMILIES, Comparison
from qkv.compare import run as measured
from qkv.compare.plot import require_matplotlib
from qkv.compare.setting import BUDGET, DIRECTIONS, DTYPES, LENGTHS
from qkv.errors import ValueOutOfRange, message


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `qkv compare`."""
    call = parser.add_argument_group("the call (B is 1)")
    lengths = " ".join(map(str, LENGTHS))
    call.add_argument("--length", type=int, nargs="+", default=LENGTHS, metavar="L", help=f"tokens ({lengths})")
    call.add_argument("--heads", type=int, default=8, metavar="H", help="heads (8)")
    call.add_argument("--head-dim", type=int, default=64, metavar="D", help="width of q and k (64)")
    call.add_argument("--value-dim", type=int, metavar="V", help="width of v (that of q and k)")
    call.add_argument("--dtype", default="float32", help=f"{', '.join(DTYPES)} (float32)")
    call.add_argument("--direction", default="forward", help=f"{', '.join(DIRECTIONS)} (forward)")
    shown = parser.add_argument_group("what is measured")
    names = f"of dense, sparse, local, linear, or of {', '.join(family.name for family in FAMILIES)} (all)"
    shown.add_argument("--families", nargs="+", metavar="NAME", help=names)
    shown.add_argument("--threads", type=int, default=1, metavar="N", help="more than one: time by the clock (1)")
    shown.add_argument(
        "--budget", type=float, default=BUDGET, metavar="SECONDS", help=f"for the runs, about ({BUDGET:.0f})"
    )
    shown.add_argument("--seed", type=int, default=0, help="draws the numbers (0)")
    files = parser.add_argument_group("files")
    files.add_argument("--save", type=Path, metavar="FOLDER", help="write compare.json and compare.txt there")
    files.add_argument("--plot", action="store_true", help="draw compare.png, in the folder of --save or here")
    files.add_argument("--json", action="store_true", help="print one JSON object instead of the table")


def run(args: argparse.Namespace) -> int:
    """Measure and print; 1 where a family was refused because its result is wrong."""
    if args.plot:
        require_matplotlib()
    if args.save is not None:
        _make_folder(args.save)
    found = measured(
        lengths=args.length,
        heads=args.heads,
        head_dim=args.head_dim,
        value_dim=args.value_dim,
        dtype=args.dtype,
        direction=args.direction,
        families=args.families,
        threads=args.threads,
        budget=args.budget,
        seed=args.seed,
        tell=_tell,
    )
    print(found.to_json() if args.json else found)
    for path in _write(found, args):
        _tell(f"written: {path}")
    return 0 if found.passed else 1


def _write(found: Comparison, args: argparse.Namespace) -> list[Path]:
    folder = args.save or Path()
    written = []
    if args.save is not None:
        for name, text in (("compare.json", found.to_json()), ("compare.txt", str(found))):
            (folder / name).write_text(f"{text}\n", encoding="utf-8")
            written.append(folder / name)
    if args.plot:
        found.plot(folder / "compare.png")
        written.append(folder / "compare.png")
    return written


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        holds = "`--save` must be a folder that can be made"
        raise ValueOutOfRange(message(holds, f"got {str(folder)!r} ({error.strerror})", "name another one")) from error


def _tell(text: str) -> None:
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()
