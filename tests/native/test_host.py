"""The core beside the state of its host: an interpreter that ends during a call, arithmetic that a thread has set."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import qkv
from qkv.backends import extension

pytestmark = pytest.mark.skipif(extension.native is None, reason=str(extension.MISSING))

# The thread stays in calls of the core: torch's own operators abort a process that ends while they wait for the GIL.
ENDS = """
import threading, time, torch, qkv
from qkv.backends.cpu import Prepared
torch.set_num_threads(2)
inputs = [torch.randn(1, 8, {length}, 64) for _ in range(3)]
once, made = Prepared.output, torch.empty_like(inputs[0])
begun = threading.Event()
def forever(self, work):
    begun.set()
    while True: once(self, work.tensors, made, 0)
Prepared.answer = forever
threading.Thread(target=qkv.attention, args=inputs, kwargs=dict(backend="cpu"), daemon=True).start()
assert begun.wait(20)
time.sleep(0.05)
"""


@pytest.mark.parametrize("length", [16, 300, 2000])
def test_the_interpreter_may_end_while_a_call_runs(length):
    environment = os.environ | {"PYTHONPATH": str(Path(qkv.__file__).parents[1])}
    words = [sys.executable, "-c", ENDS.format(length=length)]
    done = subprocess.run(words, check=False, capture_output=True, text=True, env=environment, timeout=100)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.fixture
def arithmetic():
    """torch's threads and handling of denormal numbers, put back afterwards."""
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)
    torch.set_flush_denormal(False)


@pytest.mark.usefixtures("arithmetic")
@pytest.mark.parametrize("flush", [False, True])
def test_all_threads_of_a_call_treat_denormal_numbers_as_the_caller_does(flush):
    q, k, v = (torch.randn(1, 8, 500, 64) for _ in range(3))
    v *= 1e-38
    torch.set_flush_denormal(flush)
    results = []
    for threads in (1, 3):
        torch.set_num_threads(threads)
        results += [qkv.attention(q, k, v, backend="cpu") for _ in range(10)]
    assert ((results[0].abs() < 1e-38) & (results[0] != 0)).any() != flush
    assert all(torch.equal(each, results[0]) for each in results)
