"""The native core touches its tensors and nothing beside them: guard pages, NaN all around, strides beyond 2³¹."""

from __future__ import annotations

import ctypes
import faulthandler
import mmap
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

import engines
import guards
import qkv
from exams import leaves_of
from sweep import HALO, case_of

pytestmark = pytest.mark.filterwarnings("ignore:.*inverted")
FIRST = 3_500_000


def test_no_page_beside_a_tensor_is_touched() -> None:
    """Each input and result ends at a page without access, then begins after one."""
    count = 120
    paths = os.pathsep.join([str(Path(guards.__file__).parent), *sys.path])
    environment = os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, guards.__file__, str(FIRST), str(count), *engines.NATIVE]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 0, f"ends with {done.returncode}: {done.stderr[-2000:]}"
    assert int(done.stdout) > 6 * count, "the backend's own tensors were not in guarded memory"


def signal_of(read: Callable[[], object]) -> int:
    """The signal that ends a forked process which reads so; 0 if it ends in peace."""
    child = os.fork()
    if not child:
        faulthandler.disable()
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        read()
        os._exit(0)
    return os.WTERMSIG(os.waitpid(child, 0)[1])


@pytest.mark.parametrize("place, beside", [("end", 20), ("start", -1)])
def test_a_guard_page_is_felt(place: str, beside: int) -> None:
    """The test above can fail."""
    x = guards.guarded(5, torch.float32, place).fill_(1)
    assert signal_of(lambda: ctypes.string_at(x.data_ptr(), 20)) == 0
    assert signal_of(lambda: ctypes.string_at(x.data_ptr() + beside, 1)) == signal.SIGSEGV


@engines.EACH_NATIVE
@pytest.mark.parametrize("size", [16, 48])
def test_a_page_that_is_none_is_not_read(size: int, backend: str) -> None:
    """A block of keys that a shorter sequence sees in part names pages of -1 beyond its end; the pool begins after a
    page without access.
    """
    heads, width = 1, 128
    cache = qkv.PagedKVCache(2, heads, 20, width, page_size=size)
    pool = cache._pool
    for name in ("keys", "values"):
        memory = getattr(pool, name)
        setattr(pool, name, guards.guarded(memory.numel(), memory.dtype, "start").view(memory.shape).zero_())
    g = torch.Generator().manual_seed(size)
    key, value = torch.randn(2, 2, heads, 50, width, generator=g).unbind()
    cache.append(key, value, lengths=[50, 3])
    query = torch.randn(2, heads, 1, width, generator=g)
    assert signal_of(lambda: cache.attend(query, query, query, backend=backend)) == 0
    found = cache.attend(query, query, query, backend=backend)
    for b, length in enumerate((50, 3)):
        k, v = (torch.cat([x[b : b + 1, :, :length], query[b : b + 1]], 2) for x in (key, value))
        torch.testing.assert_close(found[b : b + 1], qkv.attention(query[b : b + 1], k, v, backend="reference"))


def surrounded(x: Tensor, fill: float) -> Tensor:
    """The same numbers with the same strides, and `fill` on both sides and wherever the strides leave a gap."""
    if not x.numel() or 0 in x.stride():
        return x
    span = 1 + sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    view = x.new_full((span + 2 * HALO,), fill).as_strided(x.shape, x.stride(), HALO)
    return view.copy_(x)


@pytest.mark.parametrize("chunk", range(8))
@engines.EACH_NATIVE
def test_what_stands_around_a_tensor_does_not_matter(chunk: int, backend: str) -> None:
    """Bit for bit: sides and gaps of zeros, of NaN and of large numbers."""
    for number in range(FIRST + 20 * chunk, FIRST + 20 * chunk + (20 if engines.isa() == engines.ISAS[0] else 6)):
        table = ("native", "narrow")[number % 2]
        case = case_of(number, table)
        zeros, *others = (
            guards.results(case, {n: surrounded(x, fill) for n, x in leaves_of(case).items()}, number, backend)
            for fill in (0.0, float("nan"), 6e4)
        )
        for other in others:
            assert all(torch.equal(a, b) for a, b in zip(zeros, other, strict=True)), f"case_of({number}, '{table}')"


GIANT = 1 << 31


def far_apart(x: Tensor, strides: tuple[int, ...]) -> Tensor:
    """The same numbers in a view with giant strides; of the memory between them no page is ever touched."""
    span = 1 + sum((size - 1) * stride for size, stride in zip(x.shape, strides, strict=True))
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0x4000)
    memory = mmap.mmap(-1, span * x.itemsize, flags=flags)
    return torch.frombuffer(memory, dtype=x.dtype, count=span).as_strided(x.shape, strides).copy_(x)


@engines.EACH_NATIVE
@pytest.mark.parametrize("axis", range(4))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_strides_beyond_31_bits(axis: int, dtype: torch.dtype, backend: str) -> None:
    """Batch rows, heads, rows and columns so far apart that 32-bit offsets would wrap."""
    g = torch.Generator().manual_seed(axis)
    shapes = {"q": (2, 2, 5, 3), "k": (2, 2, 70, 3), "v": (2, 2, 70, 3), "bias": (2, 2, 5, 70)}
    plain = {name: torch.randn(shape, generator=g).to(dtype) for name, shape in shapes.items()}
    found = []
    for far in (False, True):
        leaves = {}
        for name, x in plain.items():
            stride = GIANT // max(x.shape[axis] - 1, 1) + 12345
            strides = tuple(stride if n == axis else step for n, step in enumerate(x.stride()))
            leaves[name] = (far_apart(x, strides) if far else x.clone()).requires_grad_()
        q, k, v, bias = leaves.values()
        out = qkv.attention(q, k, v, bias=bias, pattern=qkv.causal(), backend=backend)
        grad = torch.ones_like(out)
        grad = far_apart(grad, (1, GIANT + 7, 2, 10)) if far else grad
        found.append([out.detach(), *torch.autograd.grad(out, list(leaves.values()), grad)])
    for a, b in zip(*found, strict=True):
        assert torch.equal(a, b)
