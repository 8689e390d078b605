"""Fakes of the ops of system."""

from __future__ import annotations

from lmdecode._fakes.registry import fake


@fake("cpu_capability")
def _cpu_capability():
    return 0
