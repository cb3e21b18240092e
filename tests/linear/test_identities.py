"""What the linear family's recurrences have in common: settings of one in which it is another."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from linear.linear_engines import EACH, using
from linear.recurrences import PLAIN, Question, made
from qkv.linear import reference
from qkv.linear.recurrence import Outcome, Recurrence, Streams

SIZES = {"batch": 1, "length": 75, "value_dim": 9, "dtype": torch.float64}


def same(engine: str, *questions: tuple[Recurrence, Streams]) -> None:
    """Outputs and states are equal, but for rounding."""
    with using(engine) as answer:
        first, *others = (answer(*question) for question in questions)
    for other in others:
        close(other, first)


def close(found: Outcome | tuple[Tensor, Tensor], expected: Outcome | tuple[Tensor, Tensor]) -> None:
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-11, atol=1e-12)


@EACH
@pytest.mark.parametrize("rule", ["add", "delta"])
def test_no_gate_is_a_gate_of_zero(engine: str, rule: str):
    """The delta rule is the gated one with g = 0, linear attention is retention that forgets nothing."""
    plain = made(Question(mode=rule, **SIZES))
    scalar, vector = (made(Question(mode=f"{rule}-{gate}", gates="0", **SIZES)) for gate in ("scalar", "vector"))
    same(
        engine,
        plain,
        *((r, streams._replace(gate=g.gate)) for (r, g), streams in ((scalar, plain[1]), (vector, plain[1]))),
    )


@EACH
def test_retention_is_a_constant_gate(engine: str):
    """S_t = Σ_j γ^(t - j) k_j v_jᵀ, written out."""
    r, streams = made(Question(mode="add-scalar", state=False, **SIZES))
    decay = torch.tensor([-0.05, -0.4], dtype=torch.float64)
    gate = decay[None, :, None].expand(1, 2, r.length)
    steps = torch.arange(r.length, dtype=torch.float64)
    weights = (decay[:, None, None] * (steps[:, None] - steps)).exp().tril()
    output = (r.scale * streams.query @ streams.key.mT * weights) @ streams.value
    state = (streams.key * weights[:, -1, :, None]).mT @ streams.value
    with using(engine) as answer:
        close(answer(r, streams._replace(gate=gate)), (output, state))


@EACH
@pytest.mark.parametrize("gate", ["none", "scalar"])
@pytest.mark.parametrize("normalize", [False, True])
def test_sums_are_masked_quadratic_forms(engine: str, gate: str, normalize: bool):
    """((Q Kᵀ) ∘ D) V with D_ij = exp(g_(j+1) + .. + g_i), which is Mamba-2's state-space duality."""
    mode = "add" if gate == "none" else "add-scalar"
    r, streams = made(Question(mode=mode, state=False, **SIZES))
    sums = torch.zeros(1, 2, r.length) if streams.gate is None else streams.gate.cumsum(-1)
    weights = r.scale * streams.query @ streams.key.mT
    if normalize:
        r = replace(r, normalize=True, feature="squared_relu")
        weights = r.scale * streams.query.relu().square() @ streams.key.relu().square().mT
    weights = weights * (sums[..., None] - sums[..., None, :]).exp().tril()
    if normalize:
        weights = weights / weights.sum(-1, keepdim=True)
    with using(engine) as answer:
        torch.testing.assert_close(answer(r, streams).output, weights @ streams.value, rtol=1e-10, atol=1e-11)


@EACH
@pytest.mark.parametrize("rule", ["add", "delta"])
def test_equal_channels_are_one_gate(engine: str, rule: str):
    """GLA is then scalar decay, Kimi's delta rule the gated one."""
    for gates in ("mild", "mixed"):
        r, streams = made(Question(mode=f"{rule}-scalar", gates=gates, **SIZES))
        channels = streams.gate[..., None].expand(*streams.gate.shape, r.key_dim)
        same(engine, (r, streams), (replace(r, gate="vector"), streams._replace(gate=channels)))


@EACH
@pytest.mark.parametrize("gate", ["", "-scalar", "-vector"])
def test_beta_zero_writes_nothing(engine: str, gate: str):
    """The state only decays, and the output is what was in it."""
    r, streams = made(Question(mode=f"delta{gate}", betas="0", **SIZES))
    gates = torch.zeros(1, 2, r.length, 1) if streams.gate is None else streams.gate
    sums = (gates if gates.ndim == 4 else gates[..., None]).cumsum(2).expand(1, 2, r.length, r.key_dim)
    output = r.scale * (streams.query * sums.exp()) @ streams.state
    with using(engine) as answer:
        close(answer(r, streams), (output, sums[:, :, -1, :, None].exp() * streams.state))


@EACH
def test_the_normalizer_is_a_column_of_ones(engine: str):
    for mode in ("normalized", "normalized-scalar"):
        r, streams = made(Question(mode=mode, group=2, **SIZES))
        wider = replace(r, normalize=False, value_dim=r.value_dim + 1)
        with using(engine) as answer:
            output, state = answer(
                wider, streams._replace(value=torch.nn.functional.pad(streams.value, (0, 1), value=1.0))
            )
            close(answer(r, streams), (output[..., :-1] / output[..., -1:], state))


@EACH
@pytest.mark.parametrize("mode", PLAIN)
def test_all_are_diagonal_plus_low_rank(engine: str, mode: str):
    """a = b = 0 is gated linear attention; w = exp g, a = w k, b = -beta k and beta v as v are the delta rules."""
    r, streams = made(Question(mode=mode, group=2, **SIZES))
    q, k = (x.repeat_interleave(2, 1) for x in streams[:2])
    gate = torch.zeros(1) if streams.gate is None else streams.gate
    decay = (gate if gate.ndim in {1, 4} else gate[..., None]).exp().expand(q.shape).double()
    if streams.beta is None:
        a, b, v = torch.zeros_like(q), torch.zeros_like(q), streams.value
    else:
        beta = streams.beta[..., None]
        a, b, v = decay * k, -beta * k, beta * streams.value
    with using(engine) as answer:
        close(answer(r, streams), reference.general(r.scale * q, k, v, decay, a, b, streams.state))


def test_the_general_form_has_gradients():
    rng = torch.Generator().manual_seed(0)
    shapes = [(1, 1, 4, 2), (1, 1, 4, 2), (1, 1, 4, 3), (1, 1, 4, 2), (1, 1, 4, 2), (1, 1, 4, 2), (1, 1, 2, 3)]
    given = [torch.randn(shape, generator=rng, dtype=torch.float64).requires_grad_() for shape in shapes]
    assert torch.autograd.gradcheck(reference.general, given)


@EACH
@pytest.mark.parametrize("mode", ["delta", "delta-scalar", "delta-vector"])
def test_a_written_key_is_read_back(engine: str, mode: str):
    """With beta 1 and keys of length 1 the state answers k_t with v_t, whatever was in it."""
    r, streams = made(Question(mode=mode, betas="1", **SIZES))
    with using(engine) as answer:
        output, _ = answer(r, streams._replace(query=streams.key / r.scale))
    torch.testing.assert_close(output, streams.value, rtol=1e-11, atol=1e-11)
