"""Keys and values on their way to another process: memory of a connection, used again by each call.

It can neither shrink nor grow, so that who reads it finds all of it.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
from collections.abc import Sequence

import torch

from lmdecode.store._native import Plane
from lmdecode.store._tensors import Planes
from lmdecode.store.fingerprint import Fingerprint

_ALIGNMENT = 64
_LEAST_BYTES = 1 << 16
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


def _places(counts: Sequence[int], fingerprint: Fingerprint) -> tuple[list[int], int]:
    """Where planes of so many tokens begin, and where the last one ends."""
    places, end = [], 0
    for count in counts:
        places.append(end)
        end += -(-count * fingerprint.token_bytes // _ALIGNMENT) * _ALIGNMENT
    return places, end


class GivenMemory:
    """The side that writes planes."""

    def __init__(self, fingerprint: Fingerprint) -> None:
        self._fingerprint = fingerprint
        self._size = 0

    def fill(self, planes: Planes) -> int | None:
        """Copy planes; a descriptor, which the caller closes, where the memory is another one."""
        counts = planes.counts
        places, size = _places(counts, self._fingerprint)
        descriptor = None
        if size > self._size or not self._size:
            descriptor = self._grow(size)
        heads = self._fingerprint.num_kv_heads
        dtype, width = self._fingerprint.stored_row
        item = dtype.itemsize
        for place, count, tensor in zip(places, counts, planes.tensors, strict=True):
            begin = place // item
            flat = self._elements[begin : begin + heads * count * width]
            flat.view(heads, count, width).copy_(tensor)
        return descriptor

    def _grow(self, size: int) -> int:
        size = max(_LEAST_BYTES, 1 << (size - 1).bit_length())
        descriptor = os.memfd_create("lmdecode-store", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(descriptor, size)
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)
            memory = mmap.mmap(descriptor, size)
            self._elements = torch.frombuffer(memory, dtype=self._fingerprint.stored_row[0])
        except BaseException:
            os.close(descriptor)
            raise
        self._size = size
        return descriptor


class TakenMemory:
    """The side that reads them.

    Raises
    ------
    ValueError
        The descriptor is not of memory that a ``GivenMemory`` made.
    """

    def __init__(self, descriptor: int, fingerprint: Fingerprint) -> None:
        self._fingerprint = fingerprint
        if not fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
            raise ValueError("memory that may shrink")
        self._size = os.fstat(descriptor).st_size
        self._memory = mmap.mmap(descriptor, self._size)
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))

    def planes(self, counts: Sequence[int]) -> list[Plane]:
        """Return planes of so many tokens, valid as long as this object.

        Raises
        ------
        ValueError
            The memory has not so many.
        """
        if any(not isinstance(count, int) or count < 0 for count in counts):
            raise ValueError("planes of less than no tokens")
        places, size = _places(counts, self._fingerprint)
        if size > self._size:
            raise ValueError("more planes than memory")
        dtype, width = self._fingerprint.stored_row
        item = dtype.itemsize
        token = width * item
        return [
            Plane(self._address + place, count * token, token, item, count)
            for place, count in zip(places, counts, strict=True)
        ]
