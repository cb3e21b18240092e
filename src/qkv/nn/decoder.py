"""The decoder: every token reads what came before it, and a memory where there is one; token by token with a state."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, cast, overload

import torch
from torch import Tensor, nn

from qkv.cache.base import Cache
from qkv.errors import ShapeError, ValueOutOfRange, message
from qkv.nn.attention_state import Keys
from qkv.nn.context import Context
from qkv.nn.cross_keys import keys_of_memory
from qkv.nn.layer_state import LayerState
from qkv.nn.mixer import Choice, backend_of_each, mix, softmax_told
from qkv.nn.multihead_attention import MultiheadAttention
from qkv.nn.norm import make_norm
from qkv.nn.residual import LayerOptions, ResidualLayer, in_full
from qkv.nn.rows import Rows, check_aux
from qkv.nn.stack import Stack, check_stream, choices, context_of, entered, options_of_each, placed
from qkv.nn.stack_state import StackState, read_state
from qkv.patterns.arguments import one_flag
from qkv.shapes import describe
from qkv.types import AuxOutput, AuxRequest

if TYPE_CHECKING:
    from typing_extensions import Unpack

OF_ORDER = ("rotary", "bias")  # options of self-attention that count on one order of queries and keys


class LayerAux(NamedTuple):
    """What the two attentions of a layer told."""

    attention: AuxOutput | None
    cross_attention: AuxOutput | None


class Decoding(nn.Module, ABC):
    """How decoder layers are called: one by itself as a stack of one."""

    dim: int

    @abstractmethod
    def stacked(self) -> tuple[Sequence[DecoderLayer], nn.Module | None]:
        """The layers, and the norm after them."""

    @overload
    def forward(
        self,
        x: Tensor,
        memory: Tensor | None = None,
        *,
        attention_mask: Tensor | None = None,
        memory_mask: Tensor | None = None,
        state: StackState | None = None,
        return_aux: None = None,
    ) -> Tensor: ...
    @overload
    def forward(
        self,
        x: Tensor,
        memory: Tensor | None = None,
        *,
        attention_mask: Tensor | None = None,
        memory_mask: Tensor | None = None,
        state: StackState | None = None,
        return_aux: AuxRequest,
    ) -> tuple[Any, ...]: ...
    def forward(
        self,
        x: Tensor,
        memory: Tensor | None = None,
        *,
        attention_mask: Tensor | None = None,
        memory_mask: Tensor | None = None,
        state: StackState | None = None,
        return_aux: AuxRequest | None = None,
    ) -> Tensor | tuple[Any, ...]:
        """Over embedded tokens x (B, L, dim): y (B, L, dim), 0 where there is padding.

        memory: (B, S, memory_dim), what cross-attention reads, where there is any; not with a `state` that has its keys
        already. attention_mask, memory_mask: (B, L) and (B, S), keep where 1 or True; None keeps all. Padding may
        stand anywhere: each sequence is read as if it were alone and whole.
        state: what went before, from `initial_state`; the real tokens of x are added to it in place. No gradient flows
        through it.
        return_aux: what to return of attention. The result is then (y, aux), one AuxOutput a layer in the order that
        came in, that of a linear layer empty; with cross-attention (y, aux, cross_aux).
        Raises ShapeError, DTypeError, MaskError, ValueOutOfRange or UnsupportedError before any work.
        """
        layers, final_norm = self.stacked()
        check_stream(x, layers[0])
        rows = Rows.of(attention_mask, *x.shape[:2])
        if state is not None:
            read_state(state).check(len(layers), x.shape[0])
        keys, memory_rows = keys_of_memory(_crossing(layers), x.shape[0], memory, memory_mask, state)
        check_aux(return_aux, *(one for one in (rows, memory_rows) if one is not None))
        x = entered(rows, x)
        context = context_of(layers, rows, x, None if state is None else state.lengths, return_aux)
        if state is not None:
            state.begin(layers, x, rows.lengths)
        told = []
        for number, layer in enumerate(layers):
            own = None if state is None else state.layers[number]
            x, of_layer = layer.run(x, context, own, None if keys is None else keys[number])
            told.append(of_layer)
        y = rows.back(x if final_norm is None else final_norm(x))
        seen = () if return_aux is None else _seen(told, return_aux, rows, state, memory_rows)
        if state is not None:
            state.settle()
        return y if return_aux is None else (y, *seen)

    @torch.no_grad()
    def step(self, x: Tensor, state: StackState) -> tuple[Tensor, StackState]:
        """One token of every sequence, x (B, dim): (y (B, dim), state), the state advanced in place. No gradients."""
        if not isinstance(x, Tensor) or x.ndim != 2:
            holds = f"`x` must be one token of each sequence, (B, {self.dim})"
            raise ShapeError(message(holds, f"got {describe(x)}", "forward takes more than one, (B, L, dim)"))
        return self.forward(x[:, None], state=read_state(state))[:, 0], state

    @torch.no_grad()
    def initial_state(
        self,
        batch: int,
        max_length: int,
        memory: Tensor | None = None,
        memory_mask: Tensor | None = None,
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> StackState:
        """A state for `batch` sequences of at most max_length tokens, with the keys of the memory, made once.

        Softmax attention keeps what its pattern may still see, a recurrent layer its state of one size.
        memory, memory_mask: as in `forward`. dtype, device: of the inputs, by default those of the weights.
        """
        layers, _ = self.stacked()
        keys, rows = None, None
        if memory is not None:
            keys, rows = keys_of_memory(_crossing(layers), batch, memory, memory_mask, None)
        return StackState([layer.own_state(batch, max_length, dtype, device) for layer in layers], keys, rows)


class DecoderLayer(Decoding, ResidualLayer):
    """One layer of a decoder: attention to what came before, attention to a memory, then the feed-forward.

        x = x + drop(attention(norm(x)));  x = x + drop(cross_attention(norm(x), memory));  and so on

    cross_attention: whether it reads a memory, by softmax attention over all of it, with the options of self-attention
    but for those that count on one order of queries and keys (rotary, bias). memory_dim: the memory's width, by default
    `dim`. The other arguments and the first values are those of `ResidualLayer`.
    `attention=None` is `causal()`; every linear variant fits. A pattern is taken as it is: one that shows a later
    token, as `causal() | prefix(8)` does, shows of it what a call holds.

    The `state_dict` of torch.nn.TransformerDecoderLayer loads as it is. It does not tell how a layer was made, and
    torch's defaults are activation="relu" and norm_first=False: say those that the weights are of.
    """

    causal: ClassVar[bool] = True
    TORCH: ClassVar[Mapping[str, str]] = {
        "self_attn": "attention",
        "norm1": "attention_norm",
        "multihead_attn": "cross_attention",
        "norm2": "cross_attention_norm",
        "linear1": "feed_forward.up_proj",
        "linear2": "feed_forward.down_proj",
        "norm3": "feed_forward_norm",
    }

    def __init__(
        self,
        dim: int,
        heads: int,
        hidden: int | None = None,
        *,
        attention: Choice = None,
        cross_attention: bool = True,
        memory_dim: int | None = None,
        **options: Unpack[LayerOptions],
    ) -> None:
        told, crossing = in_full(options), one_flag("cross_attention", cross_attention)
        kinds: list[list[Choice]] = [[attention], [None]] if crossing else [[attention]]
        own_backend, *of_cross = backend_of_each(told["backend"], kinds)
        own: LayerOptions = {**options, "backend": own_backend}
        super().__init__(dim, heads, hidden, attention=attention, **own)
        self.cross_attention: MultiheadAttention | None = None
        self.cross_attention_norm: nn.Module | None = None
        if crossing:
            of_softmax = softmax_told(
                told["softmax_options"],
                attention_dropout=told["attention_dropout"],
                bias=told["bias"],
                backend=of_cross[0],
            )
            self.cross_attention = MultiheadAttention(
                dim,
                heads,
                key_dim=memory_dim,
                value_dim=memory_dim,
                **{name: value for name, value in of_softmax.items() if name not in OF_ORDER},
            )
            self.cross_attention_norm = make_norm(told["norm"], dim, told["norm_eps"], bias=told["bias"])
        elif memory_dim is not None:
            seen = f"got {memory_dim} and cross_attention=False"
            raise ValueOutOfRange(message("`memory_dim` is the width of what cross-attention reads", seen, "drop it"))

    def stacked(self) -> tuple[Sequence[DecoderLayer], nn.Module | None]:
        return (self,), None

    def run(
        self, x: Tensor, context: Context, state: Cache | LayerState | None, keys: Keys | None
    ) -> tuple[Tensor, LayerAux]:
        """The layer over the stream x (B, L, dim) of a pass, and what `context.aux` asked for."""
        update, aux = mix(self.attention, self.enter(self.attention_norm, x), context, state)
        x = self.leave(self.attention_norm, x, update)
        crossed = None
        if self.cross_attention is not None and self.cross_attention_norm is not None:
            update, crossed = self.cross_attention.attend(self.enter(self.cross_attention_norm, x), context, keys=keys)
            x = self.leave(self.cross_attention_norm, x, update)
        update = self.feed_forward(self.enter(self.feed_forward_norm, x))
        return self.leave(self.feed_forward_norm, x, update), LayerAux(aux, crossed)

    def own_state(
        self, batch: int, max_length: int, dtype: torch.dtype | None, device: torch.device | str | None
    ) -> Cache | LayerState:
        """The empty state of this layer's attention."""
        if isinstance(self.attention, MultiheadAttention):
            return self.attention.initial_state(batch, max_length, dtype=dtype, device=device)
        return self.attention.initial_state(batch, dtype=dtype, device=device)


