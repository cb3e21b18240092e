"""`qkv show`: draws a pattern given as text, with what it holds."""

from __future__ import annotations

import argparse

from qkv.errors import ValueOutOfRange, message
from qkv.patterns.text import parse

LONGEST = 4096  # a picture looks at every pair


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `qkv show`."""
    parser.add_argument("pattern", help="as Python writes it: 'causal() & window(7)'")
    parser.add_argument("--length", type=int, default=32, metavar="L", help="how many queries (default: 32)")
    parser.add_argument("--keys", type=int, metavar="S", help="how many keys (default: as many as queries)")


def run(args: argparse.Namespace) -> int:
    """Print the picture, then the pairs and their share of all."""
    queries, keys = args.length, args.length if args.keys is None else args.keys
    for name, size in (("length", queries), ("keys", keys)):
        if not 1 <= size <= LONGEST:
            holds = f"`--{name}` must lie in 1 .. {LONGEST}"
            raise ValueOutOfRange(
                message(holds, f"got {size}", "draw a shorter piece: a pattern has no length of its own")
            )
    pattern = parse(args.pattern)
    pairs = f"{pattern.count(queries, keys):,} of {queries * keys:,} pairs"
    print(f"{pattern}\n{pattern.show(queries, keys)}\n{pairs}, density {pattern.density(queries, keys):.4f}")
    return 0
