"""BERT in one file that reads top to bottom: config, embeddings, layer, stack, the head that fills in masked words.

Shapes: B batch, L tokens, H heads, D width of a head, E = H·D width of the model. Padding leaves at the door: layers
see each sequence's real tokens first, so a row gives what it gives alone, wherever it is padded.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from qkv.errors import MaskError, ShapeError, ValueOutOfRange, message
from qkv.models.files.checkpoint import PretrainedModel
from qkv.models.files.config_file import Fields
from qkv.models.output import IGNORED, ModelOutput, token_loss
from qkv.models.published import bert as files
from qkv.models.sizes import check_dropouts, check_multiple, check_positive, check_sizes
from qkv.nn.context import Context
from qkv.nn.feed_forward import FeedForward
from qkv.nn.ids import check_ids
from qkv.nn.multihead_attention import MultiheadAttention
from qkv.nn.rows import Rows, check_aux
from qkv.patterns.pattern import Pattern
from qkv.types import AuxOutput, AuxRequest


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
    feedforward_dropout: float = 0.0  # after the activation, which published BERTs do not drop
    residual_dropout: float = 0.0  # on what attention and feed-forward add to the stream
    spread: float = 0.02  # of the first weights
    pooling: bool = True  # whether the first token goes through one more layer
    pad_id: int = 0
    architecture: str = "BertModel"  # what files call it; each model sets its own

    def __post_init__(self) -> None:
        check_sizes(self, "vocabulary", "positions", "token_types", "layers", "heads", "width", "feedforward")
        check_multiple(self, "width", "heads", "each head is width / heads wide")
        check_positive(self, "norm_epsilon", "spread")
        check_dropouts(self, "embedding_dropout", "attention_dropout", "feedforward_dropout", "residual_dropout")

    @classmethod
    def from_fields(cls, fields: Fields) -> BertConfig:
        """The sizes in a published config.json. Raises CheckpointError when it describes another model."""
        return cls(**files.read_fields(fields))

    def to_fields(self) -> dict[str, Any]:
        """What config.json says of it; the two dropouts that transformers does not tell apart stand under own names."""
        return files.write_fields(self)


class BertOutput(NamedTuple):
    """What one pass gives; `aux` holds one AuxOutput a layer when it was asked for."""

    hidden: Tensor  # (B, L, E), 0 where there is padding
    pooled: Tensor | None  # (B, E), the first token through one tanh layer; None where config.pooling is False
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


class Layer(nn.Module):
    """Attention moves information between tokens, the feed-forward works on each token alone; the norms come after."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.attention = MultiheadAttention(
            config.width, config.heads, attention_dropout=config.attention_dropout
        )  # softmax(q kᵀ / sqrt(D)) v in H heads
        self.attention_norm = nn.LayerNorm(config.width, eps=config.norm_epsilon)
        self.feedforward = FeedForward(
            config.width, config.feedforward, activation="gelu", feedforward_dropout=config.feedforward_dropout
        )
        self.feedforward_norm = nn.LayerNorm(config.width, eps=config.norm_epsilon)
        self.dropout = nn.Dropout(config.residual_dropout)

    def forward(self, x: Tensor, context: Context) -> tuple[Tensor, AuxOutput | None]:
        update, aux = self.attention.attend(x, context)
        x = self.attention_norm(x + self.dropout(update))
        return self.feedforward_norm(x + self.dropout(self.feedforward(x))), aux


