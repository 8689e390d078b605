"""The tests that run on a device, in parallel where pytest-xdist is there."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from benchmarks.gpu.machine import Machine

_ROOT = Path(__file__).resolve().parents[2]
# Nothing of these is on a device; test_abi.py is about the library as it is shipped.
_LEFT_OUT = {"cpp", "store", "support", "test_abi.py", "transformers_4_38"}
_TOTALS = re.compile(r"\d+ (?:passed|failed|error|skipped|deselected)")


def _has(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


def _batches(machine: Machine, in_parallel: bool) -> list[list[str]]:
    """Return the paths of each run of pytest: a crash takes the run along, unless parallel."""
    if machine.is_rehearsal:
        return [["tests/kv_cache/test_block_table.py"]]
    files = sorted((_ROOT / "tests").rglob("test_*.py"))
    parts = dict.fromkeys(path.relative_to(_ROOT).parts[1] for path in files)
    paths = [f"tests/{part}" for part in parts if part not in _LEFT_OUT]
    return [paths] if in_parallel else [[path] for path in paths]


def run(machine: Machine) -> Iterator[str]:
    """Run them; the names of those that fail come as they fail, all else is in the log."""
    if not _has("pytest"):
        machine.found_fault = True
        yield "Not run: pytest is not installed."
        return
    in_parallel = _has("xdist")
    yield from (
        f"- {module} is not installed: {what}"
        for module, what in (
            ("xdist", "one test after another"),
            ("hypothesis", "the tests that need it are skipped or fail to import"),
            ("transformers", "the tests that need it are skipped"),
        )
        if not _has(module)
    )
    cores = machine.size(os.cpu_count() or 1, 2)
    parallel = ["-n", str(cores)] if in_parallel else []
    for paths in _batches(machine, in_parallel):
        yield from _pytest(machine, [*parallel, *paths])


def _pytest(machine: Machine, arguments: list[str]) -> Iterator[str]:
    command = [sys.executable, "-m", "pytest", "-vv", "--tb=short", "-p", "no:cacheprovider"]
    command += ["-p", "benchmarks.gpu.pytest_device", "-m", "not slow", "-k", machine.device.type]
    process = subprocess.Popen(
        [*command, *arguments],
        cwd=_ROOT,
        stdout=subprocess.PIPE,
        stderr=sys.stderr,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert process.stdout is not None
    totals = "no totals: pytest ended early"
    for line in process.stdout:
        print(line, end="", file=sys.stderr, flush=True)
        # As each fails, and again in the summary at the end, with the reason.
        if re.search(r"(^|\s)(FAILED|ERROR)(\s|$)", line):
            yield f"- {line.strip()[:300]}"
        if _TOTALS.search(line):
            totals = line.strip("= \n")
    code = process.wait()
    machine.found_fault |= code not in (0, 5)  # 5: none was chosen
    yield f"- {' '.join(arguments)}: status {code}; {totals}"
