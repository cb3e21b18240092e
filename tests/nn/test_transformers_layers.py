"""The layers of published models as transformers runs them: same weights, same outputs, gradients and decoding."""

from __future__ import annotations

import pytest
import torch

from qkv.nn import GatedDeltaNet, KimiDeltaAttention, Mamba2Mixer, Retention

transformers = pytest.importorskip("transformers", reason="needs transformers, which is not installed")

DIM, LENGTH, BATCH = 32, 70, 2  # LENGTH: their chunk of 64, and more
UNIT = 2.0**-24


def close(got, want, times=240):
    """Within so many roundoffs of the greatest number: about four times what two float32 chains of 70 tokens differ."""
    error = (got - want).abs().max().item()
    assert error <= times * UNIT * want.abs().max().item(), error / UNIT / want.abs().max().item()


def qwen3_next():
    from transformers.models.qwen3_next import modeling_qwen3_next as their

    config = transformers.Qwen3NextConfig(
        hidden_size=DIM, num_hidden_layers=1, layer_types=["linear_attention"], linear_num_key_heads=2,
        linear_num_value_heads=4, linear_key_head_dim=8, linear_value_head_dim=12,
    )  # fmt: skip
    ours = GatedDeltaNet(DIM, 4, key_heads=2, head_k_dim=8, head_v_dim=12)
    return config, their.Qwen3NextGatedDeltaNet(config, 0), ours


def qwen3_5():
    from transformers.models.qwen3_5 import modeling_qwen3_5 as their

    config = transformers.Qwen3_5TextConfig(
        hidden_size=DIM, num_hidden_layers=1, layer_types=["linear_attention"], linear_num_key_heads=2,
        linear_num_value_heads=4, linear_key_head_dim=8, linear_value_head_dim=12,
    )  # fmt: skip
    ours = GatedDeltaNet(DIM, 4, key_heads=2, head_k_dim=8, head_v_dim=12)
    return config, their.Qwen3_5GatedDeltaNet(config, 0), ours


def olmo_hybrid():
    from transformers.models.olmo_hybrid import modeling_olmo_hybrid as their

    config = transformers.OlmoHybridConfig(
        hidden_size=DIM, num_hidden_layers=2, layer_types=["linear_attention", "full_attention"],
        num_attention_heads=4, linear_num_key_heads=4, linear_num_value_heads=4, linear_key_head_dim=6,
        linear_value_head_dim=12, linear_allow_neg_eigval=True,
    )  # fmt: skip
    ours = GatedDeltaNet(DIM, 4, head_k_dim=6, head_v_dim=12, allow_neg_eigval=True, eps=1e-5)
    return config, their.OlmoHybridGatedDeltaNet(config, 0), ours


def kimi_linear():
    from transformers.models.kimi_linear import modeling_kimi_linear as their

    config = transformers.KimiLinearConfig(
        hidden_size=DIM, num_hidden_layers=1, layer_types=["linear_attention"], linear_head_dim=8, linear_num_heads=3,
    )  # fmt: skip
    return config, their.KimiLinearDeltaAttention(config, 0), KimiDeltaAttention(DIM, 3, head_dim=8)


def glm5_next():
    from transformers.models.glm5_next import modeling_glm5_next as their

    config = transformers.Glm5NextTextConfig(
        hidden_size=DIM, num_hidden_layers=1, layer_types=["linear_attention"], linear_head_dim=8, linear_num_heads=3,
    )  # fmt: skip
    ours = KimiDeltaAttention(DIM, 3, head_dim=8, gate_lower_bound=-5.0)
    return config, their.Glm5NextTextLinearAttention(config, 0), ours


def mamba2():
    from transformers.models.mamba2 import modeling_mamba2 as their

    config = transformers.Mamba2Config(
        hidden_size=DIM, num_hidden_layers=1, num_heads=8, head_dim=8, state_size=10, n_groups=2, chunk_size=32,
    )  # fmt: skip
    return config, their.Mamba2Mixer(config, 0), Mamba2Mixer(DIM, 8, state_size=10, n_groups=2)


def minimax():
    from transformers.models.minimax import modeling_minimax as their

    config = transformers.MiniMaxConfig(
        hidden_size=DIM, num_hidden_layers=4, num_attention_heads=4, head_dim=6, block_size=16,
        layer_types=["linear_attention", "full_attention"] * 2,
    )  # fmt: skip
    ours = Retention.lightning(DIM, 4, layer=2, layers=4, head_dim=6)
    return config, their.MiniMaxLightningAttention(config, 2), ours


MODELS = [qwen3_next, qwen3_5, olmo_hybrid, kimi_linear, glm5_next, mamba2, minimax]
# Those whose state_dict loads as it is, and the one that keeps its own kind of cache.
DIRECT = {qwen3_5, kimi_linear, mamba2}
models = pytest.mark.parametrize("model", MODELS, ids=lambda model: model.__name__)


def made(model):
    """Their layer and ours with the same lively weights, their configuration, and an input."""
    torch.manual_seed(0)
    config, theirs, ours = model()
    for parameter in theirs.parameters():
        wide = parameter.ndim > 1 and parameter.shape[-1] > 1
        torch.nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5 if wide else 0.3)
        parameter.data += 0 if wide else 0.2
    tensors = theirs.state_dict()
    ours.load_state_dict(tensors if model in DIRECT else ours.from_checkpoint(tensors))
    return config, theirs.train(mode=False), ours, torch.randn(BATCH, LENGTH, DIM)


def called(model, layer, x, cache=None):
    """One call of their layer."""
    if model is minimax:
        return layer(x, position_embeddings=None, attention_mask=None, cache=cache)[0]
    return layer(x, cache=cache)


def cache_of(model, config):
    if model is minimax:
        from transformers.models.minimax.modeling_minimax import MiniMaxCache

        return MiniMaxCache()
    return transformers.DynamicCache(config=config)


@models
def test_outputs_and_gradients_agree(model):
    _, theirs, ours, x = made(model)
    x.requires_grad_()
    seed = torch.randn(BATCH, LENGTH, DIM)
    got, want = ours(x), called(model, theirs, x)
    close(got, want)
    (got * seed).sum().backward()
    grad, x.grad = x.grad, None
    (want * seed).sum().backward()
    close(grad, x.grad)
    # Gradients under our names: theirs go the way of the weights.
    gradients = {name: parameter.grad for name, parameter in theirs.named_parameters()}
    gradients = ours.from_checkpoint(gradients)
    assert set(gradients) == {name for name, _ in ours.named_parameters()}
    for name, parameter in ours.named_parameters():
        close(parameter.grad, gradients[name], times=4500 if model is glm5_next else 700)  # a bound on g cancels more


@models
@torch.no_grad()
def test_decoding_agrees_with_their_cache(model):
    config, theirs, ours, x = made(model)
    cache, state = cache_of(model, config), ours.initial_state(BATCH)
    close(ours(x[:, :50], state)[0], called(model, theirs, x[:, :50], cache))
    for t in range(50, LENGTH):
        close(ours.step(x[:, t], state)[0], called(model, theirs, x[:, t : t + 1], cache)[:, 0])
    close(state.recurrent.state, their_state(model, cache), times=20)


def their_state(model, cache):
    """The recurrent state (B, H, D, V) in their cache."""
    if model is minimax:
        return cache.get_linear_cache(2)
    states = cache.layers[0].recurrent_states[0]
    return states.mT if model is mamba2 else states
