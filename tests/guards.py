"""Memory whose neighbours cannot be touched: a page without access before it and one after it.

As a script it answers cases of the sweep from and into such memory, and ends by a signal if the core reads or writes
beside it: `python tests/guards.py 3000000 200 cpu-avx2 cpu-v2`. Each case is named on stderr before it runs.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

import engines
from exams import ask, leaves_of, outputs_alone, threads, wanted_of
from sweep import Example, case_of

PAGE = mmap.PAGESIZE
LIBC = ctypes.CDLL(None, use_errno=True)
NO_ACCESS = 0


def forbid(address: int) -> None:
    if LIBC.mprotect(ctypes.c_void_p(address), ctypes.c_size_t(PAGE), NO_ACCESS):
        raise OSError(ctypes.get_errno(), "mprotect")


def guarded(count: int, dtype: torch.dtype, place: str) -> Tensor:
    """A vector that ends at a page without access, or begins after one."""
    if not count:
        return torch.tensor([], dtype=dtype)
    size = count * dtype.itemsize
    room = -(-size // PAGE) * PAGE
    memory = mmap.mmap(-1, room + 2 * PAGE)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    forbid(address)
    forbid(address + PAGE + room)
    first = PAGE if place == "start" else PAGE + room - size
    return torch.frombuffer(memory, dtype=dtype, count=count, offset=first)


def moved(x: Tensor, place: str) -> Tensor:
    """The same numbers with the same strides in guarded memory; between them, where nothing stands, NaN."""
    if not x.numel():
        return x
    span = 1 + sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    room = guarded(span, x.dtype, place).fill_(float("nan"))
    one = [slice(0, 1) if stride == 0 else slice(None) for stride in x.stride()]
    view = room.as_strided(x.shape, x.stride())
    view[tuple(one)] = x[tuple(one)]
    return view


@contextmanager
def guarding_results(place: str) -> Iterator[list[Tensor]]:
    """Tensors that the backend makes lie in guarded memory too; gives those made."""
    made: list[Tensor] = []

    def in_guards(function: Callable[..., Tensor], fill: float) -> Callable[..., Tensor]:
        @functools.wraps(function)
        def make(*args: object, **options: object) -> Tensor:
            form = function(*args, **options)
            if form.device.type != "cpu" or not form.is_floating_point():
                return form
            made.append(guarded(form.numel(), form.dtype, place).fill_(fill).view(form.shape))
            return made[-1]

        return make

    nan = float("nan")
    makers = [(torch.Tensor, "new_empty", nan), (torch, "empty_like", nan), (torch, "zeros", 0.0)]
    plain = [getattr(owner, name) for owner, name, _ in makers]
    for (owner, name, fill), function in zip(makers, plain, strict=True):
        setattr(owner, name, in_guards(function, fill))
    try:
        yield made
    finally:
        for (owner, name, _), function in zip(makers, plain, strict=True):
            setattr(owner, name, function)


def results(case: Example, leaves: dict[str, Tensor], number: int, backend: str) -> list[Tensor]:
    """Output, lse and the gradients of a case."""
    leaves = {name: x.detach() for name, x in leaves.items()}
    wanted = [leaves[name].requires_grad_() for name in wanted_of(case, leaves)]
    with threads(case.pick["threads"]):
        out, aux = ask(case, leaves, number, backend)
        outputs = [x for x in (out, aux.lse) if x.requires_grad]
        g = torch.Generator().manual_seed(number)
        ones = [torch.where(x.detach().isfinite(), torch.rand(x.shape, generator=g, dtype=x.dtype), 0) for x in outputs]
        grads = torch.autograd.grad(outputs, wanted, ones, allow_unused=True)
        alone = outputs_alone(case, leaves, backend)
        alone += [g for x in alone if x.requires_grad for g in torch.autograd.grad(x.sum(), wanted, allow_unused=True)]
    return [x.detach() for x in (out, aux.lse, *grads, *alone) if x is not None]


def check(number: int, backend: str, table: str) -> int:
    """How many tensors the backend made; all results equal those from and into plain memory."""
    case = case_of(number, table)
    want = results(case, leaves_of(case), number, backend)
    count = 0
    for place in ("end", "start"):
        leaves = {name: moved(x, place) for name, x in leaves_of(case).items()}
        with guarding_results(place) as made:
            got = results(case, leaves, number, backend)
        assert all(torch.equal(a, b) for a, b in zip(want, got, strict=True)), f"other numbers at the {place}"
        count += len(made)
    return count


def main(first: int, count: int, *names: str) -> None:
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", ".*inverted")
    made = 0
    for n, engine in enumerate(names):
        with engines.using(engine) as backend:
            for number in range(first + n * count, first + (n + 1) * count):
                table = ("native", "narrow")[number % 2]
                print(number, table, engine, file=sys.stderr, flush=True)
                made += check(number, backend, table)
    print(made)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:])
