"""The encoder: every token reads every other that its pattern shows, in layers one after another."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar, cast, overload

from torch import Tensor, nn

from qkv.nn.context import Context
from qkv.nn.mixer import Choice, mix
from qkv.nn.residual import LayerOptions, ResidualLayer
from qkv.nn.rows import Rows, check_aux
from qkv.nn.stack import Stack, check_stream, choices, context_of, entered, options_of_each, placed
from qkv.types import AuxOutput, AuxRequest

if TYPE_CHECKING:
    from typing_extensions import Unpack


class EncoderLayer(ResidualLayer):
    """One layer of an encoder: attention among all tokens of a sequence, then the feed-forward.

    The arguments and first values are those of `ResidualLayer`. `attention=None` sees all tokens; of the linear
    variants "linear" alone fits, which then reads both ways. The others read from left to right and are refused.

    The `state_dict` of torch.nn.TransformerEncoderLayer loads as it is. It does not tell how a layer was made, and
    torch's defaults are activation="relu" and norm_first=False: say those that the weights are of.
    """

    causal: ClassVar[bool] = False
    TORCH: ClassVar[Mapping[str, str]] = {
        "self_attn": "attention",
        "norm1": "attention_norm",
        "linear1": "feed_forward.up_proj",
        "linear2": "feed_forward.down_proj",
        "norm2": "feed_forward_norm",
    }

    @overload
    def forward(self, x: Tensor, attention_mask: Tensor | None = None, *, return_aux: None = None) -> Tensor: ...
    @overload
    def forward(
        self, x: Tensor, attention_mask: Tensor | None = None, *, return_aux: AuxRequest
    ) -> tuple[Tensor, AuxOutput]: ...
    def forward(
        self, x: Tensor, attention_mask: Tensor | None = None, *, return_aux: AuxRequest | None = None
    ) -> Tensor | tuple[Tensor, AuxOutput]:
        """The layer over x (B, L, dim), as `Encoder.forward`; with return_aux its one AuxOutput."""
        y, aux = _encoded((self,), None, x, attention_mask, return_aux)
        return y if return_aux is None else (y, aux[0])

    def run(self, x: Tensor, context: Context) -> tuple[Tensor, AuxOutput | None]:
        """The layer over the stream x (B, L, dim) of a pass, and what `context.aux` asked for."""
        update, aux = mix(self.attention, self.enter(self.attention_norm, x), context)
        x = self.leave(self.attention_norm, x, update)
        update = self.feed_forward(self.enter(self.feed_forward_norm, x))
        return self.leave(self.feed_forward_norm, x, update), aux


class Encoder(Stack):
    """So many encoder layers, and a norm at the end where norms come first.

    layers: how many. attention: one choice for all layers, or a list with one for each. final_norm: a norm after the
    last layer; None: where `norm_first`. Everything else is told to each layer, as `EncoderLayer` says; a module in
    `softmax_options`, such as a rotary or a table of relative biases, is shared by the layers.

    First values: those of `ResidualLayer`, drawn for each layer.
    The `state_dict` of torch.nn.TransformerEncoder loads as it is; torch's defaults are others, as `EncoderLayer` says.

    >>> import torch
    >>> encoder = Encoder(2, 16, 4, attention="window(1, 1)")
    >>> encoder(torch.ones(1, 5, 16)).shape
    torch.Size([1, 5, 16])
    """

    def __init__(
        self,
        layers: int,
        dim: int,
        heads: int,
        hidden: int | None = None,
        *,
        attention: Choice | Sequence[Choice] = None,
        final_norm: bool | None = None,
        **options: Unpack[LayerOptions],
    ) -> None:
        chosen = choices(attention, layers)
        made = [
            EncoderLayer(dim, heads, hidden, attention=one, **told)
            for one, told in zip(chosen, options_of_each(options, chosen), strict=True)
        ]
        super().__init__(made, dim, final_norm, **options)

    @overload
    def forward(self, x: Tensor, attention_mask: Tensor | None = None, *, return_aux: None = None) -> Tensor: ...
    @overload
    def forward(
        self, x: Tensor, attention_mask: Tensor | None = None, *, return_aux: AuxRequest
    ) -> tuple[Tensor, tuple[AuxOutput, ...]]: ...
    def forward(
        self, x: Tensor, attention_mask: Tensor | None = None, *, return_aux: AuxRequest | None = None
    ) -> Tensor | tuple[Tensor, tuple[AuxOutput, ...]]:
        """The layers over embedded tokens x (B, L, dim): y (B, L, dim), 0 where there is padding.

        attention_mask: (B, L), keeps where 1 or True; None keeps all. Padding may stand anywhere: each sequence is
        read as if it were alone and whole, so that patterns and positions count real tokens only.
        return_aux: what to return of every layer's attention beside y, one AuxOutput a layer, in the order that came
        in; that of a linear layer is empty.
        Raises ShapeError, DTypeError, MaskError or UnsupportedError before any work.
        """
        y, aux = _encoded(cast("Sequence[EncoderLayer]", self.layers), self.final_norm, x, attention_mask, return_aux)
        return y if return_aux is None else (y, aux)


def _encoded(
    layers: Sequence[EncoderLayer],
    final_norm: nn.Module | None,
    x: Tensor,
    attention_mask: Tensor | None,
    return_aux: AuxRequest | None,
) -> tuple[Tensor, tuple[AuxOutput, ...]]:
    """The layers in turn, between the doors."""
    check_stream(x, layers[0])
    rows = Rows.of(attention_mask, *x.shape[:2])
    check_aux(return_aux, rows)
    x = entered(rows, x)
    context = context_of(layers, rows, x, None, return_aux)
    told = []
    for layer in layers:
        x, aux = layer.run(x, context)
        told.append(aux)
    y = rows.back(x if final_norm is None else final_norm(x))
    return y, () if return_aux is None else tuple(placed(one, return_aux, rows, rows) for one in told)
