"""Attention as operators of torch, for graphs. In eager mode no call goes through them.

An operator carries the pattern as its form and tensors, and plans when it runs. Its arguments are positional, which
torch passes on several times faster than keywords.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor
from torch._C import _len_torch_dispatch_stack

from qkv.backends.autograd import Engine, Wanted, differentiable_gradients, transformed
from qkv.backends.base import Backend, Gradients, Incoming, Outcome, Work, pattern_plan, without_autocast
from qkv.backends.cpu import Cpu, Prepared
from qkv.backends.online import forward
from qkv.dispatch import choose
from qkv.dropout import draw_seed
from qkv.errors import UnsupportedError, message
from qkv.inputs import read_scale
from qkv.patterns.pattern import Pattern
from qkv.patterns.recall import recall
from qkv.patterns.schedule import PatternPlan
from qkv.problem import BiasKind, Origin, Problem, Tensors
from qkv.settings import BACKEND, read
from qkv.shapes import ORDINARY, values_can_be_seen
from qkv.types import AuxRequest

WORD = (1 << 64) - 1
MOST = 64  # calls that are remembered for one pattern
PLAIN, CAREFUL, ALONE = range(3)  # how an outcome was made: without care, with care, by a backend that leaves none
BELOW = torch._C._after_autograd_keyset  # noqa: SLF001 - as torch.library itself goes on below autograd

_ASKED = (
    "Tensor query, Tensor key, Tensor value, Tensor? bias, Tensor? sinks, Tensor? seed, Tensor[] pattern_tensors,"
    " str pattern, str rule, float? scale, float? softcap, float dropout_p, SymInt[] query_offset, str backend,"
    " bool want_lse, bool want_max_scores, bool want_entropy"
)
_OUTCOME = "Tensor output, Tensor lse, Tensor shift, Tensor total"
_LIBRARY = torch.library.Library("qkv", "DEF")
_TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.cudagraph_unsafe)
_LIBRARY.define("draw_seed(Tensor token) -> Tensor", tags=(*_TAGS, torch.Tag.nondeterministic_seeded))
_LIBRARY.define(f"attention({_ASKED}) -> ({_OUTCOME}, Tensor max_scores, Tensor entropy, Tensor made)", tags=_TAGS)
_LIBRARY.define(
    f"attention_backward({_ASKED}, {_OUTCOME}, Tensor made, Tensor? grad_output, Tensor? grad_lse, bool[] wanted) ->"
    " (Tensor query, Tensor key, Tensor value, Tensor bias, Tensor sinks)",
    tags=_TAGS,
)
ATTENTION, BACKWARD = torch.ops.qkv.attention.default, torch.ops.qkv.attention_backward.default
DRAW_SEED = torch.ops.qkv.draw_seed.default


class Options(NamedTuple):
    """What is asked, tensors apart, as the operators name it."""

    pattern: str  # a form
    rule: str  # which kind of bias, "" for none
    scale: float | None  # None: 1/sqrt(D), whatever D is
    softcap: float | None
    dropout_p: float
    query_offset: tuple[int, ...]
    backend: str
    want_lse: bool
    want_max_scores: bool
    want_entropy: bool


class Asked(NamedTuple):
    """The arguments that both operators share, in their order once tensors and options are flat."""

    tensors: Tensors
    seed: Tensor | None
    pattern_tensors: Sequence[Tensor]
    options: Options

    @classmethod
    def read(cls, arguments: Sequence[Any]) -> Asked:
        """From the first arguments of an operator."""
        query, key, value, bias, sinks, seed, pattern_tensors, *options = arguments[:17]
        options[5] = tuple(options[5])  # the offsets come as a list
        return cls(Tensors(query, key, value, bias, sinks), seed, pattern_tensors, Options(*options))

    def flat(self) -> tuple[Any, ...]:
        """As an operator takes them."""
        return *self.tensors, self.seed, self.pattern_tensors, *self.options

    @property
    def seed_value(self) -> int:
        return 0 if self.seed is None else int(self.seed) & WORD


class Understood(NamedTuple):
    """The question that the arguments ask, and who answers it."""

    problem: Problem
    plan: PatternPlan
    engine: Engine | None  # made ready for tensors of these strides; None: the backend is none
    backend: Backend


def understood(asked: Asked) -> Understood:
    """Worked out, or remembered for this pattern and tensors of these forms."""
    forms = tuple(None if t is None else (t.shape, t.stride(), t.dtype, t.device) for t in asked.tensors)
    sight = recall(asked.options.pattern, asked.pattern_tensors)
    call = forms, asked.options, read(BACKEND)
    if call not in sight.known:
        if len(sight.known) >= MOST:
            sight.known.clear()
        sight.known[call] = _work_out(asked.tensors, sight.pattern, asked.options)
    return sight.known[call]


def _work_out(tensors: Tensors, pattern: Pattern, options: Options) -> Understood:
    query, key, value, bias, sinks = tensors
    kinds: dict[str, BiasKind | None] = {"": None, "tensor": "tensor", "alibi": "alibi", "relative": "relative"}
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
        scale=read_scale(options.scale, query.shape[3]),
        softcap=options.softcap,
        bias=kinds[options.rule],
        bias_shape=None if bias is None else tuple(bias.shape),
        sinks=sinks is not None,
        dropout_p=options.dropout_p,
        origin=Origin(query=options.query_offset),
        needs_grad=True,
        aux=AuxRequest(lse=options.want_lse, max_scores=options.want_max_scores, entropy=options.want_entropy),
    )
    backend, plan = choose(problem, options.backend).backend, pattern_plan(problem)
    if isinstance(backend, Cpu):
        return Understood(problem, plan, Prepared.of(Work(problem, tensors, plan, 0)), backend)
    return Understood(problem, plan, backend if isinstance(backend, Engine) else None, backend)


# What the operators do.


def _drawn_seed(_token: Tensor) -> Tensor:
    seed = draw_seed(None)
    return torch.tensor(seed - (1 << 64) if seed >> 63 else seed, dtype=torch.int64)


def _attention(*arguments: Any) -> tuple[Tensor, ...]:
    return _answered(Asked.read(arguments))


def _answered(asked: Asked) -> tuple[Tensor, ...]:
    tensors, seed = asked.tensors, asked.seed_value
    problem, plan, engine, backend = understood(asked)
    with torch.no_grad(), without_autocast(problem.device):
        if engine is not None:
            outcome, careful = engine.answer(Work(problem, tensors, plan, seed))
            return _fields(problem, outcome, CAREFUL if careful else PLAIN)
        output, lse, top, entropy = backend.run(problem, tensors, seed)
        if lse.ndim != 3:  # it makes none
            lse = torch.zeros_like(output[..., 0], dtype=problem.compute_dtype)
        return _fields(problem, Outcome(output, lse, lse, lse, top, entropy), ALONE)


def _attention_backward(*arguments: Any) -> tuple[Tensor, ...]:
    asked = Asked.read(arguments)
    output, lse, shift, total, made, grad_output, grad_lse, wanted = arguments[17:]
    tensors, seed, wanted, how = asked.tensors, asked.seed_value, tuple(wanted), int(made)
    problem, plan, engine, backend = understood(asked)
    with without_autocast(problem.device):
        if how == ALONE or engine is None:
            found = _recomputed(backend, problem, tensors, seed, wanted, (grad_output, grad_lse))
        else:
            outcome = Outcome(output, lse, shift, total, None, None)
            grad_output = torch.zeros_like(output) if grad_output is None else grad_output
            work, incoming = Work(problem, tensors, plan, seed), Incoming(grad_output, grad_lse)
            found = engine.gradients(work, outcome, incoming, wanted, careful=how == CAREFUL)
    return tuple(
        tensors.query.new_empty(0) if t is None or not want else torch.zeros_like(t) if grad is None else _owned(grad)
        for grad, t, want in zip(found, tensors, wanted, strict=True)
    )


def _recomputed(
    backend: Backend,
    problem: Problem,
    tensors: Tensors,
    seed: int,
    wanted: Wanted,
    grads: tuple[Tensor | None, Tensor | None],
) -> Gradients:
    """Gradients through the backend's own graph, for one that leaves no outcome."""
    leaves = [None if t is None else t.detach().requires_grad_(need) for t, need in zip(tensors, wanted, strict=True)]
    with torch.enable_grad(), _with_autograd():
        result = backend.run(problem, Tensors(*leaves), seed)  # type: ignore[arg-type]
    pairs = zip((result.output, result.lse), grads, strict=True)
    linked = [(made, grad) for made, grad in pairs if made.requires_grad and grad is not None]
    if not linked:
        return Gradients(None, None, None, None, None)
    inputs = [leaf for leaf in leaves if leaf is not None and leaf.requires_grad]
    results, given = zip(*linked, strict=True)
    found = iter(torch.autograd.grad(results, inputs, given, allow_unused=True))
    return Gradients(*(next(found) if leaf is not None and leaf.requires_grad else None for leaf in leaves))


