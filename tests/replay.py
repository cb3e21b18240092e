"""Run one case of a sweep and print each result's largest error beside its bound.

    python tests/replay.py 1000042 --backend cpu --isa avx2

The number, the table and the backend are what a failing test prints.
"""

from __future__ import annotations

import argparse
import os
import warnings

import torch

import engines
from exams import Exam, Finding, answers, drawn, exam_of, leaves_of
from sweep import TABLES


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("number", type=int, help="the integer that makes the case")
    parser.add_argument("--table", choices=TABLES, default="native", help="the table of axes it draws from")
    parser.add_argument("--backend", default="cpu", help="a backend, or with its instruction set: cpu-avx2")
    parser.add_argument("--isa", default="", choices=("", *engines.ISAS), help="the instruction set of cpu")
    return parser.parse_args()


def main() -> int:
    asked = arguments()
    exam = exam_of(asked.number, asked.table)
    print(drawn(exam.case))
    print(f"sizes {tuple(exam.case.size)}, type {exam.case.call.q.dtype}, pattern {exam.case.pattern}")
    for name, x in leaves_of(exam.case).items():
        print(f"{name}: shape {tuple(x.shape)}, strides {x.stride()}")
    with engines.using(f"{asked.backend}-{asked.isa}" if asked.isa else asked.backend) as name:
        dtype = exam.case.call.q.dtype
        cast = name == "cpu" and engines.casts(dtype)
        worst = show(exam.under(cast=cast), name)
        if name == "cpu" and dtype.itemsize == 2:
            print("before the output is rounded:")
            with engines.widened():
                worst = max(worst, show(exam.under(cast=cast, wide=True), name))
    return int(worst > 1)


def show(exam: Exam, backend: str) -> float:
    """Print each result's error; the greatest in units of its bound."""
    out, aux, found = answers(exam, backend)
    truth, bound = exam.truth, exam.bound
    forward = {"output": (out, truth.out, bound.out), "lse": (aux.lse, truth.lse, bound.lse)}
    forward["max_scores"] = aux.max_scores, truth.max_scores, bound.max_scores
    forward["entropy"] = aux.entropy, truth.entropy, bound.entropy
    every = [*(Finding(name, *rest) for name, rest in forward.items()), *found]
    for one in every:
        print(f"{one.name:18} error / bound {one.worst():.3g}{'' if one.worst() <= 1 else '   TOO LARGE'}")
    return max(one.worst() for one in every)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    warnings.filterwarnings("ignore", ".*inverted")
    torch.set_num_threads(1)
    raise SystemExit(main())
