"""How much longer the steps of a tokenizer can make a text: forty times "a" -> "aa" would never come to an end."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qkv.tensorfile import quote, refuse

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Core

MAX_GROWTH = 64.0
PARTS = ("normalizer", "pre_tokenizer", "post_processor", "decoder")
INNER = ("normalizers", "pretokenizers", "processors", "decoders")  # what sequences call their steps

# By how much at most other steps lengthen a text. One of each is usual; each further one counts, since what stands
# between two can make the second lengthen again.
REPEATED: Mapping[str, float] = {
    "NFC": 3, "NFD": 4, "NFKC": 18, "NFKD": 18, "Lowercase": 2, "BertNormalizer": 12, "ByteLevel": 4, "Metaspace": 2,
    "BPEDecoder": 2, "CTC": 2, "Precompiled": 2 * MAX_GROWTH,
}  # fmt: skip


def check_growth(path: Path, core: Core) -> None:
    """Refuse a tokenizer one of whose parts could make a text more than 64 times as long, by its steps.

    Counted are replacements, by the lengths of what they seek and what they write; templates, by how often they repeat
    the text; and steps that lengthen by tables of their own where they come again. Raises CheckpointError naming file
    and part.

    What cannot be told from the steps, and may still take long or much: the time that a regular expression needs on
    some text (the package has no limit for it), and what the first `Precompiled` table writes for a character.
    """
    for part in PARTS:
        step = getattr(core, part)
        growth = _growth(json.loads(step.__getstate__())) if step is not None else 1.0
        if growth > MAX_GROWTH:
            holds = f"must not make a text more than {MAX_GROWTH:g} times as long in its {quote(part)}"
            refuse(path, holds, f"its steps together could by {growth:,.4g}", "use the tokenizer of this model")


def _growth(step: Mapping[str, Any]) -> float:
    """How many times as long all steps together can make a text."""
    growth, seen = 1.0, set()
    for one in _steps(step):
        kind = str(one.get("type"))
        if kind == "Replace":
            growth *= _replaced(one["pattern"], one["content"])
        elif kind == "TemplateProcessing":
            growth *= max(_repeats(one["single"]), _repeats(one["pair"]))
        elif kind in seen:
            growth *= REPEATED.get(kind, 1.0)
        seen.add(kind)
    return growth


def _steps(step: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """The steps of sequences within sequences, in order."""
    waiting = [step]
    while waiting:
        one = waiting.pop()
        inner = [sub for name in INNER for sub in one.get(name, ())]
        waiting += reversed(inner)
        if not inner:
            yield one


def _replaced(pattern: Mapping[str, str], content: str) -> float:
    """What is written for what is sought; an expression may find nothing before every character, which all stay."""
    sought = pattern.get("String", "")
    return max(len(content) / len(sought), 1.0) if sought else 1.0 + len(content)


def _repeats(template: list[Mapping[str, Any]]) -> float:
    """How often a template holds the same text."""
    texts = [piece["Sequence"]["id"] for piece in template if "Sequence" in piece]
    return float(max((texts.count(one) for one in set(texts)), default=1))
