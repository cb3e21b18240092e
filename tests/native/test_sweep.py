"""Generated cases on the native core: every element of every result inside its rounding bound, NaN around all tensors.

Cases of 16 bits are judged twice: as they are, and before the output is rounded, of which it is the nearest number.
`pytest -m long tests/native/test_sweep.py` runs many more from a seed that the header prints.
"""

from __future__ import annotations

import os
from collections import Counter

import pytest

import engines
from exams import FAILURES, drawn, exam_of, sit, sit_twice
from sweep import count_pairs, pairs_of

pytestmark = pytest.mark.filterwarnings("ignore:.*inverted")

CHUNKS, NARROW_CHUNKS, EACH = 60, 40, 50
FIRST = 3_000_000
TALL = 20
LONG_CHUNKS, LONG_NARROW_CHUNKS, LONG_EACH = 200, 150, 300


def run(numbers: range, table: str, others: int) -> Counter[str]:
    """All cases on the best instruction set, each one in `others` also on the rest; tells every failure."""
    answered, wrong = Counter(), []
    judged = sit_twice if table.startswith("narrow") else sit
    for number in numbers:
        exam = exam_of(number, table, gradients=number % 3 != 1)
        for engine in engines.NATIVE if number % others == 0 else engines.NATIVE[:1]:
            try:
                with engines.using(engine) as name:
                    judged(exam, name)
            except FAILURES as error:
                replay = f"python tests/replay.py {number} --table {table} --backend {engine}"
                wrong.append(f"{replay}: {type(error).__name__}: {error}; {drawn(exam.case)}")
            answered[engine] += 1
    assert not wrong, f"{len(wrong)} of {answered.total()}:\n" + "\n".join(wrong[:8])
    return answered


def run_chunk(chunk: int, table: str) -> None:
    first = FIRST + EACH * chunk
    answered = run(range(first, first + EACH), table, others=6)
    assert answered[engines.NATIVE[0]] == EACH and all(answered[engine] for engine in engines.NATIVE)


@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_cases(chunk: int) -> None:
    run_chunk(chunk, "native")


@pytest.mark.parametrize("chunk", range(NARROW_CHUNKS))
def test_cases_of_16_bits(chunk: int) -> None:
    run_chunk(chunk, "narrow")


@pytest.mark.parametrize("table", ["tall", "narrow_tall"])
@pytest.mark.parametrize("number", range(FIRST, FIRST + TALL, 5))
def test_tall_cases(number: int, table: str) -> None:
    run(range(number, number + 5), table, others=5)


@pytest.mark.parametrize("table, chunks, share", [("native", CHUNKS, 0.98), ("narrow", NARROW_CHUNKS, 0.975)])
def test_cases_cover_pairs_of_axis_values(table: str, chunks: int, share: float) -> None:
    met = set().union(*(pairs_of(FIRST + n, table) for n in range(chunks * EACH)))
    assert chunks * EACH >= 2000 and len(met) / count_pairs(table) > share


LONG = [*(("native", n) for n in range(LONG_CHUNKS)), *(("narrow", n) for n in range(LONG_NARROW_CHUNKS))]


@pytest.mark.long
@pytest.mark.parametrize("table, chunk", LONG)
def test_many_cases(table: str, chunk: int) -> None:
    first = int(os.environ["QKV_SWEEP_SEED"]) + LONG_EACH * chunk
    run(range(first, first + LONG_EACH), table, others=3)
