"""A byte-level BPE tokenizer (Sennrich et al. 2016; Radford et al. 2019) from the metadata of a GGUF file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from qkv.models.files.tokenizer_file import SpecialTokens, guarded, package, tokenizer_in
from qkv.tensorfile import quote, refuse

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Core

CONTROL, USER_DEFINED = 3, 4  # token types of GGUF
KINDS = ("gpt-2", "smollm", "llama-bpe", "qwen2")

# How text is cut before it is merged, as the models' own files say; GPT-2's pattern is built into the ByteLevel step.
_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
SPLITS: Mapping[str, str] = {
    "llama-bpe": rf"{_WORDS}|\p{{N}}{{1,3}}|{_REST}",
    "qwen2": rf"{_WORDS}|\p{{N}}|{_REST}",
}


def read_metadata(file: Path, metadata: Mapping[str, Any]) -> tuple[Core, SpecialTokens]:
    """The tokenizer and the names of its special tokens. Raises CheckpointError naming the file and the field."""
    package()
    said = _Said(file, metadata)
    kind = said.kind()
    tokens, merges = said.texts("tokens"), said.texts("merges")
    vocabulary = {token: n for n, token in enumerate(tokens)}
    if len(vocabulary) < len(tokens):
        said.refuse("tokens", "name each token once", f"{len(tokens) - len(vocabulary)} stand there again")
    named = SpecialTokens(
        bos=said.token("bos", tokens),
        eos=said.token("eos", tokens),
        pad=said.token("padding", tokens),
        unknown=said.token("unknown", tokens),
        chat_template=said.template(),
    )
    pairs = [_pair(said, merge) for merge in merges]
    core = guarded(tokenizer_in(file), lambda: _byte_level(kind, vocabulary, pairs))
    _add_tokens(core, tokens, said.types(len(tokens)))
    _add_template(
        core, named, bos=said.flag("add_bos_token", kind == "llama-bpe"), eos=said.flag("add_eos_token", False)
    )
    return core, named


@dataclass(frozen=True, slots=True)
class _Said:
    """The fields `tokenizer.ggml.*` of a file, each checked when it is asked for."""

    file: Path
    metadata: Mapping[str, Any]

    def kind(self) -> str:
        """Which of the known ways to cut text."""
        model, kind = self.get("model"), self.get("pre")
        if model != "gpt2":
            self.refuse("model", "be 'gpt2', a byte-level BPE", f"got {quote(model)}")
        if kind not in KINDS:
            self.refuse("pre", f"be one of {', '.join(KINDS)}", f"got {quote(kind)}")
        return str(kind)

    def texts(self, name: str) -> tuple[str, ...]:
        value = self.get(name)
        if not isinstance(value, tuple) or not all(isinstance(text, str) for text in value):
            self.refuse(name, "be a list of texts", f"got {quote(value)}")
        return value

    def types(self, count: int) -> Sequence[int]:
        """A type for each token; without the list all are normal."""
        value = self.get("token_type")
        if value is None:
            return [1] * count
        if getattr(value, "shape", None) != (count,):
            self.refuse("token_type", f"be a list of {count} numbers", f"got {quote(value)}")
        return [int(kind) for kind in value.tolist()]

    def token(self, name: str, tokens: Sequence[str]) -> str | None:
        """The token whose number a field gives."""
        number = self.get(f"{name}_token_id")
        if number is None:
            return None
        if type(number) is not int or not 0 <= number < len(tokens):
            self.refuse(f"{name}_token_id", f"lie in 0 .. {len(tokens) - 1}", f"got {quote(number)}")
        return tokens[number]

    def flag(self, name: str, default: bool) -> bool:
        value = self.get(name)
        if value is not None and not isinstance(value, bool):
            self.refuse(name, "be true or false", f"got {quote(value)}")
        return default if value is None else value

    def template(self) -> str | None:
        value = self.metadata.get("tokenizer.chat_template")
        return value if isinstance(value, str) else None

    def get(self, name: str) -> Any:
        return self.metadata.get(f"tokenizer.ggml.{name}")

    def refuse(self, name: str, must: str, seen: str) -> NoReturn:
        refuse(self.file, f"must hold `tokenizer.ggml.{name}`, which must {must}", seen, "use a tokenizer.json")


def _pair(said: _Said, merge: str) -> tuple[str, str]:
    left, _, right = merge.partition(" ")
    if not left or not right or " " in right:
        said.refuse("merges", "hold pairs of tokens with a space between", f"got {quote(merge)}")
    return left, right


def _byte_level(kind: str, vocabulary: dict[str, int], merges: list[tuple[str, str]]) -> Core:
    """The tokenizer without its special tokens."""
    from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers
    from tokenizers import Tokenizer as Core

    core = Core(models.BPE(vocab=vocabulary, merges=merges, ignore_merges=kind == "llama-bpe"))
    first: list[Any] = []
    if kind in SPLITS:
        first = [pre_tokenizers.Split(Regex(SPLITS[kind]), behavior="isolated")]
    elif kind == "smollm":
        first = [pre_tokenizers.Digits(individual_digits=True)]
    last = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=kind not in SPLITS)
    core.pre_tokenizer = pre_tokenizers.Sequence([*first, last])
    if kind == "qwen2":
        core.normalizer = normalizers.NFC()
    core.decoder = decoders.ByteLevel()
    return core


def _add_tokens(core: Core, tokens: Sequence[str], types: Sequence[int]) -> None:
    """Tokens that are never cut: those that control, and those that users defined and any text may contain."""
    from tokenizers import AddedToken

    def of_type(wanted: int, special: bool) -> list[Any]:
        found = (token for token, kind in zip(tokens, types, strict=True) if kind == wanted)
        return [AddedToken(token, normalized=False, special=special) for token in found]

    core.add_special_tokens(of_type(CONTROL, True))
    core.add_tokens(of_type(USER_DEFINED, False))


def _add_template(core: Core, named: SpecialTokens, *, bos: bool, eos: bool) -> None:
    """Let `encode` begin or end with the tokens that the file says to add."""
    from tokenizers import processors

    ends = [named.bos if bos else None, named.eos if eos else None]
    if any(ends):
        single = [end or "" for end in (ends[0], "$A", ends[1])]
        marks = [(end, core.token_to_id(end)) for end in dict.fromkeys(ends) if end]
        core.post_processor = processors.TemplateProcessing(
            single=[part for part in single if part], special_tokens=marks
        )
