"""The native core as a guest of its process: forks, Ctrl-C, threads of Python, nothing changed, nothing kept."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

import configurations
import engines
import qkv
from configurations import call_of, differing
from exams import threads
from qkv.backends import extension

MADE = configurations.configurations(24)


def light(made: configurations.Configuration) -> bool:
    """Whether torch's own operations on the tensors of a call stay in one thread: with more they hang in a forked child
    and wait for one another on busy cores.
    """
    tensors = call_of(made).tensors.values()
    return "mask" not in made.pattern and max(x.numel() for x in tensors) < 32768


LIGHT = [made for made in MADE if light(made)]


@contextmanager
def script(text: str) -> Iterator[subprocess.Popen[str]]:
    """A new process that runs a text, with its output to be read; it ends with the block."""
    paths = os.pathsep.join([str(Path(configurations.__file__).parent), *sys.path])
    environment = os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", text]
    with subprocess.Popen(command, env=environment, text=True, stdout=subprocess.PIPE) as child:
        try:
            yield child
        finally:
            child.kill()


# Forks

FORK = """
import os, sys, threading, time, torch, qkv
from configurations import call_of, configurations, digest

torch.set_num_threads(4)
made = [configurations(24)[number] for number in NUMBERS]

def digests():
    return [digest(call_of(one).answer("cpu")) for one in made]

def work():  # without autograd, which may hold locks of torch's own
    q, k, v = (call_of(made[0]).tensors[name] for name in "qkv")
    while not done:
        qkv.attention(q, k, v, backend="cpu")

want = digests()
done = []
other = threading.Thread(target=work)
other.start()  # the fork comes in the middle of its calls
for depth in range(3):  # a child, a child of that child
    child = os.fork()
    if child:
        deadline = time.monotonic() + 20
        while not (ended := os.waitpid(child, os.WNOHANG))[0] and time.monotonic() < deadline:
            time.sleep(0.01)
        if not ended[0]:
            os.kill(child, 9)
            print("the child hangs", flush=True)
        same = digests() == want  # the parent goes on as before
        done.append(1)
        other.join() if depth == 0 else None
        code = 0 if ended[0] and os.waitstatus_to_exitcode(ended[1]) == 0 and same else 1
        os._exit(code) if depth else sys.exit(code)
    if digests() != want:
        os._exit(2)
os._exit(0)
"""


def test_a_forked_child_computes_and_forks_again() -> None:
    """All with four threads, from a parent whose threads are at work."""
    assert len(LIGHT) > 8
    with script(FORK.replace("NUMBERS", str([made.number for made in LIGHT]))) as child:
        out, _ = child.communicate(timeout=100)
    assert child.returncode == 0, out


FORK_LARGE = """
import os, sys, time, warnings, torch, qkv

torch.set_num_threads(4)
torch.ones(1 << 20).sum()  # torch's own threads are there, and will not be in the child
wide = lambda *shape: torch.randn(*shape, dtype=torch.float64)
q, k, bias = wide(2, 4, 5000, 8).float(), wide(2, 2, 64, 8).float(), wide(1, 4, 5000, 64)  # 40,000 rows
cases = {
    "rows": {},
    "float64": {"bias": bias},
    "float32": {"bias": bias.float()},
    "bfloat16": {"bias": bias.bfloat16()},
    "float16, in other order": {"bias": bias.half().mT.contiguous().mT},
    "hides": {"bias": torch.where(bias > 0, 0.0, -torch.inf)},
    "zeros and ones": {"bias": (bias > 0).float()},
    "all hidden": {"bias": torch.full_like(bias, -torch.inf)},
    "all hidden, beside sinks": {"bias": torch.full_like(bias, -torch.inf), "sinks": torch.zeros(4)},
}

def answers():
    found = {}
    for name, options in cases.items():
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            out, aux = qkv.attention(
                q, k, k, backend="cpu", return_aux=qkv.AuxRequest(lse=True), **options
            )
        found[name] = [x.numpy().tobytes() for x in (out, aux.lse)], [one.category.__name__ for one in said]
    return found

