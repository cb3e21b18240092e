"""GPT-2 in one file that reads top to bottom: config, layer, model, first weights. Files: `published/gpt.py`.

    x ← x + attention(norm(x)),  x ← x + feed-forward(norm(x)),  logits = norm(x) · embeddingᵀ

with learned positions, layer norms and tanh GELU. The config may name another pattern than the causal one, for all
layers or one a layer: "strided(128)" makes it a Sparse Transformer, a window in every second layer a GPT-3.

Shapes: B batch, L tokens, H heads, D width of a head, E = H·D width of the model. Padding leaves at the door: layers
see each sequence's real tokens first and positions count those alone, so a row gives what it gives alone.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from qkv.cache.base import Cache
from qkv.cache.within import looks_back
from qkv.errors import ValueOutOfRange, message, unknown_name
from qkv.models.causal_pass import CausalPass
from qkv.models.files.checkpoint import PretrainedModel
from qkv.models.files.config_file import Fields
from qkv.models.generation import Generates
from qkv.models.output import ModelOutput
from qkv.models.published import gpt as files
from qkv.models.sizes import check_dropouts, check_multiple, check_positive, check_sizes
from qkv.nn.context import Context
from qkv.nn.embedding import Embedding
from qkv.nn.feed_forward import FeedForward
from qkv.nn.multihead_attention import MultiheadAttention
from qkv.nn.norm import LayerNorm
from qkv.nn.positions import LearnedPositions
from qkv.nn.stack_state import StackState
from qkv.patterns.pattern import Pattern
from qkv.patterns.text import parse
from qkv.types import AuxOutput, AuxRequest


@dataclass(frozen=True, kw_only=True, slots=True)
class GPTConfig:
    """The sizes of a GPT-2, by default of the smallest (124M).

    pattern: what a token sees, as `qkv.parse` reads it; one text for all layers, or one a layer.
    Raises ValueOutOfRange for what cannot be, UnknownName and PatternSyntaxError for words that cannot be read.

    Source: Radford et al., "Language Models are Unsupervised Multitask Learners" (2019), and the code beside it; other
    patterns: Child et al., arXiv:1904.10509, and Brown et al., arXiv:2005.14165, section 2.1.
    """

    vocabulary: int = 50257
    positions: int = 1024  # the longest sequence
    layers: int = 12  # N
    heads: int = 12  # H
    width: int = 768  # E
    feedforward: int = 3072
    activation: str = "gelu_tanh"
    norm_epsilon: float = 1e-5
    scaled: bool = True  # scores by 1/√D
    scaled_by_layer: bool = False  # scores of layer n = 0, 1, ... by 1/(n + 1) as well
    tied: bool = True  # whether the head is the embedding
    pattern: str | tuple[str, ...] = "causal()"
    spread: float = 0.02  # of the first weights
    embedding_dropout: float = 0.1  # on the sum of token and position
    attention_dropout: float = 0.1  # on the attention weights
    feedforward_dropout: float = 0.0  # after the activation
    residual_dropout: float = 0.1  # on what attention and feed-forward add to the stream
    begin_id: int | None = None
    end_ids: tuple[int, ...] = ()  # 50256 in GPT-2's own vocabulary
    pad_id: int | None = None

    def __post_init__(self) -> None:
        check_sizes(self, "vocabulary", "positions", "layers", "heads", "width", "feedforward")
        check_multiple(self, "width", "heads", "each head is width / heads wide")
        check_positive(self, "norm_epsilon", "spread")
        check_dropouts(self, "embedding_dropout", "attention_dropout", "feedforward_dropout", "residual_dropout")
        if self.activation not in files.ACTIVATIONS.values():
            raise unknown_name("activation", self.activation, set(files.ACTIVATIONS.values()))
        if len(self.patterns) != self.layers:
            holds = f"`pattern` must be one text, or one a layer, {self.layers}"
            raise ValueOutOfRange(message(holds, f"got {len(self.patterns)}", "repeat the patterns that alternate"))
        for pattern in self.patterns:
            if not looks_back(pattern.expr):
                holds = "`pattern` must show that no token sees a later one"
                raise ValueOutOfRange(message(holds, f"got {pattern}", f"write 'causal() & ({pattern})'"))

    @property
    def patterns(self) -> tuple[Pattern, ...]:
        """What a token sees, one pattern a layer."""
        texts = (self.pattern,) * self.layers if isinstance(self.pattern, str) else tuple(self.pattern)
        read = {text: parse(text) for text in texts}  # layers of one text share one pattern
        return tuple(read[text] for text in texts)

    def scale(self, layer: int) -> float:
        """What scores of a layer, counted from 0, are multiplied by."""
        scale = (self.width // self.heads) ** -0.5 if self.scaled else 1.0
        return scale / (layer + 1) if self.scaled_by_layer else scale

    @classmethod
    def from_fields(cls, fields: Fields) -> GPTConfig:
        """The sizes in a published config.json. Raises CheckpointError when it describes another model."""
        return cls(**files.read_fields(fields))

    def to_fields(self) -> dict[str, Any]:
        """What config.json says of it: GPT-2's; with another pattern than `causal()` a model of qkv's own."""
        return files.write_fields(self)


class GPTLayer(nn.Module):
    """Attention moves information between tokens, the feed-forward works on each token alone."""

    def __init__(self, config: GPTConfig, pattern: Pattern, scale: float) -> None:
        super().__init__()
        self.attention_norm = LayerNorm(config.width, eps=config.norm_epsilon)
        self.attention = MultiheadAttention(
            config.width,
            config.heads,
            pattern=pattern,
            scale=scale,
            attention_dropout=config.attention_dropout,
        )
        self.feedforward_norm = LayerNorm(config.width, eps=config.norm_epsilon)
        self.feedforward = FeedForward(
            config.width,
            config.feedforward,
            activation=config.activation,
            feedforward_dropout=config.feedforward_dropout,
        )
        self.dropout = nn.Dropout(config.residual_dropout)

    def forward(self, x: Tensor, context: Context, state: Cache | None = None) -> tuple[Tensor, AuxOutput | None]:
        update, aux = self.attention.attend(self.attention_norm(x), context, state=state)
        x = x + self.dropout(update)
        return x + self.dropout(self.feedforward(self.feedforward_norm(x))), aux


class GPT(Generates, PretrainedModel):
    """The GPT-2 language model, with any pattern of attention in place of the causal one.

    First weights, as in the code beside the paper: normal, of the config's spread 0.02 (half of it for positions, and
    1/√(2N) of it for the 2N matrices that write to the stream, section 2.3); biases 0, norms the identity.
    """

    Config = GPTConfig
    config: GPTConfig

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = Embedding(
            config.vocabulary,
            config.width,
            positions=LearnedPositions(config.positions, config.width),
            embedding_dropout=config.embedding_dropout,
        )
        self.layers = nn.ModuleList(
            GPTLayer(config, pattern, config.scale(n)) for n, pattern in enumerate(config.patterns)
        )
        self.norm = LayerNorm(config.width, eps=config.norm_epsilon)
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
        """Run the model over token numbers.

        ids: integers (B, L). attention_mask: (B, L), keeps where 1; None keeps all. labels: integers (B, L), usually
        the ids; adds the loss of each next token, where -100 and padding do not count. state: what `initial_state`
        made and earlier calls went through; these tokens follow theirs, and it is advanced in place. pattern: who may
        see whom, beside each layer's own. last_only: hidden state and logits of each row's last real token alone.
        return_aux: what to return of every layer's attention; with a state its keys stand at their positions, without
        one where the ids stand. backend: of attention. Raises ShapeError, DTypeError, MaskError and ValueOutOfRange
        before any work.
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
            longest=self.config.positions,
        )
        x = self.embedding(run.ids, run.positions)
        x = run.through(self.layers, x, Context(run.rows.lengths, pattern=pattern, aux=return_aux, backend=backend))
        return run.leave(x, self.norm, self.embedding.weight if self.head is None else self.head.weight)

    def initial_state(self, batch: int, max_length: int) -> StackState:
        """An empty state for `batch` sequences of at most max_length tokens; what a pattern lets go takes no memory."""
        attentions = [cast("MultiheadAttention", layer.attention) for layer in self.layers]
        return StackState([attention.initial_state(batch, max_length) for attention in attentions])

    @staticmethod
    def own_names(config: GPTConfig, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return files.own_names(config, tensors)

    @staticmethod
    def file_names(config: GPTConfig, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return files.file_names(tensors)

    @torch.no_grad()
    def _draw_weights(self) -> None:
        spread = self.config.spread
        for name, weight in self.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                nn.init.normal_(weight, std=spread / math.sqrt(2 * self.config.layers))
            elif name.endswith("positions.weight"):
                nn.init.normal_(weight, std=spread / 2)
            elif name.endswith("bias"):
                nn.init.zeros_(weight)
            elif weight.ndim == 2:
                nn.init.normal_(weight, std=spread)
