"""What every model does with files: it is read from a folder that nobody vouches for, and saved whole or not at all."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn

from qkv.errors import CheckpointError, DTypeError, QkvError, message
from qkv.gguf_file import read_gguf
from qkv.models.files.config_file import Fields
from qkv.models.files.fitting import Spelling, assign, check_stored, ties
from qkv.models.files.generation_file import GENERATION, generates, generation_fields, with_generation
from qkv.models.files.saving import save_model
from qkv.models.files.shards import find_gguf, read_weights
from qkv.models.files.tokenizer import Tokenizer
from qkv.models.files.tokenizer_file import TOKENIZER, json_bytes
from qkv.tensorfile import quote

if TYPE_CHECKING:
    from typing_extensions import Self

Made = TypeVar("Made")


class PretrainedModel(nn.Module):
    """A model that can be read and saved. A subclass is built by `cls(config)`, keeps `self.config` and says:

    - `Config`: its dataclass, with `from_fields(fields)` from config.json and `to_fields()` to it;
    - `own_names(config, tensors)` and `file_names(config, tensors)`: between the published names of its tensors and its
      own; `file_names` also runs on tensors of the meta device, to learn the shapes that a file must have.
    """

    Config: ClassVar[Any]
    config: Any
    tokenizer: Tokenizer | None = None

    @classmethod
    def from_pretrained(
        cls,
        path: str | os.PathLike[str],
        *,
        dtype: torch.dtype | None = None,
        verify: bool = True,
        tokenizer: bool = True,
    ) -> Self:
        """The model in a folder, in eval mode, its tokenizer at `.tokenizer` where the folder has one.

        path: a folder with `config.json` and `model.safetensors` (or shards and their index), or a `.gguf` file or a
        folder with one, where the model can be read from it. dtype: cast the weights; None keeps the file's. verify:
        check the checksums of a folder that `save_pretrained` wrote. tokenizer: read it too; False leaves one that
        cannot be read, or is not needed. The weights are mapped from the file, not copied, so leave that file as it is
        while the model lives. Raises CheckpointError naming the file and the tensor.
        """
        folder = Path(path)
        _check_dtype(dtype)
        gguf = find_gguf(folder)
        if gguf is not None:
            return cls.from_gguf(gguf, dtype=dtype, tokenizer=tokenizer)
        fields = Fields.read(folder / "config.json")
        config = _made(fields.path, lambda: cls.Config.from_fields(fields))
        config = _with_generation(config, folder / GENERATION)
        weights = read_weights(folder, verify=verify)
        config = cls.config_for(config, frozenset(weights.tensors))
        model = cls._empty(config, fields.path, len(weights.tensors))
        expected = cls.file_names(config, ties(model).kept(model.state_dict()))
        check_stored(weights, expected, dtype)
        named = _renamed(weights.source, lambda: cls.own_names(config, weights.tensors))
        assign(model, named, weights.source, dtype, Spelling.of(weights.tensors, expected))
        if tokenizer and (folder / TOKENIZER).is_file():
            model.tokenizer = _tokenizer(lambda: Tokenizer.read(folder / TOKENIZER))
        return model.eval()

    @classmethod
    def from_gguf(
        cls, path: str | os.PathLike[str], *, dtype: torch.dtype | None = None, tokenizer: bool = True
    ) -> Self:
        """The model in a GGUF file, in eval mode and with its tokenizer if any; weights become float32 or the dtype.

        tokenizer: False leaves one that cannot be read, or is not needed.
        """
        _check_dtype(dtype)
        file = read_gguf(path)
        shapes = {name: entry.shape for name, entry in file.entries.items()}
        config = _made(file.path, lambda: cls.gguf_config(file.metadata, shapes))
        config = _with_end_of_turn(config, Fields(file.path, file.metadata))
        model = cls._empty(config, file.path, len(shapes))
        named = _renamed(file.path, lambda: cls.gguf_names(config, file.tensors.cast(dtype or torch.float32)))
        assign(model, named, file.path)
        if tokenizer and "tokenizer.ggml.model" in file.metadata:
            model.tokenizer = _tokenizer(lambda: Tokenizer.from_gguf(file.metadata, source=file.path))
        return model.eval()

    @classmethod
    def assembled(
        cls, config: Any, tensors: Mapping[str, Tensor], source: Path, *, dtype: torch.dtype | None = None
    ) -> Self:
        """The model of a config with these tensors as its own (by its own names), without a copy, in eval mode.

        source: the file that errors name.
        """
        model = cls._empty(config, source, len(tensors))
        assign(model, tensors, source, dtype)
        return model.eval()

    def save_pretrained(self, folder: str | os.PathLike[str], *, max_shard_bytes: int | None = None) -> None:
        """Write what transformers reads: config.json, model.safetensors (or shards and an index), the tokenizer, and
        generation_config.json where the model writes.

        max_shard_bytes: begin a new file where one would hold more bytes of tensors. Every tensor carries a SHA-256,
        which `from_pretrained` verifies. All files are written in full before the first takes its name, config.json
        last, so that an interrupted save leaves the old model or none, never a mixture. Of an earlier model in the
        folder nothing stays, also no tokenizer where this one has none.
        """
        tensors = self.file_names(self.config, ties(self).kept(self.state_dict()))
        others = self.tokenizer.files() if self.tokenizer is not None else {}
        if generates(self.config):
            others[GENERATION] = json_bytes(generation_fields(self.config))
        save_model(Path(folder), self.config.to_fields(), tensors, others, max_shard_bytes)

    @staticmethod
    def own_names(config: Any, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The tensors of a published file under the model's own names; what is no weight of the model is left out."""
        return dict(tensors)

    @staticmethod
    def file_names(config: Any, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The model's tensors under the names that published files have."""
        return dict(tensors)

    @staticmethod
    def config_for(config: Any, names: frozenset[str]) -> Any:
        """The config, changed where only the names of the file's tensors tell what the model is."""
        return config

    @classmethod
    def gguf_config(cls, metadata: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> Any:
        """The config that a GGUF file describes."""
        holds = f"{cls.__name__} must be read from a folder with config.json and model.safetensors"
        seen = f"got a GGUF file of {quote(metadata.get('general.architecture'))} with {len(shapes)} tensors"
        raise CheckpointError(message(holds, seen, "choose a file of another format"))

    @staticmethod
    def gguf_names(config: Any, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The tensors of a GGUF file under the model's own names and in its own order of rows."""
        return dict(tensors)

    @classmethod
    def _empty(cls, config: Any, source: Path, tensors: int) -> Self:
        """The model on the meta device, without weights; more layers than the file has tensors are refused."""
        for name in getattr(config, "__dataclass_fields__", ()):
            count = getattr(config, name)
            if name.endswith("layers") and isinstance(count, int) and count > tensors:
                holds = f"{quote(source.name)} must describe at most one layer for each of its {tensors:,} tensors"
                raise CheckpointError(message(holds, f"got {name} {count:,}", "use the files that belong together"))

        def build() -> Any:
            with torch.device("meta"):
                return cls(config)

        return _made(source, build)


# What sizes and values that make no model, or too large a one, can raise on their way.
_NO_MODEL = (QkvError, ArithmeticError, LookupError, MemoryError, RuntimeError, TypeError, ValueError)


def _made(source: Path, make: Callable[[], Made]) -> Made:
    """What `make` gives; sizes that make no model become a CheckpointError that names the file."""
    try:
        return make()
    except CheckpointError:
        raise
    except _NO_MODEL as error:
        holds = f"{quote(source.name)} must describe a model"
        raise CheckpointError(message(holds, f"got: {_first_line(error)}", "use the file of this model")) from error


def _with_generation(config: Any, file: Path) -> Any:
    """The config with the tokens that generation_config.json names, where there is one and the model writes."""
    if not (generates(config) and file.is_file()):
        return config
    fields = Fields.read(file)
    return _made(file, lambda: with_generation(config, fields))


def _with_end_of_turn(config: Any, fields: Fields) -> Any:
    """The config with the token that ends a turn of a chat among its ends, where a GGUF file names one."""
    token = fields.integer("tokenizer.ggml.eot_token_id", None)
    if token is None or not generates(config) or token in config.end_ids:
        return config
    return replace(config, end_ids=(*config.end_ids, token))


def _tokenizer(read: Callable[[], Tokenizer]) -> Tokenizer:
    """The tokenizer; the error of one that cannot be read says how to have the weights without it."""
    try:
        return read()
    except CheckpointError as error:
        raise CheckpointError(f"{error}, or pass tokenizer=False to leave it out") from error


def _renamed(source: Path, rename: Callable[[], Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """The model's own names for a file's tensors; a tensor that is missing or cannot be cut as needed is an error."""
    try:
        return dict(rename())
    except KeyError as error:
        holds = f"{quote(source.name)} must hold the model's tensors"
        raise CheckpointError(
            message(holds, f"{error} is not there", "use the file that belongs to this config")
        ) from error
    except (RuntimeError, IndexError, ValueError) as error:
        if isinstance(error, CheckpointError):
            raise
        holds = f"{quote(source.name)} must hold the model's tensors in the shapes of its config"
        raise CheckpointError(
            message(holds, f"got: {_first_line(error)}", "use the file that belongs to this config")
        ) from error


def _check_dtype(dtype: torch.dtype | None) -> None:
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        holds = "`dtype` must be a floating-point type of torch"
        raise DTypeError(message(holds, f"got {dtype!r}", "torch.float32, torch.bfloat16, ..."))


def _first_line(error: Exception) -> str:
    """The first line of its text; a MemoryError, say, has none, and is named."""
    return str(error).split("\n", 1)[0][:200] or type(error).__name__
