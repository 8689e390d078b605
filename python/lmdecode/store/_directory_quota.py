"""One size limit for all fingerprints of a directory, with LRU eviction.

The size is the disk space that the files allocate. Unused parts of slots are holes, so a short
entry counts its own bytes, not a whole slot.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from lmdecode.store._native import (
    Hit,
    OpeningOptions,
    PutOptions,
    Scope,
    Store,
    eviction_lock,
    open_at_once,
)
from lmdecode.store.errors import FingerprintMismatchError, StoreError
from lmdecode.store.fingerprint import Fingerprint

_BLOCK = 512  # of st_blocks
_PAGE = 4096
_INDEX_GROWTH = 16 * _PAGE  # of its log by one put
_AT_ONCE = 64  # this part of the limit is made free at least: not each put shall evict
_FOREVER = 2**63 - 1


class _Folder:
    """State that the stores of one folder share in this process.

    ``lock`` is held while space is reserved; it is reentrant, as a garbage-collected store may
    close meanwhile. ``coming`` counts bytes that are reserved and being written; ``stores`` holds
    the stores open for writing, whose own locks keep them from being opened again.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.coming = 0
        self.stores: weakref.WeakSet[LimitedStore] = weakref.WeakSet()


_folders: dict[str, _Folder] = {}
_folders_lock = threading.Lock()
os.register_at_fork(after_in_child=_folders.clear)  # the parent's stores are not the child's


def _shared(folder: Path) -> _Folder:
    with _folders_lock:
        return _folders.setdefault(str(folder), _Folder())


def _allocated(directory: str | os.PathLike[str], begin: str = "") -> int:
    """Return the bytes that a directory's files with this name prefix allocate on the disk."""
    count = 0
    with suppress(FileNotFoundError), os.scandir(directory) as files:
        for file in files:
            if file.name.startswith(begin):
                with suppress(FileNotFoundError):
                    count += file.stat(follow_symlinks=False).st_blocks * _BLOCK
    return count


def allocated_bytes(folder: str | os.PathLike[str]) -> int:
    """Return the bytes that the files of all fingerprints in a folder allocate on the disk."""
    with os.scandir(folder) as directories:
        return sum(_allocated(one) for one in directories if one.is_dir(follow_symlinks=False))


def _open_closed(directory: Path) -> Store | None:
    """Open a store that nobody writes; None: somebody does, or it cannot be opened."""
    try:
        fingerprint = Fingerprint.decoded((directory / "fingerprint.json").read_bytes())
        for by_column in (True, False):
            with suppress(FingerprintMismatchError):
                options = OpeningOptions(values_by_column=by_column)
                return open_at_once(str(directory), fingerprint, options)
    except (StoreError, OSError, ValueError, TypeError):
        pass
    return None


@contextmanager
def _writable_stores(folder: Path) -> Iterator[dict[str, Store]]:
    """All stores of a folder that this process writes, or that nobody does, by directory."""
    stores = {store.directory: store.native for store in list(_shared(folder).stores)}
    opened = {}
    with eviction_lock(folder):
        try:
            for file in sorted(folder.glob("*/fingerprint.json")):
                directory = str(file.parent)
                if directory not in stores and (store := _open_closed(file.parent)) is not None:
                    opened[directory] = store
            yield {**stores, **opened}
        finally:
            for store in opened.values():
                store.close()


def shrink(folder: Path, limit: int, at_once: int = 0) -> int:
    """Evict over all fingerprints of a folder until its files take ``limit`` bytes or less.

    Evicts at least ``at_once`` bytes, or nothing where that cannot reach the limit. Returns the
    bytes of the files then: more than ``limit`` where other processes write too much of them.
    """
    if (taken := allocated_bytes(folder)) <= limit:
        return taken
    with _writable_stores(folder) as stores:
        for store in stores.values():  # what nobody needs
            _give_back(store, 0, 0)
        if (taken := allocated_bytes(folder)) <= limit:
            return taken
        if taken - sum(_allocated(directory, "slab-") for directory in stores) > limit:
            return taken
        # Counted, not read again: some file systems report new bytes later.
        wanted = max(taken - limit, at_once)
        given, left = 0, list(stores.values())
        while given < wanted and left:
            left.sort(key=_oldest_use)
            # As far as the next store's oldest entry is not older.
            until = _oldest_use(left[1]) if len(left) > 1 else _FOREVER
            given_now = _give_back(left[0], wanted - given, until)
            given += given_now
            if given_now == 0:
                del left[0]
    return min(allocated_bytes(folder), taken - given)


def _oldest_use(store: Store) -> int:
    try:
        used = store.oldest_use()
    except StoreError:  # closed meanwhile
        used = None
    return _FOREVER if used is None else used


