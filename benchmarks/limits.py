"""The physical limits: one streaming read of the input, one streaming copy of what must move.

Read: the fastest of some readers on the tensor itself. The C library's ``wmemchr`` looks for a word
that is not there; others, compiled from C when they are asked for, read one, two or four streams,
with and without fetching ahead. ``wmemchr`` alone was slower than our kernels on an Intel server.
Measured warm, with AVX-512, from 32000 to 8 million elements: ``torch.sum`` of a float view takes
up to 1.4x as long as ``wmemchr``, ``torch.amax`` 1.1-1.9x, ``torch.dot`` 1.4-2.5x, ``torch.amax``
on bfloat16 4-8x. These use one thread; with several, ``torch.sum`` of a float view is the limit.

Copy: stores past the caches, which write a line without reading it first. Neither the C library's
``memcpy`` (glibc 2.36 on Zen 5, any size) nor ``Tensor.copy_`` uses them: 21 GB/s. lmdecode's own
copy of one contiguous row does: 29 GB/s; no library here is faster.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Sequence
from functools import cache

import torch
from torch import Tensor

import lmdecode
from benchmarks.compiled import compiled

_COPY_CHUNK = 128 << 20  # more than caches hold
_ABSENT = 0x7FC12345  # a NaN in float32 and, by its upper half, in bfloat16
_STREAMS = ((1, 0), (1, 4096), (2, 0), (2, 4096), (4, 0), (4, 4096))  # and bytes fetched ahead

_READERS = """
typedef long long vector __attribute__((vector_size(64), aligned(1)));
#define READER(streams, ahead)                                                     \\
  long read_##streams##_##ahead(const char* p, unsigned long bytes) {              \\
    const unsigned long part = bytes / streams / 256 * 256;                        \\
    vector sum[4] = {0};                                                           \\
    for (unsigned long i = 0; i < part; i += 256) {                                \\
      for (int s = 0; s < streams; ++s) {                                          \\
        const char* const q = p + s * part + i;                                    \\
        for (int line = 0; line < 4; ++line) {                                     \\
          if (ahead > 0) __builtin_prefetch(q + ahead + 64 * line, 0, 3);          \\
          sum[line] |= *(const vector*)(q + 64 * line);                            \\
        }                                                                          \\
      }                                                                            \\
    }                                                                              \\
    long rest = 0;                                                                 \\
    for (unsigned long i = streams * part; i < bytes; ++i) rest |= p[i];           \\
    sum[0] |= sum[1] | sum[2] | sum[3];                                            \\
    for (int i = 0; i < 8; ++i) rest |= sum[0][i];                                 \\
    return rest;                                                                   \\
  }
"""


@cache
def _compiled_readers() -> list[Callable[[int, int], object]]:
    """Return readers of so many bytes from an address; none without a compiler."""
    lines = [f"READER({streams}, {ahead})" for streams, ahead in _STREAMS]
    library = compiled("\n".join([_READERS, *lines, ""]), "-O3", "-march=native", "-w")
    if library is None:
        return []
    readers = [getattr(library, f"read_{streams}_{ahead}") for streams, ahead in _STREAMS]
    for reader in readers:
        reader.restype = ctypes.c_long
        reader.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    return readers


def _seconds(read: Callable[[], object]) -> float:
    """Of the best of five calls, the first of which warms the caches."""
    times = []
    for _ in range(5):
        begin = time.perf_counter()
        read()
        times.append(time.perf_counter() - begin)
    return min(times)


def _reader_of(reader: Callable[[int, int], object], address: int, size: int) -> Callable[[], None]:
    def read() -> None:
        reader(address, size)

    return read


def streaming_read(tensor: Tensor) -> Callable[[], object]:
    """Return a function that reads all of a contiguous tensor once and keeps nothing."""
    flat = tensor.reshape(-1)
    whole = flat.numel() * flat.element_size() // 4 * 4 // flat.element_size()
    words = flat[:whole].view(torch.float32)  # without the last of an odd number of halves
    if torch.get_num_threads() > 1:
        return words.sum
    try:
        wmemchr = ctypes.CDLL(None).wmemchr
    except (AttributeError, OSError, TypeError):
        return words.sum
    if ctypes.sizeof(ctypes.c_wchar) != 4:
        return words.sum
    wmemchr.restype = ctypes.c_void_p
    wmemchr.argtypes = [ctypes.c_void_p, ctypes.c_int32, ctypes.c_size_t]
    address, count = words.data_ptr(), words.numel()

    def read() -> object:
        return wmemchr(address, _ABSENT, count)

    if read() is not None:
        raise ValueError(f"streaming_read: the tensor has the word {_ABSENT:#x} in it")
    readers: list[Callable[[], object]] = [read]
    readers += [_reader_of(reader, address, 4 * count) for reader in _compiled_readers()]
    best = min(readers, key=_seconds)
    best.tensor = words  # type: ignore[attr-defined]  # keeps the memory alive
    return best


def slowest(calls: Sequence[Callable[[], object] | None]) -> Callable[[], object] | None:
    """Return the call that takes longest, which no kernel that does all of them can beat.

    None where one of them is.
    """
    known = [call for call in calls if call is not None]
    return max(known, key=_seconds) if len(known) == len(calls) else None


def _chunks(size: int) -> list[int]:
    whole, rest = divmod(size, _COPY_CHUNK)
    return [_COPY_CHUNK] * whole + [rest] * (rest > 0)


def streaming_copy(size: int) -> Callable[[], object]:
    """Return a function that copies so many contiguous bytes, past the caches where they are many.

    By torch's threads.
    """
    chunks = _chunks(size)
    source_and_target = torch.ones(2, max(chunks), dtype=torch.uint8)
    second_from_first = torch.zeros(2, dtype=torch.int64)

    def copy() -> None:
        for chunk in chunks:
            lmdecode.reorder_cache_(
                [source_and_target], second_from_first, length_dim=1, length=chunk
            )

    return copy


def library_copy(size: int) -> Callable[[], object]:
    """Return a function that copies so many contiguous bytes by ``Tensor.copy_``."""
    chunks = _chunks(size)
    source, target = (torch.ones(max(chunks), dtype=torch.uint8) for _ in range(2))

    def copy() -> None:
        for chunk in chunks:
            target[:chunk].copy_(source[:chunk])

    return copy
