"""The benchmarks of this package: every ``bench_*.py`` in it."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import benchmarks
from benchmarks.goals import GoalOutcome
from benchmarks.harness import Case, Result
from benchmarks.stale import WHOLE_MODEL


@dataclass
class Benchmark:
    """What a ``bench_*.py`` module offers; it need not have ``goals`` and what follows.

    ``sources`` are as ``stale.kernel_files`` takes them; without them all of a model's.
    """

    name: str
    sources: Sequence[str]
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
                    getattr(code, "SOURCES", WHOLE_MODEL),
                    code.cases,
                    getattr(code, "goals", lambda results: []),
                    getattr(code, "notes", list),
                    getattr(code, "summary", lambda results: []),
                )
            )
    return found
