"""Processes whose kernels are of another CPU capability than this one's."""

import os
from pathlib import Path

import lmdecode
from tests.support.processes import run_python

ROOT = Path(__file__).parents[2]


def call_elsewhere(function: str, folder: Path, *arguments: str) -> None:
    """Call ``module:function`` with a folder and strings, on kernels of another capability."""
    module, name = function.split(":")
    code = (
        f"import sys; from pathlib import Path; from {module} import {name}; "
        f"{name}(Path(sys.argv[1]), *sys.argv[2:])"
    )
    other = "avx2" if lmdecode.cpu_capability() != "avx2" else "default"
    done = run_python(
        "-c", code, folder, *arguments, cwd=ROOT,
        env={**os.environ, "LMDECODE_CPU_CAPABILITY": other},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
