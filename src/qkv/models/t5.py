"""T5 in one file that reads top to bottom: config, layers, stacks, model. Files: `published/t5.py`.

    encoder:  x ← x + attention(norm(x)),  x ← x + feed-forward(norm(x))
    decoder:  y ← y + attention(norm(y)),  y ← y + attention(norm(y), over x),  y ← y + feed-forward(norm(y))

Scores are not scaled. Self-attention knows distances alone: a learned number a head and bucket of distances is added to
its scores, in all layers of a stack the same; no (L, L) tensor is made of them. Norms are root-mean-square.

Shapes: B batch, S tokens of the source, L of the target, H heads, D width of a head, E width of the model. Padding
leaves at the door of each stack, so a row gives what it gives alone, wherever source and target are padded.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from qkv.cache.base import Cache
from qkv.errors import ShapeError, ValueOutOfRange, message, unknown_name
from qkv.models.files.checkpoint import PretrainedModel
from qkv.models.files.config_file import Fields
from qkv.models.generation import Generates, Start
from qkv.models.output import IGNORED, token_loss
from qkv.models.published import t5 as files
from qkv.models.sizes import check_dropouts, check_positive, check_sizes
from qkv.models.target import check_target, moved_on, no_target, read_labels
from qkv.nn.attention_state import Keys
from qkv.nn.context import Context
from qkv.nn.embedding import Embedding
from qkv.nn.feed_forward import FeedForward
from qkv.nn.ids import check_ids
from qkv.nn.multihead_attention import MultiheadAttention
from qkv.nn.norm import RMSNorm
from qkv.nn.relative import T5RelativeBias
from qkv.nn.rows import Rows, check_aux
from qkv.nn.stack_state import StackState, read_state
from qkv.patterns import causal
from qkv.patterns.pattern import Pattern
from qkv.patterns.text import parse
from qkv.types import AuxOutput, AuxRequest


@dataclass(frozen=True, kw_only=True, slots=True)
class T5Config:
    """The sizes of a T5, by default of the small one (60M) of the paper.

    T5 1.1 has activation "geglu_tanh", tied=False and scaled_head=False. pattern: what a token of the source sees in
    the encoder, as `qkv.parse` reads it; "window(127, 127)" is the local attention of LongT5.
    Raises ValueOutOfRange for what cannot be, UnknownName and PatternSyntaxError for words that cannot be read.

    Source: Raffel et al., arXiv:1910.10683. T5 1.1: Shazeer, arXiv:2002.05202. LongT5: Guo et al., arXiv:2112.07916.
    """

    vocabulary: int = 32128
    layers: int = 6
    decoder_layers: int | None = None  # None: as many
    heads: int = 8  # H
    head_dim: int = 64  # D
    width: int = 512  # E
    feedforward: int = 2048
    activation: str = "relu"
    buckets: int = 32  # of distances
    max_distance: int = 128  # all from here on share a bucket
    norm_epsilon: float = 1e-6
    tied: bool = True  # whether the head is the embedding
    scaled_head: bool = True  # logits by 1/√E
    pattern: str = "full()"
    embedding_dropout: float = 0.1  # on what goes into each stack and what comes out of it
    attention_dropout: float = 0.1  # on the attention weights
    feedforward_dropout: float = 0.1  # after the activation
    residual_dropout: float = 0.1  # on what a sublayer adds to the stream
    start_id: int = 0  # what the decoder reads first
    end_ids: tuple[int, ...] = (1,)
    pad_id: int = 0

    def __post_init__(self) -> None:
        check_sizes(self, "vocabulary", "layers", "heads", "head_dim", "width", "feedforward")
        if self.decoder_layers is not None:
            check_sizes(self, "decoder_layers")
        check_positive(self, "norm_epsilon")
        check_dropouts(self, *files.DROPOUTS)
        if self.activation not in files.ACTIVATIONS.values():
            raise unknown_name("activation", self.activation, set(files.ACTIVATIONS.values()))
        if self.scaled_head and not self.tied:
            holds = "`scaled_head` goes with `tied`"
            raise ValueOutOfRange(message(holds, "got it with a head of its own", "T5 1.1 has neither"))
        for name in ("start_id", "pad_id"):
            if not 0 <= getattr(self, name) < self.vocabulary:
                holds = f"`{name}` must lie in 0 .. {self.vocabulary - 1}"
                raise ValueOutOfRange(message(holds, f"got {getattr(self, name)}", "name a token of the vocabulary"))
        parse(self.pattern)

    @property
    def of_decoder(self) -> int:
        """How many layers the decoder has."""
        return self.layers if self.decoder_layers is None else self.decoder_layers

    @classmethod
    def from_fields(cls, fields: Fields) -> T5Config:
        """The sizes in a published config.json. Raises CheckpointError when it describes another model."""
        return cls(**files.read_fields(fields))

    def to_fields(self) -> dict[str, Any]:
        """What config.json says of it: T5's, or with another pattern than `full()` that of a model of qkv's own."""
        return files.write_fields(self)


class Memory(NamedTuple):
    """The source as the encoder gives it, for `decode` and `initial_state`."""

    hidden: Tensor  # (B, S, E), each row's real tokens first
    rows: Rows  # where they stand in the source
    aux: tuple[AuxOutput, ...] | None = None  # one a layer of the encoder


class T5Output(NamedTuple):
    """What one pass gives. A field that the call has no use for is None."""

    hidden: Tensor  # (B, L, E), what comes out of the decoder
    logits: Tensor  # (B, L, vocabulary), or (B, 1, vocabulary) of each row's last real token
    loss: Tensor | None = None  # the mean over the labels that count; one number
    aux: tuple[AuxOutput, ...] | None = None  # of the decoder over the target, one a layer
    cross_aux: tuple[AuxOutput, ...] | None = None  # of the decoder over the source
    encoder_hidden: Tensor | None = None  # (B, S, E), what comes out of the encoder
    encoder_aux: tuple[AuxOutput, ...] | None = None


class EncoderLayer(nn.Module):
    """Every token of the source reads every other, then the feed-forward works on each alone."""

    def __init__(self, config: T5Config) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(config.width, eps=config.norm_epsilon)
        self.attention = _attention(config, parse(config.pattern))
        self.feedforward_norm = RMSNorm(config.width, eps=config.norm_epsilon)
        self.feedforward = _feed_forward(config)
        self.dropout = nn.Dropout(config.residual_dropout)

    def forward(self, x: Tensor, context: Context) -> tuple[Tensor, AuxOutput | None]:
        update, aux = self.attention.attend(self.attention_norm(x), context)
        x = x + self.dropout(update)
        return x + self.dropout(self.feedforward(self.feedforward_norm(x))), aux


class DecoderLayer(nn.Module):
    """Every token of the target reads those before it, then the source, then works alone."""

    def __init__(self, config: T5Config) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(config.width, eps=config.norm_epsilon)
        self.attention = _attention(config, causal())
        self.cross_norm = RMSNorm(config.width, eps=config.norm_epsilon)
        self.cross = _attention(config, None)
        self.feedforward_norm = RMSNorm(config.width, eps=config.norm_epsilon)
        self.feedforward = _feed_forward(config)
        self.dropout = nn.Dropout(config.residual_dropout)

    def forward(
        self, y: Tensor, context: Context, state: Cache | None, over: Context, keys: Keys
    ) -> tuple[Tensor, AuxOutput | None, AuxOutput | None]:
        """context, state: of the target; over, keys: of the source."""
        update, aux = self.attention.attend(self.attention_norm(y), context, state=state)
        y = y + self.dropout(update)
        update, cross_aux = self.cross.attend(self.cross_norm(y), over, keys=keys)
        y = y + self.dropout(update)
        return y + self.dropout(self.feedforward(self.feedforward_norm(y))), aux, cross_aux


class T5Stack(nn.Module):
    """Layers that share one table of distances, and the norm behind them."""

    def __init__(self, config: T5Config, layer: type[nn.Module], count: int, *, bidirectional: bool) -> None:
        super().__init__()
        self.relative = T5RelativeBias(
            config.heads, buckets=config.buckets, max_distance=config.max_distance, bidirectional=bidirectional
        )
        self.layers = nn.ModuleList(layer(config) for _ in range(count))
        self.norm = RMSNorm(config.width, eps=config.norm_epsilon)
        self.dropout = nn.Dropout(config.embedding_dropout)

    def leave(self, x: Tensor) -> Tensor:
        """What comes out of the stack."""
        out: Tensor = self.dropout(self.norm(x))
        return out


class T5(Generates, PretrainedModel):
    """A text from a text: an encoder reads the source once, a decoder writes the target token by token.

    First weights, of the code beside the paper: normal, matrices with spread 1/√(width they read), queries 1/√(E·D) in
    place of the scale that scores lack, embeddings 1, the table of distances 1/√E; norms 1. A head of its own, which
    came later, has 1/√E. Source: mesh_tensorflow/transformer/attention.py.
    """

    Config = T5Config
    config: T5Config

    def __init__(self, config: T5Config) -> None:
        super().__init__()
        self.config = config
        self.embedding = Embedding(config.vocabulary, config.width, embedding_dropout=config.embedding_dropout)
        self.encoder = T5Stack(config, EncoderLayer, config.layers, bidirectional=True)
        self.decoder = T5Stack(config, DecoderLayer, config.of_decoder, bidirectional=False)
        self.head = None if config.tied else nn.Linear(config.width, config.vocabulary, bias=False)
        self._draw_weights()

    def forward(
        self,
        ids: Tensor,
        attention_mask: Tensor | None = None,
        *,
        labels: Tensor | None = None,
        decoder_ids: Tensor | None = None,
        decoder_mask: Tensor | None = None,
        pattern: Pattern | None = None,
        return_aux: AuxRequest | None = None,
        backend: str | None = None,
    ) -> T5Output:
        """Read the source, and predict each token of the target from those before it.

        ids: integers (B, S), the source. labels: integers (B, L), the target; adds the loss of each label at its own
        place, where -100 and what `decoder_mask` hides do not count. decoder_ids: integers (B, L), what the decoder
        reads; None: the labels moved on by one place, behind `config.start_id`. attention_mask, decoder_mask: (B, S)
        and (B, L), keep where 1; None keeps all. pattern: who may see whom in the encoder, beside the config's.
        return_aux: what to return of every layer's attention. backend: of attention.
        Raises ShapeError, DTypeError, MaskError and ValueOutOfRange before any work.
        """
        decoder_ids = self._target(ids, labels, decoder_ids, decoder_mask)
        memory = self.encode(ids, attention_mask, pattern=pattern, return_aux=return_aux, backend=backend)
        out = self.decode(decoder_ids, decoder_mask, memory=memory, return_aux=return_aux, backend=backend)
        loss = None
        if labels is not None:
            hidden = labels if decoder_mask is None else labels.masked_fill(decoder_mask != 1, IGNORED)
            loss = token_loss(out.logits, hidden)
        return out._replace(loss=loss, encoder_hidden=memory.rows.back(memory.hidden), encoder_aux=memory.aux)

    def encode(
        self,
        ids: Tensor,
        attention_mask: Tensor | None = None,
        *,
        pattern: Pattern | None = None,
        return_aux: AuxRequest | None = None,
        backend: str | None = None,
    ) -> Memory:
        """Read the source, ids (B, S). Arguments and errors as of `forward`."""
        check_ids("ids", ids, count=self.config.vocabulary)
        rows = Rows.of(attention_mask, *ids.shape)
        check_aux(return_aux, rows)
        stack = self.encoder
        context = Context(lengths=rows.lengths, pattern=pattern, aux=return_aux, backend=backend, bias=stack.relative())
        x = self.embedding(rows.front(ids))
        seen: list[AuxOutput] = []
        for layer in stack.layers:
            x, aux = layer(x, context)
            if aux is not None and return_aux is not None:
                seen.append(rows.back_aux(aux, chosen=return_aux.weights))
        return Memory(stack.leave(x), rows, None if return_aux is None else tuple(seen))

    def decode(
        self,
        decoder_ids: Tensor,
        decoder_mask: Tensor | None = None,
        *,
        memory: Memory | None = None,
        state: StackState | None = None,
        last_only: bool = False,
        return_aux: AuxRequest | None = None,
        backend: str | None = None,
    ) -> T5Output:
        """Predict the token behind each of decoder_ids (B, L), of a source that was read.

        memory: what `encode` gave. state: in place of it, what `initial_state` made and earlier calls went through;
        these tokens follow theirs, and it is advanced in place. last_only: hidden state and logits of each row's last
        real token alone. return_aux: with a state, keys of the target stand at their positions. Otherwise as `forward`.
        """
        check_ids("decoder_ids", decoder_ids, count=self.config.vocabulary)
        stack, rows = self.decoder, Rows.of(decoder_mask, *decoder_ids.shape)
        check_aux(return_aux, rows)
        cross, source = self._over(memory, state, rows.batch)
        caches = [None] * len(stack.layers) if state is None else state.layers
        held = None if state is None else Rows(rows.batch, state.length + rows.length)
        context = Context(lengths=rows.lengths, aux=return_aux, backend=backend, bias=stack.relative())
        over = Context(aux=return_aux, backend=backend)
        y = self.embedding(rows.front(decoder_ids))
        if state is not None:
            state.begin(stack.layers, y, rows.lengths)
        seen: list[AuxOutput] = []
        seen_over: list[AuxOutput] = []
        for layer, cache, keys in zip(stack.layers, caches, cross, strict=True):
            y, aux, cross_aux = layer(y, context, cache, over, keys)
            if return_aux is not None:
                seen.append(rows.back_aux(aux, held, return_aux.weights))
                seen_over.append(rows.back_aux(cross_aux, source, return_aux.weights))
        hidden = stack.leave(rows.last(y)) if last_only else rows.back(stack.leave(y))
        told = (None, None) if return_aux is None else (tuple(seen), tuple(seen_over))
        out = T5Output(hidden, self._logits(hidden), None, *told)
        if state is not None:
            state.settle()
        return out

    def initial_state(self, batch: int, max_length: int, memory: Memory | None = None) -> StackState:
        """A state for targets of at most max_length tokens, with the keys and values of a source, made once.

        memory: what `encode` gave of `batch` rows; there is no state without one.
        """
        cross, rows = self._over(memory, None, batch)
        own = [cast("MultiheadAttention", layer.attention) for layer in self.decoder.layers]
        return StackState([layer.initial_state(batch, max_length) for layer in own], cross, rows)

    def generate(self, ids: Tensor, max_new_tokens: int, **options: Any) -> Tensor:
        """The target alone, int64 (B, n), without `config.start_id`; ids (B, S) are the source.

        Options as of `Generates.generate`; a repetition penalty counts tokens of the target. `stream(...)` gives the
        same tokens one by one.
        """
        return super().generate(ids, max_new_tokens, **options)[:, ids.shape[1] :]

    @staticmethod
    def own_names(config: T5Config, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return files.own_names(config, tensors)

    @staticmethod
    def file_names(config: T5Config, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return files.file_names(config, tensors)

    @staticmethod
    def config_for(config: T5Config, names: frozenset[str]) -> T5Config:
        """A head that reads the stream unscaled is its own where the file has one: transformers says nothing of it."""
        return replace(config, tied=config.scaled_head or files.HEAD not in names)

    def _begin(self, ids: Tensor, attention_mask: Tensor | None, max_new_tokens: int) -> Start:
        memory = self.encode(ids, attention_mask)
        first = ids.new_full((ids.shape[0], 1), self.config.start_id)
        return Start(first, None, self.initial_state(ids.shape[0], max_new_tokens + 1, memory))

    def _next(self, ids: Tensor, attention_mask: Tensor | None, state: StackState) -> Tensor:
        return self.decode(ids, attention_mask, state=state, last_only=True).logits

    def _target(
        self, ids: Tensor, labels: Tensor | None, decoder_ids: Tensor | None, decoder_mask: Tensor | None
    ) -> Tensor:
        """What the decoder reads; checked with the labels against the source."""
        config = self.config
        if labels is not None:
            tokens = read_labels(labels, count=config.vocabulary, pad=config.pad_id)
            if decoder_ids is None:
                decoder_ids = moved_on(tokens, Rows.of(decoder_mask, *tokens.shape), config.start_id)
        if decoder_ids is None:
            raise no_target()
        check_ids("decoder_ids", decoder_ids, count=config.vocabulary)
        check_target(ids, decoder_ids, labels)
        return decoder_ids

    def _over(self, memory: Memory | None, state: StackState | None, batch: int) -> tuple[Sequence[Keys], Rows | None]:
        """The keys of the source for each layer, and where its real tokens stand."""
        if state is not None and memory is None:
            read_state(state).check(len(self.decoder.layers), batch)
            if state.cross is None:
                seen = "got one without keys of a source"
                raise ValueOutOfRange(message("`state` must be of this model", seen, "make it with initial_state"))
            return state.cross, state.memory
        if memory is None or state is not None:
            seen = "got neither" if memory is None else "got both"
            remedy = "call encode, and decode what it gives or the state made of it"
            raise ValueOutOfRange(message("a source must be given as `memory` or in a `state`", seen, remedy))
        if memory.rows.batch != batch:
            seen = f"got {batch} and {memory.rows.batch}"
            raise ShapeError(message("target and source must have as many rows", seen, "give one target a source"))
        lengths = memory.rows.lengths
        crossing = [cast("MultiheadAttention", layer.cross) for layer in self.decoder.layers]
        return [layer.keys_of(memory.hidden, lengths=lengths) for layer in crossing], memory.rows

    def _logits(self, hidden: Tensor) -> Tensor:
        if self.config.scaled_head:
            hidden = hidden * self.config.width**-0.5
        return F.linear(hidden, self.embedding.weight if self.head is None else self.head.weight)

    @torch.no_grad()
    def _draw_weights(self) -> None:
        config = self.config
        stream = config.width**-0.5
        spreads = {
            "embedding.weight": 1.0,
            "relative.weight": stream,
            "q_proj.weight": stream * config.head_dim**-0.5,
            "o_proj.weight": (config.heads * config.head_dim) ** -0.5,
            "down_proj.weight": config.feedforward**-0.5,
        }
        for name, weight in self.named_parameters():
            if weight.ndim == 2:
                spread = next((spreads[end] for end in spreads if name.endswith(end)), stream)
                nn.init.normal_(weight, std=spread)


def _attention(config: T5Config, pattern: Pattern | None) -> MultiheadAttention:
    return MultiheadAttention(
        config.width,
        config.heads,
        head_dim=config.head_dim,
        pattern=pattern,
        scale=1.0,
        attention_dropout=config.attention_dropout,
        projection_bias=False,
    )


def _feed_forward(config: T5Config) -> FeedForward:
    return FeedForward(
        config.width,
        config.feedforward,
        activation=config.activation,
        feedforward_dropout=config.feedforward_dropout,
        bias=False,
    )
