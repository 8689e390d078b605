"""Runs of ``python -m benchmarks`` in a process of their own."""

import os
import subprocess
from pathlib import Path

import pytest

from tests.support.processes import run_python

__all__ = ["needs_benchmarks", "run_benchmarks"]

_ROOT = Path(__file__).resolve().parents[2]
needs_benchmarks = pytest.mark.skipif(
    not (_ROOT / "benchmarks").is_dir(), reason="benchmarks are in source checkouts only"
)


def run_benchmarks(*arguments: object) -> subprocess.CompletedProcess[str]:
    """Run the program with these arguments, and collect what it prints."""
    env = {**os.environ, "OMP_WAIT_POLICY": "PASSIVE"}
    return run_python("-m", "benchmarks", *arguments, cwd=_ROOT, env=env)
