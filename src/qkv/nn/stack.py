"""What encoders and decoders share: how layers are made and held, and what is done at the doors of a pass."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar, cast

from torch import Tensor, nn

from qkv.cache.arguments import read_size
from qkv.errors import DTypeError, ShapeError, UnsupportedError, ValueOutOfRange, message
from qkv.nn.context import Context
from qkv.nn.mixer import Choice
from qkv.nn.multihead_attention import MultiheadAttention
from qkv.nn.residual import LayerOptions, ResidualLayer, stream_norm, take_torch_names
from qkv.nn.rows import Rows
from qkv.shapes import describe
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
        wanted = options.get("norm_first", True) if final_norm is None else final_norm
        kind, eps = options.get("norm", "layer"), options.get("norm_eps")
        self.final_norm = stream_norm(kind, dim, eps, bias=options.get("bias", True)) if wanted else None
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
    if isinstance(attention, nn.Module) and layers > 1:
        seen = f"got one {type(attention).__name__} for {layers}"
        remedy = "give a function of (dim, heads), such as its class, or a list of modules"
        raise ValueOutOfRange(message("each layer must have an attention of its own", seen, remedy))
    return [cast("Choice", attention)] * layers


def check_stream(name: str, x: Tensor, dim: int) -> None:
    """Raise where x is not (B, L, dim)."""
    if not isinstance(x, Tensor):
        seen = f"got {type(x).__name__}"
        raise DTypeError(message(f"`{name}` must be a tensor (B, L, {dim})", seen, "pass embedded tokens"))
    if x.ndim != 3 or x.shape[-1] != dim:
        holds = f"`{name}` must have the shape (B, L, {dim})"
        raise ShapeError(message(holds, f"got {describe(x)}", "the batch comes first, the width last"))


def check_aux(request: AuxRequest | None, *rows: Rows) -> None:
    """Raise where some query rows were asked for by number, and padding before real rows would number them anew."""
    if request is None or all(one.keep is None for one in rows) or request.weights in (True, False, "mean"):
        return
    raise UnsupportedError(
        message(
            "weights of chosen rows need sequences that are padded on the right",
            f"got weights={request.weights!r} and real tokens after padding",
            'ask for weights=True or "mean", and choose rows of what comes back',
        )
    )


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


def placed(aux: AuxOutput | None, rows: Rows, keys: Rows) -> AuxOutput:
    """What a layer told of ordered rows and keys, in the order in which both came in."""
    assert aux is not None  # since it was asked for
    return aux if rows.keep is None and keys.keep is None else rows.back_aux(aux, keys)
