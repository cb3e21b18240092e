"""`qkv generate`: a model writes on from a text, piece by piece as the tokens come.

Only what is new goes to stdout, and a line break at its end; what was done goes to stderr. On a terminal control
characters and invisible ones are shown as escapes, so that no text can move the cursor or hide itself; a pipe or a file
gets the text as the model wrote it.
"""

from __future__ import annotations

import argparse
import secrets
import sys
import unicodedata
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from qkv.errors import ValueOutOfRange, message
from qkv.models.loading import from_pretrained
from qkv.models.sampling import Sampling
from qkv.models.smollm2 import SmolLM2
from qkv.models.writing import Writing, write

SMOLLM2 = "smollm2"
MOST_THREADS = 1024


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `qkv generate`."""
    parser.add_argument(
        "model", help="a folder with config.json and weights, a .gguf file, or `smollm2` where installed"
    )
    parser.add_argument("text", help="what the model goes on from; - reads it from stdin, but for a last line break")
    parser.add_argument("--max-new-tokens", type=int, default=128, metavar="N", help="at most so many (default: 128)")
    parser.add_argument("--stop", action="append", default=[], metavar="TEXT", help="end before this text (repeatable)")
    parser.add_argument(
        "--threads", type=int, metavar="N", help="threads to compute with (default: torch's own choice)"
    )
    parser.add_argument("--plain", action="store_true", help="ASCII only, everything else as escapes")
    drawn = parser.add_argument_group("how each token is chosen (the most probable one unless said)")
    drawn.add_argument("--temperature", type=float, default=0.0, metavar="T", help="above 0: draw; higher is wilder")
    drawn.add_argument("--top-k", type=int, metavar="K", help="draw from the K most probable tokens")
    drawn.add_argument("--top-p", type=float, metavar="P", help="draw from the fewest tokens that reach probability P")
    drawn.add_argument(
        "--repetition-penalty", type=float, default=1.0, metavar="R", help="above 1: avoid what is there already"
    )
    drawn.add_argument("--seed", type=int, metavar="N", help="of the draws; another one each time unless said")


def run(args: argparse.Namespace) -> int:
    """Write what the model writes; Ctrl-C ends it, and what is written stays."""
    options = {name: getattr(args, name) for name in ("temperature", "top_k", "top_p", "repetition_penalty")}
    Sampling(**options)  # says what is wrong before a model is read
    if not args.model:  # as a path it would mean the current folder
        raise ValueOutOfRange(message("the model must be named", "got an empty name", "write . for the current folder"))
    text, seed = _text(args.text), _seed(args.seed)
    threads = torch.get_num_threads()
    torch.set_num_threads(_threads(args.threads, threads))
    try:
        generator = torch.Generator().manual_seed(seed)
        writing = write(_model(args.model), text, args.max_new_tokens, stop=args.stop, generator=generator, **options)
        try:
            for piece in writing:
                _show(piece, plain=args.plain)
        finally:
            _show("\n", plain=args.plain)
            with suppress(OSError):  # that nobody can be told takes nothing from what is written
                sys.stderr.write(_summary(writing, seed if args.temperature else None))
    finally:
        torch.set_num_threads(threads)
    return 0


def _model(name: str) -> Any:
    """The model of this name; what cannot write is refused by `write`."""
    return SmolLM2.installed().llama if name == SMOLLM2 else from_pretrained(Path(name))


def _text(text: str) -> str:
    """The text to go on from: the argument, or stdin."""
    if text == "-":
        raw = sys.stdin.buffer.read().removesuffix(b"\n").removesuffix(b"\r")
    else:
        raw = text.encode("utf-8", "surrogateescape")  # the bytes that the shell gave
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        holds = "the text must be UTF-8"
        seen = f"byte {error.start} is {raw[error.start]:#04x}"
        raise ValueOutOfRange(message(holds, seen, "convert it, as `iconv -t UTF-8` does")) from error


def _seed(seed: int | None) -> int:
    if seed is None:
        return secrets.randbelow(10**9)
    if not 0 <= seed < 2**63:
        raise ValueOutOfRange(message("`--seed` must lie in 0 .. 2^63 - 1", f"got {seed}", "choose a smaller one"))
    return seed


def _threads(threads: int | None, usual: int) -> int:
    if threads is None:
        return usual
    if not 1 <= threads <= MOST_THREADS:
        holds = f"`--threads` must lie in 1 .. {MOST_THREADS}"
        raise ValueOutOfRange(message(holds, f"got {threads}", "name as many as there are cores, or fewer"))
    return threads


def _show(piece: str, *, plain: bool) -> None:
    """Write at once; what stdout must not or cannot show becomes an escape."""
    if plain or sys.stdout.isatty():
        piece = "".join(_escaped(char) if _hides(char) else char for char in piece)
    encoding = "ascii" if plain else sys.stdout.encoding or "utf-8"
    sys.stdout.write(piece.encode(encoding, "backslashreplace").decode(encoding))
    sys.stdout.flush()


def _hides(char: str) -> bool:
    """Whether a terminal would act on it instead of showing it; joiners within words are shown."""
    return unicodedata.category(char) in {"Cc", "Cf"} and char not in "\n\t\u200c\u200d"


def _escaped(char: str) -> str:
    return char.encode("unicode_escape").decode("ascii")


def _summary(writing: Writing, seed: int | None) -> str:
    """One line: how much, how fast, what it took, and what draws the same again."""
    read = f"{writing.prompt_tokens} read in {writing.reading_seconds * 1e3:,.0f} ms"
    rate = f", {writing.tokens_per_second:,.1f} a second" if writing.tokens_per_second else ""
    kept = f"; kept: {writing.memory}" if writing.memory else ""
    drawn = "" if seed is None else f"; seed {seed}"
    return f"qkv: {writing.new_tokens} tokens{rate}; {read}{kept}{drawn}\n"
