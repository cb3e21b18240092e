"""What the attention layer refuses: each error has three parts and comes before any work."""

from __future__ import annotations

import pytest
import torch

import qkv
from qkv.errors import DTypeError, MaskError, ShapeError, UnknownName, UnsupportedError, ValueOutOfRange
from qkv.nn.context import Context
from qkv.nn.multihead_attention import MultiheadAttention
from qkv.nn.rotary import Rotary

DIM, HEADS, B, L, S = 12, 3, 2, 5, 7
X, MEMORY = torch.zeros(B, L, DIM), torch.zeros(B, S, DIM)


def refused(error, text, call):
    with pytest.raises(error, match=text) as caught:
        call()
    assert str(caught.value).count("; ") >= 2, str(caught.value)


@pytest.mark.parametrize(
    "sizes, options, error, text",
    [
        ((12, 5), {}, ShapeError, "`dim` must be divisible by `heads`; got dim 12 and heads 5"),
        ((12, 0), {}, ValueOutOfRange, "`heads` must be at least 1"),
        ((12.0, 3), {}, DTypeError, "`dim` must be an int"),
        ((12, 3), {"kv_heads": 2}, ShapeError, "`heads` must be a multiple of `kv_heads`; got heads=3 and kv_heads=2"),
        ((12, 3), {"head_dim": 0}, ValueOutOfRange, "`head_dim`"),
        ((12, 3), {"key_dim": -1}, ValueOutOfRange, "`key_dim`"),
        ((12, 3), {"value_dim": "8"}, DTypeError, "`value_dim`"),
        (
            (12, 3),
            {"pattern": "causal()"},
            DTypeError,
            r"`pattern` must be a Pattern or None; got the text 'causal\(\)'",
        ),
        ((12, 3), {"bias": True}, DTypeError, "`bias` must be a tensor.*; got True; say projection_bias"),
        ((12, 3), {"bias": [0.5]}, DTypeError, r"`bias` must be a tensor.*; got \[0.5\]; make one"),
        ((12, 3), {"rotary": True}, DTypeError, r"`rotary` must be a Rotary or None; got True; say rotary=Rotary\(4\)"),
        ((12, 3), {"rotary": Rotary(8)}, ShapeError, "heads of width D = 4; got one for 8"),
        ((12, 3), {"qk_norm": "heads"}, UnknownName, "did you mean 'head'"),
        ((12, 3), {"softcap": 0.0}, ValueOutOfRange, "`softcap`"),
        ((12, 3), {"scale": float("nan")}, ValueOutOfRange, "`scale`"),
        ((12, 3), {"attention_dropout": 1.0}, ValueOutOfRange, "dropout"),
        ((12, 3), {"backend": "cuda"}, UnknownName, "`backend` must be one of"),
    ],
)
def test_a_layer_that_cannot_be(sizes, options, error, text):
    refused(error, text, lambda: MultiheadAttention(*sizes, **options))


@pytest.mark.parametrize(
    "x, error, text",
    [
        (None, DTypeError, "`x` must be a tensor; got NoneType"),
        (X[0], ShapeError, r"`x` must be \(B, L, 12\); got \[5, 12\] float32 cpu; a single sequence is x\[None\]"),
        (X[..., :8], ShapeError, r"`x` must be \(B, L, 12\); got \[2, 5, 8\]"),
        (
            X.double(),
            DTypeError,
            r"`x` must have the type of the layer's weights, float32; got .* float64 cpu; cast it",
        ),
    ],
)
def test_rows_that_do_not_fit(x, error, text):
    refused(error, text, lambda: MultiheadAttention(DIM, HEADS).attend(x))


