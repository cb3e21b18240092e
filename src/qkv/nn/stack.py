"""What encoders and decoders share: how layers are made and held, and what is done at the doors of a pass."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar, cast

from torch import Tensor, nn

from qkv.cache.arguments import read_size
from qkv.errors import ValueOutOfRange, message
from qkv.nn.attention_checks import check_rows
from qkv.nn.context import Context
from qkv.nn.mixer import Choice, backend_of_each, first_map
from qkv.nn.multihead_attention import MultiheadAttention
from qkv.nn.norm import make_norm
from qkv.nn.residual import LayerOptions, ResidualLayer, in_full, take_torch_names
from qkv.nn.rows import Rows
from qkv.patterns.arguments import one_flag
from qkv.types import AuxOutput, AuxRequest

if TYPE_CHECKING:
    from typing_extensions import Unpack


class Stack(nn.Module):
    """Layers one after another, and a norm at the end where each layer's own comes first."""

    TORCH: ClassVar[Mapping[str, str]] = {"norm": "final_norm"}

    def __init__(
        self, made: Iterable[ResidualLayer], dim: int, final_norm: bool | None, **options: Unpack[LayerOptions]
    ) -> None:
        super().__init__()
        self.dim = dim
        self.layers = nn.ModuleList(made)
        _check_apart([cast("ResidualLayer", layer).attention for layer in self.layers])
        told = in_full(options)
        wanted = told["norm_first"] if final_norm is None else one_flag("final_norm", final_norm)
        self.final_norm = make_norm(told["norm"], dim, told["norm_eps"], bias=told["bias"]) if wanted else None
        self.register_load_state_dict_pre_hook(take_torch_names)  # type: ignore[no-untyped-call]


def choices(attention: Choice | Sequence[Choice], layers: int) -> list[Choice]:
    """The `attention` of each of so many layers: one for all, or a list with one for each."""
    read_size("layers", layers, 1)
    if isinstance(attention, list | tuple):
        if len(attention) != layers:
            seen = f"got {len(attention)} for {layers} layers"
            remedy = "give one for all layers, or one a layer"
            raise ValueOutOfRange(message("`attention` must hold one choice for each layer", seen, remedy))
        return list(attention)
    return [cast("Choice", attention)] * layers


def options_of_each(options: LayerOptions, chosen: Sequence[Choice], *, cross: bool = False) -> list[LayerOptions]:
    """What each layer is told: the same, but for a backend that only layers of the other kind know.

    cross: whether each has softmax attention over a memory beside what was chosen.
    """
    kinds = [[choice, None] if cross else [choice] for choice in chosen]
    return [{**options, "backend": backend} for backend in backend_of_each(in_full(options)["backend"], kinds)]


def _check_apart(attentions: Sequence[nn.Module]) -> None:
    """Raise where a module stands in more than one layer."""
    for number, one in enumerate(attentions):
        if any(one is other for other in attentions[:number]):
            seen = f"got one {type(one).__name__} for more than one of {len(attentions)}"
            remedy = "give a function of (dim, heads), such as its class, or a list of modules"
            raise ValueOutOfRange(message("each layer must have an attention of its own", seen, remedy))


def check_stream(x: Tensor, layer: ResidualLayer) -> None:
    """Raise unless x is (B, L, dim), in a type that the layer reads."""
    check_rows("x", x, layer.dim, first_map(layer.attention))


def entered(rows: Rows, x: Tensor) -> Tensor:
    """x (B, L, dim) with the real rows first and padding 0, so that nothing in it can reach a gradient."""
    return x if rows.lengths is None else rows.unpacked(rows.packed(rows.front(x)))


def context_of(
    layers: Iterable[ResidualLayer], rows: Rows, x: Tensor, starts: Sequence[int] | None, aux: AuxRequest | None
) -> Context:
    """What this pass says to its layers, with the rotary angles where all that turn have the same rotary."""
    found = [layer.attention.rotary for layer in layers if isinstance(layer.attention, MultiheadAttention)]
    rotaries = {id(rotary): rotary for rotary in found if rotary is not None}
    rotation = None
    if len(rotaries) == 1:
        (rotary,) = rotaries.values()
        rotation = rotary.angles(rows.positions(starts, x.device), x.dtype)
    return Context(lengths=rows.lengths, rotation=rotation, aux=aux)


def placed(aux: AuxOutput | None, asked: AuxRequest, rows: Rows, keys: Rows) -> AuxOutput:
    """What a layer told of ordered rows and keys, in the order in which both came in."""
    assert aux is not None  # since it was asked for
    return rows.back_aux(aux, keys, asked.weights)
