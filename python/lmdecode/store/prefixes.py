"""Prefixes of tokens with their keys and values, stored and looked up for one tenant."""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from typing import Any, Literal, overload

from torch import Tensor

from lmdecode.store._handle import StoreHandle
from lmdecode.store._native import Hit as NativeHit
from lmdecode.store._native import PutOptions, Scope
from lmdecode.store._tensors import (
    Planes,
    checked_cache,
    empty_cache,
    state_plane,
    token_ids,
    unpacked,
)
from lmdecode.store.fingerprint import Fingerprint

KV = list[tuple[Tensor, ...]]

_NO_QUOTA = 2**64 - 1
_MAX_SECONDS = 1e12


class Hit:
    """The longest stored prefix of some tokens, as ``KVStore.lookup`` found it.

    What it refers to is not evicted while it lives, or until ``release``.

    Attributes
    ----------
    num_tokens
        Its length; 0: a miss.
    """

    def __init__(self, native: NativeHit | None) -> None:
        self.num_tokens = 0 if native is None else native.num_tokens
        self._native = native

    def __bool__(self) -> bool:
        return self.num_tokens > 0

    def __repr__(self) -> str:
        return f"Hit(num_tokens={self.num_tokens})"

    def release(self) -> None:
        """Let the store evict it."""
        native, self._native = self._native, None
        if native is not None:
            native.release()


def milliseconds(seconds: float | None, name: str) -> int:
    """Check a time, and return it in whole milliseconds; 0: None was given."""
    if seconds is None:
        return 0
    if not 0 < seconds <= _MAX_SECONDS:
        raise ValueError(
            f"KVStore: {name} is {seconds}; expected a positive number of seconds, at most "
            f"{_MAX_SECONDS:.0e}"
        )
    return max(1, round(seconds * 1000))


def checked_bytes(value: Any, name: str) -> bytes:
    """Check that something is bytes."""
    if not isinstance(value, (bytes, bytearray, memoryview)):  # bytes(5) is five zeros
        raise TypeError(f"KVStore: {name} is {type(value).__name__}; expected bytes")
    return bytes(value)


def _salt_bytes(salt: str | bytes) -> bytes:
    return salt.encode() if isinstance(salt, str) else checked_bytes(salt, "salt")


