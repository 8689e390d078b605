"""``KVStore``: a map on disk from prefixes of tokens to their keys and values."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

from torch import Tensor

from lmdecode._checks import check_int
from lmdecode.store._files import (
    checked_path,
    describe,
    read_export_head,
    read_model,
    write_model,
)
from lmdecode.store._handle import StoreHandle
from lmdecode.store._native import UNLIMITED, OpeningOptions
from lmdecode.store._remote_tier import Choice, RemoteTier
from lmdecode.store._tensors import token_ids
from lmdecode.store.errors import FingerprintMismatchError
from lmdecode.store.fingerprint import Fingerprint
from lmdecode.store.prefixes import KV, Hit, Prefixes, milliseconds
from lmdecode.store.remote import Remote
from lmdecode.store.session import Session, session_of
from lmdecode.store.weights_mark import weights_mark

__all__ = ["KV", "Hit", "KVStore", "VerifyReport"]

Progress = Callable[[int, int], object]

_MAX_CAPACITY = 2**64 - 1
_CAPACITIES = "an int of 1 to 2**64 - 1"
_MAX_CHUNK_TOKENS = 1 << 20
_GIB = 1 << 30


def check_mark(
    op: str, directory: Path, known: dict[str, str | None], fingerprint: Fingerprint
) -> None:
    """Raise if a store was written with weights of another mark."""
    theirs = known["mark"]
    if theirs is None or fingerprint.mark in (None, theirs):
        return
    stored = replace(fingerprint, model_name=known["model_name"], revision=known["revision"])
    raise FingerprintMismatchError(
        f"{op}: {directory} has keys and values of {stored.title}, weights {theirs}; the model is "
        f"{fingerprint.title}, weights {fingerprint.mark}: make a new Fingerprint.from_model, and "
        "open its store"
    )


@dataclass(frozen=True)
class VerifyReport:
    """Result of ``KVStore.verify``: entries, bytes and sessions checked, a line for each damage."""

    entries: int
    num_bytes: int
    sessions: int
    damage: tuple[str, ...]


class KVStore(Prefixes):
    """A store of KV caches in a directory.

    One process at a time writes a directory. Any number of processes read it. Any number of threads
    may use one ``KVStore``. docs/reference/store.md lists which failures the data survives.

    Parameters
    ----------
    path
        Directory, created if missing. Each fingerprint has its own subdirectory.
    fingerprint
        Fingerprint of the model. Entries of another fingerprint are never found.
    capacity_bytes
        Hard limit of the slots of this fingerprint; the least recently used prefixes are evicted.
        Writing needs this or ``directory_bytes``.
    directory_bytes
        Limit of the disk space of all fingerprints in ``path``. The least recently used prefixes of
        all of them are evicted, except those of stores that another process writes.
    durability
        "strict": acknowledged entries survive a loss of power. "relaxed": they survive that the
        process is killed, and are made durable every ``flush_interval`` seconds. A loss of power
        may lose the newest ones, but a wrong byte is never served.
    readonly
        Only read, and follow the writes of another process.
    salt
        The tenant. Tenants never find each other's entries.
    v_layout
        "column": values have the token index fastest, [num_kv_heads, head_size, tokens]. "row":
        the layout of keys.
    chunk_tokens
        Tokens per slot. None: enough that its keys and values have at least 1 MiB, and as much as
        a state.
    quota_bytes
        Limit of this tenant's slots; None: no limit.
    idle_seconds
        A freed area that stored nothing for this long counts as one that never did.
    flush_interval
        Seconds between flushes with "relaxed".
    io_threads
        Number of threads of one put or load.
    remote
        A second tier in Redis or Valkey: its URL, or a ``Remote`` with more options. Entries are
        written to it in the background. Entries that a ``lookup`` misses here are fetched from it,
        checked and stored here. Its errors never fail a call.
    writers
        "one": a second writer is refused. "many": any number of processes, all with "many", write
        the directory. The first one commits for the others, with its ``capacity_bytes`` and
        ``flush_interval``. When it ends, another one takes over.

    Raises
    ------
    StoreLockedError
        Another writer has the directory.
    StoreDamagedError
        The index is damaged.
    FingerprintMismatchError
        The store was made with another ``v_layout`` or ``chunk_tokens``, or with weights that
        differ from the fingerprint's ``mark``.
    OSError
        The directory cannot be created, read or written. ENOSPC: no space for a new store.
    ValueError
        A wrong argument; capacity below one slot; ``remote`` with ``readonly``.
    TypeError
        ``fingerprint`` is no ``Fingerprint``; ``remote`` is neither a URL nor a ``Remote``;
        ``capacity_bytes`` or ``chunk_tokens`` is no int.
    ImportError
        ``remote`` without redis-py.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        fingerprint: Fingerprint,
        capacity_bytes: int | None = None,
        directory_bytes: int | None = None,
        durability: Literal["strict", "relaxed"] = "strict",
        readonly: bool = False,
        salt: str | bytes = "",
        v_layout: Literal["column", "row"] = "column",
        chunk_tokens: int | None = None,
        quota_bytes: int | None = None,
        idle_seconds: float = 60.0,
        flush_interval: float = 1.0,
        io_threads: int | None = None,
        remote: str | Remote | None = None,
        writers: Literal["one", "many"] = "one",
        _slab_bytes: int = _GIB,
    ) -> None:
        if not isinstance(fingerprint, Fingerprint):
            raise TypeError(
                f"KVStore: fingerprint is {type(fingerprint).__name__}; expected a Fingerprint"
            )
        if durability not in ("strict", "relaxed"):
            raise ValueError(f"KVStore: durability is {durability!r}; expected 'strict', 'relaxed'")
        if v_layout not in ("column", "row"):
            raise ValueError(f"KVStore: v_layout is {v_layout!r}; expected 'column' or 'row'")
        if writers not in ("one", "many"):
            raise ValueError(f"KVStore: writers is {writers!r}; expected 'one' or 'many'")
        limits = {"capacity_bytes": capacity_bytes, "directory_bytes": directory_bytes}
        if not readonly:
            if capacity_bytes is None and directory_bytes is None:
                raise ValueError(
                    "KVStore: capacity_bytes is None; a store that writes needs it, or "
                    "directory_bytes"
                )
            for name, limit in limits.items():
                if limit is not None:
                    check_int("KVStore", name, limit, 1, _MAX_CAPACITY, limits=_CAPACITIES)
        if chunk_tokens is not None:
            chunk_tokens = check_int("KVStore", "chunk_tokens", chunk_tokens, 1, _MAX_CHUNK_TOKENS)
        if readonly and remote is not None:
            raise ValueError("KVStore: remote with readonly=True; only a store that writes fetches")
        if isinstance(remote, str):
            remote = Remote(url=remote)
        elif remote is not None and not isinstance(remote, Remote):
            kind = type(remote).__name__
            raise TypeError(f"KVStore: remote is of type {kind}; expected a URL or a Remote")
        if remote is not None:
            remote.connector()  # says what is wrong before anything is opened
        folder = checked_path("KVStore", "path", path)
        directory = folder / fingerprint.name
        known = read_model(directory)
        check_mark("KVStore", directory, known, fingerprint)
        known = {name: known[name] or getattr(fingerprint, name) for name in known}
        if not readonly:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        handle = StoreHandle(
            str(directory.absolute()),
            fingerprint,
            OpeningOptions(
                capacity_bytes=UNLIMITED if capacity_bytes is None else capacity_bytes,
                relaxed=durability == "relaxed",
                values_by_column=v_layout == "column",
                chunk_tokens=chunk_tokens or 0,
                slab_bytes=_slab_bytes,
                flush_interval_ms=milliseconds(flush_interval, "flush_interval"),
                idle_ms=milliseconds(idle_seconds, "idle_seconds"),
                io_threads=io_threads or min(4, os.cpu_count() or 1),
            ),
            readonly=readonly,
            many_writers=writers == "many",
            directory_bytes=directory_bytes,
        )
        try:
            if not readonly:
                describe(directory, fingerprint)
                if any(known.values()):
                    write_model(directory, known)
        except BaseException:
            handle.close()
            raise
        handle.known_model = known
        if remote is not None:
            handle.put_behind(RemoteTier(remote))
        super().__init__(handle, salt, quota_bytes)
        self._is_tenant_view = False

    def for_tenant(self, salt: str | bytes, quota_bytes: int | None = None) -> KVStore:
        """Return a view of this store for another tenant; closing the view has no effect."""
        view = object.__new__(KVStore)
        Prefixes.__init__(view, self._handle, salt, quota_bytes)
        view._is_tenant_view = True
        return view

    # --- identity

    def __repr__(self) -> str:
        readonly = ", readonly" if self.readonly else ""
        return f"KVStore({self._handle.directory!r}, model {self.fingerprint.model_id!r}{readonly})"

    @property
    def readonly(self) -> bool:
        """Whether the store only reads."""
        return self._handle.readonly

    @property
    def chunk_tokens(self) -> int:
        """Tokens of a full slot."""
        return int(self._handle.native.chunk_tokens)

    @property
    def slot_bytes(self) -> int:
        """Size of a slot: the unit of capacity and quotas."""
        return self._handle.slot_bytes

    def check_model(self, model: Any) -> None:
        """Raise if the stored keys and values are not this model's.

        ``generate_with_store`` calls this every time. If a store was opened without a mark, the
        first model sets it.

        Parameters
        ----------
        model
            A ``torch.nn.Module``; see ``weights_mark`` for the weights that are compared.

        Raises
        ------
        FingerprintMismatchError
            It has other weights; the message names both.
        """
        handle = self._handle
        config = getattr(model, "config", None)
        ours = replace(
            self.fingerprint,
            model_id=type(model).__name__,
            mark=weights_mark(model),
            model_name=str(getattr(config, "_name_or_path", "") or "") or None,
            revision=getattr(config, "_commit_hash", None),
        )
        known = handle.known_model
        if known["mark"] is None:
            known = handle.known_model = {name: getattr(ours, name) for name in known}
            if not self.readonly:
                with suppress(OSError):  # a full disk: the next call may find room
                    write_model(Path(handle.directory), known)
        check_mark("check_model", Path(handle.directory), known, ours)

    # --- sessions

    def session(self, id: str, *, context: bytes = b"") -> Session:
        """Return the session of this name, a new one if there is none.

        Raises
        ------
        StoreDamagedError
            Its stored tokens differ from the committed ones.
        TypeError
            ``id`` is not a str.
        """
        return session_of(self, id, context)

    def sessions(self) -> list[tuple[str, int]]:
        """Names and numbers of tokens of all tenants' sessions, the newest first."""
        return self._handle.native.sessions()

    def erase(
        self,
        tokens: Sequence[int] | Tensor | None = None,
        *,
        session: str | None = None,
        everything: bool = False,
        context: bytes = b"",
    ) -> int:
        """Erase entries of this tenant: drop them from lookups, and overwrite them on disk.

        Hits on them can no longer be loaded. Entries that other sessions need are kept. The second
        tier is erased first. docs/reference/store.md discusses the limits of overwriting a file.

        Parameters
        ----------
        tokens
            Erase the entries of this prefix, and all entries that continue it. Sessions keep their
            lists of tokens.
        session
            Erase this session and the entries of its tokens.
        everything
            Erase all entries and sessions of this tenant.
        context
            See ``lookup``.

        Returns
        -------
        int
            Number of erased entries.

        Raises
        ------
        ValueError
            Not exactly one of the three is given, or there is no such session.
        StoreError
            The store does not write, a backup is running, or the second tier does not answer. Then
            nothing has been erased here, and the call can be repeated.
        OSError
            The erasure cannot be made durable, or entries cannot be overwritten. Those are no
            longer found, and are overwritten when the store is opened again.
        """
        if (tokens is not None) + (session is not None) + bool(everything) != 1:
            raise ValueError("erase: expected one of tokens, session and everything=True")
        handle = self._handle
        scope = self._scope(context)
        ids = None if tokens is None else token_ids(tokens, "erase")
        name = None if session is None else session.encode()
        remote = handle.remote
        with nullcontext() if remote is None else remote.quiet():
            if remote is not None:
                remote.erase(Choice(handle.native, scope, ids, name))
            count = handle.native.erase(scope, ids, name)
        with handle.lock:
            for (salt, of_context, of_name), known in list(handle.sessions.items()):
                if salt == self._salt and (
                    everything or (of_name == session and of_context == scope.context)
                ):
                    del known._tokens[:]
                    if handle.current is known:
                        handle.current = None
        return count

    # --- upkeep

    def flush(self) -> bool:
        """Make all acknowledged entries durable; return False if that fails."""
        return self._handle.native.flush()

    def stats(self) -> dict[str, int]:
        """Return counters: stored entries, free areas of both queues, hits, evictions, bytes.

        With a second tier also ``remote_*``: entries fetched and written, misses, damaged values,
        errors, prefixes dropped as the queue was full or the server missing, bytes, waiting
        prefixes, and whether the tier is in use.
        """
        stats, remote = self._handle.native.stats(), self._handle.remote
        return stats if remote is None else {**stats, **remote.stats()}

    def flush_remote(self, timeout: float) -> bool:
        """Wait until the second tier has all stored entries; return False after the timeout.

        It returns at once without a second tier, or if the tier is gone or has declined.
        """
        remote = self._handle.remote
        return remote is None or remote.drain(timeout)

    def entries(self) -> list[dict[str, Any]]:
        """Return the stored entries, one a chunk; a prefix comes before its continuations."""
        return self._handle.native.entries()

    def gc(self) -> int:
        """Drop expired entries and free their disk space; return the number of dropped entries."""
        return self._handle.native.collect()

    def verify(self, progress: Progress | None = None) -> VerifyReport:
        """Read and check every byte. Damaged entries are dropped, if this store writes.

        Raises
        ------
        StoreDamagedError
            The index is damaged.
        """
        entries, num_bytes, sessions, damage = self._handle.native.verify(progress)
        return VerifyReport(entries, num_bytes, sessions, tuple(damage))

    def backup(self, dst: str | os.PathLike[str], progress: Progress | None = None) -> None:
        """Copy the store to another directory while it is in use; ``KVStore(dst)`` opens the copy.

        For a closed store, copying its files is equivalent.
        """
        folder = checked_path("backup", "dst", dst)
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        directory = (folder / self.fingerprint.name).absolute()
        self._handle.native.backup(os.fsencode(directory), progress)
        describe(directory, self.fingerprint)
        if any(self._handle.known_model.values()):
            write_model(directory, self._handle.known_model)

    def export(
        self,
        path: str | os.PathLike[str],
        session: str | None = None,
        *,
        context: bytes = b"",
        progress: Progress | None = None,
    ) -> None:
        """Write all entries and sessions, or one session of this tenant, to one file."""
        file = checked_path("export", "path", path).absolute()
        scope = None if session is None else self._scope(context)
        name = (session or "").encode()
        self._handle.native.export_to(os.fsencode(file), scope, name, progress)

    def import_(self, path: str | os.PathLike[str], progress: Progress | None = None) -> int:
        """Import a file that ``export`` wrote; return the number of new entries.

        Tenants stay separate: only the exporting salt finds the entries.

        Raises
        ------
        FingerprintMismatchError
            The file was made with another fingerprint; the message has both side by side.
        StoreDamagedError
            The file is damaged; entries before the damage have been imported.
        """
        file = checked_path("import", "path", path).absolute()
        head = read_export_head(file)
        if head is not None and head.fingerprint != self.fingerprint:
            raise FingerprintMismatchError(
                f"import: {path} was made with another fingerprint; this store's and the file's:\n"
                + self.fingerprint.difference(head.fingerprint)
            )
        return self._handle.native.import_from(os.fsencode(file), progress)

    def close(self) -> None:
        """Make everything durable and release the directory. Further calls have no effect."""
        if not self._is_tenant_view:
            self._handle.close()

    def __enter__(self) -> KVStore:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()
