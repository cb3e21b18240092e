"""The one attention call, and torch's signature over it."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from typing import overload

import torch
from torch import Tensor

from qkv.backends.base import NEG_INF, Result, pattern_plan, without_autocast
from qkv.dispatch import Choice, choose
from qkv.dropout import draw_seed
from qkv.errors import InvertedMaskWarning, MaskError, ShapeError, message
from qkv.in_graph import answer_in_graph, captured
from qkv.inputs import in_call
from qkv.patterns.given import mask
from qkv.patterns.named import causal
from qkv.patterns.pattern import Pattern
from qkv.patterns.schedule import PatternPlan
from qkv.problem import Problem, Tensors
from qkv.question import Question, as_autocast_does, ask
from qkv.remembered import key_of, recall, remember
from qkv.scores import Alibi, Relative
from qkv.shapes import check_dense, values_can_be_seen, view_inputs
from qkv.types import AuxOutput, AuxRequest, Layout
from qkv.values import all_equal
from qkv.weights import collect


@overload
def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    pattern: Pattern | None = None,
    bias: Tensor | Alibi | Relative | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    dropout_p: float = 0.0,
    generator: torch.Generator | None = None,
    query_offset: int | Sequence[int] | Tensor | None = None,
    layout: Layout = "BHLD",
    backend: str = "auto",
    return_aux: None = None,
) -> Tensor: ...
@overload
def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    pattern: Pattern | None = None,
    bias: Tensor | Alibi | Relative | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    dropout_p: float = 0.0,
    generator: torch.Generator | None = None,
    query_offset: int | Sequence[int] | Tensor | None = None,
    layout: Layout = "BHLD",
    backend: str = "auto",
    return_aux: AuxRequest,
) -> tuple[Tensor, AuxOutput]: ...
def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    pattern: Pattern | None = None,
    bias: Tensor | Alibi | Relative | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    dropout_p: float = 0.0,
    generator: torch.Generator | None = None,
    query_offset: int | Sequence[int] | Tensor | None = None,
    layout: Layout = "BHLD",
    backend: str = "auto",
    return_aux: AuxRequest | None = None,
) -> Tensor | tuple[Tensor, AuxOutput]:
    """Attention over the pairs of a pattern, at the cost of that pattern.

        scores = scale · q kᵀ → softcap · tanh(scores / softcap) → + bias → pattern → sinks → softmax → dropout → · v

    query (..., H, L, D), key (..., G, S, D), value (..., G, S, V); also (L, D) and (B, L, D) without heads.
    Query head h
    reads key head h // (H / G). Result: (..., H, L, V) in the order of the query.

    pattern: which keys a query may see; None: all. Where L != S the last query stands at the last key unless the
    pattern's
        `align` or `query_offset` (one int, or one a batch row) says where query 0 stands.
    bias: added to the scores: a tensor that broadcasts to (B, H, L, S), `alibi(slopes)` or `relative(table)`;
    -inf hides.
    scale: default 1/sqrt(D); softcap: > 0; sinks: (H,) logits without a value that take part in the softmax.
    dropout_p: 0 <= p < 1, on the normalised weights; this call drops whenever it is told to.
    The mask is a pure function of
        a seed, drawn from `generator` or torch's default one, and of batch row, head and positions: docs/dropout.md.
    layout: "BHLD", or "BLHD" for (..., L, H, D).
    backend: "auto", or a name that is used or refused with reasons; see `plan`.
    return_aux: an AuxRequest; the result is then (output, AuxOutput).

    A query that sees no key gets 0, log-sum-exp -inf and zero gradients. What a query may not see, NaN included, never
    reaches its row. Accumulation is in float32, in float64 for float64 inputs.
    Raises the errors of `qkv.errors`, all before any work.

    >>> import torch
    >>> query, key = torch.tensor([[1.0, 0.0]]), torch.tensor([[1.0, 2.0], [0.0, 1.0]])
    >>> attention(query, key, key, scale=1.0)
    tensor([[0.7311, 1.7311]])
    """
    call = None
    if bias is None and sinks is None and generator is None and return_aux is None:
        call = key_of(query, key, value, pattern, query_offset, (scale, softcap, dropout_p, layout, backend))
    known = recall(call)
    if known is not None:
        return known.answer(query, key, value)
    with in_call(query, key, value, pattern):
        question = ask(
            query,
            key,
            value,
            pattern=pattern,
            bias=bias,
            scale=scale,
            softcap=softcap,
            sinks=sinks,
            dropout_p=dropout_p,
            generator=generator,
            query_offset=query_offset,
            layout=layout,
            return_aux=return_aux,
        )
        choice = None if captured(question, generator) else choose(question.problem, backend)
    if choice is None:
        output, aux = answer_in_graph(question, scale, backend, generator)
    else:
        output, aux = _answer(question, choice, generator)
        remember(call, question, choice, pattern)
    output = question.restore(output)
    return output if return_aux is None else (output, aux)


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """torch.nn.functional.scaled_dot_product_attention, signature and meaning, on qkv's backends.

    A boolean attn_mask keeps where True, a float one is added; both broadcast to (..., H, L, S). `is_causal` aligns
    top-left, and together with a mask both hold. Batch axes broadcast. Unlike torch's, dropout follows qkv's rule, and
    inputs of three axes have no heads to group: they are (B, L, D).
    """
    with in_call(query, key, value, None, named={"`bias`": "`attn_mask`", "`mask(keep=)`": "`attn_mask`"}):
        query, key, value = as_autocast_does(query, key, value)
        views, axes = view_inputs(query, key, value, "BHLD", broadcast=True)
        if axes.kv_heads not in (axes.heads, 1) and not enable_gqa:
            seen = f"query has H = {axes.heads}, key has G = {axes.kv_heads}"
            holds = "`query` and `key` must have the same heads unless `enable_gqa` is set"
            raise ShapeError(message(holds, seen, "pass enable_gqa=True to group query heads"))
        pattern, bias = (causal(align="top_left") if is_causal else None), attn_mask
        if attn_mask is not None:
            bias = _right_aligned(check_dense("attn_mask", attn_mask), views.rank)
            if bias.dtype == torch.bool:
                kept = mask(_flat_batch(bias, views.leading))
                pattern, bias = (kept if pattern is None else pattern & kept), None
        question = ask(
            query,
            key,
            value,
            pattern=pattern,
            bias=bias,
            scale=scale,
            dropout_p=dropout_p,
            query_offset=0,
            broadcast=True,
        )
        choice = None if captured(question, None) else choose(question.problem, "auto")
    output, _ = answer_in_graph(question, scale, "auto", None) if choice is None else _answer(question, choice, None)
    return question.restore(output)


def _answer(question: Question, choice: Choice, generator: torch.Generator | None) -> tuple[Tensor, AuxOutput]:
    """Draw the seed and run: the output (B, H, L, V), and what else was asked for."""
    problem = question.problem
    seed = draw_seed(generator) if problem.dropout_p else 0
    with without_autocast(problem.device):
        result = choice.backend.run(problem, question.tensors, seed)
        warn_if_all_hidden(problem, question.tensors, result)
        aux = collect(problem, question.tensors, result)
    return result.output, aux


def warn_if_all_hidden(
    problem: Problem, tensors: Tensors, result: Result, plan: Callable[[], PatternPlan] | None = None
) -> None:
    """Ask whether the mask is inverted when no query of the call sees a key; `plan` where it is not the problem's."""
    pairs = problem.batch * problem.heads * problem.queries * problem.keys
    if not pairs or not values_can_be_seen(tensors.query):
        return
    if result.lse.numel() and not problem.sinks:
        hidden = all_equal(result.lse, NEG_INF)
    else:
        added = tensors.bias is not None and all_equal(tensors.bias, NEG_INF)
        hidden = added or (pattern_plan(problem) if plan is None else plan()).pairs == 0
    if hidden:
        by = f"pattern {problem.pattern}" if problem.bias is None else f"pattern {problem.pattern} and the bias"
        warnings.warn(
            message(
                "a query should see at least one key",
                f"every query of this call is hidden from all keys by its {by}",
                "is the mask inverted? True and 0 keep, False and -inf hide",
            ),
            InvertedMaskWarning,
            stacklevel=4,
        )


