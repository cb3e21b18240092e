"""Generated cases on the native core: every element of every result inside its rounding bound, NaN around all tensors.

`pytest -m long tests/native/test_sweep.py` runs many more from a seed that the header prints.
"""

from __future__ import annotations

import os
from collections import Counter

import pytest

import engines
from exams import FAILURES, drawn, exam_of, sit
from sweep import count_pairs, pairs_of

pytestmark = pytest.mark.filterwarnings("ignore:.*inverted")

CHUNKS, EACH = 60, 50
FIRST = 3_000_000
TALL = 20
LONG_CHUNKS, LONG_EACH = 200, 300


def run(numbers: range, table: str, others: int) -> Counter[str]:
    """All cases on the best instruction set, each one in `others` also on the rest; tells every failure."""
    answered, wrong = Counter(), []
    for number in numbers:
        exam = exam_of(number, table, gradients=number % 3 != 1)
        for engine in engines.NATIVE if number % others == 0 else engines.NATIVE[:1]:
            try:
                with engines.using(engine) as name:
                    sit(exam, name)
            except FAILURES as error:
                replay = f"python tests/replay.py {number} --table {table} --backend {engine}"
                wrong.append(f"{replay}: {type(error).__name__}: {error}; {drawn(exam.case)}")
            answered[engine] += 1
    assert not wrong, f"{len(wrong)} of {answered.total()}:\n" + "\n".join(wrong[:8])
    return answered


@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_cases(chunk: int) -> None:
    first = FIRST + EACH * chunk
    answered = run(range(first, first + EACH), "native", others=6)
    assert answered[engines.NATIVE[0]] == EACH and all(answered[engine] for engine in engines.NATIVE)


@pytest.mark.parametrize("number", range(FIRST, FIRST + TALL, 5))
def test_tall_cases(number: int) -> None:
    run(range(number, number + 5), "tall", others=5)


def test_cases_cover_pairs_of_axis_values() -> None:
    met = set().union(*(pairs_of(FIRST + n, "native") for n in range(CHUNKS * EACH)))
    assert CHUNKS * EACH >= 3000 and len(met) / count_pairs("native") > 0.98


@pytest.mark.long
@pytest.mark.parametrize("chunk", range(LONG_CHUNKS))
def test_many_cases(chunk: int) -> None:
    first = int(os.environ["QKV_SWEEP_SEED"]) + LONG_EACH * chunk
    run(range(first, first + LONG_EACH), "native", others=3)
