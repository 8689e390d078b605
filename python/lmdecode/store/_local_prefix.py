"""A prefix of the local store, entry by entry, as a second tier holds it."""

from __future__ import annotations

from typing import Any

from lmdecode.store._native import Scope, Store


class LocalPrefix:
    """The longest prefix of some tokens that is stored here; within ``with`` it is not evicted.

    That it is looked up counts as no use.

    Attributes
    ----------
    num_tokens
        Its length; 0: there is none.
    entries
        What it lies in, parents first, as ``KVStore.entries`` has them.
    """

    def __init__(self, store: Store, ids: memoryview, scope: Scope) -> None:
        self._store, self._hit = store, store.peek(scope, ids)
        self.num_tokens = 0 if self._hit is None else self._hit.num_tokens
        self.entries: list[dict[str, Any]]
        self.entries = [] if self._hit is None else store.entries_of(self._hit)

    def __enter__(self) -> LocalPrefix:
        return self

    def __exit__(self, *error: object) -> None:
        if self._hit is not None:
            self._hit.release()

    def image(self, index: int) -> memoryview | None:
        """Read an entry, header and planes, and check every byte; None: it is damaged."""
        image = None if self._hit is None else self._store.read_image(self._hit, index)
        return None if image is None else memoryview(image)
