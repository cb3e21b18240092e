"""The files of a tokenizer: tokenizer.json, and tokenizer_config.json, which names the special tokens."""

from __future__ import annotations

import importlib.util
import json
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from qkv.errors import CheckpointError, message
from qkv.models.files.config_file import Fields
from qkv.models.files.tokenizer_growth import check_growth
from qkv.tensorfile import quote, refuse, regular_size

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Core

Given = TypeVar("Given")

MAX_TOKENIZER = 256 * 2**20  # bytes
TOKENIZER, BESIDE = "tokenizer.json", "tokenizer_config.json"
INSTALL = 'pip install "qkv[models]"'


@dataclass(frozen=True, slots=True)
class SpecialTokens:
    """What the special tokens are called, where the files say so; others: further fields, carried to the next save."""

    bos: str | None = None
    eos: str | None = None
    pad: str | None = None
    unknown: str | None = None
    chat_template: str | None = None
    others: Mapping[str, Any] = field(default_factory=dict)


_FIELDS = {"bos": "bos_token", "eos": "eos_token", "pad": "pad_token", "unknown": "unk_token"}
_CLASS = "tokenizer_class"
_UNSAVED = (_CLASS, "auto_map")  # they ask for files or code that a save does not write


def read_tokenizer(path: Path) -> tuple[Core, SpecialTokens]:
    """The tokenizer of a tokenizer.json, its truncation and padding switched off, and its special tokens' names.

    Raises CheckpointError when a file cannot be read, or when its steps could make a text too long (`check_growth`).
    """
    core_type = package()
    size = regular_size(path)
    if size > MAX_TOKENIZER:
        refuse(path, f"must have at most {MAX_TOKENIZER:,} bytes", f"got {size:,}")
    core: Core = guarded(tokenizer_in(path), lambda: core_type.from_buffer(path.read_bytes()))
    check_growth(path, core)
    core.no_truncation()
    core.no_padding()
    beside = path.with_name(BESIDE)
    return core, _named(Fields.read(beside)) if beside.is_file() else SpecialTokens()


def without(core: Core, control: frozenset[str]) -> Core:
    """The same tokenizer with these tokens out of any text's reach: their vocabulary entries get names nobody knows.

    Some models look words up whole (Unigram, WordLevel), and would find "</s>" in a text even where it is not sought.
    """
    table = json.loads(core.to_str())
    table["added_tokens"] = [token for token in table["added_tokens"] if token["content"] not in control]
    model, secret = table["model"], secrets.token_hex(16)
    unknown = model["vocab"][model["unk_id"]][0] if model.get("unk_id") is not None else model.get("unk_token")
    hidden = {token: f"{secret}{token}" for token in control if token != unknown}
    if isinstance(model["vocab"], dict):
        model["vocab"] = {hidden.get(token, token): n for token, n in model["vocab"].items()}
    else:
        model["vocab"] = [[hidden.get(token, token), score] for token, score in model["vocab"]]
    if "merges" in model:
        model["merges"] = [pair for pair in model["merges"] if not {*pair, "".join(pair)} & hidden.keys()]
    plain: Core = type(core).from_str(json.dumps(table))
    plain.encode_special_tokens = True
    return plain


def side_table(named: SpecialTokens) -> dict[str, Any]:
    """The tokenizer_config.json that transformers needs beside tokenizer.json."""
    table: dict[str, Any] = {_CLASS: "PreTrainedTokenizerFast", **named.others}
    table |= {stored: getattr(named, ours) for ours, stored in _FIELDS.items() if getattr(named, ours) is not None}
    return table | ({"chat_template": named.chat_template} if named.chat_template is not None else {})


def json_bytes(table: Mapping[str, Any]) -> bytes:
    """A JSON object as our files hold it."""
    text = json.dumps(table, indent=2, ensure_ascii=False) + "\n"
    return text.encode("utf-8", "backslashreplace")  # half a pair of surrogates, as JSON writes it too


def tokenizer_in(file: Path) -> str:
    """What must hold of a file with a tokenizer."""
    return f"{quote(file.name)} must hold a tokenizer"


def package() -> Any:
    """The class of the package `tokenizers`, or the error that says how to get it."""
    if importlib.util.find_spec("tokenizers") is None:
        raise CheckpointError(message("reading a tokenizer needs `tokenizers`", "it is not installed", INSTALL))
    from tokenizers import Tokenizer as Core

    return Core


def guarded(holds: str, call: Callable[[], Given]) -> Given:
    """What a call into the package gives; whatever it raises becomes a CheckpointError: `holds` is what must hold.

    The package raises plain Exception, and where its own code panics a BaseException of this name.
    """
    try:
        return call()
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise CheckpointError(message(holds, f"got: {str(error)[:100]}", "use the file of this model")) from error


def _named(fields: Fields) -> SpecialTokens:
    """Names from tokenizer_config.json, where a token is a text or an object with the text as `content`."""

    def token(stored: str) -> str | None:
        value = fields.table.get(stored)
        return fields.part(stored).text("content", None) if isinstance(value, dict) else fields.text(stored, None)

    template = fields.table.get("chat_template")
    names = {ours: token(stored) for ours, stored in _FIELDS.items()}
    if isinstance(template, str):
        known = {*_FIELDS.values(), *_UNSAVED, "chat_template"}
    else:
        known, template = {*_FIELDS.values(), *_UNSAVED}, None  # several templates are carried along as they are
    others = {name: value for name, value in fields.table.items() if name not in known}
    return SpecialTokens(**names, chat_template=template, others=others)
