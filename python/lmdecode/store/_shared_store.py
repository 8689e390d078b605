"""A store that several processes write: one of them has the lock, and commits for the others.

Each process has a ``SharedStore``. The process with the lock has the compiled store and a
``CommitServer``. The others look up and load by a compiled store that only reads, and ask the
server for everything that changes something. When the server goes, the first that takes the lock
is the next one, and calls that had no answer are made again: made twice, they change nothing more.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from lmdecode.store._native import Hit, Scope, Store
from lmdecode.store._shared_messages import (
    CALLS,
    DURABLE_CALLS,
    LONG_CALLS,
    GivenMemory,
    Message,
    TakenMemory,
    arguments_of,
    failure,
    question,
    receive,
    result,
    run,
    send,
)
from lmdecode.store._tensors import Planes
from lmdecode.store.errors import StoreError, StoreLockedError
from lmdecode.store.fingerprint import Fingerprint

_POLL_SECONDS = 0.002
_OPENING_SECONDS = 3.0
_ELECTION_SECONDS = 10.0  # a writer that is closing flushes first
_ANSWER_SECONDS = 20.0
_SILENT_SECONDS = 60.0  # so long nobody asks a writer that did not answer to store something
_ATTEMPTS = 16
# Counters of reading: each process has its own.
_ADDED = ("hits", "misses", "damaged", "bytes_read")

OpenStore = Callable[[bool], Any]


class SharedHit:
    """A hit and the native store it belongs to (a new writer opens another)."""

    def __init__(self, owner: Store, hit: Hit, scope: Scope, ids: memoryview) -> None:
        self.owner = owner
        self.hit = hit
        self.scope = scope
        self.ids = ids
        self.num_tokens = hit.num_tokens

    def release(self) -> None:
        """Let the store evict it."""
        self.hit.release()


class _SilentError(StoreError):
    """The writer lives, and does not answer."""


class _Gone(Exception):
    """Nobody answers for the store any more; its lock is free, or will be."""


class _Writer:
    """The process that has the lock."""

    def __init__(self, native: Store, server: CommitServer) -> None:
        self.native = native
        self._server = server

    def close(self) -> None:
        self._server.close()
        self.native.close()


@dataclass
class _Connection:
    """One call at a time."""

    peer: socket.socket
    memory: GivenMemory


class _Client:
    """A process that asks the one with the lock."""

    def __init__(self, native: Store, connect: Callable[[], _Connection]) -> None:
        self.native = native  # only reads
        self._connect = connect
        self._lock = threading.Lock()
        self._idle: list[_Connection] = []

    def call(self, call: str, arguments: Sequence[Any], relaxed: bool) -> Any:
        planes = next((one for one in arguments if isinstance(one, Planes)), None)
        message = question(call, arguments, relaxed)
        with self._lock:
            connection = self._idle.pop() if self._idle else None
        try:
            connection = connection or self._connect()
            answer = self._exchange(connection, message, planes, call in LONG_CALLS)
        except TimeoutError:
            raise _SilentError("the process that writes the store does not answer") from None
        except OSError:
            raise _Gone from None
        if answer is None:
            raise _Gone
        with self._lock:
            self._idle.append(connection)
        return result(answer)

    def _exchange(
        self, connection: _Connection, message: Message, planes: Planes | None, is_long: bool
    ) -> Message | None:
        peer, descriptor = connection.peer, None
        is_answered = False
        try:
            if planes is not None:
                descriptor = connection.memory.fill(planes)
            message = replace(message, descriptor=descriptor)
            peer.settimeout(None if is_long else _ANSWER_SECONDS)
            send(peer, message)
            answer = receive(peer)
            is_answered = answer is not None
            return answer
        finally:
            if descriptor is not None:
                os.close(descriptor)
            if not is_answered:  # or the next call would take this answer for its own
                peer.close()

    def close(self) -> None:
        with self._lock:
            for connection in self._idle:
                connection.peer.close()
            self._idle.clear()
        self.native.close()


class SharedStore:
    """Interface of ``_store.Store`` for several processes at once.

    ``open_store(readonly)`` opens the compiled store.
    """

    def __init__(
        self, open_store: OpenStore, directory: str, fingerprint: Fingerprint, relaxed: bool
    ) -> None:
        self._open = open_store
        self._directory = directory
        self._fingerprint = fingerprint
        self._relaxed = relaxed
        self._process = os.getpid()
        self._lock = threading.Lock()
        self._is_closed = False
        self._failure = ""
        self._silent_until = 0.0
        self._role: _Writer | _Client = self._elected(_OPENING_SECONDS)

    # --- the writer

    def _elected(self, seconds: float) -> _Writer | _Client:
        end = time.monotonic() + seconds
        while True:
            try:
                native = self._open(False)
                return _Writer(
                    native,
                    CommitServer(native, self._directory, self._fingerprint, self._relaxed),
                )
            except StoreLockedError:
                if time.monotonic() > end:
                    raise
            with suppress(OSError), closing(self._connect().peer):
                return _Client(self._open(True), self._connect)
            time.sleep(_POLL_SECONDS)

    def _connect(self) -> _Connection:
        peer = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        path, descriptor = address(self._directory)
        try:
            peer.connect(path)
        except BaseException:
            peer.close()
            raise
        finally:
            os.close(descriptor)
        return _Connection(peer, GivenMemory(self._fingerprint))

    def _elect_after(self, gone: _Writer | _Client) -> None:
        with self._lock:
            if self._role is gone and not self._is_closed:
                # Its hits may still be loaded: it is closed with the last of them.
                self._role = self._elected(_ELECTION_SECONDS)

    @property
    def is_writer(self) -> bool:
        """Whether this process has the lock."""
        return isinstance(self._role, _Writer)

    def close(self) -> None:
        """Let go; another process may take over."""
        if os.getpid() != self._process:
            return
        with self._lock:
            was_closed, self._is_closed = self._is_closed, True
        if was_closed:
            return
        if isinstance(self._role, _Client) and self._relaxed:
            with suppress(StoreError, OSError, _Gone):
                self._role.call("flush", (), self._relaxed)
        self._role.close()

    # --- asking

    def _ask(self, call: str, *arguments: Any) -> Any:
        """Call the own store if that writes, else the process that has the lock."""
        for _ in range(_ATTEMPTS):
            role = self._role
            if isinstance(role, _Writer) or os.getpid() != self._process or self._is_closed:
                return run(role.native, call, arguments)
            try:
                return role.call(call, arguments, self._relaxed)
            except _Gone:
                self._elect_after(role)
        raise StoreError("the processes that write the store end one after the other")

    def _store(self, call: str, *arguments: Any) -> int:
        """Return how much a put or commit stored; 0, without an error, if nobody answers."""
        if self._silent_until > time.monotonic():
            return 0
        try:
            stored: int = self._ask(call, *arguments)
        except (StoreLockedError, _SilentError) as error:
            self._failure = str(error)
            if isinstance(error, _SilentError):
                self._silent_until = time.monotonic() + _SILENT_SECONDS
            return 0
        self._failure = ""
        return stored

    def _find(self, call: str, scope: Scope, ids: memoryview) -> SharedHit | None:
        native = self._role.native
        hit: Hit | None = getattr(native, call)(scope, ids)
        return None if hit is None else SharedHit(native, hit, scope, ids)

    def _read(self, call: str, hit: SharedHit, *arguments: Any) -> Any:
        return getattr(hit.owner, call)(hit.hit, *arguments)

    #: Which methods of ``Store`` go where; those that it does not name are of this process.
    _ROUTES: ClassVar[dict[str, Callable[..., Any]]] = {
        **dict.fromkeys(CALLS, _ask),
        **dict.fromkeys(("put", "commit_session"), _store),
        **dict.fromkeys(("lookup", "peek"), _find),
        **dict.fromkeys(("load", "entries_of", "read_image"), _read),
    }

    def __getattr__(self, name: str) -> Any:
        if name in self._ROUTES:
            return partial(self._ROUTES[name], self, name)
        if name == "_role":  # not opened
            raise AttributeError(name)
        return getattr(self._role.native, name)

    # --- calls that need more than that

    def erase(self, scope: Scope, ids: memoryview | None, name: bytes | None) -> int:
        """Erase tokens, a session or everything."""
        is_known = name is not None and self.read_session(scope, name) is not None
        try:
            count: int = self._ask("erase", scope, ids, name)
        except ValueError:
            # The writer erased it, and died before it said so; or another process was faster.
            if not is_known:
                raise
            return 0
        return count

    def pin(self, hit: SharedHit, pinned: bool) -> None:
        """Never evict a prefix, or do so again."""
        role = self._role
        if isinstance(role, _Writer) and role.native is hit.owner:
            role.native.pin(hit.hit, pinned)
        else:
            self._ask("pin", hit.scope, hit.ids[: hit.num_tokens], pinned)

    def failure(self) -> str:
        """Why nothing is stored."""
        return self._failure or str(self._ask("failure"))

    def stats(self) -> dict[str, int]:
        """Counters: the writer's, and what this process read."""
        stats: dict[str, int] = self._ask("stats")
        role = self._role
        if isinstance(role, _Client):
            own = role.native.stats()
            stats.update({name: own[name] for name in _ADDED})
        return stats


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
        """Finish running calls and disconnect, before the lock is released."""
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
