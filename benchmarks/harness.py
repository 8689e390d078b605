"""Cases and contestants, and the loop that times them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace

import torch
from tqdm import tqdm

from benchmarks import core_state
from benchmarks.timing import CacheEvictor, Timing, interleaved

OURS = "lmdecode"
LIMIT = "limit"


@dataclass(frozen=True)
class Effort:
    """How long to measure: seconds a case (peers with the slowest calls exceed it), rounds."""

    seconds: float
    rounds: int
    min_calls: int

    def as_dict(self) -> dict[str, float]:
        """Return the numbers by name."""
        return asdict(self)


FULL = Effort(seconds=2.5, rounds=60, min_calls=3)
QUICK = Effort(seconds=0.3, rounds=10, min_calls=1)


@dataclass(frozen=True)
class Contestant:
    """One way to do the work of a case.

    Attributes
    ----------
    name
        Column of the table; ``OURS`` and ``LIMIT`` are special.
    call
        Does the work once.
    complete
        Whether it does all of the work. A part of it ("torch.topk alone") is shown, but is no peer
        that can be the best one.
    threads
        Torch threads, where they differ from those of the run.
    rewarm
        The same on a small other input, see ``interleaved``.
    shorter
        Calls of the same with fewer steps, and how many fewer: the time is then that of a step, a
        call's less the fastest shorter one's, over the number. What a call begins with cancels out.
    """

    name: str
    call: Callable[[], object]
    complete: bool = True
    threads: int | None = None
    rewarm: Callable[[], object] | None = None
    shorter: tuple[Callable[[], object], int] | None = None


@dataclass(frozen=True)
class Case:
    """One row of the table.

    Attributes
    ----------
    group, name
        ``group/name`` is what is chosen on the command line.
    shape
        What the table's columns say: batch, vocabulary, dtype.
    caches
        "warm": the inputs are in the caches, "cold": the inputs are in memory alone, "all cold": so
        is the code.
    contestants
        Builds inputs and contestants, only when the case runs. With False: ours alone.
    threads
        Torch threads of the case; None: those of the run.
    clock
        See ``interleaved``; None: "thread" with one thread, "wall" with several.
    effort
        How long to measure, where it differs from the run's.
    has_tiles
        Whether its kernels multiply tiles, where there are: the core's states are then told apart.
    """

    group: str
    name: str
    shape: dict[str, object]
    contestants: Callable[[bool], list[Contestant]]
    caches: str = "warm"
    threads: int | None = None
    clock: str | None = None
    effort: Effort | None = None
    has_tiles: bool = False

    @property
    def key(self) -> str:
        """Identify the case in this run and in others."""
        shape = " ".join(f"{name}={value}" for name, value in self.shape.items())
        threads = f" threads={self.threads}" if self.threads is not None else ""
        return f"{self.group}/{self.name} {shape}{threads} {self.caches}"


@dataclass
class Result:
    """The timings of a case."""

    case: Case
    threads: int
    timings: dict[str, Timing]
    complete: dict[str, bool]

    def microseconds(self, name: str) -> float | None:
        """Return the fastest call of a contestant, None if it did not run."""
        timing = self.timings.get(name)
        return None if timing is None else timing.minimum * 1e6

    def ratio(self, name: str) -> float | None:
        """How many times longer than ours a contestant takes."""
        ours, other = self.microseconds(OURS), self.microseconds(name)
        return None if ours is None or other is None else other / ours

    @property
    def times_limit(self) -> float | None:
        """How many times longer than the limit ours takes; None: the clock saw none of it."""
        ratio = self.ratio(LIMIT)
        return 1 / ratio if ratio else None

    def best_peer(self) -> tuple[str, float] | None:
        """Name and ratio of the fastest contestant that does all of the work."""
        peers = [
            (ratio, name)
            for name, complete in self.complete.items()
            if complete and name not in (OURS, LIMIT) and (ratio := self.ratio(name)) is not None
        ]
        return (min(peers)[1], min(peers)[0]) if peers else None

    def as_json(self) -> dict[str, object]:
        """Return everything measured, microseconds."""
        return {
            "case": self.case.key,
            "group": self.case.group,
            "name": self.case.name,
            "shape": self.case.shape,
            "caches": self.case.caches,
            "threads": self.threads,
            "times": {
                name: {
                    "minimum_us": timing.minimum * 1e6,
                    "median_us": timing.median * 1e6,
                    "calls": len(timing.samples),
                    **{
                        f"{state}_us": [time * 1e6 for time in timing.in_state(state)]
                        for state in core_state.STATES
                        if timing.states
                    },
                }
                for name, timing in self.timings.items()
            },
        }


def chosen(cases: list[Case], names: list[str]) -> list[Case]:
    """Return the cases whose key has one of the names in it, all of them for no names."""
    return [case for case in cases if not names or any(name in case.key for name in names)]


def run_case(
    case: Case,
    effort: Effort,
    threads: int,
    evictor: CacheEvictor | None = None,
    with_peers: bool = True,
    on_turn: Callable[[float], None] | None = None,
) -> Result:
    """Time the contestants of one case."""
    torch.set_num_threads(case.threads or threads)
    contestants = case.contestants(with_peers)
    effort = case.effort or effort
    # CPU time of this thread tells nothing where other threads work for it.
    several = (case.threads or threads) > 1 or any((c.threads or 1) > 1 for c in contestants)
    shorter = {c.name: c.shorter for c in contestants if c.shorter is not None}
    calls = {c.name: c.call for c in contestants}
    calls |= {f"{name}, shorter": call for name, (call, _) in shorter.items()}
    timings = interleaved(
        calls,
        seconds=effort.seconds,
        rounds=effort.rounds,
        min_calls=effort.min_calls,
        clock=case.clock or ("wall" if several else "thread"),
        evictor=None if case.caches == "warm" else evictor,
        rewarm={c.name: c.rewarm for c in contestants if c.rewarm and case.caches == "cold"},
        threads={c.name: c.threads for c in contestants if c.threads is not None},
        on_turn=on_turn,
        # It tells of the core of this thread alone.
        probe=core_state.probe() if case.has_tiles and not several else None,
    )
    for name, (_, steps) in shorter.items():
        start = timings.pop(f"{name}, shorter").minimum
        # Of very small calls the difference may be one of noise.
        of_steps = (max((s - start) / steps, 1e-9) for s in timings[name].samples)
        timings[name] = replace(timings[name], samples=tuple(of_steps))
    complete = {c.name: c.complete for c in contestants}
    return Result(case, case.threads or threads, timings, complete)


def run_cases(cases: list[Case], effort: Effort, threads: int) -> Iterator[Result]:
    """Time cases one after another, with a progress bar on stderr."""
    evictor = CacheEvictor()
    with tqdm(
        disable=None,  # in a terminal only
        total=len(cases),
        unit="case",
        dynamic_ncols=True,
        bar_format="{l_bar}{bar}| {n:.1f}/{total} cases [{elapsed}<{remaining}]",
    ) as bar:
        for number, case in enumerate(cases):
            bar.set_description(case.key)
            yield run_case(case, effort, threads, evictor, on_turn=bar.update)
            bar.n = number + 1
            bar.refresh()
