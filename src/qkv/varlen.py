"""Attention over documents of different length that lie one after another, without padding: the call and its checks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, overload

import numpy as np
import torch
from torch import Tensor

from qkv.attention import warn_if_all_hidden
from qkv.backends.base import Packing, without_autocast
from qkv.backends.cpu import Cpu
from qkv.dispatch import Choice, choose
from qkv.dropout import draw_seed
from qkv.errors import QkvError, ShapeError, UnsupportedError, ValueOutOfRange, message
from qkv.inputs import in_call, read_aux, read_dropout, read_pattern, read_scale, read_softcap
from qkv.outside import outside_of_graphs
from qkv.packed_run import run_one_by_one, run_packed
from qkv.packing import Packed, sizes_of
from qkv.patterns.arguments import INTEGER_TYPES, integers
from qkv.patterns.expr import rebuild
from qkv.patterns.leaf import Leaf
from qkv.patterns.leaves.keys import KeyLengths
from qkv.patterns.pattern import Pattern
from qkv.problem import Origin, Problem, Tensors
from qkv.question import as_autocast_does, read_bias, read_sinks
from qkv.scores import Alibi, Relative
from qkv.shapes import NAMES, Axes, check_dense, describe, view_inputs
from qkv.types import AuxOutput, AuxRequest

_NO_GRAPH = message(
    "a compiled or exported graph must not depend on values",
    "got cu_seqlens, which are lengths",
    "call varlen_attention outside of the graph, as torch.compile(fullgraph=False) does",
)
_ORDER = {"if the axes stand as (B, H, L, D), say layout='BHLD'": "the axes are (total, heads, width)"}


@overload
def varlen_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor | Sequence[int],
    cu_seqlens_k: Tensor | Sequence[int] | None = None,
    *,
    pattern: Pattern | None = None,
    bias: Tensor | Alibi | Relative | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    dropout_p: float = 0.0,
    generator: torch.Generator | None = None,
    backend: str = "auto",
    return_aux: None = None,
) -> Tensor: ...
@overload
def varlen_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor | Sequence[int],
    cu_seqlens_k: Tensor | Sequence[int] | None = None,
    *,
    pattern: Pattern | None = None,
    bias: Tensor | Alibi | Relative | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    dropout_p: float = 0.0,
    generator: torch.Generator | None = None,
    backend: str = "auto",
    return_aux: AuxRequest,
) -> tuple[Tensor, AuxOutput]: ...
def varlen_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor | Sequence[int],
    cu_seqlens_k: Tensor | Sequence[int] | None = None,
    *,
    pattern: Pattern | None = None,
    bias: Tensor | Alibi | Relative | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    dropout_p: float = 0.0,
    generator: torch.Generator | None = None,
    backend: str = "auto",
    return_aux: AuxRequest | None = None,
) -> Tensor | tuple[Tensor, AuxOutput]:
    """Attention of N documents that lie one after another: each is an attention of its own, at the cost of its own.

    query (total L, H, D), key (total S, G, D), value (total S, G, V); result (total L, H, V).
    cu_seqlens_q: where the documents' queries begin, and their end: N + 1 rising integers from 0 to total L, as a
        sequence or a tensor, whose numbers are read (which waits for a GPU). A document may be empty.
    cu_seqlens_k: the same of keys and values; None: that of the queries.

    The result is that of `attention` called for one document after another, and so is the meaning of every argument:
    positions count from 0 within a document; where it has more keys than queries its last query stands at its last key,
    unless the pattern's `align` says otherwise. What depends on the batch row, in a pattern or in the rule of dropout,
    takes document n for row n.
    bias: alibi(slopes), relative(table), or a tensor that broadcasts to (N, H, L, S): its axes L and S are 1 unless
        all documents have that many queries or keys.
    return_aux: log-sum-exp, greatest scores and entropy, each (H, total L); no weights, whose rows differ in length.

    On the backend "cpu" all documents are one call of the core; on every other they are answered one by one.
    Raises the errors of `qkv.errors`, all before any work. It cannot be captured by torch.compile or torch.export,
    since the lengths are values: torch.compile runs it outside of its graph, or refuses it with fullgraph=True.

    >>> import torch
    >>> query = key = torch.ones(5, 1, 2)
    >>> value = torch.arange(5.0)[:, None, None]
    >>> varlen_attention(query, key, value, [0, 2, 5]).flatten()  # the mean of 0 and 1, of 2 to 4
    tensor([0.5000, 0.5000, 3.0000, 3.0000, 3.0000])
    """
    if torch.compiler.is_dynamo_compiling():
        return _outside_of_the_graph(
            query,
            key,
            value,
            cu_seqlens_q,
            cu_seqlens_k,
            pattern=pattern,
            bias=bias,
            scale=scale,
            softcap=softcap,
            sinks=sinks,
            dropout_p=dropout_p,
            generator=generator,
            backend=backend,
            return_aux=return_aux,
        )
    with in_call(query, key, value, pattern, named=_ORDER):
        packed = _ask(
            query,
            key,
            value,
            cu_seqlens_q,
            cu_seqlens_k,
            pattern=pattern,
            bias=bias,
            scale=scale,
            softcap=softcap,
            sinks=sinks,
            dropout_p=dropout_p,
            generator=generator,
            return_aux=return_aux,
        )
        choice = choose(packed.problem, backend)
    output, aux = _answer(packed, choice, generator)
    return output if return_aux is None else (output, aux)


@outside_of_graphs(_NO_GRAPH)
def _outside_of_the_graph(*tensors: Any, **options: Any) -> Any:
    """The call where torch.compile does not look; it breaks its graph here, or says why it must not."""
    return varlen_attention(*tensors, **options)


def _answer(packed: Packed, choice: Choice, generator: torch.Generator | None) -> tuple[Tensor, AuxOutput]:
    """Draw the seed and run: the output (total L, H, V), and what else was asked for."""
    problem, tensors = packed.problem, packed.tensors
    seed = draw_seed(generator) if problem.dropout_p else 0
    with without_autocast(problem.device):
        if isinstance(choice.backend, Cpu):
            result = run_packed(choice.backend, packed, seed)
        else:
            result = run_one_by_one(choice.backend, packed, seed)
        if any(queries and keys for queries, keys in sizes_of(packed.packing)):
            warn_if_all_hidden(problem, tensors, result, packed.plan)
    aux = AuxOutput(
        lse=result.lse[0] if problem.aux.lse else None,
        max_scores=None if result.max_scores is None else result.max_scores[0],
        entropy=None if result.entropy is None else result.entropy[0],
    )
    return result.output[0].transpose(0, 1), aux


def _ask(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: object,
    cu_seqlens_k: object,
    *,
    pattern: Pattern | None,
    bias: Tensor | Alibi | Relative | None,
    scale: float | None,
    softcap: float | None,
    sinks: Tensor | None,
    dropout_p: float,
    generator: torch.Generator | None,
    return_aux: AuxRequest | None,
) -> Packed:
    """Check the arguments of one packed call and put them in their one canonical form."""
    if torch.compiler.is_compiling():
        raise UnsupportedError(_NO_GRAPH)
    query, key, value = as_autocast_does(query, key, value)
    query, key, value = (_with_batch(name, tensor) for name, tensor in zip(NAMES, (query, key, value), strict=True))
    views, axes = view_inputs(query, key, value, "BLHD", broadcast=False)
    packing = _read_packing(cu_seqlens_q, cu_seqlens_k, axes)
    sizes = sizes_of(packing)
    longest = [max(lengths, default=0) for lengths in zip(*sizes, strict=True)] or [0, 0]
    axes = axes._replace(batch=len(sizes), queries=longest[0], keys=longest[1])
    scale = read_scale(scale, axes.head_dim)
    softcap = read_softcap(softcap)
    dropout_p = read_dropout(dropout_p, generator)
    kind, added = read_bias(bias, axes, views._replace(leading=(axes.batch,)))
    if kind == "tensor" and added is not None:
        _check_bias_axes(added, sizes)
    if sinks is not None:
        sinks = read_sinks(sinks, axes, views.query.device)
    legal = read_pattern(pattern)
    _check_pattern(legal, axes, sizes)
    if not sizes:  # as one empty document, of which a row of the batch says nothing
        packing, sizes, axes = Packing((0, 0), (0, 0)), [(0, 0)], axes._replace(batch=1)
        legal, kind, added = read_pattern(None), None, None
    tensors = Tensors(views.query, views.key, views.value, added, sinks)
    problem = Problem(
        batch=axes.batch,
        heads=axes.heads,
        kv_heads=axes.kv_heads,
        queries=axes.queries,
        keys=axes.keys,
        head_dim=axes.head_dim,
        value_dim=axes.value_dim,
        dtype=views.query.dtype,
        device=views.query.device,
        pattern=legal,
        scale=scale,
        softcap=softcap,
        bias=kind,
        bias_shape=None if added is None else tuple(added.shape),
        sinks=sinks is not None,
        dropout_p=dropout_p,
        origin=Origin(query=tuple(legal.offset(*size) for size in sizes)),
        needs_grad=torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors),
        aux=_read_aux(return_aux, axes),
    )
    return Packed(problem, tensors, packing)


def _with_batch(name: str, tensor: object) -> Tensor:
    """A packed tensor (total, heads, width) as one batch row."""
    tensor = check_dense(name, tensor)
    if tensor.ndim != 3:
        holds = f"`{name}` must have 3 axes, (total, heads, width)"
        remedy = "say x.flatten(0, 1) for a batch (B, L, heads, width), x[:, None] where there are no heads"
        raise ShapeError(message(holds, f"got {describe(tensor)}", remedy))
    return tensor[None]


def _read_packing(cu_seqlens_q: object, cu_seqlens_k: object, axes: Axes) -> Packing:
    """Where the documents begin and end, checked: no row outside of the tensors, none in two documents or in none."""
    queries = read_boundaries("cu_seqlens_q", cu_seqlens_q, "query", axes.queries)
    if cu_seqlens_k is None:
        if axes.keys != axes.queries:
            holds = "`key` must have as many rows as `query` where `cu_seqlens_k` is left out"
            raise ShapeError(message(holds, f"got {axes.keys} beside {axes.queries}", "give `cu_seqlens_k`"))
        return Packing(queries, queries)
    keys = read_boundaries("cu_seqlens_k", cu_seqlens_k, "key", axes.keys)
    if len(keys) != len(queries):
        holds = "`cu_seqlens_q` and `cu_seqlens_k` must hold as many numbers, one more than documents"
        seen = f"got {len(queries)} and {len(keys)}"
        raise ShapeError(message(holds, seen, "repeat a boundary for a document without queries or without keys"))
    return Packing(queries, keys)


def read_boundaries(name: str, values: object, tensor: str, total: int) -> tuple[int, ...]:
    """Rising numbers from 0 to the rows of a tensor."""
    if isinstance(values, Tensor) and values.dtype in INTEGER_TYPES:
        try:
            values = values.tolist()
        except (RuntimeError, NotImplementedError):
            seen = f"got a tensor whose numbers cannot be read here ({describe(values)})"
            raise UnsupportedError(message(f"`{name}` must hold lengths that are known", seen, "pass ints")) from None
    edges = integers(name, values, (1,))
    if not len(edges):
        raise ShapeError(message(f"`{name}` must hold at least the boundary 0", "it is empty", "start it with 0"))
    if edges[0] != 0:
        holds, seen = f"`{name}` must start at 0", f"entry 0 is {edges[0]}"
        raise ValueOutOfRange(message(holds, seen, "prepend 0 to the ends of the documents"))
    (falling,) = np.nonzero(np.diff(edges) < 0)
    if len(falling):
        at = int(falling[0]) + 1
        seen = f"entry {at} is {edges[at]} after {edges[at - 1]}"
        raise ValueOutOfRange(message(f"`{name}` must not decrease", seen, "give running sums of document lengths"))
    if edges[-1] != total:
        holds = f"`{name}` must end at the {total} rows of `{tensor}`"
        raise ValueOutOfRange(message(holds, f"its last entry is {edges[-1]}", "every row belongs to one document"))
    return tuple(edges.tolist())


def _check_bias_axes(bias: Tensor, sizes: list[tuple[int, int]]) -> None:
    """A bias has entries for queries or keys only where these are as many in all documents."""
    for axis, what, lengths in zip((2, 3), ("queries", "keys"), zip(*sizes, strict=True), strict=False):
        if bias.shape[axis] != 1 and len(set(lengths)) > 1:
            holds = f"a tensor `bias` of documents that differ in {what} must have 1 on that axis"
            seen = f"got {list(bias.shape)} for documents of {min(lengths)} to {max(lengths)} {what}"
            raise ShapeError(message(holds, seen, "say alibi(slopes) or relative(table), or call document by document"))


def _check_pattern(pattern: Pattern, axes: Axes, sizes: list[tuple[int, int]]) -> None:
    """Raise where the pattern does not fit a document; those of one size are one question, but for key lengths."""
    by_length = any(isinstance(leaf, KeyLengths) for leaf in pattern.expr.leaves())
    first: dict[tuple[int, ...], int] = {}
    for n, size in enumerate(sizes):
        first.setdefault((*size, n) if by_length else size, n)
    for (queries, keys, *_), n in first.items():
        asked = _with_length_of(pattern, n, axes.batch) if by_length else pattern
        offsets = (pattern.offset(queries, keys),)
        try:
            asked.check(batch=axes.batch, heads=axes.heads, queries=queries, keys=keys, offsets=offsets)
        except QkvError as error:
            error.args = (f"{error} (document {n}, B = {axes.batch} documents)",)
            raise


def _with_length_of(pattern: Pattern, n: int, batch: int) -> Pattern:
    """The pattern with the key length of document n for every document: those of others say nothing of this one."""

    def alone(leaf: Leaf) -> Leaf:
        if not isinstance(leaf, KeyLengths) or len(leaf.lengths) != batch:
            return leaf
        return KeyLengths(np.full(batch, leaf.lengths[n]))

    return replace(pattern, known=rebuild(pattern.expr, alone))


def _read_aux(return_aux: AuxRequest | None, axes: Axes) -> AuxRequest:
    """What to return beside the output: one number a row and head."""
    aux = read_aux(return_aux, axes)
    if aux.weights is not False or aux.top_k is not None:
        holds, seen = "documents of different length must not ask for weights", "got `weights` or `top_k` of AuxRequest"
        raise UnsupportedError(message(holds, seen, "ask for those of one document, by qkv.attention"))
    return aux
