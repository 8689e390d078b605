"""``python -m lmdecode``: versions, CPU capability, CUDA and the ops that are loaded."""

from __future__ import annotations

import argparse
import os
import platform

import torch

import lmdecode


def main() -> None:
    """Print the report."""
    parser = argparse.ArgumentParser(
        prog="python -m lmdecode",
        description="Print versions, CPU capability, CUDA and the ops that are loaded.",
        epilog="python -m lmdecode.demo shows what the library does on a small model.",
    )
    parser.add_argument("--version", action="version", version=lmdecode.__version__)
    parser.parse_args()
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
    main()
