"""``KVStore``: prefixes of tokens to their keys and values, on disk."""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from ctypes import c_uint8, c_uint64, c_void_p, create_string_buffer
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, overload

from torch import Tensor

from lmdecode.store._engine import Engine, Scope, read_u32, read_u64
from lmdecode.store._library import (
    Bytes,
    EntryLine,
    ProgressFunction,
    Put,
    SessionLine,
    Stats,
    byref,
    library,
)
from lmdecode.store._remote_tier import RemoteTier
from lmdecode.store._tensors import Planes, Tokens, empty_cache
from lmdecode.store.errors import FingerprintMismatchError
from lmdecode.store.fingerprint import Fingerprint
from lmdecode.store.remote import Remote
from lmdecode.store.session import Session

KV = list[tuple[Tensor, Tensor]]
Progress = Callable[[int, int], object]

_NO_QUOTA = 2**64 - 1
_MAX_SECONDS = 1e12
_MAX_CHUNK_TOKENS = 1 << 20
_GIB = 1 << 30
_DAMAGE_TEXT = 1 << 20
_EXPORT_MAGIC = b"LMDKVEXP"


class Hit:
    """The longest stored prefix of some tokens, as ``KVStore.lookup`` found it.

    What it refers to is not evicted while it lives, or until ``release``.

    Attributes
    ----------
    num_tokens
        Its length; 0: a miss.
    """

    def __init__(self, num_tokens: int, handle: c_void_p | None) -> None:
        self.num_tokens = num_tokens
        self._handle = handle

    def __bool__(self) -> bool:
        return self.num_tokens > 0

    def __repr__(self) -> str:
        return f"Hit(num_tokens={self.num_tokens})"

    def release(self) -> None:
        """Let the store evict it."""
        handle, self._handle = self._handle, None
        if handle is not None:
            library.lmdecode_store_release(handle)

    def __del__(self) -> None:
        if library is not None:  # at exit modules are emptied
            self.release()


@dataclass(frozen=True)
class VerifyReport:
    """What ``KVStore.verify`` looked at, and what it found damaged, a line each."""

    entries: int
    num_bytes: int
    sessions: int
    damage: tuple[str, ...]


def _callback(progress: Progress | None) -> Any:
    """A progress function for the library; one that raises stops the work."""
    if progress is None:
        return ProgressFunction()

    def report(done: int, total: int) -> int:
        progress(done, total)
        return 1

    return ProgressFunction(report)


def _milliseconds(seconds: float | None, name: str) -> int:
    if seconds is None:
        return 0
    if not 0 < seconds <= _MAX_SECONDS:
        raise ValueError(
            f"KVStore: {name} is {seconds}; expected a positive number of seconds, at most "
            f"{_MAX_SECONDS:.0e}"
        )
    return max(1, round(seconds * 1000))


def _bytes(value: Any, name: str) -> bytes:
    if not isinstance(value, (bytes, bytearray, memoryview)):  # bytes(5) is five zeros
        raise TypeError(f"KVStore: {name} is {type(value).__name__}; expected bytes")
    return bytes(value)


def _salt_bytes(salt: str | bytes) -> bytes:
    return salt.encode() if isinstance(salt, str) else _bytes(salt, "salt")