def test_a_state_that_does_not_fit():
    layer = MultiheadAttention(DIM, HEADS, pattern=qkv.causal(), attention_dropout=0.5).eval()
    state = layer.initial_state(B, L)
    other = MultiheadAttention(DIM, HEADS, kv_heads=1, pattern=qkv.causal()).initial_state(B, L)
    keys = layer.keys_of(MEMORY)
    refused(ValueOutOfRange, "`state` or `keys`, not both; got both", lambda: layer.attend(X, state=state, keys=keys))
    refused(ShapeError, "got a state of 2 and a call of 1", lambda: layer.attend(X[:1], state=state))
    refused(ShapeError, "sizes of the cache; got G = 3, not 1", lambda: layer.attend(X, state=other))
    refused(DTypeError, "`state` must be a cache; got list", lambda: layer.attend(X, state=[]))
    refused(DTypeError, "`keys` must be Keys; got Tensor", lambda: layer.attend(X, keys=MEMORY))
    refused(
        DTypeError, "the cache's dtype", lambda: layer.attend(X, state=layer.initial_state(B, L, dtype=torch.float64))
    )
    refused(ShapeError, r"one token of each sequence, \(B, 12\); got \[2, 5, 12\]", lambda: layer.step(X, state))
    refused(ShapeError, "one token of each sequence", lambda: layer.step(None, state))
    layer.train()
    refused(
        UnsupportedError,
        r"without dropout.*; got 0.5 in training; call \.eval\(\)",
        lambda: layer.attend(X, state=state),
    )
    assert state.lengths == (0, 0)
    refused(ValueOutOfRange, "max_length", lambda: layer.initial_state(B, 0))
    refused(ValueOutOfRange, "batch", lambda: layer.initial_state(-1, 5))


@pytest.mark.parametrize("lengths", [(3,), (3, 6), (-1, 2)])
def test_lengths_that_do_not_fit(lengths):
    layer = MultiheadAttention(DIM, HEADS)
    refused(
        ShapeError, r"`lengths` of the context must be 2 numbers in 0 \.\. 5", lambda: layer.attend(X, Context(lengths))
    )


def test_keys_that_do_not_fit():
    layer = MultiheadAttention(DIM, HEADS, key_dim=8)
    memory = MEMORY[..., :8]
    refused(ShapeError, "read keys from x; got key_dim=8 and value_dim=12 for dim=12", lambda: layer.attend(X))
    refused(ShapeError, "read keys from x", lambda: layer(X))
    refused(ShapeError, r"`memory` must be \(B, L, 8\)", lambda: layer.keys_of(MEMORY))
    refused(ShapeError, r"`value` must be \(B, L, 12\)", lambda: layer.keys_of(memory))
    refused(ShapeError, "`value` and `memory` must have the same B and S", lambda: layer.keys_of(memory, MEMORY[:, 1:]))
    refused(ValueOutOfRange, "`lengths`", lambda: layer.keys_of(memory, MEMORY, lengths=(8, 1)))
    refused(ShapeError, "same batch size B", lambda: layer.attend(X[:1], keys=layer.keys_of(memory, MEMORY)))
    turning = MultiheadAttention(DIM, HEADS, rotary=Rotary(4))
    for call in (lambda: turning.keys_of(MEMORY), lambda: turning(X, MEMORY, MEMORY)):
        refused(UnsupportedError, "without rotary positions", call)


@pytest.mark.parametrize(
    "tensors, masks, error, text",
    [
        ((MEMORY,), {}, ShapeError, "given together, or neither; got `key` alone"),
        ((None, MEMORY), {}, ShapeError, "given together, or neither; got `value` alone"),
        ((MEMORY[:1], MEMORY[:1]), {}, ShapeError, "`key` and `query` must have the same B;"),
        ((MEMORY, MEMORY[:, 1:]), {}, ShapeError, "`value` and `key` must have the same B and S"),
        ((MEMORY[..., 1:], MEMORY), {}, ShapeError, r"`key` must be \(B, L, 12\)"),
        ((), {"key_padding_mask": torch.zeros(B, L, dtype=torch.int64)}, MaskError, "`key_padding_mask` must be bool"),
        (
            (),
            {"attn_mask": torch.zeros(L, L, dtype=torch.uint8)},
            MaskError,
            r"`attn_mask` must be bool.*attn_mask\.bool\(\)",
        ),
        ((), {"attn_mask": [[False]]}, DTypeError, "`attn_mask` must be a torch.Tensor"),
        (
            (),
            {"attn_mask": torch.zeros(L, S, dtype=torch.bool)},
            ShapeError,
            r"\(L, S\) = \(5, 5\) or \(B·H, L, S\) = \(6, 5, 5\)",
        ),
        ((), {"attn_mask": torch.zeros(HEADS, L, L)}, ShapeError, r"`attn_mask` must be .*; got \[3, 5, 5\]"),
        ((), {"key_padding_mask": torch.zeros(L, B)}, ShapeError, r"`key_padding_mask` must be \(B, S\) = \(2, 5\)"),
    ],
)
def test_arguments_of_torch_that_do_not_fit(tensors, masks, error, text):
    refused(error, text, lambda: MultiheadAttention(DIM, HEADS)(X, *tensors, **masks))


