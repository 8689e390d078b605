"""What attention does not do: hold a matrix of scores, read what is out of the window."""

import subprocess
import sys

import pytest
import torch

from lmdecode import sliding_window_attention, sliding_window_decode

MEMORY_SCRIPT = """
import resource, sys, torch, lmdecode
torch.set_num_threads(1)
tokens = 65536
q, k, v = (torch.randn(1, heads, tokens, 32) for heads in (4, 2, 2))
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
lmdecode.sliding_window_attention(q[:, :, :64], k[:, :, :64], v[:, :, :64], window=256)
before = peak()
out = lmdecode.sliding_window_attention(q, k, v, window=256, return_lse=True)
print(peak() - before - sum(x.nbytes for x in out))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="ru_maxrss as on Linux")
def test_no_matrix_of_scores_is_held() -> None:
    """At 65536 tokens it would have 17 GB; scratch beside the output is a few MB."""
    done = subprocess.run(
        [sys.executable, "-c", MEMORY_SCRIPT], capture_output=True, text=True, check=True
    )
    assert int(done.stdout) < 16 << 20


REFERENCED_SCRIPT = """
import mmap, re, sys, numpy, torch, lmdecode
torch.set_num_threads(1)
length, window, queries, op = (*map(int, sys.argv[1:4]), getattr(lmdecode, sys.argv[4]))
page, size = mmap.PAGESIZE, 256
memory = mmap.mmap(-1, length * size * 4)
cache = torch.from_numpy(numpy.frombuffer(memory, dtype=numpy.float32)).view(1, 1, length, size)
cache.fill_(0.5)
begin = cache.data_ptr()
q = torch.randn(1, 4, queries, size)
op(torch.randn(1, 4, 1, size), torch.randn(1, 1, 1, size), torch.randn(1, 1, 1, size))
open("/proc/self/clear_refs", "w").write("1")
op(q, cache, cache, window=window)
mappings = re.split(r"(?m)^(?=[0-9a-f]+-[0-9a-f]+ )", open("/proc/self/smaps").read())
kilobytes = 0
for mapping in mappings:
    bounds = re.match(r"([0-9a-f]+)-([0-9a-f]+) ", mapping)
    if bounds and int(bounds[1], 16) < begin + length * size * 4 and int(bounds[2], 16) > begin:
        kilobytes += int(re.search(r"Referenced: +([0-9]+)", mapping)[1])
print(kilobytes // (size * 4 // 1024))
"""


def keys_read(op: str, length: int, window: int, queries: int) -> int:
    done = subprocess.run(
        [sys.executable, "-c", REFERENCED_SCRIPT, *map(str, (length, window, queries)), op],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return int(done.stdout)


@pytest.mark.skipif(sys.platform != "linux", reason="/proc as on Linux")
@pytest.mark.parametrize("op", ["sliding_window_attention", "sliding_window_decode"])
def test_cost_does_not_grow_with_what_is_out_of_the_window(op: str) -> None:
    """Keys whose memory is looked at: those of the window, whatever the length.

    A chunk of 48 queries is one tile, of which a longer prompt has more.
    """
    window, queries = 256, 48
    read = {length: keys_read(op, length, window, queries) for length in (1024, 65536)}
    assert len(set(read.values())) == 1
    visible, page = window + queries - 1, 4
    assert visible <= read[1024] <= visible + 2 * page


def normal(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


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
