"""The command line as a whole: help, names, exit codes, and that our errors end in one line."""

from __future__ import annotations

import argparse
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import pytest

import qkv.cli.main as cli
from qkv.cli.main import COMMANDS, main
from qkv.errors import ShapeError, message
from qkv.version import __version__


def stand_in(run):
    """A command with one argument, `--length`, that does what the test says."""
    return SimpleNamespace(add_arguments=lambda parser: parser.add_argument("--length", type=int), run=run)


@pytest.fixture
def command(monkeypatch):
    """Replace the file of `show` by a stand-in that runs the given function."""

    def replace(run):
        monkeypatch.setattr(cli, "import_module", lambda _: stand_in(run))

    return replace


def test_commands_are_these():
    assert sorted(COMMANDS) == ["compare", "demo", "explain", "generate", "info", "show"]


@pytest.mark.parametrize("name", COMMANDS)
def test_each_command_has_its_file_and_help(name, capsys):
    module = import_module(f"qkv.cli.{name}")
    assert callable(module.add_arguments)
    with pytest.raises(SystemExit) as ended:
        main([name, "--help"])
    assert ended.value.code == 0
    assert capsys.readouterr().out.startswith(f"usage: qkv {name} ")


@pytest.mark.parametrize("words", [[], ["--help"]])
def test_help_lists_each_command_and_loads_none(words, capsys, monkeypatch):
    monkeypatch.setattr(cli, "import_module", lambda name: pytest.fail(f"loaded {name}"))
    try:
        code = main(words)
    except SystemExit as ended:
        code = ended.code
    assert code == 0
    printed = capsys.readouterr().out
    assert all(f"  {name} " in printed for name in COMMANDS)


def test_version_is_that_of_the_package(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"qkv {__version__}\n"


def test_unknown_command_suggests_the_nearest(capsys):
    assert main(["explian"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith(
        "qkv: error: `command` must be one of compare, demo, explain, generate, info, show; got 'explian'"
    )
    assert captured.err.endswith("did you mean 'explain'?\n")


def test_arguments_reach_the_command_and_its_code_comes_back(command):
    command(lambda args: args.length)
    assert main(["show", "--length", "7"]) == 7


def test_bad_argument_ends_in_two(command, capsys):
    command(lambda args: pytest.fail(f"ran with {args}"))
    with pytest.raises(SystemExit) as ended:
        main(["show", "--length", "x"])
    assert ended.value.code == 2
    assert "argument --length: invalid int value: 'x'" in capsys.readouterr().err


def test_our_error_is_one_line_and_code_two(command, capsys):
    def run(args: argparse.Namespace) -> int:
        raise ShapeError(message("`key` must have 4 axes", f"got {args.length}", "add one"))

    command(run)
    assert main(["show", "--length", "3"]) == 2
    assert capsys.readouterr() == ("", "qkv: error: `key` must have 4 axes; got 3; add one\n")


def test_an_error_that_is_not_ours_keeps_its_traceback(command):
    def run(args: argparse.Namespace) -> int:
        raise ZeroDivisionError(args)

    command(run)
    with pytest.raises(ZeroDivisionError):
        main(["show"])


def test_interrupt_ends_in_130(command):
    def run(args: argparse.Namespace) -> int:
        raise KeyboardInterrupt(args)

    command(run)
    assert main(["show"]) == 130


def test_a_reader_that_leaves_is_no_error():
    text = "import sys; from qkv.cli.main import main; sys.exit(main(['show', 'causal()', '--length', '200']))"
    with subprocess.Popen([sys.executable, "-c", text], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        process.stdout.close()
        errors = process.stderr.read()
    assert (process.returncode, errors) == (0, b"")


SHELL = "import sys; from qkv.cli.main import main; sys.exit(main(sys.argv[1:]))"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
@pytest.mark.parametrize("words", [["show", "causal()"], ["--version"]], ids=" ".join)
def test_output_that_cannot_be_written_is_one_line(words, monkeypatch):
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)
    with Path("/dev/full").open("wb") as full:
        done = subprocess.run([sys.executable, "-c", SHELL, *words], stdout=full, stderr=-1, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("qkv: error: the output must be written; got: ") and done.stderr.count("\n") == 1


@pytest.mark.skipif(sys.platform == "win32", reason="closes streams as a POSIX shell does")
@pytest.mark.parametrize("closed, words, code", [(1, "show causal()", 0), (2, "show causal()", 0), (2, "nope", 2)])
def test_streams_that_the_shell_closed_lead_nowhere(closed, words, code):
    program = (
        f"import os; os.close({closed}); os.execv({sys.executable!r}, {[sys.executable, '-c', SHELL, *words.split()]})"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (code, "")
    assert bool(done.stdout) == (closed == 2 and code == 0)


def test_an_error_of_the_system_that_is_none_of_writing_keeps_its_traceback(command):
    def run(args: argparse.Namespace) -> int:
        raise FileNotFoundError(2, "no such file", str(args))

    command(run)
    with pytest.raises(FileNotFoundError):
        main(["show"])


def test_python_m_qkv_is_the_command():
    done = subprocess.run([sys.executable, "-m", "qkv", "--version"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, f"qkv {__version__}\n")
