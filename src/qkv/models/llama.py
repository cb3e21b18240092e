"""Llama in one file that reads top to bottom: config, layer, model.

    x ← x + attention(norm(x)),  x ← x + feed-forward(norm(x)),  logits = head(norm(x))

with root-mean-square norms, rotary positions, grouped heads and a gated feed-forward. The config also says what its
relatives change: windows (Mistral), biases (Qwen2), norms of queries and keys (Qwen3), sinks (GPT-OSS, StreamingLLM).

Shapes: B batch, L tokens, H query heads, G key heads, D width of a head, E width of the model. Padding leaves at the
door: layers see each sequence's real tokens first, so a row gives what it gives alone, wherever it is padded.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from qkv.cache.base import Cache
from qkv.errors import ValueOutOfRange, message
from qkv.models.causal_pass import CausalPass
from qkv.models.files.checkpoint import PretrainedModel
from qkv.models.files.config_file import Fields
from qkv.models.generation import Generates
from qkv.models.output import ModelOutput
from qkv.models.published import llama as files
from qkv.models.published import llama_gguf
from qkv.models.sizes import check_dropouts, check_multiple, check_positive, check_sizes
from qkv.nn.context import Context
from qkv.nn.embedding import Embedding
from qkv.nn.feed_forward import FeedForward
from qkv.nn.multihead_attention import MultiheadAttention
from qkv.nn.norm import RMSNorm
from qkv.nn.rotary import Rotary
from qkv.nn.stack_state import StackState
from qkv.patterns.pattern import Pattern
from qkv.patterns.text import parse
from qkv.types import AuxOutput, AuxRequest


@dataclass(frozen=True, kw_only=True, slots=True)
class LlamaConfig:
    """The sizes of a Llama, by default of the first one with 7 billion parameters, and what its relatives change.

    pattern: who may see whom, as `qkv.parse` reads it; one for all layers, or one a layer. "sliding_window(4096)" is
    Mistral's; "sliding_window(1024) | causal() & prefix(4)" keeps the first tokens in sight, as StreamingLLM.
    sinks: a learned logit a head takes part in the softmax without a value, as in GPT-OSS.
    rope: what `Rotary.from_config` reads under rope_parameters: the base, and the scaling where there is one.
    Raises ValueOutOfRange for what cannot be, PatternSyntaxError for a pattern that cannot be read.
    """

    vocabulary: int = 32000
    positions: int = 2048  # the longest row in training; longer ones are computed
    layers: int = 32
    heads: int = 32  # H
    kv_heads: int = 32  # G
    head_dim: int = 128  # D
    width: int = 4096  # E
    feedforward: int = 11008
    norm_epsilon: float = 1e-6
    rope: Mapping[str, Any] = field(default_factory=lambda: {"rope_theta": 10000.0, "rope_type": "default"}, hash=False)
    pattern: str | tuple[str, ...] = "causal()"
    sinks: bool = False
    qk_norm: Literal["head", "model"] | None = None  # of queries and keys, over a head or over all
    attention_bias: bool = False  # of the projections to queries, keys and values
    output_bias: bool = False  # of the projection back
    feedforward_bias: bool = False
    tied: bool = False  # whether the head is the embedding
    spread: float = 0.02  # of the first weights
    embedding_dropout: float = 0.0
    attention_dropout: float = 0.0  # on the attention weights
    feedforward_dropout: float = 0.0  # after the activation
    residual_dropout: float = 0.0  # on what attention and feed-forward add to the stream
    begin_id: int | None = 1
    end_ids: tuple[int, ...] = (2,)
    pad_id: int | None = None

    def __post_init__(self) -> None:
        check_sizes(
            self, *("vocabulary", "positions", "layers", "heads", "kv_heads", "head_dim", "width", "feedforward")
        )
        check_multiple(self, "heads", "kv_heads", "a group of query heads shares a key head")
        check_positive(self, "norm_epsilon", "spread")
        check_dropouts(self, "embedding_dropout", "attention_dropout", "feedforward_dropout", "residual_dropout")
        if len(self.patterns) != self.layers:
            holds = f"`pattern` must be one text, or one a layer, {self.layers}"
            raise ValueOutOfRange(message(holds, f"got {len(self.patterns)}", "repeat the patterns that alternate"))
        for text in set(self.patterns):
            parse(text)

    @property
    def patterns(self) -> tuple[str, ...]:
        """One a layer."""
        return (self.pattern,) * self.layers if isinstance(self.pattern, str) else tuple(self.pattern)

    @property
    def rotary(self) -> Rotary:
        """The angles that queries and keys are turned by."""
        rope = {"rope_parameters": dict(self.rope), "max_position_embeddings": self.positions}
        return Rotary.from_config(rope, self.head_dim)

    @classmethod
    def from_fields(cls, fields: Fields) -> LlamaConfig:
        """The sizes in a published config.json. Raises CheckpointError when it describes another model."""
        return cls(**files.read_fields(fields))

    def to_fields(self) -> dict[str, Any]:
        """What config.json says of it: Llama, Mistral, Qwen2 or Qwen3 in transformers, or a model that only qkv has."""
        return files.write_fields(self)


class LlamaLayer(nn.Module):
    """Attention moves information between tokens, the feed-forward works on each token alone."""

    def __init__(self, config: LlamaConfig, pattern: str, rotary: Rotary, backend: str) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(config.width, eps=config.norm_epsilon)
        self.attention = MultiheadAttention(
            config.width,
            config.heads,
            kv_heads=config.kv_heads,
            head_dim=config.head_dim,
            pattern=parse(pattern),
            rotary=rotary,
            qk_norm=config.qk_norm,
            norm_eps=config.norm_epsilon,
            sinks=config.sinks,
            attention_dropout=config.attention_dropout,
            projection_bias=config.attention_bias,
            output_bias=config.output_bias,
            backend=backend,
        )
        self.feedforward_norm = RMSNorm(config.width, eps=config.norm_epsilon)
        self.feedforward = FeedForward(
            config.width,
            config.feedforward,
            activation="swiglu",
            feedforward_dropout=config.feedforward_dropout,
            bias=config.feedforward_bias,
        )
        self.dropout_p = config.residual_dropout

    def forward(self, x: Tensor, context: Context, state: Cache | None = None) -> tuple[Tensor, AuxOutput | None]:
        update, aux = self.attention.attend(self.attention_norm(x), context, state=state)
        x = x + self._dropped(update)
        return x + self._dropped(self.feedforward(self.feedforward_norm(x))), aux

    def _dropped(self, update: Tensor) -> Tensor:
        return F.dropout(update, self.dropout_p) if self.training and self.dropout_p else update


class Llama(Generates, PretrainedModel):
    """A decoder of text (Touvron et al. 2023, arXiv:2302.13971 and 2307.09288), with any attention pattern.

    First weights: normal with the config's spread, 0.02, the `initializer_range` of the published configs, as no paper
    names one; biases and sinks 0, norms 1.
    """

    Config = LlamaConfig
    config: LlamaConfig

    def __init__(self, config: LlamaConfig, *, backend: str = "auto") -> None:
        super().__init__()
        self.config = config
        self.embedding = Embedding(config.vocabulary, config.width, embedding_dropout=config.embedding_dropout)
        self.rotary = config.rotary
        self.layers = nn.ModuleList(LlamaLayer(config, text, self.rotary, backend) for text in config.patterns)
        self.norm = RMSNorm(config.width, eps=config.norm_epsilon)
        self.head = None if config.tied else nn.Linear(config.width, config.vocabulary, bias=False)
        self._draw_weights()

    def forward(
        self,
        ids: Tensor,
        attention_mask: Tensor | None = None,
        *,
        labels: Tensor | None = None,
        state: StackState | None = None,
        pattern: Pattern | None = None,
        last_only: bool = False,
        return_aux: AuxRequest | None = None,
        backend: str | None = None,
    ) -> ModelOutput:
        """Run the decoder over token numbers.

        ids: integers (B, L). attention_mask: (B, L), keeps where 1; None keeps all. labels: integers (B, L), usually
        the ids; adds the loss of each next token, where -100 and padding do not count. state: what `initial_state`
        made and earlier calls went through; these tokens follow theirs, and it is advanced in place. pattern: who may
        see whom, beside each layer's own. last_only: hidden state and logits of each row's last real token alone.
        return_aux: what to return of every layer's attention. backend: in place of the model's own.
        Raises ShapeError, DTypeError, MaskError and ValueOutOfRange before any work.
        """
        run = CausalPass.begin(
            ids,
            attention_mask,
            vocabulary=self.config.vocabulary,
            layers=self.config.layers,
            labels=labels,
            state=state,
            last_only=last_only,
            return_aux=return_aux,
        )
        x = self.embedding(run.ids)
        rotation = self.rotary.angles(run.positions, x.dtype)
        x = run.through(self.layers, x, Context(run.rows.lengths, rotation, pattern, aux=return_aux, backend=backend))
        return run.leave(x, self.norm, self.embedding.weight if self.head is None else self.head.weight)

    def initial_state(self, batch: int, max_length: int) -> StackState:
        """An empty state for `batch` sequences of at most max_length tokens; what a window lets go takes no memory."""
        attentions = [cast("MultiheadAttention", layer.attention) for layer in self.layers]
        return StackState([attention.initial_state(batch, max_length) for attention in attentions])

    @staticmethod
    def own_names(config: LlamaConfig, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return files.own_names(config, tensors)

    @staticmethod
    def file_names(config: LlamaConfig, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return files.file_names(tensors)

    @classmethod
    def gguf_config(cls, metadata: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> LlamaConfig:
        return LlamaConfig(**llama_gguf.read_fields(metadata, shapes))

    @staticmethod
    def gguf_names(config: LlamaConfig, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return llama_gguf.own_names(config, tensors)

    @torch.no_grad()
    def _draw_weights(self) -> None:
        for module in self.modules():
            if isinstance(module, nn.Linear | Embedding):
                nn.init.normal_(module.weight, std=self.config.spread)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)
