"""``python -m benchmarks.gpu.stage NAME``: run one stage; its part of the report goes to stdout."""

from __future__ import annotations

import argparse
import importlib
import sys

from benchmarks.gpu.machine import Machine


def main() -> int:
    """Print the lines of the stage as they come; 1 where it found a fault."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    arguments = parser.parse_args()
    machine = Machine(arguments.device)
    for line in importlib.import_module(f"benchmarks.gpu.{arguments.name}").run(machine):
        print(line, flush=True)
    return int(machine.found_fault)


if __name__ == "__main__":
    sys.exit(main())
