"""compute-sanitizer on the smoke: reads and writes out of bounds, and races in shared memory."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.gpu.machine import Machine
from benchmarks.gpu.tools import program_for, watched

_SHOWN = 12  # lines of what it found


def run(machine: Machine) -> Iterator[str]:
    """Run memcheck, then racecheck."""
    program, why_not = program_for(machine, "compute-sanitizer", "smoke_small")
    if program is None:
        yield why_not
        return
    for tool in ("memcheck", "racecheck"):
        done = watched([program, "--tool", tool, "--error-exitcode", "9"], "smoke_small", machine)
        machine.found_fault |= done.returncode != 0
        found = [line for line in done.stdout.splitlines() if line.startswith("=========")]
        yield f"- {tool}: status {done.returncode}; {found[-1].strip('= ') if found else 'silent'}"
        if done.returncode != 0:
            yield from ("", "```", *found[:_SHOWN], "```")
