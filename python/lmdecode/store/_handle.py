"""One open store: its compiled part, its threads, and which session the model holds."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Lock
from typing import Any, TypeVar

from lmdecode.store._directory_quota import LimitedStore
from lmdecode.store._native import OpeningOptions, open_compiled
from lmdecode.store._remote_tier import RemoteTier
from lmdecode.store._shared_store import SharedStore
from lmdecode.store.cost_model import CostModel
from lmdecode.store.errors import StoreError
from lmdecode.store.fingerprint import Fingerprint

T = TypeVar("T")
_BACKGROUND_THREADS = 2


class StoreHandle:
    """The compiled store; every ``KVStore`` of one directory in this process has the same one."""

    def __init__(
        self,
        directory: str,
        fingerprint: Fingerprint,
        options: OpeningOptions,
        *,
        readonly: bool,
        many_writers: bool = False,
        directory_bytes: int | None = None,
    ) -> None:
        def open_store(only_reads: bool) -> Any:
            native = open_compiled(directory, fingerprint, options, only_reads)
            if only_reads or directory_bytes is None:
                return native
            return LimitedStore(native, directory, directory_bytes)

        #: The ``Store`` of this process, or what has its methods where others write too.
        self.native: Any
        if many_writers and not readonly:
            self.native = SharedStore(open_store, directory, fingerprint, options.relaxed)
        else:
            self.native = open_store(readonly)
        self.directory = directory
        self.fingerprint = fingerprint
        self.readonly = readonly
        self.by_column = options.values_by_column
        self.slot_bytes = self.native.slot_bytes
        self.costs = CostModel()
        self.lock = Lock()
        #: The ``Session`` whose keys and values the model holds, as far as the store was told.
        self.current: object | None = None
        #: Each ``Session`` that is in use, by salt, context and name.
        self.sessions: weakref.WeakValueDictionary[tuple[bytes, bytes, str], Any]
        self.sessions = weakref.WeakValueDictionary()
        #: Which model wrote the store: mark, model_name and revision, as far as they are known.
        self.known_model: dict[str, str | None] = {}
        #: Whether it was told that nothing can be stored, since something was.
        self.has_warned = False
        #: The tier after this one, or None.
        self.remote: RemoteTier | None = None
        self._executor: ThreadPoolExecutor | None = None
        self._process = os.getpid()
        # Also at exit, while threads can still end.
        weakref.finalize(self, self.native.close)

    def put_behind(self, remote: RemoteTier) -> None:
        """Give the store a second tier; its threads end before the store is closed."""
        self.remote = remote
        weakref.finalize(self, remote.abandon)

    def submit(self, function: Callable[..., T], *arguments: Any) -> Future[T]:
        """Run in the background; StoreError in a forked process: the threads are its parent's."""
        if os.getpid() != self._process:
            raise StoreError("KVStore: opened by another process; open it again after a fork")
        with self.lock:
            if self._executor is None:
                self._executor = ThreadPoolExecutor(_BACKGROUND_THREADS, "lmdecode-store")
            return self._executor.submit(function, *arguments)

    def close(self) -> None:
        """Wait for background work, make everything durable and close."""
        with self.lock:
            executor, self._executor = self._executor, None
            self.current = None
        if executor is not None:
            executor.shutdown(wait=True)
        if self.remote is not None:
            self.remote.close()
        self.native.close()