def _give_back(store: Store, num_bytes: int, until: int) -> int:
    try:
        return store.give_space_back(num_bytes, until)
    except (StoreError, OSError):  # closed meanwhile, or its disk fails: it has said so itself
        return 0


class LimitedStore:
    """A compiled store that writes, and keeps all files of its folder within ``limit`` bytes."""

    def __init__(self, native: Store, directory: str, limit: int) -> None:
        self.native = native
        self.directory = directory
        self._folder = Path(directory).parent
        self._limit = limit
        self._failure = ""
        self._process = os.getpid()
        self._shared = _shared(self._folder)
        with self._shared.lock:
            self._shared.stores.add(self)

    def __getattr__(self, name: str) -> Any:
        if name in ("native", "_shared"):  # not opened
            raise AttributeError(name)
        return getattr(self.native, name)

    def close(self) -> None:
        """Close the store."""
        if os.getpid() == self._process:
            with self._shared.lock:
                self._shared.stores.discard(self)
        self.native.close()

    # --- room

    @contextmanager
    def _room(self, num_bytes: int) -> Iterator[bool]:
        """Reserve bytes for a write. Yields False if they cannot be freed."""
        with self._shared.lock:
            limit = self._limit - self._shared.coming - num_bytes
            if has_room := limit >= 0:
                has_room = shrink(self._folder, limit, self._limit // _AT_ONCE) <= limit
            if has_room:
                self._shared.coming += num_bytes
            self._failure = "" if has_room else (
                f"{self._folder} takes its directory_bytes, {self._limit}, and nothing there that "
                "this process may evict is left"
            )  # fmt: skip
        try:
            yield has_room
        finally:
            if has_room:
                with self._shared.lock:
                    self._shared.coming -= num_bytes

    def _new_bytes(self, stored: int, total: int) -> int:
        """Return an upper bound in bytes of the slots of tokens [stored, total) and the index."""
        chunk = self.native.chunk_tokens
        tokens = total - stored // chunk * chunk
        if tokens == 0:
            return 0
        full, last = (tokens - 1) // chunk, (tokens - 1) % chunk + 1  # a state is in the last one
        size = _whole_pages(self.native.image_bytes(last))
        if full:
            size += full * _whole_pages(self.native.image_bytes(chunk, with_state=False))
        return size + _INDEX_GROWTH

    def _stored(
        self,
        scope: Scope,
        ids: memoryview,
        computed: int,
        store: Callable[[], int],
        otherwise: Callable[[], object] = lambda: None,
    ) -> int:
        # The hit keeps the tokens' prefix from being evicted for them.
        hit: Hit | None = self.native.peek(scope, ids[:computed])
        stored = 0 if hit is None else hit.num_tokens
        if stored == computed:
            return store()
        with self._room(self._new_bytes(stored, computed)) as has_room:
            if has_room:
                return store()
        otherwise()
        return stored

    # --- what writes

    def put(self, scope: Scope, ids: memoryview, planes: Any, options: PutOptions) -> int:
        """Store a prefix; nothing of it if there is no room."""
        return self._stored(
            scope, ids, len(ids), lambda: self.native.put(scope, ids, planes, options)
        )

    def commit_session(
        self, scope: Scope, name: bytes, ids: memoryview, computed: int, planes: Any,
        options: PutOptions,
    ) -> int:  # fmt: skip
        """Store a session's tokens, and where there is room a prefix of them."""
        return self._stored(
            scope,
            ids,
            computed,
            lambda: self.native.commit_session(scope, name, ids, computed, planes, options),
            lambda: self.native.write_session(scope, name, ids),
        )

    def insert_image(self, scope: Scope, key: bytes, image: bytearray, options: PutOptions) -> bool:
        """Take over an entry of a second tier."""
        with self._room(_whole_pages(len(image)) + _INDEX_GROWTH) as has_room:
            return has_room and self.native.insert_image(scope, key, image, options)

    def import_from(self, path: bytes, progress: Any) -> int:
        """Take over an exported file; its excess is evicted again."""
        with self._room(min(os.stat(path).st_size, self._limit)):
            new = self.native.import_from(path, progress)
        with self._shared.lock:
            shrink(self._folder, self._limit)
        return new

    # --- state

    def failure(self) -> str:
        """Why nothing is stored."""
        return self.native.failure() or self._failure

    def stats(self) -> dict[str, int]:
        """Counters of the store, and the folder's bytes."""
        return {**self.native.stats(), "directory_bytes": allocated_bytes(self._folder)}


def _whole_pages(size: int) -> int:
    return -(-size // _PAGE) * _PAGE
