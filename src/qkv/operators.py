"""Attention as operators of torch, for calls that are captured in a graph: torch.compile, torch.export, fake tensors.

An operator carries the pattern as its form and tensors, and plans when it runs. In eager mode no call goes through
them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, NoReturn, TypeAlias

import torch
from torch import Tensor
from torch._C import _are_functorch_transforms_active, _len_torch_dispatch_stack

from qkv.backends.autograd import Engine, Wanted, differentiable_gradients, transformed
from qkv.backends.base import Backend, Gradients, Outcome, pattern_plan, without_autocast
from qkv.backends.cpu import Cpu, Prepared
from qkv.backends.online import forward
from qkv.dispatch import choose
from qkv.dropout import draw_seed
from qkv.errors import UnsupportedError, message
from qkv.patterns.pattern import Pattern
from qkv.patterns.recall import recall
from qkv.patterns.schedule import PatternPlan
from qkv.problem import Origin, Problem, Tensors
from qkv.question import Question
from qkv.settings import BACKEND, read
from qkv.shapes import values_can_be_seen
from qkv.types import AuxOutput, AuxRequest

Options: TypeAlias = dict[str, Any]  # the arguments of an operator that are no tensors, by name

MOST = 64  # calls that are remembered for one pattern
WORD = (1 << 64) - 1
PLAIN, CAREFUL, ALONE = range(3)  # how an outcome was made: without care, with care, by a backend that leaves none
_INPUTS = "Tensor query, Tensor key, Tensor value, Tensor? bias, Tensor? sinks, Tensor? seed, Tensor[] pattern_tensors"
_OPTIONS = (
    "str pattern, str rule, float scale, float? softcap, float dropout_p, SymInt[] query_offset, str backend,"
    " bool want_lse, bool want_max_scores, bool want_entropy"
)
_PLAIN_OPTIONS = (*("rule", "scale", "softcap", "dropout_p", "backend", "want_lse", "want_max_scores", "want_entropy"),)
_OUTCOME = "Tensor output, Tensor lse, Tensor shift, Tensor total"

_LIBRARY = torch.library.Library("qkv", "DEF")
_LIBRARY.define("draw_seed(Tensor token) -> Tensor", tags=(torch.Tag.nondeterministic_seeded,))
_LIBRARY.define(f"attention({_INPUTS}, *, {_OPTIONS}) -> ({_OUTCOME}, Tensor max_scores, Tensor entropy, Tensor made)")
_LIBRARY.define(
    f"attention_backward(Tensor? grad_output, Tensor? grad_lse, {_INPUTS}, {_OUTCOME}, Tensor made, *, {_OPTIONS},"
    " bool[] wanted) -> (Tensor query, Tensor key, Tensor value, Tensor bias, Tensor sinks)"
)
_BELOW = torch._C._after_autograd_keyset  # noqa: SLF001 - as torch.library itself goes on below autograd
_ATTENTION, _BACKWARD = torch.ops.qkv.attention.default, torch.ops.qkv.attention_backward.default


def captured(question: Question, generator: torch.Generator | None) -> bool:
    """Whether a call is to become an operator of a graph; what has no form is then refused under torch.compile."""
    if torch.compiler.is_compiling():
        return True
    if not _len_torch_dispatch_stack() or _are_functorch_transforms_active() or generator is not None:
        return False
    query, pattern = question.tensors.query, question.problem.pattern
    real = pattern.known is not None and (pattern.tensors or _has_function(pattern.form))
    return type(query) not in (Tensor, torch.nn.Parameter) and not query.is_meta and not real


def answer_in_graph(question: Question, backend: str, generator: torch.Generator | None) -> tuple[Tensor, AuxOutput]:
    """Output (B, H, L, V) and what else was asked for, by the operators."""
    problem = question.problem
    _check(problem, generator)
    aux, pattern = problem.aux, problem.pattern
    output, lse, _, _, max_scores, entropy, _ = torch.ops.qkv.attention(
        *question.tensors,
        torch.ops.qkv.draw_seed(torch.empty(0)) if problem.dropout_p else None,
        pattern.tensors,
        pattern=pattern.form,
        rule=problem.bias or "",
        scale=problem.scale,
        softcap=problem.softcap,
        dropout_p=problem.dropout_p,
        query_offset=problem.origin.query,
        backend=backend,
        want_lse=aux.lse,
        want_max_scores=aux.max_scores,
        want_entropy=aux.entropy,
    )
    return output, AuxOutput(
        lse=lse if aux.lse else None,
        max_scores=max_scores if aux.max_scores else None,
        entropy=entropy if aux.entropy else None,
    )


def _check(problem: Problem, generator: torch.Generator | None) -> None:
    """Refuse what no operator can carry."""
    if _has_function(problem.pattern.form):
        holds, seen = "a pattern in a compiled or exported graph must be given by rules and tensors", "got where(fn)"
        raise UnsupportedError(message(holds, seen, "build mask(keep=...) from it, or call outside of the graph"))
    if generator is not None:
        holds, seen = "a compiled or exported graph must draw from torch's default generator", "got `generator`"
        raise UnsupportedError(message(holds, seen, "leave it out, and seed by torch.manual_seed"))
    if problem.aux.weights is not False or problem.aux.top_k is not None:
        holds, seen = "a compiled or exported graph must not ask for weights", "got `weights` or `top_k` of AuxRequest"
        raise UnsupportedError(message(holds, seen, "ask for them outside of the graph"))


def _has_function(form: str) -> bool:
    return "where(" in form


# What the operators do.


def _drawn_seed(_token: Tensor) -> Tensor:
    """The token keeps two draws apart: torch makes one call of two that are spelled alike, but never of two `empty`."""
    seed = draw_seed(None)
    return torch.tensor(seed - (1 << 64) if seed >> 63 else seed, dtype=torch.int64)


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    sinks: Tensor | None,
    seed: Tensor | None,
    pattern_tensors: list[Tensor],
    **options: Any,
) -> tuple[Tensor, ...]:
    tensors = Tensors(query, key, value, bias, sinks)
    problem, plan, engine, backend = _understood(tensors, pattern_tensors, options)
    with torch.no_grad(), without_autocast(problem.device):
        if engine is not None:
            outcome, careful = engine.answer(problem, tensors, plan, _number(seed))
            return _fields(problem, outcome, CAREFUL if careful else PLAIN)
        result = backend.run(problem, tensors, _number(seed))
        lse = result.lse if result.lse.numel() else _rows(problem, query)
        outcome = Outcome(
            result.output, lse, _rows(problem, query), _rows(problem, query), result.max_scores, result.entropy
        )
        return _fields(problem, outcome, ALONE)


def _attention_backward(
    grad_output: Tensor | None,
    grad_lse: Tensor | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    sinks: Tensor | None,
    seed: Tensor | None,
    pattern_tensors: list[Tensor],
    output: Tensor,
    lse: Tensor,
    shift: Tensor,
    total: Tensor,
    made: Tensor,
    *,
    wanted: list[bool],
    **options: Any,
) -> tuple[Tensor, ...]:
    tensors, asked = Tensors(query, key, value, bias, sinks), tuple(wanted)
    problem, plan, engine, backend = _understood(tensors, pattern_tensors, options)
    how = int(made)
    with without_autocast(problem.device):
        if how == ALONE or engine is None:
            found = _recomputed(backend, problem, tensors, _number(seed), asked, (grad_output, grad_lse))
        else:
            outcome = Outcome(output, lse, shift, total, None, None)
            grad_output = torch.zeros_like(output) if grad_output is None else grad_output
            found = engine.gradients(
                problem, tensors, plan, _number(seed), outcome, grad_output, grad_lse, asked, careful=how == CAREFUL
            )
    return tuple(
        query.new_empty(0) if tensor is None or not want else torch.zeros_like(tensor) if grad is None else _owned(grad)
        for grad, tensor, want in zip(found, tensors, asked, strict=True)
    )


class _Understood(NamedTuple):
    """The question that an operator's arguments ask, and who answers it."""

    problem: Problem
    plan: PatternPlan
    engine: Engine | None  # made ready for tensors of these strides; None: the backend is no engine
    backend: Backend


