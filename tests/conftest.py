"""Shared by all tests: one thread a process, derandomised properties, each device that torch sees, each backend."""

from __future__ import annotations

import os
import time

import pytest
import torch
from hypothesis import HealthCheck, settings

import engines

torch.set_num_threads(1)

# Shared cores make single examples slow now and then: what counts is the time limit of a whole test (pyproject.toml).
COMMON = {"deadline": None, "database": None, "suppress_health_check": [HealthCheck.too_slow]}
settings.register_profile("dev", max_examples=100, derandomize=True, **COMMON)
settings.register_profile("ci", max_examples=200, derandomize=True, print_blob=True, **COMMON)
settings.register_profile("long", max_examples=2000, derandomize=False, print_blob=True, **COMMON)


def pytest_configure(config):
    """Choose the profile that no option named: hypothesis itself would take one by the presence of CI.

    The long sweep begins at a number that this process draws and its workers inherit.
    """
    if not config.getoption("--hypothesis-profile"):
        settings.load_profile("dev")
    os.environ.setdefault("QKV_SWEEP_SEED", str(time.time_ns() // 1000 % 10**12))


def pytest_report_header(config):
    return f"long sweep: QKV_SWEEP_SEED={os.environ['QKV_SWEEP_SEED']}"


def devices() -> list[str]:
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return ["cpu"] if accelerator is None else ["cpu", accelerator.type]


@pytest.fixture(params=devices())
def device(request) -> torch.device:
    return torch.device(request.param)


@pytest.fixture
def backend(request):
    """The name of the backend that answers; tests ask for it through the marks of engines.py."""
    with engines.using(request.param) as name:
        yield name
