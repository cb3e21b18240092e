"""The command `qkv`: finds the subcommand, runs it, turns our errors into one line and an exit code.

A subcommand is one file `cli/<name>.py` with `add_arguments(parser) -> None` and `run(args) -> int`, and one row of
COMMANDS here. Only the chosen file is imported, so a command may import what it likes at its top. Exit codes: 0 done,
1 a check that ran and failed, 2 a question that cannot be answered as asked, or an answer that could not be written.
"""

from __future__ import annotations

import argparse
import errno
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path
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

# What the system says when output cannot be written: a full disk or quota, a file too large, a device that fails.
CANNOT_WRITE = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EBADF})


class Command(Protocol):
    """What each file of a subcommand has."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Declare the arguments of the subcommand."""

    def run(self, args: argparse.Namespace) -> int:
        """Do the work, print the result, return the exit code."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv` (the process's own when None) and return the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    _open_streams()
    try:
        return _dispatch(words)
    except QkvError as error:
        _tell(f"qkv: error: {error}\n")
        return 2
    except BrokenPipeError:  # the reader of a pipe left, as `head` does
        _drop_output()
        return 0
    except OSError as error:
        if error.errno not in CANNOT_WRITE:
            raise
        _drop_output()
        _tell(f"qkv: error: the output must be written; got: {error.strerror}; make room, or write elsewhere\n")
        return 2
    except KeyboardInterrupt:
        return 130


def _open_streams() -> None:
    """A stream that the shell closed (`>&-`) leads nowhere, as if it were /dev/null."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, Path(os.devnull).open(mode, encoding="utf-8"))  # noqa: SIM115 - as long as the program


def _drop_output() -> None:
    """Leave nothing that would be written, and fail again, when the program ends."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _tell(line: str) -> None:
    """A line on stderr, where that can be written."""
    with suppress(OSError):
        sys.stderr.write(line)
        sys.stderr.flush()


def _dispatch(words: list[str]) -> int:
    name = words[0] if words else None
    if name is not None and not name.startswith("-") and name not in COMMANDS:
        raise unknown_name("command", name, COMMANDS)
    command = cast(Command, import_module(f"qkv.cli.{name}")) if name in COMMANDS else None
    parser = _parser(name, command)
    try:
        args = parser.parse_args(words)
    finally:
        sys.stdout.flush()  # of a help text, as below
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
