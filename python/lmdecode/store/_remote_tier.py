"""The second tier at work: entries go there after a commit, and come from there after a miss.

Nothing here raises into a caller except ``erase``. Only ``fetch`` waits for the server, for a
bounded time. An entry that the server cannot give is a miss; one that it does not take is counted.
Erasing reads every entry's header, because keys do not tell tokens.
"""

from __future__ import annotations

import threading
import time
import weakref
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import islice
from queue import Empty, Full, Queue
from typing import Any, TypeVar

from lmdecode.store._native import PutOptions, Scope, Store
from lmdecode.store._remote_transfer import Fetch, LocalPrefix, Progress, Write
from lmdecode.store.errors import StoreError
from lmdecode.store.remote import Remote
from lmdecode.store.remote_values import FIRST_VALUES, RemoteEntry, ValueHead, tails_name

T = TypeVar("T")

_SCANNED_AT_ONCE = 256


@dataclass(frozen=True)
class Choice:
    """Target of ``KVStore.erase``, in the form that the compiled store takes.

    Of ``tokens`` and ``session`` at most one is given; neither means everything of the tenant, in
    all of its known contexts.
    """

    store: Store
    scope: Scope
    tokens: memoryview | None
    session: bytes | None

    @property
    def _is_everything(self) -> bool:
        return self.tokens is None and self.session is None

    def erase(self, client: Any) -> None:
        """Remove it from a server. Call this before the local store erases its own entries."""
        roots = {self.store.key(self.scope, b"")}
        if self._is_everything:
            roots.update(self.store.roots(self.scope))
        size = ValueHead.size + self.store.header_bytes(self.store.chunk_tokens)
        heads = []
        names = client.scan_iter(match=FIRST_VALUES, count=_SCANNED_AT_ONCE)
        for some in _batches(names, _SCANNED_AT_ONCE):
            with client.pipeline(transaction=False) as pipe:
                for name in some:
                    pipe.getrange(name, 0, size - 1)
                for name, value in zip(some, pipe.execute(), strict=True):
                    head = ValueHead.of(name, value)
                    if head is not None and head.root in roots:
                        heads.append(head)
        images = [head.image for head in heads]
        erased = self.store.erases(self.scope, self.tokens, self.session, images)
        chosen = [head for head, goes in zip(heads, erased, strict=True) if goes]
        for group in _batches(chosen, _SCANNED_AT_ONCE):
            with client.pipeline(transaction=False) as pipe:
                for head in group:
                    for name in head.names:
                        pipe.unlink(name)
                    for by_column in (False, True):
                        pipe.srem(tails_name(head.parent, by_column), head.count)
                pipe.execute()


def _batches(items: Iterable[T], size: int) -> Iterator[list[T]]:
    rest = iter(items)
    while some := list(islice(rest, size)):
        yield some


_FETCHING_THREADS = 4
_JOIN_SECONDS = 5.0
_REPORTED_AT_ONCE = 1024
_COUNTERS = (
    "entries_fetched", "entries_written", "misses", "damaged", "errors", "dropped", "bytes_read",
    "bytes_written",
)  # fmt: skip


@dataclass
class _Upload:
    """A prefix that was committed."""

    store: weakref.ref[Store]
    scope: Scope
    ids: memoryview


@dataclass
class _Flush:
    """Job: make the fetched entries durable."""

    store: weakref.ref[Store]


