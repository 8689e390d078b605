"""One side of ``--compare``: reads a set-up line, then case numbers; answers each with a line."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path


def _use_library(folder: str) -> None:
    """Make ``import lmdecode`` find the build in ``folder``, whatever else is installed."""
    sys.meta_path[:] = [f for f in sys.meta_path if "lmdecode" not in type(f).__module__]
    sys.path.insert(0, folder)
    import lmdecode

    if not Path(lmdecode.__file__).is_relative_to(folder):
        raise RuntimeError(f"compare: imported {lmdecode.__file__}, expected it below {folder}")


def main() -> None:
    """Serve until the input ends."""
    # Nothing else may write to the pipe of the answers.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    setup = json.loads(sys.stdin.readline())
    if setup["library"] is not None:
        _use_library(setup["library"])

    from benchmarks.discovery import discover
    from benchmarks.harness import OURS, Effort, run_case
    from benchmarks.timing import CacheEvictor

    by_key = {
        case.key: case
        for benchmark in discover()
        for quick in (True, False)
        for case in benchmark.cases(quick)
    }
    effort = Effort(**setup["effort"])
    evictor = CacheEvictor()
    print(json.dumps("ready"), file=answers, flush=True)
    for line in sys.stdin:
        case = by_key[setup["cases"][json.loads(line)]]
        try:
            result = run_case(case, effort, setup["threads"], evictor, with_peers=False)
            seconds = result.timings[OURS].minimum
        except (AttributeError, TypeError) as error:  # an op or argument that this build lacks
            print(f"{case.key}: {error}", file=sys.stderr)
            seconds = None
        print(json.dumps(seconds), file=answers, flush=True)


if __name__ == "__main__":
    main()