def _right_aligned(attn_mask: Tensor, rank: int) -> Tensor:
    """A mask with as many axes as the inputs, new ones in front, as broadcasting reads it."""
    if attn_mask.ndim > rank:
        raise ShapeError(
            message(
                f"`attn_mask` must have at most the {rank} axes of the inputs",
                f"its shape is {list(attn_mask.shape)}",
                "drop or squeeze axes",
            )
        )
    return attn_mask.reshape((1,) * (rank - attn_mask.ndim) + tuple(attn_mask.shape))


def _flat_batch(keep: Tensor, leading: tuple[int, ...]) -> Tensor:
    """A mask of the inputs' rank as (B, H, L, S): without heads one for all, several batch axes made one."""
    if keep.ndim < 4:
        return keep.unsqueeze(-3) if keep.ndim == 3 else keep[None, None]
    sizes = keep.shape[:-3]
    if all(size == 1 for size in sizes):
        return keep.reshape(1, *keep.shape[-3:])
    if any(size not in (1, whole) for size, whole in zip(sizes, leading, strict=True)):
        holds = f"`attn_mask` must broadcast to the batch axes {list(leading)}"
        raise MaskError(message(holds, f"its own are {list(sizes)}", "use 1 or all on each"))
    return keep.expand(*leading, *keep.shape[-3:]).reshape(math.prod(leading), *keep.shape[-3:])
