"""``lmdecode._store`` by ctypes: the structures and functions of csrc/bindings/store_module.cpp."""

from __future__ import annotations

import ctypes
import importlib.util
import os
from ctypes import POINTER, byref, c_char_p, c_int, c_int32, c_int64, c_uint8, c_uint32, c_uint64
from typing import Any

from lmdecode.store.errors import (
    FingerprintMismatchError,
    StoreDamagedError,
    StoreError,
    StoreLockedError,
)


class Bytes(ctypes.Structure):
    """A byte string, zeros allowed."""

    _fields_ = [("data", c_char_p), ("size", c_uint64)]

    @staticmethod
    def of(value: bytes) -> Bytes:
        """Refer to a byte string, which the structure keeps alive."""
        return Bytes(value, len(value))


class Options(ctypes.Structure):
    """What a store is opened with."""

    _fields_ = [
        ("directory", Bytes), ("fingerprint", Bytes),
        ("num_layers", c_uint32), ("num_kv_heads", c_uint32),
        ("head_size", c_uint32), ("element_size", c_uint32),
        ("windows", POINTER(c_uint32)), ("chunk_tokens", c_uint32),
        ("values_by_column", c_uint32), ("relaxed", c_uint32), ("readonly", c_uint32),
        ("capacity_bytes", c_uint64), ("slab_bytes", c_uint64),
        ("flush_interval_ms", c_int64), ("idle_ms", c_int64), ("io_threads", c_int32),
    ]  # fmt: skip


class Place(ctypes.Structure):
    """Tenant and context."""

    _fields_ = [("salt", Bytes), ("context", Bytes)]


class Plane(ctypes.Structure):
    """Keys or values of a layer, [num_kv_heads, num_tokens, head_size]; strides in bytes."""

    _fields_ = [
        ("data", ctypes.c_void_p), ("head_stride", c_int64), ("token_stride", c_int64),
        ("element_stride", c_int64), ("num_tokens", c_uint64),
    ]  # fmt: skip


class Put(ctypes.Structure):
    """How long, and at whose cost, something is stored."""

    _fields_ = [("ttl_ms", c_int64), ("quota_bytes", c_uint64), ("pin", c_uint32)]


class EntryLine(ctypes.Structure):
    """A stored chunk of a prefix."""

    _fields_ = [
        ("num_tokens", c_uint64), ("area", c_uint64), ("tenant", c_uint64), ("bytes", c_uint64),
        ("created_ms", c_int64), ("used_ms", c_int64), ("expires_ms", c_int64),
        ("count", c_uint32), ("pinned", c_uint32), ("key", c_uint8 * 32),
    ]  # fmt: skip


class SessionLine(ctypes.Structure):
    """A session, without its tokens."""

    _fields_ = [
        ("num_tokens", c_uint64), ("tenant", c_uint64), ("updated_ms", c_int64),
        ("name_size", c_uint64), ("name", c_uint8 * 256),
    ]  # fmt: skip


class Stats(ctypes.Structure):
    """Counters of ``KVStore.stats()``."""

    _fields_ = [
        (name, c_uint64)
        for name in (
            "entries", "sessions", "capacity_areas", "used_areas", "idle_areas", "freed_areas",
            "unusable_areas", "slot_bytes", "chunk_tokens", "hits", "misses", "puts", "declined",
            "evicted", "expired", "damaged", "bytes_written", "bytes_read", "commits",
        )
    ]  # fmt: skip


ProgressFunction = ctypes.CFUNCTYPE(c_int, c_uint64, c_uint64)

_STORE = _HIT = ctypes.c_void_p
_TOKENS = ctypes.c_void_p
_OUT_U32, _OUT_U64 = POINTER(c_uint32), POINTER(c_uint64)
_PREFIX = [_STORE, POINTER(Place), _TOKENS, c_uint64]

