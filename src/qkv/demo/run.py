"""The demo from end to end: worked example, a model that reads, families, a model that writes, pictures.

Yields text and prints nothing.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

import torch

from qkv.demo import report
from qkv.demo.families import FAMILIES, WINDOW, Row, joined_inputs, measure
from qkv.demo.pictures import attention_maps, pattern_grid, require_matplotlib
from qkv.demo.sentences import PLACES, PRONOUN, known_values, looks
from qkv.demo.words import words
from qkv.errors import ValueOutOfRange, message
from qkv.explain.build import explain
from qkv.explain.examples import example
from qkv.models.minilm import MiniLM
from qkv.models.smollm2 import SmolLM2, model_file
from qkv.patterns import bigbird, causal, full, longformer, strided, window
from qkv.types import AuxRequest

WORD = "it"
SMALL = (  # the families at a size where single tokens can be seen
    ("dense", full()),
    ("causal", causal()),
    ("window", window(15)),
    ("strided", strided(8)),
    ("block-sparse", bigbird(3, 4, 1, 0, block_size=4)),
    ("longformer", longformer(12, 2)),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """Where the files go, and how much is measured."""

    out: Path
    lengths: tuple[int, ...] = (512, 2048, 8192)
    heads: int = 4  # of the layer's 12, to keep the demo short
    layer: int = 2  # counts from 0
    plain: bool = False  # ASCII only


class Part(NamedTuple):
    """A piece of text for the reader, and whether everything that it checked held."""

    text: str
    passed: bool = True


def demo(settings: Settings, tell: Callable[[str], None]) -> Iterator[Part]:
    """Run everything; each part comes when it is done, and `tell` hears what happens in between.

    Raises QkvError before any work when a package, the model or the folder is missing or unusable.
    """
    require_matplotlib()
    _make_folder(settings.out)
    model_file()  # the second model: missing is said before the first is read
    tell("reading the models ...")
    model, writer = MiniLM.installed(), SmolLM2.installed()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the same for both sides, and steady on a busy machine
    try:
        yield from _worked_example(plain=settings.plain)
        yield from _real_model(model)
        yield from _families(model, settings, tell)
        yield from _words(writer)
        tell("drawing ...")
        yield from _pictures(model, settings.out)
    finally:
        torch.set_num_threads(threads)


def _worked_example(*, plain: bool) -> Iterator[Part]:
    chosen = example("article")
    told = explain(*chosen.tensors, tokens=chosen.query_tokens, key_tokens=chosen.key_tokens, title=chosen.about)
    yield Part(report.heading(1, "One query against six keys, every number written out"))
    yield Part(told.text(width=report.WIDTH, plain=plain).rstrip(), told.agrees)


def _real_model(model: MiniLM) -> Iterator[Part]:
    yield Part(report.heading(2, "A real model: MiniLM reads sentences with qkv's attention"))
    values = known_values(model)
    passed = all(value.agrees for value in values)
    yield Part('"Attention is all you need." beside the values that the model\'s own library gives:\n')
    yield Part(report.known_values_table(values), passed)
    yield Part(f'\n"{PRONOUN}"\nThree of its 72 heads, with the weights of the row {WORD!r}:\n')
    yield Part(report.looks_table(WORD, looks(model, word=WORD)))


def _families(model: MiniLM, settings: Settings, tell: Callable[[str], None]) -> Iterator[Part]:
    longest = max(settings.lengths)
    yield Part(report.heading(3, "Six families of patterns: the same q, k, v, fewer pairs"))
    yield Part(report.families_legend(FAMILIES, longest) + "\n")
    yield Part(report.paragraph(_what_is_measured(settings)) + "\n")
    tell(f"reading the text in windows of {WINDOW} tokens ...")
    inputs = joined_inputs(model, tokens=longest, layer=settings.layer, heads=settings.heads)
    yield Part(report.families_head())
    rows: list[Row] = []
    for row in measure(inputs, lengths=settings.lengths):
        if not rows or rows[-1].tokens != row.tokens:
            yield Part(f"{row.tokens:,} tokens")
        yield Part(report.families_row(row), row.agrees)
        rows.append(row)
    yield Part(f"{report.RULE}\n{report.families_summary(rows)}")
    _write_rows(settings, rows)


def _what_is_measured(settings: Settings) -> str:
    return f"""
        q, k, v: {settings.heads} heads of layer {settings.layer} over the text, in windows of {WINDOW} tokens, joined.
        Time: medians of runs in turns, one thread, float32; speed is torch's time over ours. torch is
        scaled_dot_product_attention with the same mask: none for dense, its causal flag, else a dense bool. Memory:
        what one call adds at its peak in a fresh process, its mask included. Differs: from dense attention as a share
        (relative Frobenius norm), from torch by the largest entry, which must be rounding before anything is timed.
    """


def _words(model: SmolLM2) -> Iterator[Part]:
    yield Part(report.heading(4, "A real model: SmolLM2 writes with qkv's attention, token by token"))
    written = words(model)
    yield Part(report.words_written(written), written.agrees)


def _pictures(model: MiniLM, out: Path) -> Iterator[Part]:
    maps, patterns = out / "attention.png", out / "patterns.png"
    batch = model.tokenize([PRONOUN])
    with torch.no_grad():
        aux = model.bert(batch.ids, batch.attention_mask, return_aux=AuxRequest(weights=True)).aux
    assert aux is not None
    weights = [seen.weights for seen in (aux[place.layer] for place in PLACES) if seen.weights is not None]
    attention_maps(
        maps,
        [weight[0, place.head] for weight, place in zip(weights, PLACES, strict=True)],
        batch.tokens[0],
        [f"layer {place.layer}, head {place.head}: {place.lesson}" for place in PLACES],
        title="Three heads of MiniLM read one sentence",
        marked=WORD,
    )
    pattern_grid(patterns, SMALL, tokens=64, columns=3, title="Who may look at whom: six patterns at 64 tokens")
    yield Part(report.heading(5, "Files, and what to try next"))
    yield Part(
        f"  {maps}   the three heads as maps\n"
        f"  {patterns}    the patterns side by side\n"
        f"  {out / 'results.json'}    every figure of the table\n\n"
        "  qkv explain                          one small call, every number written out\n"
        '  qkv show "causal() & window(7)"      draw a pattern of your own\n'
        '  qkv generate smollm2 "Once upon"     let the model go on from words of your own\n'
        "  qkv info                             backends here, and why each can run or not\n"
        "  python examples/embed_sentences.py   find the sentence that means the same"
    )


def _make_folder(out: Path) -> None:
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        holds = "`out` must be a folder that can be made"
        raise ValueOutOfRange(message(holds, f"got {str(out)!r} ({error.strerror})", "name another one")) from error


def _write_rows(settings: Settings, rows: list[Row]) -> None:
    """The table as JSON: one object a row, with its cost as an object of its own."""
    found = [{**asdict(row), "cost": row.cost and row.cost._asdict()} for row in rows]
    about = {"torch": torch.__version__, "heads": settings.heads, "layer": settings.layer, "rows": found}
    (settings.out / "results.json").write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")
