"""``python -m lmdecode``: what is installed, or one of the commands of ``lmdecode.cli``."""

from __future__ import annotations

import argparse
import os
import platform
import sys
from collections.abc import Sequence

import torch

import lmdecode
from lmdecode.cli import perplexity


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command, or print versions, CPU capability, CUDA and the ops that are loaded.

    Parameters
    ----------
    arguments
        Of the command line; None: those of the process.

    Returns
    -------
    int
        The exit status.
    """
    parser = argparse.ArgumentParser(
        prog="python -m lmdecode",
        description="Run a command; without one, print versions, CPU capability, CUDA and the ops "
        "that are loaded.",
        epilog="python -m lmdecode.demo shows what the library does on a small model.",
    )
    parser.add_argument("--version", action="version", version=lmdecode.__version__)
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")
    perplexity.add_command(commands)
    given = parser.parse_args(arguments)
    if "run" in given:
        status: int = given.run(given)
        return status
    _report()
    return 0


def _report() -> None:
    print(f"lmdecode        {lmdecode.__version__}")
    print(f"torch           {torch.__version__}")
    print(f"python          {platform.python_version()} on {platform.machine()}")
    forced = os.environ.get("LMDECODE_CPU_CAPABILITY")
    print(f"CPU capability  {lmdecode.cpu_capability()}" + (" (forced)" if forced else ""))
    print(f"threads         {torch.get_num_threads()}")
    if lmdecode.has_cuda():
        available = torch.cuda.is_available()
        device = torch.cuda.get_device_name() if available else "no device found"
        print(f"CUDA            kernels loaded, {device}")
    else:
        why = "this torch has no CUDA" if torch.version.cuda is None else "kernels not built"
        print(f"CUDA            off: {why}")
    names = sorted({n.removeprefix("lmdecode::") for n in torch._C._dispatch_get_all_op_names()
                    if n.startswith("lmdecode::")})  # fmt: skip
    print(f"ops             {', '.join(names)}")


if __name__ == "__main__":
    sys.exit(main())
