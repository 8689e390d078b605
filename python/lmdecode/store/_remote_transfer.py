"""Prefixes between the local store and the second tier, entry by entry."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from lmdecode.store._native import PutOptions, Scope, Store
from lmdecode.store.remote_values import (
    HEAD_RANGE,
    ROUND_TRIP_BYTES,
    DamagedValueError,
    RemoteEntry,
    chain_key,
    image_sizes,
    tails_name,
    usable_from,
)


class LocalPrefix:
    """The longest local prefix of some tokens; within ``with`` it is not evicted.

    Its lookup counts as no use. ``num_tokens`` is 0 for none; ``entries`` has its parts, parents
    first, as ``KVStore.entries`` has them.
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


@dataclass
class Progress:
    """Progress of a fetch, for the thread that waits for it."""

    started: bool = False
    entries: int = 0
    stopped: bool = False  # by the waiting thread
    counters: Counter[str] = field(default_factory=Counter)


@dataclass(frozen=True)
class Fetch:
    """Follows the chain of keys from where the local store ends, as far as the server has it.

    Full chunks are asked for by their keys, many at a time. Where the next one is not there, a set
    names the lengths in which shorter entries continue the last one: of those the longest that
    holds the tokens. Where none is, and the last chunk has no state, those that continue the chunk
    before are looked at, and so on, as only an entry with a state can be a hit's last one. Unlike
    the local store, entries that go on differently are not used in part.
    """

    client: Any
    store: Store
    scope: Scope
    ids: memoryview
    put: PutOptions
    progress: Progress
    stateless: set[bytes] = field(default_factory=set)  # keys of entries that lack the state

    def run(self, local: LocalPrefix) -> None:
        """Fetch and insert; stop at the first entry that is unavailable."""
        chunk, total = self.store.chunk_tokens, len(self.ids)
        root = self.store.key(self.scope, b"")
        position, key = 0, root
        for line in local.entries:
            if line["count"] == chunk and line["num_tokens"] <= local.num_tokens:
                position, key = line["num_tokens"], line["key"]
        full = RemoteEntry(key, root, self.store.values_by_column, *image_sizes(self.store, chunk))
        ends = [(position, full)]
        at_once = max(1, ROUND_TRIP_BYTES // full.num_bytes)
        while position + chunk <= total:
            entries, next_key = [], key
            for end in range(position + chunk, total + 1, chunk)[:at_once]:
                next_key = chain_key(next_key, end, self.ids[end - chunk : end].tobytes())
                entries.append(full.of(next_key))
            arrived = self._take(entries)
            for entry in entries[:arrived]:
                position, key = position + chunk, entry.key
                ends.append((position, entry))
            if arrived < len(entries):
                break
        first = len(ends) - 1
        while ends[first][1].key in self.stateless:
            first -= 1
        if not self.progress.stopped:
            self._take_tail(ends[first:], local.num_tokens)

    def _take_tail(self, ends: list[tuple[int, RemoteEntry]], known: int) -> None:
        """Take the longest entry that is shorter than a chunk, but longer than what is known.

        It continues one of the ends of chunks, the last of them first.
        """
        ends = [end for end in ends[::-1] if self._longest_tail(end[0]) > max(known - end[0], 0)]
        if not ends:
            return
        with self.client.pipeline(transaction=False) as pipe:
            for _, parent in ends:
                pipe.smembers(tails_name(parent.key, parent.by_column))
            tails = pipe.execute()
        for (position, parent), members in zip(ends, tails, strict=True):
            counts = [int(member) for member in members if member.isdigit() and len(member) < 10]
            for count in sorted(counts, reverse=True):
                if max(known - position, 0) < count <= self._longest_tail(position):
                    end = position + count
                    key = chain_key(parent.key, end, self.ids[position:end].tobytes())
                    if self._take([parent.of(key, *image_sizes(self.store, count))]):
                        return

    def _longest_tail(self, position: int) -> int:
        return min(self.store.chunk_tokens - 1, len(self.ids) - position)

    def _take(self, entries: list[RemoteEntry]) -> int:
        """Insert the leading entries that the server has whole; their number."""
        names = [entry.names for entry in entries]
        with self.client.pipeline(transaction=False) as pipe:
            for name in (name for group in names for name in group):
                pipe.get(name)
            values = pipe.execute()
        taken = 0
        for entry, group in zip(entries, names, strict=True):
            own, values = values[: len(group)], values[len(group) :]
            if self.progress.stopped or not self._insert(entry, own):
                break
            taken += 1
            self.progress.entries += 1
        return taken

    def _insert(self, entry: RemoteEntry, values: list[bytes | None]) -> bool:
        counters = self.progress.counters
        there = entry.there(values[0] or b"")
        count = 1 if there is None else entry.values_of(there[0])
        whole = [value for value in values[:count] if value is not None]
        if len(whole) < count:
            counters["misses"] += 1
            return False
        counters["bytes_read"] += sum(map(len, whole))
        try:
            image, expires_ms = entry.image(whole)
            ttl_ms = self.put.ttl_ms
            if expires_ms:
                ttl_ms = expires_ms - round(1000 * time.time())
                if ttl_ms <= 0:
                    raise DamagedValueError("expired")
            options = PutOptions(ttl_ms, self.put.quota_bytes, self.put.pin)
            inserted = self.store.insert_image(self.scope, entry.key, image, options)
        except DamagedValueError:
            # Or it would be in the way of a whole one until it expires.
            counters["damaged"] += 1
            with self.client.pipeline(transaction=False) as pipe:
                for name in entry.names:
                    pipe.unlink(name)
                pipe.execute()
            return False
        counters["entries_fetched"] += inserted
        if len(image) < entry.num_bytes:
            self.stateless.add(entry.key)
        return inserted


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
            # With windows an entry may lack some layers' tokens that a later one has; with states
            # the state.
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
