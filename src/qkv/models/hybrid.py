"""A model of linear and softmax layers in a stated ratio, in one file that reads top to bottom.

Linear layers carry a state of fixed size and are many; softmax layers keep every key that their pattern needs and are
few. By default the shape of Olmo-Hybrid: three gated delta nets, then one full attention; all three are config words.

    linear:   x ← x + linear(norm(x)),     x ← x + feed-forward(norm(x))
    softmax:  x ← x + norm(attention(x)),  x ← x + norm(feed-forward(x))
    logits = head(norm(x))

Shapes: B batch, L tokens, E width of the model. Padding leaves at the door: layers see each sequence's real tokens
first, so a row gives what it gives alone, wherever it is padded.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

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
from qkv.models.published import hybrid as files
from qkv.models.sizes import check_dropouts, check_multiple, check_positive, check_sizes
from qkv.nn.context import Context
from qkv.nn.embedding import Embedding
from qkv.nn.feed_forward import FeedForward
from qkv.nn.layer import RecurrentLayer
from qkv.nn.layer_state import LayerState
from qkv.nn.mixer import VARIANTS, make_mixer, mix
from qkv.nn.multihead_attention import MultiheadAttention
from qkv.nn.norm import RMSNorm
from qkv.nn.rotary import Rotary
from qkv.nn.stack_state import StackState
from qkv.patterns.pattern import Pattern
from qkv.patterns.text import parse
from qkv.types import AuxOutput, AuxRequest

State: TypeAlias = Cache | LayerState


@dataclass(frozen=True, kw_only=True, slots=True)
class HybridConfig:
    """The sizes and choices of a hybrid, by default Olmo-Hybrid-7B's. Those that cannot be raise ValueOutOfRange,
    UnknownName or PatternSyntaxError.
    """

    vocabulary: int = 100352
    positions: int = 65536  # the longest row in training; longer ones are computed
    layers: int = 32
    heads: int = 30  # of softmax layers
    kv_heads: int | None = None  # None: as many
    head_dim: int | None = None  # None: width / heads
    width: int = 3840  # E
    feedforward: int = 11008
    norm_epsilon: float = 1e-6
    linear: str = "gated_delta"  # the linear variant, a name in qkv.nn.mixer.VARIANTS
    linear_heads: int | None = None  # None: as `heads`
    linear_options: Mapping[str, Any] | None = None  # what else its layer is told; None: Olmo-Hybrid's, or its defaults
    ratio: int = 3  # linear layers to one softmax layer, which ends each group
    softmax_layers: tuple[int, ...] | None = None  # which layers are softmax, from 0, where no ratio says it
    pattern: str = "causal()"  # what softmax layers see, a text as `qkv.parse` reads it
    rope: Mapping[str, Any] | None = None  # rotary positions in softmax layers, by the names of rope_parameters
    projection_bias: bool = False  # in softmax layers
    tied: bool = False  # whether the head's matrix is that of the embeddings
    embedding_dropout: float = 0.0
    attention_dropout: float = 0.0  # on the weights of softmax layers
    feedforward_dropout: float = 0.0  # after the activation and its gate
    residual_dropout: float = 0.0  # on what a sublayer adds to the stream
    spread: float = 0.02  # of the first weights
    end_ids: tuple[int, ...] = ()
    pad_id: int | None = None

    def __post_init__(self) -> None:
        check_sizes(self, "vocabulary", "positions", "layers", "heads", "width", "feedforward", "ratio")
        check_positive(self, "norm_epsilon", "spread")
        check_dropouts(self, "embedding_dropout", "attention_dropout", "feedforward_dropout", "residual_dropout")
        if self.head_dim is None:
            check_multiple(self, "width", "heads", "give the width of a head as `head_dim`")
        if self.kv_heads is not None:
            check_sizes(self, "kv_heads")
            check_multiple(self, "heads", "kv_heads", "each key head serves heads / kv_heads query heads")
        if self.linear not in VARIANTS:
            raise unknown_name("linear", self.linear, VARIANTS)
        known = list(inspect.signature(VARIANTS[self.linear]).parameters)[2:]  # behind dim and heads
        for name in self.linear_options or ():
            if name not in known:
                raise unknown_name(f"linear_options of {self.linear}", name, known)
        if not all(0 <= n < self.layers for n in self.softmax_layers or ()):
            holds = f"`softmax_layers` must name layers in 0 .. {self.layers - 1}"
            raise ValueOutOfRange(message(holds, f"got {self.softmax_layers}", "layers count from 0"))
        if not looks_back(parse(self.pattern).expr):
            holds = "`pattern` must show that no token sees a later one"
            raise ValueOutOfRange(message(holds, f"got {self.pattern}", f"write 'causal() & ({self.pattern})'"))

    @property
    def kinds(self) -> tuple[str, ...]:
        """What each layer is, "linear" or "softmax". A stack too short for its ratio ends with a softmax layer."""
        chosen = self.softmax_layers
        if chosen is None:
            chosen = tuple(range(self.ratio, self.layers, self.ratio + 1)) or (self.layers - 1,)
        return tuple("softmax" if n in chosen else "linear" for n in range(self.layers))

    @property
    def linear_settings(self) -> dict[str, Any]:
        """What the layer of the linear variant is told beside dim and heads."""
        if self.linear_options is not None or self.linear != "gated_delta":
            return dict(self.linear_options or {})
        key_width = int(0.75 * self.width / (self.linear_heads or self.heads))
        return {"head_k_dim": key_width, "head_v_dim": 2 * key_width, "allow_neg_eigval": True, "eps": 1e-5}

    @property
    def rotary(self) -> Rotary | None:
        """The angles that queries and keys of softmax layers are turned by."""
        if self.rope is None:
            return None
        rope = {"rope_parameters": dict(self.rope), "max_position_embeddings": self.positions}
        return Rotary.from_config(rope, self.head_dim or self.width // self.heads)

    def make_linear(self) -> RecurrentLayer:
        """The recurrence of a linear layer."""
        heads = self.linear_heads or self.heads
        made = make_mixer(self.linear, self.width, heads, causal=True, linear_options=self.linear_settings)
        assert isinstance(made, RecurrentLayer)
        return made

    @classmethod
    def from_fields(cls, fields: Fields) -> HybridConfig:
        """The config in a config.json of Olmo-Hybrid, or of our own for other shapes."""
        return cls(**files.read_fields(fields))

    def to_fields(self) -> dict[str, Any]:
        """As Olmo-Hybrid's config.json where the shape is that one, else under our own model_type."""
        return files.write_fields(self)


