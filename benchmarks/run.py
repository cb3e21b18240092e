"""`python benchmarks/run.py`: the figures of a suite, each behind the gate, printed as they come, written at the end.

A wrong result prints REFUSED, writes nothing and ends with exit status 1.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from contextlib import closing
from functools import cache
from pathlib import Path
from typing import Any

import torch
from contest import Contest
from families import LENGTHS, QUICK, Families
from gate import Refused
from goals import chosen
from linear_suite import Linear
from memory import MemoryProbe
from model_suite import Models
from peers import OURS
from registry import FAMILIES
from report import Suite, told, write

# The backend that each suite is about, and the name of its results.
SUITES = {
    "families": ("blockwise", "blockwise"),
    "cpu": ("cpu", "cpu"),
    "production": ("cpu", "production"),
    "linear": ("cpu", "linear"),
    "models": ("cpu", "models"),
}
WHOLE: dict[str, Any] = {"linear": Linear, "models": Models}  # suites that measure in their own way


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Attention measured beside its peers, each figure checked first.")
    parser.add_argument("--suite", choices=list(SUITES), default="families", help="every family, or what has goals")
    parser.add_argument("--quick", action="store_true", help="what is short, few repetitions; no files but by --name")
    parser.add_argument(
        "--only", type=_words, default=[], metavar="A,B", help="figures whose name holds one of these; families by name"
    )
    parser.add_argument("--list", action="store_true", help="print the names for --only and end")
    parser.add_argument("--backend", choices=(*OURS, "chunked"), help="default: the one that the suite is about")
    parser.add_argument("--threads", type=int, default=1, help="more than one: by the clock on the wall; not families")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"), help="folder of the results")
    parser.add_argument("--name", help="of the result files; default: the suite's own")
    families = parser.add_argument_group("suite families")
    families.add_argument("--lengths", type=int, nargs="+", metavar="L", help=f"default: {' '.join(map(str, LENGTHS))}")
    families.add_argument("--cap", type=float, default=3.0, metavar="S", help="no peer's call that takes longer is run")
    families.add_argument("--no-peers", action="store_true", help="ours alone")
    families.add_argument("--flex", type=float, metavar="S", help="flex_attention too, if it compiles in S seconds")
    given = parser.parse_args(arguments)
    backend, name = SUITES[given.suite]
    given.backend = given.backend or backend
    other = "" if given.backend == backend else f"-{given.backend}"
    threads = "" if given.threads == 1 else f"-{given.threads}-threads"
    given.name = given.name or (None if given.quick else f"{name}{other}{threads}")
    if given.suite == "linear" and given.backend == "blockwise":
        parser.error("--backend blockwise has no linear family: leave it out")
    if given.suite == "models" and given.backend == "chunked":
        parser.error("--backend chunked is of the linear family alone: leave it out")
    given.figures = ()
    if given.suite != "families":
        given.figures = chosen(given.only, quick=given.quick, threads=given.threads, suite=given.suite)
    given.cases = tuple(case for case in FAMILIES if not given.only or case.name in given.only)
    if not _named(given):
        parser.error(f"--only {','.join(given.only)} names nothing that is measured: --list prints the names")
    return given


def suite_of(given: argparse.Namespace) -> Suite:
    """What the command line asks for."""
    if given.suite != "families":
        options = {
            "figures": given.figures,
            "backend": given.backend,
            "threads": given.threads,
            "budget": 0.4 if given.quick else 3.0,
            "least": 5 if given.suite == "cpu" and not given.quick else 3,  # some calls of the others take seconds
            "most": 9 if given.quick else 41,
        }
        if given.suite in WHOLE:
            return WHOLE[given.suite](**options)
        return Contest(name=given.suite, **options)
    return Families(
        cases=given.cases,
        lengths=tuple(given.lengths or (QUICK if given.quick else LENGTHS)),
        backend=given.backend,
        budget=0.1 if given.quick else 0.4,
        cap=given.cap,
        flex=given.flex,
        sdpa=not given.no_peers,
        quick=given.quick,
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the tables and write the results; 1 where the gate refused."""
    given = parse(arguments)
    if given.list:
        print(*(one.name for one in _named(given)), sep="\n")
        return 0
    torch.set_num_threads(given.threads)
    suite, rows = suite_of(given), list[Any]()
    sizes = "; ".join(f"{name} {value}" for name, value in suite.sizes.items())
    print(f"{told()}\nbackend {given.backend}; {sizes}\n\n{suite.head()}")
    try:
        with closing(MemoryProbe()) as probe:
            for row in suite.measure(cache(probe.ask)):
                rows.append(row)
                print(suite.line(row), flush=True)
    except Refused as refused:
        print(f"REFUSED {refused}")
        return 1
    summary = suite.summary(rows)
    print(f"\n{summary}\n")
    if given.name is not None:
        command = " ".join(["python benchmarks/run.py", *(sys.argv[1:] if arguments is None else arguments)])
        print("written:", *write(given.out, given.name, suite, rows, summary, command))
    return 0


def _named(given: argparse.Namespace) -> tuple[Any, ...]:
    """What is measured: figures, or cases."""
    return given.cases if given.suite == "families" else given.figures


def _words(text: str) -> list[str]:
    return [word for word in text.replace(",", " ").split() if word]


if __name__ == "__main__":
    raise SystemExit(main())
