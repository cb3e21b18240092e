"""What a published config.json says of rotary positions, in each of its spellings."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

from qkv.errors import CheckpointError, UnsupportedError, message, unknown_name
from qkv.nn.rotary_scaling import LinearScaling, Llama3Scaling, Scaling, YarnScaling

_KINDS = ("default", "linear", "llama3", "yarn")
_TRAINED, _LENGTH = ("llama3", "yarn"), "original_max_position_embeddings"  # kinds that ask for the trained length
_BY_LENGTH = "its frequencies change with the length of the sequence, so keys in a cache would have to turn anew"
_REFUSED = {
    "dynamic": _BY_LENGTH,
    "longrope": _BY_LENGTH,
    "su": _BY_LENGTH,
    "mrope": "its positions have several coordinates",
    "axial": "its positions have several coordinates",
    "proportional": "it turns channels that are not side by side",
}
_REMEDY = "fetch the config again, or choose another checkpoint"


class RotaryFields(NamedTuple):
    """What `Rotary` is made of."""

    base: float
    width: int
    scaling: Scaling | None


def read_rotary(config: Mapping[str, object], head_dim: int) -> RotaryFields:
    """The rotary fields of a config, whose `rope_parameters` or older `rope_scaling` say how positions are stretched.

    Raises CheckpointError for fields that are missing or of a wrong kind, UnsupportedError for kinds of scaling that
    cannot be had here, UnknownName for others.
    """
    rope = gathered(config)
    kind = rope["rope_type"]
    if isinstance(kind, str) and "mrope_section" in rope:
        kind = "mrope"
    if isinstance(kind, str) and kind in _REFUSED:
        holds = f"`rope_type` must be one of {', '.join(_KINDS)}"
        raise UnsupportedError(message(holds, f"got {kind!r}: {_REFUSED[kind]}", "choose another checkpoint"))
    if kind not in _KINDS:
        raise unknown_name("rope_type", kind, _KINDS)
    return RotaryFields(_number(rope, "rope_theta"), _width(rope, config, head_dim), _scaling(str(kind), rope, config))


def gathered(config: Mapping[str, object]) -> dict[str, object]:
    """The one table of rotary parameters, with `rope_type` and `rope_theta`, from wherever the config has them.

    As transformers 5.24 gathers it (convert_rope_params_to_dict): the older `rope_scaling` comes before
    `rope_parameters`; a base in the table before one beside it, and a null base stays null; a trained length beside
    the table before one in it.
    """
    table = _table(config)
    rope = {name: value for name, value in table.items() if name != "type"}
    rope.setdefault("rope_type", table.get("type", "default"))
    bases = [config[name] for name in ("rope_theta", "rotary_emb_base") if name in config]
    rope.setdefault("rope_theta", bases[0] if bases else 10000.0)
    if rope["rope_type"] in _TRAINED and config.get(_LENGTH) is not None:
        rope[_LENGTH] = config[_LENGTH]
    return rope


def _table(config: Mapping[str, object]) -> Mapping[str, object]:
    """The first object that says something, or no fields."""
    for name in ("rope_scaling", "rope_parameters"):
        rope = config.get(name)
        if rope is None or rope == {}:
            continue
        if not isinstance(rope, Mapping):
            raise CheckpointError(message(f"`{name}` must be an object", f"got {rope!r}", _REMEDY))
        if any(isinstance(part, Mapping) for part in rope.values()):
            seen = f"got one for each of {', '.join(map(repr, rope))}"
            remedy = f"pass the config with {name} replaced by that of the layer's own kind"
            raise UnsupportedError(message(f"`{name}` must be those of one kind of layer", seen, remedy))
        return rope
    return {}


def _width(rope: Mapping[str, object], config: Mapping[str, object], head_dim: int) -> int:
    if config.get("rotary_dim") is not None:  # GPT-J
        return _whole(config, "rotary_dim")
    for table, name in (
        (rope, "partial_rotary_factor"),
        (config, "partial_rotary_factor"),
        (config, "rotary_pct"),  # GPT-NeoX, in older files
    ):
        if table.get(name) is not None:
            return int(head_dim * _number(table, name))
    return head_dim


def _scaling(kind: str, rope: Mapping[str, object], config: Mapping[str, object]) -> Scaling | None:
    if kind == "default":
        return None
    if kind == "linear":
        return LinearScaling(_number(rope, "factor"))
    original = _original_length(rope, config)
    if kind == "llama3":
        low, high = _number(rope, "low_freq_factor"), _number(rope, "high_freq_factor")
        return Llama3Scaling(_number(rope, "factor"), low, high, original)
    if rope.get("factor") is None:
        factor = _number(config, "max_position_embeddings") / original
    else:
        factor = _number(rope, "factor")
    truncate = rope.get("truncate", True)
    if not isinstance(truncate, bool):
        raise CheckpointError(message("`truncate` must be true or false", f"got {truncate!r}", _REMEDY))
    return YarnScaling(
        factor,
        original,
        beta_fast=_optional(rope, "beta_fast") or 32.0,
        beta_slow=_optional(rope, "beta_slow") or 1.0,
        attention_factor=_optional(rope, "attention_factor"),
        mscale=_optional(rope, "mscale"),
        mscale_all_dim=_optional(rope, "mscale_all_dim"),
        truncate=truncate,
    )


def _original_length(rope: Mapping[str, object], config: Mapping[str, object]) -> float:
    """The trained length, or, where nothing says it, the longest input."""
    return _number(config, "max_position_embeddings") if rope.get(_LENGTH) is None else _number(rope, _LENGTH)


def _number(table: Mapping[str, object], name: str) -> float:
    value = table.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        seen = "it is missing" if value is None else f"got {value!r}"
        raise CheckpointError(message(f"`{name}` must be a number above 0", seen, _REMEDY))
    return float(value)


def _whole(table: Mapping[str, object], name: str) -> int:
    value = _number(table, name)
    if not value.is_integer():
        raise CheckpointError(message(f"`{name}` must be an integer", f"got {value}", _REMEDY))
    return int(value)


def _optional(table: Mapping[str, object], name: str) -> float | None:
    """A number; what is absent, null or 0 counts as not given."""
    return _number(table, name) if table.get(name) else None
