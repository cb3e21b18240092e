"""What encoder and decoder layers share: sublayers that each add to a stream, with a norm before or after."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, MutableMapping
from typing import Any, ClassVar, Protocol, TypedDict, cast

from torch import Tensor, nn

from qkv.cache.arguments import read_size
from qkv.nn.dropping import read_share
from qkv.nn.feed_forward import FeedForward
from qkv.nn.mixer import Choice, make_mixer
from qkv.nn.norm import NormKind, make_norm
from qkv.patterns.arguments import one_flag


class LayerOptions(TypedDict, total=False):
    """What a layer may be told by name; `ResidualLayer` says what each means and its default."""

    norm: NormKind
    norm_first: bool
    norm_eps: float | None
    activation: str
    bias: bool
    attention_dropout: float
    feedforward_dropout: float
    residual_dropout: float
    backend: str
    softmax_options: Mapping[str, Any] | None
    linear_options: Mapping[str, Any] | None


class ResidualLayer(nn.Module):
    """Attention moves information between tokens, the feed-forward works on each token alone; each adds to the stream.

        norm first:  x = x + drop(attention(norm(x)));  x = x + drop(feed_forward(norm(x)))
        norm last:   x = norm(x + drop(attention(x)));  x = norm(x + drop(feed_forward(x)))

    dim: the width of the stream. heads: H. hidden: inside the feed-forward, by default 4 · dim.
    attention: a pattern, its text, the name of a linear variant, or what makes a module: `qkv.nn.mixer.make_mixer`.
    norm: "layer" or "rms". norm_first: as above; the paper's order is last, today's is first. norm_eps: by default 1e-5
    for "layer", 1e-6 for "rms". activation: of `FeedForward`. bias: of the projections of softmax attention, of the
    feed-forward and of layer norms.
    attention_dropout: of attention weights, which no linear variant has. feedforward_dropout: of what the activation
    gives. residual_dropout: of what a sublayer adds to the stream. Each acts in training only.
    backend: of attention; where there are both kinds and only one knows the name, of that one. softmax_options,
    linear_options: what else the one kind of attention or the other is told, and in place of the above: `{"backend":
    "blockwise"}`. What a function or a module brings as `attention` is told none of this: what is said and is not so
    there is refused.

    First values: those of each block, as it documents them; norms begin at weight 1 and bias 0.

    Source: Vaswani et al., "Attention Is All You Need" (2017), section 3; the norm first: Xiong et al., "On Layer
    Normalization in the Transformer Architecture" (2020), whose first values are Glorot's too.
    """

    causal: ClassVar[bool]  # whether a token of this kind of layer reads only what came before it
    TORCH: ClassVar[Mapping[str, str]]  # how torch's layer of this kind calls the parts, and how this one does

    def __init__(
        self,
        dim: int,
        heads: int,
        hidden: int | None = None,
        *,
        attention: Choice = None,
        norm: NormKind = "layer",
        norm_first: bool = True,
        norm_eps: float | None = None,
        activation: str = "gelu",
        bias: bool = True,
        attention_dropout: float = 0.0,
        feedforward_dropout: float = 0.0,
        residual_dropout: float = 0.0,
        backend: str = "auto",
        softmax_options: Mapping[str, Any] | None = None,
        linear_options: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__()
        self.dim = read_size("dim", dim, 1)
        self.norm_first = one_flag("norm_first", norm_first)
        bias, share = one_flag("bias", bias), read_share("residual_dropout", residual_dropout)
        self.attention = make_mixer(
            attention,
            dim,
            heads,
            causal=self.causal,
            attention_dropout=attention_dropout,
            bias=bias,
            backend=backend,
            softmax_options=softmax_options,
            linear_options=linear_options,
        )
        self.attention_norm = make_norm(norm, dim, norm_eps, bias=bias)
        self.feed_forward = FeedForward(
            dim,
            4 * dim if hidden is None else hidden,
            activation=activation,
            feedforward_dropout=feedforward_dropout,
            bias=bias,
        )
        self.feed_forward_norm = make_norm(norm, dim, norm_eps, bias=bias)
        self.residual_dropout = nn.Dropout(share)
        self.register_load_state_dict_pre_hook(take_torch_names)  # type: ignore[no-untyped-call]

    def enter(self, norm: nn.Module, x: Tensor) -> Tensor:
        """What a sublayer reads of the stream x (B, L, dim)."""
        read: Tensor = norm(x) if self.norm_first else x
        return read

    def leave(self, norm: nn.Module, x: Tensor, update: Tensor) -> Tensor:
        """The stream x (B, L, dim) after a sublayer has given its update."""
        x = x + self.residual_dropout(update)
        return x if self.norm_first else norm(x)


_SIGNATURE = inspect.signature(ResidualLayer).parameters
DEFAULTS = {name: _SIGNATURE[name].default for name in LayerOptions.__annotations__}


def in_full(options: LayerOptions) -> LayerOptions:
    """What a layer is told, with the defaults of `ResidualLayer` where `options` are silent."""
    return cast("LayerOptions", {**DEFAULTS, **options})


class NamedByTorch(Protocol):
    """A module whose parts have other names in torch."""

    @property
    def TORCH(self) -> Mapping[str, str]: ...  # noqa: N802 - a constant of the class


def take_torch_names(module: NamedByTorch, tensors: MutableMapping[str, Tensor], prefix: str, *_: object) -> None:
    """Before a load: the parts of `module` that `tensors` calls as torch does, by its own names."""
    for theirs, ours in module.TORCH.items():
        for name in [name for name in tensors if name.startswith(f"{prefix}{theirs}.")]:
            tensors[f"{prefix}{ours}{name.removeprefix(prefix + theirs)}"] = tensors.pop(name)
