"""Who answers the cases of suite `linear`: ours, torch in three chunked forms, transformers' own functions."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any

from linear_cases import Case, Data
from linear_torch import batched, batched_vectors, looped, next_token
from registry import Contender, Form, prepare
from torch import Tensor

import qkv

BACKENDS = ("auto", "cpu", "chunked", "reference")
TORCH = ("torch-chunked", "torch-batched", "torch-looped")  # the fastest is what a figure against "torch" means
# transformers takes and gives (B, L, H, D), made before the clock starts and read after it.
ROWS_FIRST = Form(lambda x: (x.transpose(1, 2).contiguous(),), lambda parts: parts[0].transpose(1, 2))
MODELS = "transformers.models"
CHUNKS = {
    "gated-delta": (f"{MODELS}.qwen3_next.modeling_qwen3_next", "torch_chunk_gated_delta_rule"),
    "kimi-delta": (f"{MODELS}.kimi_linear.modeling_kimi_linear", "chunk_kimi_delta_attention"),
    "step": (f"{MODELS}.qwen3_next.modeling_qwen3_next", "torch_recurrent_gated_delta_rule"),
}


def ours(case: Case, data: Data, backend: str) -> Contender:
    """The named function, or one more token through a `RecurrentState`."""
    if case.steps:
        return _stepping(data)
    function = getattr(qkv, case.function)
    return Contender(lambda direction: prepare(partial(function, backend=backend), data, direction))


def _stepping(data: Data) -> Contender:
    """Each run steps the state once more, from where it is."""
    assert data.state is not None
    state = qkv.RecurrentState.from_state(data.state, "gated_delta")
    return Contender(lambda direction: prepare(state.step, data, direction))


def chunked(case: Case, data: Data) -> Contender | str:
    """Our own chunked form in torch: chunk after chunk, each with few large products."""
    return "answers whole sequences" if case.steps else ours(case, data, "chunked")


def in_batches(case: Case, data: Data) -> Contender:
    """All chunks at once, and between them only what must be one after another."""
    if case.steps:
        assert data.state is not None
        return Contender(lambda direction: prepare(partial(next_token, data.state.clone()), data, direction))
    return _plain(batched_vectors if case.gate == "vector" else batched, case, data)


def in_a_loop(case: Case, data: Data) -> Contender | str:
    """One chunk after another."""
    if case.steps or case.gate == "vector":
        return "answers whole sequences with a gate a token"
    return _plain(looped, case, data)


def _plain(form: Callable[..., Tensor], case: Case, data: Data) -> Contender:
    options = {"feature": case.feature, "normalize": case.normalize, "scale": case.scale, "delta": case.delta}
    return Contender(lambda direction: prepare(partial(form, **options), data, direction))


def transformers(case: Case, data: Data) -> Contender | str:
    """The functions that its models use where no other library is installed, as on a CPU."""
    if case.name not in CHUNKS:
        return "has no function of its own for this"
    module, name = CHUNKS[case.name]
    try:
        function: Callable[..., Any] = getattr(import_module(module), name)
    except (ImportError, AttributeError):
        return "not installed, or of another version"
    carried = {"initial_state": data.state, "output_final_state": case.steps}

    def forward(*streams: Tensor) -> Tensor:
        output, state = function(*streams, **carried)
        if case.steps:
            carried["initial_state"] = state
        return output

    return Contender(lambda direction: prepare(forward, data, direction, ROWS_FIRST))


CONTENDERS: dict[str, Callable[[Case, Data], Contender | str]] = {
    **{backend: partial(ours, backend=backend) for backend in BACKENDS},
    "torch-chunked": chunked,
    "torch-batched": in_batches,
    "torch-looped": in_a_loop,
    "transformers": transformers,
}
