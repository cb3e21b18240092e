"""What the cases of suite `linear` must give: their recurrence in float64, token by token, and its gradients."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from gate import Claim
from linear_cases import LOOSER, ROUNDING, Case, Data
from torch import Tensor
from torch.nn import functional as F

SEGMENT = 64  # tokens that the gradients go back over at once, from the state before them


def claims(case: Case, data: Data, *, gradients: bool) -> list[Claim]:
    """Every number of the first and the last head: of the output, and of every gradient."""
    heads = sorted({0, case.heads - 1})
    return [claim for head in heads for claim in _of_head(case, data, head, gradients)]


def prefix_claims(case: Case, data: Data) -> Claim:
    """Every number of the last head's output. Its first rows are those of every shorter call."""
    [claim] = _of_head(case, data, case.heads - 1, gradients=False)
    return claim


def first_rows(claim: Claim, tokens: int) -> Claim:
    """What the claim says of a call of the first tokens only."""
    return claim._replace(truth=claim.truth[:, :, :tokens], bound=claim.bound[:, :, :tokens])


def _of_head(case: Case, data: Data, head: int, gradients: bool) -> Iterator[Claim]:
    one = slice(head, head + 1)
    streams = {name: tensor[:, one].double() for name, tensor in data.trained.items()}
    state = None if data.state is None else data.state[:, one].double()
    output, states = _forward(case, streams, state)
    found = {"output": output}
    if gradients:
        found |= _backward(case, streams, states, data.grad_output[:, one].double())
    for name, truth in found.items():
        dtype = data.trained.get(name, data.value).dtype
        yield Claim(name, (slice(None), one), truth, _bound(truth, LOOSER[name] * ROUNDING[dtype]))


def _bound(truth: Tensor, share: float) -> Tensor:
    """A share of each row's length, or of the typical one's where that is longer; a number a token is a row itself."""
    rows = truth if truth.ndim == 4 else truth[..., None]
    lengths = rows.norm(dim=-1, keepdim=True)
    bound = share * lengths.clamp_min(lengths.square().mean().sqrt())
    return bound.expand_as(rows) if truth.ndim == 4 else bound[..., 0]


def recurrence(case: Case, streams: dict[str, Tensor], state: Tensor) -> tuple[Tensor, Tensor]:
    """The output (1, 1, L, V) and the last state (1, 1, D, W): S' = e^g S, then what is written, then read."""
    scale = streams["query"].shape[-1] ** -0.5 if case.scale is None else case.scale
    query, key, value = streams["query"], streams["key"], streams["value"]
    if case.feature == "elu":
        query, key = F.elu(query) + 1, F.elu(key) + 1
    if case.normalize:
        value = F.pad(value, (0, 1), value=1.0)
    outputs = []
    for t in range(query.shape[2]):
        q, k, v = (x[:, :, t, :, None] for x in (query, key, value))  # columns
        if "gate" in streams:
            state = state * streams["gate"][:, :, t].reshape(1, 1, -1, 1).exp()
        if case.delta:
            v = streams["beta"][:, :, t, None, None] * (v - state.mT @ k)
        state = state + k @ v.mT
        outputs.append(scale * (state.mT @ q)[..., 0])
    read = torch.stack(outputs, 2)
    return (read[..., :-1] / read[..., -1:] if case.normalize else read), state


def _forward(case: Case, streams: dict[str, Tensor], state: Tensor | None) -> tuple[Tensor, list[Tensor]]:
    """The output, and the state before each segment."""
    query, value = streams["query"], streams["value"]
    if state is None:
        state = query.new_zeros(1, 1, query.shape[-1], value.shape[-1] + case.normalize)
    outputs, states = [], []
    for part in _segments(streams):
        states.append(state)
        output, state = recurrence(case, part, state)
        outputs.append(output)
    return torch.cat(outputs, 2), states


def _backward(case: Case, streams: dict[str, Tensor], states: list[Tensor], incoming: Tensor) -> dict[str, Tensor]:
    """Gradients of all streams, segment by segment from the last; only one of them has its graph in memory."""
    parts, back = [], torch.zeros_like(states[0])
    segments = [*_segments({**streams, "incoming": incoming})]
    for segment, state in zip(reversed(segments), reversed(states), strict=True):
        arrives = segment.pop("incoming")
        with torch.enable_grad():
            inputs = [tensor.detach().requires_grad_() for tensor in (*segment.values(), state)]
            ends = recurrence(case, dict(zip(segment, inputs, strict=False)), inputs[-1])
            *found, back = torch.autograd.grad(ends, inputs, (arrives, back))
        parts.append(found)
    parts.reverse()
    return {name: torch.cat([part[n] for part in parts], 2) for n, name in enumerate(streams)}


def _segments(streams: dict[str, Tensor]) -> Iterator[dict[str, Tensor]]:
    cut = {name: tensor.split(SEGMENT, 2) for name, tensor in streams.items()}
    for parts in zip(*cut.values(), strict=True):
        yield dict(zip(cut, parts, strict=True))