class RemoteTier:
    """One server for all tenants of a store."""

    def __init__(self, remote: Remote) -> None:
        self.remote = remote
        self._connect = remote.connector()
        self._client: Any = None
        self._lock = threading.Lock()
        self._counters: Counter[str] = Counter()
        self._last_error = ""
        self._is_available = True
        self._is_closed = False
        self._moves = threading.Condition()
        self._moving = 0  # entries that are on their way to the server, or from there
        self._is_quiet = False
        self._jobs: Queue[_Upload | _Flush | None] = Queue(remote.max_pending)
        self._fetchers = ThreadPoolExecutor(_FETCHING_THREADS, "lmdecode-remote")
        self._writer = threading.Thread(
            target=self._write_jobs, name="lmdecode-remote-writer", daemon=True
        )
        self._writer.start()

    # --- state

    def stats(self) -> dict[str, int]:
        """Counters, whether the server is used now, and how many prefixes wait."""
        with self._lock:
            counters = {f"remote_{name}": self._counters[name] for name in _COUNTERS}
        return {
            **counters,
            "remote_available": int(self._is_available),
            "remote_pending": self._jobs.unfinished_tasks,
        }

    @property
    def last_error(self) -> str:
        """The newest error, without secrets; empty: none."""
        return self._last_error

    def _add(self, counters: Counter[str]) -> None:
        with self._lock:
            self._counters.update(counters)

    def _count(self, name: str, by: int = 1) -> None:
        self._add(Counter({name: by}))

    def _fail(self, error: Exception) -> None:
        """Count an error; the server is gone, unless it was the server that said no."""
        from redis.exceptions import ResponseError

        self._count("errors")
        self._last_error = self.remote.without_secrets(f"{type(error).__name__}: {error}")
        if not isinstance(error, ResponseError):
            self._is_available = False

    def _connected(self) -> Any:
        with self._lock:
            client = self._client
        if client is None:
            made = self._connect()  # of a cluster: asks a node for all others
            with self._lock:
                client = self._client = self._client or made
        return client

    @contextmanager
    def _guarded(self) -> Iterator[Any]:
        """A client; its errors are counted and go no further."""
        try:
            yield self._connected()
        except StoreError:
            raise
        except Exception as error:  # whatever a server's answer does to a client
            self._fail(error)

    def _disconnect(self) -> None:
        """Wake the threads that wait for the server: closed sockets are errors."""
        with self._lock:
            client = self._client
        if client is None:
            return
        clients = [client]
        if self.remote.cluster:
            clients = [node.redis_connection for node in client.get_nodes()]
        for each in clients:
            if each is not None:
                each.connection_pool.disconnect(inuse_connections=True)

    def close(self) -> None:
        """Write what waits, for ``max_wait`` seconds at most, and stop."""
        if self._is_closed:
            return
        self.drain(self.remote.max_wait)
        self.abandon()

    def drain(self, seconds: float) -> bool:
        """Wait until nothing waits to be written; False: the time is over, or the server gone."""
        end = time.monotonic() + seconds
        while self._jobs.unfinished_tasks and self._is_available and time.monotonic() < end:
            time.sleep(0.002)
        return not self._jobs.unfinished_tasks

    def abandon(self) -> None:
        """Stop at once; at exit, before the local store is freed."""
        self._is_closed = True
        self._is_available = False
        with suppress(Empty):
            while True:
                self._jobs.get_nowait()
                self._jobs.task_done()
        with suppress(Full):
            self._jobs.put_nowait(None)
        self._disconnect()
        self._fetchers.shutdown(wait=True, cancel_futures=True)
        if threading.current_thread() is not self._writer:
            self._writer.join(_JOIN_SECONDS)

    # --- erasing

    @contextmanager
    def quiet(self) -> Iterator[None]:
        """Nothing goes to the server or comes from there meanwhile; one such call at a time."""
        with self._moves:
            self._moves.wait_for(lambda: not self._is_quiet)
            self._is_quiet = True
            self._moves.wait_for(lambda: not self._moving)
        try:
            yield
        finally:
            with self._moves:
                self._is_quiet = False
                self._moves.notify_all()

    @contextmanager
    def _move(self, wait: bool) -> Iterator[bool]:
        """Say whether entries may move; with ``wait`` they may, sooner or later."""
        with self._moves:
            if wait:
                self._moves.wait_for(lambda: not self._is_quiet)
            may = not self._is_quiet
            self._moving += may
        try:
            yield may
        finally:
            with self._moves:
                self._moving -= may
                self._moves.notify_all()

    def erase(self, choice: Choice) -> None:
        """Remove entries from the server; only within ``quiet``.

        Raises StoreError where the server does not answer: some of them may still be there.
        """
        try:
            choice.erase(self._connected())
        except StoreError:
            raise
        except Exception as error:
            self._fail(error)
            raise StoreError(f"erase: the second tier: {self._last_error}") from None

    # --- after a miss

    def fetch(self, store: Store, scope: Scope, ids: memoryview, put: PutOptions) -> None:
        """Copy the part of a prefix that only the server has into the local store."""
        if not self._is_available or not len(ids):
            return
        progress = Progress()
        try:
            future = self._fetchers.submit(self._fetch, store, scope, ids, put, progress)
        except RuntimeError:  # closed meanwhile
            return
        end = time.monotonic() + self.remote.max_wait
        seen = 0
        while not self._is_done(future):
            if not progress.started and future.cancel():  # too many others fetch
                return
            if progress.entries == seen:
                progress.stopped = True
                self._fail(TimeoutError(f"nothing within {self.remote.timeout} s"))
                self._disconnect()
                return
            seen = progress.entries
            if time.monotonic() > end:
                progress.stopped = True
                return

    def _is_done(self, future: Future[None]) -> bool:
        try:
            with suppress(CancelledError, StoreError):  # closed meanwhile
                future.result(timeout=self.remote.timeout)
        except TimeoutError:
            return False
        return True

    def _fetch(
        self, store: Store, scope: Scope, ids: memoryview, put: PutOptions, progress: Progress
    ) -> None:
        progress.started = True
        with self._move(wait=False) as may:
            if may:
                with LocalPrefix(store, ids, scope) as local, self._guarded() as client:
                    Fetch(client, store, scope, ids, put, progress).run(local)
        self._add(progress.counters)
        if progress.entries:
            self._offer(_Flush(weakref.ref(store)))

    # --- after a commit

    def offer(self, store: Store, scope: Scope, ids: memoryview, num_tokens: int) -> None:
        """Let a prefix that was committed be written in the background."""
        if num_tokens:
            copy = array("i")
            copy.frombytes(ids[:num_tokens].tobytes())  # the caller may change its argument
            self._offer(_Upload(weakref.ref(store), scope, memoryview(copy)))

    def _offer(self, job: _Upload | _Flush) -> None:
        try:
            if not self._is_available and isinstance(job, _Upload):
                raise Full
            self._jobs.put_nowait(job)
        except Full:
            self._count("dropped", isinstance(job, _Upload))

    def _write_jobs(self) -> None:
        while not self._is_closed:
            try:
                job = self._jobs.get(timeout=self.remote.cool_down)
            except Empty:
                self._ask_whether_back()
                continue
            try:
                with suppress(StoreError):  # closed meanwhile
                    if job is not None:
                        self._write(job)
            finally:
                self._jobs.task_done()

    def _ask_whether_back(self) -> None:
        if self._is_available or self._is_closed:
            return
        self._disconnect()  # or an old connection's end would be the answer
        with self._guarded() as client:
            client.ping()
            self._is_available = True

    def _write(self, job: _Upload | _Flush) -> None:
        store = job.store()
        if store is None:
            return
        if isinstance(job, _Flush):
            store.flush()
        elif not self._is_available:
            self._count("dropped")
        else:
            ttl = self.remote.ttl
            ttl_ms = None if ttl is None else max(1, round(1000 * ttl))
            counters: Counter[str] = Counter()
            with (
                self._move(wait=True),
                LocalPrefix(store, job.ids, job.scope) as local,
                self._guarded() as client,
            ):
                Write(client, store, job.scope, ttl_ms, counters).run(local)
            self._add(counters)


def remote_report(
    remote: Remote, entries: Sequence[Mapping[str, Any]], by_column: bool
) -> dict[str, object]:
    """Say where a second tier is, how full, and how many of a store's entries it has."""
    connect = remote.connector()
    import redis

    report: dict[str, object] = {"remote": remote.location}
    try:
        client, whole = connect(), 0
        for first in range(0, len(entries), _REPORTED_AT_ONCE):
            groups = [
                RemoteEntry(entry["key"], b"", by_column, entry["bytes"]).names
                for entry in entries[first : first + _REPORTED_AT_ONCE]
            ]
            with client.pipeline(transaction=False) as pipe:
                for name in (name for group in groups for name in group):
                    pipe.exists(name)
                there = iter(pipe.execute())
            whole += sum(all([next(there) for _ in group]) for group in groups)
        report["remote entries"] = f"{whole} of {len(entries)}"
        if not remote.cluster:
            info = client.info()
            for name in ("redis_version", "used_memory", "maxmemory", "maxmemory_policy"):
                report[f"remote {name}"] = info[name]
        client.close()
    except (redis.RedisError, OSError) as error:
        report["remote error"] = remote.without_secrets(f"{type(error).__name__}: {error}")
    return report
