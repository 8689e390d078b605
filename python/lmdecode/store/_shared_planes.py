"""Keys and values on their way to another process: memory of a connection, used again by each call.

It can neither shrink nor grow, so that who reads it finds all of it.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
from collections.abc import Sequence
from typing import NamedTuple

import torch

from lmdecode.store._native import Plane
from lmdecode.store._tensors import Planes
from lmdecode.store.fingerprint import Fingerprint

_ALIGNMENT = 64
_LEAST_BYTES = 1 << 16
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


class _Place(NamedTuple):
    """Where a plane, [heads, count, width], of so many tokens begins."""

    begin: int
    heads: int
    tokens: int
    width: int
    dtype: torch.dtype


def _places(counts: Sequence[int], fingerprint: Fingerprint) -> tuple[list[_Place], int]:
    """Places of planes of so many tokens, and where the last one ends."""
    dtype, width = fingerprint.stored_row
    places, end = [], 0
    for plane, count in enumerate(counts):
        if plane < 2 * fingerprint.num_layers:
            place = _Place(end, fingerprint.num_kv_heads, count, width, dtype)
        else:
            place = _Place(end, 1, count, fingerprint.state_bytes, torch.uint8)
        places.append(place)
        size = place.heads * count * place.width * place.dtype.itemsize
        end += -(-size // _ALIGNMENT) * _ALIGNMENT
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
        for place, tensor in zip(places, planes.tensors, strict=True):
            size = tensor.numel() * tensor.itemsize
            flat = self._bytes[place.begin : place.begin + size].view(place.dtype)
            flat.view(place.heads, place.tokens, place.width).copy_(tensor)
        return descriptor

    def _grow(self, size: int) -> int:
        size = max(_LEAST_BYTES, 1 << (size - 1).bit_length())
        descriptor = os.memfd_create("lmdecode-store", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(descriptor, size)
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)
            memory = mmap.mmap(descriptor, size)
            self._bytes = torch.frombuffer(memory, dtype=torch.uint8)
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
        return [_plane_at(self._address, place) for place in places]


def _plane_at(address: int, place: _Place) -> Plane:
    item = place.dtype.itemsize
    token = place.width * item
    return Plane(address + place.begin, place.tokens * token, token, item, place.tokens)
