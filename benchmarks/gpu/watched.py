"""Stages that programs of the CUDA toolkit watch: compute-sanitizer and ncu."""

from __future__ import annotations

import csv
import os
import re
import shutil
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import torch

import lmdecode
from benchmarks.gpu import smoke
from benchmarks.gpu.machine import Machine, header, row


def program_for(machine: Machine, name: str, stage: str) -> tuple[str | None, str]:
    """Return a program that is to watch a stage; or None, and that it is not run.

    In a rehearsal the stage runs by itself.
    """
    if machine.is_rehearsal:
        machine.found_fault |= watched([], stage, machine).returncode != 0
    program = None if machine.is_rehearsal else _find(name)
    machine.is_left_out = program is None
    why = "a rehearsal" if machine.is_rehearsal else f"{name} is not installed"
    return program, f"Not run: {why}."


def _find(name: str) -> str | None:
    """Return a program: on the PATH, or beside nvcc."""
    nvcc = shutil.which(os.environ.get("CUDACXX", "nvcc"))
    folders = [Path(nvcc).resolve().parent] if nvcc else []
    folders += [Path("/usr/local/cuda/bin"), Path("/usr/local/cuda/compute-sanitizer")]
    path = os.pathsep.join([os.environ.get("PATH", ""), *map(str, folders)])
    return shutil.which(name, path=path)


def watched(tool: list[str], stage: str, machine: Machine) -> subprocess.CompletedProcess[str]:
    """Run a stage under a program; what it says goes to the log, too."""
    command = [*tool, sys.executable, "-m", "benchmarks.gpu.stage", stage]
    done = subprocess.run(
        [*command, "--device", machine.device.type],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    print(done.stdout, file=sys.stderr, flush=True)
    return done


def smoke_small(machine: Machine) -> Iterator[str]:
    """Run it."""
    yield from smoke.run(machine, (300, 20_000))


_SHOWN_LINES = 12  # lines of what it found


def sanitizer(machine: Machine) -> Iterator[str]:
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
            yield from ("", "```", *found[:_SHOWN_LINES], "```")


def profiled(machine: Machine) -> Iterator[str]:
    """Call them."""
    bfloat16, device = torch.bfloat16, machine.device
    tokens, keys, batch = machine.size((4096, 16384, 64), (64, 64, 2))
    q, k, v = (machine.randn(1, heads, tokens, 128, dtype=bfloat16) for heads in (32, 8, 8))
    lmdecode.sliding_window_attention(q, k, v)
    q = machine.randn(batch, 32, 1, 128, dtype=bfloat16)
    k, v = (machine.randn(batch, 8, keys, 128, dtype=bfloat16) for _ in range(2))
    lmdecode.sliding_window_decode(q, k, v)  # its parts, and what combines them
    lmdecode.reorder_cache_([k, v], torch.arange(batch, device=device).flip(0))
    states = machine.randn(2, 1, 32, tokens, 128, dtype=bfloat16)
    lse = machine.randn(2, 1, 32, tokens)
    lmdecode.merge_attention_states(states[0], lse[0], states[1], lse[1])
    rows, vocab = machine.size((512, 131_072), (2, 500))
    logits = machine.randn(rows, vocab)
    lmdecode.top_k_top_p_sample(logits, 50, 0.9, seed=1, return_logits=True)
    lmdecode.top_k_top_p_sample(logits, top_p=0.95, seed=1)
    rows, vocab = machine.size((32, 32_000), (4, 500))
    best = (machine.randn(rows, vocab), machine.randn(rows))
    lmdecode.log_softmax_top_k(*best, 8, num_beams=4)
    table = lmdecode.BeamIndirection(256, 8192, device=device).table
    parents = torch.arange(256, device=device).flip(0)
    lmdecode.update_beam_indirection_(table, parents, torch.full((256,), 8000, device=device))
    machine.wait()
    yield "called"


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


def profile(machine: Machine) -> Iterator[str]:
    """Run it on ``profiled``."""
    program, why_not = program_for(machine, "ncu", "profiled")
    if program is None:
        yield why_not
        return
    metrics = ",".join(metric for metric, *_ in _METRICS)
    command = [program, "--csv", "--print-units", "base", "--metrics", metrics]
    done = watched([*command, "--kernel-name", f"regex:{_KERNELS}"], "profiled", machine)
    machine.found_fault |= done.returncode != 0
    rows = list(_tables(done.stdout))
    if not rows:
        machine.found_fault = True
        yield f"ncu told of no kernel, status {done.returncode}: the log has what it said."
        return
    yield from header(["kernel", *(name for _, name, _ in _METRICS)])
    yield from map(row, rows)
