"""Rotary positions against float64 formulas written out here and against transformers; properties; refusals."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck

import qkv.nn.rotary
from qkv.errors import CheckpointError, DTypeError, QkvError, ShapeError, UnknownName, UnsupportedError, ValueOutOfRange
from qkv.nn import LinearScaling, Llama3Scaling, NtkScaling, Rotary, YarnScaling

ROUNDOFF = {torch.float64: 2.0**-53, torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
FAR = dict.fromkeys(ROUNDOFF, 4) | {torch.float64: 10**6}  # an angle of a million radians is rounded too
FORMS = pytest.mark.parametrize(
    "options",
    [{}, {"interleaved": True}, {"width": 6}, {"width": 6, "interleaved": True}, {"width": 2, "base": 500.0}],
    ids=["halves", "pairs", "partial", "partial-pairs", "two"],
)
SCALINGS = (
    LinearScaling(4.0),
    NtkScaling(8.0),
    Llama3Scaling(8.0, 1.0, 4.0, 64),
    YarnScaling(4.0, 64),
    YarnScaling(16.0, 100, beta_fast=8.0, beta_slow=2.0, truncate=False, attention_factor=0.7),
    YarnScaling(40.0, 50, mscale=0.7, mscale_all_dim=1.3),
)
# Small numbers take few calls, large ones few passes; with 0 and 16 every size takes the second, in several blocks.
SIZES = pytest.mark.parametrize(
    "limits", [None, (0, 16), (0, 1 << 18)], ids=["calls", "blocks", "block"], indirect=True
)


@pytest.fixture
def limits(request, monkeypatch):
    if request.param is not None:
        monkeypatch.setattr(qkv.nn.rotary, "SMALL", request.param[0])
        monkeypatch.setattr(qkv.nn.rotary, "BLOCK", request.param[1])


def normal(*shape, dtype=torch.float64, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape)), dtype=torch.float64).to(dtype)


def angle_of(m, base, width, scaling):
    """Radians a token of pair m, by the papers' formulas, one number at a time."""
    f = base ** (-2 * m / width)
    if isinstance(scaling, LinearScaling):
        return f / scaling.factor
    if isinstance(scaling, NtkScaling):
        return (base * scaling.factor ** (width / (width - 2))) ** (-2 * m / width)
    if isinstance(scaling, Llama3Scaling):
        wavelength = 2 * math.pi / f
        if wavelength < scaling.original_length / scaling.high_factor:
            return f
        if wavelength > scaling.original_length / scaling.low_factor:
            return f / scaling.factor
        s = scaling.original_length / wavelength - scaling.low_factor
        s /= scaling.high_factor - scaling.low_factor
        return (1 - s) * f / scaling.factor + s * f
    if isinstance(scaling, YarnScaling):

        def index(turns):
            return width * math.log(scaling.original_length / (2 * math.pi * turns)) / (2 * math.log(base))

        low, high = index(scaling.beta_fast), index(scaling.beta_slow)
        low, high = (math.floor(low), math.ceil(high)) if scaling.truncate else (low, high)
        low, high = max(low, 0), min(high, width - 1)
        share = min(max((m - low) / (high - low), 0.0), 1.0)
        return share * f / scaling.factor + (1 - share) * f
    return f


def growth_of(scaling):
    if not isinstance(scaling, YarnScaling):
        return 1.0
    if scaling.attention_factor is not None:
        return scaling.attention_factor
    if scaling.mscale is not None:
        return (0.1 * scaling.mscale * math.log(scaling.factor) + 1) / (
            0.1 * scaling.mscale_all_dim * math.log(scaling.factor) + 1
        )
    return 0.1 * math.log(scaling.factor) + 1


