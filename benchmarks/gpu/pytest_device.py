"""A plugin of pytest: a process whose CUDA context is lost ends, so that no other test fails of it.

After a fault of a kernel every call of CUDA in the process fails. pytest-xdist starts another
process in its place, and names the test.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch


def is_lost() -> bool:
    """Return whether the device answers with errors from now on."""
    if not torch.cuda.is_initialized():
        return False
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return True
    return False


@pytest.hookimpl(hookwrapper=True, tryfirst=True)
def pytest_runtest_protocol() -> Iterator[None]:
    """Look after each test, when its result has been reported."""
    yield
    if is_lost():
        os._exit(70)
