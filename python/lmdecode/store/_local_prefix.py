"""A prefix of the local store, entry by entry, as a second tier holds it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from lmdecode.store._native import Hit, Scope, Store


class LocalPrefix:
    """The longest prefix of some tokens that is stored here; it is not evicted meanwhile.

    Attributes
    ----------
    num_tokens
        Its length; 0: there is none.
    entries
        What it lies in, parents first, as ``KVStore.entries`` has them.
    """

    def __init__(self, store: Store, hit: Hit | None) -> None:
        self._store, self._hit = store, hit
        self.num_tokens = 0 if hit is None else hit.num_tokens
        self.entries: list[dict[str, Any]] = [] if hit is None else store.entries_of(hit)

    def image(self, index: int) -> memoryview | None:
        """Read an entry, header and planes, and check every byte; None: it is damaged."""
        image = None if self._hit is None else self._store.read_image(self._hit, index)
        return None if image is None else memoryview(image)


@contextmanager
def local_prefix(store: Store, ids: memoryview, scope: Scope) -> Iterator[LocalPrefix]:
    """Find the longest prefix that is stored here, without counting that as use."""
    hit = store.peek(scope, ids)
    try:
        yield LocalPrefix(store, hit)
    finally:
        if hit is not None:
            hit.release()
