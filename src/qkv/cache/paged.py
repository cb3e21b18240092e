"""The cache in pages: sequences take memory as they grow, give it back, and share what they have in common."""

from __future__ import annotations

import torch
from torch import Tensor

from qkv.cache.arguments import read_shape, read_size
from qkv.cache.memory import positions_of
from qkv.cache.pages import PagedCache
from qkv.cache.steps import Stage
from qkv.errors import ValueOutOfRange, message

UNIT = 16  # a page is a multiple of it


class PagedKVCache(PagedCache):
    """Keys and values in `pages` pages of `page_size` keys each, one pool for all B sequences.

    A page is taken when a sequence grows into it, and free again once no sequence holds it. `reorder` shares pages; one
    that is shared is copied when a sequence writes to it. The backend "cpu" reads pages where they lie; every other one
    gets a gathered copy of all keys, as does a call that needs gradients or asks for weights.

    >>> cache = PagedKVCache(1, 2, 4, 8)
    >>> step = torch.ones(1, 2, 1, 8)
    >>> cache.attend(step, step, step).shape, cache.table
    (torch.Size([1, 2, 1, 8]), tensor([[0]], dtype=torch.int32))
    """

    def __init__(
        self,
        batch: int,
        heads: int,
        pages: int,
        head_dim: int,
        value_dim: int | None = None,
        *,
        page_size: int = 64,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
    ) -> None:
        shape = read_shape(batch, heads, head_dim, value_dim, dtype, device)
        count, size = read_size("pages", pages, 1), read_size("page_size", page_size, 1)
        if size % UNIT:
            holds = f"`page_size` must be a multiple of {UNIT}"
            raise ValueOutOfRange(message(holds, f"got {size}", "take 64, which is what the native core works in"))
        super().__init__(shape, count, size)

    @property
    def keys(self) -> Tensor:
        """A copy of the keys in order, (B, G, length, D)."""
        return self._gathered(self.length)[0]

    @property
    def values(self) -> Tensor:
        """A copy of the values in order, (B, G, length, V)."""
        return self._gathered(self.length)[1]

    @property
    def key_positions(self) -> Tensor:
        return positions_of(self._lengths, self.device)

    @property
    def free_pages(self) -> int:
        """How many pages no sequence holds."""
        return len(self._pool.free)

    def _check_room(self, stage: Stage) -> None:
        if self._settled(stage):
            return
        needed, free = self._needed(stage, self._grown(stage)), len(self._pool.free)
        if needed > free:
            holds = "the pages of all sequences must fit into the pool"
            seen = f"{needed} more are needed where {free} of {self._pool.pages} are free"
            remedy = (
                "give the cache more pages, or free some with truncate, or with reorder without the ended sequences"
            )
            raise ValueOutOfRange(message(holds, seen, remedy))
