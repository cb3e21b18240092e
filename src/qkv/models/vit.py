"""The vision transformer in one file that reads top to bottom: config, patches, layer, stack, and the head.

    x ← x + attention(norm(x)),  x ← x + feed-forward(norm(x))

over the patches of an image and one class token before them. Attention is full, or local on the grid of patches: the
neighbourhood around each patch, or windows that every second layer shifts by half, as Swin does. The class token sees
all and is seen by all.

Shapes: B batch, C channels, h by w patches, L = 1 + h·w tokens, H heads, D width of a head, E width of the model.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from qkv.errors import DTypeError, ShapeError, ValueOutOfRange, message, unknown_name
from qkv.models.files.checkpoint import PretrainedModel
from qkv.models.files.config_file import Fields
from qkv.models.output import ModelOutput, token_loss
from qkv.models.patch_attention import Grid, PatchAttention, neighbours, windows
from qkv.models.published import vit as files
from qkv.models.sizes import check_dropouts, check_multiple, check_positive, check_sizes
from qkv.nn.context import Context
from qkv.nn.feed_forward import FeedForward
from qkv.patterns.pattern import Pattern
from qkv.types import AuxOutput, AuxRequest

Reach = Literal["full", "neighborhood", "windows"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ViTConfig:
    """The sizes of a vision transformer, by default of ViT-Base with patches of 16.

    Raises ValueOutOfRange or UnknownName for those that cannot be.
    """

    image: Grid = (224, 224)  # height and width in pixels
    patch: Grid = (16, 16)
    channels: int = 3  # C
    layers: int = 12
    heads: int = 12  # H
    width: int = 768  # E
    feedforward: int = 3072
    norm_epsilon: float = 1e-12
    projection_bias: bool = True  # of queries, keys and values
    attention: Reach = "full"
    kernel: int = 7  # a neighbourhood is kernel by kernel patches
    window: int = 7  # a window is window by window patches, and must divide the grid
    embedding_dropout: float = 0.0
    attention_dropout: float = 0.0  # on the attention weights
    feedforward_dropout: float = 0.0  # after the activation
    residual_dropout: float = 0.0  # on what attention and feed-forward add to the stream
    spread: float = 0.02  # of the first weights
    pooling: bool = True  # whether the class token goes through one more layer
    classes: tuple[str, ...] = ("LABEL_0", "LABEL_1")  # their names, where there is a head
    architecture: str = "ViTModel"  # what files call it; each model sets its own

    def __post_init__(self) -> None:
        check_sizes(self, "channels", "layers", "heads", "width", "feedforward", "kernel", "window")
        check_multiple(self, "width", "heads", "each head is width / heads wide")
        check_positive(self, "norm_epsilon", "spread")
        check_dropouts(self, "embedding_dropout", "attention_dropout", "feedforward_dropout", "residual_dropout")
        if self.attention not in files.REACHES:
            raise unknown_name("attention", self.attention, files.REACHES)
        for name in ("image", "patch"):
            if len(getattr(self, name)) != 2 or min(getattr(self, name)) < 1:
                holds = f"`{name}` must be a height and a width of at least 1"
                raise ValueOutOfRange(message(holds, f"got {getattr(self, name)}", "give the sizes used in training"))
        self.reach(self.grid(*self.image), 0)

    def grid(self, height: int, width: int) -> Grid:
        """How many patches an image has, down and across."""
        if height % self.patch[0] or width % self.patch[1]:
            holds = f"an image must be whole patches of {self.patch[0]} by {self.patch[1]}"
            raise ShapeError(message(holds, f"got {height} by {width}", "crop, pad or resize it"))
        return height // self.patch[0], width // self.patch[1]

    def reach(self, grid: Grid, layer: int) -> Pattern | None:
        """Which patches a patch sees in a layer; None: all of them. A window that fills the grid is never shifted."""
        if self.attention == "full":
            return None
        if self.attention == "neighborhood":
            return neighbours(grid, self.kernel)
        shifted = layer % 2 and min(grid) > self.window
        return windows(grid, self.window, self.window // 2 if shifted else 0)

    @classmethod
    def from_fields(cls, fields: Fields) -> ViTConfig:
        """The sizes in a published config.json. Raises CheckpointError when it describes another model."""
        return cls(**files.read_fields(fields))

    def to_fields(self) -> dict[str, Any]:
        """What config.json says of it: transformers' ViT, or for local attention a model that only qkv has."""
        return files.write_fields(self)


