"""The linear family by chunks of tokens, in plain torch: any device, differentiable any number of times.

Inside a chunk all pairs of tokens meet at once, in matrix products; between chunks goes the state. With G the sum of
the gates from the start of the chunk, D_ij = exp(G_i - G_j) for i ≥ j else 0, C tokens, S the state before them:

    O = Diag(exp G) Q S + ((Q Kᵀ) ∘ D) X        S' = exp(G_C) S + (Diag(exp(G_C - G)) K)ᵀ X

X is V, or what a delta rule writes: (I + Diag(beta) ((K Kᵀ) ∘ D)) X = Diag(beta) (V - Diag(exp G) K S), where K Kᵀ is
taken below the diagonal only: the UT transform of Yang et al. (2024, "Parallelizing linear transformers with the delta
rule over sequence length", section 3.2), with gates Yang et al. (2025, "Gated delta networks", section 3.3), solved and
never inverted. decays.py has the pairs. What needs no state is made at once for a slab: as many chunks as fit a cache.
"""

from __future__ import annotations

import operator

import torch
from torch import Tensor
from torch.nn import functional as F

from qkv.linear.decays import Pairs, plain_pairs, scalar_pairs, vector_pairs
from qkv.linear.recurrence import Outcome, Recurrence, Streams
from qkv.linear.sequences import Tokens, divided, joined, read, sequences

CHUNK = 64  # tokens, a power of two
SLAB = 2**16  # numbers in the largest tensor of a slab on a CPU: what a cache of the second level holds
LARGE = 2**26  # the same on other devices, which want many chunks at once


def answer(recurrence: Recurrence, streams: Streams, *, chunk: int = CHUNK) -> Outcome:
    """Outputs, and the state after each sequence."""
    if torch.compiler.is_compiling():
        _known_sizes(streams)
    return joined(recurrence, [_run(recurrence, *one, chunk) for one in sequences(recurrence, streams)])


def _known_sizes(streams: Streams) -> None:
    """Makes a graph one of these sizes, but for any B: symbols that are cut into chunks take a compiler minutes."""
    for stream in (streams.query, streams.value):
        for size in stream.shape[1:]:
            operator.index(size)


def _run(recurrence: Recurrence, tokens: Tokens, state: Tensor, chunk: int) -> tuple[Tensor, Tensor]:
    heads = state.shape[:3]
    state = state.flatten(0, 2)
    outputs = [tokens.value[..., :0, :].to(state.dtype)]
    for slab in tokens.split(_slabs(recurrence, tokens.value, chunk)):
        output, state = _through(_cut(read(recurrence, slab), chunk), state)
        output = output.transpose(0, 1).flatten(1, 2).unflatten(0, heads)
        size = slab.value.shape[3]
        outputs.append(divided(recurrence, output if output.shape[3] == size else output[..., :size, :]))
    return torch.cat(outputs, 3) if len(outputs) != 2 else outputs[1], state.unflatten(0, heads)


def _slabs(recurrence: Recurrence, value: Tensor, chunk: int) -> list[int]:
    """How many tokens go together: whole chunks, and those of the last one by themselves."""
    heads, length = value.shape[:3].numel(), value.shape[3]
    one = heads * chunk * max(chunk, recurrence.key_dim, recurrence.value_dim)
    tokens = max((SLAB if value.device.type == "cpu" else LARGE) // max(one, 1), 1) * chunk
    whole, rest = length // chunk * chunk, length % chunk
    sizes = [tokens] * (whole // tokens) + [whole % tokens, rest]
    return [size for size in sizes if size]


def _cut(tokens: Tokens, chunk: int) -> Tokens:
    """Chunks first, (n, B, K, G, C, *). One that is not full grows to a power of two by tokens that do nothing."""
    size = tokens.value.shape[3]
    chunk = min(chunk, 1 << (size - 1).bit_length())
    missing = -size % chunk

    def cut(x: Tensor) -> Tensor:
        if missing:
            x = F.pad(x, (0,) * (2 * (x.ndim - 4)) + (0, missing))
        return x.unflatten(3, (-1, chunk)).movedim(3, 0).contiguous()

    return tokens.each(cut)


def _pairs(slab: Tokens) -> Pairs:
    """The pairs of a slab, all heads in one axis: (n, B·H, *, *)."""
    q, k, v, gate, beta = slab
    overlaps = beta is not None
    if gate is None:
        pairs = plain_pairs(q, k, overlaps=overlaps)
    elif gate.ndim < v.ndim:
        pairs = scalar_pairs(q, k, gate, overlaps=overlaps)
    else:
        pairs = vector_pairs(q, k, gate, overlaps=overlaps)
    return pairs.each(lambda x: x.expand(*v.shape[:-2], -1, -1).flatten(1, 3))


def _through(slab: Tokens, state: Tensor) -> tuple[Tensor, Tensor]:
    """Output (n, B·H, C, W) of a slab, and the state (B·H, D, W) after it."""
    pairs = _pairs(slab)
    value = slab.value.flatten(1, 3)
    if slab.beta is None:
        before, state = _added(pairs, value, state)
        written = value
    else:
        written, before, state = _written(pairs, value, slab.beta.flatten(1, 3).unsqueeze(-1), state)
    inside = pairs.weights.flatten(0, 1) @ written.flatten(0, 1)
    output = torch.baddbmm(inside, pairs.reading.flatten(0, 1), before.flatten(0, 1))
    return output.unflatten(0, value.shape[:2]), state


def _added(pairs: Pairs, value: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """The state before each chunk (n, B·H, D, W), and the last one, where what is written is v."""
    before = []
    for keeping, writing, one in zip(_keeping(pairs), pairs.writing.unbind(), value.unbind(), strict=True):
        before.append(state)
        state = torch.baddbmm(state if keeping is None else keeping * state, writing.mT, one)
    return _stacked(before), state


def _written(pairs: Pairs, value: Tensor, beta: Tensor, state: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """What a delta rule writes (n, B·H, C, W), the state before each chunk, and the last one."""
    assert pairs.overlaps is not None
    before, written = [], []
    chunks = (beta * pairs.overlaps, beta * pairs.erasing, beta * value, pairs.writing)
    for keeping, overlaps, erasing, one, writing in zip(_keeping(pairs), *(x.unbind() for x in chunks), strict=True):
        before.append(state)
        right = torch.baddbmm(one, erasing, state, alpha=-1)
        written.append(torch.linalg.solve_triangular(overlaps, right, upper=False, unitriangular=True))
        state = torch.baddbmm(state if keeping is None else keeping * state, writing.mT, written[-1])
    return _stacked(written), _stacked(before), state


def _keeping(pairs: Pairs) -> tuple[Tensor | None, ...]:
    """The decay of the state over each chunk."""
    return (None,) * len(pairs.writing) if pairs.keeping is None else pairs.keeping.unbind()


def _stacked(tensors: list[Tensor]) -> Tensor:
    """One is not copied."""
    return torch.stack(tensors) if len(tensors) > 1 else tensors[0].unsqueeze(0)
