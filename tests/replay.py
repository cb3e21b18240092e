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
from exams import Finding, answers, drawn, exam_of, leaves_of
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
        out, aux, found = answers(exam, name)
    truth, bound = exam.truth, exam.bound
    forward = {"output": (out, truth.out, bound.out), "lse": (aux.lse, truth.lse, bound.lse)}
    forward["max_scores"] = aux.max_scores, truth.max_scores, bound.max_scores
    forward["entropy"] = aux.entropy, truth.entropy, bound.entropy
    worst = 0.0
    for one in [*(Finding(name, *rest) for name, rest in forward.items()), *found]:
        worst = max(worst, one.worst())
        print(f"{one.name:18} error / bound {one.worst():.3g}{'' if one.worst() <= 1 else '   TOO LARGE'}")
    return int(worst > 1)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    warnings.filterwarnings("ignore", ".*inverted")
    torch.set_num_threads(1)
    raise SystemExit(main())
