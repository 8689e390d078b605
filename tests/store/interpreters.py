"""Interpreters that come to their own end, without loading torch each.

Loading it takes seconds. One interpreter does so, and each program runs in a fork of it, which then
ends as any interpreter does, with its threads and its handlers (``tests.support.processes`` ends
without them).
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

__all__ = ["Interpreters"]

# Not lmdecode: programs register handlers before its own. A fork leaves the loop with its program.
_PARENT = """
import os, sys
import torch
for folder in map(str.strip, sys.stdin):
    child = os.fork()
    if child == 0:
        break
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
else:
    sys.exit()
for number, name in ((1, "out"), (2, "err")):
    file = os.open(os.path.join(folder, name), os.O_WRONLY | os.O_CREAT)
    os.dup2(file, number)
    os.close(file)
with open(os.path.join(folder, "code")) as file:
    code = file.read()
exec(compile(code, "<string>", "exec"))
"""


class Interpreters:
    """Runs programs, one after another."""

    def __init__(self, process: subprocess.Popen[str], folder: Path) -> None:
        self._process, self._folder, self._count = process, folder, 0

    def run(self, code: str, timeout: float = 60.0) -> tuple[int, str, str]:
        """Run a program to its end; return its status and what it wrote to stdout and stderr."""
        self._count += 1
        folder = self._folder / str(self._count)
        folder.mkdir()
        (folder / "code").write_text(code)
        self._process.stdin.write(f"{folder}\n")
        self._process.stdin.flush()
        assert select.select([self._process.stdout], [], [], timeout)[0], "it comes to no end"
        status = self._process.stdout.readline()
        assert status, "the interpreter that forks has ended"
        out, err = ((folder / name).read_text() for name in ("out", "err"))
        return int(status), out, err

    @classmethod
    @contextmanager
    def started(cls, folder: Path) -> Iterator[Interpreters]:
        """Start the interpreter that forks, with a folder for files; end it."""
        process = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", _PARENT], stdin=subprocess.PIPE,
            stdout=subprocess.PIPE, text=True, start_new_session=True,
        )  # fmt: skip
        try:
            yield cls(process, folder)
        finally:
            os.killpg(process.pid, signal.SIGKILL)  # and a program that came to no end
            process.communicate()
