"""Memory on pages of 2 MB: one for the weights of a model, one for the scratch of its searches."""

from __future__ import annotations

import contextlib
import mmap
import sys

import torch
from torch import Tensor

__all__ = ["ALIGNMENT", "SpareMemory", "gather", "new_memory"]

ALIGNMENT = 64  # bytes
_HUGE_PAGE = 2 << 20
_LARGEST_KEPT = 256 << 20
# Memory that may never be written is not reserved. Python 3.13 has a name for the flag.
_MAP_NORESERVE = 0x4000 if sys.platform == "linux" else 0


def new_memory(size: int, *, huge_pages: bool = True) -> Tensor:
    """Return [size] uint8, aligned to 64 bytes, on huge pages where it fills one and they are had.

    Packed weights are read row after row at every step: with pages of 4 KB the look-up of pages
    takes about as long as the reading. With ``huge_pages=False`` they are kept away, where the
    system would give them unasked: memory is had of it as it is first written.
    """
    with torch.inference_mode(False):
        if size < _HUGE_PAGE or not hasattr(mmap, "MADV_HUGEPAGE"):
            return torch.empty(size, dtype=torch.uint8, device="cpu")
        # Room to begin and end on a huge page, wherever the mapping lies.
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
        pages = mmap.mmap(-1, size + 2 * _HUGE_PAGE, flags=flags)
        with contextlib.suppress(OSError):  # a kernel built without them
            pages.madvise(mmap.MADV_HUGEPAGE if huge_pages else mmap.MADV_NOHUGEPAGE)
        mapped = torch.frombuffer(pages, dtype=torch.uint8)
        begin = -mapped.data_ptr() % _HUGE_PAGE
        return mapped[begin : begin + size]


def gather(tensors: list[Tensor], room: int = 0) -> Tensor:
    """Move contiguous tensors to one uint8 memory, each at a multiple of 64 bytes; return it.

    At its beginning there is room for others.
    """
    sizes = [-(-tensor.nbytes // ALIGNMENT) * ALIGNMENT for tensor in tensors]
    memory, at = new_memory(room + sum(sizes)), room
    with torch.inference_mode(False):
        for i, (tensor, size) in enumerate(zip(tensors, sizes, strict=True)):
            part = memory[at : at + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            tensors[i] = part.copy_(tensor)
            if tensor.nbytes < size:
                memory[at + tensor.nbytes : at + size] = 0  # equal tensors give equal bytes
            at += size
    return memory


class SpareMemory:
    """A memory that is kept between uses: the system hands out pages slowly, and empties them.

    At most 256 MB are kept. Any number of threads may take and give: one of them gets what is kept,
    the others get new memory.
    """

    def __init__(self) -> None:
        self._kept: list[Tensor] = []

    def __reduce__(self) -> tuple[type[SpareMemory], tuple[()]]:
        """Let copies and files of an object be without the memory that it keeps."""
        return SpareMemory, ()

    def take(self, size: int) -> Tensor:
        """Return at least ``size`` bytes, which may hold anything."""
        try:
            memory = self._kept.pop()
        except IndexError:
            return new_memory(size)
        return memory if len(memory) >= size else new_memory(size)

    def give(self, memory: Tensor) -> None:
        """Keep a memory that nothing refers to any more, or a larger one that is kept already."""
        if sum(map(len, self._kept)) <= len(memory) <= _LARGEST_KEPT:
            self._kept[:] = [memory]