def _with_autograd() -> Any:
    """A block in which graphs are built, even where torch runs a graph of its own below autograd."""
    core, key = torch._C, torch._C.DispatchKey  # noqa: SLF001 - torch has no public way
    excluded = core._dispatch_tls_local_exclude_set()  # noqa: SLF001
    for each in (key.AutogradFunctionality, key.AutogradOther, key.AutogradNestedTensor, key.ADInplaceOrView):
        excluded = excluded.remove(each)
    return core._ForceDispatchKeyGuard(core._dispatch_tls_local_include_set(), excluded)  # noqa: SLF001


def _fields(problem: Problem, outcome: Outcome, how: int) -> tuple[Tensor, ...]:
    """An outcome as the operator gives it: each a tensor of its own, in rows, empty where not asked for."""
    top = outcome.max_scores if problem.aux.max_scores else None
    entropy = outcome.entropy if problem.aux.entropy else None
    fields = (outcome.output, outcome.lse, outcome.shift, outcome.total, top, entropy)
    owned = [outcome.lse.new_empty(0) if field is None else _owned(field) for field in fields]
    if how == ALONE:  # three times the same
        owned[2:4] = owned[1].clone(), owned[1].clone()
    return *owned, torch.tensor(how, dtype=torch.int8)


def _owned(tensor: Tensor) -> Tensor:
    """A tensor in rows that shares its memory with no other."""
    alone = tensor.is_contiguous() and tensor.untyped_storage().nbytes() == tensor.nbytes > 0
    return tensor if alone else tensor.clone(memory_format=torch.contiguous_format)


