"""Errors of the store. A miss and a full disk are results, not errors."""

from __future__ import annotations

from lmdecode._checks import Error


class StoreError(Error, RuntimeError):
    """The store cannot be used: read-only, closed, or opened by another process."""


class StoreLockedError(StoreError):
    """Another process, or another ``KVStore`` of this one, writes the store."""


class StoreDamagedError(StoreError):
    """Bytes of the index, a session or an exported file differ from the written ones."""


class FingerprintMismatchError(StoreError, ValueError):
    """Made for another model, dtype or layout."""
