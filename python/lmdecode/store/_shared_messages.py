"""Messages between processes that share a store, the calls they ask for, and memory for planes.

A message is a JSON header, raw bytes and a file descriptor; nothing is unpickled. The socket is in
a directory that only its owner can access. An argument is JSON where JSON can hold it; the header
describes the others, and their bytes are parts of the message. Keys and values lie in memory that
goes with the message.
"""

from __future__ import annotations

import ctypes
import fcntl
import json
import mmap
import os
import socket
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, NamedTuple

import torch

from lmdecode.store import errors
from lmdecode.store._native import Plane, PutOptions, Scope, Store
from lmdecode.store._tensors import Planes
from lmdecode.store.fingerprint import Fingerprint

_HEAD = struct.Struct("<II")  # bytes of JSON, number of byte strings
_SIZE = struct.Struct("<Q")
_MAX_JSON = 1 << 24
_MAX_PARTS = 1 << 24
_MAX_BYTES = 1 << 32
_ERRORS = {
    kind.__name__: kind
    for kind in (
        errors.StoreError, errors.StoreLockedError, errors.StoreDamagedError,
        errors.FingerprintMismatchError, ValueError, TypeError,
    )
}  # fmt: skip


@dataclass
class Message:
    """A question or an answer: JSON fields, byte strings, and the descriptor of memory or None.

    The receiver closes the descriptor.
    """

    fields: dict[str, Any]
    parts: Sequence[bytes | bytearray | memoryview] = ()
    descriptor: int | None = None


def send(peer: socket.socket, message: Message) -> None:
    """Send a whole message."""
    text = json.dumps(message.fields).encode()
    sizes = b"".join(_SIZE.pack(memoryview(part).nbytes) for part in message.parts)
    head = _HEAD.pack(len(text), len(message.parts)) + text + sizes
    if message.descriptor is None:
        peer.sendall(head)
    else:
        sent = socket.send_fds(peer, [head], [message.descriptor])
        peer.sendall(head[sent:])
    for part in message.parts:
        peer.sendall(part)


def receive(peer: socket.socket) -> Message | None:
    """Receive a whole message; None: the other side is gone, or went in the middle of one."""
    first, descriptors, _, _ = socket.recv_fds(peer, _HEAD.size, 1)
    try:
        message = _rest(peer, first) if first else None
    except BaseException:
        message = None
        raise
    finally:
        if message is None:
            for descriptor in descriptors:
                os.close(descriptor)
    if message is not None and descriptors:
        message.descriptor = descriptors[0]
    return message


def _rest(peer: socket.socket, first: bytes) -> Message | None:
    more = _exactly(peer, _HEAD.size - len(first))
    if more is None:
        return None
    text_bytes, count = _HEAD.unpack(first + more)
    if text_bytes > _MAX_JSON or count > _MAX_PARTS:
        raise ConnectionError("a message of another kind")
    text, sizes = _exactly(peer, text_bytes), _exactly(peer, count * _SIZE.size)
    if text is None or sizes is None:
        return None
    parts = []
    for (size,) in _SIZE.iter_unpack(sizes):
        part = _exactly(peer, size) if size <= _MAX_BYTES else None
        if part is None:
            return None
        parts.append(part)
    return Message(json.loads(text), parts)


def _exactly(peer: socket.socket, size: int) -> bytearray | None:
    content = bytearray(size)
    view = memoryview(content)
    while view:
        got = peer.recv_into(view)
        if not got:
            return None
        view = view[got:]
    return content


def failure(error: Exception) -> Message:
    """Return the answer that says what a call raised."""
    for kind in type(error).__mro__:
        if kind.__name__ in _ERRORS:
            return Message({"error": kind.__name__, "text": str(error)})
    number = error.errno if isinstance(error, OSError) else None
    return Message({"error": "OSError", "text": str(error), "errno": number})


