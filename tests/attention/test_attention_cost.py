"""What attention does not do: hold a matrix of scores, read what is out of the window."""

import mmap
import signal
import sys
from collections.abc import Callable

import pytest
import torch

from lmdecode import sliding_window_attention, sliding_window_decode
from lmdecode.demo.peak_memory import peak_memory
from tests.support.processes import run_python
from tests.support.random_tensors import randn as normal


def call_on_a_long_prompt(tokens: int) -> Callable[[], object]:
    torch.set_num_threads(1)
    q, k, v = (torch.randn(1, heads, tokens, 32) for heads in (4, 2, 2))
    sliding_window_attention(q[:, :, :64], k[:, :, :64], v[:, :, :64], window=256)
    return lambda: sliding_window_attention(q, k, v, window=256, return_lse=True)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="/proc as on Linux")
def test_no_matrix_of_scores_is_held() -> None:
    """At 65536 tokens it would have 17 GB; scratch beside the output is a few MB."""
    tokens = 65536
    outputs = 4 * 4 * tokens * (32 + 1)
    taken = peak_memory(call_on_a_long_prompt, tokens)
    # The kernel counts the pages of each processor in batches: it may not have seen the last ones.
    assert outputs - (1 << 20) <= taken < outputs + (16 << 20)


# Each call is one of a child, which a forbidden read ends; the parent prints how it ended.
PROTECTED_SCRIPT = """
import ctypes, mmap, os, sys, numpy, torch, lmdecode
torch.set_num_threads(1)
window, queries, op = (*map(int, sys.argv[1:3]), getattr(lmdecode, sys.argv[3]))
size = 256
for case in sys.argv[4:]:
    child = os.fork()
    if child != 0:
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
        continue
    length, protected = map(int, case.split("/"))
    memory = mmap.mmap(-1, length * size * 4)
    cache = torch.from_numpy(numpy.frombuffer(memory, dtype=numpy.float32)).view(1, 1, length, size)
    cache.fill_(0.5)
    q = torch.randn(1, 4, queries, size)
    mprotect = ctypes.CDLL(None, use_errno=True).mprotect
    bytes_protected = ctypes.c_size_t(protected * size * 4)
    assert mprotect(ctypes.c_void_p(cache.data_ptr()), bytes_protected, 0) == 0
    op(q, cache, cache, window=window)
    os._exit(0)
"""


def run_with_protected_keys(
    op: str, window: int, queries: int, *cases: tuple[int, int]
) -> list[int]:
    """Exit statuses of calls of ``length, protected``: the first keys cannot be read."""
    arguments = (str(window), str(queries), op, *(f"{n}/{protected}" for n, protected in cases))
    done = run_python("-c", PROTECTED_SCRIPT, *arguments)
    assert done.returncode == 0, done.stderr
    return [int(word) for word in done.stdout.split()]


@pytest.mark.skipif(sys.platform != "linux", reason="mprotect as on Linux")
@pytest.mark.parametrize("op", ["sliding_window_attention", "sliding_window_decode"])
@pytest.mark.slow
def test_keys_out_of_the_window_are_not_read(op: str) -> None:
    """Whatever the length, the cost is that of the window: any other key would end the process."""
    window, queries, keys_a_page = 256, 48, mmap.PAGESIZE // (256 * 4)
    cases = []
    for length in (1024, 65536):
        hidden = (length - window - queries + 1) // keys_a_page * keys_a_page
        cases += [(length, hidden), (length, hidden + keys_a_page)]
    assert run_with_protected_keys(op, window, queries, *cases) == [0, -signal.SIGSEGV] * 2


def test_a_sink_counts_once_however_often_a_cache_is_cut() -> None:
    """2000 keys are four parts of a decode; a sink in each would halve the output."""
    q, k = normal(1, 4, 1, 32, seed=0), torch.zeros(1, 2, 2000, 32)
    v, sinks = torch.ones(1, 2, 2000, 32), torch.full((4,), 2000.0).log()
    for op in (sliding_window_attention, sliding_window_decode):
        out, lse = op(q, k, v, sinks=sinks, return_lse=True)
        torch.testing.assert_close(out, torch.full_like(out, 0.5))
        torch.testing.assert_close(lse, torch.full_like(lse, 4000.0).log())


def test_the_window_is_not_ignored() -> None:
    """With any head size, dtype and option; decode and prefill alike."""
    v = torch.zeros(1, 1, 700, 32)
    v[:, :, :500] = 1.0  # of hidden keys
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for size in (16, 33, 128, 256):
            q, k = (normal(1, 1, n, size, seed=n).to(dtype) for n in (1, 700))
            for options in ({}, {"softcap": 5.0}, {"sinks": torch.zeros(1)}):
                for op in (sliding_window_attention, sliding_window_decode):
                    assert not op(q, k, v.to(dtype), window=200, **options).any()
                    assert op(q, k, v.to(dtype), window=201, **options).all()
