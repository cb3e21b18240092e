"""State for decoding: keys and values of sequences that grow, and attention over them at the right positions."""

from qkv.cache.contiguous import KVCache as KVCache
from qkv.cache.paged import PagedKVCache as PagedKVCache
from qkv.cache.rolling import RollingKVCache as RollingKVCache