class ViTOutput(NamedTuple):
    """What one pass gives; `aux` holds one AuxOutput a layer when it was asked for."""

    hidden: Tensor  # (B, L, E) after the last norm, the class token first, then the patches row by row
    pooled: Tensor | None  # (B, E), the class token through one tanh layer; None where config.pooling is False
    aux: tuple[AuxOutput, ...] | None


class Embeddings(nn.Module):
    """Each patch through one linear map, the class token before them, and where each stands."""

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        self.grid = config.grid(*config.image)
        self.projection = nn.Conv2d(config.channels, config.width, config.patch, stride=config.patch)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, config.width))
        self.position_embeddings = nn.Parameter(torch.zeros(1, 1 + self.grid[0] * self.grid[1], config.width))
        self.dropout = nn.Dropout(config.embedding_dropout)

    def forward(self, pixels: Tensor) -> Tensor:
        patches = self.projection(pixels)  # (B, E, h, w)
        positions = self._positions((patches.shape[2], patches.shape[3]))
        token = self.cls_token.expand(len(pixels), -1, -1)
        embedded: Tensor = self.dropout(torch.cat([token, patches.flatten(2).mT], dim=1) + positions)
        return embedded

    def _positions(self, grid: Grid) -> Tensor:
        """Those learned, (1, L, E); for another grid those of the patches between the learned ones, bicubic."""
        if grid == self.grid:
            return self.position_embeddings
        learned = self.position_embeddings[:, 1:].mT.unflatten(2, self.grid)
        between = F.interpolate(learned, size=grid, mode="bicubic", align_corners=False)
        return torch.cat([self.position_embeddings[:, :1], between.flatten(2).mT], dim=1)


class Layer(nn.Module):
    """Attention moves information between patches, the feed-forward works on each alone; the norms come first."""

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(config.width, eps=config.norm_epsilon)
        self.attention = PatchAttention(
            config.width,
            config.heads,
            attention_dropout=config.attention_dropout,
            projection_bias=config.projection_bias,
            output_bias=True,
        )
        self.feedforward_norm = nn.LayerNorm(config.width, eps=config.norm_epsilon)
        self.feedforward = FeedForward(
            config.width, config.feedforward, activation="gelu", feedforward_dropout=config.feedforward_dropout
        )
        self.dropout = nn.Dropout(config.residual_dropout)

    def forward(self, x: Tensor, reach: Pattern | None, context: Context) -> tuple[Tensor, AuxOutput | None]:
        update, aux = self.attention.over(self.attention_norm(x), reach, context)
        x = x + self.dropout(update)
        return x + self.dropout(self.feedforward(self.feedforward_norm(x))), aux


