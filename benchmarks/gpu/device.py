"""The device and the software, and a first call of an op."""

from __future__ import annotations

import importlib.util
import platform
import shutil
import subprocess
from collections.abc import Iterator

import torch

import lmdecode
from benchmarks.gpu.machine import Machine
from benchmarks.report import machine_line, version_of

_OPTIONAL = ("pytest", "pytest-xdist", "hypothesis", "numpy")


def _output(*command: str) -> str:
    """Return the last line of what a program says."""
    if shutil.which(command[0]) is None:
        return f"no {command[0]}"
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return (done.stdout.strip().splitlines() or ["nothing"])[-1]


def run(machine: Machine) -> Iterator[str]:
    """Describe the machine; draw tokens on its default stream and on another."""
    yield f"- {platform.platform()}; {machine_line(torch.get_num_threads())}"
    yield f"- CUDA {torch.version.cuda}"
    yield "- " + ", ".join(f"{package} {version_of(package)}" for package in _OPTIONAL)
    if importlib.util.find_spec("lmdecode._store") is None:
        yield "- built without the KV store"
    if not machine.is_rehearsal:
        if not torch.cuda.is_available():
            raise SystemExit(f"lmdecode: torch {torch.__version__} sees no CUDA device")
        if not lmdecode.has_cuda():
            raise SystemExit("lmdecode: its CUDA kernels are not there: it was built without nvcc")
        about = torch.cuda.get_device_properties(0)
        yield (
            f"- {about.name}, compute capability {about.major}.{about.minor}, "
            f"{about.multi_processor_count} multiprocessors, L2 {about.L2_cache_size >> 20} MiB, "
            f"memory {about.total_memory >> 30} GiB"
        )
        yield f"- driver {_output('nvidia-smi', '--query-gpu=driver_version', '--format=csv')}"
        yield f"- nvcc: {_output('nvcc', '--version')}"
    logits = torch.randn(3, 1000, generator=torch.Generator().manual_seed(1))
    expected = lmdecode.top_k_top_p_sample(logits, 50, 0.9, seed=7).index.tolist()
    drawn = [_draw(machine, logits)]
    if not machine.is_rehearsal:
        with torch.cuda.stream(torch.cuda.Stream()):
            drawn.append(_draw(machine, logits))
    yield f"- tokens {expected} on the CPU, {' and '.join(map(str, drawn))} on {machine.device}"
    machine.found_fault = any(tokens != expected for tokens in drawn)


def _draw(machine: Machine, logits: torch.Tensor) -> list[int]:
    tokens = lmdecode.top_k_top_p_sample(logits.to(machine.device), 50, 0.9, seed=7).index
    return tokens.tolist()
