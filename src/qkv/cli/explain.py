"""`qkv explain`: every step of one attention call, of a built-in example, a few words or a file's tensors."""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path

from torch import Tensor

from qkv.errors import CheckpointError, ValueOutOfRange, message
from qkv.explain.build import explain
from qkv.explain.examples import EXAMPLES, embed, example
from qkv.explain.explanation import Explanation
from qkv.explain.mistakes import MISTAKES
from qkv.explain.record import record_mistake
from qkv.explain.steps import STEP_KEYS
from qkv.patterns import parse
from qkv.patterns.pattern import Pattern
from qkv.tensorfile import read_tensors

NAMES = (("q", "k", "v"), ("query", "key", "value"))
MIN_WIDTH = 40


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `qkv explain`."""
    group = parser.add_argument_group("whose numbers (the built-in example `article` unless said)")
    source = group.add_mutually_exclusive_group()
    source.add_argument(
        "text", nargs="*", default=[], help="words to attend among, as small integers drawn from the seed"
    )
    source.add_argument("--example", metavar="NAME", help=f"a built-in example: {', '.join(EXAMPLES)}")
    source.add_argument("--file", metavar="PATH", help=".safetensors or .json with q, k, v or query, key, value")
    parser.add_argument("--dim", type=int, default=4, help="features of each word (4)")
    parser.add_argument("--heads", type=int, default=1, help="heads of a text (1)")
    parser.add_argument("--seed", type=int, default=0, help="draws the words' numbers and the dropout mask (0)")
    call = parser.add_argument_group("the call")
    pattern = call.add_mutually_exclusive_group()
    pattern.add_argument("--causal", action="store_true", help="a query may not look right of itself")
    pattern.add_argument("--pattern", metavar="TEXT", help='what a query may see: "causal() & window(1)"')
    call.add_argument("--scale", type=float, help="the factor of the scores (1/sqrt(D))")
    call.add_argument("--softcap", type=float, help="bounds the scores by cap * tanh(S / cap)")
    call.add_argument("--dropout", type=float, default=0.0, metavar="P", help="share of weights to drop (0)")
    shown = parser.add_argument_group("what is shown")
    shown.add_argument("--row", type=int, help="the query told in words (the last)")
    shown.add_argument("--head", type=int, default=0, help="which head (0)")
    shown.add_argument("--batch", type=int, default=0, help="which batch row (0)")
    shown.add_argument("--steps", metavar="A,B", help=f"only these of {','.join(STEP_KEYS)}")
    shown.add_argument("--mistake", metavar="NAME", help=f"a mistake beside the right row: {', '.join(MISTAKES)}")
    form = shown.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    form.add_argument("--plain", action="store_true", help="ASCII without colours")
    shown.add_argument("--width", type=int, default=80, help=f"columns of the text (80, at least {MIN_WIDTH})")


def run(args: argparse.Namespace) -> int:
    """Print the explanation; 1 where a number does not agree with torch's or qkv's own."""
    if args.width < MIN_WIDTH:
        raise ValueOutOfRange(
            message(f"`width` must be at least {MIN_WIDTH}", f"got {args.width}", "80 is the default")
        )
    explanation = _explanation(args)
    print(_json(explanation, args) if args.json else _text(explanation, args))
    return 0 if explanation.agrees else 1


def _text(explanation: Explanation, args: argparse.Namespace) -> str:
    colour = sys.stdout.isatty() and "NO_COLOR" not in os.environ and not args.plain
    text = explanation.text(steps=_steps(args), mistake=args.mistake, width=args.width, colour=colour, plain=args.plain)
    if args.mistake is None and args.steps is None:
        text += f"\n\n see also: --mistake {' | '.join(MISTAKES)}"
    return text


def _steps(args: argparse.Namespace) -> list[str] | None:
    return None if args.steps is None else [name.strip() for name in args.steps.split(",")]


def _json(explanation: Explanation, args: argparse.Namespace) -> str:
    explanation.text(steps=_steps(args))  # refuses a step that does not exist
    found = explanation.to_dict()
    steps = found["steps"]
    chosen = _steps(args)
    if chosen is not None and isinstance(steps, dict):
        found["steps"] = {key: step for key, step in steps.items() if key in chosen}
    if args.mistake is not None:
        found["mistake"] = record_mistake(explanation.mistake(args.mistake))
    return json.dumps(found, indent=1, ensure_ascii=False, allow_nan=False)


def _explanation(args: argparse.Namespace) -> Explanation:
    """The question that the arguments ask, explained."""
    pattern = _pattern(args)
    tokens = key_tokens = None
    if args.file is not None:
        tensors = _named(args.file, read_tensors(args.file))
        title = ascii(Path(args.file).name)
    elif args.text:
        tokens = key_tokens = tuple(" ".join(args.text).split())
        tensors = embed(tokens, dim=args.dim, heads=args.heads, seed=args.seed)
        title = f"{len(tokens)} word{'' if len(tokens) == 1 else 's'}, small integers from seed {args.seed}"
    else:
        name = args.example or "article"
        chosen = example(name)
        tensors, tokens, key_tokens = chosen.tensors, chosen.query_tokens, chosen.key_tokens
        title = chosen.title(name)
        pattern = chosen.pattern if pattern is None else pattern
    return explain(
        *tensors,
        pattern=pattern,
        scale=args.scale,
        softcap=args.softcap,
        dropout_p=args.dropout,
        seed=args.seed,
        row=args.row,
        head=args.head,
        batch=args.batch,
        tokens=tokens,
        key_tokens=key_tokens,
        title=title,
    )


def _pattern(args: argparse.Namespace) -> Pattern | None:
    if args.causal:
        return parse("causal()")
    return None if args.pattern is None else parse(args.pattern)


def _named(path: str, tensors: dict[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """The tensors that a file holds under one of the two sets of names, each of them of real numbers and 2-D to 4-D."""
    names = next((names for names in NAMES if set(names) <= set(tensors)), None)
    if names is None:
        there = ", ".join(map(repr, sorted(tensors)[:6])) or "none"
        holds = f"{Path(path).name!r} must hold tensors q, k, v or query, key, value"
        raise CheckpointError(message(holds, f"got {there}", "rename them"))
    q, k, v = (tensors[name] for name in names)
    return q, k, v
