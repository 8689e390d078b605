"""Peak memory of calls that are to be compared: each in a process of its own."""

from __future__ import annotations

import gc
import multiprocessing
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

__all__ = ["in_a_process", "peak_memory", "status"]

_PROCESS = Path("/proc/self")


def peak_memory(build: Callable[..., Callable[[], object]], *arguments: object) -> int:
    """Return the peak memory of a call, less the memory in use before it, in bytes.

    ``build(*arguments)``, a module-level function, loads and warms up everything that should
    not count, and returns the call, which is made once in a fresh process: in this one it could
    reuse freed memory. Linux only. Pages of mapped files, which the system can reclaim, count.
    """
    return in_a_process(_growth, build, *arguments)


def in_a_process(measure: Callable[..., int], *arguments: object) -> int:
    """Return what a function returns in a fresh process."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context) as process:
        return process.submit(measure, *arguments).result()


def _growth(build: Callable[..., Callable[[], object]], *arguments: object) -> int:
    call = build(*arguments)
    gc.collect()
    # From here on the peak counts anew. That of getrusage would begin at the parent's.
    (_PROCESS / "clear_refs").write_text("5")
    before = status("VmRSS")
    call()
    return status("VmHWM") - before


def status(name: str) -> int:
    """Return an entry of the process's status, in bytes."""
    for line in (_PROCESS / "status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise OSError(f"{_PROCESS / 'status'} has no {name}")
