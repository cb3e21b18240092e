"""Attention weights of the rows that a caller asks for, without building the rest."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from qkv.backends.base import Result
from qkv.backends.dense import dense_scores, softmax_rows
from qkv.problem import Problem, Tensors
from qkv.types import AuxOutput, TopK

CHUNK = 64  # rows whose weights are held at a time where all rows are asked for but not all weights


def collect(problem: Problem, tensors: Tensors, result: Result) -> AuxOutput:
    """Everything that the problem's request asks for."""
    aux = problem.aux
    return AuxOutput(
        lse=result.lse if aux.lse else None,
        max_scores=result.max_scores,
        entropy=result.entropy,
        weights=None if aux.weights is False else _weights(problem, tensors).to(problem.dtype),
        top_k=None if aux.top_k is None else _top_k(problem, tensors, aux.top_k),
    )


def _rows(problem: Problem, tensors: Tensors, rows: Sequence[int] | None) -> Tensor:
    """Weights (B, H, rows, S) before dropout in the compute type, differentiable."""
    scores, _ = dense_scores(problem, tensors, rows)
    return softmax_rows(scores, tensors.sinks).weights


def _weights(problem: Problem, tensors: Tensors) -> Tensor:
    asked = problem.aux.weights
    if asked is True:
        return _rows(problem, tensors, None)
    if asked == "mean":
        means = [_rows(problem, tensors, rows).mean(dim=1) for rows in _chunks(problem.queries)]
        return torch.cat(means, dim=1)
    if isinstance(asked, int):
        return _rows(problem, tensors, [asked])[:, :, 0]
    assert not isinstance(asked, bool | str | slice), "the question holds row numbers"
    return _rows(problem, tensors, list(asked))


@torch.no_grad()
def _top_k(problem: Problem, tensors: Tensors, k: int) -> TopK:
    """The k largest of each row, without gradient; a stable sort puts the smaller key first among equals."""
    values, indices = [], []
    for rows in _chunks(problem.queries):
        ordered = torch.sort(_rows(problem, tensors, rows), dim=-1, descending=True, stable=True)
        values.append(ordered.values[..., :k].to(problem.dtype, copy=True))  # a view would keep all S weights
        indices.append(ordered.indices[..., :k].clone())
    return TopK(torch.cat(values, dim=2), torch.cat(indices, dim=2))


def _chunks(queries: int) -> Iterator[range]:
    """All rows, some at a time; one empty range where there are none."""
    for start in range(0, max(queries, 1), CHUNK):
        yield range(start, min(start + CHUNK, queries))
