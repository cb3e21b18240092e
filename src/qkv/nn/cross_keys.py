"""What cross-attention reads: the keys of a memory, made now or held by a state."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from qkv.errors import ShapeError, ValueOutOfRange, message
from qkv.nn.attention_checks import check_rows
from qkv.nn.attention_state import Keys
from qkv.nn.multihead_attention import MultiheadAttention
from qkv.nn.rows import Rows
from qkv.nn.stack import entered
from qkv.nn.stack_state import StackState


def keys_of_memory(
    attentions: Sequence[MultiheadAttention],
    batch: int,
    memory: Tensor | None,
    memory_mask: Tensor | None,
    state: StackState | None,
) -> tuple[Sequence[Keys] | None, Rows | None]:
    """The keys that each of these attentions reads, and where the real rows of the memory (B, S, memory_dim) stand.

    Both are None where there is no cross-attention. Raises where a memory is missing, unlooked for or of another shape.
    """
    known = None if state is None else state.cross
    if not attentions or known is not None:
        if memory is not None or memory_mask is not None:
            seen = "`state` has the keys of a memory" if attentions else "these layers have no cross-attention"
            remedy = "leave it out, as after the first call" if attentions else "make them with cross_attention=True"
            raise ValueOutOfRange(message("`memory` and `memory_mask` must be left out here", seen, remedy))
        if known is None or state is None:
            return None, None
        return known, state.memory or Rows(batch, known[0].key.shape[1])
    if memory is None:
        remedy = "pass it to forward or to initial_state, or make the layers with cross_attention=False"
        raise ValueOutOfRange(message("layers with cross-attention must be given a `memory`", "got none", remedy))
    check_rows("memory", memory, attentions[0].key_dim, attentions[0].k_proj)
    if memory.shape[0] != batch:
        seen = f"got {memory.shape[0]} for a batch of {batch}"
        raise ShapeError(message("`memory` must have a row for each sequence", seen, "repeat or choose its rows"))
    rows = Rows.of(memory_mask, *memory.shape[:2], name="memory_mask")
    memory = entered(rows, memory)
    return [one.keys_of(memory, lengths=rows.lengths) for one in attentions], rows
