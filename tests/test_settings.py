"""The table of environment variables: what is read, what is refused, what an override covers."""

from __future__ import annotations

import threading

import pytest

from qkv.errors import UnknownName, ValueOutOfRange
from qkv.settings import BACKEND, ISA, PLAN_CACHE_MB, SETTINGS, override, read


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch):
    for setting in SETTINGS:
        monkeypatch.delenv(setting.name, raising=False)


def test_variables_are_these():
    assert [setting.name for setting in SETTINGS] == ["QKV_BACKEND", "QKV_PLAN_CACHE_MB", "QKV_ISA"]


def test_defaults_are_valid_and_typed():
    assert read(BACKEND) == "auto"
    assert read(PLAN_CACHE_MB) == 64
    assert read(ISA) == "auto"


def test_environment_is_read_at_every_call(monkeypatch):
    monkeypatch.setenv("QKV_BACKEND", "reference")
    assert read(BACKEND) == "reference"
    monkeypatch.setenv("QKV_BACKEND", "blockwise")
    assert read(BACKEND) == "blockwise"


@pytest.mark.parametrize(
    "setting, text",
    [
        (BACKEND, "fastest"),
        (BACKEND, ""),
        (BACKEND, "Auto"),
        (PLAN_CACHE_MB, "-1"),
        (PLAN_CACHE_MB, "1.5"),
        (PLAN_CACHE_MB, ""),
        (ISA, "avx"),
        (ISA, ""),
    ],
)
def test_invalid_text_is_refused_with_what_is_valid(monkeypatch, setting, text):
    monkeypatch.setenv(setting.name, text)
    with pytest.raises(ValueOutOfRange) as caught:
        read(setting)
    assert str(caught.value) == (
        f"`{setting.name}` must be {setting.valid}; got {text!r}; unset it for {setting.default!r}"
    )


def test_zero_megabytes_is_a_value():
    with override("QKV_PLAN_CACHE_MB", 0):
        assert read(PLAN_CACHE_MB) == 0


def test_override_wins_over_the_environment_nests_and_ends(monkeypatch):
    monkeypatch.setenv("QKV_BACKEND", "sdpa")
    with override("QKV_BACKEND", "reference"):
        with override("QKV_BACKEND", "blockwise"), override("QKV_PLAN_CACHE_MB", 3):
            assert (read(BACKEND), read(PLAN_CACHE_MB)) == ("blockwise", 3)
        assert (read(BACKEND), read(PLAN_CACHE_MB)) == ("reference", 64)
    assert read(BACKEND) == "sdpa"


def test_override_ends_when_the_block_raises():
    with pytest.raises(ZeroDivisionError), override("QKV_BACKEND", "reference"):
        raise ZeroDivisionError
    assert read(BACKEND) == "auto"


def test_override_stays_in_its_thread():
    seen = []
    with override("QKV_BACKEND", "reference"):
        thread = threading.Thread(target=lambda: seen.append(read(BACKEND)))
        thread.start()
        thread.join()
    assert seen == ["auto"]


def test_override_refuses_an_unknown_name_and_an_invalid_value_before_the_block():
    with pytest.raises(UnknownName, match="did you mean 'QKV_BACKEND'"), override("QKV_BACKENDS", "auto"):
        pytest.fail("the block ran")
    with pytest.raises(ValueOutOfRange, match="got 'fast'"), override("QKV_BACKEND", "fast"):
        pytest.fail("the block ran")
