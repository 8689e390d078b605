"""Fixtures of all tests."""

import gc
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

# Threads that wait do not spin: tests run beside each other. It is read when torch is loaded.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch

from tests.support.processes import run_python

ROOT = Path(__file__).resolve().parents[1]
# The processes of xdist share the cores; tests of ops still run on two threads.
SHARED_THREADS = max(
    1, torch.get_num_threads() // int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
)
AREAS = {"sampling", "beam", "kv_cache", "attention", "linear", "decoder", "compat"}

CAPABILITIES = ("default", "avx2", "avx512")


@pytest.fixture(
    params=[
        "cpu",
        pytest.param(
            "cuda",
            marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
        ),
    ]
)
def device(request: pytest.FixtureRequest) -> torch.device:
    """Every device that an op runs on."""
    return torch.device(request.param)


def pytest_collection_finish() -> None:
    """Leave tests and modules out of the collections of garbage.

    They are there until the end, a million objects, and one collection is up to a second of
    looking at them: transformers' batches collect twice each.
    """
    gc.collect()
    gc.freeze()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Seed the generator of the process before a test and before the fixtures that it is first in.

    What a test draws is then the same in any order of tests, and alone.
    """
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def shared_cores(request: pytest.FixtureRequest) -> None:
    """Set the number of threads that a test begins with."""
    in_area = request.path.is_relative_to(ROOT / "tests") and (
        request.path.relative_to(ROOT / "tests").parts[0] in AREAS
    )
    torch.set_num_threads(max(2, SHARED_THREADS) if in_area else SHARED_THREADS)


@pytest.fixture
def threads() -> Iterator[None]:
    """Restore the thread count."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    """Let torch.compile begin anew, before and after."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture(
    params=["default", *(pytest.param(c, marks=pytest.mark.slow) for c in CAPABILITIES[1:])]
)
def run_at_capability(request: pytest.FixtureRequest) -> Callable[[str], list[str]]:
    """Run code in a process of its own, at every CPU capability but that of this process.

    It imports from the folder of the test and from that of the repository. What it prints is
    returned, as words.
    """
    capability: str = request.param
    import lmdecode

    if capability not in lmdecode.cpu_capabilities():
        pytest.skip(f"this CPU has no {capability}")
    if capability == lmdecode.cpu_capability():
        pytest.skip(f"every other test runs at {capability}")

    def run(code: str) -> list[str]:
        done = run_python(
            "-c",
            f"{code}\nimport lmdecode; print(lmdecode.cpu_capability())",
            cwd=request.path.parent,
            env={**os.environ, "LMDECODE_CPU_CAPABILITY": capability, "PYTHONPATH": str(ROOT)},
        )
        assert done.returncode == 0, done.stderr
        *words, used = done.stdout.split()
        assert used == capability
        return words

    return run
