"""Rotary positions in config.json: every spelling that transformers reads, as the one table that our configs hold."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from qkv.models.files.config_file import Fields
from qkv.nn.rotary_config import gathered

DEFAULT = {"rope_type": "default", "rope_theta": 10000.0}  # where a file says nothing of it
PART = "partial_rotary_factor"
TRAINED = "original_max_position_embeddings"
NEVER_NULL = ("rope_type", "rope_theta", PART, TRAINED)


def read_rope(fields: Fields, *, whole: bool = True) -> dict[str, Any] | None:
    """The table, or None where the file says a base of null: no rotation, in models that can be without.

    whole: of models of transformers that turn whole heads. A share of a head that the file says is then passed over in
    the plain kind, as they do, and refused in the scaled kinds, with which they compute nothing.
    Raises CheckpointError naming the field that does not fit.
    """
    for name in ("rope_scaling", "rope_parameters"):
        fields.part(name)  # an object, or absent
    rope = gathered(fields.table)
    inside = Fields(fields.path, rope, "rope_parameters.")
    kind = inside.text("rope_type")
    if TRAINED in rope:
        inside.number(TRAINED)
    if whole:
        said = rope.pop(PART) if PART in rope else fields.table.get(PART)
        if kind != DEFAULT["rope_type"]:
            Fields(fields.path, {PART: said}, inside.inside).one_of(PART, 1, default=None)
    if rope["rope_theta"] is None:
        return None
    return rope | {"rope_theta": inside.number("rope_theta")}


def write_rope(rope: Mapping[str, Any]) -> dict[str, Any]:
    """The table as transformers takes it: kind and base said, and null only what may be."""
    named = {"rope_type" if name == "type" else name: value for name, value in rope.items()}
    said = DEFAULT | {name: value for name, value in named.items() if value is not None or name not in NEVER_NULL}
    return {"factor": None, **said} if said["rope_type"] == "yarn" else said  # null: the longest row by the trained one


def turns_a_part(rope: Mapping[str, Any]) -> bool:
    """Whether only some channels of a head are turned, which our models can and those of transformers cannot."""
    return rope.get(PART) not in (None, 1)