class Bert(PretrainedModel):
    """The BERT encoder (Devlin et al. 2018, arXiv:1810.04805), with any attention pattern in place of the full one.

    First values: normal with spread 0.02 for all weights, 0 for biases, norms the identity, as BERT was trained from.
    """

    Config = BertConfig

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.config = replace(config, architecture="BertModel")
        self.embeddings = Embeddings(config)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.layers))
        self.pooler = nn.Linear(config.width, config.width) if config.pooling else None
        _draw_weights(self, config.spread)

    def forward(
        self,
        ids: Tensor,
        attention_mask: Tensor | None = None,
        *,
        token_types: Tensor | None = None,
        pattern: Pattern | None = None,
        return_aux: AuxRequest | None = None,
        backend: str | None = None,
    ) -> BertOutput:
        """Run the encoder over token numbers.

        ids: integers (B, L), L up to `config.positions`. attention_mask: (B, L), keeps where 1; None keeps all.
        token_types: integers (B, L), which sentence of a pair; None is the first. pattern: who may see whom, beside
        the mask, by the places of the tokens that are kept. return_aux: what to return of every layer's attention, for
        example `AuxRequest(weights=True)`. backend: of the attention, by default "auto".
        Raises ShapeError, DTypeError, MaskError and ValueOutOfRange before any work.
        """
        x, rows = self._enter(ids, attention_mask, token_types)
        check_aux(return_aux, rows)
        context = Context(lengths=rows.lengths, pattern=pattern, aux=return_aux, backend=backend)
        seen = []
        for layer in self.layers:
            x, aux = layer(x, context)
            if aux is not None and return_aux is not None:
                seen.append(rows.back_aux(aux, chosen=return_aux.weights))
        pooled = None if self.pooler is None else torch.tanh(self.pooler(x[:, 0]))
        return BertOutput(rows.back(x), pooled, None if return_aux is None else tuple(seen))

    def qkv(self, ids: Tensor, attention_mask: Tensor | None = None, *, layer: int) -> tuple[Tensor, Tensor, Tensor]:
        """The query, key and value that one layer's attention works on, (B, H, L, D) each; layers count from 0."""
        if not 0 <= layer < self.config.layers:
            holds = f"`layer` must lie in 0 .. {self.config.layers - 1}"
            raise ValueOutOfRange(message(holds, f"got {layer}", "layers count from 0"))
        x, rows = self._enter(ids, attention_mask, None)
        for before in self.layers[:layer]:
            x, _ = before(x, Context(lengths=rows.lengths))
        chosen = self.layers[layer]
        assert isinstance(chosen, Layer)
        made = chosen.attention.projected(x, x, x)
        query, key, value = (rows.back(part).transpose(1, 2) for part in made)
        return query, key, value

    def embed(self, ids: Tensor, attention_mask: Tensor) -> Tensor:
        """One vector of length 1 for each row, (B, E): the mean of the kept tokens' hidden states, normalised."""
        check_ids("ids", ids, count=self.config.vocabulary, longest=self.config.positions)
        lengths = Rows.of(attention_mask, *ids.shape).lengths
        if lengths is not None and 0 in lengths:
            holds = "`attention_mask` must keep a token in every row"
            raise MaskError(message(holds, f"row {lengths.index(0)} keeps none", "drop that row from the batch"))
        return F.normalize(mean_pool(self(ids, attention_mask).hidden, attention_mask), dim=-1)

    def _enter(self, ids: Tensor, attention_mask: Tensor | None, token_types: Tensor | None) -> tuple[Tensor, Rows]:
        """Check the input; the embedded tokens, real ones first, and where they came from."""
        check_ids("ids", ids, count=self.config.vocabulary, longest=self.config.positions)
        types = torch.zeros_like(ids) if token_types is None else token_types
        check_ids("token_types", types, count=self.config.token_types)
        if types.shape != ids.shape:
            seen = f"got {tuple(types.shape)} and {tuple(ids.shape)}"
            raise ShapeError(message("`token_types` must have the shape of `ids`", seen, "give one number a token"))
        rows = Rows.of(attention_mask, *ids.shape)
        return self.embeddings(rows.front(ids), rows.front(types)), rows

    @staticmethod
    def config_for(config: BertConfig, names: frozenset[str]) -> BertConfig:
        return replace(config, pooling=any(name.endswith("pooler.dense.weight") for name in names))

    @staticmethod
    def own_names(config: BertConfig, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return files.own_names(config, tensors)

    @staticmethod
    def file_names(config: BertConfig, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return files.file_names(tensors)


class MaskedWordHead(nn.Module):
    """From a hidden state to a score for each word, by how near it comes to the word's own embedding."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.dense = nn.Linear(config.width, config.width)
        self.LayerNorm = nn.LayerNorm(config.width, eps=config.norm_epsilon)
        self.bias = nn.Parameter(torch.zeros(config.vocabulary))

    def forward(self, hidden: Tensor, words: Tensor) -> Tensor:
        """hidden (B, L, E) and the embeddings of all words (vocabulary, E): (B, L, vocabulary)."""
        return F.linear(self.LayerNorm(F.gelu(self.dense(hidden))), words, self.bias)


class BertForMaskedLM(PretrainedModel):
    """BERT as it was trained: it says what stands at each place, also where the word is hidden behind [MASK].

    Devlin et al. 2018, section 3.1, task 1. The head's last matrix is the word embeddings'.
    """

    Config = BertConfig

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.config = replace(config, architecture="BertForMaskedLM", pooling=False)
        self.bert = Bert(self.config)
        self.head = MaskedWordHead(config)
        _draw_weights(self.head, config.spread)

    def forward(
        self,
        ids: Tensor,
        attention_mask: Tensor | None = None,
        *,
        labels: Tensor | None = None,
        token_types: Tensor | None = None,
        pattern: Pattern | None = None,
        return_aux: AuxRequest | None = None,
        backend: str | None = None,
    ) -> ModelOutput:
        """Scores of all words at every place, logits (B, L, vocabulary).

        labels: integers (B, L), the word that stands there, -100 where it does not count, as for all that was not
        masked; labels at padding do not count. The other arguments are those of `Bert`.
        """
        encoded = self.bert(
            ids,
            attention_mask,
            token_types=token_types,
            pattern=pattern,
            return_aux=return_aux,
            backend=backend,
        )
        logits = self.head(encoded.hidden, self.bert.embeddings.word_embeddings.weight)
        loss = None
        if labels is not None:
            counted = labels if attention_mask is None else labels.masked_fill(attention_mask == 0, IGNORED)
            loss = token_loss(logits, counted)
        return ModelOutput(encoded.hidden, logits, loss, encoded.aux)

    @staticmethod
    def config_for(config: BertConfig, names: frozenset[str]) -> BertConfig:
        return replace(config, pooling=False)

    @staticmethod
    def own_names(config: BertConfig, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return files.own_masked_names(config, tensors)

    @staticmethod
    def file_names(config: BertConfig, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return files.file_names(tensors)


def mean_pool(hidden: Tensor, keep: Tensor) -> Tensor:
    """The mean over the kept tokens, hidden (B, L, E) and keep (B, L) to (B, E)."""
    kept = keep[..., None].to(hidden.dtype)  # (B, L, 1)
    return (hidden * kept).sum(1) / kept.sum(1)


@torch.no_grad()
def _draw_weights(model: nn.Module, spread: float) -> None:
    """Normal weights and zero biases, as BERT was trained from; norms start as the identity."""
    for module in model.modules():
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=spread)
        if isinstance(module, nn.Linear):
            nn.init.zeros_(module.bias)
