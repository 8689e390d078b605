"""Messages between processes that share a store: a JSON header, raw bytes, a file descriptor.

Nothing is unpickled. The socket is in a directory that only its owner can access.
"""

from __future__ import annotations

import json
import os
import socket
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lmdecode.store import errors

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
    """A question or an answer.

    Attributes
    ----------
    fields
        What JSON can hold.
    parts
        Byte strings.
    descriptor
        Of memory that goes with it, or None. Who receives one closes it.
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
