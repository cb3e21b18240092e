"""BERT in one file that reads top to bottom: config, embeddings, attention, feed-forward, stack, reading a checkpoint.

Modules are named as in the published files, so `encoder.layer.0.attention.self.query.weight` loads by its own name.
Shapes: B batch, L tokens, H heads, D width of a head, E = H·D width of the model. Knows no tokenizers, no packages.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from qkv.attention import attention
from qkv.errors import CheckpointError, DTypeError, MaskError, ShapeError, ValueOutOfRange, message
from qkv.patterns import key_padding
from qkv.patterns.pattern import Pattern
from qkv.tensorfile import read_tensors
from qkv.types import AuxOutput, AuxRequest

Number = TypeVar("Number", int, float)


@dataclass(frozen=True, kw_only=True, slots=True)
class BertConfig:
    """The sizes of a BERT encoder, by default of MiniLM-L6-H384. Raises ValueOutOfRange for those that cannot be."""

    vocabulary: int = 30522
    positions: int = 512  # the longest input
    token_types: int = 2  # first and second sentence of a pair
    layers: int = 6
    heads: int = 12  # H
    width: int = 384  # E
    feedforward: int = 1536
    norm_epsilon: float = 1e-12
    embedding_dropout: float = 0.0
    attention_dropout: float = 0.0  # on the attention weights
    feedforward_dropout: float = 0.0  # on what attention and feed-forward add to the stream

    def __post_init__(self) -> None:
        for name in ("vocabulary", "positions", "token_types", "layers", "heads", "width", "feedforward"):
            if getattr(self, name) < 1:
                raise _out_of_range(name, "be at least 1", getattr(self, name), "give the size used in training")
        if self.width % self.heads:
            remedy = "each head is width / heads wide"
            raise _out_of_range("width", f"be a multiple of `heads` = {self.heads}", self.width, remedy)
        if not (math.isfinite(self.norm_epsilon) and self.norm_epsilon > 0):
            raise _out_of_range("norm_epsilon", "be a positive number", self.norm_epsilon, "BERT uses 1e-12")
        for name in ("embedding_dropout", "attention_dropout", "feedforward_dropout"):
            if not 0 <= getattr(self, name) < 1:
                raise _out_of_range(name, "lie in [0, 1)", getattr(self, name), "0 switches it off")


class BertOutput(NamedTuple):
    """What one pass gives; `aux` holds one AuxOutput a layer when it was asked for."""

    hidden: Tensor  # (B, L, E)
    pooled: Tensor  # (B, E), the first token through one tanh layer
    aux: tuple[AuxOutput, ...] | None


class Embeddings(nn.Module):
    """The sum of what the token is, where it stands and which sentence it belongs to, normalised."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.word_embeddings = nn.Embedding(config.vocabulary, config.width)
        self.position_embeddings = nn.Embedding(config.positions, config.width)
        self.token_type_embeddings = nn.Embedding(config.token_types, config.width)
        self.LayerNorm = nn.LayerNorm(config.width, eps=config.norm_epsilon)
        self.dropout = nn.Dropout(config.embedding_dropout)

    def forward(self, ids: Tensor, token_types: Tensor) -> Tensor:
        positions = torch.arange(ids.shape[1], device=ids.device)
        x = self.word_embeddings(ids) + self.position_embeddings(positions) + self.token_type_embeddings(token_types)
        normed: Tensor = self.dropout(self.LayerNorm(x))  # (B, L, E)
        return normed


class SelfAttention(nn.Module):
    """Every token asks, every token answers: softmax(q kᵀ / sqrt(D)) v in H heads."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.dropout_p = config.attention_dropout
        self.query = nn.Linear(config.width, config.width)
        self.key = nn.Linear(config.width, config.width)
        self.value = nn.Linear(config.width, config.width)

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Query, key and value of every head, (B, L, H, D) each."""
        split = (*x.shape[:2], self.heads, -1)
        return self.query(x).view(split), self.key(x).view(split), self.value(x).view(split)

    def forward(self, x: Tensor, pattern: Pattern | None, aux: AuxRequest, backend: str) -> tuple[Tensor, AuxOutput]:
        dropout_p = self.dropout_p if self.training else 0.0
        query, key, value = self.project(x)
        heads, seen = attention(
            query, key, value, pattern=pattern, dropout_p=dropout_p, layout="BLHD", backend=backend, return_aux=aux
        )
        return heads.flatten(2), seen  # (B, L, H, D) -> (B, L, E)