class LinearLayer(nn.Module):
    """A recurrence mixes the tokens; the norms come first."""

    def __init__(self, config: HybridConfig) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(config.width, eps=config.norm_epsilon)
        self.attention = config.make_linear()
        self.feedforward_norm = RMSNorm(config.width, eps=config.norm_epsilon)
        self.feedforward = _feed_forward(config)
        self.dropout = nn.Dropout(config.residual_dropout)

    def forward(self, x: Tensor, context: Context, state: State | None = None) -> tuple[Tensor, AuxOutput | None]:
        update, aux = mix(self.attention, self.attention_norm(x), context, state)
        x = x + self.dropout(update)
        return x + self.dropout(self.feedforward(self.feedforward_norm(x))), aux


class SoftmaxLayer(nn.Module):
    """Softmax attention mixes the tokens; the norms come after, on what is added to the stream."""

    def __init__(self, config: HybridConfig, rotary: Rotary | None) -> None:
        super().__init__()
        self.attention = MultiheadAttention(
            config.width,
            config.heads,
            kv_heads=config.kv_heads,
            head_dim=config.head_dim,
            pattern=parse(config.pattern),
            rotary=rotary,
            qk_norm="model",
            norm_eps=config.norm_epsilon,
            attention_dropout=config.attention_dropout,
            projection_bias=config.projection_bias,
        )
        self.attention_norm = RMSNorm(config.width, eps=config.norm_epsilon)
        self.feedforward = _feed_forward(config)
        self.feedforward_norm = RMSNorm(config.width, eps=config.norm_epsilon)
        self.dropout = nn.Dropout(config.residual_dropout)

    def forward(self, x: Tensor, context: Context, state: State | None = None) -> tuple[Tensor, AuxOutput | None]:
        update, aux = mix(self.attention, x, context, state)
        x = x + self.dropout(self.attention_norm(update))
        return x + self.dropout(self.feedforward_norm(self.feedforward(x))), aux