def test_a_mask_that_is_added_beside_a_bias_without_numbers_of_its_own():
    layer = MultiheadAttention(DIM, HEADS, bias=qkv.alibi([0.5, 0.2, 0.1]))
    refused(UnsupportedError, "beside alibi.*; pass a bool mask", lambda: layer(X, attn_mask=torch.zeros(L, L)))


DRAWN = [qkv.patterns.bigbird(3, 1, 2, 7, block_size=2), qkv.patterns.random_blocks(1, 2, 0, ahead=True)]


@pytest.mark.parametrize("pattern", [*DRAWN, *(qkv.causal() & pattern for pattern in DRAWN)], ids=str)
def test_a_pattern_that_is_drawn_by_the_length_of_a_call_beside_padding(pattern):
    layer, x = MultiheadAttention(DIM, HEADS, pattern=pattern).eval(), torch.randn(B, L, DIM)
    text = "draws among all keys of a call.*, not {}; got .*; leave padding out, or"
    padded = Context((L, 2))
    refused(UnsupportedError, text.format("padded ones"), lambda: layer.attend(x, padded))
    passing = Context((L, 2), pattern=pattern)
    refused(UnsupportedError, text.format("padded ones"), lambda: MultiheadAttention(DIM, HEADS).attend(x, passing))
    keys = layer.keys_of(MEMORY, lengths=(S, 2))
    refused(UnsupportedError, text.format("padded keys"), lambda: layer.attend(x, keys=keys))
    layer.attend(x, Context())
    layer.attend(x, padded, keys=layer.keys_of(x))  # the keys alone count
    looking = MultiheadAttention(DIM, HEADS, pattern=qkv.causal() & pattern)
    refused(UnsupportedError, text.format("one that grows"), lambda: looking.initial_state(B, L))


@pytest.mark.parametrize("name", ["sinks", "projection_bias", "output_bias"])
def test_choices_are_true_or_false(name):
    for value in ("yes", 1, *([None] if name != "output_bias" else [])):
        options = {name: value}
        with pytest.raises(DTypeError, match=rf"`{name}` must be True or False; got .*; pass a bool"):
            MultiheadAttention(DIM, HEADS, **options)


def test_a_bias_that_would_be_learned_and_is_no_parameter():
    tensor = torch.zeros(HEADS, L, L, requires_grad=True)
    table, slopes = torch.nn.Parameter(torch.zeros(HEADS, 9)), torch.ones(HEADS, requires_grad=True)
    for bias in (tensor, 2 * tensor, qkv.relative(table), qkv.alibi(slopes)):
        refused(
            UnsupportedError,
            r"a `bias` that is learned must be a parameter or a module.*; got .* requires a gradient; give nn\.Par",
            lambda bias=bias: MultiheadAttention(DIM, HEADS, bias=bias),
        )
    for bias in (tensor.detach()[None], qkv.relative(table.detach()), torch.nn.Parameter(tensor[None])):
        MultiheadAttention(DIM, HEADS, bias=bias)(X)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_rows_that_are_not_dense():
    rows = [torch.zeros(3, DIM), torch.zeros(L, DIM)]
    for layout in (torch.strided, torch.jagged):
        nested = torch.nested.nested_tensor(rows, layout=layout)
        refused(
            UnsupportedError,
            "`query` must be a dense tensor; .*nested",
            lambda x=nested: MultiheadAttention(DIM, HEADS)(x),
        )
    sparse = X.to_sparse()
    refused(
        UnsupportedError, "`x` must be a dense tensor; .*sparse", lambda: MultiheadAttention(DIM, HEADS).attend(sparse)
    )
