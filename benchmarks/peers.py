"""All contenders by name: ours on each backend, torch's SDPA in its forms, and peers that may be missing.

A peer answers what it computes exactly and refuses the rest with a reason, so that the gate holds for all alike.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TypeAlias

import torch
from production import cached, rolling, sdpa_apart, sdpa_padded, sdpa_sliced, varlen
from registry import Case, Contender, Data, Extras, ours, prepare, sdpa
from torch import Tensor

import oracles

FLEX_SECONDS = 300.0  # in which it may compile
FLEX_LONGEST = 8_192  # its block mask is evaluated densely
OURS = ("cpu", "blockwise", "auto")
Factory: TypeAlias = Callable[[Case, Data], Contender | str]


def flex(case: Case, data: Data, seconds: float = FLEX_SECONDS) -> Contender | str:
    """torch's compiled flex_attention with the rule as its mask_mod, forward, after its first run."""
    if not case.flex or case.extras != Extras():
        return "its tracer cannot read the rule"
    if data.tokens > FLEX_LONGEST:
        return f"not run beyond {FLEX_LONGEST:,}"
    try:
        with _alarm(seconds):
            contender = _compiled(case, data)
            contender.run("forward")
    except (RuntimeError, TimeoutError) as error:
        print(f"flex: {type(error).__name__}: {str(error).strip().splitlines()[0]:.100}")
        return "did not compile" if isinstance(error, RuntimeError) else f"not compiled in {seconds:.0f} s"
    return contender


def _compiled(case: Case, data: Data) -> Contender:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention  # loads the compiler: seconds

    rule, tokens = case.rule(data.tokens), data.tokens

    def mask_mod(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return rule(oracles.Pairs(b, h, i, j, i, tokens))

    blocks = create_block_mask(mask_mod, None, None, tokens, tokens, device="cpu")
    compiled = torch.compile(flex_attention)

    def forward(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return compiled(query, key, value, block_mask=blocks)

    return Contender(lambda direction: prepare(forward, data, direction))


def local_attention(case: Case, data: Data) -> Contender | str:
    """LocalAttention with its exact window: each query sees itself and `window_size` keys before it."""
    if case.name != "window-257" or data.tokens % 256:
        return "computes causal windows of 257 keys over whole blocks of 256"
    try:
        from local_attention import LocalAttention
    except ModuleNotFoundError:
        return "not installed"
    module = LocalAttention(256, causal=True, look_backward=1, exact_windowsize=True, use_rotary_pos_emb=False)
    return Contender(lambda direction: prepare(module, data, direction))


def x_transformers(case: Case, data: Data, *, is_flash: bool) -> Contender | str:
    """The attention of x-transformers: `is_flash` goes through torch's SDPA, the other multiplies whole matrices."""
    extras = case.extras
    is_plain = not case.decodes and case.torch_form != "bool mask" and extras._replace(softcap=None) == Extras()
    if not is_plain or (is_flash and extras != Extras()):
        return "computes dense and causal attention" + ("" if is_flash else ", with a softcap too")
    try:
        from x_transformers.attend import Attend
    except ModuleNotFoundError:
        return "not installed"
    module = Attend(
        causal=case.torch_form == "is_causal",
        flash=is_flash,
        softclamp_logits=extras.softcap is not None,
        logit_softclamp_value=extras.softcap or 1.0,
    )
    return Contender(lambda direction: prepare(lambda *inputs: module(*inputs)[0], data, direction))


# Our functions that answer a case, by what a figure calls them; each takes the backend besides.
THROUGH = {"attention": ours, "cache": cached, "rolling": rolling, "varlen": varlen}
CONTENDERS: dict[str, Factory] = {
    **{backend: partial(ours, backend=backend) for backend in OURS},
    "sdpa": sdpa,
    "sdpa-sliced": sdpa_sliced,
    "sdpa-apart": sdpa_apart,
    "sdpa-padded": partial(sdpa_padded, is_masked=True),
    "sdpa-padded-causal": partial(sdpa_padded, is_masked=False),
    "flex": flex,
    "local-attention": local_attention,
    "x-transformers": partial(x_transformers, is_flash=False),
    "x-transformers-flash": partial(x_transformers, is_flash=True),
}


@contextmanager
def _alarm(seconds: float) -> Iterator[None]:
    def ring(*_: object) -> None:
        raise TimeoutError(f"more than {seconds:.0f} s")

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
