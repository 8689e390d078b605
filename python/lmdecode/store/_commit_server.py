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
from lmdecode.store._native import Store
from lmdecode.store._shared_calls import CALLS, DURABLE_CALLS, arguments_of, run
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
        fields = question.fields
        call = fields["call"]
        if call not in CALLS:
            raise ValueError(f"no such call: {call}")
        result = run(self._native, call, list(arguments_of(question, memory)))
        if call in DURABLE_CALLS and self._relaxed and not fields["relaxed"]:
            return result if self._native.flush() else type(result)()  # nothing of it is stored
        return result
