"""Peak memory of a call without the pages of mapped files, which the system can reclaim."""

import gc
import threading
from collections.abc import Callable

from lmdecode.demo.peak_memory import in_a_process, status

_SAMPLING_SECONDS = 0.001


def peak_without_files(build: Callable[..., Callable[[], object]], *arguments: object) -> int:
    """As ``peak_memory``, sampled every millisecond: a shorter peak may be missed."""
    return in_a_process(_growth, build, *arguments)


def _growth(build: Callable[..., Callable[[], object]], *arguments: object) -> int:
    call = build(*arguments)
    gc.collect()
    before = peak = status("RssAnon")
    has_ended = threading.Event()

    def sample() -> None:
        nonlocal peak
        while not has_ended.wait(_SAMPLING_SECONDS):
            peak = max(peak, status("RssAnon"))

    sampler = threading.Thread(target=sample)
    sampler.start()
    try:
        result = call()
    finally:
        has_ended.set()
        sampler.join()
    peak = max(peak, status("RssAnon"))
    del result  # what the call returns counts
    return peak - before
