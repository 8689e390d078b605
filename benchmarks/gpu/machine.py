"""Where a stage runs, and how it measures there."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, TypeVar

import torch

from benchmarks.harness import LIMIT, OURS, Case, Contestant, Effort, run_case
from benchmarks.report import results_table

Call = Callable[[], object]
Value = TypeVar("Value")
_SECONDS = 0.01  # for the runs of a call, each time that the harness asks
_EFFORT = Effort(seconds=0.0, rounds=3, min_calls=3)
_CALLS_OF_A_GRAPH = 10


class Machine:
    """A CUDA device, or the CPU that stands in for one.

    Parameters
    ----------
    device
        "cuda" or "cpu".

    Attributes
    ----------
    is_rehearsal
        Whether the CPU stands in: sizes are tiny and no figure counts.
    found_fault
        Set by a stage whose results are wrong.
    is_left_out
        Set by a stage that did not run and said why.
    """

    def __init__(self, device: str) -> None:
        self.device = torch.device(device)
        self.is_rehearsal = device == "cpu"
        self.found_fault = False
        self.is_left_out = False

    def size(self, real: Value, tiny: Value) -> Value:
        """Return what the device takes, or what the rehearsal does."""
        return tiny if self.is_rehearsal else real

    def randn(self, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Return normal values on the device, the same at each call."""
        generator = torch.Generator(self.device).manual_seed(0)
        return torch.randn(shape, device=self.device, generator=generator).to(dtype)

    def wait(self) -> None:
        """Wait until the device has done everything."""
        if not self.is_rehearsal:
            torch.cuda.synchronize()

    def microseconds(self, call: Call) -> float:
        """Return the median time of a call, by events around runs of several."""
        if self.is_rehearsal:
            call()
            start = time.perf_counter()
            call()
            return (time.perf_counter() - start) * 1e6
        for _ in range(3):
            call()
        self.wait()
        start = time.perf_counter()
        call()
        self.wait()
        once = max(time.perf_counter() - start, 1e-6)
        calls = max(1, min(20, int(_SECONDS / 10 / once)))
        rounds = max(3, min(20, int(_SECONDS / calls / once)))
        times = []
        for _ in range(rounds):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            for _ in range(calls):
                call()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end) * 1e3 / calls)
        return sorted(times)[rounds // 2]

    def contestants(self, **calls: Call) -> list[Contestant]:
        """Return each in a CUDA graph, where one is taken, and ours from Python, too.

        They are ours, the limit, and peers: ``torch...`` where they do all of the work.
        """
        made = []
        for name, call in calls.items():
            title = {"ours": OURS, "limit": LIMIT}.get(name, name.replace("_", " "))
            graph = self._graph_of(call)
            is_whole = name in ("ours", "limit") or name.startswith("torch")
            made.append(Contestant(title, partial(self._seconds, call, graph), is_whole))
            if name == "ours" and graph is not None:
                made.append(Contestant("from Python", partial(self._seconds, call, None), False))
        return made

    def _seconds(self, call: Call, graph: Any) -> float:
        if graph is None:
            return self.microseconds(call) * 1e-6
        return self.microseconds(graph.replay) * 1e-6 / _CALLS_OF_A_GRAPH

    def _graph_of(self, call: Call) -> Any:
        """Return a CUDA graph of calls; None where none is taken."""
        if self.is_rehearsal:
            return None
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                call()
        torch.cuda.current_stream().wait_stream(side)
        self.wait()
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph):
                for _ in range(_CALLS_OF_A_GRAPH):
                    call()
        except RuntimeError:
            self.wait()
            return None
        return graph

    def tables(self, cases: Iterable[Case]) -> Iterator[str]:
        """Time cases by the harness of all benchmarks; yield a table of each group when it ends."""
        yield "Ours, an op in a CUDA graph (the median of all), what limits it, and how many times"
        yield "as long peers take: torch's in a graph too, where one is taken, ours from Python."
        for group, members in itertools.groupby(cases, lambda case: case.group):
            results = [run_case(case, _EFFORT, torch.get_num_threads()) for case in members]
            yield from ("", f"### {group}", "", *results_table(results).splitlines())

    def case(
        self, group: str, name: str, make: Callable[[], list[Contestant]], **shape: object
    ) -> Case:
        """Return a case whose contestants time themselves, by events of the device."""
        return Case(group, name, shape, lambda with_peers: make(), clock="returned")


def row(cells: Sequence[object]) -> str:
    """Return a row of a markdown table."""
    return f"| {' | '.join(map(str, cells))} |"


def header(cells: Sequence[str]) -> list[str]:
    """Return the first two rows of a markdown table."""
    return ["", row(cells), row(["---"] * len(cells))]


def name_of(dtype: torch.dtype) -> str:
    """Return "float32" for ``torch.float32``."""
    return str(dtype).removeprefix("torch.")
