"""``python -m benchmarks``: run benchmarks, print and write their tables.

``python -m benchmarks quality`` measures what formats of weights cost a model's texts, and
``python -m benchmarks digests`` shows whether another build gives the same bits.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path

# Idle OpenMP threads must not spin on cores that others use; read when torch is loaded.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import lmdecode
from benchmarks import report
from benchmarks.discovery import discover
from benchmarks.harness import FULL, QUICK, Result, chosen, run_cases
from benchmarks.stale import print_stale


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument(
        "names",
        nargs="*",
        metavar="NAME",
        help="run cases whose line in --list has NAME in it; none: all",
    )
    parser.add_argument("--list", action="store_true", help="list the cases and exit")
    parser.add_argument("--quick", action="store_true", help="few small cases, rough figures")
    parser.add_argument("--threads", type=int, default=1, help="torch threads (default 1)")
    parser.add_argument(
        "--output",
        type=Path,
        nargs="?",
        const=report.RESULTS,
        metavar="FILE.md",
        help="write the tables, by default to benchmarks/results/cpu.md; between its markers, "
        "where tables of other areas stay",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every figure")
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="draw the ratios to peers")
    parser.add_argument(
        "--compare", metavar="REF", help="build this git commit too and pair it with this tree"
    )
    parser.add_argument(
        "--stale", action="store_true", help="tell which results are older than what they measure"
    )
    arguments = parser.parse_args()
    if arguments.stale and sys.argv[1:] != ["--stale"]:
        parser.error("--stale stands alone")
    return arguments


def main() -> int:
    """Run what the command line asks for."""
    if sys.argv[1:2] == ["quality"]:
        from benchmarks.quality.__main__ import main as measure_quality

        return measure_quality(sys.argv[2:])
    if sys.argv[1:2] == ["digests"]:
        from benchmarks.digests.__main__ import main as record_digests

        return record_digests(sys.argv[2:])
    arguments = _arguments()
    found = discover()
    if arguments.stale:
        sources = {case.group: b.sources for b in found for case in b.cases(False)}
        kernels = lmdecode.cpu_capability()
        return print_stale(report.ROOT, sources, report.cpu_model(), kernels)
    by_benchmark = {b.name: chosen(b.cases(arguments.quick), arguments.names) for b in found}
    cases = [case for group in by_benchmark.values() for case in group]
    if arguments.list:
        print("\n".join(case.key for case in cases))
        return 0
    if not cases:
        wanted = " or ".join(arguments.names)
        print(f"no case has {wanted} in its name; see --list", file=sys.stderr)
        return 2
    effort = QUICK if arguments.quick else FULL
    about = report.machine(arguments.threads)
    results: list[Result] = []
    if arguments.compare:
        from benchmarks.compare import compare

        table, figures = compare(arguments.compare, cases, effort, arguments.threads)
        group = f"This tree against {arguments.compare}"
        sections = {group: report.section(about, table, None, [])}
        record = {"machine": about, "compare": figures}
    else:
        owner = {case.group: b for b in found for case in by_benchmark[b.name]}
        sections = {}
        for result in run_cases(cases, effort, arguments.threads):
            results.append(result)
            group = result.case.group
            benchmark = owner[group]
            mine = [one for one in results if one.case.group == group]
            outcomes = benchmark.goals(mine)
            if arguments.names:
                outcomes = [outcome for outcome in outcomes if outcome.cases]
            goals = report.goals_table(outcomes) if outcomes and not arguments.quick else None
            notes = [*benchmark.notes(), *benchmark.summary(mine)]
            sections[group] = report.section(about, report.results_table(mine), goals, notes)
            if arguments.output:  # at once: whole models take hours
                report.write(arguments.output, sections)
        record = {"machine": about, "results": [result.as_json() for result in results]}
    print(report.document(sections))
    if arguments.output and arguments.compare:
        report.write(arguments.output, sections)
    if arguments.json:
        arguments.json.write_text(json.dumps(record, indent=1) + "\n")
    if arguments.plot and results:
        try:
            from benchmarks.plot import plot

            plot(results, arguments.plot)
        except ImportError as error:
            print(f"--plot: {error.name} is missing: pip install '.[bench]'", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
