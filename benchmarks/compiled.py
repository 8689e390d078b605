"""C that is compiled when a benchmark needs it."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import tempfile
from pathlib import Path


def compiled(source: str, *flags: str) -> ctypes.CDLL | None:
    """Return a library of C; None without a compiler that takes it."""
    compiler = shutil.which(os.environ.get("CXX", "c++"))
    if compiler is None:
        return None
    with tempfile.TemporaryDirectory() as folder:
        file, library = Path(folder) / "source.c", Path(folder) / "library.so"
        file.write_text(source)
        command = [compiler, "-O2", "-shared", "-fPIC", "-x", "c", *flags]
        done = subprocess.run([*command, str(file), "-o", str(library)], check=False)
        return ctypes.CDLL(str(library)) if done.returncode == 0 else None