def _understood(tensors: Tensors, pattern_tensors: Sequence[Tensor], options: Options) -> _Understood:
    """Work out, or remember, what is asked of tensors of this form."""
    forms = tuple(None if t is None else (t.shape, t.stride(), t.dtype, t.device) for t in tensors)
    offset = tuple(options["query_offset"])
    sight = recall(options["pattern"], pattern_tensors)
    call = (*forms, offset, *(options[name] for name in _PLAIN_OPTIONS), read(BACKEND))
    if call not in sight.known:
        if len(sight.known) >= MOST:
            sight.known.clear()
        sight.known[call] = _work_out(tensors, sight.pattern, offset, options)
    return sight.known[call]


def _work_out(tensors: Tensors, pattern: Pattern, offset: tuple[int, ...], options: Options) -> _Understood:
    query, key, value, bias, sinks = tensors
    problem = Problem(
        batch=query.shape[0],
        heads=query.shape[1],
        kv_heads=key.shape[1],
        queries=query.shape[2],
        keys=key.shape[2],
        head_dim=query.shape[3],
        value_dim=value.shape[3],
        dtype=query.dtype,
        device=query.device,
        pattern=pattern,
        scale=options["scale"],
        softcap=options["softcap"],
        bias=options["rule"] or None,
        bias_shape=None if bias is None else tuple(bias.shape),
        sinks=sinks is not None,
        dropout_p=options["dropout_p"],
        origin=Origin(query=offset),
        needs_grad=True,
        aux=AuxRequest(**{name: options[f"want_{name}"] for name in ("lse", "max_scores", "entropy")}),
    )
    backend, plan = choose(problem, options["backend"]).backend, pattern_plan(problem)
    if isinstance(backend, Cpu):
        return _Understood(problem, plan, Prepared.of(problem, tensors, plan), backend)
    return _Understood(problem, plan, backend if isinstance(backend, Engine) else None, backend)


