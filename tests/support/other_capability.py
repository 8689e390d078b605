"""Processes whose kernels are of another CPU capability than this one's."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import lmdecode

ROOT = Path(__file__).parents[2]


def call_elsewhere(function: str, folder: Path, *arguments: str) -> None:
    """Call ``module:function`` with a folder and strings, on kernels of another capability."""
    module, name = function.split(":")
    code = (
        f"import sys; from pathlib import Path; from {module} import {name}; "
        f"{name}(Path(sys.argv[1]), *sys.argv[2:])"
    )
    other = "avx2" if lmdecode.cpu_capability() != "avx2" else "default"
    subprocess.run(
        [sys.executable, "-c", code, str(folder), *arguments],
        env={**os.environ, "LMDECODE_CPU_CAPABILITY": other},
        cwd=ROOT,
        check=True,
    )
