"""One open store: its handle, its threads, and which session the model holds."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from ctypes import POINTER, c_uint8, c_uint32, c_uint64, c_void_p, cast
from threading import Lock
from typing import TYPE_CHECKING, Any, TypeVar

from lmdecode.store._library import Bytes, Options, Place, byref, call, library
from lmdecode.store.cost_model import CostModel
from lmdecode.store.fingerprint import Fingerprint

if TYPE_CHECKING:
    from lmdecode.store._remote_tier import RemoteTier
    from lmdecode.store.session import Session

T = TypeVar("T")
_BACKGROUND_THREADS = 2


class Engine:
    """The library's store; every ``KVStore`` of one directory in this process has the same one."""

    def __init__(
        self,
        directory: str,
        fingerprint: Fingerprint,
        *,
        capacity_bytes: int,
        relaxed: bool,
        readonly: bool,
        by_column: bool,
        chunk_tokens: int,
        slab_bytes: int,
        flush_interval_ms: int,
        idle_ms: int,
        io_threads: int,
    ) -> None:
        windows = fingerprint.windows
        array = None
        if windows is not None:
            array = (c_uint32 * len(windows))(*(window or 0 for window in windows))
        options = Options(
            Bytes.of(directory.encode()), Bytes.of(fingerprint.encoded()),
            fingerprint.num_layers, fingerprint.num_kv_heads, fingerprint.head_size,
            fingerprint.torch_dtype.itemsize,
            cast(array, POINTER(c_uint32)) if array is not None else None,
            chunk_tokens, by_column, relaxed, readonly, capacity_bytes, slab_bytes,
            flush_interval_ms, idle_ms, io_threads,
        )  # fmt: skip
        handle = c_void_p()
        call("open", byref(options), byref(handle))
        self.handle = handle
        self.directory = directory
        self.fingerprint = fingerprint
        self.readonly = readonly
        self.by_column = by_column
        self.slot_bytes: int = library.lmdecode_store_slot_bytes(handle)
        self.costs = CostModel()
        self.lock = Lock()
        #: Whose keys and values the model holds, as far as the store was told.
        self.current: Session | None = None
        self.sessions: weakref.WeakValueDictionary[tuple[bytes, bytes, str], Session]
        self.sessions = weakref.WeakValueDictionary()
        self.chunk_tokens: int = library.lmdecode_store_chunk_tokens(handle)
        #: Another tier behind this one, or None.
        self.remote: RemoteTier | None = None
        self._executor: ThreadPoolExecutor | None = None
        self._finalizer = weakref.finalize(self, library.lmdecode_store_free, handle)

    def put_behind(self, remote: RemoteTier) -> None:
        """Give the store a second tier, whose threads end before the store is freed."""
        self.remote = remote
        weakref.finalize(self, remote.abandon)

    def call(self, name: str, *arguments: object) -> None:
        """Call a function on the store."""
        call(name, self.handle, *arguments)

    def submit(self, function: Callable[..., T], *arguments: Any) -> Future[T]:
        """Run in the background."""
        with self.lock:
            if self._executor is None:
                self._executor = ThreadPoolExecutor(_BACKGROUND_THREADS, "lmdecode-store")
            return self._executor.submit(function, *arguments)

    def close(self) -> None:
        """Wait for what runs in the background, make everything durable and let go."""
        with self.lock:
            executor, self._executor = self._executor, None
            self.current = None
        if executor is not None:
            executor.shutdown(wait=True)
        if self.remote is not None:
            self.remote.close()
        self.call("close")


class Scope:
    """Tenant and context as the library takes them."""

    def __init__(self, salt: bytes, context: bytes) -> None:
        self.salt, self.context = salt, context
        self.place = Place(Bytes.of(salt), Bytes.of(context))

    @property
    def reference(self) -> object:
        """Pointer to pass."""
        return byref(self.place)


def root_key(engine: Engine, scope: Scope) -> bytes:
    """Key of the empty prefix: of fingerprint, tenant and context."""
    digest = (c_uint8 * 32)()
    engine.call("key", scope.reference, None, 0, digest)
    return bytes(digest)


def read_u64(engine: Engine, name: str, *arguments: object) -> int:
    """Call a function whose last argument is where it puts a number."""
    result = c_uint64()
    engine.call(name, *arguments, byref(result))
    return result.value


def read_u32(engine: Engine, name: str, *arguments: object) -> int:
    """Call a function whose last argument is where it puts a small number."""
    result = c_uint32()
    engine.call(name, *arguments, byref(result))
    return result.value
