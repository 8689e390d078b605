"""``python -m benchmarks.gpu.stage NAME``: run one stage; its part of the report goes to stdout."""

from __future__ import annotations

import argparse
import importlib
import sys

from benchmarks.gpu.machine import Machine
from benchmarks.gpu.report import LEFT_OUT

# The modules of stages that share one; the others are the function run of their own. Imported one
# at a time: a package that a stage lacks fails that stage alone. Those of times yield cases.
_HOMES = {
    **dict.fromkeys(("sampling", "attention", "beam", "caches", "decoding"), "times"),
    **dict.fromkeys(("smoke_small", "sanitizer", "profiled", "profile"), "watched"),
    "large": "compare",
}


def main() -> int:
    """Print the lines of the stage as they come; 1 where it found a fault, LEFT_OUT: not run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    arguments = parser.parse_args()
    machine = Machine(arguments.device)
    home = _HOMES.get(arguments.name)
    module = importlib.import_module(f"benchmarks.gpu.{home or arguments.name}")
    stage = getattr(module, arguments.name if home else "run")(machine)
    for line in machine.tables(stage) if home == "times" else stage:
        print(line, flush=True)
    return 1 if machine.found_fault else LEFT_OUT if machine.is_left_out else 0


if __name__ == "__main__":
    sys.exit(main())
