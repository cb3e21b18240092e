"""Names of tensors in a file, and in a model that is built of other parts than those the file was written from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from qkv.errors import CheckpointError, message
from qkv.tensorfile import quote


def respelled(
    tensors: Mapping[str, Tensor], pairs: Sequence[tuple[str, str]], *, back: bool = False
) -> dict[str, Tensor]:
    """The same tensors with each (old, new) of `pairs` replaced in their names, in this order.

    back: from new to old, in the order turned round. Raises CheckpointError where two names become one.
    """
    steps = [(new, old) for old, new in reversed(pairs)] if back else list(pairs)
    spelled = {}
    for name, tensor in tensors.items():
        for old, new in steps:
            name = name.replace(old, new)  # noqa: PLW2901 - one name, step by step
        if name in spelled:
            seen = f"got {quote(name)} in two spellings"
            raise CheckpointError(message("the file must hold each tensor once", seen, "remove one of the two"))
        spelled[name] = tensor
    return spelled
