"""Keys and values of the second tier, byte by byte.

docs/reference/store_format.md has the same in words.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import ClassVar

from lmdecode.store._native import Store, crc32c

#: No value is longer: Redis and its clients copy values whole.
MAX_VALUE_BYTES = 1 << 20

#: About what one question and its answer carry.
ROUND_TRIP_BYTES = 4 * MAX_VALUE_BYTES

_MAGIC = b"LMDKVREM"
_VERSION = 1
_FIELDS = struct.Struct("<8sII32s32sIIQQQqI")
_CRC = struct.Struct("<I")
_HEAD_BYTES = _FIELDS.size + _CRC.size
_MAX_PIECE_BYTES = MAX_VALUE_BYTES - _HEAD_BYTES
# In a slot's and a value's header: the least length of a prefix that finds its windows there.
_IMAGE_PLACE = struct.Struct("<32xI52x32s")
_MAX_PIECES = 1 << 12  # of an image of 2 GiB, and then some
_IMAGE_USABLE_FROM = struct.Struct("<36xI")

#: Bytes of a value that ``RemoteEntry.there`` takes.
HEAD_RANGE = (0, _FIELDS.size - 1)


class DamagedValueError(Exception):
    """A value differs from the one written under its key."""


def chain_key(parent: bytes, num_tokens: int, ids: bytes) -> bytes:
    """Key of the entry that continues ``parent`` by these token ids, 4 bytes each."""
    counts = struct.pack("<QQ", num_tokens, len(ids) // 4)
    return hashlib.sha256(b"lmdecode.chain.1" + parent + counts + ids).digest()


def usable_from(image: memoryview) -> int:
    """Return how many tokens after an entry's beginning it has all that windows need; 0: at any."""
    return int(_IMAGE_USABLE_FROM.unpack_from(image)[0])


def image_sizes(store: Store, count: int) -> tuple[int, int]:
    """Return the sizes of an image of some tokens, with a state and without."""
    return store.image_bytes(count), store.image_bytes(count, with_state=False)


@dataclass(frozen=True)
class RemoteEntry:
    """An entry as the second tier names it.

    ``key`` covers fingerprint, tenant, context and all tokens up to its end; ``root`` is the key of
    the empty prefix. ``num_bytes`` is the size of the image; for a model with states it includes
    the state after the last token, and ``without_state`` is the size without it (None: no states).
    """

    key: bytes
    root: bytes
    by_column: bool
    num_bytes: int
    without_state: int | None = None

    def of(
        self, key: bytes, num_bytes: int | None = None, without_state: int | None = None
    ) -> RemoteEntry:
        """Another entry of the same tenant and context; without ``num_bytes`` as large as this."""
        if num_bytes is None:
            return replace(self, key=key)
        return replace(self, key=key, num_bytes=num_bytes, without_state=without_state)

    @property
    def digest(self) -> bytes:
        """The entry's name: a hash of key and layout."""
        return _digest(self.key, self.by_column)

    @property
    def names(self) -> list[str]:
        """Key of each value; an image without the state may have fewer."""
        tag = _tag(self.digest)
        return [f"{tag}:{piece}" for piece in range(len(_pieces(self.num_bytes)))]

    def there(self, first: bytes) -> tuple[int, int] | None:
        """Return what a first value tells: the image's size, and its ``usable_from``.

        None: an image of this entry has no such size.
        """
        if len(first) < _FIELDS.size:
            return None
        fields = _FIELDS.unpack_from(first)
        size = int(fields[7])
        return (size, int(fields[-1])) if size in (self.num_bytes, self.without_state) else None

    def values_of(self, size: int) -> int:
        """Return the number of values of an image."""
        return len(_pieces(size))

    def values(self, image: memoryview, expires_ms: int) -> Iterator[bytes]:
        """Yield the value of each key, of the first ones without the state."""
        pieces = _pieces(len(image))
        for piece, (begin, end) in enumerate(pieces):
            fields = _FIELDS.pack(
                _MAGIC, _VERSION, _HEAD_BYTES, self.digest, self.root, piece, len(pieces),
                len(image), begin, end - begin, expires_ms, usable_from(image),
            )  # fmt: skip
            content = bytes(image[begin:end])
            yield b"".join((fields, _CRC.pack(_checksum(fields, content, 0)), content))

    def image(self, values: Sequence[bytes]) -> tuple[bytearray, int]:
        """Check values; return the image and when it expires, in ms since 1970 (0: never).

        Raises DamagedValueError where a value does not belong there.
        """
        there = self.there(values[0])
        if there is None:
            raise DamagedValueError("of another length")
        image, expires_ms = bytearray(there[0]), 0
        pieces = _pieces(len(image))
        for piece, ((begin, end), value) in enumerate(zip(pieces, values, strict=True)):
            if len(value) != _HEAD_BYTES + end - begin:
                raise DamagedValueError("of another length")
            fields = value[: _FIELDS.size]
            (crc,) = _CRC.unpack_from(value, _FIELDS.size)
            if crc != _checksum(fields, value, _HEAD_BYTES):
                raise DamagedValueError("checksum")
            *known, expires, _ = _FIELDS.unpack(fields)
            expected = [
                _MAGIC, _VERSION, _HEAD_BYTES, self.digest, self.root, piece, len(values),
                len(image), begin, end - begin,
            ]  # fmt: skip
            if known != expected:
                raise DamagedValueError("of another entry, fingerprint or format version")
            image[begin:end] = memoryview(value)[_HEAD_BYTES:]
            expires_ms = min(expires_ms or expires, expires or expires_ms)
        return image, expires_ms


