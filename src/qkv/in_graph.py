"""Calls that are captured in a graph, by torch.compile, torch.export or fake tensors: they become an operator.

All of this is traced, and so must be plain: no planning, no text but what a pattern already has.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch._C import _are_functorch_transforms_active, _len_torch_dispatch_stack

from qkv.errors import UnsupportedError, message
from qkv.operators import ATTENTION, DRAW_SEED
from qkv.patterns.pattern import Pattern
from qkv.problem import Problem
from qkv.question import Question
from qkv.shapes import ORDINARY
from qkv.types import AuxOutput


def captured(question: Question, generator: torch.Generator | None) -> bool:
    """Whether a call becomes an operator; under torch.compile and torch.export every one does, or is refused."""
    if torch.compiler.is_compiling():
        return True
    if not _len_torch_dispatch_stack() or _are_functorch_transforms_active() or generator is not None:
        return False
    query = question.tensors.query
    fake = type(query) not in ORDINARY and not query.is_meta
    return fake and not _is_real(question.problem.pattern)


def answer_in_graph(
    question: Question, scale: float | None, backend: str, generator: torch.Generator | None
) -> tuple[Tensor, AuxOutput]:
    """Output (B, H, L, V) and what else was asked for, by the operator.

    `scale` as the caller gave it: a factor worked out of D here would bind the graph to this D.
    """
    problem = question.problem
    _check(problem, generator)
    aux, pattern = problem.aux, problem.pattern
    output, lse, _, _, max_scores, entropy, _ = ATTENTION(
        *question.tensors,
        # the token keeps two draws apart: torch makes one of two calls that are spelled alike, but never of two `empty`
        DRAW_SEED(torch.empty(0)) if problem.dropout_p else None,
        pattern.tensors,
        pattern.form,
        problem.bias or "",
        None if scale is None else problem.scale,
        problem.softcap,
        problem.dropout_p,
        problem.origin.query,
        backend,
        aux.lse,
        aux.max_scores,
        aux.entropy,
    )
    return output, AuxOutput(
        lse=lse if aux.lse else None,
        max_scores=max_scores if aux.max_scores else None,
        entropy=entropy if aux.entropy else None,
    )


def _check(problem: Problem, generator: torch.Generator | None) -> None:
    """Refuse what the operator cannot carry."""
    if _has_function(problem.pattern):
        holds, seen = "a pattern in a compiled or exported graph must be given by rules and tensors", "got where(fn)"
        raise UnsupportedError(message(holds, seen, "build mask(keep=...) from it, or call outside of the graph"))
    if generator is not None:
        holds, seen = "a compiled or exported graph must draw from torch's default generator", "got `generator`"
        raise UnsupportedError(message(holds, seen, "leave it out, and seed by torch.manual_seed"))
    if problem.aux.weights is not False or problem.aux.top_k is not None:
        holds, seen = "a compiled or exported graph must not ask for weights", "got `weights` or `top_k` of AuxRequest"
        raise UnsupportedError(message(holds, seen, "ask for them outside of the graph"))


def _has_function(pattern: Pattern) -> bool:
    return "where(" in pattern.form


def _is_real(pattern: Pattern) -> bool:
    """Whether it holds content that is no part of the graph; it is then planned at once, as outside of graphs."""
    return pattern.known is not None and (bool(pattern.tensors) or _has_function(pattern))