def _recomputed(
    backend: Backend,
    problem: Problem,
    tensors: Tensors,
    seed: int,
    wanted: Wanted,
    grads: tuple[Tensor | None, Tensor | None],
) -> Gradients:
    """Gradients through the backend's own graph, for one that leaves no outcome."""
    with torch.enable_grad():
        leaves = [t if t is None else t.detach().requires_grad_(need) for t, need in zip(tensors, wanted, strict=True)]
        result = backend.run(problem, Tensors(*leaves), seed)  # type: ignore[arg-type]
    linked = [
        (made, grad)
        for made, grad in zip((result.output, result.lse), grads, strict=True)
        if made.requires_grad and grad is not None
    ]
    inputs = [leaf for leaf, need in zip(leaves, wanted, strict=True) if need and leaf is not None]
    if not linked:
        return Gradients(None, None, None, None, None)
    made, given = zip(*linked, strict=True)
    found = iter(torch.autograd.grad(made, inputs, given, allow_unused=True))
    return Gradients(*(next(found) if need else None for need in wanted))


def _number(seed: Tensor | None) -> int:
    return 0 if seed is None else int(seed) & WORD


def _fields(problem: Problem, outcome: Outcome, how: int) -> tuple[Tensor, ...]:
    """An outcome as the operator gives it: each a tensor of its own, in rows, empty where not asked for."""
    top = outcome.max_scores if problem.aux.max_scores else None
    entropy = outcome.entropy if problem.aux.entropy else None
    fields = (*outcome[:4], top, entropy)
    made = torch.tensor(how, dtype=torch.int8)
    return (*(outcome.lse.new_empty(0) if field is None else _owned(field) for field in fields), made)


def _owned(tensor: Tensor) -> Tensor:
    """A tensor in rows that shares its memory with no other."""
    alone = tensor.is_contiguous() and tensor.untyped_storage().nbytes() == tensor.nbytes
    return tensor if alone else tensor.clone(memory_format=torch.contiguous_format)


def _rows(problem: Problem, like: Tensor) -> Tensor:
    return like.new_zeros((problem.batch, problem.heads, problem.queries), dtype=problem.compute_dtype)


# What they look like before they run.


def _fake_drawn_seed(_token: Tensor) -> Tensor:
    return torch.empty((), dtype=torch.int64)


def _fake_attention(
    query: Tensor,
    _key: Tensor,
    value: Tensor,
    _bias: Tensor | None,
    _sinks: Tensor | None,
    _seed: Tensor | None,
    pattern_tensors: list[Tensor],
    **options: Any,
) -> tuple[Tensor, ...]:
    if not pattern_tensors:
        recall(options["pattern"], ())  # its errors are better raised now
    wide = torch.float64 if query.dtype == torch.float64 else torch.float32
    rows = query.shape[:3]
    shapes = (rows, rows, rows, rows if options["want_max_scores"] else (0,), rows if options["want_entropy"] else (0,))
    return (
        query.new_empty((*rows, value.shape[3])),
        *(query.new_empty(shape, dtype=wide) for shape in shapes),
        torch.empty((), dtype=torch.int8),
    )


def _fake_attention_backward(
    _grad_output: Tensor | None, _grad_lse: Tensor | None, *inputs: Any, wanted: list[bool], **_: Any
) -> tuple[Tensor, ...]:
    query, tensors = inputs[0], inputs[:5]
    return tuple(
        query.new_empty(0) if tensor is None or not need else tensor.new_empty(tensor.shape)
        for tensor, need in zip(tensors, wanted, strict=True)
    )


# How they are differentiated.