class Decoder(Decoding, Stack):
    """So many decoder layers, and a norm at the end where norms come first.

    layers: how many. attention: one choice for all layers, or a list with one for each. cross_attention, memory_dim:
    as in `DecoderLayer`. final_norm: a norm after the last layer; None: where `norm_first`. Everything else is told to
    each layer, as `ResidualLayer` says; a module in `softmax_options`, such as a rotary or a table of relative biases,
    is shared by the layers.

    First values: those of `ResidualLayer`, drawn for each layer.
    The `state_dict` of torch.nn.TransformerDecoder loads as it is; torch's defaults are others, as `DecoderLayer` says.

    >>> import torch
    >>> decoder = Decoder(2, 16, 4, attention="retention", cross_attention=False).eval()
    >>> state = decoder.initial_state(batch=1, max_length=10)
    >>> token, state = decoder.step(torch.ones(1, 16), state)
    >>> token.shape, state.length
    (torch.Size([1, 16]), 1)
    """

    def __init__(
        self,
        layers: int,
        dim: int,
        heads: int,
        hidden: int | None = None,
        *,
        attention: Choice | Sequence[Choice] = None,
        cross_attention: bool = True,
        memory_dim: int | None = None,
        final_norm: bool | None = None,
        **options: Unpack[LayerOptions],
    ) -> None:
        chosen = choices(attention, layers)
        crossing = one_flag("cross_attention", cross_attention)
        made = [
            DecoderLayer(
                dim,
                heads,
                hidden,
                attention=one,
                cross_attention=crossing,
                memory_dim=memory_dim,
                **told,
            )
            for one, told in zip(chosen, options_of_each(options, chosen, cross=crossing), strict=True)
        ]
        super().__init__(made, dim, final_norm, **options)

    def stacked(self) -> tuple[Sequence[DecoderLayer], nn.Module | None]:
        return cast("Sequence[DecoderLayer]", self.layers), self.final_norm


def _crossing(layers: Sequence[DecoderLayer]) -> list[MultiheadAttention]:
    """The cross-attention of each layer that has one."""
    return [layer.cross_attention for layer in layers if layer.cross_attention is not None]


def _seen(
    told: Sequence[LayerAux], asked: AuxRequest, rows: Rows, state: StackState | None, memory: Rows | None
) -> tuple[tuple[AuxOutput, ...], ...]:
    """What the attentions of each layer told, and where there is a memory those over it, as they came in."""
    own = rows if state is None else Rows(rows.batch, state.length)  # keys stand by their positions there
    aux = tuple(placed(one.attention, asked, rows, own) for one in told)
    if memory is None:
        return (aux,)
    return aux, tuple(placed(one.cross_attention, asked, rows, memory) for one in told)