class ViT(PretrainedModel):
    """The vision transformer (Dosovitskiy et al. 2020, arXiv:2010.11929), with local attention as an option.

    Neighbourhoods: Hassani et al. 2022, arXiv:2204.07143. Windows: Liu et al. 2021, arXiv:2103.14030; none are merged
    here, so that the grid stays as it is from layer to layer.

    First values: normal, cut off at two spreads, of spread 0.02 for matrices, the class token and the positions, as the
    published configs say, since the paper names none; biases 0, norms the identity.
    """

    Config = ViTConfig

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        self.config = replace(config, architecture="ViTModel")
        self.embeddings = Embeddings(config)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.layers))
        self.final_norm = nn.LayerNorm(config.width, eps=config.norm_epsilon)
        self.pooler = nn.Linear(config.width, config.width) if config.pooling else None
        _draw_weights(self, config.spread)

    def forward(
        self,
        pixels: Tensor,
        *,
        interpolate: bool = False,
        return_aux: AuxRequest | None = None,
        backend: str | None = None,
    ) -> ViTOutput:
        """Run the encoder over images.

        pixels: (B, C, height, width), of the weights' type and `config.image` in size. interpolate: take images of
        another size, and positions between the learned ones for them. return_aux: what to return of every layer's
        attention, rows and keys in the order of the tokens. backend: of the attention, by default "auto".
        Raises ShapeError, DTypeError and ValueOutOfRange before any work.
        """
        grid = self._grid(pixels, interpolate)
        reaches = [self.config.reach(grid, n) for n in range(self.config.layers)]
        context = Context(aux=return_aux, backend=backend)
        x = self.embeddings(pixels)
        seen = []
        for layer, reach in zip(self.layers, reaches, strict=True):
            x, aux = layer(x, reach, context)
            seen.append(aux)
        hidden = self.final_norm(x)
        pooled = None if self.pooler is None else torch.tanh(self.pooler(hidden[:, 0]))
        return ViTOutput(hidden, pooled, None if return_aux is None else tuple(seen))

    def _grid(self, pixels: Tensor, interpolate: bool) -> Grid:
        """Check the images; how many patches each has, down and across."""
        if not isinstance(pixels, Tensor) or not pixels.is_floating_point():
            seen = f"got {pixels.dtype}" if isinstance(pixels, Tensor) else f"got {type(pixels).__name__}"
            raise DTypeError(message("`pixels` must be a floating-point tensor", seen, "scale the image to floats"))
        if pixels.ndim != 4 or pixels.shape[1] != self.config.channels:
            holds = f"`pixels` must be (B, C, height, width) with C = {self.config.channels}"
            raise ShapeError(message(holds, f"got {tuple(pixels.shape)}", "add the batch axis, or reorder the axes"))
        height, width = pixels.shape[2:]
        if (height, width) != tuple(self.config.image) and not interpolate:
            holds = f"`pixels` must be images of {self.config.image[0]} by {self.config.image[1]}"
            raise ShapeError(message(holds, f"got {height} by {width}", "resize them, or say interpolate=True"))
        return self.config.grid(height, width)

    @staticmethod
    def config_for(config: ViTConfig, names: frozenset[str]) -> ViTConfig:
        return replace(config, pooling=any(name.endswith("pooler.dense.weight") for name in names))

    @staticmethod
    def own_names(config: ViTConfig, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return files.own_names(config, tensors)

    @staticmethod
    def file_names(config: ViTConfig, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return files.file_names(tensors)


class ViTForImageClassification(PretrainedModel):
    """The vision transformer with a score for each class, read from the class token."""

    Config = ViTConfig

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        self.config = replace(config, architecture="ViTForImageClassification", pooling=False)
        self.vit = ViT(self.config)
        self.classifier = nn.Linear(config.width, len(config.classes))
        _draw_weights(self.classifier, config.spread)

    def forward(
        self,
        pixels: Tensor,
        *,
        labels: Tensor | None = None,
        interpolate: bool = False,
        return_aux: AuxRequest | None = None,
        backend: str | None = None,
    ) -> ModelOutput:
        """Scores of all classes, logits (B, classes).

        labels: integers (B,), the number of each image's class, -100 where it does not count. The other arguments are
        those of `ViT`.
        """
        if labels is not None and len(self.config.classes) < 2:
            holds = "a model must have at least two classes for `labels` to choose from"
            raise ValueOutOfRange(message(holds, f"got {len(self.config.classes)}", "take your loss from the logits"))
        encoded = self.vit(pixels, interpolate=interpolate, return_aux=return_aux, backend=backend)
        logits = self.classifier(encoded.hidden[:, 0])
        loss = None if labels is None else token_loss(logits, labels)
        return ModelOutput(encoded.hidden, logits, loss, encoded.aux)

    @staticmethod
    def config_for(config: ViTConfig, names: frozenset[str]) -> ViTConfig:
        return replace(config, pooling=False)

    @staticmethod
    def own_names(config: ViTConfig, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return files.own_classifier_names(config, tensors)

    @staticmethod
    def file_names(config: ViTConfig, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return files.file_names(tensors)


@torch.no_grad()
def _draw_weights(model: nn.Module, spread: float) -> None:
    for module in model.modules():
        if isinstance(module, nn.Linear | nn.Conv2d):
            nn.init.trunc_normal_(module.weight, std=spread, a=-2 * spread, b=2 * spread)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
        if isinstance(module, Embeddings):
            for table in (module.cls_token, module.position_embeddings):
                nn.init.trunc_normal_(table, std=spread, a=-2 * spread, b=2 * spread)
