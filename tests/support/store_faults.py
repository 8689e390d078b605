"""What happens to stores: processes that are killed, calls that do something else."""

import os
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from lmdecode.store import KVStore
from tests.support.processes import start_python

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
    env = {
        **os.environ, "OMP_WAIT_POLICY": "PASSIVE",
        "PYTHONPATH": os.pathsep.join([str(_ROOT), str(folder)]),
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as name:
        pipe = str(Path(name, "pipe"))
        os.mkfifo(pipe)
        child = start_python(["-c", code], [os.devnull, pipe, str(Path(name, "errors"))], env=env)
        seen = 0
        with open(pipe) as lines:
            for line in lines:
                seen += int(line) == 1
                if seen == num_tokens:
                    child.kill()
                    break
        child.join()
        assert child.exitcode == -signal.SIGKILL, Path(name, "errors").read_text()


@contextmanager
def replaced_call(store: KVStore, name: str, instead: Callable[..., Any]) -> Iterator[None]:
    """Let a store have another function in the place of one of its native engine's."""
    native = store._handle.native

    class Changed:
        def __getattr__(self, other: str) -> Any:
            return instead if other == name else getattr(native, other)

    store._handle.native = Changed()  # type: ignore[assignment]
    try:
        yield
    finally:
        store._handle.native = native
