"""generation_config.json: which tokens begin, end and fill what a model writes. It overrides config.json, which often
names only one end where a chat has two.

How tokens are drawn is left to the caller: temperatures and the like in it are not read.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, TypeVar

from qkv.models.files.config_file import Fields

GENERATION = "generation_config.json"
ENDS = "eos_token_id"
IDS = {"begin_id": "bos_token_id", "pad_id": "pad_token_id", "start_id": "decoder_start_token_id"}  # by our fields

Config = TypeVar("Config")


def generates(config: Any) -> bool:
    """Whether the config is that of a model that writes."""
    return hasattr(config, "end_ids")


def with_generation(config: Config, fields: Fields) -> Config:
    """The config with the tokens that the file names; those that it does not name stay."""
    read: dict[str, Any] = {ours: fields.integer(stored, None) for ours, stored in IDS.items() if hasattr(config, ours)}
    read["end_ids"] = fields.integers(ENDS, None)
    named = {ours: value for ours, value in read.items() if value is not None}
    changed: Config = replace(config, **named)  # type: ignore[type-var]
    return changed


def generation_fields(config: Any) -> dict[str, Any]:
    """What the file says of a config."""
    ends = list(config.end_ids)
    said = {stored: getattr(config, ours, None) for ours, stored in IDS.items()}
    said[ENDS] = ends[0] if len(ends) == 1 else ends or None
    return {stored: value for stored, value in said.items() if value is not None}