class Prefixes:
    """Prefixes of one tenant in an open store: the part of ``KVStore`` that sessions use."""

    def __init__(self, handle: StoreHandle, salt: str | bytes, quota_bytes: int | None) -> None:
        if quota_bytes is not None and not 0 <= quota_bytes <= _NO_QUOTA:
            raise ValueError(f"KVStore: quota_bytes is {quota_bytes}; expected 0 to 2**64 - 1")
        self._handle = handle
        self._salt = _salt_bytes(salt)
        self._quota = _NO_QUOTA if quota_bytes is None else quota_bytes

    @property
    def fingerprint(self) -> Fingerprint:
        """Fingerprint of the model."""
        return self._handle.fingerprint

    @property
    def failure(self) -> str:
        """Why the store no longer writes, after a flush that failed, or that the disk is full.

        Empty: it writes. After a full disk it is empty again with the first ``put`` that works.
        """
        return self._handle.native.failure()

    def _scope(self, context: bytes) -> Scope:
        return Scope(self._salt, checked_bytes(context, "context"))

    def key(self, tokens: Sequence[int] | Tensor, *, context: bytes = b"") -> bytes:
        """Return the key of a prefix: the hash of all its tokens, 32 bytes."""
        return self._handle.native.key(self._scope(context), token_ids(tokens, "key"))

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
        ids = token_ids(tokens, "lookup")
        scope = self._scope(context)
        if (remote := self._handle.remote) is not None:
            remote.fetch(self._handle.native, scope, ids, self._put_options(None, False))
        return Hit(self._handle.native.lookup(scope, ids))

    def _load(self, hit: Hit, layers: range, out: KV | None = None) -> KV | None:
        handle = self._handle
        if not isinstance(hit, Hit):
            raise TypeError(f"load: hit is {type(hit).__name__}; expected a Hit, from lookup")
        if (native := hit._native) is None:
            return None
        of = handle.fingerprint
        targets = checked_cache(out, of, "load", writable=True) if out else []
        if targets and of.scale_dtype is None:
            planes = Planes([tensor for pair in targets for tensor in pair])
        else:
            cache = empty_cache(of, layers, hit.num_tokens, handle.by_column)
            planes = Planes([tensor for pair in cache for tensor in pair])
        start = time.perf_counter()
        if not handle.native.load(native, layers.start, len(layers), planes):
            return None
        num_bytes = sum(tensor.nbytes for tensor in planes.tensors)
        handle.costs.observe_load(num_bytes, time.perf_counter() - start)
        if out and of.scale_dtype is None:
            return out
        loaded = unpacked(cache, of)
        for target, tensors in zip(targets, loaded, strict=False):
            for to, tensor in zip(target, tensors, strict=True):
                to.copy_(tensor if to.dtype == tensor.dtype else state_plane(tensor))
        return out or loaded

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
            its last window - 1 tokens. V has the strides of ``v_layout``. For a fingerprint with
            scales (K, V, K's scales, V's scales), scales [num_kv_heads, tokens]. For one with
            states (state,) after the last layer, [state_size] float32. None: a miss after
            all, for a slot that was damaged or has been given to another prefix; it was dropped, so
            that the next ``lookup`` finds what is left.
        """
        layers = range(self.fingerprint.num_entries)
        if background:
            return self._handle.submit(self._load, hit, layers, out)
        return self._load(hit, layers, out)

    def load_layers(self, hit: Hit, *, ahead: int = 2) -> Iterator[tuple[Tensor, ...]]:
        """Yield (K, V) layer by layer, then the state, while the next ones are read.

        Raises
        ------
        LookupError
            A layer cannot be had: the hit is a miss after all, and what came before must not be
            used either.
        """
        if ahead < 1:
            raise ValueError(f"load_layers: ahead is {ahead}; expected 1 or more")
        count = self.fingerprint.num_entries
        coming: list[Future[KV | None]] = []
        for layer in range(count + ahead):
            if layer < count:
                coming.append(self._handle.submit(self._load, hit, range(layer, layer + 1)))
            if layer >= ahead:
                cache = coming.pop(0).result()
                if cache is None:
                    raise LookupError(f"load_layers: layer {layer - ahead} is damaged or gone")
                yield cache[0]

    def _put(self, ids: memoryview, planes: Planes, scope: Scope, put: PutOptions) -> int:
        stored = self._handle.native.put(scope, ids, planes, put)
        self._written(scope, ids, stored, stored < len(ids))
        return stored

    def _put_each(
        self, prefixes: list[tuple[memoryview, Planes]], scope: Scope, put: PutOptions
    ) -> int:
        stored = 0
        for ids, planes in prefixes:
            stored = self._put(ids, planes, scope, put)
        return stored

    def _written(self, scope: Scope, ids: memoryview, stored: int, declined: bool) -> None:
        if (remote := self._handle.remote) is not None:
            remote.offer(self._handle.native, scope, ids, stored)
        self._warn_of_failure(declined)

    def _warn_of_failure(self, declined: bool) -> None:
        handle = self._handle
        if not declined:
            handle.has_warned = False
        elif (failure := self.failure) and not handle.has_warned:  # once until something is stored
            handle.has_warned = True
            warnings.warn(f"KVStore no longer writes: {failure}", RuntimeWarning, stacklevel=4)

    def _put_options(self, ttl: float | None, pin: bool) -> PutOptions:
        return PutOptions(milliseconds(ttl, "ttl"), self._quota, pin)

    @overload
    def put(
        self, tokens: Sequence[int] | Tensor, kv: Sequence[tuple[Tensor, ...]], *,
        context: bytes = b"", ttl: float | None = None, pin: bool = False,
        background: Literal[False] = False,
    ) -> int: ...  # fmt: skip
    @overload
    def put(
        self, tokens: Sequence[int] | Tensor, kv: Sequence[tuple[Tensor, ...]], *,
        context: bytes = b"", ttl: float | None = None, pin: bool = False,
        background: Literal[True],
    ) -> Future[int]: ...  # fmt: skip
    @overload
    def put(
        self, tokens: Sequence[int] | Tensor, kv: Sequence[tuple[Tensor, ...]], *,
        context: bytes = b"", ttl: float | None = None, pin: bool = False,
        background: bool,
    ) -> int | Future[int]: ...  # fmt: skip
    def put(
        self,
        tokens: Sequence[int] | Tensor,
        kv: Sequence[tuple[Tensor, ...]],
        *,
        context: bytes = b"",
        ttl: float | None = None,
        pin: bool = False,
        background: bool = False,
    ) -> int | Future[int]:
        """Store the keys and values of a prefix.

        Writes only tokens that are not stored yet.

        Parameters
        ----------
        tokens
            Token ids, [n].
        kv
            (K, V) of each layer, [num_kv_heads, n, head_size] or [1, num_kv_heads, n, head_size],
            any strides; a layer with a window may have only its last tokens, at least
            window - 1. For a fingerprint with scales (K, V, K's scales, V's scales), scales
            [num_kv_heads, n] or [num_kv_heads, n, 1]. For one with states (state,) after the last
            layer, [state_size] float32: the state after the n tokens.
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
        ids = token_ids(tokens, "put")
        planes = Planes.checked(kv, self.fingerprint, "put")
        scope, options = self._scope(context), self._put_options(ttl, pin)
        if background:
            return self._handle.submit(self._put, ids, planes, scope, options)
        return self._put(ids, planes, scope, options)

    def put_each(
        self, prefixes: Sequence[tuple[Sequence[int] | Tensor, Sequence[tuple[Tensor, ...]]]]
    ) -> Future[int]:
        """Store several prefixes in the background, one after the other.

        Parameters
        ----------
        prefixes
            (tokens, kv) of each, as for ``put``: of one text the shorter ones first, so that
            nothing is written twice. The tensors must not change before it is done.

        Returns
        -------
        Future of int
            How many leading tokens of the last one are stored.
        """
        checked = [
            (token_ids(tokens, "put_each"), Planes.checked(kv, self.fingerprint, "put_each"))
            for tokens, kv in prefixes
        ]
        scope, options = self._scope(b""), self._put_options(None, False)
        return self._handle.submit(self._put_each, checked, scope, options)

    def pin(self, hit: Hit, pinned: bool = True) -> None:
        """Never evict a prefix, or do so again."""
        if hit._native is not None:
            self._handle.native.pin(hit._native, pinned)

    def should_load(self, hit: Hit) -> bool:
        """Whether loading a hit is faster than computing it, by what was measured so far.

        Loads are timed by the store; tell it of prefills with ``record_prefill``.
        """
        fingerprint = self.fingerprint
        num_bytes = hit.num_tokens * fingerprint.num_layers * 2 * fingerprint.token_bytes
        num_bytes += fingerprint.state_bytes
        return self._handle.costs.should_load(hit.num_tokens, num_bytes)

    def record_prefill(self, num_tokens: int, seconds: float) -> None:
        """Record how long the model took to compute a number of tokens."""
        self._handle.costs.observe_prefill(num_tokens, seconds)
