"""Torch's threads for parallel work, and our own threads that must end with Python."""

from __future__ import annotations

import atexit
import ctypes
import sys
import weakref
from pathlib import Path
from typing import Any

__all__ = ["release_worker_threads", "stopped_at_exit"]

#: Owners of computing threads, to be stopped: at interpreter exit these would abort the process.
stopped_at_exit: weakref.WeakSet[Any] = weakref.WeakSet()

_SOFT = 1  # omp_pause_soft: settings stay


@atexit.register
def _stop_all() -> None:
    for owner in tuple(stopped_at_exit):
        owner.stop()


def release_worker_threads() -> None:
    """End the worker threads of the calling thread; its next parallel work starts others.

    Torch keeps one set of them for each thread that asked for some.

    GNU's OpenMP lets workers wait awake only while all there are have a processor each. Those of a
    thread that has nothing more to compute count, too: without them, workers of the thread that
    does compute begin within 2 us instead of 60.
    Does nothing where torch uses another library of threads.
    """
    for library in _libraries():
        pause = getattr(library, "omp_pause_resource_all", None)
        if pause is not None:
            pause(_SOFT)


def _libraries() -> list[ctypes.CDLL]:
    """Return the OpenMP libraries of GNU that the process has loaded."""
    if not sys.platform.startswith("linux"):
        return []
    names = set()
    try:
        for line in Path("/proc/self/maps").read_text().splitlines():
            name = line.split(maxsplit=5)[-1]
            if "libgomp" in name and name.startswith("/"):
                names.add(name)
        return [ctypes.CDLL(name) for name in sorted(names)]
    except OSError:
        return []