def exact(x, positions, *, base=10000.0, width=None, interleaved=False, scaling=None):
    """Pair by pair in float64: x (B, L, H, D), positions (L,) or (B, L)."""
    x = x.double()
    width = x.shape[-1] if width is None else width
    y = x.clone()
    where = positions.expand(x.shape[:2]).double()[..., None]
    for m in range(width // 2):
        a, b = (2 * m, 2 * m + 1) if interleaved else (m, m + width // 2)
        angle = where * angle_of(m, base, width, scaling)
        cos, sin = (part * growth_of(scaling) for part in (angle.cos(), angle.sin()))
        y[..., a] = x[..., a] * cos - x[..., b] * sin
        y[..., b] = x[..., b] * cos + x[..., a] * sin
    return y


def turn(rotary, x, positions):
    return rotary(x, rotary.angles(positions, x.dtype))


def check(got, want, dtype, times=4):
    assert got.dtype == dtype
    error = (got.double() - want).abs().max().item()
    assert error <= times * ROUNDOFF[dtype] * want.abs().max().item(), error


@FORMS
@SIZES
@pytest.mark.parametrize("dtype", ROUNDOFF, ids=str)
@pytest.mark.usefixtures("limits")
def test_turns_by_the_formula(options, dtype):
    x = normal(2, 9, 3, 8, dtype=dtype)
    for positions in (torch.arange(5, 14), torch.randint(0, 10**6, (2, 9), dtype=torch.int32)):
        check(turn(Rotary(8, **options), x, positions), exact(x, positions, **options), dtype, times=FAR[dtype])


@SIZES
@pytest.mark.parametrize("scaling", SCALINGS, ids=lambda s: type(s).__name__)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.usefixtures("limits")
def test_scalings_follow_their_papers(scaling, interleaved):
    x, positions = normal(1, 7, 2, 64), torch.tensor([0, 1, 2, 63, 64, 1000, 10**6])
    options = {"scaling": scaling, "interleaved": interleaved, "width": 48}
    check(
        turn(Rotary(64, **options), x, positions),
        exact(x, positions, **options),
        torch.float64,
        times=FAR[torch.float64],
    )


def test_of_frequencies_some_stay_and_some_are_divided():
    for scaling in SCALINGS[2:5]:
        ratio = torch.tensor(Rotary(64).frequencies / Rotary(64, scaling=scaling).frequencies)
        assert ratio[0] == 1 and math.isclose(ratio[-1], scaling.factor)
        assert bool(((ratio > 1.01) & (ratio < scaling.factor - 0.01)).any())
    ratio = Rotary(64).frequencies / Rotary(64, scaling=NtkScaling(8.0)).frequencies
    assert ratio[0] == 1 and math.isclose(ratio[-1], 8.0)


def test_a_line_whose_ends_fall_together_is_a_step():
    """The range of YaRN is empty where both ends are cut off at 0."""
    made = Rotary(16, scaling=YarnScaling(4.0, 6)).frequencies * 4
    assert made[0] == 4 and torch.allclose(torch.tensor(made[1:]), torch.tensor(Rotary(16).frequencies[1:]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_angles_hold_at_a_million(dtype):
    """Computed in float32 they would be wrong by 0.03 there."""
    x = torch.ones(1, 1, 1, 64, dtype=dtype)
    positions = torch.tensor([10**6])
    check(turn(Rotary(64), x, positions), exact(x, positions), dtype)
    wrong = torch.tensor(1e6) * torch.tensor(Rotary(64).frequencies, dtype=torch.float32)
    right = torch.tensor(1e6 * Rotary(64).frequencies)
    assert (wrong.double().cos() - right.cos()).abs().max() > 1e-3


@FORMS
@pytest.mark.parametrize("scaling", [None, YarnScaling(4.0, 64)])
def test_scores_depend_on_distance_alone(options, scaling):
    if options.get("width") == 2 and scaling is not None:
        scaling = LinearScaling(3.0)
    rotary = Rotary(8, scaling=scaling, **options)
    q, k = normal(1, 1, 1, 8).expand(1, 20, 1, 8), normal(1, 1, 1, 8, seed=1).expand(1, 20, 1, 8)
    scores = []
    for shift in (0, 1, 777, 100_000):
        positions = torch.arange(20) + shift
        scores.append(torch.einsum("blhd,bshd->bhls", turn(rotary, q, positions), turn(rotary, k, positions)))
    for other in scores[1:]:
        assert torch.allclose(scores[0], other, atol=1e-9)
    one = scores[0][0, 0]
    for distance in (-7, 0, 3):
        diagonal = one.diagonal(distance)
        assert torch.allclose(diagonal, diagonal[:1], atol=1e-12)
    assert not torch.allclose(one[0, 3], one[0, 5], atol=1e-3)


@FORMS
def test_lengths_stay(options):
    x = normal(2, 9, 3, 8)
    assert torch.allclose(turn(Rotary(8, **options), x, torch.arange(9)).norm(dim=-1), x.norm(dim=-1))


@FORMS
@SIZES
@pytest.mark.usefixtures("limits")
def test_strided_tensors_turn_as_their_copies(options):
    rotary, positions = Rotary(8, **options), torch.arange(9)
    wide = normal(2, 9, 5 * 8 + 3, dtype=torch.float32)
    for x in (
        wide[..., 3:].unflatten(-1, (5, 8))[:, :, 1:4],  # a part of a joined projection, from an odd place on
        normal(2, 3, 9, 8, dtype=torch.float32).transpose(1, 2),  # heads before tokens
        normal(2, 9, 3, 16, dtype=torch.float32)[..., ::2],
        normal(1, 9, 1, 8, dtype=torch.float32).expand(2, 9, 3, 8),
    ):
        got = turn(rotary, x, positions)
        check(got, exact(x, positions, **options), torch.float32)
        assert torch.allclose(got, turn(rotary, x.contiguous(), positions), rtol=0, atol=1e-6)


@pytest.mark.parametrize("width", [None, 40])
def test_halves_have_the_same_bits_in_any_length(width, monkeypatch):
    """A decoded token turns as it does in a whole pass."""
    rotary, x = Rotary(64, width=width), normal(2, 300, 5, 64, dtype=torch.float32)
    positions = torch.arange(300)
    assert x.numel() > qkv.nn.rotary.SMALL
    whole = turn(rotary, x, positions)
    for i in (0, 1, 150, 299):
        assert torch.equal(whole[:, i : i + 1], turn(rotary, x[:, i : i + 1], positions[i : i + 1]))
    monkeypatch.setattr(qkv.nn.rotary, "BLOCK", 5000)
    assert torch.equal(whole, turn(rotary, x, positions))


def test_rows_of_a_batch_may_stand_elsewhere():
    rotary, x = Rotary(8), normal(2, 5, 3, 8)
    positions = torch.stack((torch.arange(5), torch.arange(5) + 17))
    got = turn(rotary, x, positions)
    for row in (0, 1):
        assert torch.equal(got[row : row + 1], turn(rotary, x[row : row + 1], positions[row]))


@FORMS
@SIZES
@pytest.mark.usefixtures("limits")
def test_gradients(options):
    x = normal(2, 5, 2, 8).requires_grad_()
    rotary = Rotary(8, scaling=LinearScaling(2.0), **options)
    rotation = rotary.angles(torch.arange(5) + 3, x.dtype)
    assert gradcheck(lambda x: rotary(x, rotation), x)
    assert gradgradcheck(lambda x: rotary(x, rotation), x)
    grad = normal(2, 5, 2, 8, seed=1)
    (got,) = torch.autograd.grad(rotary(x, rotation), x, grad)
    (want,) = torch.autograd.grad(exact(x, torch.arange(5) + 3, scaling=LinearScaling(2.0), **options), x, grad)
    check(got, want, torch.float64)
    grad.requires_grad_()
    (got,) = torch.autograd.grad(rotary(x, rotation), x, grad, create_graph=True)
    check(got.detach(), want, torch.float64)
    (back,) = torch.autograd.grad(got, grad, x.detach())
    check(back, rotary(x, rotation).detach(), torch.float64)


@FORMS
@SIZES
@pytest.mark.usefixtures("limits")
def test_gradients_of_16_bits(options):
    x, grad = (normal(2, 5, 2, 8, dtype=torch.bfloat16, seed=seed) for seed in (0, 1))
    rotary, positions = Rotary(8, **options), torch.arange(5)
    x.requires_grad_()
    (got,) = torch.autograd.grad(turn(rotary, x, positions), x, grad)
    wide = x.detach().double().requires_grad_()
    (want,) = torch.autograd.grad(exact(wide, positions, **options), wide, grad.double())
    check(got, want, torch.bfloat16)


@SIZES
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.usefixtures("limits")
def test_forward_mode_and_vmap(interleaved):
    rotary, x, tangent = Rotary(8, interleaved=interleaved), normal(2, 5, 2, 8), normal(2, 5, 2, 8, seed=1)
    rotation = rotary.angles(torch.arange(5), x.dtype)
    _, got = torch.func.jvp(lambda x: rotary(x, rotation), (x,), (tangent,))
    assert torch.allclose(got, rotary(tangent, rotation))
    with torch.autograd.forward_ad.dual_level():
        dual = rotary(torch.autograd.forward_ad.make_dual(x, tangent), rotation)
        assert torch.allclose(torch.autograd.forward_ad.unpack_dual(dual).tangent, rotary(tangent, rotation))
    mapped = torch.vmap(lambda x: rotary(x[None], rotation)[0])(x)
    assert torch.allclose(mapped, rotary(x, rotation))


def test_compiles_without_a_break():
    rotary = Rotary(8, scaling=YarnScaling(4.0, 64))
    compiled = torch.compile(lambda x, p: turn(rotary, x, p), fullgraph=True, backend="eager")
    x, positions = normal(2, 5, 3, 8), torch.arange(5)
    assert torch.equal(compiled(x, positions), turn(rotary, x, positions))


def test_query_and_key_in_one_go():
    for heads, length in ((9, 1), (9, 400)):
        for interleaved in (False, True):
            rotary = Rotary(64, interleaved=interleaved)
            q, k = normal(2, length, heads, 64, dtype=torch.float32), normal(2, length, 3, 64, dtype=torch.float32)
            rotation = rotary.angles(torch.arange(length), q.dtype)
            got = rotary.both(q, k, rotation)
            assert torch.equal(got[0], rotary(q, rotation)) and torch.equal(got[1], rotary(k, rotation))


@pytest.mark.parametrize("shape", [(0, 5, 3, 8), (2, 0, 3, 8)])
def test_nothing_turns_to_nothing(shape):
    x = torch.zeros(shape)
    assert turn(Rotary(8), x, torch.arange(shape[1])).shape == shape


def test_hidden_content_stays_in_its_token():
    x = normal(1, 4, 2, 8)
    x[0, 2] = math.nan
    x[0, 1, 0, 7] = math.inf
    y = turn(Rotary(8, width=6), x, torch.arange(4))
    assert bool(y[0, [0, 3]].isfinite().all()) and bool(y[0, 1, :, :7].isfinite().all())


def test_has_neither_parameters_nor_buffers_and_is_made_on_the_meta_device():
    with torch.device("meta"):
        rotary = Rotary(8, scaling=LinearScaling(2.0))
    assert not list(rotary.parameters()) and not list(rotary.buffers()) and not rotary.state_dict()
    x = normal(1, 3, 2, 8)
    assert torch.equal(turn(rotary, x, torch.arange(3)), turn(copy.deepcopy(rotary), x, torch.arange(3)))
    meta = torch.device("meta")
    assert turn(rotary, x.to(meta), torch.arange(3, device=meta)).shape == x.shape


def test_prints_what_it_is():
    assert str(Rotary(64)) == "Rotary(64, base=10000.0)"
    assert str(Rotary(64, width=16, interleaved=True)) == "Rotary(64, base=10000.0, width=16, interleaved=True)"
    assert "LinearScaling(factor=4.0)" in str(Rotary(64, scaling=LinearScaling(4.0)))


# transformers


def llama_config(head_dim, rope, **others):
    transformers = pytest.importorskip("transformers")
    return transformers.LlamaConfig(
        hidden_size=4 * head_dim,
        num_attention_heads=4,
        head_dim=head_dim,
        max_position_embeddings=others.pop("max_position_embeddings", 4096),
        rope_parameters=rope,
        **others,
    )


ROPES = (
    {"rope_type": "default", "rope_theta": 5e5},
    {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0},
    {
        "rope_type": "llama3",
        "rope_theta": 5e5,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 512,
    },
    {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 1024},
    {
        "rope_type": "yarn",
        "rope_theta": 1e6,
        "factor": 2.0,
        "original_max_position_embeddings": 2048,
        "beta_fast": 16.0,
        "beta_slow": 2.0,
        "attention_factor": 1.3,
        "truncate": False,
    },
    {
        "rope_type": "yarn",
        "rope_theta": 1e4,
        "factor": 8.0,
        "original_max_position_embeddings": 512,
        "mscale": 0.707,
        "mscale_all_dim": 1.2,
    },
)


@pytest.mark.parametrize("rope", ROPES, ids=lambda rope: rope["rope_type"])
@pytest.mark.parametrize("head_dim", [16, 64, 80])
def test_frequencies_of_transformers(rope, head_dim):
    config = llama_config(head_dim, dict(rope))
    llama = pytest.importorskip("transformers.models.llama.modeling_llama")
    theirs = llama.LlamaRotaryEmbedding(config)
    for fields in (config.to_dict(), {"rope_scaling": rope, "rope_theta": rope["rope_theta"]}):
        ours = Rotary.from_config(fields, head_dim)
        assert torch.allclose(torch.tensor(ours.frequencies), theirs.inv_freq.double(), rtol=3e-6, atol=0)
        assert math.isclose(ours.amplitude, theirs.attention_scaling)


@pytest.mark.parametrize("rope", ROPES, ids=lambda rope: rope["rope_type"])
def test_llama_of_transformers(rope):
    llama = pytest.importorskip("transformers.models.llama.modeling_llama")
    config = llama_config(64, dict(rope))
    q, k = normal(2, 40, 4, 64, dtype=torch.float32), normal(2, 40, 2, 64, dtype=torch.float32)
    positions = torch.stack((torch.arange(40), torch.arange(40) + 7))
    cos, sin = llama.LlamaRotaryEmbedding(config)(q, positions)
    want = llama.apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim=2)
    rotary = Rotary.from_config(config.to_dict(), 64)
    for x, theirs in zip((q, k), want, strict=True):
        check(turn(rotary, x, positions), theirs.double(), torch.float32, 100)


@pytest.mark.parametrize("share", [1.0, 0.25])
def test_gpt_neox_of_transformers(share):
    transformers = pytest.importorskip("transformers")
    neox = pytest.importorskip("transformers.models.gpt_neox.modeling_gpt_neox")
    rope = {"rope_type": "default", "rope_theta": 5e3, "partial_rotary_factor": share}
    config = transformers.GPTNeoXConfig(hidden_size=128, num_attention_heads=4, rope_parameters=rope)
    q = normal(2, 20, 4, 32, dtype=torch.float32)
    positions = torch.arange(20)
    cos, sin = neox.GPTNeoXRotaryEmbedding(config)(q, positions[None])
    want, _ = neox.apply_rotary_pos_emb(q, q, cos, sin, unsqueeze_dim=2)
    older = {"rotary_pct": share, "rotary_emb_base": 5000}
    for fields in (config.to_dict(), older, {"partial_rotary_factor": share, "rope_theta": 5e3, "rope_scaling": None}):
        rotary = Rotary.from_config(fields, 32)
        assert rotary.width == 32 * share
        check(turn(rotary, q, positions), want.double(), torch.float32, 20)


def test_gpt_j_of_transformers():
    gptj = pytest.importorskip("transformers.models.gptj.modeling_gptj")
    q = normal(2, 20, 4, 32, dtype=torch.float32)
    sin, cos = gptj.create_sinusoidal_positions(20, 16)[None].expand(2, -1, -1).chunk(2, -1)
    want = torch.cat((gptj.apply_rotary_pos_emb(q[..., :16], sin, cos), q[..., 16:]), -1)
    rotary = Rotary.from_config({"rotary_dim": 16, "model_type": "gptj"}, 32, interleaved=True)
    check(turn(rotary, q, torch.arange(20)), want.double(), torch.float32, 20)


def test_the_trained_length_stands_in_one_of_three_places():
    rope = {"rope_type": "yarn", "factor": 4.0}
    for fields in (
        {"rope_parameters": {**rope, "original_max_position_embeddings": 512}, "max_position_embeddings": 9},
        {"rope_parameters": {**rope, "original_max_position_embeddings": 9}, "original_max_position_embeddings": 512},
        {"rope_parameters": rope, "max_position_embeddings": 512},
    ):
        assert Rotary.from_config(fields, 64).scaling == YarnScaling(4.0, 512.0)
    fields = {"rope_scaling": {"type": "yarn", "factor": None, "beta_fast": None, "mscale": 0, "mscale_all_dim": 0}}
    fields |= {"max_position_embeddings": 2048, "original_max_position_embeddings": 512}
    assert Rotary.from_config(fields, 64).scaling == YarnScaling(4.0, 512.0)


def test_a_config_without_rotary_fields_is_the_paper():
    assert str(Rotary.from_config({}, 64)) == "Rotary(64, base=10000.0)"


# refusals


@pytest.mark.parametrize(
    "rope, error, text",
    [
        ({"rope_type": "dynamic", "factor": 2.0}, UnsupportedError, "keys in a cache would have to turn anew"),
        ({"type": "longrope"}, UnsupportedError, "'longrope': its frequencies change with the length"),
        ({"type": "su"}, UnsupportedError, "'su'"),
        ({"rope_type": "default", "mrope_section": [1, 2]}, UnsupportedError, "several coordinates"),
        ({"rope_type": "proportional"}, UnsupportedError, "proportional"),
        ({"full_attention": {"rope_type": "default"}}, UnsupportedError, "one for each of 'full_attention'"),
        ({"rope_type": "linaer"}, UnknownName, "did you mean 'linear'"),
        ({"rope_type": 3}, UnknownName, "got 3"),
        ({"rope_type": "linear"}, CheckpointError, "`factor` must be a number above 0; it is missing"),
        ({"rope_type": "linear", "factor": "4"}, CheckpointError, "got '4'"),
        ({"rope_type": "linear", "factor": -1.0}, CheckpointError, "got -1.0"),
        ({"rope_type": "linear", "factor": True}, CheckpointError, "got True"),
        ({"rope_type": "linear", "factor": math.nan}, CheckpointError, "got nan"),
        ({"rope_type": "yarn", "factor": 2.0}, CheckpointError, "`max_position_embeddings` must be a number"),
        (
            {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 64, "truncate": 1},
            CheckpointError,
            "`truncate` must be true or false",
        ),
        ([1], CheckpointError, "`rope_parameters` must be an object"),
    ],
)
def test_configs_that_cannot_be_had(rope, error, text):
    with pytest.raises(error) as caught:
        Rotary.from_config({"rope_parameters": rope}, 64)
    assert text in str(caught.value) and str(caught.value).count(";") == 2


def test_a_rotary_dim_is_whole():
    with pytest.raises(CheckpointError, match=r"`rotary_dim` must be an integer; got 3\.5"):
        Rotary.from_config({"rotary_dim": 3.5}, 64)


@pytest.mark.parametrize(
    "make, error, text",
    [
        (lambda: Rotary(7), ValueOutOfRange, "`width` must be even"),
        (lambda: Rotary(8, width=10), ValueOutOfRange, "at most head_dim = 8; got 10"),
        (lambda: Rotary(8, width=3), ValueOutOfRange, "got 3"),
        (lambda: Rotary(0), ValueOutOfRange, "`head_dim` must be at least 2"),
        (lambda: Rotary(8.0), DTypeError, "`head_dim` must be an int"),
        (lambda: Rotary(8, base=0.0), ValueOutOfRange, "`base` must be finite and above 0"),
        (lambda: Rotary(8, base="1e4"), DTypeError, "`base` must be a number"),
        (lambda: Rotary(8, interleaved=1), DTypeError, "`interleaved` must be True or False"),
        (lambda: Rotary(8, scaling=2.0), DTypeError, "`scaling` must be a Scaling or None"),
        (lambda: Rotary(2, scaling=NtkScaling(2.0)), ValueOutOfRange, "width of at least 4"),
        (lambda: LinearScaling(0.0), ValueOutOfRange, "`factor` must be finite and above 0; got 0.0"),
        (lambda: NtkScaling(math.inf), ValueOutOfRange, "got inf"),
        (lambda: Llama3Scaling(8.0, 4.0, 4.0, 64), ValueOutOfRange, "`low_factor` must be below `high_factor`"),
        (lambda: YarnScaling(2.0, 64, beta_fast=1.0), ValueOutOfRange, "`beta_slow` must be below `beta_fast`"),
        (lambda: YarnScaling(2.0, 64, mscale=-1.0), ValueOutOfRange, "`mscale`"),
        (lambda: YarnScaling(2.0, 64, truncate=1), DTypeError, "`truncate`"),
        (lambda: turn(Rotary(8), torch.zeros(2, 3, 8), torch.arange(3)), ShapeError, "(B, L, H, D) with D = 8"),
        (lambda: turn(Rotary(8), torch.zeros(2, 3, 1, 6), torch.arange(3)), ShapeError, "got (2, 3, 1, 6)"),
        (lambda: Rotary(8).angles(torch.zeros(3), torch.float32), DTypeError, "`positions` must be int64 or int32"),
        (lambda: Rotary(8).angles(torch.tensor(3), torch.float32), DTypeError, "(L,) or (B, L); got [] int64"),
        (lambda: Rotary(8).angles(3, torch.float32), DTypeError, "got int"),
    ],
)
def test_refusals(make, error, text):
    with pytest.raises(error) as caught:
        make()
    assert isinstance(caught.value, QkvError)
    assert text in str(caught.value) and str(caught.value).count(";") >= 2


@pytest.mark.parametrize("length", [10, 4000])
def test_a_rotation_of_other_tokens_or_another_width_is_refused(length):
    rotary, x = Rotary(16), torch.zeros(2, length, 2, 16)
    for other, positions in (
        (rotary, torch.arange(1)),
        (rotary, torch.arange(length + 1)),
        (rotary, torch.zeros(3, length, dtype=torch.int64)),
        (rotary, torch.zeros(1, length, dtype=torch.int64)),
        (Rotary(8), torch.arange(length)),
        (Rotary(16, width=4), torch.arange(length)),
    ):
        rotation = other.angles(positions, x.dtype)
        for call in (lambda r=rotation: rotary(x, r), lambda r=rotation: rotary.both(x, x, r)):
            with pytest.raises(ShapeError, match=r"`rotation` must be of the tokens of `x`: .*; got \(.*; make it"):
                call()


@SIZES
def test_many_gradients_at_once(limits):
    rotary, x = Rotary(16), torch.randn(2, 5, 3, 16, dtype=torch.float64, requires_grad=True)
    y = rotary(x, rotary.angles(torch.arange(5), x.dtype))
    given = torch.randn(3, *y.shape, dtype=torch.float64)
    (found,) = torch.autograd.grad(y, x, given, is_grads_batched=True, retain_graph=True)
    want = torch.stack([torch.autograd.grad(y, x, one, retain_graph=True)[0] for one in given])
    torch.testing.assert_close(found, want, atol=1e-14, rtol=0)
