"""Softmax attention as a layer: projections, norms, positions, and one call of `qkv.attention` or of a cache."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from qkv.attention import attention
from qkv.cache.base import Cache, undoing
from qkv.inputs import read_dropout, read_scale, read_softcap
from qkv.nn.attention_checks import (
    Bias,
    both,
    check_alike,
    check_backend,
    check_cross,
    check_drawn,
    check_itself,
    check_keys,
    check_lengths,
    check_rows,
    check_state,
    check_steps,
    check_token,
    check_torch_arguments,
    read_own_bias,
    read_own_pattern,
    read_rotary,
)
from qkv.nn.attention_state import Keys, cache_for, type_and_device
from qkv.nn.context import Context
from qkv.nn.projections import Projections, QKNorm, Sizes
from qkv.nn.rotary import Rotary, Rotation
from qkv.nn.rows import Rows
from qkv.nn.torch_masks import CallSizes, read_masks
from qkv.patterns.arguments import one_flag
from qkv.patterns.pattern import Pattern
from qkv.types import AuxOutput, AuxRequest


class MultiheadAttention(Projections):
    """Attention in H heads, from x (B, L, dim) to y (B, L, dim): the projection of softmax(q kᵀ · scale) v.

    dim: width of x, and of y. heads: H. kv_heads: heads of keys and values, G, of which each serves H / G query heads;
        None: H. head_dim: width of a head, D; None: dim / heads. key_dim, value_dim: widths of what keys and values are
        made from, where that is another sequence; None: dim.
    pattern: which keys a query may see; None: all. A layer that decodes needs one that shows no later token, such as
        `causal()`, or beside it a prefix, whose tokens must come in one call. Its positions, and those of tensors in it
        (`documents(ids)`, `mask(keep)`), count real tokens, wherever padding stands.
    bias: added to the scores: what `qkv.attention` takes, or a module whose forward() gives it, as `T5RelativeBias`
        and `AlibiBias` do. It lies beside the layer's weights where it is a module or an nn.Parameter; any other tensor
        moves with the layer but is not saved, and an `alibi` or `relative` value is used as it is; neither is learned.
    rotary: turns q and k by their positions, in self-attention. qk_norm: an RMS norm of q and k before that, over each
        head ("head", weights of width D) or over all at once ("model", widths H·D and G·D), with norm_eps.
    sinks: whether each head has a learned logit without a value. scale: of the scores, 1/√D by default. softcap: bounds
        them.
    attention_dropout: the share of weights to drop in training; torch.manual_seed reproduces it.
    projection_bias: whether q, k and v have biases. output_bias: whether the output has one; None: as these.

    `attend` is what layers and models call; calling the layer itself follows torch.nn.MultiheadAttention, whose
    state_dict `load_state_dict` takes too. Its add_zero_attn=True is `sinks=True`, whose logits start at 0: a key of
    zeros has score 0, and a value of zeros adds nothing; no tensor tells of it, so that torch's names bring sinks 0.
    Its add_bias_kv has no equal here.

    First values: the weights of each projection by Glorot's uniform rule, ±√(6 / (inputs + outputs)), biases and sinks
    0, norms 1. That is how torch starts q, k and v that have weights of their own. Where it packs the three, it takes
    their sizes together and starts each √2 smaller (https://github.com/pytorch/pytorch/issues/166378); ours do not
    depend on how they are kept. Source: Glorot, Bengio, "Understanding the difficulty of training deep feedforward
    neural networks" (2010), equation 16; the layer is of Vaswani et al., "Attention is all you need" (2017), 3.2.2.

    >>> from qkv.patterns import causal
    >>> layer = MultiheadAttention(16, 4, kv_heads=2, pattern=causal()).eval()
    >>> x = torch.randn(1, 5, 16)
    >>> y, _ = layer(x)
    >>> state = layer.initial_state(batch=1, max_length=5)
    >>> steps = [layer.step(x[:, t], state)[0] for t in range(5)]
    >>> torch.allclose(torch.stack(steps, 1), y, atol=1e-6)
    True
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        *,
        kv_heads: int | None = None,
        head_dim: int | None = None,
        key_dim: int | None = None,
        value_dim: int | None = None,
        pattern: Pattern | None = None,
        bias: Bias | nn.Module | None = None,
        rotary: Rotary | None = None,
        qk_norm: QKNorm | None = None,
        norm_eps: float = 1e-6,
        sinks: bool = False,
        softcap: float | None = None,
        scale: float | None = None,
        attention_dropout: float = 0.0,
        projection_bias: bool = True,
        output_bias: bool | None = None,
        backend: str = "auto",
    ) -> None:
        projection_bias = one_flag("projection_bias", projection_bias)
        out_bias = projection_bias if output_bias is None else one_flag("output_bias", output_bias)
        sizes = Sizes.read(dim, heads, kv_heads, head_dim, key_dim, value_dim)
        super().__init__(sizes, qk_norm, norm_eps, projection_bias=projection_bias, output_bias=out_bias)
        check_backend(backend)
        self.pattern = read_own_pattern(pattern)
        self.rotary = read_rotary(rotary, self.head_dim)
        self.softcap = read_softcap(softcap)
        self.scale = None if scale is None else read_scale(scale, self.head_dim)
        self.attention_dropout = read_dropout(attention_dropout, None)
        self.backend = backend
        bias = read_own_bias(bias)
        if isinstance(bias, Tensor) and not isinstance(bias, nn.Parameter):
            self.register_buffer("bias", bias, persistent=False)
        else:
            self.bias = bias
        self.sinks = nn.Parameter(torch.zeros(self.heads)) if one_flag("sinks", sinks) else None

    def attend(
        self, x: Tensor, context: Context | None = None, *, state: Cache | None = None, keys: Keys | None = None
    ) -> tuple[Tensor, AuxOutput | None]:
        """The layer over x (B, L, dim): y (B, L, dim), and what `context.aux` asks for.

        Self-attention, or attention over `keys`, which `keys_of` made of another sequence. In rows of padding y has no
        meaning.
        state: what went before, from `initial_state`; the keys and values of x are appended to it, and an error leaves
            it as it was. No gradient reaches keys and values through it, and no dropout acts on them.

        Raises the errors of `qkv.errors`.
        """
        context = Context() if context is None else context
        check_rows("x", x, self.dim, self.q_proj)
        if context.lengths is not None:
            check_lengths(context.lengths, *x.shape[:2])
        if keys is not None:
            check_keys(keys, state)
            check_drawn(None if keys.lengths is None else context.visible(self.pattern), "padded keys")
            query = self.queries(x)
            pattern = context.over(self.pattern, keys.lengths)
            return self._answer(query, keys.key, keys.value, pattern, self._added(context), context)
        check_itself(self.dim, self.key_dim, self.value_dim)
        check_drawn(None if context.lengths is None else context.visible(self.pattern), "padded ones")
        if state is not None:
            check_state(state, x.shape[0], self.attention_dropout if self.training else 0.0)
        query, key, value = self.projected(x, x, x)
        if self.rotary is not None:
            rotation = context.rotation
            if rotation is None:
                rotation = self._rotation(query, context, state)
            query, key = self.rotary.both(query, key, rotation)
        if state is None:
            pattern = context.within(self.pattern, x.shape[1])
            return self._answer(query, key, value, pattern, self._added(context), context)
        pattern, options = context.visible(self.pattern), self._options(self._added(context), context)
        options["lengths"] = context.lengths
        if torch.compiler.is_dynamo_compiling():  # which cannot leave the graph for the cache within a `with`
            return self._out(state.attend(query, key, value, pattern=pattern, **options), context)
        with undoing(state):
            return self._out(state.attend(query, key, value, pattern=pattern, **options), context)

    def keys_of(self, memory: Tensor, value: Tensor | None = None, *, lengths: Sequence[int] | None = None) -> Keys:
        """What `attend` attends over in place of x: keys and values of memory (B, S, key_dim), projected once.

        value: what values are made from, (B, S, value_dim), where that is not the memory as well. lengths: how many of
            the S rows of each sequence are real, on the left; None: all.
        """
        value = memory if value is None else value
        check_cross(self.rotary)
        check_rows("memory", memory, self.key_dim, self.k_proj)
        check_rows("value", value, self.value_dim, self.v_proj)
        check_alike("value", value, "memory", memory, axes=2)
        rows = Rows.padded(lengths, *memory.shape[:2])
        return Keys(self.keys(memory), self.values(value), rows.lengths)

    def forward(
        self,
        query: Tensor,
        key: Tensor | None = None,
        value: Tensor | None = None,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = False,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """What torch.nn.MultiheadAttention(..., batch_first=True) gives for these arguments: (output, weights or None).

        query (B, L, dim), key (B, S, key_dim), value (B, S, value_dim); without the last two the layer attends over the
        query itself. Output (B, L, dim).

        key_padding_mask: (B, S). attn_mask: (L, S) or (B·H, L, S). Where one is bool, True hides; where it is floating
            point, it is added to the scores. is_causal: query i sees keys up to i, with or without a mask. All of them
            hold together, and with the layer's own pattern.
        need_weights: return the weights before dropout, (B, L, S), or (B, H, L, S) unless average_attn_weights. They
            come from the same call, and the output has the same bits.

        Unlike torch's: a query that sees no key gets attention 0, so that its output is the bias of `o_proj`, also
        where weights are asked for, with which torch gives NaN; need_weights is False unless said; weights are those
        before dropout in training too.

        Raises the errors of `qkv.errors`.
        """
        check_rows("query", query, self.dim, self.q_proj)
        check_torch_arguments(query, key, value)
        if key is None or value is None:
            check_itself(self.dim, self.key_dim, self.value_dim)
            key = value = query
        elif key is not query:
            check_cross(self.rotary)
        check_rows("key", key, self.key_dim, self.k_proj)
        check_rows("value", value, self.value_dim, self.v_proj)
        sizes = CallSizes(query.shape[0], self.heads, query.shape[1], key.shape[1])
        masks = read_masks(key_padding_mask, attn_mask, is_causal=is_causal, sizes=sizes)
        weights: Literal["mean", True] = "mean" if average_attn_weights else True
        context = Context(pattern=masks.pattern, aux=AuxRequest(weights=weights) if need_weights else None)
        q, k, v = self.projected(query, key, value)
        if self.rotary is not None:
            rotation = self._rotation(q, context, None)
            q, k = self.rotary.both(q, k, rotation)
        bias = both(self._added(context), masks.bias)
        with masks.quiet():
            y, aux = self._answer(q, k, v, context.visible(self.pattern), bias, context)
        return y, None if aux is None else aux.weights

    def initial_state(
        self,
        batch: int,
        max_length: int,
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> Cache:
        """An empty cache for `batch` sequences of up to max_length tokens.

        A RollingKVCache where the layer's pattern lets keys go within that length, else a KVCache. dtype: of the keys,
        by default that of the layer's weights; under autocast its type. device: by default that of the weights.

        Raises UnsupportedError where the pattern shows a query later tokens, other than those of a prefix or another
        set that all queries share: one by one they would give other results.
        """
        check_steps(self.pattern)
        own_type, place = type_and_device(self.k_proj, self)
        dtype, device = own_type if dtype is None else dtype, place if device is None else device
        return cache_for(self.pattern, batch, self.kv_heads, max_length, self.head_dim, dtype=dtype, device=device)

    @torch.no_grad()
    def step(self, x: Tensor, state: Cache) -> tuple[Tensor, Cache]:
        """One token of every sequence, x (B, dim): (y (B, dim), state), the state advanced in place. No gradients."""
        check_token(x, self.dim)
        y, _ = self.attend(x[:, None], state=state)
        return y[:, 0], state

    def extra_repr(self) -> str:
        """Sizes and choices, for printing."""
        sizes = f"{self.dim}, {self.heads}, kv_heads={self.kv_heads}, head_dim={self.head_dim}"
        return f"{sizes}, pattern={self.pattern}, backend={self.backend!r}"

    def _rotation(self, query: Tensor, context: Context, state: Cache | None) -> Rotation:
        """The angles of rows that stand after those of the state."""
        assert self.rotary is not None
        starts = None if state is None else state.lengths
        positions = Rows(query.shape[0], query.shape[1], context.lengths).positions(starts, query.device)
        return self.rotary.angles(positions, query.dtype)

    def _added(self, context: Context) -> Bias | None:
        """What is added to the scores: the layer's own bias, else that of the pass."""
        if self.bias is None:
            return context.bias
        return self.bias() if isinstance(self.bias, nn.Module) else self.bias

    def _answer(
        self, query: Tensor, key: Tensor, value: Tensor, pattern: Pattern | None, bias: Bias | None, context: Context
    ) -> tuple[Tensor, AuxOutput | None]:
        """One call of `qkv.attention`, and the way back to (B, L, dim)."""
        dropout_p = self.attention_dropout if self.training else 0.0
        out = attention(query, key, value, pattern=pattern, dropout_p=dropout_p, **self._options(bias, context))
        return self._out(out, context)

    def _options(self, bias: Bias | None, context: Context) -> dict[str, Any]:
        """What every call says alike."""
        return {
            "bias": bias,
            "scale": self.scale,
            "softcap": self.softcap,
            "sinks": self.sinks,
            "layout": "BLHD",
            "backend": context.backend or self.backend,
            "return_aux": context.aux,
        }

    def _out(self, out: Any, context: Context) -> tuple[Tensor, AuxOutput | None]:
        """The projection of heads (B, L, H, D), and what came with them."""
        heads, seen = (out, None) if context.aux is None else out
        return self.merged(heads), seen
