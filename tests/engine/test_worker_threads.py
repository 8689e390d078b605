"""The engine's thread finds processors free for its workers: those of others are ended."""

from __future__ import annotations

import subprocess
import sys
from textwrap import dedent

import pytest

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="GNU's OpenMP, Linux")

_COUNTS = dedent(
    """
    import os
    import torch
    from lmdecode.decoder.worker_threads import release_worker_threads

    def threads():
        return len(os.listdir("/proc/self/task"))

    torch.set_num_threads(2)
    before = threads()
    torch.rand(1 << 20).exp_()
    busy = threads()
    release_worker_threads()
    after = threads()
    total = torch.ones(1 << 20).sum()
    print(busy - before, after - before, threads() - before, int(total) == 1 << 20)
    """
)


def test_worker_threads_end_and_come_back() -> None:
    """A thread has a worker while it computes, none when they are released, and one again."""
    run = subprocess.run(
        [sys.executable, "-c", _COUNTS], capture_output=True, text=True, check=True
    )
    assert run.stdout.split() == ["1", "0", "1", "True"]