class _Attention(torch.autograd.Function):
    """The operator below autograd; backward by its own operator, or through plain operations where the numbers are
    there and it is differentiated itself.
    """

    @staticmethod
    def forward(
        ctx: Any,
        keys: Any,
        options: Options,
        pattern_tensors: list[Tensor],
        seed: Tensor | None,
        *tensors: Tensor | None,
    ) -> tuple[Tensor, ...]:
        found = _ATTENTION.redispatch(keys, *tensors, seed, pattern_tensors, **options)
        ctx.options = options
        ctx.save_for_backward(*tensors, seed, *found[:4], found[6], *pattern_tensors)
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*found[2:])
        return found

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor | None, grad_lse: Tensor | None, *_: Tensor | None) -> Any:
        saved = ctx.saved_tensors
        tensors, seed, outcome, pattern_tensors = saved[:5], saved[5], saved[6:11], saved[11:]
        wanted, grads = ctx.needs_input_grad[4:], (grad_output, grad_lse)
        if torch.is_grad_enabled():
            found = _differentiable(Tensors(*tensors), seed, pattern_tensors, ctx.options, wanted, grads)
        else:
            found = torch.ops.qkv.attention_backward(
                *grads, *tensors, seed, pattern_tensors, *outcome, **ctx.options, wanted=wanted
            )
        return None, None, None, None, *(grad if need else None for grad, need in zip(found, wanted, strict=True))


def _differentiable(
    tensors: Tensors,
    seed: Tensor | None,
    pattern_tensors: Sequence[Tensor],
    options: Options,
    wanted: Wanted,
    grads: tuple[Tensor | None, Tensor | None],
) -> Gradients:
    """Gradients that can be differentiated again."""
    if not values_can_be_seen(tensors.query):
        raise UnsupportedError(_SECOND_ORDER)
    problem, plan, _, _ = _understood(tensors, pattern_tensors, options)
    with without_autocast(problem.device):
        return differentiable_gradients(problem, tensors, plan, _number(seed), wanted, grads)


_SECOND_ORDER = message(
    "a graph must ask for first derivatives only",
    "got a backward pass that is to be differentiated again",
    "differentiate twice outside of torch.compile and torch.export",
)


def _attention_autograd(
    keys: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    sinks: Tensor | None,
    seed: Tensor | None,
    pattern_tensors: list[Tensor],
    **options: Any,
) -> tuple[Tensor, ...]:
    tensors, below = Tensors(query, key, value, bias, sinks), keys & _BELOW
    if _are_functorch_transforms_active():
        _refuse_transforms()
    if transformed(tensors):  # forward mode
        return _plain_attention(*tensors, seed, pattern_tensors, **options)
    if torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in tensors):
        return _Attention.apply(below, options, pattern_tensors, seed, *tensors)  # type: ignore[no-untyped-call]
    return _ATTENTION.redispatch(below, *tensors, seed, pattern_tensors, **options)


def _plain_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    sinks: Tensor | None,
    seed: Tensor | None,
    pattern_tensors: list[Tensor],
    **options: Any,
) -> tuple[Tensor, ...]:
    """The operator in plain operations, for tangents."""
    if not values_can_be_seen(query):
        _refuse_transforms()
    tensors = Tensors(query, key, value, bias, sinks)
    problem, plan, _, _ = _understood(tensors, pattern_tensors, options)
    with without_autocast(problem.device):
        outcome = forward(problem, tensors, plan, _number(seed), careful=True)
    return _fields(problem, outcome, PLAIN)


def _refuse_transforms(*_: Any, **__: Any) -> NoReturn:
    holds, seen = "torch.func and forward mode must meet qkv.attention itself", "got its operator in a graph"
    raise UnsupportedError(
        message(holds, seen, "take derivatives and batches outside of torch.compile and torch.export")
    )


def _attention_backward_autograd(keys: Any, *args: Any, **options: Any) -> tuple[Tensor, ...]:
    if torch.is_grad_enabled() and any(isinstance(arg, Tensor) and arg.requires_grad for arg in args):
        raise UnsupportedError(_SECOND_ORDER)
    return _BACKWARD.redispatch(keys & _BELOW, *args, **options)


for _name, _function, _fake in (
    ("draw_seed", _drawn_seed, _fake_drawn_seed),
    ("attention", _attention, _fake_attention),
    ("attention_backward", _attention_backward, _fake_attention_backward),
):
    _LIBRARY.impl(_name, _function, "CompositeExplicitAutograd")
    torch.library.register_fake(f"qkv::{_name}", _fake, lib=_LIBRARY)
_LIBRARY.impl("attention", _attention_autograd, "Autograd", with_keyset=True)
_LIBRARY.impl("attention_backward", _attention_backward_autograd, "Autograd", with_keyset=True)
for _name in ("attention", "attention_backward"):
    _LIBRARY.impl(_name, _refuse_transforms, "FuncTorchBatched")
