"""A pass that fails after its caches were written is noticed by the next; one that is refused harms nothing."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from qkv.errors import DTypeError, UnsupportedError, ValueOutOfRange
from qkv.models.gpt import GPT
from qkv.models.hybrid import Hybrid
from qkv.models.llama import Llama
from qkv.models.t5 import T5
from small_models import GPT_2, HYBRID, LLAMA, T5_SMALL, WORDS, lively

KINDS = {"gpt": (GPT, GPT_2), "llama": (Llama, LLAMA), "hybrid": (Hybrid, HYBRID), "t5": (T5, T5_SMALL)}
IDS = torch.arange(1, 7)[None] % WORDS


def begun(model, length=9):
    """A state, and what goes on from it."""
    if isinstance(model, T5):
        return model.initial_state(1, length, model.encode(IDS)), model.decode
    return model.initial_state(1, length), model


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("name", KINDS)
def test_a_pass_that_failed_after_the_last_cache_is_noticed(name, error, monkeypatch):
    model = lively(*KINDS[name])
    (state, call), norm = begun(model), (model.decoder if name == "t5" else model).norm

    def fault(_):
        raise error

    with torch.no_grad():
        call(IDS[:, :3], state=state)
        broken = state.fork()
        with monkeypatch.context() as patch:
            patch.setattr(norm, "forward", fault)
            with pytest.raises(error):
                call(IDS[:, 3:5], state=broken)
        with pytest.raises(ValueOutOfRange, match=r"as a call left it that came to its end; .* from \(3,\) to \(5,\)"):
            call(IDS[:, 3:5], state=broken)
        want = call(IDS[:, 3:5], state=state).logits
        if name != "hybrid":
            broken.truncate(3)
            assert torch.equal(call(IDS[:, 3:5], state=broken).logits, want)
        with pytest.raises(DTypeError, match="must be a StackState; got KVCache"):
            call(IDS, state=state.layers[-1])


def test_a_hybrid_state_is_left_as_it_was():
    model = lively(Hybrid, replace(HYBRID, attention_dropout=0.1))
    state, call = begun(model, 4)
    model.train()
    with pytest.raises(UnsupportedError, match="without dropout"):
        call(IDS[:, :3], state=state)
    model.eval()
    with pytest.raises(ValueOutOfRange, match="max_length = 4"):
        call(IDS[:, :5], state=state)
    assert not state.layers[0].recurrent.state.any()
    torch.testing.assert_close(call(IDS[:, :4], state=state).logits, call(IDS[:, :4]).logits)
