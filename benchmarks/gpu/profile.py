"""ncu on the main kernels: how long, how near the limits of memory and of the units."""

from __future__ import annotations

import csv
import re
from collections import defaultdict
from collections.abc import Iterator

from benchmarks.gpu.machine import Machine, header, row
from benchmarks.gpu.tools import program_for, watched

# Name of a metric, its column, and by what its value is divided.
_METRICS = (
    ("gpu__time_duration.sum", "us", 1e3),
    ("dram__throughput.avg.pct_of_peak_sustained_elapsed", "memory %", 1.0),
    ("sm__throughput.avg.pct_of_peak_sustained_elapsed", "SM %", 1.0),
    ("sm__inst_executed_pipe_tensor.avg.pct_of_peak_sustained_active", "tensor %", 1.0),
    ("sm__warps_active.avg.pct_of_peak_sustained_active", "warps %", 1.0),
    ("smsp__issue_active.avg.pct_of_peak_sustained_active", "issue %", 1.0),
    ("launch__registers_per_thread", "registers", 1.0),
)
_KERNELS = "attention|decode|combine|merge|reorder|sample|softmax|indirection"


def _tables(said: str) -> Iterator[list[str]]:
    """Yield a row for each launch that ncu's CSV tells of."""
    lines = said.splitlines()
    start = next((i for i, line in enumerate(lines) if line.startswith('"ID"')), len(lines))
    launches: dict[str, dict[str, str]] = defaultdict(dict)
    names: dict[str, str] = {}
    for entry in csv.DictReader(lines[start:]):
        if entry.get("Metric Name"):
            names[entry["ID"]] = re.split("[<(]", entry["Kernel Name"])[0].split("::")[-1]
            launches[entry["ID"]][entry["Metric Name"]] = entry["Metric Value"]
    for number, metrics in launches.items():
        cells = []
        for metric, _, scale in _METRICS:
            value = metrics.get(metric, "").replace(",", "")
            cells.append(f"{float(value) / scale:.1f}" if value else "-")
        yield [names[number], *cells]


def run(machine: Machine) -> Iterator[str]:
    """Run it on ``profiled``."""
    program, why_not = program_for(machine, "ncu", "profiled")
    if program is None:
        yield why_not
        return
    metrics = ",".join(metric for metric, *_ in _METRICS)
    done = watched(
        [
            program,
            "--csv",
            "--print-units",
            "base",
            "--metrics",
            metrics,
            "--kernel-name",
            f"regex:{_KERNELS}",
        ],
        "profiled",
        machine,
    )
    machine.found_fault |= done.returncode != 0
    rows = list(_tables(done.stdout))
    if not rows:
        machine.found_fault = True
        yield f"ncu told of no kernel, status {done.returncode}: the log has what it said."
        return
    yield from header(["kernel", *(name for _, name, _ in _METRICS)])
    yield from map(row, rows)