class AddAndNorm(nn.Module):
    """A linear map back to the width of the stream, added to it and normalised."""

    def __init__(self, config: BertConfig, width_in: int) -> None:
        super().__init__()
        self.dense = nn.Linear(width_in, config.width)
        self.LayerNorm = nn.LayerNorm(config.width, eps=config.norm_epsilon)
        self.dropout = nn.Dropout(config.feedforward_dropout)

    def forward(self, update: Tensor, stream: Tensor) -> Tensor:
        normed: Tensor = self.LayerNorm(stream + self.dropout(self.dense(update)))
        return normed


class Attention(nn.Module):
    """Self-attention and its way back into the stream."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.self = SelfAttention(config)  # the checkpoint's own name
        self.output = AddAndNorm(config, config.width)

    def forward(self, x: Tensor, pattern: Pattern | None, aux: AuxRequest, backend: str) -> tuple[Tensor, AuxOutput]:
        update, seen = self.self(x, pattern, aux, backend)
        return self.output(update, x), seen


class Intermediate(nn.Module):
    """The wide half of the feed-forward, through the exact GELU."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.dense = nn.Linear(config.width, config.feedforward)

    def forward(self, x: Tensor) -> Tensor:
        return F.gelu(self.dense(x))


class Layer(nn.Module):
    """Attention moves information between tokens, the feed-forward works on each token alone."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.attention = Attention(config)
        self.intermediate = Intermediate(config)
        self.output = AddAndNorm(config, config.feedforward)

    def forward(self, x: Tensor, pattern: Pattern | None, aux: AuxRequest, backend: str) -> tuple[Tensor, AuxOutput]:
        x, seen = self.attention(x, pattern, aux, backend)
        return self.output(self.intermediate(x), x), seen


class Encoder(nn.Module):
    """The layers, one after another."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.layer = nn.ModuleList(Layer(config) for _ in range(config.layers))

    def forward(
        self, x: Tensor, pattern: Pattern | None, aux: AuxRequest, backend: str
    ) -> tuple[Tensor, tuple[AuxOutput, ...]]:
        seen = []
        for layer in self.layer:
            x, of_layer = layer(x, pattern, aux, backend)
            seen.append(of_layer)
        return x, tuple(seen)


class Pooler(nn.Module):
    """The first token through one tanh layer: what BERT's own sentence task reads."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.dense = nn.Linear(config.width, config.width)

    def forward(self, hidden: Tensor) -> Tensor:
        return torch.tanh(self.dense(hidden[:, 0]))


class Bert(nn.Module):
    """The BERT encoder (Devlin et al. 2018, arXiv:1810.04805), with any attention pattern in place of the full one."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.config = config
        self.embeddings = Embeddings(config)
        self.encoder = Encoder(config)
        self.pooler = Pooler(config)
        self.apply(_draw_weights)

    def forward(
        self,
        ids: Tensor,
        attention_mask: Tensor | None = None,
        *,
        token_types: Tensor | None = None,
        pattern: Pattern | None = None,
        return_aux: AuxRequest | None = None,
        backend: str = "auto",
    ) -> BertOutput:
        """Run the encoder over token numbers.

        ids: integers (B, L), L up to `config.positions`. attention_mask: (B, L), keeps where 1; None keeps all.
        token_types: integers (B, L), which sentence of a pair; None is the first. pattern: who may see whom, beside
        the mask. return_aux: what to return of every layer's attention, for example `AuxRequest(weights=True)`.
        Raises ShapeError, DTypeError, MaskError and ValueOutOfRange before any work.
        """
        x, visible = self._enter(ids, attention_mask, token_types, pattern)
        hidden, aux = self.encoder(x, visible, return_aux or AuxRequest(), backend)
        return BertOutput(hidden, self.pooler(hidden), aux if return_aux is not None else None)

    def qkv(self, ids: Tensor, attention_mask: Tensor | None = None, *, layer: int) -> tuple[Tensor, Tensor, Tensor]:
        """The query, key and value that one layer's attention works on, (B, H, L, D) each; layers count from 0."""
        if not 0 <= layer < self.config.layers:
            raise _out_of_range("layer", f"lie in 0 .. {self.config.layers - 1}", layer, "layers count from 0")
        x, visible = self._enter(ids, attention_mask, None, None)
        for before in self.encoder.layer[:layer]:
            x, _ = before(x, visible, AuxRequest(), "auto")
        chosen = self.encoder.layer[layer]
        assert isinstance(chosen, Layer)
        query, key, value = chosen.attention.self.project(x)
        return query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)

    def embed(self, ids: Tensor, attention_mask: Tensor) -> Tensor:
        """One vector of length 1 for each row, (B, E): the mean of the kept tokens' hidden states, normalised."""
        _check_ids("ids", ids, self.config.vocabulary, self.config.positions)
        keep = _keep(attention_mask, ids)
        if not bool(keep.any(1).all()):
            row = int(keep.any(1).logical_not().nonzero()[0, 0])
            holds = "`attention_mask` must keep a token in every row"
            raise MaskError(message(holds, f"row {row} keeps none", "drop that row from the batch"))
        return F.normalize(mean_pool(self(ids, keep).hidden, keep), dim=-1)

    def _enter(
        self, ids: Tensor, attention_mask: Tensor | None, token_types: Tensor | None, pattern: Pattern | None
    ) -> tuple[Tensor, Pattern | None]:
        """Check the input; the embedded tokens, and the one pattern of the padding and the caller's pattern."""
        _check_ids("ids", ids, self.config.vocabulary, self.config.positions)
        types = torch.zeros_like(ids) if token_types is None else token_types
        _check_ids("token_types", types, self.config.token_types, self.config.positions)
        _check_same_shape("token_types", types, ids)
        if attention_mask is not None:
            padding = key_padding(keep=_keep(attention_mask, ids))
            pattern = padding if pattern is None else pattern & padding
        return self.embeddings(ids, types), pattern


