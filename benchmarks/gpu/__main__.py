"""``python -m benchmarks.gpu``: run every stage and write the report."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from benchmarks.gpu.report import Stage, run_stages

_ROOT = Path(__file__).resolve().parents[2]
# Name, title, seconds at most. The order is that of worth: the time may be up before the last.
STAGES = (
    ("device", "The device, and a first call", 60),
    ("smoke", "Each op against the CPU, called and replayed", 45),
    ("compare", "CUDA against CPU, bit by bit", 50),
    ("large", "Sizes beyond the L2 cache, and large vocabularies", 50),
    ("sampling", "Times: sampling", 30),
    ("attention", "Times: attention", 30),
    ("beam", "Times: beam search", 20),
    ("caches", "Times: caches", 20),
    ("decoding", "Times: Decoding", 40),
    ("tests", "Tests", 150),
    ("sanitizer", "compute-sanitizer on the smoke", 60),
    ("profile", "ncu on the main kernels", 45),
)


def main() -> int:
    """Run what the command line asks for; 1 where a stage failed or did not run."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    parser.add_argument(
        "stages", nargs="*", metavar="STAGE", help=", ".join(name for name, *_ in STAGES)
    )
    parser.add_argument(
        "--device",
        choices=("cuda", "cpu"),
        default="cuda",
        help="cpu: it stands in, on tiny sizes, to try the plan",
    )
    parser.add_argument("--seconds", type=float, default=400, help="for all stages (400)")
    parser.add_argument(
        "--output",
        type=Path,
        help="the report (of all stages on a GPU: benchmarks/results/gpu.md; else in the logs)",
    )
    parser.add_argument("--logs", type=Path, default=_ROOT / "build" / "gpu-logs")
    arguments = parser.parse_args()
    unknown = set(arguments.stages) - {name for name, *_ in STAGES}
    if unknown:
        parser.error(f"no stage {', '.join(sorted(unknown))}; see --help")
    is_rehearsal = arguments.device == "cpu"
    output = arguments.output
    if output is None:
        # Neither a rehearsal nor a few stages take the place of a report of all of them.
        is_whole = not is_rehearsal and not arguments.stages
        folder = _ROOT / "benchmarks" / "results" if is_whole else arguments.logs
        output = folder / "gpu.md"
    stages = [
        Stage(
            name,
            title,
            [sys.executable, "-m", "benchmarks.gpu.stage", name, "--device", arguments.device],
            seconds,
            required=name == "device",
        )
        for name, title, seconds in STAGES
        if not arguments.stages or name in arguments.stages or name == "device"
    ]
    title = "On a GPU" if not is_rehearsal else "A rehearsal on the CPU: no figure counts"
    passed = run_stages(title, stages, output, arguments.logs, arguments.seconds)
    print(output.read_text())
    print(f"{output}, logs in {arguments.logs}", file=sys.stderr)
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
