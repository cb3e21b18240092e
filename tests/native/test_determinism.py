"""The native core gives the same bits again: repeated, in a new process, with any number of threads, for any batch size
and place in the batch, for some of the rows, from any layout of memory. Outputs and all gradients, by torch.equal.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

import configurations
import engines
import qkv
from configurations import BATCH, PATTERNS, Call, Configuration, call_of, differing
from exams import threads
from sweep import haloed, laid_out

pytestmark = pytest.mark.filterwarnings("ignore:.*inverted")

COUNT = 44
MADE = configurations.configurations(COUNT)
ALL = slice(None)
# All on the best instruction set, and each of the others on a third of its own.
PAIRS = [(made, name) for n, name in enumerate(engines.NATIVE) for made in (MADE if n == 0 else MADE[n::3])]
EACH = pytest.mark.parametrize("made, backend", PAIRS, ids=str, indirect=["backend"])
BEST = pytest.mark.parametrize("made, backend", PAIRS[:COUNT], ids=str, indirect=["backend"])


def same(got: dict[str, Tensor], want: dict[str, Tensor], what: str) -> None:
    wrong = differing(want, got)
    assert not wrong, f"{what} changes {wrong}"


@EACH
def test_repeats_and_threads(made: Configuration, backend: str) -> None:
    """With one batch row and one head there are more threads than heads: their work is split."""
    for batch in (BATCH, 1):
        call = call_of(made, batch)
        with threads(1):
            first = call.answer(backend)
            same(call.answer(backend), first, "a repetition")
        assert all(x.isfinite().all() for name, x in first.items() if name not in {"lse", "max_scores"})
        for count in (2, 3, 4):
            with threads(count):
                same(call.answer(backend), first, f"{count} threads instead of 1")


def test_a_new_process() -> None:
    """Its memory comes filled with large numbers, its hashes have another seed, and it begins on another instruction
    set.
    """
    paths = os.pathsep.join([str(Path(configurations.__file__).parent), *sys.path])
    fresh = {"QKV_ISA": engines.ISAS[-1], "PYTHONHASHSEED": "3", "MALLOC_PERTURB_": "128", "PYTHONPATH": paths}
    command = [sys.executable, configurations.__file__, "3", str(COUNT)]
    done = subprocess.run(command, env=os.environ | fresh, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["isa"] == engines.ISAS[-1]
    assert found["digests"] == configurations.digests(COUNT)


# What one batch row has of its own; every other gradient adds up over the batch.
OWN = ("output", "lse", "max_scores", "entropy", "gradient of q", "gradient of k", "gradient of v")


def own(call: Call, answer: dict[str, Tensor], names: tuple[str, ...] = OWN) -> dict[str, Tensor]:
    bias = call.tensors.get("bias")
    shared = bias is None or bias.ndim < 4 or BIAS_AXES[call.of.bias]
    return {name: answer[name] for name in (*names, *(() if shared else ("gradient of bias",)))}


BIAS_AXES = {name: axes is None or 0 in axes for name, axes in configurations.BIASES.items()}


@EACH
def test_batch_size_and_place_in_the_batch(made: Configuration, backend: str) -> None:
    """Dropout draws by the number of the batch row, so rows that keep their numbers alone are compared."""
    call = call_of(made)
    whole = own(call, call.answer(backend))
    places = [[0], [0, 1]] if made.options.get("dropout_p") else [[0], [1], [2], [2, 0], [1, 2, 0]]
    for rows in places:
        part = call.taking(rows, ALL)
        want = {name: x[rows] for name, x in whole.items()}
        same(own(part, part.answer(backend)), want, f"the batch {rows}")


ROWS = [slice(0, 64), slice(0, 128), slice(64, 128), slice(64, None), slice(128, None)]


@EACH
def test_rows_alone(made: Configuration, backend: str) -> None:
    """Whole tiles of queries computed alone; few queries come from another pass, with other roundings."""
    call = call_of(made)
    whole = call.answer(backend)
    names = OWN[:5]
    bias = call.tensors.get("bias")
    if bias is not None and bias.ndim == 4 and bias.shape[:3] == call.tensors["q"].shape[:3]:
        names = (*names, "gradient of bias")
    for rows in ROWS:
        if (rows.start or 0) >= made.shape[2] or (rows.stop or 0) > made.shape[2]:
            continue
        part, want = call.taking(ALL, rows).answer(backend), {n: whole[n][:, :, rows] for n in names}
        if part["lse"].shape[2] > engines.FEW:
            same({n: part[n] for n in names}, want, f"rows {rows.start} to {rows.stop}")


@EACH
def test_output_alone(made: Configuration, backend: str) -> None:
    """A call that asks for nothing else, and the same call once it is known, from other memory and with threads."""
    call = call_of(made)
    q, k, v = (call.tensors[name] for name in "qkv")
    keys, options = made.shape[3], {key: value for key, value in made.options.items() if key != "dropout_p"}
    options |= {"pattern": PATTERNS[made.pattern](call.rows, range(made.shape[2]), keys), "query_offset": made.offset}

    def answer(form: str, **more: object) -> list[Tensor]:
        leaves = [formed(x, form).detach().requires_grad_() for x in (q, k, v)]
        found = qkv.attention(*leaves, **options, **more, backend=backend)
        out = found[0] if more else found
        return [out.detach(), *torch.autograd.grad(out, leaves, call.grad_output)]

    want = answer("dense", return_aux=qkv.AuxRequest(lse=True))
    for form in ("dense", "dense", "step", "fused", "step", "heads_transposed", "dense"):
        assert all(map(torch.equal, want, answer(form))), f"as {form}"
    with threads(3), torch.no_grad():
        for form in ("last_axis", "last_axis", "dense"):
            assert torch.equal(
                want[0], qkv.attention(*(formed(x, form) for x in (q, k, v)), **options, backend=backend)
            )


FORMS = ("dense", "heads_transposed", "fused", "step", "offset", "heads_last", "last_axis", "expanded", "halo")


def formed(x: Tensor, form: str) -> Tensor:
    if x.ndim != 4:
        return haloed(x) if form == "halo" else torch.stack([x, x + 1], -1)[..., 0]
    return haloed(x) if form == "halo" else laid_out(x, form)


@EACH
def test_layout_of_memory(made: Configuration, backend: str) -> None:
    call = call_of(made)
    dense = call.answer(backend)
    for n in range(len(FORMS)):
        others = [FORMS[(n + shift) % len(FORMS)] for shift in range(len(call.tensors))]
        forms = dict(zip(call.tensors, others, strict=True))
        placed = {name: formed(x, forms[name]) for name, x in call.tensors.items()}
        grad = formed(call.grad_output, FORMS[(n + 4) % len(FORMS)])
        if "expanded" in (*others, FORMS[(n + 4) % len(FORMS)]):  # which changes the numbers too
            plain = Call(made, {name: x.contiguous() for name, x in placed.items()}, grad.contiguous(), call.grad_lse)
            want = plain.answer(backend)
        else:
            want = dense
        same(Call(made, placed, grad, call.grad_lse).answer(backend), want, f"memory as {forms}")


@BEST
def test_alignment(made: Configuration, backend: str) -> None:
    call = call_of(made)
    want = call.answer(backend)
    for shift in (1, 3, 8, 13):
        moved = {
            name: torch.cat([x.new_full((shift,), float("nan")), x.flatten()])[shift:].view(x.shape)
            for name, x in call.tensors.items()
        }
        same(Call(made, moved, call.grad_output, call.grad_lse).answer(backend), want, f"a shift of {shift} numbers")


@BEST
def test_fresh_memory_is_not_read(made: Configuration, backend: str) -> None:
    """Tensors that torch makes without numbers come filled with NaN."""
    call = call_of(made)
    want = call.answer(backend)
    assert torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    try:
        assert torch.empty(3).isnan().all()
        got = call.answer(backend)
    finally:
        torch.use_deterministic_algorithms(False)
    same(got, want, "what was in memory before")
