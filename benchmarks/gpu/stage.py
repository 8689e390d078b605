"""``python -m benchmarks.gpu.stage NAME``: run one stage; its part of the report goes to stdout."""

from __future__ import annotations

import argparse
import importlib
import sys

from benchmarks.gpu.machine import Machine
from benchmarks.gpu.report import LEFT_OUT


def main() -> int:
    """Print the lines of the stage as they come; 1 where it found a fault, LEFT_OUT: not run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    arguments = parser.parse_args()
    machine = Machine(arguments.device)
    stage = importlib.import_module(f"benchmarks.gpu.{arguments.name}")
    # A stage that only times has cases; the harness of all benchmarks runs them.
    lines = machine.tables(stage.cases(machine)) if hasattr(stage, "cases") else stage.run(machine)
    for line in lines:
        print(line, flush=True)
    return 1 if machine.found_fault else LEFT_OUT if machine.is_left_out else 0


if __name__ == "__main__":
    sys.exit(main())