def result(answer: Message) -> Any:
    """Return the result in an answer, or raise its error."""
    fields = answer.fields
    if "error" not in fields:
        return fields["result"]
    if (kind := _ERRORS.get(fields["error"])) is not None:
        raise kind(fields["text"])
    number = fields.get("errno")
    raise OSError(fields["text"]) if number is None else OSError(number, fields["text"])


_ALIGNMENT = 64
_LEAST_BYTES = 1 << 16
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


class _Place(NamedTuple):
    """Return where a plane, [heads, count, width], of some tokens begins."""

    begin: int
    heads: int
    tokens: int
    width: int
    dtype: torch.dtype


def _places(counts: Sequence[int], fingerprint: Fingerprint) -> tuple[list[_Place], int]:
    """Return the places of planes of some tokens, and where the last one ends."""
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
    """The side that reads planes; ValueError for memory that no ``GivenMemory`` made."""

    def __init__(self, descriptor: int, fingerprint: Fingerprint) -> None:
        self._fingerprint = fingerprint
        if not fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
            raise ValueError("memory that may shrink")
        self._size = os.fstat(descriptor).st_size
        self._memory = mmap.mmap(descriptor, self._size)
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))

    def planes(self, counts: Sequence[int]) -> list[Plane]:
        """Return planes with ``counts`` tokens, valid as long as this object.

        Raises ValueError where the memory is too small.
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


#: Methods of ``Store`` that change something, or tell of what does.
CALLS = (
    "put", "commit_session", "write_session", "remove_session", "erase", "erases", "insert_image",
    "pin", "flush", "failure", "stats", "collect", "import_from",
)  # fmt: skip
#: Calls that return once their data is durable, unless the caller's store is relaxed.
DURABLE_CALLS = ("put", "commit_session", "write_session")
LONG_CALLS = ("erase", "erases", "collect", "import_from")


def run(store: Store, call: str, arguments: Sequence[Any]) -> Any:
    """Run a call, of which ``pin`` has a scope and tokens in the place of a hit."""
    if call != "pin":
        return getattr(store, call)(*arguments)
    scope, ids, pinned = arguments
    if (hit := store.peek(scope, ids)) is not None:
        store.pin(hit, pinned)
        hit.release()
    return None


def question(call: str, arguments: Sequence[Any], relaxed: bool) -> Message:
    """Return the message that asks for a call."""
    said: list[Any] = []
    parts: list[bytes | bytearray | memoryview] = []
    for argument in arguments:
        match argument:
            case Scope():
                said.append({"scope": 2})
                parts += (argument.salt, argument.context)
            case PutOptions():
                said.append({"options": [argument.ttl_ms, argument.quota_bytes, argument.pin]})
            case Planes():
                said.append({"planes": argument.counts})
            case bytes():
                said.append({"bytes": 1})
                parts.append(argument)
            case bytearray() | memoryview():
                said.append({"buffer": 1})
                parts.append(argument)
            case list():
                said.append({"list": len(argument)})
                parts += argument
            case _:
                said.append(None if callable(argument) else argument)  # nobody hears of progress
    return Message({"call": call, "arguments": said, "relaxed": relaxed}, parts)


def arguments_of(message: Message, memory: TakenMemory | None) -> Iterator[Any]:
    """Yield the arguments of a question; raise ValueError for planes without their memory."""
    parts = iter(message.parts)
    for said in message.fields["arguments"]:
        match said:
            case {"scope": _}:
                yield Scope(bytes(next(parts)), bytes(next(parts)))
            case {"options": options}:
                yield PutOptions(*options)
            case {"planes": counts}:
                if memory is None:
                    raise ValueError("planes without memory")
                yield memory.planes(counts)
            case {"bytes": _}:
                yield bytes(next(parts))
            case {"buffer": _}:
                yield next(parts)
            case {"list": count}:
                yield list(islice(parts, count))
            case _:
                yield said
