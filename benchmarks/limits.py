"""The physical limits: one streaming read of the input, one streaming copy of what must move.

Read: the C library's ``wmemchr``, looking for a word that is not there, reads fastest. Measured
warm, with AVX-512, from 32000 to 8 million elements: ``torch.sum`` of a float view takes up to
1.4x as long, ``torch.amax`` 1.1-1.9x, ``torch.dot`` 1.4-2.5x, ``torch.amax`` on bfloat16 4-8x.
It uses one thread; with several, ``torch.sum`` of a float view is the limit.

Copy: stores past the caches, which write a line without reading it first. Neither the C library's
``memcpy`` (glibc 2.36 on Zen 5, any size) nor ``Tensor.copy_`` uses them: 21 GB/s. lmdecode's own
copy of one contiguous row does: 29 GB/s; no library here is faster.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import torch
from torch import Tensor

import lmdecode

_COPY_CHUNK = 128 << 20  # more than caches hold
_ABSENT = 0x7FC12345  # a NaN in float32 and, by its upper half, in bfloat16


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
    read.tensor = words  # type: ignore[attr-defined]  # keeps the memory alive
    return read


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
