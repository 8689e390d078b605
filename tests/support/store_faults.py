"""What happens to stores: processes that are killed, calls that do something else."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from lmdecode.store import KVStore

_ROOT = Path(__file__).resolve().parents[2]


class Progress:
    """A streamer that tells the parent of each token, and leaves the disk some time between."""

    def put(self, value: torch.Tensor) -> None:
        print(value.numel(), flush=True)
        time.sleep(0.01)

    def end(self) -> None:
        pass


def kill_behind(num_tokens: int, code: str, folder: Path) -> None:
    """Run code that imports from a folder; kill it as ``Progress`` has told so many tokens."""
    child = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True,
        env={
            **os.environ, "OMP_WAIT_POLICY": "PASSIVE",
            "PYTHONPATH": os.pathsep.join([str(_ROOT), str(folder)]),
        },
    )  # fmt: skip
    assert child.stdout is not None
    seen = 0
    for line in child.stdout:
        if not line.strip().isdigit():
            continue  # an editable install that is rebuilt
        seen += int(line) == 1
        if seen == num_tokens:
            os.kill(child.pid, signal.SIGKILL)
            break
    child.stdout.close()
    assert child.wait() == -signal.SIGKILL


@contextmanager
def replaced_call(store: KVStore, name: str, instead: Callable[..., Any]) -> Iterator[None]:
    """Let a store have another function in the place of one of its native engine's."""
    native = store._engine.native

    class Changed:
        def __getattr__(self, other: str) -> Any:
            return instead if other == name else getattr(native, other)

    store._engine.native = Changed()  # type: ignore[assignment]
    try:
        yield
    finally:
        store._engine.native = native
