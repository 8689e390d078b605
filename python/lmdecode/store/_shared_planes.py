"""Keys and values on their way to another process: memory that cannot shrink under who reads it."""

from __future__ import annotations

import fcntl
import mmap
import os
from collections.abc import Sequence

import torch
from torch import Tensor

from lmdecode.store._tensors import Planes
from lmdecode.store.fingerprint import Fingerprint

_ALIGNMENT = 64
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


def _places(counts: Sequence[int], fingerprint: Fingerprint) -> tuple[list[int], int]:
    """Where planes of so many tokens begin, and where the last one ends."""
    token = fingerprint.num_kv_heads * fingerprint.head_size * fingerprint.torch_dtype.itemsize
    places, end = [], 0
    for count in counts:
        places.append(end)
        end += -(-count * token // _ALIGNMENT) * _ALIGNMENT
    return places, end


def _views(memory: mmap.mmap, counts: Sequence[int], fingerprint: Fingerprint) -> list[Tensor]:
    heads, size, dtype = fingerprint.num_kv_heads, fingerprint.head_size, fingerprint.torch_dtype
    return [
        torch.frombuffer(memory, dtype=dtype, count=heads * count * size, offset=place).view(
            heads, count, size
        )
        if count
        else torch.empty(heads, 0, size, dtype=dtype)
        for place, count in zip(_places(counts, fingerprint)[0], counts, strict=True)
    ]


def give(planes: Planes, fingerprint: Fingerprint) -> int:
    """Copy planes into memory of their own; a descriptor, which the caller closes."""
    counts = planes.counts
    size = max(1, _places(counts, fingerprint)[1])
    descriptor = os.memfd_create("lmdecode-store", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(descriptor, size)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)
        memory = mmap.mmap(descriptor, size)
        for view, tensor in zip(_views(memory, counts, fingerprint), planes.tensors, strict=True):
            view.copy_(tensor)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def take(descriptor: int | None, counts: Sequence[int], fingerprint: Fingerprint) -> Planes:
    """Return the planes that another process gave.

    Raises
    ------
    ValueError
        The memory is none that ``give`` made for so many tokens.
    """
    if descriptor is None or any(not isinstance(count, int) or count < 0 for count in counts):
        raise ValueError("no memory, or a count below 0")
    size = max(1, _places(counts, fingerprint)[1])
    seals = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)
    if os.fstat(descriptor).st_size != size or not seals & fcntl.F_SEAL_SHRINK:
        raise ValueError("memory of another size, or that may shrink")
    return Planes(_views(mmap.mmap(descriptor, size), counts, fingerprint))
