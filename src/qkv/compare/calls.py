"""One call of a family, ready to be run: of a whole sequence, with its gradients, or of the next token."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from qkv.cache import KVCache, RollingKVCache
from qkv.compare.families import Family, Streams, call
from qkv.compare.inputs import make_gradient, make_streams
from qkv.compare.setting import Direction, Setting
from qkv.linear.state import RecurrentState

ROOM = 1_024  # tokens that a cache may grow by while it is measured
WARM = 64  # tokens that a recurrent state has read when it is measured: no step depends on how many
Result = dict[str, Tensor]  # "output", and the gradients by the names of the streams


class Call(NamedTuple):
    """`run` is what the clock sees, `read` makes a result of what it returns."""

    run: Callable[[], Any]
    read: Callable[[Any], Result]
    held: int | None = None  # bytes of the cache or state that a step reads


def prepare(family: Family, setting: Setting, tokens: int) -> Call:
    """A call at this length, in the direction of the setting, on its seeded tensors."""
    streams = make_streams(family, setting, tokens)
    if setting.direction == "decode":
        return next_token(family, setting, streams, tokens)
    return whole(call(family, tokens), streams, make_gradient(setting, tokens), setting.direction)


def whole(
    answer: Callable[[Streams], Tensor], streams: Mapping[str, Tensor], gradient: Tensor, direction: Direction
) -> Call:
    """All tokens at once; "forward+backward" gives the gradients of every stream but a retention's decay."""
    if direction == "forward":
        return Call(torch.no_grad()(lambda: answer(streams)), lambda output: {"output": output})
    names = [name for name in streams if name != "decay"]
    trained = {name: tensor.detach().requires_grad_(name in names) for name, tensor in streams.items()}

    def both() -> tuple[Tensor, tuple[Tensor, ...]]:
        output = answer(trained)
        return output, torch.autograd.grad(output, [trained[name] for name in names], gradient)

    def read(found: tuple[Tensor, tuple[Tensor, ...]]) -> Result:
        return {"output": found[0].detach(), **dict(zip(names, found[1], strict=True))}

    return Call(both, read)


def next_token(
    family: Family, setting: Setting, streams: Mapping[str, Tensor], tokens: int, *, all_read: bool = False
) -> Call:
    """The last of `tokens`, and at each further run the same token once more.

    `all_read`: a state has read all tokens before the last, not WARM of them, so that the first run gives the last row
    of the whole call.
    """
    last = {name: tensor if name == "decay" else tensor[:, :, -1:] for name, tensor in streams.items()}
    if family.pattern is not None:
        return _from_cache(family, setting, streams, last, tokens)
    state = _state(family, setting, streams)
    before = slice(0, tokens - 1 if all_read else min(tokens - 1, WARM))
    _step(state, {name: tensor if name == "decay" else tensor[:, :, before] for name, tensor in streams.items()})

    def step() -> Tensor:
        return _step(state, last)

    return Call(step, lambda output: {"output": output}, state.nbytes)


def _step(state: RecurrentState, streams: Mapping[str, Tensor]) -> Tensor:
    return state.step(streams["query"], streams["key"], streams["value"], g=streams.get("g"), beta=streams.get("beta"))


def _state(family: Family, setting: Setting, streams: Mapping[str, Tensor]) -> RecurrentState:
    heads, key_dim = streams["key"].shape[1], streams["key"].shape[3]
    rule = "linear" if family.feature is not None else family.name.replace("-", "_")
    return RecurrentState(
        1,
        heads,
        key_dim,
        streams["value"].shape[3],
        rule,
        feature_map=family.feature,
        decay=streams.get("decay"),
        dtype=setting.torch_dtype,
    )


def _from_cache(
    family: Family, setting: Setting, streams: Mapping[str, Tensor], last: Mapping[str, Tensor], tokens: int
) -> Call:
    """A window keeps what it may still see, every other pattern all keys and values."""
    assert family.pattern is not None
    pattern, key, value = family.pattern(tokens), streams["key"], streams["value"]
    heads, dtype = key.shape[1], key.dtype
    widths = setting.head_dim, setting.value_dim
    if family.group == "local":
        cache: KVCache | RollingKVCache = RollingKVCache.for_pattern(pattern, 1, heads, *widths, dtype=dtype)
        held = None
    else:
        cache = KVCache(1, heads, tokens + ROOM, *widths, dtype=dtype)
        held = key.nbytes + value.nbytes
    cache.append(key[:, :, :-1], value[:, :, :-1])

    @torch.no_grad()
    def step() -> Tensor:
        return cache.attend(last["query"], last["key"], last["value"], pattern=pattern)

    return Call(step, lambda output: {"output": output}, cache.nbytes if held is None else held)
