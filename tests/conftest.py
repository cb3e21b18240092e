"""What every test runs under: one thread a process, derandomised properties, each device that torch sees."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, settings

torch.set_num_threads(1)

# Shared cores make single examples slow now and then: what counts is the time limit of a whole test (pyproject.toml).
COMMON = {"deadline": None, "database": None, "suppress_health_check": [HealthCheck.too_slow]}
settings.register_profile("dev", max_examples=100, derandomize=True, **COMMON)
settings.register_profile("ci", max_examples=200, derandomize=True, print_blob=True, **COMMON)
settings.register_profile("long", max_examples=2000, derandomize=False, print_blob=True, **COMMON)


def pytest_configure(config):
    """Choose the profile that no option named: hypothesis itself would take one by the presence of CI."""
    if not config.getoption("--hypothesis-profile"):
        settings.load_profile("dev")


def devices() -> list[str]:
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return ["cpu"] if accelerator is None else ["cpu", accelerator.type]


@pytest.fixture(params=devices())
def device(request) -> torch.device:
    return torch.device(request.param)
