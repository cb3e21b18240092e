"""Promises about whole calls, not about their numbers: the same bits again, in threads, forks and fresh processes;
nothing changed, kept or built that was not asked for.

A fresh process runs this file: `python test_promises.py digests` or `memory` prints one JSON answer.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import itertools
import json
import multiprocessing
import os
import pickle
import subprocess
import sys
import threading
import time
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from torch.utils._python_dispatch import TorchDispatchMode

import budgets
import engines
import oracles
import qkv
from qkv.errors import DTypeError, UnsupportedError
from qkv.settings import override

OURS = (*engines.TORCH, *engines.NATIVE[:1])
NAMES = {"cpu", "triton", "flex", "blockwise", "sdpa", "reference"}
HERE = Path(__file__)

# The mixed calls: pattern, type, and what else is asked for.
CALLS: list[tuple[str, torch.dtype, str]] = [
    ("window(20)", torch.float32, "alibi"),
    ("strided(8)", torch.float64, "dropout"),
    ("causal() & block_local(48)", torch.bfloat16, "sinks"),
    ("fixed(16)", torch.float32, "relative dropout"),
    ("full()", torch.float32, "softcap dropout"),
    ("dilated(3, 3, dilation=5)", torch.float16, "tensor"),
    ("bigbird(1, 2, 1, 7, block_size=16)", torch.float32, "offset"),
    ("causal() - window(2)", torch.float64, "dropout sinks"),
]
TITLES = [f"{text}, {asked}" for text, _, asked in CALLS]
CALL = pytest.mark.parametrize("number", range(len(CALLS)), ids=TITLES)
B, H, G, L, S, D, V = 2, 4, 2, 130, 150, 8, 6


def normal(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def question(number: int, pattern: Any = None) -> tuple[list[Tensor], dict[str, Any], list[Tensor]]:
    """Query, key, value, the options of a call, and every tensor that wants a gradient; always the same numbers."""
    text, dtype, asked = CALLS[number]
    shapes = ((B, H, L, D), (B, G, S, D), (B, G, S, V))
    tensors = [normal(*shape, dtype=dtype, seed=3 * number + n).requires_grad_() for n, shape in enumerate(shapes)]
    options: dict[str, Any] = {"pattern": qkv.parse(text) if pattern is None else pattern}
    leaves = list(tensors)

    def leaf(*shape: int) -> Tensor:
        leaves.append(normal(*shape, dtype=dtype, seed=100 + number).requires_grad_())
        return leaves[-1]

    if "alibi" in asked:
        options["bias"] = qkv.alibi(leaf(H))
    if "relative" in asked:
        options["bias"] = qkv.relative(leaf(H, 9))
    if "tensor" in asked:
        options["bias"] = leaf(1, H, L, S)
    if "sinks" in asked:
        options["sinks"] = leaf(H)
    if "softcap" in asked:
        options["softcap"] = 3.0
    if "offset" in asked:
        options["query_offset"] = [3, 20]
    if "dropout" in asked:
        options |= {"dropout_p": 0.3, "generator": torch.Generator().manual_seed(number)}
    return tensors, options, leaves


def answer(number: int, backend: str, pattern: Any = None) -> list[Tensor]:
    """Output, log-sum-exp and every gradient of a call."""
    tensors, options, leaves = question(number, pattern)
    out, aux = qkv.attention(*tensors, **options, backend=backend, return_aux=qkv.AuxRequest(lse=True))
    grads = torch.autograd.grad(out, leaves, normal(*out.shape, dtype=out.dtype, seed=7))
    return [out.detach(), aux.lse.detach(), *grads]


def digest(tensors: list[Tensor]) -> str:
    """The bits of tensors as text."""
    found = hashlib.sha256()
    for x in tensors:
        found.update(f"{x.dtype}{list(x.shape)}".encode() + x.contiguous().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


ASKED = [(n, engine) for engine in engines.OURS for n in range(len(CALLS))]
ANSWERED = pytest.mark.parametrize("number, backend", ASKED, indirect=["backend"])


def all_digests() -> dict[str, str]:
    found = {}
    for n, engine in ASKED:
        with engines.using(engine) as backend:
            found[f"{engine} {n}"] = digest(answer(n, backend))
    return found


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def fresh(kind: str, **environment: str) -> Any:
    """What a new process that runs this file answers; glibc gives what is freed back at once in it."""
    steady = {"OMP_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
    command = [sys.executable, str(HERE), kind]
    done = subprocess.run(
        command, env={**os.environ, **steady, **environment}, capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


# The same bits


@ANSWERED
def test_the_same_call_gives_the_same_bits(number: int, backend: str) -> None:
    first = answer(number, backend)
    answer((number + 1) % len(CALLS), "blockwise")
    assert same(first, answer(number, backend))
    assert all(x.isfinite().all() for x in [first[0], *first[2:]])


def test_a_fresh_process_and_its_forked_child_give_the_same_bits() -> None:
    """Dropout, gradients and another seed of Python's hashes included."""
    answers = fresh("digests", PYTHONHASHSEED="1")
    assert answers["own"] == all_digests()
    assert answers["forked"] == answers["own"]