class Hybrid(PretrainedModel, Generates):
    """A causal language model of linear and softmax layers.

    First values: matrices of the stream, of softmax layers and of feed-forwards normal with spread 0.02, norms the
    identity, as Olmo-Hybrid's; linear layers as each documents them.

    Source of the default: Olmo-Hybrid, as transformers' OlmoHybridForCausalLM has it. Ratios of recurrent to softmax
    layers are compared by Lieber et al., "Jamba: A Hybrid Transformer-Mamba Language Model" (2024), section 6.
    """

    Config = HybridConfig

    def __init__(self, config: HybridConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = Embedding(config.vocabulary, config.width, embedding_dropout=config.embedding_dropout)
        self.rotary = config.rotary
        self.layers = nn.ModuleList(
            LinearLayer(config) if kind == "linear" else SoftmaxLayer(config, self.rotary) for kind in config.kinds
        )
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
        """The scores of the next token at every place, logits (B, L, vocabulary).

        ids: integers (B, L). attention_mask: (B, L), keeps where 1; None keeps all. labels: integers (B, L), usually
        the ids: each is predicted from those before it; -100 does not count. state: what went before, from
        `initial_state`; it is advanced in place by the tokens that are kept. pattern: who may see whom in softmax
        layers, beside `config.pattern`. last_only: logits of each row's last kept token alone, (B, 1, vocabulary).
        return_aux: what to return of every layer's attention; a linear layer has none of it. backend: of the softmax
        layers. Raises ShapeError, DTypeError, MaskError and ValueOutOfRange before any work.
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
        lengths = run.rows.lengths
        rotation = None if self.rotary is None else self.rotary.angles(run.positions, x.dtype)
        softmax = Context(lengths, rotation, pattern, aux=return_aux, backend=backend)
        linear = Context(lengths, aux=return_aux)
        x = run.through(self.layers, x, [softmax if kind == "softmax" else linear for kind in self.config.kinds])
        return run.leave(x, self.norm, self.embedding.weight if self.head is None else self.head.weight)

    def initial_state(self, batch: int, max_length: int) -> StackState:
        """An empty state for `batch` sequences of at most max_length tokens: of fixed size where layers are linear."""
        states: list[State] = []
        for layer in self.layers:
            if isinstance(layer, SoftmaxLayer):
                states.append(layer.attention.initial_state(batch, max_length))
            elif isinstance(layer, LinearLayer):
                states.append(layer.attention.initial_state(batch))
        return StackState(states)

    @staticmethod
    def own_names(config: HybridConfig, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return files.own_names(config, tensors)

    @staticmethod
    def file_names(config: HybridConfig, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return files.file_names(config, tensors)

    @torch.no_grad()
    def _draw_weights(self) -> None:
        own = {part for layer in self.layers if isinstance(layer, LinearLayer) for part in layer.attention.modules()}
        for module in (module for module in self.modules() if module not in own):
            if isinstance(module, nn.Linear | Embedding):
                nn.init.normal_(module.weight, std=self.config.spread)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)


def _feed_forward(config: HybridConfig) -> FeedForward:
    return FeedForward(
        config.width,
        config.feedforward,
        activation="swiglu",
        feedforward_dropout=config.feedforward_dropout,
        bias=False,
    )
