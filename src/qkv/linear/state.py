"""`RecurrentState`: the state of the linear family for decoding, advanced in place, with ways back."""

from __future__ import annotations

from collections.abc import Hashable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch._C import _are_functorch_transforms_active

from qkv.cache.arguments import read_size
from qkv.errors import DTypeError, ShapeError, UnsupportedError, ValueOutOfRange, message
from qkv.inputs import as_index
from qkv.linear import native
from qkv.linear.features import FeatureMap
from qkv.linear.recurrence import Streams
from qkv.linear.state_draft import Draft, own
from qkv.linear.state_held import Held, alone
from qkv.linear.state_rules import RULES, read_setting
from qkv.linear.state_tokens import Call, Tokens, all_plain, at_once, check_gate, check_strength, compute, prepare
from qkv.question import as_autocast_does
from qkv.settings import BACKEND, read
from qkv.shapes import check_dense, describe
from qkv.types import Layout

if TYPE_CHECKING:
    from typing_extensions import Self

MOST = 16  # calls remembered


class RecurrentState(Held):
    """What the linear family remembers of B sequences: one matrix (D, W) a value head, whatever their length.

    Axes: B sequences, H value heads, K key heads (value head h reads key head h // (H / K)), n tokens, D width of q and
    k, V width of v, W = V, or V + 1 with the normaliser.

    rule: "linear", "retention", "gated_linear", "delta", "gated_delta", "kimi_delta" or "ssd": the recurrence and the
    defaults of `linear_attention`, `retention` and so on. feature_map, normalize, scale: as there, None for the default
    of the rule; a map that makes another width of D gives the state as many rows. decay: of "retention", (H,), the log
    of each head's constant. dtype: of q, k and v; the state is float32, or float64 for float64. backend: "auto", "cpu",
    "chunked" or "reference"; a name is used or refused with its reasons, by the first step.

    >>> import torch
    >>> state = RecurrentState(batch=1, heads=2, key_dim=4, value_dim=3, rule="delta")
    >>> state.step(torch.ones(1, 2, 4), torch.ones(1, 2, 4), torch.ones(1, 2, 3), beta=torch.ones(1, 2)).shape
    torch.Size([1, 2, 3])
    >>> state.length, state.nbytes
    (1, 96)
    """

    def __init__(
        self,
        batch: int,
        heads: int,
        key_dim: int,
        value_dim: int,
        rule: str = "gated_delta",
        *,
        key_heads: int | None = None,
        feature_map: str | FeatureMap | None = None,
        normalize: bool | None = None,
        scale: float | None = None,
        decay: Tensor | None = None,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
        backend: str = "auto",
    ) -> None:
        setting = read_setting(
            heads,
            key_dim,
            value_dim,
            rule,
            key_heads=key_heads,
            feature_map=feature_map,
            normalize=normalize,
            scale=scale,
            decay=decay,
            dtype=dtype,
            device=device,
            backend=backend,
        )
        shape = setting.shape(read_size("batch", batch, 0))
        with torch.inference_mode(False):
            state = torch.zeros(shape, dtype=setting.dtype, device=setting.device)
        self._begin(setting, state, 0)

    @classmethod
    def from_state(
        cls,
        state: Tensor,
        rule: str = "gated_delta",
        *,
        length: int = 0,
        key_dim: int | None = None,
        key_heads: int | None = None,
        feature_map: str | FeatureMap | None = None,
        normalize: bool | None = None,
        scale: float | None = None,
        decay: Tensor | None = None,
        backend: str = "auto",
    ) -> Self:
        """Go on from the last state (B, H, D, W) of a function, as after a prompt. It is copied.

        length: how many tokens it has seen, which only `length` tells. key_dim: of q and k, where a feature map makes
        another width of it.
        """
        given = check_dense("state", state)
        if given.ndim != 4:
            seen = f"got {describe(given)}"
            raise ShapeError(
                message("`state` must have 4 axes, (B, H, D, W)", seen, "say return_state=True to get one")
            )
        batch, heads, width, columns = given.shape
        known = RULES.get(rule) if isinstance(rule, str) else None
        normalized = known is not None and known.normalize if normalize is None else normalize
        made = cls(
            batch,
            heads,
            width if key_dim is None else key_dim,
            columns - bool(normalized),
            rule,
            key_heads=key_heads,
            feature_map=feature_map,
            normalize=normalize,
            scale=scale,
            decay=decay,
            dtype=given.dtype,
            device=given.device,
            backend=backend,
        )
        made.load(given, length=length)
        return made

    def step(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        g: Tensor | None = None,
        beta: Tensor | None = None,
        *,
        layout: Layout = "BHLD",
        draft: bool = False,
    ) -> Tensor:
        """Read one token, or n of them in order, and write them into the state: what the function of the rule gives.

        One token: query and key (B, K, D), value (B, H, V), g (B, H) or (B, H, D), beta (B, H); gives (B, H, V).
        n tokens: one more axis n after the heads, or before them with layout="BLHD"; gives (B, H, n, V), (B, n, H, V).
        Any dtype that the state takes; g and beta may be in the state's own. g is log decay and at most 0, and beta is
        finite, which is checked on the CPU only, where it costs no waiting.

        draft: the tokens may be taken back by `accept` or `reject`, and the next ones until then; the state before the
        first of them, and copies of the tokens, are kept until then.

        No gradient flows through a state: inputs are taken without their graph, and the output has none. An error
        leaves the state as it was. So does an interrupt, unless it comes while the state is written: then every later
        step is refused until `restore`, `load`, `reset` or `reject`. After that, `length` counts the tokens.
        """
        if torch.compiler.is_dynamo_compiling():
            return _step(self, query, key, value, g, beta, layout=layout, draft=draft)
        tokens = Tokens(query, key, value, g, beta)
        form = call = None
        try:
            if torch.is_autocast_enabled(self._setting.device.type):
                tokens = Tokens._make((*as_autocast_does(query, key, value), g, beta))
            if not all_plain(tokens):
                tokens = Tokens._make(x if x is None else x.detach().resolve_neg() for x in tokens)
            form = form_of(tokens, layout)
            call = self._calls.get(form)
        except (AttributeError, TypeError, RuntimeError):
            form = None  # no tensors, or some of another kind: the long way says what is wrong
        if call is None or draft or self._draft is not None or _are_functorch_transforms_active():
            call = self._long_way(tokens, layout, form, draft=draft)
            if call.recurrence.length * call.recurrence.batch == 0:
                return tokens.value.new_empty(tokens.value.shape)
        if g is not None and g.is_cpu:
            check_gate(g)
        if beta is not None and beta.is_cpu:
            check_strength(beta)
        if call.core is not None and not draft:
            return self._at_once(call, tokens)
        streams = call.streams(tokens)
        output = self._drafted(call, streams) if draft else self._advance(call, streams)
        return call.shown(output, tokens.value.dtype)

    @alone
    def accept(self, n: int) -> None:
        """Keep the first n tokens of the draft and take back the others.

        What is left is bit for bit what these n tokens alone leave, stepped in the same calls: where some are taken
        back, the state before the draft steps over the n again.
        """
        draft = self._draft
        if draft is None:
            holds, remedy = "`accept` and `reject` must follow a draft", "say step(..., draft=True)"
            raise UnsupportedError(message(holds, "no draft is open", remedy))
        count, most = as_index(n), draft.tokens
        if count is None:
            raise DTypeError(message("`n` must be an int", f"got {n!r}", "give how many tokens to keep"))
        if not 0 <= count <= most:
            holds = f"`n` must lie in 0..{most}, the tokens of the draft"
            raise ValueOutOfRange(message(holds, f"got {count}", "count from its first step"))
        if count < most or self._torn:
            with self._written():
                self._state.copy_(draft.before)
                self._length = draft.length
                for call, streams in draft.first(count):
                    self._advance(call, streams)
        self._draft = None

    def reject(self) -> None:
        """Take back all tokens of the draft."""
        self.accept(0)

    def _long_way(self, tokens: Tokens, layout: str, form: Hashable | None, *, draft: bool) -> Call:
        """Check everything that a remembered call need not."""
        self._check_whole()
        if self._draft is not None and not draft:
            self.check_settled("step")
        call = self._calls.get(form)
        if call is None or _are_functorch_transforms_active():
            call = prepare(self._setting, self.batch, tokens, layout)
            if form is not None and call.recurrence.length * call.recurrence.batch:
                if len(self._calls) >= MOST:
                    self._calls.clear()
                self._calls[form] = call
        return call

    def _at_once(self, call: Call, tokens: Tokens) -> Tensor:
        """The output in the form of the tokens, once they are in the state."""
        try:  # as `_written`, at a fraction of its time: this is the step of every token
            output = at_once(call, tokens, self._state)
            self._length += call.recurrence.length
        except BaseException:  # also what a signal handler raised while the core was at work
            self._tear()
            raise
        return output

    def _advance(self, call: Call, streams: Streams) -> Tensor:
        """The output (B, H, n, V), once the tokens are in the state."""
        computed = None if call.engine == "cpu" else compute(call, streams, self._state)
        with self._written():
            if computed is None:
                output = native.advance(call.recurrence, streams, self._state)
            else:
                output = computed.output
                self._state.copy_(computed.state)
            self._length += call.recurrence.length
        return output

    def _drafted(self, call: Call, streams: Streams) -> Tensor:
        """The same, with the way back kept."""
        known = self._draft
        draft = Draft(own(self._state), self._length) if known is None else known
        draft.add(call, streams)
        self._draft = draft
        try:
            return self._advance(call, streams)
        except BaseException:
            if not self._torn:
                draft.calls.pop()
                self._draft = known
            raise


def form_of(tokens: Tokens, layout: str) -> Hashable:
    """All that tells one call from another, values apart."""
    q, k, v, gate, beta = tokens
    kinds = type(q), type(k), type(v), type(gate), type(beta)
    types = q.dtype, k.dtype, v.dtype, gate is None or gate.dtype, beta is None or beta.dtype
    shapes = q.shape, k.shape, v.shape, gate is None or gate.shape, beta is None or beta.shape
    strides = q.stride(), k.stride(), v.stride(), gate is None or gate.stride(), beta is None or beta.stride()
    places = q.device, k.device, v.device, gate is None or gate.device, beta is None or beta.device
    layouts = q.layout, k.layout, v.layout, gate is None or gate.layout, beta is None or beta.layout
    return shapes, strides, types, places, kinds, layouts, layout, read(BACKEND)


@alone
def _step(state: RecurrentState, *tokens: Tensor | None, **options: Any) -> Tensor:
    return state.step(*tokens, **options)  # type: ignore[arg-type]