#: Functions that return a status, and their arguments.
_FUNCTIONS: dict[str, list[Any]] = {
    "open": [POINTER(Options), POINTER(_STORE)],
    "close": [_STORE],
    "lookup": [*_PREFIX, POINTER(_HIT), _OUT_U64],
    "peek": [*_PREFIX, POINTER(_HIT), _OUT_U64],
    "hit_entries": [_STORE, _HIT, POINTER(EntryLine), c_uint64, _OUT_U64],
    "read_image": [_STORE, _HIT, c_uint64, ctypes.c_void_p, c_uint64, _OUT_U32],
    "insert_image": [
        _STORE, POINTER(Place), c_char_p, ctypes.c_void_p, c_uint64, POINTER(Put), _OUT_U32,
    ],
    "load": [_STORE, _HIT, c_uint32, c_uint32, POINTER(Plane), c_uint64, _OUT_U32],
    "put": [*_PREFIX, POINTER(Plane), c_uint64, POINTER(Put), _OUT_U64],
    "pin": [_STORE, _HIT, c_uint32],
    "key": [*_PREFIX, POINTER(c_uint8)],
    "read_session": [_STORE, POINTER(Place), Bytes, _TOKENS, c_uint64, POINTER(c_int64)],
    "commit_session": [
        _STORE, POINTER(Place), Bytes, _TOKENS, c_uint64, c_uint64, POINTER(Plane), c_uint64,
        POINTER(Put), _OUT_U64,
    ],
    "write_session": [_STORE, POINTER(Place), Bytes, _TOKENS, c_uint64, _OUT_U32],
    "remove_session": [_STORE, POINTER(Place), Bytes, _OUT_U32],
    "sessions": [_STORE, POINTER(SessionLine), c_uint64, _OUT_U64],
    "entries": [_STORE, POINTER(EntryLine), c_uint64, _OUT_U64],
    "stats": [_STORE, POINTER(Stats)],
    "failure": [_STORE, c_char_p, c_uint64, _OUT_U64],
    "flush": [_STORE, _OUT_U32],
    "collect": [_STORE, _OUT_U64],
    "verify": [
        _STORE, ProgressFunction, _OUT_U64, _OUT_U64, _OUT_U64, _OUT_U64, c_char_p, c_uint64,
    ],
    "backup": [_STORE, Bytes, ProgressFunction],
    "export": [_STORE, Bytes, POINTER(Place), Bytes, ProgressFunction],
    "import": [_STORE, Bytes, ProgressFunction, _OUT_U64],
}  # fmt: skip


def _load() -> ctypes.CDLL:
    # find_spec goes through the import hook of an editable install, which rebuilds what changed.
    spec = importlib.util.find_spec("lmdecode._store")
    if spec is None or spec.origin is None:
        raise ImportError(
            "lmdecode was built without its KV store, which needs SQLite and its header: install "
            "them (on Debian or Ubuntu: apt install libsqlite3-dev) and lmdecode again"
        )
    try:
        library = ctypes.CDLL(spec.origin)
    except OSError as error:
        raise ImportError(
            f"lmdecode's KV store needs the SQLite library (on Debian or Ubuntu: apt install "
            f"libsqlite3-0): {error}"
        ) from error
    for name, arguments in _FUNCTIONS.items():
        function = getattr(library, f"lmdecode_store_{name}")
        function.argtypes, function.restype = arguments, c_int
    library.lmdecode_store_error.argtypes = [POINTER(c_int)]
    library.lmdecode_store_error.restype = c_char_p
    for name in ("free", "release"):
        function = getattr(library, f"lmdecode_store_{name}")
        function.argtypes, function.restype = [ctypes.c_void_p], None
    library.lmdecode_store_slot_bytes.argtypes = [_STORE]
    library.lmdecode_store_slot_bytes.restype = c_uint64
    library.lmdecode_store_chunk_tokens.argtypes = [_STORE]
    library.lmdecode_store_chunk_tokens.restype = c_uint32
    library.lmdecode_store_image_bytes.argtypes = [_STORE, c_uint32]
    library.lmdecode_store_image_bytes.restype = c_uint64
    library.lmdecode_store_crc32c.argtypes = [ctypes.c_void_p, c_uint64, c_uint64, c_uint32]
    library.lmdecode_store_crc32c.restype = c_uint32
    return library


library = _load()


def call(name: str, *arguments: object) -> None:
    """Call a function; raise what its status stands for."""
    status = getattr(library, f"lmdecode_store_{name}")(*arguments)
    if status == 0:
        return
    number = c_int()
    text = library.lmdecode_store_error(byref(number)).decode(errors="replace")
    if status == 1:
        raise ValueError(text)
    if status == 2:
        code = number.value
        if code == 0:
            raise OSError(text)
        # The subclass that Python has for the number, with the whole message.
        raise type(OSError(code, ""))(code, f"{text} ({os.strerror(code)})")
    errors = {3: StoreLockedError, 4: StoreDamagedError, 5: FingerprintMismatchError, 6: StoreError}
    raise errors.get(status, RuntimeError)(text)


__all__ = [
    "Bytes", "EntryLine", "Options", "Place", "Plane", "ProgressFunction", "Put", "SessionLine",
    "Stats", "byref", "call", "library",
]  # fmt: skip