def digests_here_and_forked() -> dict[str, Any]:
    """The bits of this process, and of a child forked after it has worked."""
    torch.set_num_threads(1)
    own = all_digests()
    context = multiprocessing.get_context("fork")
    answers = context.SimpleQueue()
    child = context.Process(target=lambda: answers.put(all_digests()))
    child.start()
    child.join(60)
    if child.is_alive():
        child.kill()
        return {"own": own, "forked": "the child hangs"}
    return {"own": own, "forked": answers.get() if child.exitcode == 0 else f"exit code {child.exitcode}"}


THREADS, EACH = 8, 30


def test_threads_give_the_bits_of_a_serial_run() -> None:
    """Pattern objects are shared and new, so that the threads compile them at once; half of them keep no plans."""
    asked = [(n, engine.partition("-")[0]) for n, engine in ASKED if engine in OURS]
    wanted = {pair: answer(*pair) for pair in asked}
    patterns = [qkv.parse(text) for text, _, _ in CALLS]
    start, wrong = threading.Barrier(THREADS), []

    def work(thread: int) -> None:
        start.wait()
        with override("QKV_PLAN_CACHE_MB", 0) if thread % 2 else contextlib.nullcontext():
            for k in range(EACH):
                n, backend = asked[(7 * thread + k) % len(asked)]
                if not same(answer(n, backend, patterns[n]), wanted[n, backend]):
                    wrong.append((n, backend))
                done[thread] += 1

    done, interval = [0] * THREADS, sys.getswitchinterval()
    sys.setswitchinterval(1e-4)
    try:
        threads = [threading.Thread(target=work, args=(thread,)) for thread in range(THREADS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert done == [EACH] * THREADS and not wrong


# Modes of torch


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@ANSWERED
def test_no_gradient_changes_no_bit(number: int, mode: Any, backend: str) -> None:
    """The first call of each pattern object runs without gradients: what it leaves in caches must serve the second."""
    pattern = qkv.parse(CALLS[number][0]) & qkv.prefix(1000 + next(FRESH))
    with mode():
        tensors, options, _ = question(number, pattern)
        out, aux = qkv.attention(*tensors, **options, backend=backend, return_aux=qkv.AuxRequest(lse=True))
    assert not out.requires_grad and out.grad_fn is None
    assert out.is_inference() == (mode is torch.inference_mode)
    assert same([out, aux.lse], answer(number, backend, pattern)[:2])


FRESH = itertools.count()
TYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("cast", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("backend", [*engines.TORCH, "torch signature"])
def test_autocast_gives_what_torch_gives(dtype: torch.dtype, cast: torch.dtype, backend: str) -> None:
    tensors = [normal(B, H, n, D, dtype=dtype, seed=n).requires_grad_() for n in (20, 30, 30)]
    tensors = [tensors[0], tensors[1], (tensors[2].detach() + 1).requires_grad_()]
    with torch.autocast("cpu", dtype=cast):
        theirs = scaled_dot_product_attention(*tensors)
        if backend == "torch signature":
            out = qkv.scaled_dot_product_attention(*tensors)
        else:
            out = qkv.attention(*tensors, backend=backend)
    assert out.dtype == theirs.dtype == (torch.float64 if dtype == torch.float64 else cast)
    rounded = [x.detach().to(out.dtype) for x in tensors]
    call = budgets.Call(*rounded, torch.ones(1, 1, 1, 1, dtype=torch.bool), D**-0.5)
    truth = call.truth()
    ours = backend == "torch signature" and engines.casts(out.dtype)  # the native core answers
    for got, how in ((out, {"cast": ours}), (theirs, {"narrow": True})):
        bound = budgets.forward(call, truth, out.dtype, **how).out
        assert bool(((got.double() - truth.out).abs() <= bound).all())
    assert [x.dtype for x in torch.autograd.grad(out.sum(), tensors)] == [dtype] * 3


def test_autocast_mends_mixed_types_and_only_where_torch_does() -> None:
    q, k, v = (normal(1, 1, 4, 4, seed=n) for n in range(3))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert qkv.attention(q, k.half(), v.bfloat16()).dtype == torch.bfloat16
        assert scaled_dot_product_attention(q, k.half(), v.bfloat16()).dtype == torch.bfloat16
        with pytest.raises(DTypeError, match="one dtype"):
            qkv.attention(q, k.double(), v)
        with torch.autocast("cpu", enabled=False):
            assert qkv.attention(q, k, v).dtype == torch.float32
    assert qkv.attention(q, k, v).dtype == torch.float32


# Random numbers


@engines.EACH
def test_manual_seed_reproduces_a_dropped_call(backend: str) -> None:
    def call(**options: Any) -> Tensor:
        return qkv.attention(q, k, torch.eye(S), dropout_p=0.5, backend=backend, **options)

    q, k = normal(L, D, seed=1), normal(S, D, seed=2)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        state = torch.get_rng_state()
        first, second = call(), call()
        torch.manual_seed(7)
        again = call()
        torch.manual_seed(7)
        given = call(generator=torch.Generator().manual_seed(7))
        assert torch.equal(state, torch.get_rng_state()), "a call with its own generator drew from torch's"
        qkv.attention(q, k, torch.eye(S), backend=backend)
        assert torch.equal(state, torch.get_rng_state()), "a call without dropout drew a number"
    assert torch.equal(first, again) and torch.equal(first, given)
    assert not torch.equal(first, second)
    keep = oracles.dropout_keep(oracles.drawn_seed(7), 0.5, (1, 1, L, S))[0, 0]
    assert torch.equal(first != 0, keep)


# Patterns as values


def see_even(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return (i + j) % 2 == 0


PATTERNS: list[Any] = [
    *(qkv.parse(text) for text, _, _ in CALLS),
    ~qkv.neighborhood((4, 5), 3) | qkv.windows2d((4, 5), 2, 1) - qkv.axial((4, 5), "width"),
    qkv.causal(align="top_left") & qkv.longformer(3, [0, 7]),
    qkv.per_head([qkv.full(), qkv.random_blocks(1, 4, 3)]),
    qkv.key_lengths([3, 20]) & qkv.documents([0] * 9 + [1] * 11),
    qkv.mask(normal(20, 20) > 0) | qkv.blocks(normal(5, 5) > 0, 4) | qkv.key_padding(normal(2, 20) > 0),
]


WAYS = {"copy": copy.copy, "deepcopy": copy.deepcopy, "pickle": lambda x: pickle.loads(pickle.dumps(x))}


@pytest.mark.parametrize("pattern", PATTERNS, ids=str)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("used", [False, True], ids=["new", "used"])
def test_a_copied_pattern_is_the_same_value(pattern: Any, way: str, used: bool) -> None:
    """Also once it has been used, when it holds what was computed for it."""
    if used:
        hash(pattern), pattern.count(20, batch=2, heads=2)
    copied = WAYS[way](pattern)
    assert copied == pattern and hash(copied) == hash(pattern) and str(copied) == str(pattern)
    assert copied != ~pattern
    assert torch.equal(copied.to_dense(20, batch=2, heads=2), pattern.to_dense(20, batch=2, heads=2))


def test_a_pattern_by_a_function_copies_with_its_function() -> None:
    pattern = qkv.where(see_even)
    assert copy.deepcopy(pattern) == pattern
    with pytest.raises((AttributeError, pickle.PicklingError)):  # a function without a name cannot go along
        pickle.dumps(qkv.where(lambda b, h, i, j: i == j))


# Plans


class Made(TorchDispatchMode):
    """What operations make: the largest tensor, by its elements, and how many have memory of their own."""

    def __init__(self, *given: Tensor) -> None:
        super().__init__()
        self.largest, self.by, self.new = 0, "", []
        self._known = {x.untyped_storage()._cdata for x in given}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for x in result if isinstance(result, tuple | list) else (result,):
            if isinstance(x, Tensor):
                if x.numel() > self.largest:
                    self.largest, self.by = x.numel(), str(func)
                if x.untyped_storage()._cdata not in self._known:
                    self.new.append(str(func))
        return result


def on_meta(options: dict[str, Any]) -> dict[str, Any]:
    """The same options with their tensors on the meta device."""
    moved = {name: x.to("meta") if isinstance(x, Tensor) else x for name, x in options.items()}
    bias = options.get("bias")
    if hasattr(bias, "slopes"):
        moved["bias"] = qkv.alibi(bias.slopes.to("meta"))
    if hasattr(bias, "table"):
        moved["bias"] = qkv.relative(bias.table.to("meta"))
    return moved


@CALL
@pytest.mark.parametrize("backend", ["auto", *engines.TORCH, "cpu"])
def test_plan_of_meta_tensors_is_that_of_real_ones(number: int, backend: str) -> None:
    tensors, options, _ = question(number)
    real = qkv.plan(*tensors, **options, backend=backend)
    meta = qkv.plan(*(x.to("meta") for x in tensors), **on_meta(options), backend=backend)
    assert meta.problem.device.type == "meta"
    assert replace(meta, problem=replace(meta.problem, device=torch.device("cpu"))) == real
    assert len(fields(real)) == 10 and str(real).replace("cpu,", "meta,") == str(meta)
    start = options.get("query_offset", [S - L] * B)
    seen = [options["pattern"].to_dense(L, S, heads=H, query_offset=offset).expand(H, L, S) for offset in start]
    assert real.pairs == sum(int(x.sum()) for x in seen)
    assert real.computed >= real.pairs and real.flops == 2 * real.computed * (D + V)


@CALL
def test_plan_runs_nothing(number: int) -> None:
    tensors, options, _ = question(number)
    moved, given = [x.to("meta") for x in tensors], on_meta(options)
    inside = [getattr(given.get("bias"), name, None) for name in ("slopes", "table")]
    held = [x for x in (*moved, *given.values(), *inside) if isinstance(x, Tensor)]
    state = options["generator"].get_state() if "generator" in options else None
    with Made(*held) as made:
        qkv.plan(*moved, **given)
    assert not made.new
    assert state is None or torch.equal(state, options["generator"].get_state())


def test_plan_of_a_million_tokens_takes_no_time() -> None:
    q = torch.empty(1, 8, 1 << 20, 64, device="meta")
    start = time.process_time()
    found = qkv.plan(q, q, q, pattern=qkv.causal() & qkv.window(255))
    assert time.process_time() - start < 5
    assert found.pairs == 8 * sum(min(i + 1, 256) for i in range(1 << 20))
    assert found.peak_bytes < 12 * q.numel()


@pytest.mark.parametrize(
    "options, word",
    [
        ({"softcap": 3.0}, "softcap"),
        ({"sinks": torch.zeros(H)}, "sinks"),
        ({"dropout_p": 0.1}, "dropout"),
        ({"return_aux": qkv.AuxRequest(lse=True, top_k=2)}, "lse, top_k"),
        ({"pattern": qkv.window(3)}, ""),
    ],
)
@pytest.mark.parametrize("asked", ["auto", *sorted(NAMES)])
def test_refusals_say_of_every_other_backend_why_not(options: dict[str, Any], word: str, asked: str) -> None:
    """What `plan` says is what happens: a named backend runs, or is refused with just those reasons."""
    x = normal(B, H, 6, 4)
    because = qkv.plan(x, x, x, **options).refusals
    able = {"cpu", "reference", "blockwise"} | ({"sdpa"} if not word else set())
    if asked not in able | {"auto"}:
        for ask in (qkv.plan, qkv.attention):
            with pytest.raises(UnsupportedError) as caught:
                ask(x, x, x, **options, backend=asked)
            assert all(reason in str(caught.value) for reason in because[asked])
            assert str(caught.value).count("; ") == 2
        return
    found = qkv.plan(x, x, x, **options, backend=asked)
    assert found.backend == (asked if asked != "auto" else "cpu")
    assert set(found.refusals) == NAMES - {found.backend}
    for name, reasons in found.refusals.items():
        assert reasons and all(reasons)
        assert f" {name} " in str(found) and all(reason in str(found) for reason in reasons)
    assert word in " ".join(found.refusals.get("sdpa", (word,)))
    qkv.attention(x, x, x, **options, backend=asked)


# Memory


def windowed(tokens: int, backend: str, **options: Any) -> Made:
    """The sizes of all tensors in a forward and backward pass."""
    leaves = [normal(1, 2, tokens, 16, seed=n).requires_grad_() for n in range(3)]
    with Made() as made:
        qkv.attention(*leaves, backend=backend, **options).square().sum().backward()
    assert all(x.grad.any() for x in leaves)
    return made


@pytest.mark.parametrize("backend", ["auto", "blockwise", "cpu"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"bias": qkv.alibi([0.5, 0.25])},
        {"bias": qkv.relative(torch.linspace(-1, 1, 2 * 129).reshape(2, 129)), "softcap": 3.0},
        {"dropout_p": 0.1, "generator": torch.Generator()},
        {"sinks": torch.zeros(2), "query_offset": 5},
    ],
    ids=["plain", "alibi", "relative", "dropout", "sinks"],
)
def test_a_window_never_builds_a_square(options: dict[str, Any], backend: str) -> None:
    """Nor a quarter of one, forward and backward together."""
    tokens = 2048
    made = windowed(tokens, backend, pattern=qkv.window(63), **options)
    assert tokens * 16 <= made.largest < tokens * tokens // 4, made.by


def test_the_square_of_the_reference_is_seen() -> None:
    """The test above can fail."""
    assert windowed(256, "reference", pattern=qkv.full()).largest >= 2 * 256 * 256


HEADS, WIDTH = 2, 64
Asked = tuple[int, str, str, bool]  # tokens, pattern, backend, whether backward too
SPARSE = ("blockwise", "cpu")
WINDOW: list[Asked] = [
    (n, "window(255)", backend, back) for backend in SPARSE for back in (False, True) for n in (4096, 8192, 16384)
]
DENSE: Asked = (1024, "full()", "reference", False)


def resident(field: str) -> int:
    """A figure of this process's memory in bytes."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(f"{field}:"))


def extra(asked: Asked) -> int:
    """Bytes that a call adds at its peak beyond its inputs."""
    tokens, text, backend, back = asked
    leaves = [torch.randn(1, HEADS, tokens, WIDTH).requires_grad_(back) for _ in range(3)]
    before = resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # the high-water mark is what is resident now
    out = qkv.attention(*leaves, pattern=qkv.parse(text), backend=backend)
    if back:
        out.backward(torch.ones_like(out))
    return resident("VmHWM") - before


def measured() -> list[int]:
    """For each question the answer of a fresh fork of this process, which has run nothing but small calls."""
    torch.set_num_threads(1)
    context = multiprocessing.get_context("fork")
    found = []
    for asked in [*WINDOW, DENSE]:
        answers = context.SimpleQueue()

        def child(asked: Asked = asked, answers: Any = answers) -> None:
            extra((64, *asked[1:]))  # what libraries set up once
            answers.put(extra(asked))

        process = context.Process(target=child)
        process.start()
        found.append(answers.get())
        process.join()
    return found


def test_memory_of_a_window_follows_the_inputs() -> None:
    """At 8,192 tokens under three times the inputs; from 4,096 to 16,384 less than six times as much, not sixteen.

    And what `plan` says is an upper bound, by no more than a factor of three.
    """
    if not os.access("/proc/self/clear_refs", os.W_OK):
        pytest.skip("peak memory is read from /proc, which is not there or cannot be reset")
    peaks = dict(zip([*WINDOW, DENSE], fresh("memory"), strict=True))
    row, inputs = HEADS * WIDTH * 4, 3 * HEADS * WIDTH * 4  # bytes a token
    assert peaks[DENSE] > HEADS * DENSE[0] ** 2 * 4 and peaks[DENSE] > 3 * inputs * DENSE[0], "a square is not seen"
    for backend, back in itertools.product(SPARSE, (False, True)):
        by_tokens = {asked[0]: peak for asked, peak in peaks.items() if asked[1:] == ("window(255)", backend, back)}
        assert all(peak > tokens * row for tokens, peak in by_tokens.items()), f"{by_tokens}: no room for the output"
        assert by_tokens[8192] < 3 * inputs * 8192, by_tokens
        assert by_tokens[16384] < 6 * by_tokens[4096], by_tokens
    for asked in [*(one for one in WINDOW if not one[3]), DENSE]:
        x = torch.empty(1, HEADS, asked[0], WIDTH, device="meta")
        predicted = qkv.plan(x, x, x, pattern=qkv.parse(asked[1]), backend=asked[2]).peak_bytes
        assert predicted / 3 < peaks[asked] <= 1.1 * predicted + (1 << 20), asked


# Importing

LOOK = """
import json, os, random, signal, sys, threading, warnings
import numpy as np, torch

def look():
    tiny = torch.tensor([1e-45]), torch.tensor([5e-324], dtype=torch.float64)
    return {
        "denormal numbers": [*((x * 1.0).item() for x in tiny), float(np.float32(1e-45) * np.float32(1.0))],
        "default type": str(torch.get_default_dtype()),
        "default device": str(torch.get_default_device()),
        "threads": [torch.get_num_threads(), torch.get_num_interop_threads(), threading.active_count()],
        "random state": [torch.get_rng_state().tolist(), str(np.random.get_state()), str(random.getstate())],
        "warnings filters": [str(entry) for entry in warnings.filters],
        "numpy errors": np.geterr(),
        "modes": [torch.is_grad_enabled(), torch.are_deterministic_algorithms_enabled()],
        "matmul precision": torch.get_float32_matmul_precision(),
        "signals": [str(signal.getsignal(number)) for number in (signal.SIGINT, signal.SIGTERM)],
        "environment": sorted(os.environ.items()),
        "hooks": [str(sys.excepthook), str(sys.displayhook), str(warnings.showwarning)],
        "recursion": sys.getrecursionlimit(),
    }

seen = [look()]
import qkv
seen.append(look())
import qkv.cli.main, qkv.explain, qkv.models
seen.append(look())
x = torch.arange(24.0).reshape(6, 4)
for backend in ("reference", "blockwise", "cpu", "sdpa"):
    qkv.attention(x, x, x, pattern=qkv.window(2), backend=backend)
seen.append(look())
print(json.dumps(seen))
"""


def test_importing_and_calling_changes_nothing_of_the_process() -> None:
    kept = ("PATH", "PYTHONPATH", "LD_LIBRARY_PATH", "SYSTEMROOT", "HOME", "TMPDIR")
    clean = {name: os.environ[name] for name in kept if name in os.environ}  # free of what this process has imported
    command = [sys.executable, "-c", LOOK]
    done = subprocess.run(command, env=clean, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    before, *after = json.loads(done.stdout)
    assert all(before["denormal numbers"])
    for step, seen in zip(("import qkv", "import qkv.cli and more", "calls"), after, strict=True):
        for what, value in before.items():
            assert seen[what] == value, f"{step} changed {what}"
    assert not done.stderr


if __name__ == "__main__":
    print(json.dumps({"digests": digests_here_and_forked, "memory": measured}[sys.argv[1]]()))
