"""The command `qkv`: finds the subcommand, runs it, turns our errors into one line and an exit code.

A subcommand is one file `cli/<name>.py` with `add_arguments(parser) -> None` and `run(args) -> int`, and one row of
COMMANDS here. Only the chosen file is imported, so a command may import what it likes at its top. Exit codes: 0 done,
1 a check that ran and failed, 2 a question that cannot be answered as asked.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Protocol, cast

from qkv.errors import QkvError, unknown_name
from qkv.version import __version__

COMMANDS = {
    "compare": "measure what each family of attention costs on this machine: time, memory, crossings",
    "demo": "run attention in two real models, one that reads and one that writes: numbers, table, pictures",
    "explain": "show every step of one attention call, number by number",
    "generate": "write on from a text with a model: token by token, with the cache that its pattern allows",
    "show": "draw a pattern in text, with its pairs and density",
    "info": "show versions, instruction sets, devices and backends",
}


class Command(Protocol):
    """What each file of a subcommand has."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Declare the arguments of the subcommand."""

    def run(self, args: argparse.Namespace) -> int:
        """Do the work, print the result, return the exit code."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv` (the process's own when None) and return the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        return _dispatch(words)
    except QkvError as error:
        sys.stderr.write(f"qkv: error: {error}\n")
        return 2
    except BrokenPipeError:  # the reader of a pipe left, as `head` does: leave nothing to flush at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        return 130


def _dispatch(words: list[str]) -> int:
    name = words[0] if words else None
    if name is not None and not name.startswith("-") and name not in COMMANDS:
        raise unknown_name("command", name, COMMANDS)
    command = cast(Command, import_module(f"qkv.cli.{name}")) if name in COMMANDS else None
    parser = _parser(name, command)
    args = parser.parse_args(words)
    if command is None:
        parser.print_help()
        return 0
    code = command.run(args)
    sys.stdout.flush()  # a pipe that broke shows here, where it is handled
    return code


def _parser(chosen: str | None, command: Command | None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="qkv", description="Attention for PyTorch: exact, fast and visible.")
    parser.add_argument("--version", action="version", version=f"qkv {__version__}")
    rows = parser.add_subparsers(title="commands", metavar="command")
    for name, purpose in COMMANDS.items():
        row = rows.add_parser(name, help=purpose, description=purpose)
        if name == chosen and command is not None:
            command.add_arguments(row)
    return parser
