"""Results as markdown: the machine, the cases, the goals."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
import re
import statistics
import subprocess
from collections.abc import Iterable
from pathlib import Path

import torch

import lmdecode
from benchmarks.core_state import STATES
from benchmarks.goals import GoalOutcome
from benchmarks.harness import LIMIT, OURS, Result
from benchmarks.timing import Timing

START, END = "<!-- results: written by python -m benchmarks -->", "<!-- end of results -->"
ROOT = Path(__file__).resolve().parent.parent
# Where `python -m benchmarks --output` writes by default.
RESULTS = Path(__file__).resolve().parent / "results" / "cpu.md"


def cpu_model() -> str:
    """Return the processor's name, family and model."""
    fields = {}
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            name, _, value = line.partition(":")
            fields.setdefault(name.strip(), value.strip())
    except OSError:
        return platform.processor() or platform.machine()
    model = fields.get("model name", platform.machine())
    if "cpu family" in fields:
        model += f" (family {fields['cpu family']}, model {fields.get('model', '?')})"
    return model


def _commit() -> str:
    def git(*arguments: str) -> str:
        run = subprocess.run(
            ["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, check=False
        )
        return run.stdout.strip() if run.returncode == 0 else ""

    commit = git("rev-parse", "--short=12", "HEAD")
    if not commit:
        return "unknown"
    changed = git("status", "--porcelain", "--untracked-files=no", "--", "csrc", "python")
    return commit + (" with changes" if changed else "")


def version_of(package: str) -> str:
    """Return an installed package's version, or "not installed"."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def machine(threads: int) -> dict[str, str]:
    """Describe where and with what the run was made."""
    load = f"{os.getloadavg()[0]:.1f} at the start" if hasattr(os, "getloadavg") else ""
    return {
        "CPU": f"{cpu_model()}, {os.cpu_count()} cores, kernels: {lmdecode.cpu_capability()}",
        "date": datetime.date.today().isoformat(),
        "threads": str(threads),
        "commit": _commit(),
        "lmdecode": lmdecode.__version__,
        "torch": torch.__version__,
        "transformers": version_of("transformers"),
        "llama-cpp-python": version_of("llama-cpp-python"),
        "Python": platform.python_version(),
        "load average": load,
    }


def machine_line(threads: int) -> str:
    """Return what ``machine`` describes in a line."""
    return "; ".join(f"{name}: {fact}" for name, fact in machine(threads).items())


def memory_of(process: int | str = "self") -> tuple[int, int]:
    """Return the resident bytes of a process: what is its own, and all (Linux)."""
    status = Path(f"/proc/{process}/status").read_text()
    found = dict(re.findall(r"(RssAnon|VmRSS):\s+(\d+) kB", status))
    return int(found["RssAnon"]) << 10, int(found["VmRSS"]) << 10


def markdown_table(head: list[str], rows: Iterable[list[str]], numbers_from: int) -> str:
    """Lay out a table; columns from ``numbers_from`` on are right-aligned."""
    rows = [head, *rows]
    widths = [max(3, *(len(row[column]) for row in rows)) for column in range(len(head))]
    lines = []
    for number, row in enumerate(rows):
        cells = [
            cell.rjust(width) if column >= numbers_from else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("| " + " | ".join(cells) + " |")
        if number == 0:
            rules = [
                "-" * (width - 1) + (":" if column >= numbers_from else "-")
                for column, width in enumerate(widths)
            ]
            lines.append("| " + " | ".join(rules) + " |")
    return "\n".join(lines)


def _number(value: float | None, digits: int = 3) -> str:
    """Write three significant digits, no exponent."""
    if value is None:
        return "-"
    whole = len(str(int(abs(value))))
    return f"{value:.{max(0, digits - whole)}f}"


def _times(value: float | None) -> str:
    return "-" if value is None else _number(value) + "x"


def _in_state(timing: Timing | None, state: str) -> str:
    """Write the median of a state of the core, and of how many calls."""
    seconds = timing.in_state(state) if timing is not None and timing.states else ()
    return f"{_number(statistics.median(seconds) * 1e6)} ({len(seconds)})" if seconds else "-"


def results_table(results: list[Result]) -> str:
    """Make the table of one group of cases: one row a case."""
    peers = list(
        dict.fromkeys(
            name for result in results for name in result.timings if name not in (OURS, LIMIT)
        )
    )
    shape_names = list(results[0].case.shape)
    asked = dict.fromkeys(
        name for result in results for name, timing in result.timings.items() if timing.states
    )
    states = {
        f"{name}, {state} core us (calls)": (name, state) for state in STATES for name in asked
    }
    head = ["case", *shape_names, "caches", "ours us (median)", "limit us", "of limit"]
    rows = []
    for result in results:
        ours = result.timings[OURS]
        share = result.times_limit
        best = result.best_peer()
        rows.append(
            [
                result.case.name,
                *(str(result.case.shape[name]) for name in shape_names),
                result.case.caches,
                f"{_number(ours.minimum * 1e6)} ({_number(ours.median * 1e6)})",
                _number(result.microseconds(LIMIT)),
                "-" if share is None else f"{100 / share:.0f}%",
                "-" if best is None else f"{_times(best[1])} {best[0]}",
                *(_times(result.ratio(peer)) for peer in peers),
                *(_in_state(result.timings.get(name), state) for name, state in states.values()),
            ]
        )
    return markdown_table([*head, "best peer", *peers, *states], rows, 1)


def goals_table(outcomes: list[GoalOutcome]) -> str:
    """Make the table of goals: a line each, judged on its worst case."""
    rows = []
    for outcome in outcomes:
        goal = outcome.goal
        if outcome.where is None:
            measured, where, ours = "-", "-", "-"
        else:
            shape = outcome.where.case.shape
            where = ", ".join(f"{name} {value}" for name, value in shape.items())
            measured = _number(outcome.worst) + goal.unit
            if outcome.cases > 1:
                measured += f" (best {_number(outcome.best)}, {outcome.cases} cases)"
            ours = _number(outcome.ours_us)
        rows.append(
            [
                f"{goal.name}, {goal.caches}",
                f"{goal.direction} {goal.bound:g}{goal.unit}",
                goal.peer,
                measured,
                where,
                ours,
                {True: "met", False: "**missed**", None: "not measured"}[outcome.met],
            ]
        )
    head = ["case", "goal", "against", "measured, worst case", "worst case", "ours us", ""]
    return markdown_table(head, rows, len(head))


def section(about: dict[str, str], table: str, goals: str | None, notes: list[str]) -> str:
    """Put together what a run has of one group of cases."""
    parts = ["; ".join(f"{name} {value}" for name, value in about.items() if value) + ".", *notes]
    if goals is not None:
        parts += ["Goals:", goals, "Cases:"]
    return "\n\n".join([*parts, table])


def document(found: dict[str, str]) -> str:
    """Put the sections of groups together."""
    return "\n\n".join(f"### {group}\n\n{text}" for group, text in found.items()) + "\n"


def sections(text: str) -> dict[str, str]:
    """Take a document apart: name of a group to its text."""
    found = {}
    for part in ("\n" + text.partition(END)[0]).split("\n### ")[1:]:
        group, _, body = part.partition("\n")
        found[group] = body.strip()
    return found


def write(path: Path, found: dict[str, str]) -> None:
    """Write a run to a file.

    Where it has the two marker lines, between them: the sections of groups that the run does not
    have stay, so that one area can be measured anew.
    """
    text = document(found)
    if path.exists() and START in (old := path.read_text()) and END in old:
        before, _, rest = old.partition(START)
        between, _, after = rest.partition(END)
        together = {**sections(between), **found}
        text = document(dict(sorted(together.items(), key=lambda item: item[0].lower())))
        text = f"{before}{START}\n\n{text}\n{END}{after}"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