class KVStore:
    """A store of KV caches in a directory.

    One process at a time writes a directory, any number read it; any number of threads may use one
    ``KVStore``. docs/reference/store.md says what survives what.

    Parameters
    ----------
    path
        Directory, made where there is none. Each fingerprint has a directory of its own in it.
    fingerprint
        Of the model. What another fingerprint stored is never found.
    capacity_bytes
        Hard limit of the slots of this fingerprint; the least recently used prefixes are evicted.
        Needed to write.
    durability
        "strict": what was acknowledged survives a loss of power. "relaxed": made durable every
        ``flush_interval`` seconds; the newest entries may be lost, a wrong byte is never served.
    readonly
        Follow what another process writes.
    salt
        The tenant: what one stored another never finds.
    v_layout
        "column": values lie with the token index fastest, [num_kv_heads, head_size, tokens]; "row":
        as keys.
    chunk_tokens
        Tokens a slot; None: so many that a slot has at least 1 MiB.
    quota_bytes
        Limit of this tenant's slots; None: none.
    idle_seconds
        A freed area that stored nothing for so long joins those that never did.
    flush_interval
        Seconds, of "relaxed".
    io_threads
        Threads of one put or load.
    remote
        A second tier in Redis or Valkey behind this one: its URL, or a ``Remote`` with more to say.
        What is stored here is written there in the background; what a ``lookup`` does not find here
        is fetched from there, checked and stored here. It never fails a call.

    Raises
    ------
    StoreLockedError
        Something else writes the directory.
    StoreDamagedError
        The index is damaged.
    FingerprintMismatchError
        The store was made with another ``v_layout`` or ``chunk_tokens``.
    OSError
        The directory cannot be made, read or written.
    ValueError
        A wrong argument; capacity below one slot; ``remote`` with ``readonly``.
    TypeError
        ``fingerprint`` is no ``Fingerprint``; ``remote`` is neither a URL nor a ``Remote``.
    ImportError
        ``remote`` without redis-py.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        fingerprint: Fingerprint,
        capacity_bytes: int | None = None,
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
        if not isinstance(fingerprint, Fingerprint):
            raise TypeError(
                f"KVStore: fingerprint is {type(fingerprint).__name__}; expected a Fingerprint"
            )
        if not readonly and (
            not isinstance(capacity_bytes, int) or not 1 <= capacity_bytes <= _NO_QUOTA
        ):
            raise ValueError(
                f"KVStore: capacity_bytes is {capacity_bytes!r}; expected an int of 1 to 2**64 - 1"
            )
        if chunk_tokens is not None and not 1 <= chunk_tokens <= _MAX_CHUNK_TOKENS:
            raise ValueError(
                f"KVStore: chunk_tokens is {chunk_tokens}; expected 1 to {_MAX_CHUNK_TOKENS}"
            )
        if readonly and remote is not None:
            raise ValueError("KVStore: remote with readonly=True; only a store that writes fetches")
        if isinstance(remote, str):
            remote = Remote(url=remote)
        elif remote is not None and not isinstance(remote, Remote):
            kind = type(remote).__name__
            raise TypeError(f"KVStore: remote is of type {kind}; expected a URL or a Remote")
        if remote is not None:
            remote.connector()  # says what is wrong before anything is opened
        folder = Path(path)
        directory = folder / fingerprint.name
        if not readonly:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._engine = Engine(
            str(directory.absolute()),
            fingerprint,
            capacity_bytes=capacity_bytes or 0,
            relaxed=durability == "relaxed",
            readonly=readonly,
            by_column=v_layout == "column",
            chunk_tokens=chunk_tokens or 0,
            slab_bytes=_slab_bytes,
            flush_interval_ms=_milliseconds(flush_interval, "flush_interval"),
            idle_ms=_milliseconds(idle_seconds, "idle_seconds"),
            io_threads=io_threads or min(4, os.cpu_count() or 1),
        )
        if not readonly:
            _describe(directory, fingerprint)
        if remote is not None:
            self._engine.put_behind(RemoteTier(remote))
        self._set_tenant(salt, quota_bytes)
        self._is_tenant_view = False

    def _set_tenant(self, salt: str | bytes, quota_bytes: int | None) -> None:
        if quota_bytes is not None and not 0 <= quota_bytes <= _NO_QUOTA:
            raise ValueError(f"KVStore: quota_bytes is {quota_bytes}; expected 0 to 2**64 - 1")
        self._salt = _salt_bytes(salt)
        self._quota = _NO_QUOTA if quota_bytes is None else quota_bytes

    def for_tenant(self, salt: str | bytes, quota_bytes: int | None = None) -> KVStore:
        """Return the same store as another tenant sees it; closing it closes nothing."""
        view = object.__new__(KVStore)
        view._engine = self._engine
        view._set_tenant(salt, quota_bytes)
        view._is_tenant_view = True
        return view

    # --- what it is

    def __repr__(self) -> str:
        readonly = ", readonly" if self.readonly else ""
        return f"KVStore({self._engine.directory!r}, model {self.fingerprint.model_id!r}{readonly})"

    @property
    def fingerprint(self) -> Fingerprint:
        """Of the model."""
        return self._engine.fingerprint

    @property
    def readonly(self) -> bool:
        """Whether it only follows."""
        return self._engine.readonly

    @property
    def slot_bytes(self) -> int:
        """Size of a slot: the unit of capacity and quotas."""
        return self._engine.slot_bytes

    # --- prefixes

    def _scope(self, context: bytes) -> Scope:
        return Scope(self._salt, _bytes(context, "context"))

    def key(self, tokens: Sequence[int] | Tensor, *, context: bytes = b"") -> bytes:
        """Return the key of a prefix: the hash of all its tokens, 32 bytes."""
        ids = Tokens(tokens, "key")
        digest = (c_uint8 * 32)()
        self._engine.call("key", self._scope(context).reference, ids.address, len(ids), digest)
        return bytes(digest)

    def lookup(self, tokens: Sequence[int] | Tensor, *, context: bytes = b"") -> Hit:
        """Find the longest stored prefix.

        Parameters
        ----------
        tokens
            Token ids, [n].
        context
            Whatever else the keys and values depend on: a hash of the encoder's input, of images,
            of adapters. Only what was stored with the same bytes is found.
        """
        ids = Tokens(tokens, "lookup")
        handle, count = c_void_p(), c_uint64()
        scope = self._scope(context)
        if (remote := self._engine.remote) is not None:
            remote.fetch(self._engine, scope, ids, self._put_options(None, False))
        self._engine.call(
            "lookup", scope.reference, ids.address, len(ids), byref(handle), byref(count)
        )
        return Hit(count.value, handle if count.value else None)

    def _load(self, hit: Hit, layers: range, out: KV | None = None) -> KV | None:
        engine = self._engine
        if not isinstance(hit, Hit):
            raise TypeError(f"load: hit is {type(hit).__name__}; expected a Hit, from lookup")
        if hit._handle is None:
            return None
        cache = out or empty_cache(engine.fingerprint, layers, hit.num_tokens, engine.by_column)
        planes = (
            Planes.checked(cache, engine.fingerprint, "load", writable=True)
            if out
            else Planes([tensor for pair in cache for tensor in pair])
        )
        start = time.perf_counter()
        loaded = read_u32(
            engine, "load", hit._handle, layers.start, len(layers), planes.array, planes.size
        )
        if not loaded:
            return None
        num_bytes = sum(tensor.nbytes for pair in cache for tensor in pair)
        engine.costs.observe_load(num_bytes, time.perf_counter() - start)
        return cache

    @overload
    def load(
        self, hit: Hit, *, out: KV | None = None, background: Literal[False] = False
    ) -> KV | None: ...
    @overload
    def load(
        self, hit: Hit, *, out: KV | None = None, background: Literal[True]
    ) -> Future[KV | None]: ...
    def load(
        self, hit: Hit, *, out: KV | None = None, background: bool = False
    ) -> KV | Future[KV | None] | None:
        """Read the keys and values of a hit, and check every byte.

        Parameters
        ----------
        hit
            From ``lookup``.
        out
            Tensors to read into, in main memory, of the shapes below and with any strides: a
            staging buffer that is used again is faster than fresh memory. After a miss their
            content is undefined.
        background
            Return a ``Future``.

        Returns
        -------
        list of (K, V) or None
            One pair a layer, [num_kv_heads, hit.num_tokens, head_size]; a layer with a window has
            its last window - 1 tokens. V has the strides of ``v_layout``. None: a miss after all,
            for a slot that was damaged or has been given to another prefix; it was dropped, so that
            the next ``lookup`` finds what is left.
        """
        layers = range(self.fingerprint.num_layers)
        if background:
            return self._engine.submit(self._load, hit, layers, out)
        return self._load(hit, layers, out)

    def load_layers(self, hit: Hit, *, ahead: int = 2) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield (K, V) layer by layer, while the next ones are read.

        Raises
        ------
        LookupError
            A layer cannot be had: the hit is a miss after all, and what came before must not be
            used either.
        """
        if ahead < 1:
            raise ValueError(f"load_layers: ahead is {ahead}; expected 1 or more")
        count = self.fingerprint.num_layers
        coming: list[Future[KV | None]] = []
        for layer in range(count + ahead):
            if layer < count:
                coming.append(self._engine.submit(self._load, hit, range(layer, layer + 1)))
            if layer >= ahead:
                cache = coming.pop(0).result()
                if cache is None:
                    raise LookupError(f"load_layers: layer {layer - ahead} is damaged or gone")
                yield cache[0]

    def _put(self, ids: Tokens, planes: Planes, scope: Scope, put: Put) -> int:
        stored = read_u64(
            self._engine, "put", scope.reference, ids.address, len(ids), planes.array, planes.size,
            byref(put),
        )  # fmt: skip
        self._written(scope, ids, stored, stored < len(ids))
        return stored

    def _written(self, scope: Scope, ids: Tokens, stored: int, declined: bool) -> None:
        if (remote := self._engine.remote) is not None:
            remote.offer(self._engine, scope, ids, stored)
        self._warn_of_failure(declined)

    def _warn_of_failure(self, declined: bool) -> None:
        if declined and (failure := self.failure):
            warnings.warn(f"KVStore no longer writes: {failure}", RuntimeWarning, stacklevel=4)

    def _put_options(self, ttl: float | None, pin: bool) -> Put:
        return Put(_milliseconds(ttl, "ttl"), self._quota, pin)

    @overload
    def put(
        self, tokens: Sequence[int] | Tensor, kv: Sequence[tuple[Tensor, Tensor]], *,
        context: bytes = b"", ttl: float | None = None, pin: bool = False,
        background: Literal[False] = False,
    ) -> int: ...  # fmt: skip
    @overload
    def put(
        self, tokens: Sequence[int] | Tensor, kv: Sequence[tuple[Tensor, Tensor]], *,
        context: bytes = b"", ttl: float | None = None, pin: bool = False,
        background: Literal[True],
    ) -> Future[int]: ...  # fmt: skip
    def put(
        self,
        tokens: Sequence[int] | Tensor,
        kv: Sequence[tuple[Tensor, Tensor]],
        *,
        context: bytes = b"",
        ttl: float | None = None,
        pin: bool = False,
        background: bool = False,
    ) -> int | Future[int]:
        """Store the keys and values of a prefix.

        Only what is not stored yet is written.

        Parameters
        ----------
        tokens
            Token ids, [n].
        kv
            (K, V) of each layer, [num_kv_heads, n, head_size] or [1, num_kv_heads, n, head_size],
            any strides; a layer with a window may have only its last tokens, at least
            window - 1.
        context
            See ``lookup``.
        ttl
            Seconds after which it is no longer found; None: until it is evicted.
        pin
            Never evict it.
        background
            Return a ``Future``; the tensors must not change before it is done.

        Returns
        -------
        int
            How many leading tokens are stored, durably with durability="strict". Fewer than n where
            room, quota or disk do not allow more: no error, for inference can go on.
        """
        ids = Tokens(tokens, "put")
        planes = Planes.checked(kv, self.fingerprint, "put")
        scope, options = self._scope(context), self._put_options(ttl, pin)
        if background:
            return self._engine.submit(self._put, ids, planes, scope, options)
        return self._put(ids, planes, scope, options)

    def pin(self, hit: Hit, pinned: bool = True) -> None:
        """Never evict a prefix, or do so again."""
        if hit._handle is not None:
            self._engine.call("pin", hit._handle, pinned)

    def should_load(self, hit: Hit) -> bool:
        """Whether loading a hit is faster than computing it, by what was measured so far.

        Loads are timed by the store; tell it of prefills with ``record_prefill``.
        """
        fingerprint = self.fingerprint
        token = 2 * fingerprint.num_kv_heads * fingerprint.head_size
        layer = token * fingerprint.torch_dtype.itemsize
        num_bytes = hit.num_tokens * fingerprint.num_layers * layer
        return self._engine.costs.should_load(hit.num_tokens, num_bytes)

    def record_prefill(self, num_tokens: int, seconds: float) -> None:
        """Tell how long the model took to compute so many tokens."""
        self._engine.costs.observe_prefill(num_tokens, seconds)

    # --- sessions

    def session(self, id: str, *, context: bytes = b"") -> Session:
        """Return the session of this name, a new one where there is none.

        Raises
        ------
        StoreDamagedError
            Its stored tokens are not those that were committed.
        TypeError
            ``id`` is no str.
        """
        if not isinstance(id, str):
            raise TypeError(f"session: id is {type(id).__name__}; expected a str")
        key = (self._salt, _bytes(context, "context"), id)
        with self._engine.lock:
            known = self._engine.sessions.get(key)
        if known is not None:
            return known
        session = Session(self, id, context)
        with self._engine.lock:
            return self._engine.sessions.setdefault(key, session)

    def sessions(self) -> list[tuple[str, int]]:
        """Names and numbers of tokens of all tenants' sessions, the newest first."""
        return [(bytes(line.name[: line.name_size]).decode(errors="replace"), line.num_tokens)
                for line in self._lines("sessions", SessionLine)]  # fmt: skip

    def _lines(self, name: str, kind: Any) -> list[Any]:
        capacity = read_u64(self._engine, name, None, 0) + 64
        lines = (kind * capacity)()
        count = read_u64(self._engine, name, lines, capacity)
        return list(lines[: min(count, capacity)])

    # --- upkeep

    def flush(self) -> bool:
        """Make everything durable that was acknowledged; False: it cannot be."""
        return bool(read_u32(self._engine, "flush"))

    @property
    def failure(self) -> str:
        """Why the store no longer writes, after a flush that failed; empty: it does."""
        text = create_string_buffer(4096)
        size = read_u64(self._engine, "failure", text, len(text))
        return text.raw[: min(size, len(text))].decode(errors="replace")

    def stats(self) -> dict[str, int]:
        """Return counters: what is stored, free areas of both queues, hits, evictions, bytes.

        With a second tier ``remote_*`` too: entries fetched and written, questions that it could
        not answer (misses), values that were damaged, errors, prefixes that were not written for
        want of room or server (dropped), bytes, prefixes that wait, and whether it is used now.
        """
        stats = Stats()
        self._engine.call("stats", byref(stats))
        numbers = {field[0]: getattr(stats, field[0]) for field in Stats._fields_}
        remote = self._engine.remote
        return numbers if remote is None else {**numbers, **remote.stats()}

    def flush_remote(self, timeout: float) -> bool:
        """Wait until the second tier has what was stored; False: not within so many seconds.

        Without one, and where it is gone or has declined, there is nothing to wait for.
        """
        remote = self._engine.remote
        return remote is None or remote.drain(timeout)

    def entries(self) -> list[dict[str, Any]]:
        """Return what is stored, chunk by chunk, prefixes before what continues them."""
        names = [field[0] for field in EntryLine._fields_ if field[0] != "key"]
        return [
            {**{name: getattr(line, name) for name in names}, "key": bytes(line.key)}
            for line in self._lines("entries", EntryLine)
        ]

    def gc(self) -> int:
        """Drop what has expired and give free space back; the number of entries dropped."""
        return read_u64(self._engine, "collect")

    def verify(self, progress: Progress | None = None) -> VerifyReport:
        """Read and check every byte. What is damaged is dropped, if this store writes.

        Raises
        ------
        StoreDamagedError
            The index is damaged.
        """
        numbers = [c_uint64() for _ in range(4)]
        text = create_string_buffer(_DAMAGE_TEXT)
        self._engine.call("verify", _callback(progress), *map(byref, numbers), text, len(text))
        entries, num_bytes, sessions, _ = (number.value for number in numbers)
        return VerifyReport(entries, num_bytes, sessions, tuple(text.value.decode().splitlines()))

    def backup(self, dst: str | os.PathLike[str], progress: Progress | None = None) -> None:
        """Copy the store to another directory while it is used; ``KVStore(dst)`` opens the copy.

        A copy of the files of a closed store is as good.
        """
        folder = Path(dst)
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        directory = (folder / self.fingerprint.name).absolute()
        self._engine.call("backup", Bytes.of(str(directory).encode()), _callback(progress))
        _describe(directory, self.fingerprint)

    def export(
        self,
        path: str | os.PathLike[str],
        session: str | None = None,
        *,
        context: bytes = b"",
        progress: Progress | None = None,
    ) -> None:
        """Write all entries and sessions, or one session of this tenant, to one file."""
        name = Bytes.of(str(Path(path).absolute()).encode())
        scope = None if session is None else self._scope(context)
        reference = None if scope is None else scope.reference
        text = Bytes.of((session or "").encode())
        self._engine.call("export", name, reference, text, _callback(progress))

    def import_(self, path: str | os.PathLike[str], progress: Progress | None = None) -> int:
        """Take over what ``export`` wrote; the number of entries that are new.

        Tenants stay apart: what one exported only the same salt finds.

        Raises
        ------
        FingerprintMismatchError
            The file was made with another fingerprint; the message has both side by side.
        StoreDamagedError
            The file is damaged; entries before the damage have been taken over.
        """
        head = read_export_head(path)
        if head is not None and head.fingerprint != self.fingerprint:
            raise FingerprintMismatchError(
                f"import: {path} was made with another fingerprint; this store's and the file's:\n"
                + self.fingerprint.difference(head.fingerprint)
            )
        name = Bytes.of(str(Path(path).absolute()).encode())
        return read_u64(self._engine, "import", name, _callback(progress))

    def close(self) -> None:
        """Make everything durable and let go of the directory; done again it does nothing."""
        if not self._is_tenant_view:
            self._engine.close()

    def __enter__(self) -> KVStore:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


def _describe(directory: Path, fingerprint: Fingerprint) -> None:
    """Say in readable form what a directory is for; the index has the same."""
    path = directory / "fingerprint.json"
    content = fingerprint.encoded()
    if path.exists() and path.read_bytes() == content:
        return
    partial = directory / "fingerprint.json.partial"
    with open(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)


@dataclass(frozen=True)
class ExportHead:
    """What an exported file says of itself."""

    fingerprint: Fingerprint
    chunk_tokens: int
    by_column: bool


def read_export_head(path: str | os.PathLike[str]) -> ExportHead | None:
    """Return what a file that ``export`` wrote begins with; None: it is none."""
    with open(path, "rb") as file:
        head = file.read(20)
        size = int.from_bytes(head[12:20], "little")
        if head[:8] != _EXPORT_MAGIC or size > 1 << 20:
            return None
        try:
            fingerprint = Fingerprint.decoded(file.read(size))
        except (ValueError, TypeError):
            return None
        numbers = file.read(8)
        return ExportHead(
            fingerprint, int.from_bytes(numbers[:4], "little"), numbers[4:] != bytes(4)
        )
