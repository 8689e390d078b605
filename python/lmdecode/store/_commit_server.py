"""The process that has the lock commits for the others: a thread a connection.

Commits that meet share a flush, as those of threads do, and an answer is sent once the commit is
durable: nothing on disk is new.
"""

from __future__ import annotations

import os
import socket
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

from lmdecode.store._messages import Message, failure, receive, send
from lmdecode.store._native import PutOptions, Scope, Store
from lmdecode.store._shared_planes import TakenMemory
from lmdecode.store.fingerprint import Fingerprint

_SOCKET = "socket"
_JOIN_SECONDS = 60.0


def address(directory: str) -> tuple[str, int]:
    """Return a short name of a directory's socket, and the descriptor that it is valid with."""
    # A socket's own path must be short.
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    return f"/proc/self/fd/{descriptor}/{_SOCKET}", descriptor


class CommitServer:
    """Answers for the compiled store of this process, which has the lock, until it is closed."""

    def __init__(
        self, native: Store, directory: str, fingerprint: Fingerprint, relaxed: bool
    ) -> None:
        self._native = native
        self._fingerprint = fingerprint
        self._relaxed = relaxed
        self._path = Path(directory) / _SOCKET
        self._is_closing = False
        self._lock = threading.Lock()
        self._peers: dict[threading.Thread, socket.socket] = {}
        self._path.unlink(missing_ok=True)  # of one that was killed: the lock is ours
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        path, descriptor = address(directory)
        try:
            self._listener.bind(path)
            self._path.chmod(0o600)
            self._listener.listen(64)
        finally:
            os.close(descriptor)
        self._acceptor = threading.Thread(
            target=self._accept, name="lmdecode-store-server", daemon=True
        )
        self._acceptor.start()

    def close(self) -> None:
        """Finish what is under way and say goodbye; before the lock goes."""
        with self._lock:
            self._is_closing = True
            peers = dict(self._peers)
        self._path.unlink(missing_ok=True)
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._acceptor.join(_JOIN_SECONDS)
        for peer in peers.values():
            with suppress(OSError):
                peer.shutdown(socket.SHUT_RD)
        for thread in peers:
            thread.join(_JOIN_SECONDS)

    def _accept(self) -> None:
        while True:
            try:
                peer, _ = self._listener.accept()
            except OSError:  # closed
                return
            thread = threading.Thread(target=self._serve, args=(peer,), daemon=True)
            with self._lock:
                if self._is_closing:
                    peer.close()
                    return
                self._peers[thread] = peer
            thread.start()

    def _serve(self, peer: socket.socket) -> None:
        memory: TakenMemory | None = None
        with peer, suppress(OSError, ValueError):
            while not self._is_closing and (question := receive(peer)) is not None:
                if question.descriptor is not None:
                    try:
                        memory = TakenMemory(question.descriptor, self._fingerprint)
                    finally:
                        os.close(question.descriptor)
                try:
                    answer = Message({"result": self._answer(question, memory)})
                except Exception as error:
                    answer = failure(error)
                send(peer, answer)
        with self._lock:
            self._peers.pop(threading.current_thread(), None)

    def _answer(self, question: Message, memory: TakenMemory | None) -> Any:
        fields, parts = question.fields, [bytes(part) for part in question.parts]
        call = getattr(self, f"_do_{fields['call']}", None)
        if call is None:
            raise ValueError(f"no such call: {fields['call']}")
        if "counts" in fields:
            if memory is None:
                raise ValueError("planes without memory")
            fields["planes"] = memory.planes(fields["counts"])
        return call(fields, *parts)

    def _durable(self, fields: dict[str, Any], stored: int) -> int:
        """Return ``stored``; 0 if a strict client's put is not durable in a relaxed store."""
        return stored if fields["relaxed"] or not self._relaxed or self._native.flush() else 0

    def _do_put(self, fields: dict[str, Any], salt: bytes, context: bytes, ids: bytes) -> int:
        planes, options = fields["planes"], _options(fields)
        stored = self._native.put(Scope(salt, context), ids, planes, options)
        return self._durable(fields, stored)

    def _do_commit_session(
        self, fields: dict[str, Any], salt: bytes, context: bytes, ids: bytes, name: bytes
    ) -> int:
        scope, planes, options = Scope(salt, context), fields["planes"], _options(fields)
        computed = fields["computed"]
        stored = self._native.commit_session(scope, name, ids, computed, planes, options)
        return self._durable(fields, stored)

    def _do_write_session(
        self, fields: dict[str, Any], salt: bytes, context: bytes, name: bytes, ids: bytes
    ) -> bool:
        written = self._native.write_session(Scope(salt, context), name, ids)
        return bool(self._durable(fields, written))

    def _do_remove_session(
        self, fields: dict[str, Any], salt: bytes, context: bytes, name: bytes
    ) -> bool:
        return self._native.remove_session(Scope(salt, context), name)

    def _do_erase(self, fields: dict[str, Any], salt: bytes, context: bytes, *named: bytes) -> int:
        ids, name = _choice(fields, named)
        return self._native.erase(Scope(salt, context), ids, name)

    def _do_erases(
        self, fields: dict[str, Any], salt: bytes, context: bytes, *parts: bytes
    ) -> list[bool]:
        count = fields["what"] is not None
        ids, name = _choice(fields, parts[:count])
        return self._native.erases(Scope(salt, context), ids, name, list(parts[count:]))

    def _do_insert_image(
        self, fields: dict[str, Any], salt: bytes, context: bytes, key: bytes, image: bytes
    ) -> bool:
        options = _options(fields)
        return self._native.insert_image(Scope(salt, context), key, bytearray(image), options)

    def _do_pin(self, fields: dict[str, Any], salt: bytes, context: bytes, ids: bytes) -> None:
        hit = self._native.peek(Scope(salt, context), ids)
        if hit is not None:
            self._native.pin(hit, fields["pinned"])
            hit.release()

    def _do_flush(self, fields: dict[str, Any]) -> bool:
        return self._native.flush()

    def _do_failure(self, fields: dict[str, Any]) -> str:
        return self._native.failure()

    def _do_stats(self, fields: dict[str, Any]) -> dict[str, int]:
        return self._native.stats()

    def _do_collect(self, fields: dict[str, Any]) -> int:
        return self._native.collect()

    def _do_import_from(self, fields: dict[str, Any], path: bytes) -> int:
        return self._native.import_from(path, None)


def _options(fields: dict[str, Any]) -> PutOptions:
    return PutOptions(fields["ttl_ms"], fields["quota_bytes"], fields["pin"])


def _choice(
    fields: dict[str, Any], named: tuple[bytes, ...]
) -> tuple[memoryview | None, bytes | None]:
    """Tokens and session of ``erase``."""
    what = fields["what"]
    ids = memoryview(named[0]) if what == "tokens" else None
    return ids, named[0] if what == "session" else None
