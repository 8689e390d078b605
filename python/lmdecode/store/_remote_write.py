"""One prefix from the local store to the second tier."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass
from typing import Any

from lmdecode.store._local_prefix import LocalPrefix
from lmdecode.store._native import Scope, Store
from lmdecode.store.remote_values import (
    HEAD_RANGE,
    ROUND_TRIP_BYTES,
    RemoteEntry,
    image_sizes,
    tails_name,
    usable_from,
)


@dataclass(frozen=True)
class Write:
    """Gives the server the entries of a prefix that it lacks, and renews the others."""

    client: Any
    store: Store
    scope: Scope
    ttl_ms: int | None
    counters: Counter[str]

    def run(self, local: LocalPrefix) -> None:
        """Write, parents first."""
        root = parent = self.store.key(self.scope, b"")
        for index, line in enumerate(local.entries):
            sizes = image_sizes(self.store, line["count"])
            entry = RemoteEntry(line["key"], root, self.store.values_by_column, *sizes)
            left_ms = self._left_ms(line)
            if left_ms is not None and left_ms <= 0:
                return
            there = self._renew(entry, left_ms)
            # Of a model with windows an entry may lack some layers' tokens, and a later one not;
            # of one with states the state.
            if there != 0:
                image = local.image(index)
                if image is None:
                    return
                if there is None or usable_from(image) < there:
                    self._write(entry, image, line["expires_ms"], left_ms)
            if line["count"] < self.store.chunk_tokens:
                self._note_tail(parent, line["count"])
            parent = entry.key

    def _left_ms(self, line: dict[str, Any]) -> int | None:
        """How long the server may keep an entry: no longer than the local store. None: for ever."""
        if not line["expires_ms"]:
            return self.ttl_ms
        left_ms: int = line["expires_ms"] - round(1000 * time.time())
        return left_ms if self.ttl_ms is None else min(left_ms, self.ttl_ms)

    def _renew(self, entry: RemoteEntry, left_ms: int | None) -> int | None:
        """Return ``usable_from`` of the server's entry; None: the server has not all of it."""
        names = entry.names
        with self.client.pipeline(transaction=False) as pipe:
            for name in names:
                if left_ms is None:
                    pipe.exists(name)
                else:
                    pipe.pexpire(name, left_ms)
            pipe.getrange(names[0], *HEAD_RANGE)
            *present, head = pipe.execute()
        there = entry.there(head)
        if there is None or not all(present[: entry.values_of(there[0])]):
            return None
        return there[1]

    def _write(
        self, entry: RemoteEntry, image: memoryview, expires_ms: int, left_ms: int | None
    ) -> None:
        waiting = 0
        with self.client.pipeline(transaction=False) as pipe:
            for name in entry.names[entry.values_of(len(image)) :]:
                pipe.unlink(name)
            for name, value in zip(entry.names, entry.values(image, expires_ms), strict=False):
                pipe.set(name, value, px=left_ms)
                waiting += len(value)
                self.counters["bytes_written"] += len(value)
                if waiting >= ROUND_TRIP_BYTES:
                    pipe.execute()
                    waiting = 0
            pipe.execute()
        self.counters["entries_written"] += 1

    def _note_tail(self, parent: bytes, count: int) -> None:
        name = tails_name(parent, self.store.values_by_column)
        with self.client.pipeline(transaction=False) as pipe:
            pipe.sadd(name, count)
            if self.ttl_ms is not None:
                pipe.pexpire(name, self.ttl_ms)
            pipe.execute()
