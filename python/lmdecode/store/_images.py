"""Whole entries of the local store, as a second tier holds them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from ctypes import c_char, c_uint64, c_void_p

from lmdecode.store._engine import Engine, Scope, read_u32, read_u64
from lmdecode.store._library import EntryLine, Put, byref, library
from lmdecode.store._tensors import Tokens


class LocalPrefix:
    """The longest prefix of some tokens that is stored here; it is not evicted meanwhile.

    Attributes
    ----------
    num_tokens
        Its length; 0: there is none.
    entries
        What it lies in, parents first.
    """

    def __init__(self, engine: Engine, handle: c_void_p | None, num_tokens: int) -> None:
        self._engine, self._handle = engine, handle
        self.num_tokens = num_tokens
        self.entries: list[EntryLine] = []
        if handle is not None:
            count = read_u64(engine, "hit_entries", handle, None, 0)
            lines = (EntryLine * count)()
            count = min(count, read_u64(engine, "hit_entries", handle, lines, count))
            self.entries = list(lines[:count])

    def image(self, index: int) -> memoryview | None:
        """Read an entry, header and planes, and check every byte; None: it is damaged."""
        image = (c_char * self.entries[index].bytes)()
        whole = read_u32(self._engine, "read_image", self._handle, index, image, len(image))
        return memoryview(image).cast("B") if whole else None


@contextmanager
def local_prefix(engine: Engine, ids: Tokens, scope: Scope) -> Iterator[LocalPrefix]:
    """Find the longest prefix that is stored here, without counting that as use."""
    handle, count = c_void_p(), c_uint64()
    engine.call("peek", scope.reference, ids.address, len(ids), byref(handle), byref(count))
    try:
        yield LocalPrefix(engine, handle if count.value else None, count.value)
    finally:
        if count.value:
            library.lmdecode_store_release(handle)


def insert_image(engine: Engine, scope: Scope, key: bytes, image: bytearray, put: Put) -> bool:
    """Take over an entry that continues what is stored; it is checked whole, and overwritten."""
    buffer = (c_char * len(image)).from_buffer(image)
    return bool(
        read_u32(engine, "insert_image", scope.reference, key, buffer, len(image), byref(put))
    )


def image_bytes(engine: Engine, count: int) -> int:
    """Size of the image of an entry with so many tokens."""
    return int(library.lmdecode_store_image_bytes(engine.handle, count))
