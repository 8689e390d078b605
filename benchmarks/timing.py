"""Timing of calls that are to be compared: interleaved in one process, minimum and median."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from benchmarks.core_state import state_of

__all__ = ["CacheEvictor", "Timing", "interleaved"]

_CLOCKS = {
    "thread": time.thread_time_ns,
    "process": time.process_time_ns,
    "wall": time.perf_counter_ns,
}
_RETURNED = "returned"
# Calls up to this long are repeated within a turn, the first one untimed, so that they find their
# data in the caches; longer ones do not notice.
_SHORT_CALL_NS = 2_000_000
_TURN_NS = 1_000_000
_MAX_CALLS_A_TURN = 16


@dataclass(frozen=True)
class Timing:
    """Durations of one contestant's calls.

    Attributes
    ----------
    samples
        Seconds, in the order of the calls.
    states
        Of the core in each of them, see ``core_state``; none where they were not asked for.
    """

    samples: tuple[float, ...]
    states: tuple[str, ...] = ()

    @property
    def minimum(self) -> float:
        """Seconds of the fastest call: the figure to compare, other load only ever adds."""
        return min(self.samples)

    @property
    def median(self) -> float:
        """Seconds of the middle call."""
        return statistics.median(self.samples)

    def in_state(self, state: str) -> tuple[float, ...]:
        """Return the samples of one state of the core."""
        return tuple(s for s, of in zip(self.samples, self.states, strict=True) if of == state)


class CacheEvictor:
    """Streams a buffer through the caches, so that the next call reads its data from memory.

    Parameters
    ----------
    size
        Bytes, a multiple of 8; more than the largest cache.
    """

    def __init__(self, size: int = 96 << 20) -> None:
        self._buffer = torch.ones(size // 8, dtype=torch.int64)

    def __call__(self) -> None:
        """Read the whole buffer."""
        self._buffer.sum()


def interleaved(
    contestants: Mapping[str, Callable[[], object]],
    *,
    seconds: float = 1.0,
    rounds: int = 40,
    min_calls: int = 3,
    clock: str = "thread",
    evictor: CacheEvictor | None = None,
    rewarm: Mapping[str, Callable[[], object]] | None = None,
    threads: Mapping[str, int] | None = None,
    on_turn: Callable[[float], None] | None = None,
    probe: Callable[[], float] | None = None,
) -> dict[str, Timing]:
    """Time several calls in turns, so that what disturbs the machine disturbs all of them alike.

    In each round every contestant has a turn, the round's first one changing from round to round.
    A slow contestant takes part in as many rounds, evenly spread, as its share of the time allows.

    Parameters
    ----------
    contestants
        Name to function of no arguments.
    seconds
        Time to spend, shared equally; slow contestants may exceed it by their ``min_calls``.
    rounds
        Number of rounds.
    min_calls
        Turns that even the slowest contestant has.
    clock
        "thread": CPU time of the calling thread, right where all work happens in it, and the less
        disturbed by other processes; "process": that of all threads together, for a contestant that
        works in one of its own; "wall": elapsed time, for work of several threads; "returned": the
        seconds that the call returns, for work of other processes, which time it themselves.
    evictor
        Called before each timed call, for cold figures. None: warm, short calls come directly
        after an untimed one of the same contestant.
    rewarm
        Name to a function called between the evictor and the timed call: the same work on a small
        other input, so that the call finds its data in memory but its code, and the interpreter's,
        in the caches. Eviction alone makes each call, however small, slower by what loading its
        code costs: tens of microseconds for a torch op, more for several.
    threads
        Name to number of torch threads during that contestant's turns. Where it has no entry, the
        number in force when ``interleaved`` was called.
    on_turn
        Called after each turn with the share of the work done since its last call, for a progress
        bar; the shares add up to 1.
    probe
        Called right before and right after each timed call: ``core_state.probe()``.

    Returns
    -------
    dict
        Name to ``Timing``.

    Raises
    ------
    ValueError
        For another ``clock``.
    """
    if clock not in (*_CLOCKS, _RETURNED):
        expected = ", ".join((*_CLOCKS, _RETURNED))
        raise ValueError(f"interleaved: clock is {clock!r}; expected one of {expected}")
    now = _CLOCKS.get(clock)
    default_threads = torch.get_num_threads()
    threads = threads or {}
    rewarm = rewarm or {}
    samples: dict[str, list[int]] = {name: [] for name in contestants}
    states: dict[str, list[str]] = {name: [] for name in contestants}

    def turn(name: str, calls: int, warm_up: bool) -> None:
        call, prepare = contestants[name], rewarm.get(name)
        wanted = threads.get(name, default_threads)
        if torch.get_num_threads() != wanted:
            torch.set_num_threads(wanted)
        if warm_up:
            call()
        record = samples[name].append
        for _ in range(calls):
            if evictor is not None:
                evictor()
                if prepare is not None:
                    prepare()
            if now is None:
                record(round(call() * 1e9))  # type: ignore[operator]
                continue
            before = 0.0 if probe is None else probe()
            start = now()
            call()
            record(now() - start)
            if probe is not None:
                states[name].append(state_of(before, probe()))

    was_collecting = gc.isenabled()
    gc.disable()
    try:
        cost = {}
        for name in contestants:
            turn(name, 1, warm_up=False)
            if samples[name][0] < 100 * _SHORT_CALL_NS:  # else the first call is as good as any
                turn(name, 1, warm_up=True)
            cost[name] = max(samples[name][-1], 1000)
            samples[name].clear()
            states[name].clear()
        calls_a_turn, turns = {}, {}
        overhead = 0
        if evictor is not None:
            start = time.perf_counter_ns()
            evictor()
            overhead = time.perf_counter_ns() - start
        for name, ns in cost.items():
            calls = 1
            if evictor is None and ns < _SHORT_CALL_NS:
                calls = max(1, min(_MAX_CALLS_A_TURN, _TURN_NS // ns))
            calls_a_turn[name] = calls
            turn_ns = (calls + 1) * ns if ns < _SHORT_CALL_NS else ns
            share = seconds * 1e9 / len(cost)
            turns[name] = max(min_calls, min(rounds, int(share / (turn_ns + overhead))))
        rounds = max(rounds, min_calls)
        total = sum(turns[name] * (cost[name] * calls_a_turn[name] + overhead) for name in cost)
        names = list(contestants)
        for round_ in range(rounds):
            for step in range(len(names)):
                name = names[(round_ + step) % len(names)]
                if round_ * turns[name] // rounds == (round_ + 1) * turns[name] // rounds:
                    continue
                turn(name, calls_a_turn[name], evictor is None and cost[name] < _SHORT_CALL_NS)
                if on_turn is not None:
                    on_turn((cost[name] * calls_a_turn[name] + overhead) / total)
    finally:
        if was_collecting:
            gc.enable()
        if torch.get_num_threads() != default_threads:
            torch.set_num_threads(default_threads)
    return {
        name: Timing(tuple(ns * 1e-9 for ns in taken), tuple(states[name]))
        for name, taken in samples.items()
    }
