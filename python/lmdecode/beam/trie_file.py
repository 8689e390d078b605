"""The file of a ``Trie``: a header and three arrays, mapped into memory where it is read."""

from __future__ import annotations

import ctypes
import mmap
import os
import struct
import zlib
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["TrieArrays", "read_trie", "write_trie"]

_MAGIC = b"lmdtrie\0"
_VERSION = 1
# Magic, version, CRC-32 of the arrays, nodes, sequences, largest token, longest sequence; behind
# them the CRC-32 of all that, and zeros up to the size. Little-endian.
_HEADER = struct.Struct("<8sIIqqqq")
_HEADER_CRC = struct.Struct("<I")
_HEADER_SIZE = 64


class TrieArrays(NamedTuple):
    """A trie as tensors on the CPU: csrc/beam/token_trie.h.

    Attributes
    ----------
    tokens : Tensor
        [nodes] int32: the token that leads to each node; -1 for the root.
    child_begin : Tensor
        [nodes + 1] int32.
    ends : Tensor
        [nodes] uint8: whether a sequence ends there.
    num_sequences, max_token, longest : int
        Of the sequences.
    """

    tokens: Tensor
    child_begin: Tensor
    ends: Tensor
    num_sequences: int
    max_token: int
    longest: int

    @classmethod
    def of(cls, tokens: Tensor, child_begin: Tensor, ends: Tensor) -> TrieArrays:
        """Return the arrays with the numbers that follow from them."""
        # A level of the trie is the children of the one before; they lie behind one another.
        depth, last = 0, 1
        while (next_last := int(child_begin[last])) > last:
            last, depth = next_last, depth + 1
        num_sequences = int(ends.sum(dtype=torch.int64))
        return cls(tokens, child_begin, ends, num_sequences, int(tokens.max()), depth)


def _sizes(nodes: int) -> tuple[int, int, int]:
    """Return the bytes of child_begin, tokens and ends, as they follow each other in the file."""
    return 4 * (nodes + 1), 4 * nodes, nodes


def _bytes_of(tensor: Tensor) -> memoryview:
    """Return the memory of a contiguous tensor, which has to outlive it."""
    kind = ctypes.c_char * (tensor.numel() * tensor.element_size())
    return memoryview(kind.from_address(tensor.data_ptr())).cast("B")


def write_trie(path: Path, trie: TrieArrays) -> None:
    """Write a trie under another name, then put it in its place."""
    parts = [_bytes_of(tensor) for tensor in (trie.child_begin, trie.tokens, trie.ends)]
    checksum = 0
    for part in parts:
        checksum = zlib.crc32(part, checksum)
    header = _HEADER.pack(
        _MAGIC, _VERSION, checksum, len(trie.tokens), trie.num_sequences, trie.max_token,
        trie.longest,
    )  # fmt: skip
    header += _HEADER_CRC.pack(zlib.crc32(header))
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(header.ljust(_HEADER_SIZE, b"\0"))
            for part in parts:
                file.write(part)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def _damaged(path: Path, what: str) -> ValueError:
    return ValueError(f"Trie.load: {path} {what}; expected a file that Trie.save wrote")


def read_trie(path: Path) -> TrieArrays:
    """Map a trie; raise ValueError for a file that is none, or damaged."""
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size < _HEADER_SIZE:
            raise _damaged(path, f"has {size} bytes, less than a header")
        # A private mapping: torch wants memory that could be written to.
        memory = mmap.mmap(file.fileno(), size, access=mmap.ACCESS_COPY)
    magic, version, checksum, nodes, *numbers = _HEADER.unpack_from(memory)
    if magic != _MAGIC:
        raise _damaged(path, f"begins with {magic!r}")
    if version != _VERSION:
        raise _damaged(path, f"has version {version}, and this is version {_VERSION}")
    (of_header,) = _HEADER_CRC.unpack_from(memory, _HEADER.size)
    rest = memory[_HEADER.size + _HEADER_CRC.size : _HEADER_SIZE]
    if zlib.crc32(memory[: _HEADER.size]) != of_header or any(rest):
        raise _damaged(path, "has a damaged header")
    sizes = _sizes(nodes)
    if nodes < 1 or size != _HEADER_SIZE + sum(sizes):
        raise _damaged(path, f"has {size} bytes for {nodes} nodes")
    with memoryview(memory) as whole:
        if zlib.crc32(whole[_HEADER_SIZE:]) != checksum:
            raise _damaged(path, "does not fit its checksum")
    tensors, begin = [], _HEADER_SIZE
    for bytes_, dtype, width in zip(
        sizes, (torch.int32, torch.int32, torch.uint8), (4, 4, 1), strict=True
    ):
        tensors.append(torch.frombuffer(memory, dtype=dtype, count=bytes_ // width, offset=begin))
        begin += bytes_
    child_begin, tokens, ends = tensors
    return TrieArrays(tokens, child_begin, ends, *numbers)
