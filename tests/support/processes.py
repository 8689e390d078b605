"""Python in a process of its own that begins with torch, lmdecode and transformers loaded.

Importing them takes seconds. Here a process does so once, and nothing else, and each call gets a
fork of it with an environment, a folder and streams of its own. lmdecode reads its variables at the
first call of an op, so they may be others. Tests of imports, of variables that a C library reads as
it is loaded, of memory taken and of the end of an interpreter need ``subprocess`` instead.
"""

import atexit
import multiprocessing
import os
import runpy
import subprocess
import sys
import tempfile
from pathlib import Path

__all__ = ["PROCESSES", "run_python", "start_python"]

ROOT = Path(__file__).resolve().parents[2]
LOADED = [
    "torch._dynamo", "lmdecode.store", "transformers.generation.utils",
    *(f"transformers.models.{name}.modeling_{name}" for name in ("llama", "marian", "mistral")),
]  # fmt: skip

PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(LOADED)


def run_python(
    *arguments: object,
    cwd: Path | None = None,
    env: dict[str, str] | None = None,
    input: str = "",
    timeout: float | None = 600,
) -> subprocess.CompletedProcess[str]:
    """Run ``python -c CODE ...`` or ``-m MODULE ...`` in a fork; ``env`` is all its environment."""
    words = list(map(str, arguments))
    with tempfile.TemporaryDirectory() as name:
        files = [str(Path(name, stream)) for stream in ("in", "out", "err")]
        Path(files[0]).write_text(input)
        process = start_python(words, files, cwd, env)
        process.join(timeout)
        if process.exitcode is None:
            process.kill()
            process.join()
            raise subprocess.TimeoutExpired(words, timeout or 0)
        out, err = (Path(file).read_text() if Path(file).exists() else "" for file in files[1:])
        return subprocess.CompletedProcess(words, process.exitcode, out, err)


def start_python(
    words: list[str], files: list[str], cwd: Path | None = None, env: dict[str, str] | None = None
) -> multiprocessing.process.BaseProcess:
    """Start what ``run_python`` runs, with files as its three standard streams."""
    arguments = (words, str(cwd or Path.cwd()), env or dict(os.environ), files)
    process = PROCESSES.Process(target=_run, args=arguments)
    process.start()
    return process


def _run(words: list[str], cwd: str, env: dict[str, str], files: list[str]) -> None:
    for number, file in enumerate(files):
        opened = os.open(file, os.O_RDONLY if number == 0 else os.O_WRONLY | os.O_CREAT)
        os.dup2(opened, number)
        os.close(opened)
    sys.stdin = open(0, closefd=False)
    sys.stdout, sys.stderr = (open(n, "w", buffering=1, closefd=False) for n in (1, 2))
    os.environ.clear()
    os.environ.update(env)
    os.chdir(cwd)
    # Without the folders that pytest or the process before added.
    paths = [path for path in sys.path if path and not Path(path).is_relative_to(ROOT / "tests")]
    given = [path for path in env.get("PYTHONPATH", "").split(os.pathsep) if path]
    sys.path[:] = [cwd, *given, *(path for path in paths if path != str(ROOT))]
    option, what, *rest = words
    sys.argv[:] = [option, *rest]
    try:
        if option == "-m":
            runpy.run_module(what, run_name="__main__", alter_sys=True)
        else:
            exec(compile(what, "<string>", "exec"), {"__name__": "__main__"})
    finally:
        atexit._run_exitfuncs()
