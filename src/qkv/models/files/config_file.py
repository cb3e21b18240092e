"""Reads config.json: every field by name, of the type that it must have, or an error that names file and field."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, TypeVar, overload

from qkv.errors import CheckpointError, message
from qkv.tensorfile import quote, read_object

Default = TypeVar("Default")

MAX_CONFIG = 4 * 2**20  # bytes
REQUIRED: Any = object()
FETCH = "use the file that belongs to this model"

# The largest whole numbers that a file may say. A few bytes could ask for any amount of time and memory while a model
# is built, before its sizes are held against the tensors; no model that is known comes near.
LARGEST = 2**24  # of a field that has no row below: tokens, positions, windows
LAYERS, WIDTH, HEAD = 10_000, 2**20, 2**16
LIMITS: Mapping[str, int] = {
    **dict.fromkeys(("num_hidden_layers", "n_layer", "num_layers", "num_decoder_layers", "llama.block_count"), LAYERS),
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "llama.embedding_length"), WIDTH),
    **dict.fromkeys(("num_attention_heads", "num_key_value_heads", "n_head", "num_heads"), HEAD),
    **dict.fromkeys(("llama.attention.head_count", "llama.attention.head_count_kv", "linear_heads"), HEAD),
    **dict.fromkeys(("linear_num_key_heads", "linear_num_value_heads"), HEAD),
    **dict.fromkeys(("head_dim", "d_kv", "linear_key_head_dim", "linear_value_head_dim"), HEAD),
    **dict.fromkeys(("llama.attention.key_length", "llama.rope.dimension_count"), HEAD),
    "relative_attention_num_buckets": 1024,
    "relative_attention_max_distance": 2**17,
    "image_size": 2**13,
    "patch_size": 2**13,
}


@dataclass(frozen=True, slots=True)
class Fields:
    """The fields of one config file. `path` is named in errors; `table` holds what the file says, checked on reading.

    A field that is absent or null takes the default; without a default it must be there.
    """

    path: Path
    table: Mapping[str, Any]
    inside: str = ""  # where this table stands in the file: "rope_parameters." for a nested one

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> Fields:
        """The object in a JSON file. Raises CheckpointError when the file is no JSON object or names a field twice."""
        file = Path(path)
        return cls(file, read_object(file, MAX_CONFIG))

    def has(self, name: str) -> bool:
        """Whether the field is there and not null."""
        return self.table.get(name) is not None

    @overload
    def integer(self, name: str) -> int: ...
    @overload
    def integer(self, name: str, default: Default) -> int | Default: ...
    def integer(self, name: str, default: Any = REQUIRED) -> Any:
        """A whole number within the bounds of its field; 3.0 is one too, as some writers say it."""
        value = self._value(name, default)
        if value is default:
            return default
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        return self._bounded(name, value) if _is_integer(value) else self.refuse(name, "an integer")

    @overload
    def number(self, name: str) -> float: ...
    @overload
    def number(self, name: str, default: Default) -> float | Default: ...
    def number(self, name: str, default: Any = REQUIRED) -> Any:
        """A finite number, as a float."""
        value = self._value(name, default)
        if value is default:
            return default
        return float(value) if _is_number(value) else self.refuse(name, "a finite number")

    @overload
    def flag(self, name: str) -> bool: ...
    @overload
    def flag(self, name: str, default: Default) -> bool | Default: ...
    def flag(self, name: str, default: Any = REQUIRED) -> Any:
        """True or false."""
        value = self._value(name, default)
        return value if value is default or isinstance(value, bool) else self.refuse(name, "true or false")

    @overload
    def text(self, name: str) -> str: ...
    @overload
    def text(self, name: str, default: Default) -> str | Default: ...
    def text(self, name: str, default: Any = REQUIRED) -> Any:
        """A string."""
        value = self._value(name, default)
        return value if value is default or isinstance(value, str) else self.refuse(name, "a text")

    def one_of(self, name: str, *wanted: Any, default: Any = REQUIRED) -> Any:
        """One of the values that the model can be: `one_of("hidden_act", "gelu", "gelu_new")`."""
        value = self._value(name, default)
        fits = value is default or any(
            value == one and isinstance(value, bool) == isinstance(one, bool) for one in wanted
        )
        return value if fits else self.refuse(name, " or ".join(map(repr, wanted)), "choose another checkpoint")

    @overload
    def integers(self, name: str) -> tuple[int, ...]: ...
    @overload
    def integers(self, name: str, default: Default) -> tuple[int, ...] | Default: ...
    def integers(self, name: str, default: Any = REQUIRED) -> Any:
        """One whole number or a list of them, always as a tuple: `eos_token_id` comes in both forms."""
        value = self._value(name, default)
        if value is default:
            return default
        several = value if isinstance(value, list) else [value]
        if not all(map(_is_integer, several)):
            self.refuse(name, "an integer or a list of integers")
        return tuple(self._bounded(name, one) for one in several)

    @overload
    def texts(self, name: str) -> tuple[str, ...]: ...
    @overload
    def texts(self, name: str, default: Default) -> tuple[str, ...] | Default: ...
    def texts(self, name: str, default: Any = REQUIRED) -> Any:
        """A list of strings, such as `layer_types`, as a tuple."""
        value = self._value(name, default)
        if value is default:
            return default
        right = isinstance(value, list) and all(isinstance(one, str) for one in value)
        return tuple(value) if right else self.refuse(name, "a list of texts")

    def part(self, name: str) -> Fields:
        """A nested object's fields, such as `rope_parameters`; without the object, no fields."""
        value = self._value(name, None)
        if value is not None and not isinstance(value, dict):
            self.refuse(name, "an object")
        return Fields(self.path, value or {}, f"{self.inside}{name}.")

    def refuse(self, name: str, must: str, remedy: str = FETCH) -> NoReturn:
        """Raise the error for a field that is not what it must be: `must` completes "must be ..."."""
        value = self.table.get(name)
        seen = f"got {quote(value)}" if name in self.table else "it is not there"
        holds = f"`{self.inside}{name}` in {quote(self.path.name)} must be {must}"
        raise CheckpointError(message(holds, seen, remedy))

    def _bounded(self, name: str, value: int) -> int:
        """The number, unless it lies beyond what its field may say."""
        limit = LIMITS.get(name, LARGEST)
        return value if abs(value) <= limit else self.refuse(name, f"at most {limit:,}", "choose another checkpoint")

    def _value(self, name: str, default: Any) -> Any:
        value = self.table.get(name)
        if value is not None:
            return value
        return self.refuse(name, "given") if default is REQUIRED else default


def _is_integer(value: object) -> bool:
    return type(value) is int


def _is_number(value: object) -> bool:
    return type(value) in (int, float) and math.isfinite(value) and abs(value) < 1e300  # type: ignore[arg-type]
