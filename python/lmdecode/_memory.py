"""A tensor's memory as a buffer, without numpy, which torch does not need."""

from __future__ import annotations

import ctypes

from torch import Tensor

__all__ = ["bytes_of"]


def bytes_of(tensor: Tensor) -> memoryview:
    """Return the memory of a contiguous tensor on the CPU, [bytes]; it keeps the tensor alive."""
    if not tensor.numel():
        return memoryview(b"")
    memory = (ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())
    memory.tensor = tensor  # type: ignore[attr-defined]
    return memoryview(memory).cast("B")
