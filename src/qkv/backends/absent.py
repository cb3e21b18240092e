"""Backends that are known by name and not part of this version: they say so instead of being unknown."""

from __future__ import annotations

from dataclasses import dataclass

from qkv.backends.base import Cost, Result
from qkv.problem import Problem, Tensors


@dataclass(frozen=True)
class Absent:
    """A name and the reason why nothing stands behind it; dispatch never runs one."""

    name: str
    unavailable: str | None

    def reasons_against(self, problem: Problem) -> list[str]:
        return [str(self.unavailable)]

    def cost(self, problem: Problem) -> Cost:
        raise AssertionError("an absent backend has no cost")

    def run(self, problem: Problem, tensors: Tensors, seed: int) -> Result:
        raise AssertionError("an absent backend is never chosen")
