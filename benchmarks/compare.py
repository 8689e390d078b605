"""Another commit's build against this tree's, case by case, in alternating processes."""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from tqdm import tqdm

from benchmarks.harness import OURS, Case, Effort
from benchmarks.report import markdown_table

_ROOT = Path(__file__).resolve().parent.parent
_PAIRS = 9


@contextlib.contextmanager
def _built(ref: str) -> Iterator[Path]:
    """Check a commit out, build it and give the folder it is installed in, all temporary."""
    with tempfile.TemporaryDirectory(prefix="lmdecode-compare-") as folder:
        tree, installed = Path(folder, "tree"), Path(folder, "installed")
        git = ["git", "-C", str(_ROOT), "worktree"]
        subprocess.run([*git, "add", "--quiet", "--detach", str(tree), ref], check=True)
        try:
            command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-build-isolation"]
            command += ["--no-deps", "--target", str(installed), str(tree)]
            print(f"building {ref} ...", file=sys.stderr)
            subprocess.run(command, check=True)
            yield installed
        finally:
            subprocess.run([*git, "remove", "--force", str(tree)], check=True)


class _Worker:
    """A process with one of the builds: case number in, timings out."""

    def __init__(self, library: Path | None, quick_cases: list[str], effort: Effort, threads: int):
        setup = {
            "library": str(library) if library else None,
            "cases": quick_cases,
            "effort": effort.as_dict(),
            "threads": threads,
        }
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.compare_worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=_ROOT,
            env={**os.environ, "OMP_WAIT_POLICY": "PASSIVE"},
        )
        self._ask(setup)

    def _ask(self, question: object) -> object:
        self._process.stdin.write(json.dumps(question) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if not answer:
            raise SystemExit(
                "compare: a worker ended with the error above: one of the builds cannot run this "
                "tree's benchmarks"
            )
        return json.loads(answer)

    def time(self, number: int) -> float | None:
        """Return seconds of the fastest call; None where this build cannot run the case."""
        return self._ask(number)

    def close(self) -> None:
        """End the process."""
        self._process.stdin.close()
        self._process.wait()


def compare(
    ref: str, cases: list[Case], effort: Effort, threads: int
) -> tuple[str, list[dict[str, object]]]:
    """Time ours in both builds in turns; the table, and the same figures for JSON.

    Both run this tree's benchmarks, on the builds' own lmdecode.
    """
    keys = [case.key for case in cases]
    share = Effort(effort.seconds / _PAIRS, effort.rounds, 1)
    figures, rows = [], []
    with _built(ref) as installed:
        workers = []
        try:
            for library in (None, installed):
                workers.append(_Worker(library, keys, share, threads))
            for number, case in enumerate(tqdm(cases, unit="case", dynamic_ncols=True)):
                pairs = []
                for turn in range(_PAIRS):
                    order = (0, 1) if turn % 2 == 0 else (1, 0)
                    pair = [0.0, 0.0]
                    for side in order:
                        pair[side] = workers[side].time(number)
                    pairs.append(pair)
                if any(None in pair for pair in pairs):
                    rows.append([case.key, "-", "-", "-", "-"])
                    continue
                ratios = sorted(this / that for this, that in pairs)
                this_us = min(pair[0] for pair in pairs) * 1e6
                that_us = min(pair[1] for pair in pairs) * 1e6
                middle = statistics.median(ratios)
                figures.append({"case": case.key, OURS: this_us, ref: that_us, "ratios": ratios})
                spread = f"{ratios[1]:.2f}-{ratios[-2]:.2f}"
                rows.append([case.key, f"{this_us:.1f}", f"{that_us:.1f}", f"{middle:.3f}", spread])
        finally:
            for worker in workers:
                worker.close()
    head = ["case", "this tree us", f"{ref} us", "this / that, median of pairs", "spread"]
    return markdown_table(head, rows, 1), figures
