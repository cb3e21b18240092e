"""How every named function of the family runs: check, choose an engine, answer, give back in the caller's form."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from qkv.errors import UnsupportedError, ValueOutOfRange, message
from qkv.linear import bidirectional
from qkv.linear.asking import NO_GRAPH, ask, in_call, read_flags, read_inputs, with_features, with_state
from qkv.linear.beside import GateForm
from qkv.linear.engine import ENGINES, check_name, choose, run
from qkv.linear.features import FeatureMap, read_feature_map
from qkv.outside import outside_of_graphs

Lengths: TypeAlias = Tensor | Sequence[int]


def call(
    name: str, query: Tensor, key: Tensor, value: Tensor, *, cu_seqlens: Lengths | None, **options: Any
) -> Tensor | tuple[Tensor, Tensor]:
    """Answer one call of the function `name`: the output, or with `return_state` the output and the last state."""
    if cu_seqlens is not None and torch.compiler.is_dynamo_compiling():
        return _outside_of_the_graph(name, query, key, value, cu_seqlens=cu_seqlens, **options)
    return _answer(name, query, key, value, cu_seqlens=cu_seqlens, **options)


@outside_of_graphs(NO_GRAPH)
def _outside_of_the_graph(*tensors: Any, **options: Any) -> Any:
    """The call where torch.compile does not look; it breaks its graph here, or says why it must not."""
    return _answer(*tensors, **options)


def _answer(
    name: str,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    gate: GateForm = "none",
    g: Tensor | None = None,
    delta: bool = False,
    beta: Tensor | None = None,
    feature_map: str | FeatureMap | None = None,
    normalize: bool = False,
    is_causal: bool = True,
    scale: float | None,
    default_scale: float | None = None,
    layout: str,
    cu_seqlens: Lengths | None,
    initial_state: Tensor | None,
    return_state: bool,
    backend: str,
) -> Tensor | tuple[Tensor, Tensor]:
    with in_call(name, query, key, value):
        check_name(backend)
        read_flags(normalize=normalize, is_causal=is_causal, return_state=return_state)
        if not is_causal:
            _check_stateless(initial_state, return_state, backend)
        inputs = read_inputs(query, key, value, layout)
        feature, mapping = read_feature_map(feature_map, inputs.query.shape[-1])
        question = ask(
            inputs,
            gate=gate,
            g=g,
            delta=delta,
            beta=beta,
            normalize=normalize,
            feature=feature,
            scale=scale,
            default_scale=default_scale,
            cu_seqlens=cu_seqlens,
        )
        if mapping is not None:
            question = with_features(question, mapping)
        question = with_state(question, initial_state)
        recurrence, streams = question.recurrence, question.streams
        engine = ENGINES[choose(recurrence, streams, backend)] if is_causal else bidirectional.answer
    outcome = run(engine, recurrence, streams)
    output = question.restore(outcome.output)
    return (output, outcome.state) if return_state else output


def _check_stateless(initial_state: object, return_state: bool, backend: str) -> None:
    """Where every token sees every other there is no state to carry on, and one form for all devices."""
    given = "initial_state" if initial_state is not None else "return_state" if return_state else None
    if given is not None:
        holds = f"`{given}` must be left out where `is_causal` is False"
        seen = "got one" if given == "initial_state" else "got True"
        raise ValueOutOfRange(message(holds, seen, "only tokens in order have a state before and after them"))
    if backend not in ("auto", "chunked"):
        holds = f"`backend` {backend!r} must be able to answer the call"
        raise UnsupportedError(message(holds, "it has no form for is_causal=False", 'use "auto" or "chunked"'))