want = answers()
said = {name: categories for name, (_, categories) in want.items() if categories}
assert said == {
    "zeros and ones": ["AddedMaskWarning"],
    "all hidden": ["InvertedMaskWarning"],
    "all hidden, beside sinks": ["InvertedMaskWarning"],
}, said
child = os.fork()
if not child:
    os._exit(0 if answers() == want else 2)
deadline = time.monotonic() + 20
while not (ended := os.waitpid(child, os.WNOHANG))[0]:
    if time.monotonic() > deadline:
        os.kill(child, 9)
        os.waitpid(child, 0)
        sys.exit("the child hangs")
    time.sleep(0.01)
sys.exit(os.waitstatus_to_exitcode(ended[1]))
"""


def test_a_forked_child_looks_at_more_values_than_torch_gives_to_one_thread() -> None:
    """A float bias, and the rows that are asked whether they see a key: neither takes torch's threads."""
    with script(FORK_LARGE) as child:
        child.communicate(timeout=100)
    assert child.returncode == 0


class Attended(Dataset):
    """Answers, computed where the loader asks."""

    def __len__(self) -> int:
        return len(LIGHT)

    def __getitem__(self, number: int) -> dict[str, Tensor]:
        with threads(2):
            return call_of(LIGHT[number]).answer("cpu")


