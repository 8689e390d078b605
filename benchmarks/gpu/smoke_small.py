"""The smoke on small vocabularies: what compute-sanitizer watches."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.gpu import smoke
from benchmarks.gpu.machine import Machine


def run(machine: Machine) -> Iterator[str]:
    """Run it."""
    yield from smoke.run(machine, (300, 20_000))
