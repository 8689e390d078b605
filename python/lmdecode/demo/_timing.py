"""How long calls take that are to be compared."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

__all__ = ["fastest"]

# Calls up to this long are repeated within a turn, after an untimed one, so that they find their
# data in the caches.
_SHORT_SECONDS = 0.002


def fastest(
    calls: Mapping[str, Callable[[], object]],
    *,
    seconds: float,
    rounds: int,
    min_calls: int = 3,
) -> dict[str, float]:
    """Return by name the CPU seconds of each call's fastest run; torch has one thread.

    The calls take turns, so that what disturbs the machine disturbs all of them alike: ``rounds``
    each, or as many as its share of ``seconds`` allows, and at least ``min_calls``.
    """
    best = {name: _taken(call) for name, call in calls.items()}
    turns = {}
    for name, call in calls.items():
        if best[name] < 0.2:  # else the first call is as good as any
            best[name] = _taken(call)
        affordable = int(seconds / len(calls) / max(best[name], 1e-6))
        turns[name] = max(min_calls, min(rounds, affordable))
    for turn in range(max(turns.values())):
        for name, call in calls.items():
            if turn < turns[name]:
                best[name] = min(best[name], _turn(call, best[name] < _SHORT_SECONDS))
    return best


def _turn(call: Callable[[], object], is_short: bool) -> float:
    if not is_short:
        return _taken(call)
    call()
    return min(_taken(call) for _ in range(8))


def _taken(call: Callable[[], object]) -> float:
    start = time.thread_time()
    call()
    return time.thread_time() - start