# What their results look like before they run.


def _fake_drawn_seed(_token: Tensor) -> Tensor:
    return torch.empty((), dtype=torch.int64)


def _fake_attention(*arguments: Any) -> tuple[Tensor, ...]:
    (query, _, value, _, _), _, pattern_tensors, options = Asked.read(arguments)
    if not pattern_tensors:
        recall(options.pattern, ())  # its errors are better raised now
    wide = torch.float64 if query.dtype == torch.float64 else torch.float32
    rows, nothing = query.shape[:3], (0,)
    top, entropy = rows if options.want_max_scores else nothing, rows if options.want_entropy else nothing
    return (
        query.new_empty((*rows, value.shape[3])),
        *(query.new_empty(shape, dtype=wide) for shape in (rows, rows, rows, top, entropy)),
        torch.empty((), dtype=torch.int8),
    )


def _fake_attention_backward(*arguments: Any) -> tuple[Tensor, ...]:
    query, tensors, wanted = arguments[0], arguments[:5], arguments[-1]
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
    def forward(ctx: Any, keys: Any, asked: Asked, *tensors: Tensor | None) -> tuple[Tensor, ...]:
        found = _below(keys, asked._replace(tensors=Tensors(*tensors)))  # type: ignore[arg-type]
        ctx.options = asked.options
        ctx.save_for_backward(*tensors, asked.seed, *found[:4], found[6], *asked.pattern_tensors)
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*found[2:])
        return found

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor | None, grad_lse: Tensor | None, *_: Tensor | None) -> Any:
        saved = ctx.saved_tensors  # read once: recomputing checkpoints allow no more
        asked = Asked(Tensors(*saved[:5]), saved[5], saved[11:], ctx.options)
        wanted, grads = ctx.needs_input_grad[2:], (grad_output, grad_lse)
        if torch.is_grad_enabled():
            found = _differentiable(asked, wanted, grads)
        else:
            found = BACKWARD(*asked.flat(), *saved[6:11], *grads, wanted)
        return None, None, *(grad if need else None for grad, need in zip(found, wanted, strict=True))


