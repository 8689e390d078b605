"""Where a stage runs, and how it measures there."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch

Call = Callable[[], object]
Value = TypeVar("Value")
_SECONDS = 0.06  # for the runs of a call


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

    def graph_microseconds(self, call: Call) -> float | None:
        """Return the time of a call in a CUDA graph, without Python; None where none is taken."""
        if self.is_rehearsal:
            return None
        calls = 10
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
                for _ in range(calls):
                    call()
        except RuntimeError:
            self.wait()
            return None
        return self.microseconds(graph.replay) / calls

    def times(self, call: Call) -> str:
        """Return a cell: the time in a graph and, in brackets, that of calls from Python."""
        eager = self.microseconds(call)
        graph = self.graph_microseconds(call)
        return f"({eager:.1f})" if graph is None else f"{graph:.1f} ({eager:.1f})"


def row(cells: Sequence[object]) -> str:
    """Return a row of a markdown table."""
    return f"| {' | '.join(map(str, cells))} |"


def header(cells: Sequence[str]) -> list[str]:
    """Return the first two rows of a markdown table."""
    return ["", row(cells), row(["---"] * len(cells))]


def name_of(dtype: torch.dtype) -> str:
    """Return "float32" for ``torch.float32``."""
    return str(dtype).removeprefix("torch.")