#: Pattern of the names of entries' first values.
FIRST_VALUES = "lmdkv1:{*}:0"


@dataclass(frozen=True)
class ValueHead:
    """Header of an entry's first value. Nothing in it is trusted.

    ``root`` is the key of the empty prefix, ``names`` the key of each value, ``image`` the slot's
    header; ``parent`` and ``count`` are the key of the prefix that the entry continues and the
    entry's number of tokens.
    """

    root: bytes
    names: list[str]
    image: bytes
    parent: bytes
    count: int

    size: ClassVar[int] = _HEAD_BYTES

    @classmethod
    def of(cls, name: bytes, value: bytes) -> ValueHead | None:
        """Parse it; None if it is not a value of an entry."""
        image = value[_HEAD_BYTES:]
        if len(image) < _IMAGE_PLACE.size or value[: len(_MAGIC)] != _MAGIC:
            return None
        fields = _FIELDS.unpack_from(value)
        tag = name.decode("ascii", "replace").rpartition(":")[0]
        count, parent = _IMAGE_PLACE.unpack_from(image)
        pieces = min(fields[6], _MAX_PIECES)
        return cls(fields[4], [f"{tag}:{i}" for i in range(pieces)], image, parent, count)


def _pieces(size: int) -> list[tuple[int, int]]:
    """Begin and end of what each value holds of an image; sizes differ by one at most."""
    count = -(-size // _MAX_PIECE_BYTES)
    return list(pairwise(size * piece // count for piece in range(count + 1)))


def tails_name(parent: bytes, by_column: bool) -> str:
    """Key of the set of lengths in which entries shorter than a chunk continue ``parent``."""
    return f"{_tag(_digest(parent, by_column))}:tails"


def _checksum(fields: bytes, content: bytes, offset: int) -> int:
    return crc32c(memoryview(content)[offset:], crc32c(fields))


def _digest(key: bytes, by_column: bool) -> bytes:
    return hashlib.sha256(b"lmdecode.remote.1" + struct.pack("<I", by_column) + key).digest()


def _tag(digest: bytes) -> str:
    # Redis Cluster places a key by what is in braces: an entry's values share a slot, and the
    # entries of a prefix are spread over all nodes.
    return f"lmdkv1:{{{digest.hex()}}}"
