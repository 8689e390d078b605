"""Engines in other processes, as this one sees them."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).resolve().parents[3]
PEERS = "LMDECODE_PEERS"


def peers_folder() -> Path | None:
    """Return the folder of the peers' environments and of exported models, if there is one."""
    folder = os.environ.get(PEERS)
    return Path(folder).resolve() if folder else None


def python_of(environment: str, packages: tuple[str, ...]) -> str | None:
    """Return the interpreter that has the packages: the environment's, or this one; or None."""
    folder = peers_folder()
    if folder is not None and (python := folder / environment / "bin" / "python").exists():
        return str(python)
    found = all(importlib.util.find_spec(package) is not None for package in packages)
    return sys.executable if found else None


class EngineProcess:
    """An engine that answers from a process of its own.

    Parameters
    ----------
    python
        Of the environment that has the engine's packages.
    setup
        See ``worker``.
    """

    def __init__(self, python: str, setup: dict[str, object]) -> None:
        self._errors = tempfile.TemporaryFile("w+")
        self._process = subprocess.Popen(
            # A process that the system ends tells where it was.
            [python, "-X", "faulthandler", "-m", "benchmarks.decoder.whole_model.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            cwd=_ROOT,
            env={**os.environ, "OMP_NUM_THREADS": str(setup["threads"])},
        )
        self._write(setup)

    def _write(self, question: object) -> None:
        try:
            self._process.stdin.write(json.dumps(question) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # the reader says why

    def _read(self) -> Any:
        line = self._process.stdout.readline()
        if not line:
            self._errors.seek(0)
            lines = self._errors.read().strip().splitlines()
            fatal = [text for text in lines if text.startswith("Fatal Python error")]
            told = (fatal[:1] or lines[-1:] or ["no message"])[0]
            status = self._process.wait()
            raise RuntimeError(f"the process ended with status {status}: {told}")
        answer = json.loads(line)
        if isinstance(answer, dict) and "error" in answer:
            raise RuntimeError(answer["error"])
        return answer

    def about(self) -> dict[str, Any]:
        """Wait until the model is loaded; its version, and how its logits agree."""
        return self._read()

    def call(self, name: str, *arguments: object) -> Any:
        """Call a method of the engine."""
        self._write({"call": name, "arguments": arguments})
        return self._read()

    def close(self) -> None:
        """End the process."""
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()
        self._errors.close()