def _differentiable(asked: Asked, wanted: Wanted, grads: tuple[Tensor | None, Tensor | None]) -> Gradients:
    """Gradients that can be differentiated again."""
    if not values_can_be_seen(asked.tensors.query):
        raise UnsupportedError(_SECOND_ORDER)
    problem, plan, _, _ = understood(asked)
    with without_autocast(problem.device):
        return differentiable_gradients(problem, asked.tensors, plan, asked.seed_value, wanted, grads)


def _attention_autograd(keys: Any, *arguments: Any) -> tuple[Tensor, ...]:
    asked = Asked.read(arguments)
    if transformed(asked.tensors):
        return _with_tangents(asked)
    if torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in asked.tensors):
        return _Attention.apply(keys, asked, *asked.tensors)  # type: ignore[no-untyped-call]
    return _below(keys, asked)


def _below(keys: Any, asked: Asked) -> tuple[Tensor, ...]:
    """The operator below autograd; at once what it does where nothing stands between."""
    given = (tensor for tensor in asked.tensors if tensor is not None)
    if not _len_torch_dispatch_stack() and all(type(t) in ORDINARY and not t.is_neg() for t in given):
        return _answered(asked)
    return ATTENTION.redispatch(keys & BELOW, *asked.flat())


def _with_tangents(asked: Asked) -> tuple[Tensor, ...]:
    """The operator in plain operations, which forward mode knows; torch.func does not reach into an operator."""
    if not values_can_be_seen(asked.tensors.query):
        _refuse_transforms()
    problem, plan, _, _ = understood(asked)
    with without_autocast(problem.device):
        outcome = forward(problem, asked.tensors, plan, asked.seed_value, careful=True)
    return _fields(problem, outcome, PLAIN)


def _attention_backward_autograd(keys: Any, *arguments: Any) -> tuple[Tensor, ...]:
    if torch.is_grad_enabled() and any(isinstance(part, Tensor) and part.requires_grad for part in arguments):
        raise UnsupportedError(_SECOND_ORDER)
    return BACKWARD.redispatch(keys & BELOW, *arguments)


def _refuse_transforms(*_: Any) -> NoReturn:
    holds, seen = "torch.func and forward mode must meet qkv.attention itself", "got its operator in a graph"
    raise UnsupportedError(
        message(holds, seen, "take derivatives and batches outside of torch.compile and torch.export")
    )


_SECOND_ORDER = message(
    "a graph must ask for first derivatives only",
    "got a backward pass that is to be differentiated again",
    "differentiate twice outside of torch.compile and torch.export",
)

for _name, _function, _fake in (
    ("draw_seed", _drawn_seed, _fake_drawn_seed),
    ("attention", _attention, _fake_attention),
    ("attention_backward", _attention_backward, _fake_attention_backward),
):
    _LIBRARY.impl(_name, _function, "CompositeExplicitAutograd")
    torch.library.register_fake(f"qkv::{_name}", _fake, lib=_LIBRARY)
for _name, _autograd in (("attention", _attention_autograd), ("attention_backward", _attention_backward_autograd)):
    _LIBRARY.impl(_name, _autograd, "Autograd", with_keyset=True)
    _LIBRARY.impl(_name, _refuse_transforms, "FuncTorchBatched")
