"""Sizes that stand in config.json under one of two names: a model's own, and the one that transformers gives to all."""

from __future__ import annotations

from collections.abc import Mapping

from qkv.models.files.config_file import Fields


def read_size(fields: Fields, name: str, aliases: Mapping[str, str]) -> int:
    """The size under `name`, or under its alias. Raises CheckpointError where they disagree."""
    other = aliases.get(name, name)
    if not fields.has(other):
        return fields.integer(name)
    size = fields.integer(other)
    if fields.integer(name, size) != size:
        fields.refuse(other, f"{fields.integer(name)}, as `{name}` is", "remove the wrong one of the two")
    return size