def mean_pool(hidden: Tensor, keep: Tensor) -> Tensor:
    """The mean over the kept tokens, hidden (B, L, E) and keep (B, L) to (B, E)."""
    kept = keep[..., None].to(hidden.dtype)  # (B, L, 1)
    return (hidden * kept).sum(1) / kept.sum(1)


def read_config(path: Path) -> BertConfig:
    """The sizes from a published `config.json`. Raises CheckpointError when the file describes another model."""
    try:
        seen = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        holds = f"`{path.name}` must be a readable JSON file"
        raise CheckpointError(message(holds, str(error), "fetch the checkpoint again")) from error
    if not isinstance(seen, dict):
        got = f"got {type(seen).__name__}"
        raise CheckpointError(message(f"`{path.name}` must hold one JSON object", got, "fetch the checkpoint again"))
    for name, wanted in _FIXED_FIELDS.items():
        if seen.get(name, wanted) != wanted:
            holds = f"`{name}` in {path.name} must be {wanted!r}"
            raise CheckpointError(message(holds, f"got {seen[name]!r}", "choose a plain BERT checkpoint"))
    hidden_dropout = _field(path, seen, "hidden_dropout_prob", float)
    return BertConfig(
        vocabulary=_field(path, seen, "vocab_size", int),
        positions=_field(path, seen, "max_position_embeddings", int),
        token_types=_field(path, seen, "type_vocab_size", int),
        layers=_field(path, seen, "num_hidden_layers", int),
        heads=_field(path, seen, "num_attention_heads", int),
        width=_field(path, seen, "hidden_size", int),
        feedforward=_field(path, seen, "intermediate_size", int),
        norm_epsilon=_field(path, seen, "layer_norm_eps", float),
        embedding_dropout=hidden_dropout,
        attention_dropout=_field(path, seen, "attention_probs_dropout_prob", float),
        feedforward_dropout=hidden_dropout,
    )


def load(folder: Path) -> Bert:
    """The model in a folder with `config.json` and `model.safetensors`, ready for use (in eval mode).

    Raises CheckpointError when the two do not fit, naming the tensors that are missing, unknown or of another shape.
    """
    config = read_config(folder / "config.json")
    tensors = read_tensors(folder / "model.safetensors")
    with torch.device("meta"):
        model = Bert(config)
    weights = {name: tensor for name, tensor in tensors.items() if name != _POSITION_NUMBERS}
    check_weights(model, weights)
    model.load_state_dict(weights, assign=True)
    return model.eval()