def first_of(batch: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    return batch[0]


@pytest.mark.parametrize("way", ["fork", "spawn", pytest.param("forkserver", marks=pytest.mark.long)])
def test_workers_of_a_data_loader(way: str) -> None:
    data = Attended()
    want = [data[number] for number in range(len(data))]
    loader = DataLoader(data, num_workers=1, collate_fn=first_of, multiprocessing_context=way, timeout=60)
    found = list(loader)
    assert len(found) == len(want) and not any(differing(a, b) for a, b in zip(want, found, strict=True))


# Signals

INTERRUPT = """
import signal, time, torch, qkv
signal.signal(signal.SIGINT, signal.default_int_handler)  # which a process in the background does not have
from qkv.backends.base import Incoming, Work, pattern_plan
from qkv.backends.cpu import Prepared
from qkv.problem import Tensors

def forward():
    qkv.attention(q, q, q, backend="cpu")

def backward():  # from what a forward pass would leave: that takes too long for a test
    problem, tensors = qkv.plan(q, q, q, backend="cpu").problem, Tensors(q, q, q, None, None)
    left = q, torch.zeros(q.shape[:3], dtype=q.dtype), torch.ones(q.shape[:3], dtype=q.dtype)
    work = Work(problem, tensors, pattern_plan(problem), 0)
    Prepared.of(work).backward(work, left, Incoming(q, None), (True, True, True, False, False))

q = torch.randn(1, 2, 60_000, 64, dtype=torch.float64)
x = torch.randn(1, 2, 100, 8)
want = qkv.attention(x, x, x, backend="cpu")
for threads in (1, 3):
    torch.set_num_threads(threads)
    for call in (forward, backward):
        print("ready", flush=True)
        try:
            call()
        except KeyboardInterrupt:
            print(time.monotonic(), flush=True)
        else:
            print("it ended before it was interrupted", flush=True)
        assert torch.equal(want, qkv.attention(x, x, x, backend="cpu"))
"""


def test_ctrl_c_ends_a_long_call(record_property) -> None:
    """Forward and backward, with one thread and with three; the next call is right. The aim is half a second."""
    delays = []
    with script(INTERRUPT) as child:
        for _ in range(4):
            assert child.stdout.readline() == "ready\n"
            time.sleep(0.6)
            sent = time.monotonic()
            child.send_signal(signal.SIGINT)
            delays.append(float(child.stdout.readline()) - sent)
        assert child.wait(60) == 0
    record_property("seconds until KeyboardInterrupt", delays)
    print("seconds until KeyboardInterrupt:", [f"{delay:.3f}" for delay in delays])
    assert max(delays) < 5


class Stopped(Exception):
    """What a handler of a program's own raises."""


@pytest.mark.parametrize("stops", [False, True])
def test_handlers_of_the_program_run_during_a_call(stops: bool) -> None:
    """One that returns lets the call go on; what one raises comes out of the call."""
    heard = []

    def handler(number: int, frame: object) -> None:
        heard.append(number)
        if stops:
            raise Stopped

    q = torch.randn(1, 1, 4096, 64, dtype=torch.float64)
    before = signal.signal(signal.SIGUSR1, handler)
    timer = threading.Timer(0.05, lambda: os.kill(os.getpid(), signal.SIGUSR1))
    try:
        want = qkv.attention(q, q, q, backend="cpu")
        timer.start()
        if stops:
            with pytest.raises(Stopped):
                qkv.attention(q, q, q, backend="cpu")
        else:
            assert torch.equal(want, qkv.attention(q, q, q, backend="cpu"))
    finally:
        timer.join()
        signal.signal(signal.SIGUSR1, before)
    assert heard == [signal.SIGUSR1]


# Threads of Python


@engines.EACH_NATIVE
def test_calls_from_eight_threads_give_the_bits_of_a_serial_run(backend: str) -> None:
    """Each with two threads of its own, forward and backward."""
    calls = [call_of(made) for made in MADE]
    want = [call.answer(backend) for call in calls]
    start, wrong, done = threading.Barrier(8), [], []

    def work(first: int) -> None:
        start.wait()
        torch.set_num_threads(2)
        for k in range(2 * len(calls)):
            number = (5 * first + k) % len(calls)
            wrong.extend(differing(want[number], calls[number].answer(backend)))
        done.append(first)

    workers = [threading.Thread(target=work, args=(n,)) for n in range(8)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert sorted(done) == list(range(8)) and not wrong


# The process


def test_no_openmp_comes_with_the_core() -> None:
    """Neither a library to load nor a function to call."""
    found = Path(extension.native.__file__).read_bytes()
    assert b"libc" in found, "not what the linker wrote"
    assert not any(name in found for name in (b"libgomp", b"libomp", b"libiomp", b"GOMP_", b"__kmpc"))


GUEST = """
import json, locale, os, signal, threading, torch
import numpy as np

def look():
    tiny = [torch.tensor([x], dtype=d) * 1.0 for x, d in ((1e-310, torch.float64), (1e-40, torch.float32))]
    return {
        "denormal numbers": [x.item() for x in tiny] + [float(np.float64(1e-310) / 2.0)],
        "rounding": [1.0 + 2.0**-53, 1.0 + 3 * 2.0**-54, float(np.float32(1) / np.float32(3))],
        "threads": [torch.get_num_threads(), threading.active_count()],
        "signals": [str(signal.getsignal(n)) for n in (signal.SIGINT, signal.SIGTERM, signal.SIGSEGV)],
        "blocked": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, [])),
        "openmp": sorted({line.split("/")[-1] for line in open("/proc/self/maps") if "omp" in line.split("/")[-1]}),
        "locale": locale.setlocale(locale.LC_ALL),
        "place": [os.getcwd(), sorted(os.environ)],
    }

def resident():
    return int(open("/proc/self/statm").read().split()[1]) * os.sysconf("SC_PAGESIZE")

def tasks():
    return len(os.listdir("/proc/self/task"))

seen = [look()]
import qkv
seen.append(look())
from configurations import call_of, configurations
import engines
calls = [call_of(configurations(24)[number]) for number in NUMBERS]
torch.set_num_threads(3)
for name in engines.NATIVE:
    with engines.using(name) as backend:
        for call in calls:
            call.answer(backend)
torch.set_num_threads(1)
seen.append(look())
growth = []
for round in range(5):
    before = resident()
    torch.set_num_threads(1 if round % 2 else 2)
    for k in range(400):
        calls[k % 4].answer("cpu")
    growth.append(resident() - before)
print(json.dumps({"seen": seen, "growth": growth, "tasks": tasks()}))
"""


def test_process_is_left_alone() -> None:
    """Its state is that before the import; 2,000 calls leave no memory and no thread behind."""
    with script(GUEST.replace("NUMBERS", str([made.number for made in LIGHT]))) as child:
        out, _ = child.communicate(timeout=100)
    assert child.returncode == 0
    found = json.loads(out)
    before, *after = found["seen"]
    assert all(before["denormal numbers"])
    for step, seen in zip(("import qkv", "calls"), after, strict=True):
        for what, value in before.items():
            assert seen[what] == value, f"{step} changed {what}"
    assert sum(found["growth"][1:]) < 1600 * 1024, found["growth"]
    assert found["tasks"] < 12, "threads pile up"
