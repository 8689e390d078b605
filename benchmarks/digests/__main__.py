"""``python -m benchmarks digests``: whether another build gives every bit that this one gave.

Makes random calls of the public ops of each area, from seeds that are the same in every run, in a
process at each CPU level, and digests all that they give. With the library of before a change
``--json before.json`` writes the digests. With the one behind it ``--against before.json`` names
the cases that differ, and ends with 1 where there are any. A level is compared with itself alone.
The tests' generators make the calls: their packages are needed.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

import lmdecode
from benchmarks import report
from benchmarks.digests.digest import case_digest, differences, joined
from benchmarks.digests.kinds import AREAS

LEVELS = ("default", "avx2", "avx512", "amx")
_ROOT = Path(__file__).resolve().parents[2]
# What transformers says of tiny models is known.
_ENVIRONMENT = {"OMP_WAIT_POLICY": "PASSIVE", "TRANSFORMERS_VERBOSITY": "error"}

# Of an area and a level, the digest of each case.
Digests = dict[str, dict[str, list[str]]]


def _words(allowed: Sequence[str]) -> Callable[[str], list[str]]:
    def words(text: str) -> list[str]:
        found = text.split(",")
        if wrong := [word for word in found if word not in allowed]:
            raise argparse.ArgumentTypeError(f"has {wrong[0]!r}; expected {', '.join(allowed)}")
        return found

    return words


def _arguments(given: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks digests", description=__doc__)
    parser.add_argument(
        "--areas", type=_words(AREAS), default=AREAS, help=f"some of {','.join(AREAS)}"
    )
    parser.add_argument("--cases", type=int, default=2000, help="of each area (default 2000)")
    parser.add_argument(
        "--levels", type=_words(LEVELS), default=LEVELS,
        help=f"some of {','.join(LEVELS)}; those that machine or build lack are left out",
    )  # fmt: skip
    parser.add_argument("--threads", type=int, default=1, help="torch threads (default 1)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the digest of each case")
    parser.add_argument("--against", type=Path, metavar="FILE", help="compare with such a file")
    parser.add_argument("--this-level", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args(given)


def _of_this_level(given: argparse.Namespace) -> dict[str, list[str]] | str:
    """Return the digests of each area, or why this process has no kernels of its level."""
    try:
        level = lmdecode.cpu_capability()
    except ValueError as error:
        return str(error)
    torch.set_num_threads(given.threads)
    found = {}
    for area in given.areas:
        begin = time.monotonic()
        found[area] = [case_digest(area, number) for number in range(given.cases)]
        seconds = time.monotonic() - begin
        print(f"{level}, {area}: {given.cases} cases in {seconds:.0f} s", file=sys.stderr)
    return found


def _of_level(level: str, given: argparse.Namespace) -> dict[str, list[str]] | str:
    """Return likewise what a process of this level finds."""
    command = [sys.executable, "-m", "benchmarks.digests", "--this-level"]
    command += ["--areas", ",".join(given.areas), "--cases", str(given.cases)]
    command += ["--threads", str(given.threads)]
    environment = {**os.environ, **_ENVIRONMENT, "LMDECODE_CPU_CAPABILITY": level}
    done = subprocess.run(
        command, stdout=subprocess.PIPE, text=True, cwd=_ROOT, env=environment, check=False
    )
    if done.returncode != 0:
        raise SystemExit(f"the process of {level} ended with {done.returncode}")
    found: dict[str, list[str]] | str = json.loads(done.stdout.splitlines()[-1])
    return found


def _made_with() -> dict[str, str]:
    """Return what inputs and models depend on, beside the library."""
    made = {"CPU": report.machine(1)["CPU"].rsplit(", ", 2)[0]}
    for package in ("torch", "numpy", "transformers", "gguf"):
        made[package] = importlib.metadata.version(package)
    return made


def _compared(before: Digests, now: Digests) -> tuple[list[str], int]:
    """Return lines of what differs, and how many cases both have."""
    lines, count = [], 0
    for area, levels in now.items():
        for level, digests in levels.items():
            old = before.get(area, {}).get(level, [])
            count += min(len(old), len(digests))
            lines += differences(area, level, old, digests)
    return lines, count


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what the command line asks for."""
    given = _arguments(arguments)
    if given.this_level:
        print(json.dumps(_of_this_level(given)))
        return 0
    made_with = _made_with()
    before: dict[str, Any] = json.loads(given.against.read_text()) if given.against else {}
    if before and before["made with"] != made_with:
        print(
            f"{given.against} was made with {before['made with']}, not with {made_with}: its "
            "inputs are others", file=sys.stderr,
        )  # fmt: skip
        return 2
    digests: Digests = {area: {} for area in given.areas}
    for level in given.levels:
        found = _of_level(level, given)
        if isinstance(found, str):
            print(f"{level} is left out: {found}", flush=True)
            continue
        for area, of_area in found.items():
            digests[area][level] = of_area
            print(f"{level:8} {area:9} {joined(of_area)}", flush=True)
    if given.json:
        record = {"made with": made_with, "digests": digests}
        given.json.write_text(json.dumps(record, indent=0) + "\n")
    if not before:
        return 0
    lines, count = _compared(before["digests"], digests)
    if not count:
        print(f"{given.against} has no cases of these areas and levels", file=sys.stderr)
        return 2
    print("\n".join(lines or [f"{count} cases: the same bits as in {given.against}"]))
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main())