def check_weights(model: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Refuse weights that do not fit a model, by name: missing, unknown, of another shape, not of one float type."""
    wanted = model.state_dict()
    missing = [name for name in wanted if name not in weights]
    unknown = [name for name in weights if name not in wanted]
    if missing or unknown:
        lists = (("missing", missing), ("unknown", unknown))
        seen = "; ".join(f"{kind}: {_some(names)}" for kind, names in lists if names)
        holds = "the file must hold exactly the model's tensors"
        raise CheckpointError(message(holds, seen, "use the file that belongs to this config"))
    for name, tensor in wanted.items():
        if weights[name].shape != tensor.shape:
            seen = f"got {_shape(weights[name])}"
            holds = f"`{name}` must be {_shape(tensor)} by the config"
            raise CheckpointError(message(holds, seen, "use the file that belongs to this config"))
    types = {tensor.dtype for tensor in weights.values()}
    if len(types) != 1 or not all(dtype.is_floating_point for dtype in types):
        seen = "got " + ", ".join(sorted(map(str, types)))
        raise CheckpointError(message("the weights must have one floating-point type", seen, "convert the file"))


_FIXED_FIELDS = {"model_type": "bert", "hidden_act": "gelu", "position_embedding_type": "absolute"}
_POSITION_NUMBERS = "embeddings.position_ids"  # 0, 1, 2, ...: older files carry it, it is no weight


def _draw_weights(module: nn.Module) -> None:
    """Normal weights of spread 0.02 and zero biases, as BERT was trained from; norms start as the identity."""
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear):
        nn.init.zeros_(module.bias)


def _check_ids(name: str, ids: Tensor, count: int, positions: int) -> None:
    if not isinstance(ids, Tensor) or ids.dtype not in (torch.int64, torch.int32):
        seen = f"got {ids.dtype}" if isinstance(ids, Tensor) else f"got {type(ids).__name__}"
        raise DTypeError(message(f"`{name}` must be an int64 or int32 tensor", seen, "tokenize the text first"))
    if ids.ndim != 2 or ids.shape[1] == 0:
        holds = f"`{name}` must be (B, L) with at least one token"
        raise ShapeError(message(holds, f"got {_shape(ids)}", "add the batch axis"))
    if ids.shape[1] > positions:
        holds = f"`{name}` must be at most {positions} tokens long"
        raise ShapeError(message(holds, f"got L = {ids.shape[1]}", "cut the text into windows"))
    if ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < count:
        seen = f"got {int(ids.min())} .. {int(ids.max())}"
        raise _out_of_range(name, f"lie in 0 .. {count - 1}", seen, "use the tokenizer of this model")


def _check_same_shape(name: str, tensor: Tensor, ids: Tensor) -> None:
    if tensor.shape != ids.shape:
        seen = f"got {_shape(tensor)} and {_shape(ids)}"
        raise ShapeError(message(f"`{name}` must have the shape of `ids`", seen, "give one number a token"))


def _keep(attention_mask: Tensor, ids: Tensor) -> Tensor:
    """The mask as (B, L) bool, keeping where True."""
    if not isinstance(attention_mask, Tensor):
        holds = "`attention_mask` must be a tensor (B, L)"
        raise DTypeError(message(holds, f"got {type(attention_mask).__name__}", "wrap it in torch.tensor"))
    _check_same_shape("attention_mask", attention_mask, ids)
    if attention_mask.dtype == torch.bool:
        return attention_mask
    if not bool(((attention_mask == 0) | (attention_mask == 1)).all()):
        holds = "`attention_mask` must hold 1 for tokens to keep and 0 for padding"
        raise MaskError(message(holds, "got other numbers", "of an additive mask pass `mask == 0`"))
    return attention_mask == 1


def _field(path: Path, seen: Mapping[str, object], name: str, kind: type[Number]) -> Number:
    value = seen.get(name)
    if isinstance(value, bool) or not isinstance(value, int if kind is int else int | float):
        holds = f"`{name}` in {path.name} must be {'an integer' if kind is int else 'a number'}"
        raise CheckpointError(message(holds, f"got {value!r}", "fetch the checkpoint again"))
    return kind(value)


def _out_of_range(name: str, must: str, value: object, remedy: str) -> ValueOutOfRange:
    seen = value if isinstance(value, str) else f"got {value!r}"
    return ValueOutOfRange(message(f"`{name}` must {must}", seen, remedy))


def _shape(tensor: Tensor) -> str:
    return str(tuple(tensor.shape))


def _some(names: list[str]) -> str:
    """The first few names, and how many more there are."""
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
