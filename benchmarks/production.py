"""The contenders of suite `production`: ours through caches and packed calls, and torch's ways to the same answers."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from registry import Case, Contender, Data, Form, prepare
from torch import Tensor
from torch.nn import functional as F

import qkv

ROOM = 256  # tokens that a cache can take beyond the first call: each run is the next token
CHUNK = 4_096  # tokens that a rolling cache is filled by


def cached(case: Case, data: Data, backend: str) -> Contender:
    """A KVCache that holds all keys but the last; each run appends one and attends, as decoding does."""
    axes, lengths = case.shape(data.tokens), _lengths(case, data)
    cache = qkv.KVCache(axes.batch, axes.kv_heads, data.tokens + ROOM, data.key.shape[3], dtype=data.key.dtype)
    cache.append(data.key[:, :, :-1], data.value[:, :, :-1], lengths=None if lengths is None else lengths - 1)
    return _decoding(cache.attend, data, lengths, backend)


def rolling(case: Case, data: Data, backend: str) -> Contender:
    """The same with a cache that keeps what the pattern may still need."""
    axes, pattern = case.shape(data.tokens), case.pattern(data.tokens)
    options = {"dtype": data.key.dtype}
    cache = qkv.RollingKVCache.for_pattern(pattern, axes.batch, axes.kv_heads, data.key.shape[3], **options)
    for begin in range(0, data.tokens - 1, CHUNK):
        rows = slice(begin, min(begin + CHUNK, data.tokens - 1))
        cache.append(data.key[:, :, rows], data.value[:, :, rows])
    return _decoding(cache.attend, data, None, backend)


def _decoding(attend: Callable[..., Tensor], data: Data, lengths: Tensor | None, backend: str) -> Contender:
    """Calls with the last key and value of each sequence."""
    at = torch.full((data.key.shape[0],), data.tokens) if lengths is None else lengths
    batch = torch.arange(len(at))
    key, value = (tensor[batch, :, at - 1][:, :, None] for tensor in (data.key, data.value))

    def forward(query: Tensor, *_: Tensor) -> Tensor:
        return attend(query, key, value, backend=backend)

    return Contender(lambda direction: prepare(forward, data, direction))


def varlen(case: Case, data: Data, backend: str) -> Contender:
    """Documents in a row, (total, H, D), in one call."""
    ends = torch.tensor([0, *_sizes(case, data)], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    pattern = qkv.causal()

    def forward(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return qkv.varlen_attention(query, key, value, ends, ends, pattern=pattern, backend=backend)

    form = Form(lambda tensor: (tensor[0].transpose(0, 1).contiguous(),), lambda parts: parts[0].transpose(0, 1)[None])
    return Contender(lambda direction: prepare(forward, data, direction, form))


def sdpa_sliced(case: Case, data: Data) -> Contender | str:
    """torch's own attention on the last keys alone, which somebody sliced."""
    if not case.decodes or case.torch_form != "bool mask" or case.lengths is not None:
        return "slices the window of a decoding step"
    width = int(case.pattern(data.tokens).count(1, data.tokens))

    def forward(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        near = slice(data.tokens - width, None)
        return F.scaled_dot_product_attention(query, key[:, :, near], value[:, :, near], enable_gqa=True)

    return Contender(lambda direction: prepare(forward, data, direction))


def sdpa_apart(case: Case, data: Data) -> Contender | str:
    """torch's own attention, one call a document or sequence, on tensors of its own."""
    if case.lengths is None:
        return "takes documents or sequences one by one"
    sizes, options = _sizes(case, data), {"is_causal": not case.decodes, "enable_gqa": case.decodes}

    def forward(*parts: Tensor) -> tuple[Tensor, ...]:
        each = len(sizes)
        inputs = zip(parts[:each], parts[each : 2 * each], parts[2 * each :], strict=True)
        return tuple(F.scaled_dot_product_attention(*tensors, **options) for tensors in inputs)

    form = Form(lambda tensor: _sequences(tensor, sizes), torch.cat) if case.decodes else _documents(sizes)
    return Contender(lambda direction: prepare(forward, data, direction, form))


def sdpa_padded(case: Case, data: Data, *, is_masked: bool) -> Contender | str:
    """torch's own attention on documents padded to the longest, with a mask (N, 1, longest, longest) of what is theirs.

    Not `is_masked`: its causal flag alone, which keeps padding behind a causal document out of sight.
    """
    if case.lengths is None or case.decodes:
        return "pads documents"
    sizes, keep = _sizes(case, data), None
    longest = max(sizes)
    if is_masked:
        inside = torch.arange(longest) < torch.tensor(sizes)[:, None]
        keep = inside[:, None, None, :] & torch.ones(longest, longest, dtype=torch.bool).tril()

    def forward(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(query, key, value, attn_mask=keep, is_causal=keep is None)

    form = Form(lambda tensor: (_padded(tensor, sizes),), lambda parts: _unpadded(parts[0], sizes))
    return Contender(lambda direction: prepare(forward, data, direction, form), 0 if keep is None else keep.nbytes)


def _sizes(case: Case, data: Data) -> list[int]:
    assert case.lengths is not None
    return case.lengths(data.tokens)


def _lengths(case: Case, data: Data) -> Tensor | None:
    return None if case.lengths is None else torch.tensor(_sizes(case, data))


def _sequences(tensor: Tensor, sizes: Sequence[int]) -> tuple[Tensor, ...]:
    """Each batch row cut to its length; a query has one row in all of them."""
    return tuple(tensor[row : row + 1, :, :size].contiguous() for row, size in enumerate(sizes))


def _documents(sizes: Sequence[int]) -> Form:
    return Form(
        lambda tensor: [part.contiguous() for part in tensor.split(sizes, 2)], lambda parts: torch.cat([*parts], 2)
    )


def _padded(tensor: Tensor, sizes: Sequence[int]) -> Tensor:
    """(N, H, longest, D), zero behind each document."""
    padded = tensor.new_zeros(len(sizes), tensor.shape[1], max(sizes), tensor.shape[3])
    for row, part in zip(padded, tensor[0].split(sizes, 1), strict=True):
        row[:, : part.shape[1]] = part
    return padded


def _unpadded(padded: Tensor, sizes: Sequence[int]) -> Tensor:
    return torch.cat([row[:, :size] for row, size in zip(padded, sizes, strict=True)], 1)[None]
