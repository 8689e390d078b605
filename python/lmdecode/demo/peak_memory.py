"""Peak memory of calls that are to be compared: each in a process of its own."""

from __future__ import annotations

import gc
import multiprocessing
import threading
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

__all__ = ["peak_memory"]

_PROCESS = Path("/proc/self")
_SAMPLING_SECONDS = 0.001


def peak_memory(
    build: Callable[..., Callable[[], object]], *arguments: object, with_files: bool = True
) -> int:
    """Return the peak memory of a call, less the memory in use before it, in bytes.

    ``build(*arguments)``, a module-level function, loads and warms up everything that should
    not count, and returns the call, which is made once in a fresh process: in this one it could
    reuse freed memory. Linux only.

    ``with_files`` counts pages of mapped files, which the system can reclaim. Without them
    memory is sampled every millisecond, as Linux keeps no such peak: a shorter peak may be
    missed.
    """
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context) as process:
        measure = _growth if with_files else _growth_without_files
        return process.submit(measure, build, *arguments).result()


def _growth(build: Callable[..., Callable[[], object]], *arguments: object) -> int:
    call = build(*arguments)
    gc.collect()
    # From here on the peak counts anew. That of getrusage would begin at the parent's.
    (_PROCESS / "clear_refs").write_text("5")
    before = _status("VmRSS")
    call()
    return _status("VmHWM") - before


def _growth_without_files(build: Callable[..., Callable[[], object]], *arguments: object) -> int:
    call = build(*arguments)
    gc.collect()
    before = peak = _status("RssAnon")
    has_ended = threading.Event()

    def sample() -> None:
        nonlocal peak
        while not has_ended.wait(_SAMPLING_SECONDS):
            peak = max(peak, _status("RssAnon"))

    sampler = threading.Thread(target=sample)
    sampler.start()
    try:
        result = call()
    finally:
        has_ended.set()
        sampler.join()
    peak = max(peak, _status("RssAnon"))
    del result  # what the call returns counts
    return peak - before


def _status(name: str) -> int:
    """Return an entry of the process's status, in bytes."""
    for line in (_PROCESS / "status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise OSError(f"{_PROCESS / 'status'} has no {name}")
