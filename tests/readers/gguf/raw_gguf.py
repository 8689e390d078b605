"""GGUF files made of bytes, where a test wants them to be wrong."""

import struct
from collections.abc import Iterable, Sequence

__all__ = ["array", "entry", "file_of", "string", "tensor"]

U8, U32, F32, BOOL, STRING, ARRAY, U64 = 0, 4, 6, 7, 8, 9, 10


def string(text: str | bytes, size: int | None = None) -> bytes:
    """Return a string; ``size`` is the length that it says."""
    data = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(data) if size is None else size) + data


def entry(key: str | bytes, kind: int, value: bytes) -> bytes:
    """Return an entry of the metadata."""
    return string(key) + struct.pack("<I", kind) + value


def array(kind: int, count: int, values: bytes) -> bytes:
    """Return the value of an array, which says that it has ``count`` entries."""
    return struct.pack("<IQ", kind, count) + values


def tensor(
    name: str, dims: Sequence[int], kind: int = 0, offset: int = 0, num_dims: int | None = None
) -> bytes:
    """Return an entry of the table of tensors; ``dims`` are ggml's, the first is contiguous."""
    count = len(dims) if num_dims is None else num_dims
    sizes = struct.pack(f"<{len(dims)}Q", *dims)
    return string(name) + struct.pack("<I", count) + sizes + struct.pack("<IQ", kind, offset)


def file_of(
    entries: Iterable[bytes] = (),
    tensors: Iterable[bytes] = (),
    data: bytes = b"",
    *,
    magic: bytes = b"GGUF",
    version: bytes = b"\x03\0\0\0",
    num_entries: int | None = None,
    num_tensors: int | None = None,
    alignment: int = 32,
) -> bytes:
    """Return a file; numbers are those of what it has where none is given."""
    entries, tensors = list(entries), list(tensors)
    counts = (
        len(tensors) if num_tensors is None else num_tensors,
        len(entries) if num_entries is None else num_entries,
    )
    head = magic + version + struct.pack("<QQ", *counts) + b"".join([*entries, *tensors])
    return head + bytes(-len(head) % alignment) + data
