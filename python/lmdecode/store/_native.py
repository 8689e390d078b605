"""The compiled part of the store, ``lmdecode._store``, or why it is not there."""

from __future__ import annotations

import fcntl
import importlib.util
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from lmdecode.store.errors import StoreLockedError
from lmdecode.store.fingerprint import Fingerprint

# find_spec goes through the import hook of an editable install, which rebuilds what changed.
if importlib.util.find_spec("lmdecode._store") is None:
    raise ImportError(
        "lmdecode was built without its KV store, which needs SQLite with its header and "
        "pybind11: install them (on Debian or Ubuntu: apt install libsqlite3-dev; pip install "
        "pybind11) and lmdecode again"
    )
try:
    from lmdecode._store import Hit, Plane, PutOptions, Scope, Store, crc32c
except ImportError as error:
    raise ImportError(
        f"lmdecode's KV store needs the SQLite library (on Debian or Ubuntu: apt install "
        f"libsqlite3-0): {error}"
    ) from error

__all__ = ["Hit", "Plane", "PutOptions", "Scope", "Store", "crc32c"]


UNLIMITED = 1 << 60
_EVICTION_LOCK = "eviction.lock"


@contextmanager
def eviction_lock(folder: Path, operation: int = fcntl.LOCK_EX) -> Iterator[None]:
    """Hold the lock for opening other processes' stores to evict from them."""
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    descriptor = os.open(folder / _EVICTION_LOCK, flags, 0o600)
    try:
        fcntl.flock(descriptor, operation)
        yield
    finally:
        fcntl.flock(descriptor, fcntl.LOCK_UN)  # a process forked meanwhile has the descriptor, too
        os.close(descriptor)


@dataclass(frozen=True)
class OpeningOptions:
    """How a store is opened, except its directory, its model and whether it only reads.

    The fields are those of ``StoreOptions`` in csrc/store; ``capacity_bytes`` counts all slots.
    """

    capacity_bytes: int = UNLIMITED
    relaxed: bool = False
    values_by_column: bool = True
    chunk_tokens: int = 0
    slab_bytes: int = 1 << 30
    flush_interval_ms: int = 0
    idle_ms: int = 60_000
    io_threads: int = 1


def open_compiled(
    directory: str, fingerprint: Fingerprint, options: OpeningOptions, readonly: bool = False
) -> Store:
    """Open a fingerprint's directory; waits for a process that only evicts from it.

    Raises as ``KVStore``.
    """
    try:
        return open_at_once(directory, fingerprint, options, readonly)
    except StoreLockedError:
        folder = Path(directory).parent
        if not (folder / _EVICTION_LOCK).exists():
            raise
        with eviction_lock(folder, fcntl.LOCK_SH):
            return open_at_once(directory, fingerprint, options, readonly)


def open_at_once(
    directory: str, fingerprint: Fingerprint, options: OpeningOptions, readonly: bool = False
) -> Store:
    """Open the directory of a fingerprint, as ``open_compiled``; it waits for nobody."""
    dtype, row_size = fingerprint.stored_row
    return Store(
        directory=os.fsencode(directory),
        fingerprint=fingerprint.encoded(),
        num_layers=fingerprint.num_layers,
        num_kv_heads=fingerprint.num_kv_heads,
        head_size=row_size,
        element_size=dtype.itemsize,
        windows=[window or 0 for window in fingerprint.windows or ()],
        state_bytes=fingerprint.state_bytes,
        readonly=readonly,
        **asdict(options),
    )
