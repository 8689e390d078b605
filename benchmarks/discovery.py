"""The benchmarks of this package: every ``bench_*.py`` in it."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass

import benchmarks
from benchmarks.goals import GoalOutcome
from benchmarks.harness import Case, Result


@dataclass
class Benchmark:
    """What a ``bench_*.py`` module offers; it need not have ``goals`` and what follows."""

    name: str
    cases: Callable[[bool], list[Case]]
    goals: Callable[[list[Result]], list[GoalOutcome]]
    notes: Callable[[], list[str]]
    summary: Callable[[list[Result]], list[str]]


def discover() -> list[Benchmark]:
    """Import every ``bench_*.py`` below this package."""
    found = []
    for module in pkgutil.walk_packages(benchmarks.__path__, "benchmarks."):
        if module.name.rpartition(".")[2].startswith("bench_"):
            code = importlib.import_module(module.name)
            found.append(
                Benchmark(
                    module.name.removeprefix("benchmarks."),
                    code.cases,
                    getattr(code, "goals", lambda results: []),
                    getattr(code, "notes", list),
                    getattr(code, "summary", lambda results: []),
                )
            )
    return found
