"""Programs of the CUDA toolkit that watch a stage."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from benchmarks.gpu.machine import Machine


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
